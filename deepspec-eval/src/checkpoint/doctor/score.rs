//! What a drafter would accept on the target's own answers, teacher-forced.
//!
//! A blocks, γ slots, R rows, V vocabulary.

use std::path::Path;

use deepspec_core::cli::UsageError;
use deepspec_core::recipe::{LossNormalization, Supervise};
use deepspec_decode::Target;
use deepspec_models::{
    Block, BlockBatch, Drafter, DrafterOptions, Eagle3, Eagle3Batch, Eagle3Objective, ModelConfig,
    ModelError, TargetModel, TrainSample,
};
use serde::Serialize;
use tch::{Kind, Tensor};

use super::Place;
use super::capture::{Answer, Captured};

/// Rows whose distributions exist at once.
const CHUNK: i64 = 256;
/// Blocks per answer at most.
const ANCHORS: usize = 12;
/// Below this, the likeliest token is taken.
const GREEDY: f64 = 1e-5;
/// Parts that the answers are dealt into, to see how much a change depends on which they are.
const PARTS: usize = 8;

/// One thing changed about how the drafter is read.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Nothing.
    None,
    /// Its taps are other layers.
    Taps(Vec<i64>),
    /// The last layer's state is taken after the final norm.
    FinalNorm,
    /// Another mask token.
    Mask(i64),
    /// Slot k predicts the token at anchor + k.
    Slots,
    /// The target's rotary settings.
    Rope,
    /// The target's embedding and head.
    Ends,
}

/// What was accepted of some answers, position by position.
#[derive(Debug, Clone, Default)]
struct Part {
    /// Rows.
    rows: Vec<f64>,
    /// Sum of their acceptances at the temperature that was asked for.
    accept: Vec<f64>,
    /// Sum of Σ min(p^d, p^t) at temperature 1: it moves with every change of the drafter, where the likeliest token often
    /// stays.
    overlap: Vec<f64>,
    /// Sum of the confidences over all positions, of a drafter with such a head.
    confidence: Option<f64>,
}

impl Part {
    /// Adds the rows of the next position, `[R]` each.
    fn push(&mut self, [accept, overlap]: [&Tensor; 2]) {
        self.rows.push(accept.numel() as f64);
        self.accept.push(sum(accept));
        self.overlap.push(sum(overlap));
    }
}

/// What was accepted, part by part.
#[derive(Debug, Clone)]
pub struct Score {
    parts: Vec<Part>,
}

/// How much the accepted length rises that the overlaps of the distributions make.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rise {
    /// The rise.
    pub overlap: f64,
    /// Its standard error over the parts of the answers (jackknife).
    pub error: f64,
}

impl Score {
    /// Mean acceptance at each position.
    pub fn accept(&self) -> Vec<f64> {
        means(&self.parts, None, |part| &part.accept)
    }

    /// Mean confidence and mean acceptance over all positions, of a drafter with such a head.
    pub fn confidence(&self) -> Option<(f64, f64)> {
        let predicted = self.parts.iter().map(|part| part.confidence).sum::<Option<f64>>()?;
        let total = |of: fn(&Part) -> &Vec<f64>| self.parts.iter().flat_map(of).sum::<f64>();
        let rows = total(|part| &part.rows);
        Some((predicted / rows, total(|part| &part.accept) / rows))
    }

    /// The accepted length that these acceptances make, were they independent: 1 + Σ_k Π_{i≤k} a_i.
    pub fn accepted_length(&self) -> f64 {
        length(&self.accept())
    }

    /// How much longer answers are accepted than with `before`, on the same blocks; None with a single part.
    pub fn rise_over(&self, before: &Self) -> Option<Rise> {
        let parts = self.parts.len().min(before.parts.len());
        let rise = |without| {
            let of = |score: &Self| length(&means(&score.parts, without, |part| &part.overlap));
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

/// Means at each position over the parts, but for one of them.
fn means(parts: &[Part], without: Option<usize>, of: fn(&Part) -> &Vec<f64>) -> Vec<f64> {
    let parts = || parts.iter().enumerate().filter(move |(i, _)| Some(*i) != without).map(|(_, part)| part);
    let positions = parts().map(|part| part.rows.len()).max().unwrap_or(0);
    let total =
        |k: usize, of: fn(&Part) -> &Vec<f64>| parts().filter_map(|part| of(part).get(k)).sum::<f64>();
    (0..positions).map(|k| total(k, of) / total(k, |part| &part.rows)).collect()
}

fn length(accept: &[f64]) -> f64 {
    let survival = accept.iter().scan(1.0, |survival, accept| {
        *survival *= accept;
        Some(*survival)
    });
    1.0 + survival.sum::<f64>()
}

/// A drafter under examination.
pub enum Probe {
    /// DSpark or DFlash.
    Block(Box<Block>),
    /// Eagle3.
    Eagle3(Box<Eagle3>),
}

impl Probe {
    /// Loads the drafter in `dir`.
    ///
    /// # Errors
    /// As [`Drafter::load`]; a language model as drafter.
    pub fn load(dir: &Path, (device, kind): Place) -> Result<Self, ModelError> {
        match Drafter::load(dir, &DrafterOptions { device, kind, slots: 1 })? {
            Drafter::Block(proposer) => Ok(Self::Block(Box::new(proposer.block().share()?))),
            Drafter::Eagle3(proposer) => Ok(Self::Eagle3(Box::new(proposer.model().share()?))),
            Drafter::Causal(_) => Err(ModelError::Mismatch(UsageError(format!(
                "{}: a language model reads nothing of the target that could be wrong; the doctor examines DSpark, DFlash \
                 and Eagle3",
                dir.display()
            )))),
        }
    }

    /// Whether it can draft for this target at all.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    pub fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        match self {
            Self::Block(block) => block.config().check_fits(target),
            Self::Eagle3(model) => model.config().check_fits(target),
        }
    }

    /// Target layers that it reads.
    pub fn taps(&self) -> &[i64] {
        match self {
            Self::Block(block) => &block.config().target_layer_ids,
            Self::Eagle3(model) => &model.config().target_layer_ids,
        }
    }

    /// Its decoder's settings.
    pub fn model(&self) -> &ModelConfig {
        match self {
            Self::Block(block) => &block.config().model,
            Self::Eagle3(model) => &model.config().model,
        }
    }

    /// Its mask token, if it has one.
    pub fn mask(&self) -> Option<i64> {
        match self {
            Self::Block(block) => Some(block.config().mask_token_id),
            Self::Eagle3(_) => None,
        }
    }

    /// Its embedding and head.
    pub fn ends(&self) -> (&Tensor, &Tensor) {
        match self {
            Self::Block(block) => block.ends(),
            Self::Eagle3(model) => model.ends(),
        }
    }

    /// The same weights read with one thing changed.
    fn changed(&self, change: &Change, target: &TargetModel) -> Result<Self, ModelError> {
        let theirs = target.ends();
        let (embed, head) = match change {
            Change::Ends => (&theirs.0, &theirs.1),
            _ => self.ends(),
        };
        // The target's rotary settings, for layers like ours.
        let windows: Vec<Option<usize>> =
            self.model().layers.iter().map(|layer| layer.attention.window).collect();
        let like = target.config().draft_decoder(&windows)?;
        let rope = |model: &mut ModelConfig| {
            if *change == Change::Rope {
                model.layers.iter_mut().zip(&like.layers).for_each(|(own, like)| own.rope = like.rope);
            }
        };
        match self {
            Self::Block(block) => {
                let mut config = block.config().clone();
                rope(&mut config.model);
                if let Change::Mask(id) = change {
                    config.mask_token_id = *id;
                }
                Ok(Self::Block(Box::new(block.share_as(config, embed, head)?)))
            }
            Self::Eagle3(model) => {
                let mut config = model.config().clone();
                rope(&mut config.model);
                Ok(Self::Eagle3(Box::new(model.share_as(config, embed, head)?)))
            }
        }
    }

    /// What is accepted with one thing changed; None where the answers are too short for a block.
    ///
    /// # Errors
    /// None; the signature is shared with loading.
    pub fn score(
        &self,
        change: &Change,
        captured: &Captured,
        target: &TargetModel,
        temperature: f64,
    ) -> Result<Option<Score>, ModelError> {
        let taps = match change {
            Change::Taps(taps) => taps.as_slice(),
            _ => self.taps(),
        };
        let read = |answer: &Answer| captured.taps(answer, taps, *change == Change::FinalNorm);
        let judge = Judge { target, temperature };
        let changed = self.changed(change, target)?;
        let parts = (0..PARTS).filter_map(|part| {
            let answers: Vec<&Answer> = captured.answers.iter().skip(part).step_by(PARTS).collect();
            match &changed {
                Self::Block(block) => score_block(block, &answers, &read, &judge, *change == Change::Slots),
                Self::Eagle3(model) => score_eagle3(model, &answers, &read, &judge),
            }
        });
        let parts: Vec<Part> = parts.collect();
        Ok((!parts.is_empty()).then_some(Score { parts }))
    }
}

/// Compares distributions.
struct Judge<'a> {
    target: &'a TargetModel,
    temperature: f64,
}

impl Judge<'_> {
    /// Acceptance and overlap of rows, `[R]` each: `draft(start, len)` gives the draft's logits, `teacher [R, d]` the target's
    /// states.
    fn accept(&self, teacher: &Tensor, draft: impl Fn(i64, i64) -> Tensor) -> [Tensor; 2] {
        let rows = teacher.size()[0];
        let part = |start: i64| {
            let len = CHUNK.min(rows - start);
            let (own, target) = (draft(start, len), self.target.logits(&teacher.narrow(0, start, len)));
            let overlap = |temperature: f64| {
                let softmax = |logits: &Tensor| (logits / temperature).softmax(-1, Kind::Float);
                softmax(&own).minimum(&softmax(&target)).sum_dim_intlist(-1, false, Kind::Float)
            };
            let accept = match self.temperature < GREEDY {
                true => own.argmax(-1, false).eq_tensor(&target.argmax(-1, false)).to_kind(Kind::Float),
                false => overlap(self.temperature),
            };
            (accept, overlap(1.0))
        };
        let (accept, overlap): (Vec<_>, Vec<_>) = (0..rows).step_by(CHUNK as usize).map(part).unzip();
        [accept, overlap].map(|parts| Tensor::cat(&parts, 0))
    }
}

/// A sample with everything supervised that the target said.
fn sample(answer: &Answer, taps: Tensor, anchors: Vec<usize>) -> TrainSample {
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

/// Anchors of whole blocks, spread evenly over the answer.
fn anchors(answer: &Answer, gamma: usize) -> Vec<usize> {
    let end = answer.ids.len().saturating_sub(gamma);
    let count = end.saturating_sub(answer.prompt);
    let stride = count.div_ceil(ANCHORS).max(1);
    (answer.prompt..end).step_by(stride).collect()
}

fn sum(rows: &Tensor) -> f64 {
    rows.sum(Kind::Double).double_value(&[])
}

fn score_block(
    block: &Block,
    answers: &[&Answer],
    read: &dyn Fn(&Answer) -> Tensor,
    judge: &Judge,
    at_anchor: bool,
) -> Option<Part> {
    let config = block.config();
    let (gamma, width) = (config.block_size as i64, config.model.hidden_size);
    let samples: Vec<TrainSample> = answers
        .iter()
        .map(|answer| sample(answer, read(answer), anchors(answer, config.block_size)))
        .filter(|sample| !sample.anchors.is_empty())
        .collect();
    let device = samples.first()?.taps.device();
    let batch = BlockBatch::new(&samples, config, 1.0, device, block.kind())?;
    let hidden = block.hidden(&batch); // [A, γ, d]
    let blocks = hidden.size()[0];
    let teacher = batch.teacher().view([blocks, gamma, width]);
    // In the other convention slot k, from 1, predicts what slot k − 1 does in ours, and the token before that stands one
    // place to the left too.
    let first = i64::from(at_anchor);
    let drafts = gamma - first;
    if drafts < 1 {
        return None;
    }
    let previous = if at_anchor {
        Tensor::cat(&[batch.previous().narrow(1, 0, 1), batch.previous().narrow(1, 0, gamma - 1)], 1)
    } else {
        batch.previous().shallow_clone()
    };
    let markov = block.markov_features(&hidden, &previous);
    let flat = |tensor: &Tensor| tensor.narrow(1, first, drafts).flatten(0, 1);
    let (rows, features) = (flat(&hidden), markov.as_ref().map(|(_, features)| flat(features)));
    let [accept, overlap] = judge.accept(&teacher.narrow(1, 0, drafts).flatten(0, 1), |start, len| {
        let features = features.as_ref().map(|features| features.narrow(0, start, len));
        block.corrected_logits(&rows.narrow(0, start, len), features.as_ref())
    });
    let confidence = block
        .confidence_logits(&hidden, markov.as_ref().map(|(e, _)| e))
        .filter(|_| !at_anchor)
        .map(|logits| sum(&logits.sigmoid()));
    let mut part = Part { confidence, ..Part::default() };
    let by_position = [accept, overlap].map(|rows| rows.view([blocks, drafts]));
    for k in 0..drafts {
        part.push(by_position.each_ref().map(|rows| rows.select(1, k)).each_ref());
    }
    Some(part)
}

fn score_eagle3(
    model: &Eagle3,
    answers: &[&Answer],
    read: &dyn Fn(&Answer) -> Tensor,
    judge: &Judge,
) -> Option<Part> {
    let samples: Vec<TrainSample> =
        answers.iter().map(|answer| sample(answer, read(answer), vec![])).collect();
    let device = samples.first()?.taps.device();
    let objective = Eagle3Objective {
        supervise: Supervise::Labels,
        step_loss_decay: 1.0,
        normalization: LossNormalization::Global,
    };
    let steps = model.config().ttt_length;
    let batch = Eagle3Batch::new(&samples, &objective, steps, device, model.kind())?;
    let mut part = Part::default();
    for (step, states) in model.states(&batch).iter().enumerate() {
        let rows = batch.supervised(step);
        if rows.size()[0] == 0 {
            break;
        }
        let states = states.index_select(0, rows);
        let judged =
            judge.accept(batch.teacher(step), |start, len| model.draft_logits(&states.narrow(0, start, len)));
        part.push(judged.each_ref());
    }
    (!part.rows.is_empty()).then_some(part)
}
