//! A drafter's tensors: what is trained, what is frozen, and how they are read.

use std::path::Path;

use deepspec_models::nn::{Builder, Named, Vocabulary, laid_out_for_few_rows};
use deepspec_models::{ModelConfig, ModelError, Weights};
use tch::{Device, Kind, Tensor};

const EMBED: &str = "embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Whether this is the target's embedding or head, of which every checkpoint holds a copy.
pub fn is_embed_or_head(name: &str) -> bool {
    name == EMBED || name == HEAD
}

/// The tensors of a checkpoint by name, sharing storage with the model.
pub struct Tensors {
    /// Those that are trained.
    pub parameters: Vec<(String, Tensor)>,
    frozen: Vec<(String, Tensor)>,
}

impl Tensors {
    /// What a builder handed out, and the target's embedding and head.
    pub fn new(named: Named, vocabulary: &Vocabulary) -> Self {
        let ends = [(EMBED, vocabulary.embed_tokens()), (HEAD, vocabulary.lm_head())];
        let ends = ends.map(|(name, tensor)| (name.to_string(), tensor.shallow_clone()));
        Self { parameters: named.parameters, frozen: named.buffers.into_iter().chain(ends).collect() }
    }

    /// Keeps parameters as they are whose names begin like this.
    pub fn freeze(&mut self, prefixes: &[&str]) {
        let is_frozen =
            |(name, _): &mut (String, Tensor)| prefixes.iter().any(|prefix| name.starts_with(prefix));
        self.frozen.extend(self.parameters.extract_if(.., is_frozen));
    }

    /// Everything that a checkpoint holds.
    pub fn all(&self) -> Vec<(String, Tensor)> {
        let share = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
        self.parameters.iter().chain(&self.frozen).map(share).collect()
    }
}

/// Reads the drafter in `dir`: `build` asks for its tensors by name, beside its embedding and head.
///
/// # Errors
/// If a tensor is missing, misshapen, or of no use to the config.
pub fn load<T>(
    dir: &Path,
    architecture: String,
    model: &ModelConfig,
    (kind, device): (Kind, Device),
    build: impl FnOnce(Builder, Tensor, Tensor) -> Result<T, ModelError>,
) -> Result<T, ModelError> {
    let weights = Weights::open(dir, architecture, device, kind)?;
    let shape = [model.vocab_size, model.hidden_size];
    let (embed, head) = (weights.get(EMBED, &shape)?, weights.get(HEAD, &shape)?);
    let drafter = build(Builder::from_checkpoint(&weights), embed, laid_out_for_few_rows(head))?;
    let unread = weights.unread();
    if unread.is_empty() {
        return Ok(drafter);
    }
    let problem = format!(
        "the config has no use for the tensors {}; config.json and weights do not belong together",
        unread.join(", ")
    );
    Err(ModelError::NotAModel { path: dir.to_path_buf(), problem })
}
