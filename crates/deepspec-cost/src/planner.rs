//! Applies a policy: before every step it decides whether to draft, and after drafting how much of
//! each block to verify.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::ScheduleError;
use crate::cost::StepCost;
use crate::policy::Policy;
use crate::scheduler::{StopRule, fill_and_next_budget, search_prefixes, sorted_survivals};

/// Maximum number of recent blocks whose confidences decide whether drafting pays.
const MAX_REMEMBERED_BLOCKS: usize = 64;
/// Number of steps without drafting before a probe, which drafts in two steps to see whether
/// drafting pays again. The wait doubles after every probe that does not pay, up to [`MAX_PROBE_INTERVAL`], as
/// a drafting step can cost several plain ones.
const PROBE_INTERVAL: usize = 32;
/// Maximum number of steps between probes.
const MAX_PROBE_INTERVAL: usize = 512;
/// Weight of the newest step in the running mean of step times.
const STEP_WEIGHT: f64 = 0.05;
/// Weight of a probe in the running mean. It is high because the mean is old at a probe.
const PROBE_WEIGHT: f64 = 0.5;
/// Number of steps between the confidences that a budget is computed from and the step that uses it.
const BUDGET_LAG: usize = 2;

/// Load of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLoad {
    /// Number of decoded sequences R.
    pub requests: usize,
    /// Mean context length in tokens.
    pub context: usize,
}

/// A policy with its statistics of earlier steps. The default verifies whole blocks.
#[derive(Debug, Clone, Default)]
pub struct Planner {
    policy: Policy,
    cost: Option<Arc<StepCost>>,
    /// Confidences of the last drafted blocks, one row each.
    blocks: VecDeque<Vec<f64>>,
    /// Budgets computed from the last drafted steps, each with its number of requests, newest last.
    budgets: VecDeque<(usize, usize)>,
    /// Number of steps since the last step that drafted.
    idle: usize,
    /// State of the probe in this step.
    probe: ProbeState,
    /// Number of probes since drafting last paid.
    probes: u32,
    /// Whether the last decision followed steps without drafting. A draft then first fills the
    /// drafter's KV cache, so its time is not measured.
    catches_up: bool,
    /// Measured over expected time of recent steps: [plain steps, drafting steps].
    drift: [MeanTimeRatio; 2],
}

/// State of a probe. A probe drafts again for two steps, to learn whether drafting pays now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum ProbeState {
    #[default]
    None,
    /// First drafting step after a run of plain steps. It fills the drafter's KV cache with the tokens
    /// that plain steps committed, so its time is not measured.
    CatchesUp,
    /// Second drafting step after a run of plain steps. The drafter's KV cache is full again, so the
    /// planner measures the drafting time.
    Measures,
}

/// A running mean of measured over expected time.
#[derive(Debug, Clone, Copy)]
struct MeanTimeRatio(f64);

impl Default for MeanTimeRatio {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Planner {
    /// A planner that has observed no steps.
    ///
    /// # Errors
    /// Fails if the policy needs step costs and `cost` is None.
    pub fn new(policy: Policy, cost: Option<Arc<StepCost>>) -> Result<Self, ScheduleError> {
        if policy.reads_cost() && cost.is_none() {
            return Err(ScheduleError::Empty {
                what: "cost of steps, which the policy weighs tokens against",
            });
        }
        Ok(Self { policy, cost, ..Self::default() })
    }

    /// The policy of the planner.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Whether to draft in this step. A policy that reads costs drafts unless the last blocks
    /// predict that plain decoding is faster.
    pub fn should_draft(&mut self, load: StepLoad) -> bool {
        let pays = match (self.policy, &self.cost) {
            (Policy::Plain, _) => false,
            (policy, Some(cost)) if policy.reads_cost() => {
                load.requests <= cost.curve(load.context).max_batch()
                    && (self.blocks.is_empty() || self.predicted_speed_up(cost, load) > 1.0)
            }
            _ => true,
        };
        let wait = (PROBE_INTERVAL << self.probes.min(8)).min(MAX_PROBE_INTERVAL);
        self.probe = match self.probe {
            _ if pays || !self.policy.reads_cost() => ProbeState::None,
            ProbeState::CatchesUp => ProbeState::Measures,
            _ if self.idle >= wait => ProbeState::CatchesUp,
            _ => ProbeState::None,
        };
        self.probes = if pays { 0 } else { self.probes + u32::from(self.probe == ProbeState::CatchesUp) };
        if self.probe == ProbeState::CatchesUp {
            // Drops the older half of the blocks, so that a few probes notice a better drafter.
            self.blocks.drain(..self.blocks.len() / 2);
        }
        let drafts = pays || self.probe != ProbeState::None;
        if drafts && self.idle > 0 {
            // A budget from before a pause in drafting is not used.
            self.budgets.clear();
        }
        self.catches_up = self.idle > 0;
        self.idle = if drafts { 0 } else { self.idle + 1 };
        drafts
    }

    /// Records the time of a step that decoded `load` with `tokens` verified tokens and prefilled no prompts. If the
    /// curve was measured on another machine or load, its errors differ between drafting and plain steps. The observed
    /// times correct the decision whether to draft.
    pub fn observe_step(&mut self, load: StepLoad, tokens: usize, drafted: bool, seconds: f64) {
        let Some(cost) = self.cost.as_ref().filter(|_| self.policy.reads_cost()) else { return };
        // In the first drafted step after a pause the drafter catches up, which later steps need
        // not do.
        if drafted && self.catches_up {
            return;
        }
        // An interrupted step does not predict the next one, so the ratio is clamped.
        let ratio = (seconds / cost.seconds(load.requests, tokens, load.context, drafted)).clamp(0.5, 2.0);
        let MeanTimeRatio(mean) = &mut self.drift[usize::from(drafted)];
        *mean +=
            (ratio - *mean) * if self.probe == ProbeState::Measures { PROBE_WEIGHT } else { STEP_WEIGHT };
    }

    /// Predicted throughput with blocks like the last drafted blocks, divided by the throughput of plain decoding.
    fn predicted_speed_up(&self, cost: &StepCost, load: StepLoad) -> f64 {
        let plain = cost.plain_throughput(load.requests, load.context);
        let rows: Vec<&[f64]> = self.blocks.iter().map(Vec::as_slice).collect();
        // Searches as the policy does: on a stepped curve it may stop before the step.
        let stop = if self.policy == Policy::Prefix { StopRule::FirstDrop } else { StopRule::Never };
        let (_, throughput) = best_budget(&rows, cost, load, stop);
        throughput / plain * self.drift[0].0 / self.drift[1].0
    }

    /// Numbers of drafted tokens to verify of each block of `block` tokens. `confidences` has one
    /// row per block, and may be empty for policies that do not read it.
    pub fn verify_lengths(&mut self, load: StepLoad, block: usize, confidences: Vec<Vec<f64>>) -> Vec<usize> {
        match self.policy {
            Policy::Plain => vec![0; load.requests],
            Policy::Whole => vec![block; load.requests],
            Policy::Fixed(count) => vec![count.min(block); load.requests],
            Policy::Threshold(min_confidence) => {
                let kept = |row: Vec<f64>| row.into_iter().take_while(|&c| c >= min_confidence).count();
                confidences.into_iter().map(kept).collect()
            }
            Policy::Prefix | Policy::PrefixAsync => self.schedule_lengths(load, confidences),
        }
    }

    fn schedule_lengths(&mut self, load: StepLoad, mut confidences: Vec<Vec<f64>>) -> Vec<usize> {
        let Some(cost) = self.cost.clone() else { return vec![0; load.requests] };
        // NaN counts as 0, and other values are clamped to [0, 1].
        let sound = |c: &mut f64| *c = if c.is_nan() { 0.0 } else { c.clamp(0.0, 1.0) };
        confidences.iter_mut().flatten().for_each(sound);
        let lengths = match self.policy {
            Policy::PrefixAsync => {
                let all = cost.curve(load.context).max_batch().saturating_sub(load.requests);
                let stale = if self.budgets.len() == BUDGET_LAG { self.budgets.pop_front() } else { None };
                // Scales the budget to the present number of requests.
                let budget = stale.map_or(all, |(worth, of)| (worth * load.requests).div_ceil(of.max(1)));
                let cost_at = cost.cost_at(load.requests, load.context);
                let (lengths, worth) = fill_and_next_budget(&confidences, budget.min(all), cost_at);
                self.budgets.push_back((worth, load.requests));
                lengths
            }
            _ => {
                search_prefixes(&confidences, cost.cost_at(load.requests, load.context), StopRule::FirstDrop)
                    .lengths
            }
        };
        self.remember_confidences(confidences);
        lengths
    }

    fn remember_confidences(&mut self, confidences: Vec<Vec<f64>>) {
        // Keeps an even selection of many blocks.
        let every = confidences.len().div_ceil(MAX_REMEMBERED_BLOCKS).max(1);
        self.blocks.extend(confidences.into_iter().step_by(every));
        let surplus = self.blocks.len().saturating_sub(MAX_REMEMBERED_BLOCKS);
        self.blocks.drain(..surplus);
    }
}

/// Finds the number of drafted tokens with the highest expected throughput for a step with blocks like `rows`, and that
/// throughput. `stop` selects the search. The result of `StopRule::Never` must not be applied to `rows` themselves,
/// only to later blocks.
fn best_budget(rows: &[&[f64]], cost: &StepCost, load: StepLoad, stop: StopRule) -> (usize, f64) {
    let cost_at = cost.cost_at(load.requests, load.context);
    let requests = load.requests as f64;
    // Scales the rows to the number of requests, so tokens are fractional.
    let scale = requests / rows.len().max(1) as f64;
    let (mut best, mut sum) = ((0, cost_at.throughput(load.requests, requests)), 0.0);
    for (taken, a) in sorted_survivals(rows).enumerate() {
        sum += a;
        let budget = (taken + 1) as f64 * scale;
        let throughput = cost_at.throughput_between(requests + budget, requests + sum * scale);
        if throughput > best.1 {
            best = (budget.round() as usize, throughput);
        } else if stop == StopRule::FirstDrop {
            break;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::CostCurve;

    fn load(requests: usize) -> StepLoad {
        StepLoad { requests, context: 100 }
    }

    /// A machine whose step takes 1 ms up to 4 tokens, and `slope` ms more per further token.
    fn cost(slope: f64, draft: f64) -> Option<Arc<StepCost>> {
        let seconds = |batch: usize| 1e-3 * (1.0 + slope * batch.saturating_sub(4) as f64);
        let table = (1..=512).map(|batch| 1.0 / seconds(batch)).collect();
        let curve = CostCurve::new(table).unwrap();
        Some(Arc::new(StepCost::new(vec![(100, curve)], vec![(1, draft)]).unwrap()))
    }

    fn lengths(planner: &mut Planner, rows: &[Vec<f64>]) -> Vec<usize> {
        planner.verify_lengths(load(rows.len()), 3, rows.to_vec())
    }

    #[test]
    fn names_come_back_and_others_are_refused() {
        for name in ["plain", "whole", "fixed:3", "threshold:0.25", "prefix", "prefix-async"] {
            assert_eq!(name.parse::<Policy>().unwrap().to_string(), name);
        }
        for wrong in
            ["", "fixed", "fixed:0", "fixed:-1", "threshold:1.5", "threshold:nan", "prefix:2", "none"]
        {
            assert!(wrong.parse::<Policy>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_policy_cuts_where_it_says() {
        let rows = [vec![0.9, 0.9, 0.2], vec![0.3, 0.9, 0.9]];
        let cut = |policy, cost| lengths(&mut Planner::new(policy, cost).unwrap(), &rows);
        assert_eq!(cut(Policy::Whole, None), [3, 3]);
        assert_eq!(cut(Policy::Fixed(2), None), [2, 2]);
        assert_eq!(cut(Policy::Fixed(9), None), [3, 3]);
        assert_eq!(cut(Policy::Threshold(0.5), None), [2, 0]);
        assert_eq!(cut(Policy::Prefix, cost(0.0, 0.0)), [3, 3], "what is free is taken");
        assert_eq!(cut(Policy::Prefix, cost(0.25, 0.0)), [2, 0], "two tokens fill the free room");
        assert!(Planner::new(Policy::Prefix, None).is_err());
    }

    #[test]
    fn a_budget_is_two_steps_old() {
        let mut planner = Planner::new(Policy::PrefixAsync, cost(0.1, 0.0)).unwrap();
        let [sure, unsure] = [0.99, 0.01].map(|c| [vec![c; 3], vec![c; 3]]);
        assert_eq!(lengths(&mut planner, &unsure), [3, 3], "nothing is known yet");
        assert_eq!(lengths(&mut planner, &sure), [3, 3]);
        // The budget of the unsure step is two tokens, and the best current candidates get them.
        assert_eq!(lengths(&mut planner, &[vec![0.5; 3], vec![0.99; 3]]), [0, 2]);
        assert_eq!(lengths(&mut planner, &unsure), [3, 3], "those of two steps before were sure");
    }

    #[test]
    fn a_budget_from_before_a_pause_is_forgotten() {
        let mut planner = Planner::new(Policy::PrefixAsync, cost(0.25, 0.0)).unwrap();
        let rows = |requests: usize| vec![vec![0.9; 3]; requests];
        // Four requests leave no free token, so blocks have a budget of 0.
        (0..2).for_each(|_| drop(lengths(&mut planner, &rows(4))));
        assert!((0..3).all(|_| !planner.should_draft(load(4))), "nor do they pay");
        assert!(planner.should_draft(load(1)), "for one alone they do");
        assert_eq!(lengths(&mut planner, &rows(1)), [3], "at once, as if nothing were known");
    }

    #[test]
    fn fractions_of_tokens_and_steps_of_the_curve_are_paid_for() {
        let drafted = |table: Vec<f64>, draft: f64, requests: usize| {
            let curve = CostCurve::new(table.iter().map(|seconds| 1.0 / seconds).collect()).unwrap();
            let cost = StepCost::new(vec![(100, curve)], vec![(1, draft)]).unwrap();
            let mut planner = Planner::new(Policy::Prefix, Some(Arc::new(cost))).unwrap();
            let mut count = 0;
            for _ in 0..165 {
                if planner.should_draft(load(requests)) {
                    lengths(&mut planner, &vec![vec![0.9; 3]; requests]);
                    count += 1;
                }
            }
            count
        };
        // Every token takes as long as the first one, so drafting never pays.
        assert_eq!(drafted((1..64).map(|tokens| 0.01 * f64::from(tokens)).collect(), 0.003, 1), 5);
        // The step from four tokens to five costs half as much again, and further tokens are free:
        // admission stops before it.
        let stepped = (1..64).map(|tokens| if tokens <= 4 { 0.001 } else { 0.0015 }).collect();
        assert_eq!(drafted(stepped, 0.0002, 4), 5);
    }

    #[test]
    fn a_curve_that_does_not_hold_is_corrected_by_what_steps_take() {
        // By the curve drafting pays, but drafting steps take twice as long.
        let mut planner = Planner::new(Policy::Prefix, cost(0.25, 0.5e-3)).unwrap();
        let mut drafted = 0;
        for _ in 0..400 {
            let drafts = planner.should_draft(load(1));
            let lengths = if drafts { lengths(&mut planner, &[vec![0.6; 3]]) } else { vec![0] };
            let expected = planner.cost.as_ref().unwrap().seconds(1, 1 + lengths[0], 100, drafts);
            planner.observe_step(load(1), 1 + lengths[0], drafts, expected * if drafts { 2.0 } else { 1.0 });
            drafted += usize::from(drafts);
        }
        assert!((12..60).contains(&drafted), "{drafted} of 400");
        assert!(planner.drift[1].0 > 1.2 && planner.drift[0].0 == 1.0);
    }

    #[test]
    fn a_hiccup_of_drafting_steps_is_forgotten_when_probes_are_fast_again() {
        let mut planner = Planner::new(Policy::Prefix, cost(0.25, 0.5e-3)).unwrap();
        let mut drafted = |steps: usize, slower: f64| {
            let mut count = 0;
            for _ in 0..steps {
                let drafts = planner.should_draft(load(1));
                let lengths = if drafts { lengths(&mut planner, &[vec![0.6; 3]]) } else { vec![0] };
                let expected = planner.cost.as_ref().unwrap().seconds(1, 1 + lengths[0], 100, drafts);
                planner.observe_step(
                    load(1),
                    1 + lengths[0],
                    drafts,
                    expected * if drafts { slower } else { 1.0 },
                );
                count += usize::from(drafts);
            }
            count
        };
        assert_eq!(drafted(100, 1.0), 100, "by the curve it pays");
        assert!(drafted(100, 2.0) < 30, "not while it takes twice as long");
        drafted(2000, 1.0);
        assert_eq!(drafted(100, 1.0), 100, "and again when it does not");
    }

    #[test]
    fn nothing_is_drafted_where_it_does_not_pay_but_for_probes() {
        let mut planner = Planner::new(Policy::Prefix, cost(0.25, 0.5e-3)).unwrap();
        let mut drafted = |requests: usize, confidence: f64| {
            let mut count = 0;
            for _ in 0..198 {
                if planner.should_draft(load(requests)) {
                    lengths(&mut planner, &vec![vec![confidence; 3]; requests]);
                    count += 1;
                }
            }
            count
        };
        assert_eq!(drafted(1, 0.9), 198, "three more tokens for half a step more");
        assert_eq!(drafted(4, 0.9), 4, "no room behind four tokens: probes of two steps alone, ever fewer");
        assert_eq!(drafted(1, 0.9), 198, "what was drafted then is weighed at what it is worth now");
        let spoilt = drafted(1, 0.1);
        assert!((6..90).contains(&spoilt), "a drafter that became bad is noticed: {spoilt} of 198");
        assert!(drafted(1, 0.1) <= 6);
        let mended = (0..30).position(|_| drafted(1, 0.9) == 198);
        assert!(
            mended.is_some_and(|after| after > 0),
            "and one that recovers, after some probes: {mended:?}"
        );
        let mut plain = Planner::new(Policy::Plain, None).unwrap();
        assert!((0..99).all(|_| !plain.should_draft(load(1))));
    }
}
