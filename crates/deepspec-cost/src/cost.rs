//! What a step of an engine costs: drafting for R requests, and a verification of B tokens behind a context.

use crate::ScheduleError;
use crate::curve::CostCurve;
use crate::scheduler::Price;

/// Seconds of a step by requests, tokens and context.
#[derive(Debug, Clone, PartialEq)]
pub struct StepCost {
    /// Verification by tokens in the batch, for contexts of so many tokens, ascending.
    verify: Vec<(usize, CostCurve)>,
    /// Drafting: (requests, seconds), ascending; empty where drafting costs nothing that was measured.
    draft: Vec<(usize, f64)>,
    /// What a step takes longer for its requests, however many tokens each has: (requests, seconds), ascending.
    requests: Vec<(usize, f64)>,
    /// Steps of a target that no drafter listens to, by requests, for contexts of so many tokens; empty where that was not measured.
    plain: Vec<(usize, CostCurve)>,
    /// Of a token of a prompt.
    prefill: f64,
}

impl StepCost {
    /// Costs from one curve of verification per context (tokens of history per request) and from measured (requests, seconds) of
    /// drafting, both ascending.
    ///
    /// # Errors
    /// There is no curve, contexts or requests do not ascend, or a time of drafting is not finite and at least 0.
    pub fn new(verify: Vec<(usize, CostCurve)>, draft: Vec<(usize, f64)>) -> Result<Self, ScheduleError> {
        if verify.is_empty() {
            return Err(ScheduleError::Empty { what: "cost curve" });
        }
        check_contexts(&verify)?;
        check(&draft)?;
        Ok(Self { verify, draft, requests: vec![], plain: vec![], prefill: 0.0 })
    }

    /// With what steps of plain decoding take by requests where no drafter is there, for which the target would keep states: one curve per
    /// context, ascending.
    ///
    /// # Errors
    /// Contexts do not ascend.
    pub fn with_plain(mut self, plain: Vec<(usize, CostCurve)>) -> Result<Self, ScheduleError> {
        check_contexts(&plain)?;
        self.plain = plain;
        Ok(self)
    }

    /// With what a step takes longer for its requests, whether they draft or not; ascending.
    ///
    /// # Errors
    /// Requests do not ascend, or a time is not finite and at least 0.
    pub fn with_requests(mut self, requests: Vec<(usize, f64)>) -> Result<Self, ScheduleError> {
        check(&requests)?;
        self.requests = requests;
        Ok(self)
    }

    /// With seconds per token of a prompt that a step takes in beside what it verifies; without it prompts cost nothing.
    #[must_use]
    pub fn with_prefill(mut self, seconds: f64) -> Self {
        self.prefill = seconds;
        self
    }

    /// Seconds that a step takes longer for so many tokens of prompts.
    pub fn prefill_seconds(&self, tokens: usize) -> f64 {
        self.prefill * tokens as f64
    }

    /// The curve that was measured at the context nearest to this one by ratio.
    pub fn curve(&self, context: usize) -> &CostCurve {
        // There is one at least.
        nearest(&self.verify, context).unwrap_or(&self.verify[0].1)
    }

    /// Seconds of drafting for so many requests: linear between measurements, in proportion to the requests past the last.
    pub fn draft_seconds(&self, requests: usize) -> f64 {
        between(&self.draft, requests)
    }

    /// Throughput of plain decoding in tokens per second.
    pub fn plain_throughput(&self, requests: usize, context: usize) -> f64 {
        let price = Price { curve: self.curve(context), fixed_seconds: between(&self.requests, requests) };
        price.throughput(requests, requests as f64)
    }

    /// Tokens of the largest batch that is known at every context.
    pub fn max_batch(&self) -> usize {
        self.verify.iter().map(|(_, curve)| curve.max_batch()).min().unwrap_or(0)
    }

    /// Seconds of a step that verifies so many tokens at a context, with or without drafting for so many requests. Past the curve's end
    /// they grow as between its half and its end.
    pub fn seconds(&self, requests: usize, tokens: usize, context: usize, drafted: bool) -> f64 {
        let draft = if drafted { self.draft_seconds(requests) } else { 0.0 };
        draft + between(&self.requests, requests) + self.curve(context).step_seconds(tokens)
    }

    /// Seconds of a step of an engine without a drafter: as measured, else as a step that drafts nothing.
    pub fn plain_seconds(&self, requests: usize, context: usize) -> f64 {
        match nearest(&self.plain, context) {
            Some(curve) => curve.step_seconds(requests),
            None => self.seconds(requests, requests, context, false),
        }
    }

    pub(crate) fn price(&self, requests: usize, context: usize) -> Price<'_> {
        let fixed_seconds = self.draft_seconds(requests) + between(&self.requests, requests);
        Price { curve: self.curve(context), fixed_seconds }
    }
}

/// The curve of the context nearest to this one by ratio.
fn nearest(curves: &[(usize, CostCurve)], context: usize) -> Option<&CostCurve> {
    let apart = |of: usize| ((of.max(1) as f64) / (context.max(1) as f64)).ln().abs();
    curves.iter().min_by(|a, b| apart(a.0).total_cmp(&apart(b.0))).map(|(_, curve)| curve)
}

fn check_contexts(curves: &[(usize, CostCurve)]) -> Result<(), ScheduleError> {
    match curves.windows(2).find(|pair| pair[1].0 <= pair[0].0) {
        Some(pair) => Err(ScheduleError::Order { batch: pair[1].0 }),
        None => Ok(()),
    }
}

fn check(times: &[(usize, f64)]) -> Result<(), ScheduleError> {
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

/// Linear between measurements, the first one's below them, and in proportion to the requests past the last; 0 where there are none.
fn between(times: &[(usize, f64)], requests: usize) -> f64 {
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
