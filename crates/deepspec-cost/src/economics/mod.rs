//! What a speculated token costs on an accelerator: a roofline of each part of a layer, for dense and mixture-of-experts targets with full,
//! grouped, latent and compressed attention. After "The economics of speculative decoding" (F. Finn, June 2026), whose published figures
//! are this module's tests.
//!
//! A part that computes F operations on M bytes takes max(F / peak, M / bandwidth) seconds: parts do not overlap. A step verifies
//! q = γ + 1 tokens of each of B requests behind contexts of S tokens, t = B·q tokens in all.

mod hardware;
mod parts;

use serde::{Deserialize, Serialize};

pub use hardware::{HARDWARE, Hardware, Precision};
pub use parts::{
    Attention, FeedForward, Work, expanding_pays_from, experts_touched, experts_touched_by_another,
};

/// A target, one kind of layer after the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Kinds of layers.
    pub layers: Vec<Layer>,
    /// Weights of the output head; 0 leaves it out.
    #[serde(default)]
    pub head: f64,
    /// What the head is stored as.
    #[serde(default = "bf16")]
    pub head_precision: Precision,
    /// Width of the states that are sent between accelerators.
    #[serde(default)]
    pub hidden: f64,
    /// Accelerators over which experts are spread, and over which requests are divided for everything else.
    #[serde(default = "one")]
    pub expert_parallel: f64,
}

/// Layers that are alike.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// How many.
    pub count: f64,
    /// Weights of the projections around attention.
    pub projections: f64,
    /// What they are stored as.
    pub projection_precision: Precision,
    /// What attention does.
    pub attention: Attention,
    /// The feed-forward part.
    pub feed_forward: FeedForward,
    /// What its weights are stored as.
    pub feed_forward_precision: Precision,
}

fn bf16() -> Precision {
    Precision::Bf16
}

/// What drafting costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Draft {
    /// So much of a plain step for each drafted token, as drafters cost that run once per token.
    PerToken(f64),
    /// Weights that are read once for a whole block, as a parallel backbone's are.
    PerBlock {
        /// Weights.
        weights: f64,
        /// What they are stored as.
        precision: Precision,
    },
    /// A drafter of which the layers are known, by its own roofline, attention to the context included.
    Model {
        /// Its layers and head.
        model: Target,
        /// Whether a whole block goes through it at once, or one token after the other.
        at_once: bool,
    },
}

/// A place of the map.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// B.
    pub requests: f64,
    /// S.
    pub context: f64,
    /// α.
    pub acceptance: f64,
}

impl Target {
    /// Seconds of a step that verifies q tokens of each of B requests behind S tokens.
    pub fn step_seconds(&self, hardware: &Hardware, requests: f64, queries: f64, context: f64) -> f64 {
        let tokens = requests * queries;
        let share = 1.0 / self.expert_parallel;
        let layers = self.layers.iter().map(|layer| {
            let (projections, experts) = (layer.projection_precision, layer.feed_forward_precision);
            let projected = Work {
                operations: 2.0 * layer.projections * tokens * share,
                bytes: layer.projections * projections.bytes(),
            };
            let attended = layer.attention.work(queries, context).seconds(hardware.bf16, hardware.bandwidth);
            let fed = layer.feed_forward.work_of_one(tokens, experts.bytes(), self.expert_parallel);
            let sent = match layer.feed_forward {
                // Out to the experts and back, 16 bits each; what stays is not sent.
                FeedForward::Experts { active, .. } => {
                    2.0 * 2.0 * tokens * share * active * self.hidden * (1.0 - share) / hardware.link
                }
                FeedForward::Dense { .. } => 0.0,
            };
            layer.count
                * (projected.seconds(projections.peak(hardware), hardware.bandwidth)
                    + requests * share * attended
                    + fed.seconds(experts.peak(hardware), hardware.bandwidth)
                    + sent)
        });
        let head = Work {
            operations: 2.0 * self.head * tokens * share,
            bytes: self.head * self.head_precision.bytes(),
        };
        layers.sum::<f64>() + head.seconds(self.head_precision.peak(hardware), hardware.bandwidth)
    }

    /// Seconds of drafting γ tokens for each of B requests.
    pub fn draft_seconds(
        &self,
        hardware: &Hardware,
        draft: &Draft,
        requests: f64,
        drafted: f64,
        context: f64,
    ) -> f64 {
        // Every accelerator drafts for its own requests.
        let own = requests / self.expert_parallel;
        match draft {
            _ if drafted == 0.0 => 0.0,
            Draft::PerToken(share) => share * drafted * self.step_seconds(hardware, requests, 1.0, context),
            Draft::PerBlock { weights, precision } => {
                let work =
                    Work { operations: 2.0 * weights * own * drafted, bytes: weights * precision.bytes() };
                work.seconds(precision.peak(hardware), hardware.bandwidth)
            }
            Draft::Model { model, at_once: true } => model.step_seconds(hardware, own, drafted, context),
            Draft::Model { model, at_once: false } => {
                drafted * model.step_seconds(hardware, own, 1.0, context)
            }
        }
    }

    /// Throughput with blocks of γ tokens, each accepted with probability α given those before, over that of plain decoding.
    pub fn speed_up(&self, hardware: &Hardware, draft: &Draft, load: Load, drafted: f64) -> f64 {
        let plain = self.step_seconds(hardware, load.requests, 1.0, load.context);
        let verified = self.step_seconds(hardware, load.requests, drafted + 1.0, load.context);
        let drafting = self.draft_seconds(hardware, draft, load.requests, drafted, load.context);
        committed(load.acceptance, drafted) * plain / (verified + drafting)
    }

    /// The number of drafted tokens, 0 to `most`, that is fastest, and its speed-up.
    pub fn best_length(&self, hardware: &Hardware, draft: &Draft, load: Load, most: u32) -> (u32, f64) {
        let all =
            (0..=most).map(|drafted| (drafted, self.speed_up(hardware, draft, load, f64::from(drafted))));
        all.fold((0, 1.0), |best, of| if of.1 > best.1 { of } else { best })
    }

    /// Time that one more verified token per request adds, over that request's share of a plain step: 0 where it is free, 1 where it costs
    /// as much as a token of plain decoding.
    pub fn marginal(&self, hardware: &Hardware, load: Load, queries: f64) -> f64 {
        let of = |queries| self.step_seconds(hardware, load.requests, queries, load.context);
        (of(queries + 1.0) - of(queries)) / of(1.0)
    }
}

/// N(α, γ) = (1 − α^{γ+1}) / (1 − α): tokens that a cycle commits.
pub fn committed(acceptance: f64, drafted: f64) -> f64 {
    if acceptance >= 1.0 {
        return drafted + 1.0;
    }
    (1.0 - acceptance.powf(drafted + 1.0)) / (1.0 - acceptance)
}

impl Target {
    /// What is no target about it: the key, what it is, and what it has to be.
    pub fn problem(&self) -> Option<String> {
        if self.layers.is_empty() {
            return Some("`layers` is empty; describe one kind of layer at least".into());
        }
        let sizes = [("head", self.head), ("hidden", self.hidden)];
        let of_target = wrong(&sizes, |value| value.is_finite() && value >= 0.0, "a number of at least 0")
            .or(wrong(
                &[("expert_parallel", self.expert_parallel)],
                |n| n >= 1.0 && n.is_finite(),
                "at least 1",
            ));
        let of_layers = self.layers.iter().enumerate().find_map(|(index, layer)| {
            layer.problem().map(|problem| format!("`layers[{index}]`: {problem}"))
        });
        of_target.or(of_layers)
    }
}

impl Layer {
    fn problem(&self) -> Option<String> {
        let sizes = [("count", self.count), ("projections", self.projections)];
        wrong(&sizes, positive, "a positive number")
            .or_else(|| self.attention.problem())
            .or_else(|| self.feed_forward.problem())
    }
}

fn positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

fn at_least_0(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

fn wrong(values: &[(&str, f64)], holds: impl Fn(f64) -> bool, expected: &str) -> Option<String> {
    let (key, value) = values.iter().find(|(_, value)| !holds(*value))?;
    Some(format!("`{key}` is {value}; expected {expected}"))
}

fn endless() -> f64 {
    f64::INFINITY
}

fn one() -> f64 {
    1.0
}

#[cfg(test)]
mod tests;
