//! From samples and anchors to the tensors of one training pass. Sequences lie end to end: no padding, no dummy anchors.

use deepspec_ops::distill_loss::{TeacherIndex, distinct};
use deepspec_ops::{EmbeddingGrad, SequenceSpan, Upload, UploadSlice, cat_to_device, range};
use tch::{Device, Kind, Tensor};

use super::BlockSpec;
use crate::TrainSample;
use crate::draft_model::{DraftConfig, DrafterSettings};

/// Where a block may start: i ≤ T − 2 with token i and token i + 1 supervised.
pub fn anchor_candidates(loss_mask: &[bool]) -> Vec<usize> {
    loss_mask.windows(2).enumerate().filter(|(_, pair)| pair[0] && pair[1]).map(|(i, _)| i).collect()
}

/// How many tokens drafted behind `anchor` are supervised: the run of set mask flags behind it, at most γ.
pub fn eval_mask(loss_mask: &[bool], anchor: usize, gamma: usize) -> usize {
    loss_mask.iter().skip(anchor + 1).take(gamma).take_while(|&&supervised| supervised).count()
}

/// Loss weight of position k of a block: exp(−k / γ_decay).
pub fn slot_weight(k: usize, decay_gamma: f64) -> f32 {
    (-(k as f64) / decay_gamma).exp() as f32
}

/// Addend of the loss denominator from the blocks behind these anchors: Σ of the weights of their supervised drafts.
pub fn block_weight(blocks: &BlockSpec, decay_gamma: f64, loss_mask: &[bool], anchors: &[usize]) -> f64 {
    let drafts = anchors.iter().flat_map(|&anchor| 0..eval_mask(loss_mask, anchor, blocks.drafted()));
    drafts.map(|k| f64::from(slot_weight(k, decay_gamma))).sum()
}

/// The tensors of one pass over some sequences with ΣT tokens and A anchors in total.
pub struct BlockBatch {
    pub(super) spans: Vec<SequenceSpan>,
    pub(super) taps: Tensor,              // [ΣT, m·d]
    pub(super) context_positions: Tensor, // [ΣT]
    pub(super) block_tokens: Tensor,      // [A, B]: anchor, mask, …
    pub(super) block_positions: Tensor,   // [A·B]
    /// Token before each label, `[A, γ]`: the anchor, then the labels.
    pub previous: Tensor,
    /// How the gradients by embeddings of `previous` are added up; None where nothing embeds them.
    pub(crate) previous_grad: Option<EmbeddingGrad>,
    /// Supervised drafts as indices into A·γ, `[R]`.
    pub rows: Tensor,
    /// Their labels, `[R]`.
    pub labels: Tensor,
    /// The tokens before the labels, `[R]`.
    pub(crate) tokens_before: Vec<i64>,
    /// Their loss weights exp(−k/γ_decay), `[R]` float32.
    pub weights: Tensor,
    /// Target states that predict the labels, each once, `[S, d]`.
    pub(crate) teacher: Tensor,
    /// Which of them predicts each label, `[R]`.
    sources: Tensor,
    /// Copy of `sources` on the host.
    source_list: Vec<i64>,
    /// Supervised slots of each block.
    pub(crate) counts: Vec<usize>,
    /// A, number of blocks.
    pub blocks: usize,
}

/// Lists of a batch that have one entry per token, slot, supervised slot or block.
#[derive(Default)]
struct Lists {
    context_positions: Vec<i64>,
    block_tokens: Vec<i64>,
    block_positions: Vec<i64>,
    previous: Vec<i64>,
    rows: Vec<i64>,
    labels: Vec<i64>,
    tokens_before: Vec<i64>,
    weights: Vec<f32>,
    counts: Vec<usize>,
    sources: Vec<i64>,
    /// How many of the target's states there are so far, each counted once.
    states: i64,
}

impl Lists {
    /// Adds a sample; gives the rows of its last states that predict its labels, each once.
    fn add(&mut self, sample: &TrainSample, shape: &BlockSpec, decay_gamma: f64) -> Vec<i64> {
        let (ids, length, gamma) = (&sample.input_ids, sample.input_ids.len(), shape.drafted());
        self.context_positions.extend(0..length as i64);
        let mut teacher_rows = vec![];
        for &anchor in &sample.anchors {
            let first = self.previous.len();
            for slot in 0..shape.block_size {
                self.block_tokens.push(if slot == 0 { ids[anchor] } else { shape.mask_token_id });
                self.block_positions.push((anchor + slot) as i64);
            }
            self.previous.extend((0..gamma).map(|k| ids[(anchor + k).min(length - 1)]));
            let supervised = eval_mask(&sample.loss_mask, anchor, gamma);
            self.counts.push(supervised);
            for k in 0..supervised {
                self.rows.push((first + k) as i64);
                self.labels.push(ids[anchor + 1 + k]);
                self.tokens_before.push(ids[anchor + k]);
                self.weights.push(slot_weight(k, decay_gamma));
                teacher_rows.push(sample.last_row(anchor + k));
            }
        }
        // A block's labels are a run behind its anchor, and anchors increase: between what consecutive blocks share there is nothing of others.
        debug_assert!(sample.anchors.is_sorted(), "anchors are not in order");
        let (distinct, sources) = distinct(&teacher_rows);
        self.sources.extend(sources.iter().map(|source| self.states + source));
        self.states += distinct.len() as i64;
        distinct
    }
}

impl BlockBatch {
    /// Lays out the samples' anchors. None if no sample has any. All samples' states lie on one device, which may be another than
    /// `device`. `embeds_previous` says whether the drafter embeds the tokens before its slots.
    ///
    /// # Panics
    /// If the state of a supervised label's predecessor is not among a sample's `last_positions`; a cache that keeps
    /// supervised rows has them all.
    pub fn new(
        samples: &[TrainSample],
        shape: &BlockSpec,
        embeds_previous: bool,
        decay_gamma: f64,
        device: Device,
        kind: Kind,
    ) -> Option<Self> {
        let _range = range(c"upload");
        let used: Vec<&TrainSample> = samples.iter().filter(|sample| !sample.anchors.is_empty()).collect();
        let from = used.first()?.last.device();
        let (mut lists, mut indices) = (Lists::default(), Upload::default());
        let mut of_samples: Vec<(UploadSlice, UploadSlice)> = vec![]; // anchors, teacher's rows
        for sample in &used {
            let teacher_rows = lists.add(sample, shape, decay_gamma);
            let anchors = sample.anchors.iter().map(|&anchor| anchor as i64);
            of_samples.push((indices.push(anchors), indices.push(teacher_rows)));
        }
        let grad = embeds_previous.then(|| EmbeddingGrad::plan(&lists.previous, &mut indices));
        let Lists {
            context_positions,
            block_tokens,
            block_positions,
            previous,
            rows,
            labels,
            tokens_before,
            weights,
            counts,
            sources,
            states: _,
        } = lists;
        let source_list = sources.clone();
        let places = [context_positions, block_tokens, block_positions, previous, rows, labels, sources]
            .map(|list| indices.push(list));
        let weights = indices.push_floats(&weights);
        let here = indices.send(device);
        let there = if from == device { None } else { Some(indices.send(from)) };
        let there = there.as_ref().unwrap_or(&here);
        let [context_positions, block_tokens, block_positions, previous, rows, labels, sources] =
            places.map(|place| here.of(place));

        let spans = used.iter().zip(&of_samples).map(|(sample, (anchors, _))| SequenceSpan {
            tokens: sample.input_ids.len() as i64,
            anchors: sample.anchors.clone(),
            positions: here.of(*anchors),
        });
        let spans: Vec<SequenceSpan> = spans.collect();
        let blocks = spans.iter().map(|span| span.anchors.len()).sum::<usize>();
        let taps: Vec<Tensor> = used.iter().map(|sample| sample.taps.shallow_clone()).collect();
        let teacher = used.iter().zip(&of_samples);
        let teacher: Vec<Tensor> =
            teacher.map(|(sample, (_, rows))| sample.last.index_select(0, &there.of(*rows))).collect();
        let by_block = |size: usize| [blocks as i64, size as i64];
        Some(Self {
            spans,
            taps: cat_to_device(&taps, from, device, kind),
            context_positions,
            block_tokens: block_tokens.view(by_block(shape.block_size)),
            block_positions,
            previous: previous.view(by_block(shape.drafted())),
            previous_grad: grad.map(|slices| EmbeddingGrad::new(&slices, &here)),
            rows,
            labels,
            tokens_before,
            weights: here.floats(weights),
            teacher: cat_to_device(&teacher, from, device, kind),
            sources,
            source_list,
            counts,
            blocks,
        })
    }

    /// The target's states that predict the labels, `[R, d]`.
    pub fn teacher(&self) -> Tensor {
        self.teacher.index_select(0, &self.sources)
    }

    /// Which of the target's states predict which labels.
    pub(crate) fn sources(&self) -> TeacherIndex<'_> {
        TeacherIndex { of_rows: &self.source_list, there: &self.sources }
    }
}

impl<S: DrafterSettings> DraftConfig<S> {
    /// The tensors of one pass over `samples`; see [`BlockBatch::new`]. None for an autoregressive drafter, too.
    pub fn batch(
        &self,
        samples: &[TrainSample],
        decay_gamma: f64,
        device: Device,
        kind: Kind,
    ) -> Option<BlockBatch> {
        let (blocks, embeds_previous) = (self.settings.block_spec()?, self.settings.embeds_previous());
        BlockBatch::new(samples, blocks, embeds_previous, decay_gamma, device, kind)
    }
}
