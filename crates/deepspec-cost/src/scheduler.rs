//! Hardware-aware prefix scheduler: decides how many drafted tokens of each request to verify
//! (Algorithm 1; docs/architecture.md, Prefix scheduler).
//!
//! R requests with confidences c_{r,j} have survivals a_{r,j}. A batch that verifies the prefixes
//! l_r has B = Σ_r (1 + l_r) tokens. It yields τ = Σ_r (1 + Σ_{j≤l_r} a_{r,j}) tokens in
//! expectation, at Θ = τ · SPS(B) tokens per second. Since a never rises along a request, the best
//! prefixes of any total length are the largest survivals.

use crate::ScheduleError;
use crate::curve::CostCurve;
use crate::survival::{check_confidences, survival_probabilities};

/// A plan for one verification pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// Number of drafted tokens l_r to verify, per request.
    pub lengths: Vec<usize>,
    /// Batch size B in tokens: one per request, and the drafted tokens.
    pub batch: usize,
    /// Expected number of committed tokens τ.
    pub expected_tokens: f64,
    /// Expected tokens per second Θ.
    pub throughput: f64,
    /// Number of candidates evaluated, including the one that stopped the search.
    pub evaluated: usize,
    /// Whether the search stopped before the candidates ran out.
    pub stopped_early: bool,
}

/// Algorithm 1: admits candidates best first and stops at the first that does not raise Θ.
///
/// The stop keeps decoding lossless: whether token j of a request is verified depends on no later
/// token. A search past the first drop would let c_{j+1}, which depends on token j, decide on token
/// j (the paper's Appendix A).
///
/// # Errors
/// Fails if a confidence is not a probability, or if there are more requests than the curve's
/// largest batch.
pub fn prefix_lengths<C: AsRef<[f64]>>(
    confidences: &[C],
    curve: &CostCurve,
) -> Result<Schedule, ScheduleError> {
    check_inputs(confidences, curve)?;
    Ok(search_prefixes(confidences, StepCostAt { curve, fixed_seconds: 0.0 }, StopRule::FirstDrop))
}

/// The schedule of highest Θ over all prefixes of tokens with a > 0. It is not lossless for the
/// tokens whose confidences it read. Use its [`Schedule::budget`] for a later step, or as an upper
/// bound on early stopping.
///
/// # Errors
/// As [`prefix_lengths`].
pub fn global_prefix_lengths<C: AsRef<[f64]>>(
    confidences: &[C],
    curve: &CostCurve,
) -> Result<Schedule, ScheduleError> {
    check_inputs(confidences, curve)?;
    Ok(search_prefixes(confidences, StepCostAt { curve, fixed_seconds: 0.0 }, StopRule::Never))
}

/// Asynchronous form: spends a budget of drafted tokens, set by [`Schedule::budget`] of the step
/// before last, on the best current candidates. Returns l_r. Tokens of survival 0 are never
/// verified.
///
/// # Errors
/// Fails if a confidence is not a probability.
pub fn fill_budget<C: AsRef<[f64]>>(confidences: &[C], budget: usize) -> Result<Vec<usize>, ScheduleError> {
    confidences.iter().try_for_each(|row| check_confidences(row.as_ref()))?;
    Ok(lengths_within_budget(confidences.len(), &sorted_candidates(confidences), budget))
}

impl Schedule {
    /// Number of drafted tokens in the pass: K = B − R.
    pub fn budget(&self) -> usize {
        self.batch - self.lengths.len()
    }
}

/// Step cost at a number of requests and a context length, as a function of the verified tokens.
#[derive(Clone, Copy)]
pub(crate) struct StepCostAt<'a> {
    /// Cost of verification.
    pub curve: &'a CostCurve,
    /// Seconds that do not depend on the verified tokens, mainly for drafting.
    pub fixed_seconds: f64,
}

impl StepCostAt<'_> {
    /// Throughput Θ of a batch of `batch` tokens that commits `tokens` tokens in expectation.
    pub fn throughput(&self, batch: usize, tokens: f64) -> f64 {
        let rate = self.curve.steps_per_second(batch);
        tokens * rate / (1.0 + self.fixed_seconds * rate)
    }

    /// [`Self::throughput`] of a fractional batch: step times are interpolated between the
    /// neighbouring sizes. 0 past the curve.
    pub fn throughput_between(&self, batch: f64, tokens: f64) -> f64 {
        let (below, above) = (batch.floor(), batch.ceil());
        let [fast, slow] = [below, above].map(|batch| self.curve.steps_per_second(batch as usize));
        if slow == 0.0 {
            return 0.0;
        }
        let seconds = 1.0 / fast + (1.0 / slow - 1.0 / fast) * (batch - below);
        tokens / (seconds + self.fixed_seconds)
    }
}

/// When the search for the best prefixes ends.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum StopRule {
    /// At the first candidate that does not raise the throughput.
    FirstDrop,
    /// After all candidates.
    Never,
}

/// A drafted token that may be verified.
#[derive(Clone, Copy)]
struct Candidate {
    survival: f64,
    request: u32,
    position: u32,
}

/// Number of mantissa bits of a survival probability that select its bucket.
const FRACTION_BITS: u32 = 7;
/// Number of buckets of the sort; survivals below 2⁻²⁴ share the last one.
const NUM_BUCKETS: usize = (24 << FRACTION_BITS) + 1;

/// Sort bucket of a survival probability in (0, 1]. Higher probabilities get lower bucket indices.
fn sort_bucket(survival: f64) -> usize {
    const ONE: u64 = 1f64.to_bits();
    // Positive floats are ordered like their bits.
    (((ONE - survival.to_bits()) >> (52 - FRACTION_BITS)) as usize).min(NUM_BUCKETS - 1)
}

/// All drafted tokens with a > 0, by descending a_{r,j}, with ties by request and then by position.
/// Every prefix of this list is a set of prefixes. The bucket sort is linear in the tokens, except
/// within a bucket.
fn sorted_candidates<C: AsRef<[f64]>>(confidences: &[C]) -> Vec<Candidate> {
    let mut found = Vec::with_capacity(confidences.iter().map(|row| row.as_ref().len()).sum());
    let mut starts = vec![0u32; NUM_BUCKETS + 1];
    for (request, row) in confidences.iter().enumerate() {
        for (position, survival) in survival_probabilities(row.as_ref()).take_while(|&a| a > 0.0).enumerate()
        {
            starts[sort_bucket(survival) + 1] += 1;
            found.push(Candidate { survival, request: request as u32, position: position as u32 });
        }
    }
    let mut sum = 0;
    for start in &mut starts {
        sum += *start;
        *start = sum;
    }
    let mut sorted = found.clone();
    for &candidate in &found {
        let next = &mut starts[sort_bucket(candidate.survival)];
        sorted[*next as usize] = candidate;
        *next += 1;
    }
    // Buckets are small. The sort is stable and detects runs, so ties keep their order.
    let mut begin = 0;
    for &end in &starts[..NUM_BUCKETS] {
        let (first, last) = (begin as usize, end as usize);
        if last - first > 1 {
            sorted[first..last].sort_by(|a, b| b.survival.total_cmp(&a.survival));
        }
        begin = end;
    }
    sorted
}

/// Survival probabilities of all candidates, descending.
pub(crate) fn sorted_survivals<C: AsRef<[f64]>>(confidences: &[C]) -> impl Iterator<Item = f64> {
    sorted_candidates(confidences).into_iter().map(|candidate| candidate.survival)
}

fn check_inputs<C: AsRef<[f64]>>(confidences: &[C], curve: &CostCurve) -> Result<(), ScheduleError> {
    let (requests, max_batch) = (confidences.len(), curve.max_batch());
    if requests > max_batch {
        return Err(ScheduleError::BeyondCurve { requests, max_batch });
    }
    confidences.iter().try_for_each(|row| check_confidences(row.as_ref()))
}

/// Lengths of [`fill_budget`], and the best budget for a later step by these confidences.
pub(crate) fn fill_and_next_budget<C: AsRef<[f64]>>(
    confidences: &[C],
    budget: usize,
    cost_at: StepCostAt,
) -> (Vec<usize>, usize) {
    let (requests, candidates) = (confidences.len(), sorted_candidates(confidences));
    let worth = search_sorted(requests, &candidates, cost_at, StopRule::Never).budget();
    (lengths_within_budget(requests, &candidates, budget), worth)
}

/// Number of tokens l_r of each request among the first `budget` candidates.
fn lengths_within_budget(requests: usize, candidates: &[Candidate], budget: usize) -> Vec<usize> {
    let mut lengths = vec![0; requests];
    for candidate in candidates.iter().take(budget) {
        lengths[candidate.request as usize] = candidate.position as usize + 1;
    }
    lengths
}

/// Searches the prefixes with the highest throughput. All prefixes are empty if the curve's largest
/// batch has fewer tokens than requests.
pub(crate) fn search_prefixes<C: AsRef<[f64]>>(
    confidences: &[C],
    cost_at: StepCostAt,
    stop: StopRule,
) -> Schedule {
    search_sorted(confidences.len(), &sorted_candidates(confidences), cost_at, stop)
}

fn search_sorted(requests: usize, candidates: &[Candidate], cost_at: StepCostAt, stop: StopRule) -> Schedule {
    let (mut batch, mut expected_tokens) = (requests, requests as f64); // each request commits one token in any case
    let mut best = Schedule {
        lengths: vec![],
        batch,
        expected_tokens,
        throughput: cost_at.throughput(batch, expected_tokens),
        evaluated: 0,
        stopped_early: false,
    };
    for candidate in candidates {
        (batch, expected_tokens) = (batch + 1, expected_tokens + candidate.survival);
        best.evaluated += 1;
        let throughput = cost_at.throughput(batch, expected_tokens);
        if throughput > best.throughput {
            (best.batch, best.expected_tokens, best.throughput) = (batch, expected_tokens, throughput);
        } else if stop == StopRule::FirstDrop {
            best.stopped_early = true;
            break;
        }
    }
    best.lengths = lengths_within_budget(requests, candidates, best.batch - requests);
    best
}
