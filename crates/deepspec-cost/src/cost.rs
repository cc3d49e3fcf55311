//! Cost of an engine step: drafting for R requests, and verification of B tokens at a context
//! length.

use crate::ScheduleError;
use crate::curve::CostCurve;
use crate::scheduler::StepCostAt;

/// Seconds of a step by requests, batch tokens and context length.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCost {
    /// Verification cost by batch tokens, one curve per context length, in ascending order.
    verify: Vec<(usize, CostCurve)>,
    /// Drafting cost: (requests, seconds), ascending; empty without measurements, which counts as
    /// 0.
    draft: Vec<(usize, f64)>,
    /// Additional seconds of a step by its number of requests, regardless of their tokens:
    /// (requests, seconds), ascending.
    requests: Vec<(usize, f64)>,
    /// Cost of plain decoding without a drafter, by requests, one curve per context length; empty
    /// if not measured.
    plain: Vec<(usize, CostCurve)>,
    /// Seconds per prompt token.
    prefill: f64,
}

impl StepCost {
    /// Costs from one verification curve per context length (tokens in the KV cache of a request),
    /// and from measured (requests, seconds) of drafting. Both are ascending.
    ///
    /// # Errors
    /// Fails without a curve, if contexts or requests do not ascend, or if a drafting time is not
    /// finite and at least 0.
    pub fn new(verify: Vec<(usize, CostCurve)>, draft: Vec<(usize, f64)>) -> Result<Self, ScheduleError> {
        if verify.is_empty() {
            return Err(ScheduleError::Empty { what: "cost curve" });
        }
        check_contexts(&verify)?;
        check_times(&draft)?;
        Ok(Self { verify, draft, requests: vec![], plain: vec![], prefill: 0.0 })
    }

    /// Adds the cost of plain decoding by number of requests, with one curve per context,
    /// ascending. The target runs without a drafter and captures no hidden states.
    ///
    /// # Errors
    /// Fails if contexts do not ascend.
    pub fn with_plain_decoding(mut self, plain: Vec<(usize, CostCurve)>) -> Result<Self, ScheduleError> {
        check_contexts(&plain)?;
        self.plain = plain;
        Ok(self)
    }

    /// Adds the additional seconds of a step by its number of requests, with or without drafting;
    /// ascending.
    ///
    /// # Errors
    /// Fails if requests do not ascend, or if a time is not finite and at least 0.
    pub fn with_request_seconds(mut self, requests: Vec<(usize, f64)>) -> Result<Self, ScheduleError> {
        check_times(&requests)?;
        self.requests = requests;
        Ok(self)
    }

    /// Adds the seconds per prompt token that a step prefills in addition to verification. By
    /// default prefill costs nothing.
    #[must_use]
    pub fn with_prefill_seconds(mut self, seconds: f64) -> Self {
        self.prefill = seconds;
        self
    }

    /// Additional seconds of a step that prefills `tokens` prompt tokens.
    pub fn prefill_seconds(&self, tokens: usize) -> f64 {
        self.prefill * tokens as f64
    }

    /// The curve of the measured context with the nearest ratio to `context`.
    pub fn curve(&self, context: usize) -> &CostCurve {
        // `verify` is never empty.
        nearest_curve(&self.verify, context).unwrap_or(&self.verify[0].1)
    }

    /// Seconds of drafting for `requests`: interpolated between measurements, and proportional to
    /// the requests past the last one.
    pub fn draft_seconds(&self, requests: usize) -> f64 {
        interpolate(&self.draft, requests)
    }

    /// Throughput of plain decoding in tokens per second.
    pub fn plain_throughput(&self, requests: usize, context: usize) -> f64 {
        let cost_at =
            StepCostAt { curve: self.curve(context), fixed_seconds: interpolate(&self.requests, requests) };
        cost_at.throughput(requests, requests as f64)
    }

    /// The largest batch in tokens that all curves cover.
    pub fn max_batch(&self) -> usize {
        self.verify.iter().map(|(_, curve)| curve.max_batch()).min().unwrap_or(0)
    }

    /// Seconds of a step that verifies `tokens` tokens at a context, with or without drafting for
    /// `requests`. [`CostCurve::step_seconds`] extrapolates beyond the largest measured batch.
    pub fn seconds(&self, requests: usize, tokens: usize, context: usize, drafted: bool) -> f64 {
        let draft = if drafted { self.draft_seconds(requests) } else { 0.0 };
        draft + interpolate(&self.requests, requests) + self.curve(context).step_seconds(tokens)
    }

    /// Seconds of a plain-decoding step without a drafter. If this was not measured, the seconds of
    /// a step that drafts nothing.
    pub fn plain_seconds(&self, requests: usize, context: usize) -> f64 {
        match nearest_curve(&self.plain, context) {
            Some(curve) => curve.step_seconds(requests),
            None => self.seconds(requests, requests, context, false),
        }
    }

    /// Returns a step's cost as a function of the number of verified tokens. The requests and the
    /// context are fixed, and the cost includes drafting.
    pub(crate) fn cost_at(&self, requests: usize, context: usize) -> StepCostAt<'_> {
        let fixed_seconds = self.draft_seconds(requests) + interpolate(&self.requests, requests);
        StepCostAt { curve: self.curve(context), fixed_seconds }
    }
}

/// The curve of the context with the nearest ratio to `context`.
fn nearest_curve(curves: &[(usize, CostCurve)], context: usize) -> Option<&CostCurve> {
    let apart = |of: usize| ((of.max(1) as f64) / (context.max(1) as f64)).ln().abs();
    curves.iter().min_by(|a, b| apart(a.0).total_cmp(&apart(b.0))).map(|(_, curve)| curve)
}

fn check_contexts(curves: &[(usize, CostCurve)]) -> Result<(), ScheduleError> {
    match curves.windows(2).find(|pair| pair[1].0 <= pair[0].0) {
        Some(pair) => Err(ScheduleError::Order { batch: pair[1].0 }),
        None => Ok(()),
    }
}

fn check_times(times: &[(usize, f64)]) -> Result<(), ScheduleError> {
    if let Some(pair) = times.windows(2).find(|pair| pair[1].0 <= pair[0].0) {
        return Err(ScheduleError::Order { batch: pair[1].0 });
    }
    if let Some(&(batch, _)) = times.first().filter(|(requests, _)| *requests == 0) {
        return Err(ScheduleError::Order { batch });
    }
    match times.iter().find(|(_, seconds)| !(seconds.is_finite() && *seconds >= 0.0)) {
        Some(&(batch, value)) => Err(ScheduleError::Cost { batch, value }),
        None => Ok(()),
    }
}

/// Interpolates between measurements. Below the first measurement the time is constant; above the
/// last one it is proportional to the requests. Returns 0 without measurements.
fn interpolate(times: &[(usize, f64)], requests: usize) -> f64 {
    let at = times.partition_point(|&(of, _)| of < requests);
    match (at.checked_sub(1).map(|before| times[before]), times.get(at)) {
        (None, None) => 0.0,
        (None, Some(&(_, seconds))) => seconds,
        (Some((of, seconds)), None) => seconds * requests as f64 / of as f64,
        (Some((low, before)), Some(&(high, after))) => {
            before + (after - before) * (requests - low) as f64 / (high - low) as f64
        }
    }
}
