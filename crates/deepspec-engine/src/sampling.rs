//! Sampling: logits to distributions, and distributions to tokens.

use deepspec_ops::{argmax, sample};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

/// Below this temperature a distribution is one-hot at its argmax.
const GREEDY_TEMPERATURE: f64 = 1e-5;

/// Sampling settings of one sequence. They apply in the order temperature, top-k, top-p, min-p.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Divides the logits; below 1e-5 sampling is greedy.
    pub temperature: f64,
    /// Keeps the smallest set of most likely tokens whose mass reaches this; 1 keeps all.
    pub top_p: f64,
    /// Keeps this many most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Drops tokens less likely than this fraction of the most likely token's probability; 0 keeps all.
    pub min_p: f64,
    /// Seed of every draw of this sequence.
    pub seed: u64,
}

impl Sampling {
    /// Sampling without top-k, top-p and min-p.
    pub fn new(temperature: f64, seed: u64) -> Self {
        Self { temperature, top_p: 1.0, top_k: 0, min_p: 0.0, seed }
    }

    /// Whether sampling takes the argmax.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_TEMPERATURE
    }

    /// `[temperature, greedy flag, top_k, top_p, min_p]`, in which a disabled filter has a value that keeps all tokens.
    pub(crate) fn parameters(&self) -> [f64; NUM_SAMPLING_PARAMETERS] {
        let temperature = if self.is_greedy() { 1.0 } else { self.temperature };
        let greedy = f64::from(u8::from(self.is_greedy()));
        let (top_k, top_p, min_p) = match self.has_filters() {
            true => (if self.top_k > 0 { self.top_k as f64 } else { f64::INFINITY }, self.top_p, self.min_p),
            false => (f64::INFINITY, 1.0, 0.0),
        };
        [temperature, greedy, top_k, top_p, min_p]
    }

    /// Whether top-k, top-p or min-p applies.
    fn has_filters(&self) -> bool {
        !self.is_greedy() && (self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0)
    }

    /// Whether `topk` selects the tokens to filter.
    fn uses_topk(&self) -> bool {
        self.has_filters() && (1..=MAX_TOPK).contains(&self.top_k)
    }

    /// Whether the whole vocabulary is sorted for filtering.
    fn uses_sort(&self) -> bool {
        self.has_filters() && !self.uses_topk()
    }
}

/// Up to this top-k, `topk` selects the most likely tokens. Above it, and without top-k, the whole vocabulary is
/// sorted. In both cases libtorch chooses the order of equal probabilities.
const MAX_TOPK: usize = 1024;

/// Length of one sequence's settings on the device; see [`Sampling::parameters`].
pub const NUM_SAMPLING_PARAMETERS: usize = 5;

/// Sampling settings of S sequences as tensors.
pub struct SamplingBatch {
    rows: Vec<Sampling>,
    parameters: Tensor, // [S, NUM_SAMPLING_PARAMETERS] float64
}

impl SamplingBatch {
    /// Settings of a batch, one per row.
    pub fn new(rows: Vec<Sampling>, device: Device) -> Self {
        let parameters: Vec<f64> = rows.iter().flat_map(Sampling::parameters).collect();
        let parameters =
            Tensor::from_slice(&parameters).view([-1, NUM_SAMPLING_PARAMETERS as i64]).to_device(device);
        Self { rows, parameters }
    }

    /// A batch whose [`Sampling::parameters`] are on the device already: `[S·NUM_SAMPLING_PARAMETERS]` float64.
    pub(crate) fn with_parameters(rows: Vec<Sampling>, parameters: &Tensor) -> Self {
        Self { rows, parameters: parameters.view([-1, NUM_SAMPLING_PARAMETERS as i64]) }
    }

    /// A copy of the batch with greedy sampling in every row.
    pub(crate) fn to_greedy(&self) -> Self {
        let rows = self.rows.iter().map(|row| Sampling { temperature: 0.0, ..*row }).collect();
        Self { rows, parameters: self.parameters.shallow_clone() }
    }

    /// Number of sequences S.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Temperature at which a row's tree ranks tokens: the sequence's own, or 1 if it samples greedily.
    pub fn ranking_temperature(&self, row: usize) -> f64 {
        let sampling = self.rows[row];
        if sampling.is_greedy() { 1.0 } else { sampling.temperature }
    }

    /// Whether the batch has no sequences.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Whether every row is greedy.
    pub(crate) fn is_greedy(&self) -> bool {
        self.rows.iter().all(Sampling::is_greedy)
    }

    /// Repeats row `i` of the settings `repeats[i]` times, for logits with several rows per
    /// sequence. `index`, `[Σ repeats]` int64, is the source row of each result row. It may be None
    /// if all rows are greedy.
    pub(crate) fn repeat_rows(&self, repeats: &[usize], index: Option<&Tensor>) -> Self {
        let rows = self.rows.iter().zip(repeats).flat_map(|(row, &n)| std::iter::repeat_n(*row, n)).collect();
        let parameters = index
            .map_or_else(|| self.parameters.shallow_clone(), |index| self.parameters.index_select(0, index));
        Self { rows, parameters }
    }

    /// Column `number` of the settings, `[S, 1]` float32.
    fn parameter_column(&self, number: i64) -> Tensor {
        self.parameters.narrow(1, number, 1).to_kind(Kind::Float)
    }

    /// Sampling distributions of the logits: float32 `[S, V]` from `[S, V]`.
    pub fn distributions(&self, logits: &Tensor) -> Tensor {
        if self.is_greedy() {
            return one_hot(&argmax(logits), logits.size()[1]);
        }
        let mut probs = deepspec_ops::temperature_softmax(logits, &self.parameter_column(0));
        if self.rows.iter().any(Sampling::has_filters) {
            probs = self.apply_filters(&probs);
        }
        if self.rows.iter().any(Sampling::is_greedy) {
            probs = one_hot(&argmax(logits), logits.size()[1])
                .where_self(&self.parameter_column(1).gt(0.0), &probs);
        }
        probs
    }

    /// Samples one token per row, `[S]`, of logits `[S, V]`; [`sample`] explains `uniforms [S]`. Also
    /// returns the [`Self::distributions`] `[S, V]`, or None if every row is greedy.
    pub fn sample(&self, logits: &Tensor, uniforms: &Tensor) -> (Tensor, Option<Tensor>) {
        if self.is_greedy() {
            return (argmax(logits), None);
        }
        let distributions = self.distributions(logits);
        (sample(&distributions, uniforms), Some(distributions))
    }

    /// Applies top-k, top-p and min-p row by row and renormalises. A row's result does not depend
    /// on other rows.
    fn apply_filters(&self, probs: &Tensor) -> Tensor {
        let most = (MAX_TOPK as i64).min(probs.size()[1]);
        let [top_k, top_p, min_p] = [2, 3, 4].map(|number| self.parameter_column(number));
        let uses_topk = top_k.le(MAX_TOPK as f64);
        let uses_sort = uses_topk
            .logical_not()
            .logical_and(&top_p.lt(1.0).logical_or(&min_p.gt(0.0)).logical_or(&top_k.isfinite()));
        let mut filtered = probs.shallow_clone();
        if self.rows.iter().any(Sampling::uses_topk) {
            filtered = self
                .filter_sorted(probs, &probs.topk(most, -1, true, true))
                .where_self(&uses_topk, &filtered);
        }
        if self.rows.iter().any(Sampling::uses_sort) {
            filtered = self.filter_sorted(probs, &probs.sort(-1, true)).where_self(&uses_sort, &filtered);
        }
        filtered
    }

    /// Filters and renormalises `probs`. `sorted` are the most likely probabilities of each row in
    /// descending order, and `order` are their token ids.
    fn filter_sorted(&self, probs: &Tensor, (sorted, order): &(Tensor, Tensor)) -> Tensor {
        let [top_k, top_p, min_p] = [2, 3, 4].map(|number| self.parameter_column(number));
        let rank = Tensor::arange(sorted.size()[1], (Kind::Float, probs.device())).unsqueeze(0);
        let kept = sorted * rank.lt_tensor(&top_k).to_kind(Kind::Float);
        let mass = row_sum(&kept);
        // A token stays if the mass before it, within the top-k set, is below top-p. The first
        // token always stays.
        let before = kept.cumsum(-1, Kind::Float) - &kept;
        let within = before.lt_tensor(&(&top_p * mass)).logical_or(&top_p.ge(1.0));
        let likely = sorted.ge_tensor(&(min_p * sorted.narrow(1, 0, 1)));
        let keep = within.logical_and(&likely).logical_or(&rank.lt(1.0));
        let kept = kept * keep.to_kind(Kind::Float);
        let kept = &kept / row_sum(&kept);
        probs.zeros_like().scatter(-1, order, &kept)
    }
}

/// Sum of each row of `[S, k]`: `[S, 1]` float32. It adds sequentially, because libtorch's parallel
/// sum depends on the number of rows and threads.
fn row_sum(weights: &Tensor) -> Tensor {
    let sums = weights.cumsum(-1, Kind::Double);
    sums.narrow(1, sums.size()[1] - 1, 1).to_kind(Kind::Float)
}

/// One-hot float32 distributions `[.., V]` of tokens `[..]` over a vocabulary of V.
pub(crate) fn one_hot(tokens: &Tensor, vocab: i64) -> Tensor {
    let size = [tokens.size().as_slice(), &[vocab]].concat();
    Tensor::zeros(size, (Kind::Float, tokens.device())).scatter_value_(-1, &tokens.unsqueeze(-1), 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Proposal;

    fn distribution(logits: &[f32], sampling: Sampling) -> Vec<f32> {
        let logits = Tensor::from_slice(logits).unsqueeze(0);
        Vec::try_from(SamplingBatch::new(vec![sampling], Device::Cpu).distributions(&logits).squeeze())
            .unwrap()
    }

    fn assert_near(found: &[f32], expected: &[f32]) {
        assert!(
            found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-6),
            "{found:?} instead of {expected:?}"
        );
    }

    #[test]
    fn filters_keep_what_they_say() {
        let logits: Vec<f32> = [0.5f32, 0.1, 0.3, 0.1].iter().map(|p| p.ln()).collect();
        let plain = Sampling::new(1.0, 0);
        assert_near(&distribution(&logits, plain), &[0.5, 0.1, 0.3, 0.1]);
        assert_near(&distribution(&logits, Sampling { top_k: 2, ..plain }), &[0.625, 0.0, 0.375, 0.0]);
        assert_near(&distribution(&logits, Sampling { top_p: 0.6, ..plain }), &[0.625, 0.0, 0.375, 0.0]);
        assert_near(&distribution(&logits, Sampling { top_p: 0.4, ..plain }), &[1.0, 0.0, 0.0, 0.0]);
        assert_near(&distribution(&logits, Sampling { min_p: 0.5, ..plain }), &[0.625, 0.0, 0.375, 0.0]);
        assert_near(&distribution(&logits, Sampling { top_p: 1e-50, ..plain }), &[1.0, 0.0, 0.0, 0.0]);
        assert_near(&distribution(&logits, Sampling { min_p: 2.0, ..plain }), &[1.0, 0.0, 0.0, 0.0]);
        assert_near(&distribution(&logits, Sampling::new(0.0, 0)), &[1.0, 0.0, 0.0, 0.0]);
        let hot = distribution(&logits, Sampling::new(2.0, 0));
        assert!(hot[0] < 0.5 && (hot.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn picking_out_the_likeliest_is_sorting() {
        let vocab = 3000;
        let logits = (Tensor::arange(vocab, (Kind::Float, Device::Cpu)) * 1.7).sin() * 4.0;
        for (top_p, min_p) in [(1.0, 0.0), (0.8, 0.0), (1.0, 0.2), (0.6, 0.1)] {
            for top_k in [1, 7, MAX_TOPK] {
                let picking = Sampling { top_k, top_p, min_p, ..Sampling::new(0.9, 1) };
                let batch = SamplingBatch::new(vec![picking], Device::Cpu);
                let probs = (logits.unsqueeze(0) / 0.9).softmax(-1, Kind::Float);
                let sorted = batch.filter_sorted(&probs, &probs.sort(-1, true));
                assert!(batch.apply_filters(&probs).allclose(&sorted, 1e-6, 1e-9, false), "{picking:?}");
            }
        }
        let all = [
            Sampling { top_k: 5, ..Sampling::new(1.0, 1) },
            Sampling::new(0.7, 2),
            Sampling { top_p: 0.5, ..Sampling::new(1.0, 3) },
            Sampling { top_k: MAX_TOPK + 1, ..Sampling::new(1.0, 4) },
        ];
        let together = SamplingBatch::new(all.to_vec(), Device::Cpu).distributions(&logits.repeat([4, 1]));
        for (row, setting) in all.into_iter().enumerate() {
            let alone = SamplingBatch::new(vec![setting], Device::Cpu).distributions(&logits.unsqueeze(0));
            assert!(alone.squeeze().equal(&together.get(row as i64)), "{setting:?}");
        }
    }

    #[test]
    fn rows_of_a_batch_do_not_touch_each_other() {
        let logits = Tensor::from_slice(&[0.1f32, 2.0, 0.3, 1.5, 0.2, 0.9]).view([2, 3]);
        let settings = [Sampling::new(0.0, 1), Sampling { top_k: 2, ..Sampling::new(0.7, 2) }];
        let together = SamplingBatch::new(settings.to_vec(), Device::Cpu).distributions(&logits);
        for (row, setting) in settings.into_iter().enumerate() {
            let alone = SamplingBatch::new(vec![setting], Device::Cpu)
                .distributions(&logits.narrow(0, row as i64, 1));
            assert!(alone.squeeze().allclose(&together.get(row as i64), 0.0, 1e-7, false));
        }
    }

    /// Results are equal bit for bit, although one position of many blocks is not contiguous and
    /// one of a single block is.
    #[test]
    fn a_distribution_does_not_depend_on_the_number_of_blocks() {
        let logits =
            (Tensor::arange(3 * 4 * 151_936, (Kind::Float, Device::Cpu)) * 0.7).sin().view([3, 4, 151_936])
                * 6.0;
        let plain = [0.3, 1.0, 1.7].map(|temperature| Sampling::new(temperature, 1));
        let cut = plain.map(|plain| Sampling { top_p: 0.9, ..plain });
        for (settings, slot) in
            [plain, cut].into_iter().flat_map(|settings| (0..4).map(move |slot| (settings, slot)))
        {
            let together =
                SamplingBatch::new(settings.to_vec(), Device::Cpu).distributions(&logits.select(1, slot));
            for (block, setting) in settings.into_iter().enumerate() {
                let logits = logits.narrow(0, block as i64, 1).select(1, slot);
                let alone = SamplingBatch::new(vec![setting], Device::Cpu).distributions(&logits);
                assert!(alone.squeeze().equal(&together.get(block as i64)), "{setting:?}, slot {slot}");
            }
        }
    }

    #[test]
    fn a_greedy_batch_draws_as_one_hots_do() {
        let logits = Tensor::from_slice(&[0.5f32, 2.0, -1.0, 3.0, 1.0, 2.9]).view([2, 3]);
        let batch = SamplingBatch::new(vec![Sampling::new(0.0, 1); 2], Device::Cpu);
        for uniform in [0.0, 0.5, 0.999_999_9] {
            let uniforms = Tensor::from_slice(&[uniform; 2]);
            let (tokens, distributions) = batch.sample(&logits, &uniforms);
            assert!(distributions.is_none());
            let one_hots = batch.distributions(&logits);
            assert_eq!(tokens, sample(&one_hots, &uniforms));
            let proposal = Proposal::stack(vec![(tokens, None)], None);
            assert_eq!(proposal.draft_probs(1, 3), one_hots.unsqueeze(1));
        }
    }

    #[test]
    fn draws_invert_the_cdf() {
        let weights = Tensor::from_slice(&[0.2f32, 0.0, 0.8]).unsqueeze(0).expand([4, 3], false);
        let tokens = sample(&weights, &Tensor::from_slice(&[0.0, 0.19, 0.21, 0.999_999_9]));
        assert_eq!(Vec::<i64>::try_from(tokens).unwrap(), [0, 0, 2, 2]);
    }
}
