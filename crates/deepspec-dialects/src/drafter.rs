//! What a drafter is, whichever dialect says it.

use deepspec_core::Tap;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::Dialect;
use crate::families::{FAMILIES, Family};
use crate::kinds::Settings;

/// Something that only this checkpoint's own dialect can say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Obstacle {
    /// The key, or the tensor, that says it.
    pub key: String,
    /// Why it stops a conversion.
    pub reason: String,
}

/// A drafter as its checkpoint describes it.
#[derive(Debug, Clone)]
pub struct Drafter {
    /// The class that the config names.
    pub architecture: String,
    /// Its layers' family.
    pub family: Family,
    /// The decoder's own config keys, `num_hidden_layers` being the draft layers.
    pub decoder: Map<String, Value>,
    /// d.
    pub hidden_size: u64,
    /// V, tokens of the target.
    pub vocab_size: u64,
    /// Tokens that it can draft, fewer than V where the vocabulary is pruned.
    pub draft_vocab_size: u64,
    /// Draft layers.
    pub layers: u64,
    /// Where it taps the target.
    pub taps: Vec<Tap>,
    /// Layers of the target, where the config tells.
    pub num_target_layers: Option<u64>,
    /// Its kind, and the settings that only this kind has.
    pub kind: Settings,
    /// Keys that only inform, such as `num_anchors`.
    pub notes: Map<String, Value>,
    /// What stops a conversion to any other dialect.
    pub obstacles: Vec<Obstacle>,
}

/// Keys that inform about training and change nothing else.
pub const NOTES: [&str; 2] = ["num_anchors", "step_loss_decay"];

impl Drafter {
    /// The layer ids as speculators and vLLM count them: the embedding's output is 0.
    pub fn aux_layer_ids(&self) -> Vec<i64> {
        self.taps.iter().map(|tap| tap.layer_id() + 1).collect()
    }

    /// Why this drafter cannot be said in `to`; `own` is its dialect. None if it can.
    pub fn refusal(&self, own: Dialect, to: Dialect) -> Option<String> {
        if own == to {
            return Some(format!("it is a checkpoint of {own} already"));
        }
        self.refusal_anywhere().or_else(|| self.kind.refusal(self, to))
    }

    /// Why this drafter can be said in no layout but its own, if so.
    pub(crate) fn refusal_anywhere(&self) -> Option<String> {
        if let Some(Obstacle { key, reason }) = self.obstacles.first() {
            return Some(format!("`{key}`: {reason}"));
        }
        if !self.kind.has_layers_of(self.family) {
            let family = self.family;
            let known = FAMILIES.into_iter().filter(|known| self.kind.has_layers_of(known));
            let known = known.map(|family| family.name).collect::<Vec<_>>().join(" and ");
            return Some(format!(
                "its layers are {family}'s; only {known} draft layers mean the same in all dialects"
            ));
        }
        if let (Some(layers), Some(tap)) =
            (self.num_target_layers, self.taps.iter().find(|&&tap| self.is_edge(tap)))
        {
            let last = layers.saturating_sub(2);
            return Some(format!(
                "layer id {} is outside of 0 to {last}: tools differ in what they hand out for the embedding and the \
                 last of {layers} layers (before or after the final norm)",
                tap.layer_id()
            ));
        }
        None
    }

    /// Whether this layer's state is not the same for all tools.
    fn is_edge(&self, tap: Tap) -> bool {
        tap == Tap::Embedding
            || self.num_target_layers.is_some_and(|layers| tap.layer_id() + 1 >= layers as i64)
    }
}
