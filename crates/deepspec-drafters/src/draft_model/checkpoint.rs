//! Tensors of a drafter checkpoint: names, freezing and loading.

use std::path::Path;

use deepspec_models::nn::{Builder, EmbedHead, StateDict, Weight};
use deepspec_models::{ModelConfig, ModelError, Weights};
use tch::{Device, Kind, Tensor};

const EMBED_KEY: &str = "embed_tokens.weight";
const HEAD_KEY: &str = "lm_head.weight";

/// Whether `name` is the embedding or the LM head, which every checkpoint copies from the target.
pub fn is_embed_or_head(name: &str) -> bool {
    name == EMBED_KEY || name == HEAD_KEY
}

/// Adds the target's embedding and LM head to a drafter's tensors.
pub fn with_embed_and_head(mut named: StateDict, vocabulary: &EmbedHead) -> StateDict {
    named.buffers.push((EMBED_KEY.to_string(), vocabulary.embed_tokens().shallow_clone()));
    match vocabulary.lm_head().share() {
        Weight::Stored(head) => named.buffers.push((HEAD_KEY.to_string(), head)),
        Weight::Packed(head) => named.packed.push((HEAD_KEY.to_string(), head)),
    }
    named
}

/// Freezes parameters whose names have one of these prefixes.
pub fn freeze_parameters(named: &mut StateDict, prefixes: &[&str]) {
    let is_frozen = |(name, _): &mut (String, Tensor)| prefixes.iter().any(|prefix| name.starts_with(prefix));
    named.buffers.extend(named.parameters.extract_if(.., is_frozen));
}

/// Opens the weights in `dir` and calls `build` with a builder that reads them, the embedding and the LM head.
pub fn load_tensors<T>(
    dir: &Path,
    architecture: String,
    model: &ModelConfig,
    (kind, device): (Kind, Device),
    packs: bool,
    build: impl FnOnce(&Builder, Tensor, Weight) -> T,
) -> Result<T, ModelError> {
    let weights = Weights::open(dir, architecture, device, kind)?;
    weights.check_finite()?;
    let shape = [model.vocab_size, model.hidden_size];
    let (embed, head) = (weights.get(EMBED_KEY, &shape)?, weights.get(HEAD_KEY, &shape)?);
    let (b, head) = (Builder::from_checkpoint(&weights), Weight::Stored(head));
    let (b, head) = if packs { (b.with_packing(), head.pack()) } else { (b, head) };
    let drafter = build(&b, embed, head);
    b.check()?;
    let unread = weights.unread_names();
    if unread.is_empty() {
        return Ok(drafter);
    }
    let problem = format!(
        "the config has no use for the tensors {}; config.json and weights do not belong together",
        unread.join(", ")
    );
    Err(ModelError::NotAModel { path: dir.to_path_buf(), problem })
}
