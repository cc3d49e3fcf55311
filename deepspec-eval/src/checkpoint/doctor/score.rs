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
use tch::{Kind, Tensor};

use super::Place;
use super::capture::{Answer, Captured};

/// Rows whose distributions exist at once.
const CHUNK: i64 = 256;
/// Blocks per answer at most.
const ANCHORS: usize = 12;
/// Below this, the likeliest token is taken.
const GREEDY: f64 = 1e-5;

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

/// What was accepted, position by position.
#[derive(Debug, Clone)]
pub struct Score {
    /// Mean acceptance Σ min(p^d, p^t) at each position.
    pub accept: Vec<f64>,
    /// Mean confidence and mean acceptance over all positions, of a drafter with such a head.
    pub confidence: Option<(f64, f64)>,
}

impl Score {
    /// The accepted length that these acceptances make, were they independent: 1 + Σ_k Π_{i≤k} a_i.
    pub fn accepted_length(&self) -> f64 {
        let mut survival = 1.0;
        1.0 + self
            .accept
            .iter()
            .map(|accept| {
                survival *= accept;
                survival
            })
            .sum::<f64>()
    }
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
        Ok(match self.changed(change, target)? {
            Self::Block(block) => score_block(&block, captured, &read, &judge, *change == Change::Slots),
            Self::Eagle3(model) => score_eagle3(&model, captured, &read, &judge),
        })
    }
}

/// Compares distributions.
struct Judge<'a> {
    target: &'a TargetModel,
    temperature: f64,
}

impl Judge<'_> {
    /// Acceptance of rows `[R]`: `draft(start, len)` gives the draft's logits, `teacher [R, d]` the target's states.
    fn accept(&self, teacher: &Tensor, draft: impl Fn(i64, i64) -> Tensor) -> Tensor {
        let rows = teacher.size()[0];
        let part = |start: i64| {
            let len = CHUNK.min(rows - start);
            let (own, target) = (draft(start, len), self.target.logits(&teacher.narrow(0, start, len)));
            if self.temperature < GREEDY {
                return own.argmax(-1, false).eq_tensor(&target.argmax(-1, false)).to_kind(Kind::Float);
            }
            let softmax = |logits: Tensor| (logits / self.temperature).softmax(-1, Kind::Float);
            softmax(own).minimum(&softmax(target)).sum_dim_intlist(-1, false, Kind::Float)
        };
        Tensor::cat(&(0..rows).step_by(CHUNK as usize).map(part).collect::<Vec<_>>(), 0)
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

fn mean(rows: &Tensor) -> f64 {
    rows.mean(Kind::Double).double_value(&[])
}

fn score_block(
    block: &Block,
    captured: &Captured,
    read: &dyn Fn(&Answer) -> Tensor,
    judge: &Judge,
    at_anchor: bool,
) -> Option<Score> {
    let config = block.config();
    let (gamma, width) = (config.block_size as i64, config.model.hidden_size);
    let samples: Vec<TrainSample> = captured
        .answers
        .iter()
        .map(|answer| sample(answer, read(answer), anchors(answer, config.block_size)))
        .filter(|sample| !sample.anchors.is_empty())
        .collect();
    let batch = BlockBatch::new(&samples, config, 1.0, captured.device(), block.kind())?;
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
    let accept = judge.accept(&teacher.narrow(1, 0, drafts).flatten(0, 1), |start, len| {
        let features = features.as_ref().map(|features| features.narrow(0, start, len));
        block.corrected_logits(&rows.narrow(0, start, len), features.as_ref())
    });
    let confidence = block
        .confidence_logits(&hidden, markov.as_ref().map(|(e, _)| e))
        .filter(|_| !at_anchor)
        .map(|logits| (mean(&logits.sigmoid()), mean(&accept)));
    let by_position = accept.view([blocks, drafts]);
    let accept = (0..drafts).map(|k| mean(&by_position.select(1, k))).collect();
    Some(Score { accept, confidence })
}

fn score_eagle3(
    model: &Eagle3,
    captured: &Captured,
    read: &dyn Fn(&Answer) -> Tensor,
    judge: &Judge,
) -> Option<Score> {
    let samples: Vec<TrainSample> =
        captured.answers.iter().map(|answer| sample(answer, read(answer), vec![])).collect();
    let objective = Eagle3Objective {
        supervise: Supervise::Labels,
        step_loss_decay: 1.0,
        normalization: LossNormalization::Global,
    };
    let steps = model.config().ttt_length;
    let batch = Eagle3Batch::new(&samples, &objective, steps, captured.device(), model.kind())?;
    let all = model.states(&batch);
    let accept =
        all.iter().enumerate().map_while(|(step, states)| {
            let rows = batch.supervised(step);
            let states = states.index_select(0, rows);
            let any = rows.size()[0] > 0;
            any.then(|| {
                mean(&judge.accept(batch.teacher(step), |start, len| {
                    model.draft_logits(&states.narrow(0, start, len))
                }))
            })
        });
    let accept: Vec<f64> = accept.collect();
    (!accept.is_empty()).then_some(Score { accept, confidence: None })
}
