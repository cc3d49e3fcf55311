//! A simulated engine that replays recorded answers: it counts verified tokens and reads times from
//! a cost curve.

use std::sync::Arc;

use deepspec_core::rng::{Purpose, Stream};
use deepspec_cost::ScheduleError;
use deepspec_cost::cost::StepCost;
use deepspec_cost::planner::{Planner, StepLoad};
use deepspec_cost::policy::Policy;
use deepspec_cost::survival::sigmoid;
use serde::Serialize;

use super::host::{HOST_PARTS, HostOverhead};
use super::recording::{RecordedAnswer, RecordedBlock, Recording};

/// Totals of a replay.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct ReplayResult {
    /// Number of sequences decoded at once.
    pub concurrency: usize,
    /// Number of cycles: one per sequence and step.
    pub cycles: u64,
    /// Number of tokens committed by cycles.
    pub tokens: u64,
    /// Number of first tokens of answers, which the prefill computes.
    pub first_tokens: u64,
    /// Number of drafted tokens that were verified.
    pub verified: u64,
    /// Number of verified tokens that were accepted.
    pub accepted: u64,
    /// Number of steps, with or without drafting.
    pub steps: u64,
    /// Number of steps with drafting.
    pub drafted_steps: u64,
    /// Seconds by the cost curve; `Replay::run` replaces them by the server's estimate with its overhead.
    pub seconds: f64,
}

impl ReplayResult {
    /// Tokens per second over all sequences.
    pub fn throughput(&self) -> f64 {
        self.all_tokens() as f64 / self.seconds
    }

    /// Answer tokens, including those from the prefill.
    pub fn all_tokens(&self) -> u64 {
        self.tokens + self.first_tokens
    }

    /// Amounts to multiply by the parts of a [`HostOverhead`]: seconds, steps, steps in which the
    /// schedule weighs costs, and tokens. Call it on a result of [`Replay::run_without_overhead`].
    pub fn host_amounts(&self, policy: Policy) -> [f64; HOST_PARTS] {
        let steps = self.steps as f64;
        let choices = if policy.reads_cost() { steps } else { 0.0 };
        [self.seconds, steps, choices, self.all_tokens() as f64]
    }

    /// Tokens committed per cycle.
    pub fn accepted_length(&self) -> f64 {
        self.tokens as f64 / self.cycles as f64
    }

    /// Share of steps with drafting.
    pub fn drafting_share(&self) -> f64 {
        self.drafted_steps as f64 / self.steps as f64
    }

    /// Share of verified draft tokens that were rejected.
    pub fn wasted_share(&self) -> f64 {
        (self.verified - self.accepted) as f64 / self.verified.max(1) as f64
    }
}

/// A sequence in a slot of the replay.
struct ActiveSequence {
    answer: usize,
    /// Answer tokens so far.
    at: usize,
}

/// Settings of a replay.
#[derive(Clone, Copy)]
pub struct Replay<'a> {
    /// The recorded answers.
    pub recording: &'a Recording,
    /// Costs of steps.
    pub cost: &'a Arc<StepCost>,
    /// Factor on the confidence logits that the policy reads: 2 makes the drafter more confident.
    pub sharpness: f64,
    /// Overhead on top of the costs, which the planner also observes.
    pub host: HostOverhead,
    /// Number of cycles to replay.
    pub cycles: u64,
}

impl Replay<'_> {
    /// Replays answers in a random order, `concurrency` at once. The next answer replaces each finished answer.
    ///
    /// # Errors
    /// Fails if the costs do not suit the policy.
    pub fn run(&self, policy: Policy, concurrency: usize) -> Result<ReplayResult, ScheduleError> {
        let mut outcome = self.run_without_overhead(policy, concurrency)?;
        outcome.seconds = self.host.seconds(outcome.host_amounts(policy));
        Ok(outcome)
    }

    /// Like [`Replay::run`], but `seconds` is the time by the cost curve, without the server's
    /// overhead.
    ///
    /// # Errors
    /// Fails if the costs do not suit the policy.
    pub fn run_without_overhead(
        &self,
        policy: Policy,
        concurrency: usize,
    ) -> Result<ReplayResult, ScheduleError> {
        let mut planner = Planner::new(policy, policy.reads_cost().then(|| Arc::clone(self.cost)))?;
        let stream = Stream::new(concurrency as u64, "replay");
        let mut drawn = 0;
        let mut next = || {
            drawn += 1;
            (stream.bits(drawn, Purpose::Split, 0) % self.recording.answers.len() as u64) as usize
        };
        let mut outcome = ReplayResult { concurrency, ..ReplayResult::default() };
        let mut slots: Vec<Option<ActiveSequence>> = (0..concurrency).map(|_| None).collect();
        // Sequences begin at random places of their answers, as in an engine that has been running for some time.
        let spread = |slot: usize, tokens: usize| {
            1 + (stream.uniform(slot as u64, Purpose::Init, 0) * (tokens - 1) as f64) as usize
        };
        for (slot, playing) in slots.iter_mut().enumerate() {
            let answer = next();
            let tokens = self.recording.answers[answer].tokens;
            *playing = (tokens > 1).then(|| ActiveSequence { answer, at: spread(slot, tokens) });
        }
        while outcome.cycles < self.cycles {
            let decoding: Vec<usize> = (0..concurrency).filter(|&slot| slots[slot].is_some()).collect();
            // Each free slot prefills a prompt during the step, and its answer begins with the
            // token after it.
            let (mut prompts, mut fresh) = (0, vec![]);
            for playing in &slots {
                let begun = playing.is_none().then(|| {
                    let answer = next();
                    let RecordedAnswer { prompt, tokens, .. } = self.recording.answers[answer];
                    prompts += prompt;
                    outcome.first_tokens += 1;
                    (tokens > 1).then_some(ActiveSequence { answer, at: 1 })
                });
                fresh.push(begun.flatten());
            }
            let context: usize = slots.iter().flatten().map(|playing| self.sequence_context(playing)).sum();
            let load = StepLoad { requests: decoding.len(), context: context / decoding.len().max(1) };
            let mut verified = decoding.len();
            let mut drafted = false;
            if !decoding.is_empty() {
                drafted = planner.should_draft(load);
                let blocks: Vec<&RecordedBlock> =
                    slots.iter().flatten().map(|playing| self.nearest_block(playing)).collect();
                let lengths = if drafted {
                    let rows = if policy.reads_confidence() {
                        blocks.iter().map(|block| self.policy_confidences(block)).collect()
                    } else {
                        vec![]
                    };
                    planner.verify_lengths(load, self.recording.block, rows)
                } else {
                    vec![0; decoding.len()]
                };
                verified += lengths.iter().sum::<usize>();
                let committed: Vec<usize> = blocks
                    .iter()
                    .zip(&lengths)
                    .map(|(block, &length)| {
                        let accepted = block.accepted.min(length);
                        outcome.accepted += accepted as u64;
                        accepted + usize::from(!(block.stopped && accepted == block.accepted))
                    })
                    .collect();
                outcome.cycles += decoding.len() as u64;
                outcome.verified += (verified - decoding.len()) as u64;
                for (&slot, committed) in decoding.iter().zip(committed) {
                    let Some(playing) = &mut slots[slot] else { continue };
                    playing.at += committed;
                    outcome.tokens += committed as u64;
                    if playing.at >= self.recording.answers[playing.answer].tokens {
                        slots[slot] = None;
                    }
                }
            }
            slots
                .iter_mut()
                .zip(fresh)
                .filter(|(playing, _)| playing.is_none())
                .for_each(|(slot, new)| *slot = new);
            let decoded = match policy {
                // Plain decoding is served without a drafter.
                Policy::Plain => self.cost.plain_seconds(load.requests, load.context),
                _ => self.cost.seconds(load.requests, verified, load.context, drafted),
            };
            let seconds = decoded + self.cost.prefill_seconds(prompts);
            if prompts == 0 {
                planner.observe_step(load, verified, drafted, self.host.step_seconds(seconds, policy));
            }
            outcome.seconds += seconds;
            outcome.steps += 1;
            outcome.drafted_steps += u64::from(drafted);
        }
        Ok(outcome)
    }

    fn sequence_context(&self, playing: &ActiveSequence) -> usize {
        self.recording.answers[playing.answer].prompt + playing.at
    }

    /// The recorded block nearest to the sequence's position, since another policy reaches other
    /// positions than the recorded run.
    fn nearest_block(&self, playing: &ActiveSequence) -> &RecordedBlock {
        let blocks = &self.recording.answers[playing.answer].blocks;
        let behind = blocks.partition_point(|block| block.start < playing.at).min(blocks.len() - 1);
        let before = behind.saturating_sub(1);
        let apart = |at: usize| blocks[at].start.abs_diff(playing.at);
        &blocks[if apart(before) < apart(behind) { before } else { behind }]
    }

    /// Confidences of a block in the form that the policy reads.
    fn policy_confidences(&self, block: &RecordedBlock) -> Vec<f64> {
        if self.sharpness == 1.0 {
            return block.confidences.clone();
        }
        let sharpened = |&c: &f64| {
            sigmoid(self.sharpness * (c.clamp(1e-6, 1.0 - 1e-6) / (1.0 - c.clamp(1e-6, 1.0 - 1e-6))).ln())
        };
        block.confidences.iter().map(sharpened).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use deepspec_cost::curve::CostCurve;

    use super::*;

    /// Blocks of seven tokens, three in ten of them easy, that commit 3 tokens on average, with
    /// calibrated confidences.
    fn recording() -> Recording {
        let stream = Stream::new(1, "recording");
        let answer = |index: u64| {
            let mut answer = RecordedAnswer { prompt: 0, tokens: 1, blocks: vec![] };
            for block in 0..40 {
                let uniform = |lane| stream.uniform(40 * index + block, Purpose::Accept, lane);
                let confidence = if uniform(99) < 0.3 { 0.95 } else { 0.3 };
                let accepted = (0..7).take_while(|&k| uniform(k) < confidence).count();
                let start = answer.tokens;
                answer.blocks.push(RecordedBlock {
                    start,
                    confidences: vec![confidence; 7],
                    accepted,
                    stopped: false,
                });
                answer.tokens += accepted + 1;
            }
            answer
        };
        Recording { answers: (0..200).map(answer).collect(), block: 7, confident: true }
    }

    /// Published throughput of DeepSeek-V4-Flash in vLLM (#52362): concurrent requests, then tokens
    /// per second without drafts, with all seven drafts verified, and with its adaptive scheduler.
    const PUBLISHED: [(usize, f64, f64, f64); 5] = [
        (4, 382.0, 970.0, 902.0),
        (16, 1343.0, 2910.0, 2774.0),
        (64, 4095.0, 6712.0, 7144.0),
        (128, 6341.0, 8779.0, 10356.0),
        (256, 8879.0, 7852.0, 13325.0),
    ];

    /// Costs that follow from the first two columns and an accepted length of 3.
    fn published_cost() -> Arc<StepCost> {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/costs/deepseek-v4-flash.json");
        Arc::new(deepspec_cost::cost_file::read_step_cost(Path::new(file)).unwrap())
    }

    #[test]
    fn published_figures_of_adaptive_verification_come_out_with_their_signs() {
        let recording = recording();
        let blocks = recording.answers.iter().flat_map(|answer| &answer.blocks);
        let tau =
            1.0 + blocks.map(|block| block.accepted as f64).sum::<f64>() / recording.block_count() as f64;
        assert!((tau - 3.0).abs() < 0.1, "{tau}");
        let cost = published_cost();
        let rate = |policy: Policy, requests: usize, overhead: f64| {
            let replay = Replay {
                recording: &recording,
                cost: &cost,
                sharpness: 1.0,
                host: HostOverhead::scheduling_only(overhead),
                cycles: 30_000,
            };
            replay.run(policy, requests).unwrap().throughput()
        };
        // The scheduling overhead is computed from the first row.
        let (first, _, whole, adaptive) = PUBLISHED[0];
        let free = rate(Policy::PrefixAsync, first, 0.0) / rate(Policy::Whole, first, 0.0);
        let step = cost.seconds(first, 8 * first, 1, true);
        let overhead = step * (free * whole / adaptive - 1.0);
        assert!((0.0..2e-3).contains(&overhead), "{overhead}");
        for (index, (requests, plain, whole, adaptive)) in PUBLISHED.into_iter().enumerate() {
            let found = [Policy::Plain, Policy::Whole, Policy::PrefixAsync]
                .map(|policy| rate(policy, requests, overhead));
            for (found, published) in found[..2].iter().zip([plain, whole]) {
                assert!((found / published - 1.0).abs() < 0.12, "{requests}: {found} for {published}");
            }
            let [ours, theirs] = [found[2] / found[1] - 1.0, adaptive / whole - 1.0];
            // The overhead was computed from the first row, whose sign is thus no test.
            assert_eq!(ours > 0.0, theirs > 0.0, "{requests}: {ours:+.3} where {theirs:+.3} is published");
            assert!(index != 1 || ours > -0.1, "{requests}: {ours:+.3} where {theirs:+.3} is published");
        }
        // Adaptive verification is also slower between the published rows.
        assert!(rate(Policy::PrefixAsync, 32, overhead) < rate(Policy::Whole, 32, overhead));
    }

    /// Seconds of the planner's work in a step on the host, for 256 requests (docs/architecture.md,
    /// Prefix scheduler).
    const CHOICE: f64 = 50e-6;

    #[test]
    fn on_an_accelerator_the_prefix_scheduler_is_never_far_below_the_best_and_wins_when_it_is_full() {
        let recording = recording();
        let cost = published_cost();
        let replay = Replay {
            recording: &recording,
            cost: &cost,
            sharpness: 1.0,
            host: HostOverhead::scheduling_only(CHOICE),
            cycles: 30_000,
        };
        let rate = |policy: Policy, load: usize| replay.run(policy, load).unwrap().throughput();
        let fixed = [Policy::Plain, Policy::Whole, Policy::Fixed(2), Policy::Fixed(4)];
        for load in [1, 4, 16, 32, 64, 128, 256] {
            let best = fixed.map(|policy| rate(policy, load)).into_iter().fold(0.0, f64::max);
            let prefix = rate(Policy::Prefix, load);
            assert!(prefix > 0.97 * best, "{prefix} at {load}, the best of the others {best}");
            assert!(load < 256 || prefix > 1.1 * best, "{prefix} at {load}, the best of the others {best}");
        }
    }

    #[test]
    fn confidences_that_are_wrong_cost_throughput() {
        let recording = recording();
        let cost = published_cost();
        let rate = |sharpness: f64| {
            let host = HostOverhead::scheduling_only(0.0);
            let replay = Replay { recording: &recording, cost: &cost, sharpness, host, cycles: 30_000 };
            replay.run(Policy::Prefix, 128).unwrap().throughput()
        };
        let [modest, right, sure] = [0.25, 1.0, 4.0].map(rate);
        assert!(modest < 0.98 * right && sure < right, "{modest} {right} {sure}");
    }

    #[test]
    fn what_a_server_adds_to_its_steps_decides_whether_it_drafts() {
        let recording = recording();
        // A further token costs 0.6 of a one-token step, and drafting costs 0.8: by these costs no
        // draft length pays.
        let table = (1..=64).map(|tokens| 1e3 / (1.0 + 0.6 * f64::from(tokens - 1))).collect();
        let curve = CostCurve::new(table).unwrap();
        let cost = Arc::new(StepCost::new(vec![(1, curve)], vec![(1, 0.8e-3)]).unwrap());
        let drafting = |host: HostOverhead| {
            let replay = Replay { recording: &recording, cost: &cost, sharpness: 1.0, host, cycles: 4_000 };
            replay.run(Policy::Prefix, 1).unwrap().drafting_share()
        };
        let free = HostOverhead::scheduling_only(0.0);
        let [alone, slower, loaded] =
            [free, HostOverhead { factor: 1.5, ..free }, HostOverhead { step: 1e-3, ..free }].map(drafting);
        // A common factor on all steps changes nothing. A constant per step favours drafting, since
        // accepted tokens share it.
        assert!(alone < 0.1 && slower < 0.1, "{alone} {slower}");
        assert!(loaded > 0.2, "{alone} {loaded}");
    }

    #[test]
    fn whole_blocks_are_replayed_as_they_were_recorded() {
        let recording = recording();
        let flat = CostCurve::new(vec![100.0; 64]).unwrap();
        let cost = Arc::new(StepCost::new(vec![(1, flat)], vec![]).unwrap());
        let replay = Replay {
            recording: &recording,
            cost: &cost,
            sharpness: 1.0,
            host: HostOverhead::scheduling_only(0.0),
            cycles: 50_000,
        };
        let found = replay.run(Policy::Whole, 4).unwrap();
        let (cycles, accepted) = recording
            .answers
            .iter()
            .flat_map(|answer| &answer.blocks)
            .fold((0, 0), |(cycles, accepted), block| (cycles + 1, accepted + block.accepted));
        let recorded = accepted as f64 / cycles as f64;
        let replayed = found.accepted as f64 / found.cycles as f64;
        assert!((replayed / recorded - 1.0).abs() < 0.03, "{replayed} for {recorded}");
        assert_eq!(found.verified, 7 * found.cycles);
        let plain = replay.run(Policy::Plain, 4).unwrap();
        assert_eq!((plain.verified, plain.drafted_steps), (0, 0));
        assert!((plain.throughput() / 400.0 - 1.0).abs() < 0.01, "{}", plain.throughput());
    }
}
