//! How many drafted tokens of each request to verify: the hardware-aware prefix scheduler (Algorithm 1; ARCHITECTURE.md, Prefix scheduler).
//!
//! R requests with confidences c_{r,j} give survivals a_{r,j}. A batch that verifies the prefixes l_r has B = Σ_r (1 + l_r)
//! tokens and yields τ = Σ_r (1 + Σ_{j≤l_r} a_{r,j}) tokens in expectation, at Θ = τ · SPS(B) tokens per second. Because a
//! never rises along a request, the best prefixes of any total length are simply the largest survivals.

use crate::ScheduleError;
use crate::curve::CostCurve;
use crate::survival::{check_confidences, survival};

/// A plan for one verification pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// l_r: drafted tokens to verify per request.
    pub lengths: Vec<usize>,
    /// B: tokens in the pass, one per request and the drafted ones.
    pub batch: usize,
    /// τ: tokens expected from the pass.
    pub expected_tokens: f64,
    /// Θ: tokens expected per second.
    pub throughput: f64,
    /// Candidates looked at, including the one that stopped the search.
    pub evaluated: usize,
    /// Whether the search stopped before the candidates ran out.
    pub stopped_early: bool,
}

/// Algorithm 1: admits candidates best first and stops at the first that does not raise Θ.
///
/// The stop keeps decoding lossless: whether token j of a request is verified depends on nothing behind it. With
/// a search past the first drop, c_{j+1}, which saw token j, would decide on token j (the paper's Appendix A).
///
/// # Errors
/// A confidence is no probability, or there are more requests than the curve has batches.
pub fn prefix_lengths<C: AsRef<[f64]>>(
    confidences: &[C],
    curve: &CostCurve,
) -> Result<Schedule, ScheduleError> {
    search(confidences, curve, Stop::FirstDrop)
}

/// The plan of highest Θ over all prefixes of tokens that can survive (a > 0). Not lossless when applied to the very tokens whose confidences it saw: use its
/// [`Schedule::budget`] for a later step, or as the bound that early stopping falls short of.
///
/// # Errors
/// As [`prefix_lengths`].
pub fn global_prefix_lengths<C: AsRef<[f64]>>(
    confidences: &[C],
    curve: &CostCurve,
) -> Result<Schedule, ScheduleError> {
    search(confidences, curve, Stop::Never)
}

/// Asynchronous form: spends a budget of drafted tokens, fixed by [`Schedule::budget`] of the step before last, on the best
/// of the current candidates. Returns l_r. Tokens of survival 0 are never verified.
///
/// # Errors
/// A confidence is no probability.
pub fn fill<C: AsRef<[f64]>>(confidences: &[C], budget: usize) -> Result<Vec<usize>, ScheduleError> {
    let mut lengths = vec![0; confidences.len()];
    for candidate in candidates(confidences)?.iter().take(budget) {
        lengths[candidate.request] = candidate.position + 1;
    }
    Ok(lengths)
}

impl Schedule {
    /// K = B − R: drafted tokens in the pass.
    pub fn budget(&self) -> usize {
        self.batch - self.lengths.len()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Stop {
    FirstDrop,
    Never,
}

struct Candidate {
    survival: f64,
    request: usize,
    position: usize,
}

/// All drafted tokens that can survive, by descending a_{r,j}, ties by request and then by position: every prefix of this
/// list is a set of prefixes.
fn candidates<C: AsRef<[f64]>>(confidences: &[C]) -> Result<Vec<Candidate>, ScheduleError> {
    let mut candidates = Vec::new();
    for (request, row) in confidences.iter().map(AsRef::as_ref).enumerate() {
        check_confidences(row)?;
        let alive = survival(row).take_while(|&a| a > 0.0).enumerate();
        candidates.extend(alive.map(|(position, survival)| Candidate { survival, request, position }));
    }
    candidates.sort_by(|a, b| b.survival.total_cmp(&a.survival)); // stable, so ties keep the order above
    Ok(candidates)
}

fn search<C: AsRef<[f64]>>(
    confidences: &[C],
    curve: &CostCurve,
    stop: Stop,
) -> Result<Schedule, ScheduleError> {
    let requests = confidences.len();
    if requests > curve.max_batch() {
        return Err(ScheduleError::BeyondCurve { requests, max_batch: curve.max_batch() });
    }
    let candidates = candidates(confidences)?;
    let (mut batch, mut expected_tokens) = (requests, requests as f64); // the pass yields a token per request anyway
    let mut best = Schedule {
        lengths: vec![0; requests],
        batch,
        expected_tokens,
        throughput: expected_tokens * curve.steps_per_second(batch),
        evaluated: 0,
        stopped_early: false,
    };
    for candidate in &candidates {
        (batch, expected_tokens) = (batch + 1, expected_tokens + candidate.survival);
        best.evaluated += 1;
        let throughput = expected_tokens * curve.steps_per_second(batch);
        if throughput > best.throughput {
            best = Schedule { batch, expected_tokens, throughput, ..best };
        } else if stop == Stop::FirstDrop {
            best.stopped_early = true;
            break;
        }
    }
    for candidate in &candidates[..best.budget()] {
        best.lengths[candidate.request] = candidate.position + 1;
    }
    Ok(best)
}
