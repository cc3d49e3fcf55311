//! A drafter's tensors: what is trained, what is frozen, and how they are read.

use std::path::Path;

use deepspec_models::nn::{Builder, Named, Vocabulary, Weight};
use deepspec_models::{ModelConfig, ModelError, Weights};
use deepspec_native::PackedWeight;
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
    /// Weights that are packed to decode with; they are in neither other list.
    packed: Vec<(String, PackedWeight)>,
}

impl Tensors {
    /// What a builder handed out, and the target's embedding and head.
    pub fn new(named: Named, vocabulary: &Vocabulary) -> Self {
        let Named { parameters, buffers: mut frozen, mut packed } = named;
        frozen.push((EMBED.to_string(), vocabulary.embed_tokens().shallow_clone()));
        match vocabulary.lm_head().share() {
            Weight::Stored(head) => frozen.push((HEAD.to_string(), head)),
            Weight::Packed(head) => packed.push((HEAD.to_string(), head)),
        }
        Self { parameters, frozen, packed }
    }

    /// Keeps parameters as they are whose names begin like this.
    pub fn freeze(&mut self, prefixes: &[&str]) {
        let is_frozen =
            |(name, _): &mut (String, Tensor)| prefixes.iter().any(|prefix| name.starts_with(prefix));
        self.frozen.extend(self.parameters.extract_if(.., is_frozen));
    }

    /// Everything that a checkpoint holds; copies of what is packed.
    pub fn all(&self) -> Vec<(String, Tensor)> {
        let Named { parameters, buffers, .. } = self.shared();
        let unpacked = self.packed.iter().map(|(name, weight)| (name.clone(), weight.unpacked()));
        parameters.into_iter().chain(buffers).chain(unpacked).collect()
    }

    /// The same tensors for another model, not copied.
    pub fn shared(&self) -> Named {
        let share = |of: &[(String, Tensor)]| {
            of.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
        };
        let packed = self.packed.iter().map(|(name, weight)| (name.clone(), weight.share())).collect();
        Named { parameters: share(&self.parameters), buffers: share(&self.frozen), packed }
    }
}

/// Reads the drafter in `dir`, packed or not: `build` asks for its tensors by name, beside its embedding and head.
///
/// # Errors
/// If a tensor is missing, misshapen, or of no use to the config.
pub fn load<T>(
    dir: &Path,
    architecture: String,
    model: &ModelConfig,
    (kind, device): (Kind, Device),
    packs: bool,
    build: impl FnOnce(Builder, Tensor, Weight) -> Result<T, ModelError>,
) -> Result<T, ModelError> {
    let weights = Weights::open(dir, architecture, device, kind)?;
    let shape = [model.vocab_size, model.hidden_size];
    let (embed, head) = (weights.get(EMBED, &shape)?, weights.get(HEAD, &shape)?);
    let (b, head) = (Builder::from_checkpoint(&weights), Weight::Stored(head));
    let drafter = if packs { build(b.packing(), embed, head.packed())? } else { build(b, embed, head)? };
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
