//! Scores a drafter's acceptance on answers of the target, teacher-forced.
//!
//! Shapes: A blocks, γ slots, R rows, V vocabulary.

use std::path::Path;

use deepspec_core::cli::UsageError;
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{DrafterOptions, DrafterOverrides, DrafterProbe, Predictions, TrainSample};
use deepspec_engine::Target;
use deepspec_models::{ModelConfig, ModelError, TargetModel};
use serde::Serialize;
use tch::{Kind, Tensor};

use super::DeviceAndDtype;
use super::capture::{CapturedAnswer, CapturedStates};

/// Rows whose distributions are in memory at once.
const ROWS_PER_CHUNK: i64 = 256;
/// Maximum number of blocks per answer.
const MAX_ANCHORS: usize = 12;
/// Sampling temperatures below this mean greedy decoding.
const GREEDY_BELOW: f64 = 1e-5;
/// Number of parts that the answers are split into, for the jackknife error.
const JACKKNIFE_PARTS: usize = 8;

/// One change to how the drafter reads its inputs.
#[derive(Debug, Clone, PartialEq)]
pub enum DrafterChange {
    /// No change.
    None,
    /// The drafter reads the hidden states of these layers instead.
    Taps(Vec<Tap>),
    /// The last layer's hidden state is read after the final norm.
    FinalNorm,
    /// The drafter uses this mask token instead.
    Mask(i64),
    /// The slots predict tokens by this convention instead.
    Slots(SlotTarget),
    /// The slots of a block see only those before them, or, if false, each other.
    Causal(bool),
    /// The drafter uses the target's RoPE settings.
    Rope,
    /// The drafter uses the target's embedding and LM head.
    EmbedAndHead,
}

/// Sums over the answers of one part, by position.
#[derive(Debug, Clone, Default)]
struct PartSums {
    /// Number of rows.
    rows: Vec<f64>,
    /// Sum of the acceptances at the requested temperature.
    accept: Vec<f64>,
    /// Sum of Σ min(p^d, p^t) at temperature 1, which every change of the drafter affects, unlike
    /// the argmax.
    overlap: Vec<f64>,
    /// Sum of the confidences over all positions, if the drafter has a confidence head.
    confidence: Option<f64>,
}

impl PartSums {
    /// Adds the rows of the next position, `[R]` each.
    fn push_position(&mut self, [accept, overlap]: [&Tensor; 2]) {
        self.rows.push(accept.numel() as f64);
        self.accept.push(sum(accept));
        self.overlap.push(sum(overlap));
    }
}

/// Acceptances of all parts.
#[derive(Debug, Clone)]
pub struct Score {
    parts: Vec<PartSums>,
}

/// Rise of the accepted length, computed from the overlaps of the distributions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rise {
    /// Rise of the accepted length.
    pub overlap: f64,
    /// Standard error of the rise over the parts of the answers (jackknife).
    pub error: f64,
}

impl Score {
    /// Mean acceptance at each position.
    pub fn mean_acceptance(&self) -> Vec<f64> {
        position_means(&self.parts, None, |part| &part.accept)
    }

    /// Mean confidence and mean acceptance over all positions, if the drafter has a confidence
    /// head.
    pub fn confidence(&self) -> Option<(f64, f64)> {
        let predicted = self.parts.iter().map(|part| part.confidence).sum::<Option<f64>>()?;
        let total = |of: fn(&PartSums) -> &Vec<f64>| self.parts.iter().flat_map(of).sum::<f64>();
        let rows = total(|part| &part.rows);
        Some((predicted / rows, total(|part| &part.accept) / rows))
    }

    /// The accepted length for independent acceptances: 1 + Σ_k Π_{i≤k} a_i.
    pub fn accepted_length(&self) -> f64 {
        expected_length(&self.mean_acceptance())
    }

    /// How much the accepted length is above that of `before`, which was measured on the same blocks.
    /// None if the answers form fewer than two parts, because the jackknife error needs two.
    pub fn rise_over(&self, before: &Self) -> Option<Rise> {
        let parts = self.parts.len().min(before.parts.len());
        let rise = |without| {
            let of =
                |score: &Self| expected_length(&position_means(&score.parts, without, |part| &part.overlap));
            of(self) - of(before)
        };
        let without: Vec<f64> = (0..parts).map(|part| rise(Some(part))).collect();
        let count = parts as f64;
        let mean = without.iter().sum::<f64>() / count;
        let spread = without.iter().map(|rise| (rise - mean).powi(2)).sum::<f64>();
        let error = (spread * (count - 1.0) / count).sqrt();
        (parts > 1).then(|| Rise { overlap: rise(None), error })
    }
}

/// Means at each position over the parts, without part `without`.
fn position_means(parts: &[PartSums], without: Option<usize>, of: fn(&PartSums) -> &Vec<f64>) -> Vec<f64> {
    let parts = || parts.iter().enumerate().filter(move |(i, _)| Some(*i) != without).map(|(_, part)| part);
    let positions = parts().map(|part| part.rows.len()).max().unwrap_or(0);
    let total =
        |k: usize, of: fn(&PartSums) -> &Vec<f64>| parts().filter_map(|part| of(part).get(k)).sum::<f64>();
    (0..positions).map(|k| total(k, of) / total(k, |part| &part.rows)).collect()
}

fn expected_length(accept: &[f64]) -> f64 {
    let survival = accept.iter().scan(1.0, |survival, accept| {
        *survival *= accept;
        Some(*survival)
    });
    1.0 + survival.sum::<f64>()
}

/// Loads the drafter in `dir` for examination beside the target in `target`. If it belongs to another target, the inner error says
/// why.
///
/// # Errors
/// As [`deepspec_drafters::load_drafter`], and if the drafter is a plain language model.
pub fn open_drafter(
    dir: &Path,
    target: &Path,
    (device, kind): DeviceAndDtype,
) -> Result<Result<Box<dyn DrafterProbe>, String>, ModelError> {
    let no_probe = || {
        ModelError::Mismatch(UsageError(format!(
            "{}: a language model reads nothing of the target that could be wrong; the doctor examines drafters that \
             were trained on a target's states",
            dir.display()
        )))
    };
    if deepspec_drafters::is_language_model(dir)? {
        return Err(no_probe());
    }
    let config = ModelConfig::load(target)?;
    let options = DrafterOptions { device, kind, slots: 1, target: Some(target.to_path_buf()) };
    // Assistants are compared with their target as they are loaded.
    let opened = deepspec_drafters::load_drafter(dir, &options)
        .and_then(|drafter| drafter.check_fits(&config).map(|()| drafter));
    match opened {
        Ok(drafter) => drafter.probe().map(Ok).ok_or_else(no_probe),
        Err(ModelError::Mismatch(misfit)) => Ok(Err(misfit.to_string())),
        Err(error) => Err(error),
    }
}

/// Scores a drafter with one change applied. Returns None if the answers are too short for a block.
///
/// # Errors
/// Fails if the target's layers cannot attend with the windows of the drafter's layers.
pub fn score_change(
    drafter: &dyn DrafterProbe,
    change: &DrafterChange,
    captured: &CapturedStates,
    target: &TargetModel,
    temperature: f64,
) -> Result<Option<Score>, ModelError> {
    let taps = match change {
        DrafterChange::Taps(taps) => taps.as_slice(),
        _ => drafter.taps(),
    };
    let ends = target.embed_and_head();
    // The target's RoPE settings, for layers with the drafter's windows.
    let windows: Vec<Option<usize>> = drafter.layers().iter().map(|layer| layer.attention.window).collect();
    let like = target.config().anchored_decoder(&windows)?;
    let changed = drafter.with_overrides(&match change {
        DrafterChange::Rope => DrafterOverrides { rope_of: Some(&like), ..DrafterOverrides::default() },
        DrafterChange::Mask(id) => {
            DrafterOverrides { mask_token_id: Some(*id), ..DrafterOverrides::default() }
        }
        DrafterChange::Slots(slots) => {
            DrafterOverrides { slots: Some(*slots), ..DrafterOverrides::default() }
        }
        DrafterChange::Causal(causal) => {
            DrafterOverrides { causal: Some(*causal), ..DrafterOverrides::default() }
        }
        DrafterChange::EmbedAndHead => {
            DrafterOverrides { embed_and_head: Some((&ends.0, &ends.1)), ..DrafterOverrides::default() }
        }
        _ => DrafterOverrides::default(),
    });
    let judge = DistributionComparison { target, temperature };
    let parts = (0..JACKKNIFE_PARTS).filter_map(|part| {
        let answers = captured.answers.iter().skip(part).step_by(JACKKNIFE_PARTS);
        let samples = answers.map(|answer| {
            let anchors = changed
                .block_spec()
                .map_or_else(Vec::new, |blocks| spread_anchors(answer, blocks.block_size));
            training_sample(
                answer,
                captured.hidden_states(answer, taps, *change == DrafterChange::FinalNorm),
                anchors,
            )
        });
        let predictions = changed.predict(&samples.collect::<Vec<_>>())?;
        let mut part = PartSums { confidence: predictions.confidence, ..PartSums::default() };
        let judged = judge.acceptance_and_overlap(&predictions);
        let mut first = 0;
        for &count in &predictions.counts {
            part.push_position(judged.each_ref().map(|rows| rows.narrow(0, first, count)).each_ref());
            first += count;
        }
        Some(part)
    });
    let parts: Vec<PartSums> = parts.collect();
    Ok((!parts.is_empty()).then_some(Score { parts }))
}

/// Compares the distributions of drafter and target.
struct DistributionComparison<'a> {
    target: &'a TargetModel,
    temperature: f64,
}

impl DistributionComparison<'_> {
    /// Acceptance and overlap of all rows, `[R]` each.
    fn acceptance_and_overlap(&self, Predictions { teacher, logits, .. }: &Predictions) -> [Tensor; 2] {
        let rows = teacher.size()[0];
        let part = |start: i64| {
            let len = ROWS_PER_CHUNK.min(rows - start);
            let (own, target) = (logits(start, len), self.target.logits(&teacher.narrow(0, start, len)));
            let overlap = |temperature: f64| {
                let softmax = |logits: &Tensor| (logits / temperature).softmax(-1, Kind::Float);
                softmax(&own).minimum(&softmax(&target)).sum_dim_intlist(-1, false, Kind::Float)
            };
            let accept = match self.temperature < GREEDY_BELOW {
                true => own.argmax(-1, false).eq_tensor(&target.argmax(-1, false)).to_kind(Kind::Float),
                false => overlap(self.temperature),
            };
            (accept, overlap(1.0))
        };
        let (accept, overlap): (Vec<_>, Vec<_>) =
            (0..rows).step_by(ROWS_PER_CHUNK as usize).map(part).unzip();
        [accept, overlap].map(|parts| Tensor::cat(&parts, 0))
    }
}

/// A training sample in which all tokens of the answer are supervised.
fn training_sample(answer: &CapturedAnswer, taps: Tensor, anchors: Vec<usize>) -> TrainSample {
    let length = answer.ids.len();
    TrainSample {
        input_ids: answer.ids.clone(),
        loss_mask: (0..length).map(|at| at >= answer.prompt).collect(),
        taps,
        last: answer.last.shallow_clone(),
        last_positions: (0..length as u32).collect(),
        anchors,
    }
}

/// Anchors of complete blocks, in which every slot has a next token. They are spread evenly over the answer.
fn spread_anchors(answer: &CapturedAnswer, block_size: usize) -> Vec<usize> {
    let end = answer.ids.len().saturating_sub(block_size);
    let count = end.saturating_sub(answer.prompt);
    let stride = count.div_ceil(MAX_ANCHORS).max(1);
    (answer.prompt..end).step_by(stride).collect()
}

fn sum(rows: &Tensor) -> f64 {
    rows.sum(Kind::Double).double_value(&[])
}
