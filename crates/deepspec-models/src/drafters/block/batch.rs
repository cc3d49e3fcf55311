//! From samples and anchors to the tensors of one training pass. Sequences lie end to end: no padding, no dummy anchors.

use tch::{Device, Kind, Tensor};

use super::config::BlockConfig;

/// One training sequence with the target's states.
pub struct TrainSample {
    /// Token ids, T of them.
    pub input_ids: Vec<i64>,
    /// Supervised tokens, T flags.
    pub loss_mask: Vec<bool>,
    /// Captured states `[T, m·d]`.
    pub taps: Tensor,
    /// Final-normed states `[M, d]` of some positions.
    pub last: Tensor,
    /// Their positions, increasing.
    pub last_positions: Vec<u32>,
    /// Anchor positions of this pass, increasing; each one a candidate by [`anchor_candidates`].
    pub anchors: Vec<usize>,
}

impl TrainSample {
    /// Row of `last` that holds the state of the token at `position`.
    ///
    /// # Panics
    /// If it is not there; a caller's samples hold the states that predict supervised labels, by contract.
    pub(in crate::drafters) fn last_row(&self, position: usize) -> i64 {
        match self.last_positions.binary_search(&(position as u32)) {
            Ok(row) => row as i64,
            Err(_) => panic!(
                "the sample lacks the last hidden state of position {position}, which predicts a supervised label"
            ),
        }
    }
}

/// Where a block may start: i ≤ T − 2 with token i and token i + 1 supervised.
pub fn anchor_candidates(loss_mask: &[bool]) -> Vec<usize> {
    loss_mask.windows(2).enumerate().filter(|(_, pair)| pair[0] && pair[1]).map(|(i, _)| i).collect()
}

/// How many leading slots of the block at `anchor` are supervised: the run of set mask flags behind it, at most γ.
pub fn eval_mask(loss_mask: &[bool], anchor: usize, block_size: usize) -> usize {
    loss_mask.iter().skip(anchor + 1).take(block_size).take_while(|&&supervised| supervised).count()
}

/// Loss weight of position k of a block: exp(−k / γ_decay).
pub fn slot_weight(k: usize, decay_gamma: f64) -> f32 {
    (-(k as f64) / decay_gamma).exp() as f32
}

/// One sequence inside a batch.
pub struct SequenceSpan {
    pub(super) first_token: i64,
    pub(super) token_count: i64,
    pub(super) first_block: i64,
    pub(super) block_count: i64,
    /// 0 where the block sees the context position, −∞ elsewhere: `[A, 1, T]`.
    pub(super) mask: Tensor,
    /// `[A, 1, 1]`.
    anchors: Tensor,
}

impl SequenceSpan {
    /// −∞ for the keys that a window puts out of a slot's sight, 0 for the others: context `[A, γ, T]` and own block `[γ, γ]`.
    pub(super) fn outside(&self, gamma: i64, window: i64) -> (Tensor, Tensor) {
        let options = (Kind::Int64, self.mask.device());
        let slots = Tensor::arange(gamma, options).unsqueeze(1); // [γ, 1]
        let far = |keys: Tensor, own: &Tensor| {
            let hidden = keys.le_tensor(&(own - window));
            Tensor::zeros(hidden.size(), (self.mask.kind(), self.mask.device()))
                .masked_fill(&hidden, f64::NEG_INFINITY)
        };
        let context = far(Tensor::arange(self.token_count, options), &(&self.anchors + &slots));
        (context, far(Tensor::arange(gamma, options), &slots))
    }
}

/// The tensors of one pass over some sequences with ΣT tokens and A anchors in total.
pub struct BlockBatch {
    pub(super) spans: Vec<SequenceSpan>,
    pub(super) taps: Tensor,              // [ΣT, m·d]
    pub(super) context_positions: Tensor, // [ΣT]
    pub(super) block_tokens: Tensor,      // [A, γ]: anchor, mask, …
    pub(super) block_positions: Tensor,   // [A·γ]
    /// Token before each label, `[A, γ]`: the anchor, then the labels.
    pub(super) previous: Tensor,
    /// Supervised slots as indices into A·γ, `[R]`.
    pub(super) rows: Tensor,
    /// Their labels, `[R]`.
    pub(super) labels: Tensor,
    /// Their loss weights exp(−k/γ_decay), `[R]` float32.
    pub(super) weights: Tensor,
    /// Their positions k inside the block, `[R]`.
    pub(super) slots: Tensor,
    /// Target states that predict the labels, `[R, d]`.
    pub(super) teacher: Tensor,
    /// Supervised slots of each block.
    pub(super) counts: Vec<usize>,
    /// A, number of blocks.
    pub(super) blocks: usize,
}

impl BlockBatch {
    /// Lays out the samples' anchors. None if no sample has any.
    ///
    /// # Panics
    /// If the state of a supervised label's predecessor is not among a sample's `last_positions`; a cache that keeps
    /// supervised rows has them all.
    pub fn new(
        samples: &[TrainSample],
        config: &BlockConfig,
        decay_gamma: f64,
        device: Device,
        kind: Kind,
    ) -> Option<Self> {
        let gamma = config.block_size;
        let (mut spans, mut taps, mut teacher) = (vec![], vec![], vec![]);
        let (mut context_positions, mut block_tokens, mut block_positions, mut previous) =
            (vec![], vec![], vec![], vec![]);
        let (mut rows, mut labels, mut weights, mut slots) = (vec![], vec![], vec![], vec![]);
        let mut counts = vec![];
        let (mut tokens, mut blocks) = (0, 0);
        for sample in samples.iter().filter(|sample| !sample.anchors.is_empty()) {
            let (ids, length) = (&sample.input_ids, sample.input_ids.len());
            context_positions.extend(0..length as i64);
            taps.push(sample.taps.to_device(device).to_kind(kind));
            let mut teacher_rows = vec![];
            for (b, &anchor) in sample.anchors.iter().enumerate() {
                for k in 0..gamma {
                    block_tokens.push(if k == 0 { ids[anchor] } else { config.mask_token_id });
                    block_positions.push((anchor + k) as i64);
                    previous.push(ids[(anchor + k).min(length - 1)]);
                }
                let supervised = eval_mask(&sample.loss_mask, anchor, gamma);
                counts.push(supervised);
                for k in 0..supervised {
                    rows.push(((blocks + b) * gamma + k) as i64);
                    labels.push(ids[anchor + 1 + k]);
                    weights.push(slot_weight(k, decay_gamma));
                    slots.push(k as i64);
                    teacher_rows.push(sample.last_row(anchor + k));
                }
            }
            let teacher_rows = Tensor::from_slice(&teacher_rows).to_device(sample.last.device());
            teacher.push(sample.last.index_select(0, &teacher_rows).to_device(device).to_kind(kind));
            let count = sample.anchors.len();
            let anchors: Vec<i64> = sample.anchors.iter().map(|&anchor| anchor as i64).collect();
            let anchors = Tensor::from_slice(&anchors).to_device(device).view([-1, 1, 1]);
            let hidden = Tensor::arange(length as i64, (Kind::Int64, device)).ge_tensor(&anchors); // [A, 1, T]
            let mask = Tensor::zeros(hidden.size(), (kind, device)).masked_fill(&hidden, f64::NEG_INFINITY);
            spans.push(SequenceSpan {
                first_token: tokens as i64,
                token_count: length as i64,
                first_block: blocks as i64,
                block_count: count as i64,
                mask,
                anchors,
            });
            tokens += length;
            blocks += count;
        }
        if blocks == 0 {
            return None;
        }
        let ints = |values: &[i64]| Tensor::from_slice(values).to_device(device);
        let by_block = [blocks as i64, gamma as i64];
        Some(Self {
            spans,
            taps: Tensor::cat(&taps, 0),
            context_positions: ints(&context_positions),
            block_tokens: ints(&block_tokens).view(by_block),
            block_positions: ints(&block_positions),
            previous: ints(&previous).view(by_block),
            rows: ints(&rows),
            labels: ints(&labels),
            weights: Tensor::from_slice(&weights).to_device(device),
            slots: ints(&slots),
            teacher: Tensor::cat(&teacher, 0),
            counts,
            blocks,
        })
    }

    /// Token before each label, `[A, γ]`: the anchor, then the labels.
    pub fn previous(&self) -> &Tensor {
        &self.previous
    }

    /// Supervised slots as indices into A·γ, in order, `[R]`.
    pub fn rows(&self) -> &Tensor {
        &self.rows
    }

    /// Labels of the supervised slots, `[R]`.
    pub fn labels(&self) -> &Tensor {
        &self.labels
    }

    /// Loss weights of the supervised slots, `[R]` float32.
    pub fn weights(&self) -> &Tensor {
        &self.weights
    }

    /// The target's states that predict the labels, `[R, d]`.
    pub fn teacher(&self) -> &Tensor {
        &self.teacher
    }

    /// A, the number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }
}
