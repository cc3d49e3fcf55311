//! Builds the tensors of one training pass from samples and anchors. Sequences are concatenated, without padding or dummy anchors.

use deepspec_ops::distill_loss::{TeacherIndex, unique_with_inverse};
use deepspec_ops::{EmbeddingGrad, SequenceAnchors, Upload, UploadSlice, cat_to_device, range};
use tch::{Device, Kind, Tensor};

use super::BlockSpec;
use crate::TrainSample;
use crate::draft_model::{DraftConfig, DrafterSettings};

/// Positions where a block may start: token i and token i + 1 are supervised.
pub fn anchor_candidates(loss_mask: &[bool]) -> Vec<usize> {
    loss_mask.windows(2).enumerate().filter(|(_, pair)| pair[0] && pair[1]).map(|(i, _)| i).collect()
}

/// Number of supervised drafts after `anchor`: the length of the run of supervised tokens after it, at most γ.
pub fn supervised_draft_count(loss_mask: &[bool], anchor: usize, gamma: usize) -> usize {
    loss_mask.iter().skip(anchor + 1).take(gamma).take_while(|&&supervised| supervised).count()
}

/// Loss weight of position k of a block: exp(−k / γ_decay).
pub fn slot_weight(k: usize, decay_gamma: f64) -> f32 {
    (-(k as f64) / decay_gamma).exp() as f32
}

/// Σ of the slot weights of all supervised drafts after these anchors, an addend of the loss denominator.
pub fn sum_of_slot_weights(
    blocks: &BlockSpec,
    decay_gamma: f64,
    loss_mask: &[bool],
    anchors: &[usize],
) -> f64 {
    let drafts =
        anchors.iter().flat_map(|&anchor| 0..supervised_draft_count(loss_mask, anchor, blocks.draft_len()));
    drafts.map(|k| f64::from(slot_weight(k, decay_gamma))).sum()
}

/// Tensors of one training pass over sequences with ΣT tokens and A anchors in total.
pub struct BlockBatch {
    pub(super) spans: Vec<SequenceAnchors>,
    pub(crate) taps: Tensor,              // [ΣT, m·d]
    pub(crate) context_positions: Tensor, // [ΣT]
    pub(crate) block_tokens: Tensor,      // [A, B]: anchor, mask, …
    pub(crate) block_positions: Tensor,   // [A·B]
    /// Token before each draft, `[A, γ]`: the anchor, then the labels. If the heads read the anchor's slot, `[A, B]`: first the token before
    /// the anchor, which at the start of a text is the anchor itself.
    pub previous: Tensor,
    /// Scatter plan for the gradients of the embeddings of `previous`; None if the drafter embeds no previous tokens.
    pub(crate) previous_scatter: Option<EmbeddingGrad>,
    /// Indices of the supervised drafts among all A·γ drafts, `[R]`.
    pub supervised_indices: Tensor,
    /// Labels of the supervised drafts, `[R]`.
    pub labels: Tensor,
    /// The tokens before the labels, `[R]`.
    pub(crate) supervised_previous: Vec<i64>,
    /// Loss weights exp(−k/γ_decay) of the supervised drafts, `[R]` float32.
    pub weights: Tensor,
    /// Distinct target states that predict the labels, `[S, d]`.
    pub(crate) teacher: Tensor,
    /// Index into `teacher` for each label, `[R]`.
    sources: Tensor,
    /// Copy of `sources` on the host.
    source_list: Vec<i64>,
    /// Supervised slots of each block.
    pub(crate) counts: Vec<usize>,
    /// Number of blocks, A.
    pub blocks: usize,
    /// Drafted tokens per block, γ.
    pub(crate) gamma: usize,
}

/// Inputs that the heads of a drafter read of a block.
#[derive(Debug, Clone, Copy)]
pub struct HeadInputs {
    /// See [`DrafterSettings::READS_ANCHOR_SLOT`].
    pub anchor_slot: bool,
    /// See [`DrafterSettings::embeds_previous`].
    pub embeds_previous: bool,
}

/// Host lists of a [`BlockBatch`], one entry per token, slot, supervised slot or block.
#[derive(Default)]
struct BatchLists {
    context_positions: Vec<i64>,
    block_tokens: Vec<i64>,
    block_positions: Vec<i64>,
    previous: Vec<i64>,
    supervised_indices: Vec<i64>,
    labels: Vec<i64>,
    supervised_previous: Vec<i64>,
    weights: Vec<f32>,
    counts: Vec<usize>,
    sources: Vec<i64>,
    /// Number of distinct target states so far.
    states: i64,
}

impl BatchLists {
    /// Adds a sample. Returns the distinct rows of its final states that predict its labels.
    fn add_sample(
        &mut self,
        sample: &TrainSample,
        shape: &BlockSpec,
        reads_anchor_slot: bool,
        decay_gamma: f64,
    ) -> Vec<i64> {
        let (ids, length, gamma) = (&sample.input_ids, sample.input_ids.len(), shape.draft_len());
        self.context_positions.extend(0..length as i64);
        let mut teacher_rows = vec![];
        for &anchor in &sample.anchors {
            let first = self.counts.len() * gamma;
            for slot in 0..shape.block_size {
                self.block_tokens.push(if slot == 0 { ids[anchor] } else { shape.mask_token_id });
                self.block_positions.push((anchor + slot) as i64);
            }
            if reads_anchor_slot {
                self.previous.push(ids[anchor.saturating_sub(1)]);
            }
            self.previous.extend((0..gamma).map(|k| ids[(anchor + k).min(length - 1)]));
            let supervised = supervised_draft_count(&sample.loss_mask, anchor, gamma);
            self.counts.push(supervised);
            for k in 0..supervised {
                self.supervised_indices.push((first + k) as i64);
                self.labels.push(ids[anchor + 1 + k]);
                self.supervised_previous.push(ids[anchor + k]);
                self.weights.push(slot_weight(k, decay_gamma));
                teacher_rows.push(sample.final_state_row_index(anchor + k));
            }
        }
        // Anchors increase, so the target states of consecutive blocks form one range of the distinct states.
        debug_assert!(sample.anchors.is_sorted(), "anchors are not in order");
        let (distinct, sources) = unique_with_inverse(&teacher_rows);
        self.sources.extend(sources.iter().map(|source| self.states + source));
        self.states += distinct.len() as i64;
        distinct
    }
}

impl BlockBatch {
    /// A batch on `device`. None if no sample has an anchor. The samples' states may be on another device, the same for all samples.
    ///
    /// # Panics
    /// If a sample lacks the final state that predicts a supervised label.
    pub fn new(
        samples: &[TrainSample],
        shape: &BlockSpec,
        heads: HeadInputs,
        decay_gamma: f64,
        device: Device,
        kind: Kind,
    ) -> Option<Self> {
        let _range = range(c"upload");
        let used: Vec<&TrainSample> = samples.iter().filter(|sample| !sample.anchors.is_empty()).collect();
        let source_device = used.first()?.last.device();
        let (mut lists, mut indices) = (BatchLists::default(), Upload::default());
        let mut of_samples: Vec<(UploadSlice, UploadSlice)> = vec![]; // anchors, teacher's rows
        for sample in &used {
            let teacher_rows = lists.add_sample(sample, shape, heads.anchor_slot, decay_gamma);
            let anchors = sample.anchors.iter().map(|&anchor| anchor as i64);
            of_samples.push((indices.push(anchors), indices.push(teacher_rows)));
        }
        let grad = heads.embeds_previous.then(|| EmbeddingGrad::plan(&lists.previous, &mut indices));
        let BatchLists {
            context_positions,
            block_tokens,
            block_positions,
            previous,
            supervised_indices,
            labels,
            supervised_previous,
            weights,
            counts,
            sources,
            states: _,
        } = lists;
        let source_list = sources.clone();
        let slices =
            [context_positions, block_tokens, block_positions, previous, supervised_indices, labels, sources]
                .map(|list| indices.push(list));
        let weights = indices.push_floats(&weights);
        let on_device = indices.send(device);
        let on_source = if source_device == device { None } else { Some(indices.send(source_device)) };
        let on_source = on_source.as_ref().unwrap_or(&on_device);
        let [context_positions, block_tokens, block_positions, previous, supervised_indices, labels, sources] =
            slices.map(|slice| on_device.slice(slice));

        let spans = used.iter().zip(&of_samples).map(|(sample, (anchors, _))| SequenceAnchors {
            tokens: sample.input_ids.len() as i64,
            anchors: sample.anchors.clone(),
            positions: on_device.slice(*anchors),
        });
        let spans: Vec<SequenceAnchors> = spans.collect();
        let blocks = spans.iter().map(|span| span.anchors.len()).sum::<usize>();
        let taps: Vec<Tensor> = used.iter().map(|sample| sample.taps.shallow_clone()).collect();
        let teacher = used.iter().zip(&of_samples);
        let teacher: Vec<Tensor> =
            teacher.map(|(sample, (_, rows))| sample.last.index_select(0, &on_source.slice(*rows))).collect();
        let by_block = |size: usize| [blocks as i64, size as i64];
        Some(Self {
            spans,
            taps: cat_to_device(&taps, source_device, device, kind),
            context_positions,
            block_tokens: block_tokens.view(by_block(shape.block_size)),
            block_positions,
            previous: previous.view(by_block(shape.draft_len() + usize::from(heads.anchor_slot))),
            previous_scatter: grad.map(|slices| EmbeddingGrad::new(&slices, &on_device)),
            supervised_indices,
            labels,
            supervised_previous,
            weights: on_device.slice_floats(weights),
            teacher: cat_to_device(&teacher, source_device, device, kind),
            sources,
            source_list,
            counts,
            blocks,
            gamma: shape.draft_len(),
        })
    }

    /// Context rows before each anchor, `[A, window]` int64, the last one directly before the anchor, and whether the sequence has
    /// the row. A row that it lacks has the index of its first row.
    pub(crate) fn window_rows(&self, window: i64) -> (Tensor, Tensor) {
        let offsets = Tensor::arange_start(-window, 0, (Kind::Int64, self.taps.device()));
        let mut first = 0;
        let of_sequence = |span: &SequenceAnchors| {
            let rows = span.positions.unsqueeze(1) + &offsets;
            let exists = rows.ge(0);
            let rows = rows.clamp_min(0) + first;
            first += span.tokens;
            (rows, exists)
        };
        let (rows, exist): (Vec<_>, Vec<_>) = self.spans.iter().map(of_sequence).unzip();
        (Tensor::cat(&rows, 0), Tensor::cat(&exist, 0))
    }

    /// Target states that predict the labels, `[R, d]`.
    pub fn teacher_states(&self) -> Tensor {
        self.teacher.index_select(0, &self.sources)
    }

    /// Index of the target state of each label.
    pub(crate) fn teacher_index(&self) -> TeacherIndex<'_> {
        TeacherIndex { of_rows: &self.source_list, there: &self.sources }
    }
}

impl<S: DrafterSettings> DraftConfig<S> {
    /// Builds a [`BlockBatch`]. Also None for a drafter without blocks.
    pub fn batch(
        &self,
        samples: &[TrainSample],
        decay_gamma: f64,
        device: Device,
        kind: Kind,
    ) -> Option<BlockBatch> {
        let heads = HeadInputs {
            anchor_slot: S::READS_ANCHOR_SLOT,
            embeds_previous: self.settings.embeds_previous(),
        };
        BlockBatch::new(samples, self.settings.block_spec()?, heads, decay_gamma, device, kind)
    }
}
