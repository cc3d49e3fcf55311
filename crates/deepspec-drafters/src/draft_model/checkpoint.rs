//! Tensors of a drafter: trained, frozen and loaded.

use std::path::Path;

use deepspec_models::nn::{Builder, EmbedHead, StateDict, Weight};
use deepspec_models::{ModelConfig, ModelError, Weights};
use tch::{Device, Kind, Tensor};

const EMBED: &str = "embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Whether this is the embedding or the head, which every checkpoint copies from the target.
pub fn is_embed_or_head(name: &str) -> bool {
    name == EMBED || name == HEAD
}

/// All tensors of a checkpoint: those of a builder, and the target's embedding and head.
pub fn with_embed_and_head(mut named: StateDict, vocabulary: &EmbedHead) -> StateDict {
    named.buffers.push((EMBED.to_string(), vocabulary.embed_tokens().shallow_clone()));
    match vocabulary.lm_head().share() {
        Weight::Stored(head) => named.buffers.push((HEAD.to_string(), head)),
        Weight::Packed(head) => named.packed.push((HEAD.to_string(), head)),
    }
    named
}

/// Freezes parameters whose names have one of these prefixes.
pub fn freeze(named: &mut StateDict, prefixes: &[&str]) {
    let is_frozen = |(name, _): &mut (String, Tensor)| prefixes.iter().any(|prefix| name.starts_with(prefix));
    named.buffers.extend(named.parameters.extract_if(.., is_frozen));
}

/// Loads the drafter in `dir`, packed or not; `build` asks for its tensors by name, beside embedding and head.
///
/// # Errors
/// If a tensor is missing, misshapen, not finite, or of no use to the config.
pub fn load<T>(
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
    let (embed, head) = (weights.get(EMBED, &shape)?, weights.get(HEAD, &shape)?);
    let (b, head) = (Builder::from_checkpoint(&weights), Weight::Stored(head));
    let (b, head) = if packs { (b.packing(), head.packed()) } else { (b, head) };
    let drafter = build(&b, embed, head);
    b.check()?;
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
