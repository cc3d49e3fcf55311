//! Rows, attention calls and supervised rows of a training pass of P-EAGLE.
//!
//! Shapes: N positions of all sequences, which are the rows of depth 0; C rows of later depths; R supervised rows; S target states that
//! predict labels; K depths; m captured layers.

use std::ops::Range;

use deepspec_models::nn::AttentionSpec;
use deepspec_ops::distill_loss::TeacherIndex;
use deepspec_ops::{Upload, UploadSlice, Uploaded, cat_to_device, range};
use tch::{Device, Kind, Tensor};

use super::depths::{chains, segment, supervised_positions};
use crate::TrainSample;
use crate::token_common::additive_mask;

/// Most rows of an attention call, except for a longer chain. It bounds the memory of a call's scores.
pub(super) const MAX_CALL_ROWS: usize = 256;

/// One attention call over the rows of whole chains of a sequence.
pub(super) struct ChainCall {
    /// Index of the first row among the C rows.
    pub first: i64,
    /// Number of rows.
    pub rows: i64,
    /// Row of the sequence's first position among the N positions.
    pub first_key: i64,
    /// Number of positions up to the call's last anchor.
    pub keys: i64,
}

/// Tensors of one training pass over a micro-batch.
pub struct PEagleBatch {
    /// Captured states of the positions, `[N, m·d]`.
    pub(super) taps: Tensor,
    /// Number of positions of each sequence; the sum is N.
    pub(super) lengths: Vec<i64>,
    /// C, number of rows of later depths.
    pub(super) chain_rows: i64,
    /// Attention calls over the rows of later depths, in order.
    pub(super) calls: Vec<ChainCall>,
    /// Target states that predict the labels, `[S, d]`.
    pub(super) teacher: Tensor,
    /// Supervised rows among the N + C rows, in the order of their target states, `[R]`.
    pub(super) rows: Tensor,
    /// Depth · N + anchor's position among the N positions, of each supervised row, `[R]`.
    pub(super) places: Tensor,
    /// Depth of each supervised row, R entries.
    depths_of_rows: Vec<usize>,
    /// Index of each supervised row's target state in `teacher`, on the host and on the device. It ascends.
    sources: (Vec<i64>, Tensor),
    /// Input token of each row, `[N + C]`.
    tokens: UploadSlice,
    /// Rotary position of each row, `[N + C]`.
    positions: UploadSlice,
    /// Anchor of each row of a later depth within its sequence, and its depth, `[C]` each.
    anchors_and_depths: [UploadSlice; 2],
    /// The upload whose slices are the lists above.
    lists: Uploaded,
}

/// Rows of one sequence in a segment.
struct SequenceRows<'a> {
    sample: &'a TrainSample,
    /// Number of positions, up to the last one that has a loss or an anchor.
    positions: usize,
    /// Supervised positions of depth 0.
    supervised: Vec<usize>,
    /// Anchor and depth of each row of a later depth, chain after chain.
    chained: Vec<(usize, usize)>,
}

impl<'a> SequenceRows<'a> {
    /// None if the sequence has no supervised row in the segment.
    fn new(sample: &'a TrainSample, anchors: &Range<usize>) -> Option<Self> {
        let is_inside = |anchor: &usize| anchors.contains(anchor);
        let supervised: Vec<usize> = supervised_positions(&sample.loss_mask).filter(is_inside).collect();
        let chains = chains(&sample.anchors).filter(|(anchor, _)| is_inside(anchor));
        let chained: Vec<(usize, usize)> =
            chains.flat_map(|(anchor, len)| (1..=len).map(move |depth| (anchor, depth))).collect();
        let last = supervised.last().copied().max(chained.last().map(|&(anchor, _)| anchor))?;
        Some(Self { sample, positions: last + 1, supervised, chained })
    }

    /// Reference position, depth, anchor and number among the rows of its depth, of each supervised row in the order of target states.
    /// The number counts positions for depth 0, and rows of later depths otherwise.
    fn by_reference(&self) -> Vec<(usize, usize, usize, usize)> {
        let first = self.supervised.iter().map(|&position| (position, 0, position, position));
        let later = self.chained.iter().enumerate();
        let later = later.map(|(row, &(anchor, depth))| (anchor + depth, depth, anchor, row));
        let mut rows: Vec<_> = first.chain(later).collect();
        rows.sort_unstable();
        rows
    }

    /// Ranges of rows of later depths that attend in one call each. A call has whole chains.
    fn calls(&self) -> Vec<Range<usize>> {
        let mut calls: Vec<Range<usize>> = vec![];
        let mut start = 0;
        for chain in self.chained.chunk_by(|a, b| a.0 == b.0) {
            let rows = start..start + chain.len();
            start = rows.end;
            match calls.last_mut() {
                Some(call) if rows.end - call.start <= MAX_CALL_ROWS => call.end = rows.end,
                _ => calls.push(rows),
            }
        }
        calls
    }
}

impl PEagleBatch {
    /// The batch of segment `index` of `count` on `device`. None if the segment has no supervised row. The samples' hidden states may be
    /// on another device, the same for all samples.
    ///
    /// # Panics
    /// If a sample lacks the final state that predicts a supervised label.
    pub fn new(
        samples: &[TrainSample],
        mask_token_id: i64,
        (index, count): (usize, usize),
        device: Device,
        kind: Kind,
    ) -> Option<Self> {
        let _range = range(c"upload");
        let rows_of = |sample| SequenceRows::new(sample, &segment(&sample.anchors, index, count));
        let used: Vec<SequenceRows> = samples.iter().filter_map(rows_of).collect();
        let source_device = used.first()?.sample.taps.device();
        let total: usize = used.iter().map(|sequence| sequence.positions).sum();
        let mut lists = Upload::default();
        let (mut calls, mut teachers) = (vec![], vec![]);
        let (mut rows, mut places, mut depths_of_rows, mut sources) = (vec![], vec![], vec![], vec![]);
        let (mut first, mut first_chained, mut states) = (0, 0, 0);
        for sequence in &used {
            for call in sequence.calls() {
                calls.push(ChainCall {
                    first: (first_chained + call.start) as i64,
                    rows: call.len() as i64,
                    first_key: first as i64,
                    keys: sequence.chained[call.end - 1].0 as i64 + 1,
                });
            }
            let mut own = vec![];
            let mut last = None;
            for (reference, depth, anchor, number) in sequence.by_reference() {
                if last != Some(reference) {
                    // The state of token p + 1 predicts token p + 2.
                    own.push(sequence.sample.final_state_row_index(reference + 1));
                    last = Some(reference);
                }
                let row = if depth == 0 { first + number } else { total + first_chained + number };
                rows.push(row as i64);
                places.push((depth * total + first + anchor) as i64);
                depths_of_rows.push(depth);
                sources.push(states + own.len() as i64 - 1);
            }
            states += own.len() as i64;
            teachers.push(lists.push(own));
            first += sequence.positions;
            first_chained += sequence.chained.len();
        }
        let chained = || used.iter().flat_map(|sequence| &sequence.chained);
        let real = |sequence: &SequenceRows<'_>| sequence.sample.input_ids[1..=sequence.positions].to_vec();
        let tokens = used.iter().flat_map(real).chain(chained().map(|_| mask_token_id));
        let tokens = lists.push(tokens);
        let positions = used.iter().flat_map(|sequence| 0..sequence.positions);
        let positions = positions.chain(chained().map(|(anchor, depth)| anchor + depth));
        let positions = lists.push(positions.map(|position| position as i64));
        let anchors = lists.push(chained().map(|(anchor, _)| *anchor as i64));
        let depths = lists.push(chained().map(|(_, depth)| *depth as i64));
        let [rows, places] = [rows, places].map(|list| lists.push(list));
        let sources_there = lists.push(sources.iter().copied());
        let on_device = lists.send(device);
        let on_source = if source_device == device { None } else { Some(lists.send(source_device)) };
        let on_source = on_source.as_ref().unwrap_or(&on_device);
        let taps = used.iter().map(|sequence| sequence.sample.taps.narrow(0, 0, sequence.positions as i64));
        let teacher = used.iter().zip(&teachers);
        let teacher = teacher
            .map(|(sequence, rows)| sequence.sample.last.index_select(0, &on_source.slice(*rows)))
            .collect::<Vec<_>>();
        Some(Self {
            taps: cat_to_device(&taps.collect::<Vec<_>>(), source_device, device, kind),
            lengths: used.iter().map(|sequence| sequence.positions as i64).collect(),
            chain_rows: first_chained as i64,
            calls,
            teacher: cat_to_device(&teacher, source_device, device, kind),
            rows: on_device.slice(rows),
            places: on_device.slice(places),
            depths_of_rows,
            sources: (sources, on_device.slice(sources_there)),
            tokens,
            positions,
            anchors_and_depths: [anchors, depths],
            lists: on_device,
        })
    }

    /// Number of positions, N.
    pub(super) fn positions(&self) -> i64 {
        self.lengths.iter().sum()
    }

    /// Input token of each row, `[N + C]`.
    pub(super) fn tokens(&self) -> Tensor {
        self.lists.slice(self.tokens)
    }

    /// Rotary position of each row, `[N + C]`.
    pub(super) fn row_positions(&self) -> Tensor {
        self.lists.slice(self.positions)
    }

    /// Index from supervised rows to target states.
    pub(super) fn teacher_index(&self) -> TeacherIndex<'_> {
        TeacherIndex { of_rows: &self.sources.0, there: &self.sources.1 }
    }

    /// Additive mask of each attention call. A row of a later depth sees the positions up to its anchor, and the rows of its chain up to
    /// its depth.
    pub(super) fn call_masks(&self, spec: &AttentionSpec, kind: Kind) -> Vec<Tensor> {
        let [anchors, depths] = self.anchors_and_depths.map(|list| self.lists.slice(list));
        let mask = |call: &ChainCall| {
            let [anchors, depths] = [&anchors, &depths].map(|list| list.narrow(0, call.first, call.rows));
            let (own_anchor, own_depth) = (anchors.unsqueeze(1), depths.unsqueeze(1));
            let positions = Tensor::arange(call.keys, (Kind::Int64, anchors.device()));
            let behind_anchor = positions.gt_tensor(&own_anchor); // [rows, keys]
            let elsewhere = anchors.ne_tensor(&own_anchor).logical_or(&depths.gt_tensor(&own_depth));
            additive_mask(spec, &Tensor::cat(&[behind_anchor, elsewhere], 1), kind)
        };
        self.calls.iter().map(mask).collect()
    }

    /// Supervised rows in the order of their depths: the number of each depth, indices among the R rows, and their target states,
    /// `[R, d]`.
    pub(super) fn rows_by_depth(&self, depths: usize) -> (Vec<i64>, Tensor, Tensor) {
        let of_depth = |depth: usize| {
            let rows = self.depths_of_rows.iter().enumerate();
            rows.filter_map(move |(row, &own)| (own == depth).then_some(row as i64)).collect::<Vec<_>>()
        };
        let by_depth: Vec<Vec<i64>> = (0..depths).map(of_depth).collect();
        let counts = by_depth.iter().map(|rows| rows.len() as i64).collect();
        let order = Tensor::from_slice(&by_depth.concat()).to_device(self.rows.device());
        let sources = self.sources.1.index_select(0, &order);
        (counts, order, self.teacher.index_select(0, &sources))
    }
}
