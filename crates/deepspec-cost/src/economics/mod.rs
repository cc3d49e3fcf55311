//! Roofline model of the cost of a speculated token on an accelerator, by parts of a layer. It
//! covers dense and mixture-of-experts targets with full, grouped, latent, compressed and linear attention.
//! It follows "The economics of speculative decoding" (F. Finn, June 2026), whose published figures
//! are this module's tests.
//!
//! A part with F operations on M bytes takes max(F / peak, M / bandwidth) seconds, and parts do not
//! overlap. A step verifies q = γ + 1 tokens for each of B requests at contexts of S tokens, t =
//! B·q tokens in all.

mod hardware;
mod parts;

use serde::{Deserialize, Serialize};

pub use hardware::{ACCELERATORS, Hardware, Precision, accelerator_memory};
pub use parts::{
    Attention, FeedForward, Work, experts_touched, experts_touched_by_another, mla_expansion_break_even,
};

/// A target model, as a list of layer shapes with their counts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Layers, one entry per shape.
    pub layers: Vec<Layer>,
    /// Weights of the LM head; 0 leaves it out.
    #[serde(default)]
    pub head: f64,
    /// Storage format of the LM head.
    #[serde(default = "default_precision")]
    pub head_precision: Precision,
    /// Width of the hidden states that are sent between accelerators.
    #[serde(default)]
    pub hidden: f64,
    /// Number of accelerators that the experts are spread over. All other work is data-parallel
    /// over requests.
    #[serde(default = "one")]
    pub expert_parallel: f64,
}

/// Layers of equal shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// Number of layers.
    pub count: f64,
    /// Weights of the projections around attention.
    pub projections: f64,
    /// Storage format of the projections.
    pub projection_precision: Precision,
    /// Attention of the layers.
    pub attention: Attention,
    /// Feed-forward part of the layers.
    pub feed_forward: FeedForward,
    /// Storage format of the feed-forward weights.
    pub feed_forward_precision: Precision,
}

fn default_precision() -> Precision {
    Precision::Bf16
}

/// Cost of drafting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DraftCost {
    /// Cost per drafted token as a share of a plain step, for drafters that run once per token.
    PerToken(f64),
    /// Weights that are read once per block, for parallel drafters.
    PerBlock {
        /// Number of weights.
        weights: f64,
        /// Storage format of the weights.
        precision: Precision,
    },
    /// A drafter with known layers, by its own roofline, including attention to the context.
    Model {
        /// Layers and head of the drafter.
        model: Target,
        /// Whether a whole block runs through the drafter at once, or one token after the other.
        at_once: bool,
    },
}

/// Load at which the cost of speculation is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadPoint {
    /// Number of requests B.
    pub requests: f64,
    /// Context length S in tokens.
    pub context: f64,
    /// Acceptance probability α.
    pub acceptance: f64,
}

impl Target {
    /// Seconds of a step that verifies q tokens for each of B requests at a context of S tokens.
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
            let fed = layer.feed_forward.work_per_device(tokens, experts.bytes(), self.expert_parallel);
            let sent = match layer.feed_forward {
                // Hidden states go to the experts and back in 16 bits; hidden states for local experts are not sent.
                FeedForward::Experts { active, .. } => {
                    2.0 * 2.0 * tokens * share * active * self.hidden * (1.0 - share) / hardware.link
                }
                FeedForward::Dense { .. } => 0.0,
            };
            layer.count
                * (projected.seconds(projections.peak_operations(hardware), hardware.bandwidth)
                    + requests * share * attended
                    + fed.seconds(experts.peak_operations(hardware), hardware.bandwidth)
                    + sent)
        });
        let head = Work {
            operations: 2.0 * self.head * tokens * share,
            bytes: self.head * self.head_precision.bytes(),
        };
        layers.sum::<f64>() + head.seconds(self.head_precision.peak_operations(hardware), hardware.bandwidth)
    }

    /// Seconds of drafting γ tokens for each of B requests.
    pub fn draft_seconds(
        &self,
        hardware: &Hardware,
        draft: &DraftCost,
        requests: f64,
        drafted: f64,
        context: f64,
    ) -> f64 {
        // Every accelerator drafts for its share of the requests.
        let own = requests / self.expert_parallel;
        match draft {
            _ if drafted == 0.0 => 0.0,
            DraftCost::PerToken(share) => {
                share * drafted * self.step_seconds(hardware, requests, 1.0, context)
            }
            DraftCost::PerBlock { weights, precision } => {
                let work =
                    Work { operations: 2.0 * weights * own * drafted, bytes: weights * precision.bytes() };
                work.seconds(precision.peak_operations(hardware), hardware.bandwidth)
            }
            DraftCost::Model { model, at_once: true } => model.step_seconds(hardware, own, drafted, context),
            DraftCost::Model { model, at_once: false } => {
                drafted * model.step_seconds(hardware, own, 1.0, context)
            }
        }
    }

    /// Throughput divided by the throughput of plain decoding, with blocks of γ tokens that are each accepted with
    /// probability α given the earlier ones.
    pub fn speed_up(&self, hardware: &Hardware, draft: &DraftCost, load: LoadPoint, drafted: f64) -> f64 {
        let plain = self.step_seconds(hardware, load.requests, 1.0, load.context);
        let verified = self.step_seconds(hardware, load.requests, drafted + 1.0, load.context);
        let drafting = self.draft_seconds(hardware, draft, load.requests, drafted, load.context);
        expected_committed_tokens(load.acceptance, drafted) * plain / (verified + drafting)
    }

    /// The number of drafted tokens from 0 to `max_drafted` with the highest throughput, and its speed-up.
    pub fn best_draft_length(
        &self,
        hardware: &Hardware,
        draft: &DraftCost,
        load: LoadPoint,
        max_drafted: u32,
    ) -> (u32, f64) {
        let all = (0..=max_drafted)
            .map(|drafted| (drafted, self.speed_up(hardware, draft, load, f64::from(drafted))));
        all.fold((0, 1.0), |best, of| if of.1 > best.1 { of } else { best })
    }

    /// Time of one more verified token per request, divided by a request's share of a plain step. It is 0 if the token
    /// is free, and 1 if it costs as much as a token of plain decoding.
    pub fn marginal_cost(&self, hardware: &Hardware, load: LoadPoint, queries: f64) -> f64 {
        let of = |queries| self.step_seconds(hardware, load.requests, queries, load.context);
        (of(queries + 1.0) - of(queries)) / of(1.0)
    }
}

/// Mean number of tokens that a cycle commits: N(α, γ) = (1 − α^{γ+1}) / (1 − α).
pub fn expected_committed_tokens(acceptance: f64, drafted: f64) -> f64 {
    if acceptance >= 1.0 {
        return drafted + 1.0;
    }
    (1.0 - acceptance.powf(drafted + 1.0)) / (1.0 - acceptance)
}

impl Target {
    /// The first invalid value: its key, the value, and the expected range.
    pub fn describe_invalid_value(&self) -> Option<String> {
        if self.layers.is_empty() {
            return Some("`layers` is empty; describe one kind of layer at least".into());
        }
        let sizes = [("head", self.head), ("hidden", self.hidden)];
        let of_target = describe_invalid_value(
            &sizes,
            |value| value.is_finite() && value >= 0.0,
            "a number of at least 0",
        )
        .or(describe_invalid_value(
            &[("expert_parallel", self.expert_parallel)],
            |n| n >= 1.0 && n.is_finite(),
            "at least 1",
        ));
        let of_layers = self.layers.iter().enumerate().find_map(|(index, layer)| {
            layer.describe_invalid_value().map(|problem| format!("`layers[{index}]`: {problem}"))
        });
        of_target.or(of_layers)
    }
}

impl Layer {
    fn describe_invalid_value(&self) -> Option<String> {
        let sizes = [("count", self.count), ("projections", self.projections)];
        describe_invalid_value(&sizes, is_positive_number, "a positive number")
            .or_else(|| self.attention.describe_invalid_value())
            .or_else(|| self.feed_forward.describe_invalid_value())
    }
}

fn is_positive_number(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

fn is_non_negative(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

fn describe_invalid_value(
    values: &[(&str, f64)],
    holds: impl Fn(f64) -> bool,
    expected: &str,
) -> Option<String> {
    let (key, value) = values.iter().find(|(_, value)| !holds(*value))?;
    Some(format!("`{key}` is {value}; expected {expected}"))
}

fn infinite() -> f64 {
    f64::INFINITY
}

fn one() -> f64 {
    1.0
}

#[cfg(test)]
mod tests;
