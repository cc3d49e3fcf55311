//! Parts of Eagle3's network that P-EAGLE shares: norms around `fc`, and the reduced vocabulary.
//!
//! Shapes: N rows, d hidden size, m captured layers.

use std::path::Path;

use deepspec_checkpoint::{CheckpointError, DraftVocab, Fields};
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, RmsNorm};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::Tensor;

use crate::ConfigIssue;

/// Norms that variants of Eagle3 have and the original lacks. The keys of config.json are those of speculators and vLLM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Eagle3Norms {
    /// The first layer adds attention's output to the normed state instead of the state (`norm_before_residual`).
    pub before_residual: bool,
    /// One norm of all captured hidden states of a token before `fc` (`norm_before_fc`).
    pub before_fc: bool,
    /// A norm of each captured hidden state before `fc` (`fc_norm`).
    pub fc: bool,
    /// The drafter reads its own states after the final norm (`norm_output`), which keeps their size equal over the steps.
    pub output: bool,
}

impl Eagle3Norms {
    /// Whether there are only the norms of the original.
    pub fn is_original(&self) -> bool {
        *self == Self::default()
    }

    /// The flags by their keys in config.json.
    pub(crate) fn flags(self) -> [(&'static str, bool); 4] {
        [
            ("norm_before_residual", self.before_residual),
            ("norm_before_fc", self.before_fc),
            ("fc_norm", self.fc),
            ("norm_output", self.output),
        ]
    }

    /// Keys of the norms that are set.
    pub(crate) fn set_keys(self) -> String {
        let keys = self.flags().into_iter().filter_map(|(key, is_set)| is_set.then_some(key));
        keys.collect::<Vec<_>>().join(", ")
    }

    /// Reads the flags; an absent one is false.
    pub(crate) fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        let flag = |key| Ok::<_, CheckpointError>(fields.flag(key)?.unwrap_or(false));
        let [before_residual, before_fc, fc, output] = Self::default().flags().map(|(key, _)| flag(key));
        Ok(Self { before_residual: before_residual?, before_fc: before_fc?, fc: fc?, output: output? })
    }

    /// The two norms before `fc` exclude each other.
    pub(crate) fn check(self) -> Result<(), ConfigIssue> {
        match self.before_fc && self.fc {
            true => Err(("fc_norm", "true, and norm_before_fc too; only one of them may be".into())),
            false => Ok(()),
        }
    }
}

/// Norms of captured hidden states before `fc`: one of all of them, one per captured layer, or none. See [`Eagle3Norms`].
pub struct FusionNorms(Vec<RmsNorm>);

impl FusionNorms {
    /// Requests the parameters of the norms of `taps` captured layers from the builder.
    pub fn new(b: &Builder, norms: Eagle3Norms, taps: usize, model: &ModelConfig) -> Self {
        let width = model.hidden_size;
        let norm = |name: &str, width| RmsNorm::new(b, name, width, model.rms_norm_eps);
        Self(match norms {
            Eagle3Norms { before_fc: true, .. } => vec![norm("input_norm", taps as i64 * width)],
            Eagle3Norms { fc: true, .. } => (0..taps).map(|i| norm(&format!("fc_norm.{i}"), width)).collect(),
            _ => vec![],
        })
    }

    /// Norms captured hidden states `[N, m·d]`.
    pub fn forward(&self, captured: &Tensor) -> Tensor {
        if self.0.is_empty() {
            return captured.shallow_clone();
        }
        let chunks = captured.chunk(self.0.len() as i64, -1);
        let normed: Vec<Tensor> =
            self.0.iter().zip(&chunks).map(|(norm, chunk)| norm.forward(chunk)).collect();
        Tensor::cat(&normed, -1)
    }
}

/// Writes `draft_vocab_size` and the flags of the norms, where they differ from their defaults.
pub fn write_vocab_and_norms(
    map: &mut Map<String, Value>,
    draft_vocab_size: Option<i64>,
    norms: Eagle3Norms,
) {
    map.remove("draft_vocab_size");
    if let Some(size) = draft_vocab_size {
        map.insert("draft_vocab_size".into(), json!(size));
    }
    for (key, is_set) in norms.flags() {
        map.remove(key);
        if is_set {
            map.insert(key.into(), json!(true));
        }
    }
}

/// Reads the file of a reduced vocabulary. An error names the recipe's key.
pub fn read_draft_vocab(path: &Path, target: &ModelConfig) -> Result<DraftVocab, ConfigIssue> {
    let vocab = DraftVocab::read(path).map_err(|error| {
        let remedy = if path.exists() { "" } else { "; `deepspec-data draft-vocab` writes this file" };
        ("draft_vocab", format!("{error}{remedy}"))
    })?;
    if vocab.vocab_size() as i64 != target.vocab_size {
        let (found, expected) = (vocab.vocab_size(), target.vocab_size);
        let problem = format!("{}: it is for {found} tokens, the target has {expected}", path.display());
        return Err(("draft_vocab", problem));
    }
    if vocab.tokens().len() == vocab.vocab_size() {
        let problem =
            format!("{}: it holds all of the target's tokens; leave draft_vocab out", path.display());
        return Err(("draft_vocab", problem));
    }
    Ok(vocab)
}
