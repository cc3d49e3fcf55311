//! Tensors of a drafter checkpoint: names, freezing and loading.

use std::path::Path;

use deepspec_checkpoint::{D2T, DraftVocab, Tensors};
use deepspec_models::nn::{Builder, EmbedHead, StateDict, Weight};
use deepspec_models::{ModelConfig, ModelError, Weights};
use tch::{Device, Kind, Tensor};

const EMBED_KEY: &str = "embed_tokens.weight";
pub(super) const HEAD_KEY: &str = "lm_head.weight";

/// Whether `name` is the embedding or the LM head, which every checkpoint copies from the target.
pub fn is_embed_or_head(name: &str) -> bool {
    name == EMBED_KEY || name == HEAD_KEY
}

/// Embedding, LM head and vocabulary of a drafter.
pub struct Ends {
    /// Embedding of the target, `[V, d]`.
    pub embed_tokens: Tensor,
    /// LM head, `[V, d]`, or `[Vd, d]` with a reduced vocabulary.
    pub lm_head: Weight,
    /// The target's id of each draft id, `[Vd]` int64; None if the drafter can draft all of the target's tokens.
    pub draft_tokens: Option<Tensor>,
}

/// Adds embedding, LM head and the map of a reduced vocabulary to a drafter's tensors.
pub fn with_embed_and_head(
    mut named: StateDict,
    vocabulary: &EmbedHead,
    draft_tokens: Option<&Tensor>,
) -> StateDict {
    named.buffers.push((EMBED_KEY.to_string(), vocabulary.embed_tokens().shallow_clone()));
    if let Some(tokens) = draft_tokens {
        let ids = Tensor::arange(tokens.size()[0], (Kind::Int64, tokens.device()));
        named.buffers.push((D2T.to_string(), tokens - ids));
    }
    match vocabulary.lm_head().share() {
        Weight::Stored(head) => named.buffers.push((HEAD_KEY.to_string(), head)),
        Weight::Packed(head) => named.packed.push((HEAD_KEY.to_string(), head)),
    }
    named
}

/// Freezes parameters by name.
pub fn freeze_parameters(named: &mut StateDict, is_frozen: impl Fn(&str) -> bool) {
    named.buffers.extend(named.parameters.extract_if(.., |(name, _)| is_frozen(name)));
}

/// Folder of a checkpoint, and how its weights are loaded.
pub struct CheckpointSource<'a> {
    /// The folder.
    pub dir: &'a Path,
    /// Class of the drafter, for messages.
    pub architecture: String,
    /// Device of the weights.
    pub device: Device,
    /// Dtype of the weights.
    pub kind: Kind,
    /// Whether the weights are packed for inference.
    pub packs: bool,
}

/// Opens the weights and calls `build` with a builder that reads them, and with embedding and LM head. The head has
/// `draft_vocab_size` rows, or one per token of the target if that is None.
pub fn load_tensors<T>(
    &CheckpointSource { dir, ref architecture, device, kind, packs }: &CheckpointSource,
    model: &ModelConfig,
    draft_vocab_size: Option<i64>,
    build: impl FnOnce(&Builder, Ends) -> T,
) -> Result<T, ModelError> {
    let weights = Weights::open(dir, architecture.as_str(), device, kind)?;
    weights.check_finite()?;
    let rows = |count| [count, model.hidden_size];
    let embed_tokens = weights.get(EMBED_KEY, &rows(model.vocab_size))?;
    let head = weights.get(HEAD_KEY, &rows(draft_vocab_size.unwrap_or(model.vocab_size)))?;
    let draft_tokens = match draft_vocab_size {
        Some(size) => {
            let offsets = weights.get(D2T, &[size])?;
            DraftVocab::of_tensors(&Tensors::open(dir)?, model.vocab_size as usize)?;
            Some(offsets + Tensor::arange(size, (Kind::Int64, device)))
        }
        None => None,
    };
    let (b, head) = (Builder::from_checkpoint(&weights), Weight::Stored(head));
    let (b, lm_head) = if packs { (b.with_packing(), head.pack()) } else { (b, head) };
    let drafter = build(&b, Ends { embed_tokens, lm_head, draft_tokens });
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
