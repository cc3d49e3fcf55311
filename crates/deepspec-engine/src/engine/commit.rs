//! The end of a step: appends tokens to answers, finishes sequences and cuts KV caches to the
//! committed tokens.

use deepspec_ops::{cat_row_runs, copy_row_runs};
use tch::Tensor;

use super::{Engine, StepPlan};
use crate::outcome::{TreeVerdict, VerifyOutcome};
use crate::{Context, Cycle, EngineError, Event, Finish, ModelOutput, Proposer, Target};

/// The result of a step for one slot.
pub(super) struct SlotUpdate {
    slot: usize,
    tokens: Vec<i64>,
    cycle: Option<Cycle>,
    /// Rows of the slot's chunk that stay in its KV cache, as runs (first row, number of rows). The first run begins with the anchor or the
    /// prompt. Accepted nodes of a tree may make up several runs.
    kept: Vec<(i64, i64)>,
    end: SlotEnd,
}

impl SlotUpdate {
    /// Number of rows that stay.
    fn rows(&self) -> usize {
        self.kept.iter().map(|&(_, count)| count as usize).sum()
    }
}

/// How a step ends for a slot.
enum SlotEnd {
    Continues,
    Finished(Finish),
    NotFinite,
}

/// Committed rows of one slot in a step's forward.
struct CommittedRows<'a> {
    update: &'a SlotUpdate,
    /// First row of the slot's chunk.
    first: i64,
    /// Index of the slot among the step's chunks.
    chunk: i64,
}

impl CommittedRows<'_> {
    /// Runs (first row, number of rows) in the forward, without the first `skipped` rows of the first run.
    fn runs(&self, skipped: i64) -> impl Iterator<Item = (i64, i64)> + '_ {
        let skip = move |run: usize| if run == 0 { skipped } else { 0 };
        let runs = self.update.kept.iter().enumerate();
        runs.map(move |(i, &(first, count))| (self.first + first + skip(i), count - skip(i)))
    }
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Computes every slot's update from the outcome of verification.
    pub(super) fn slot_updates(&self, step: &StepPlan, outcome: &VerifyOutcome) -> Vec<SlotUpdate> {
        let overrun = self.options.counts_overrun && self.proposer.is_some();
        let mut updates = Vec::with_capacity(step.chunks.len());
        for (i, &(slot, fed)) in step.chunks.iter().enumerate() {
            let Some(sequence) = &self.slots[slot] else { continue };
            let stop_ids = &sequence.request.stop_ids;
            let (cycle, tokens, kept) = match (i.checked_sub(step.decoding.len()), step.trees()) {
                (Some(prompt), _) => (None, vec![outcome.first[prompt]], vec![(0, fed as i64)]),
                (None, None) => {
                    let (cycle, tokens) = outcome.cycle_and_tokens(i, step.lens[i], stop_ids);
                    let kept = vec![(0, 1 + i64::from(cycle.accepted))];
                    (Some(cycle), tokens, kept)
                }
                (None, Some(trees)) => {
                    let TreeVerdict { cycle, tokens, kept } = outcome.tree_verdict(i, &trees[i], stop_ids);
                    (Some(cycle), tokens, kept)
                }
            };
            let end = match sequence.finish_reason(&tokens, overrun) {
                _ if !outcome.finite[i] => SlotEnd::NotFinite,
                Some(finish) => SlotEnd::Finished(finish),
                None => SlotEnd::Continues,
            };
            updates.push(SlotUpdate { slot, tokens, cycle, kept, end });
        }
        updates
    }

    /// Hidden states of the committed tokens for the drafter, of sequences that continue. `tokens`
    /// are the tokens that the target ran and `states` their hidden states. `drawn` are the tokens
    /// drawn after each chunk.
    pub(super) fn drafter_context(
        &self,
        step: &StepPlan,
        updates: &[SlotUpdate],
        tokens: &Tensor,
        drawn: &Tensor,
        states: &ModelOutput,
    ) -> Option<Context> {
        let reads_hidden = self.proposer.as_ref()?.reads_hidden();
        let (mut kept, mut row) = (vec![], 0);
        for (chunk, (update, &(_, fed))) in updates.iter().zip(&step.chunks).enumerate() {
            if let SlotEnd::Continues = update.end {
                kept.push(CommittedRows { update, first: row as i64, chunk: chunk as i64 });
            }
            row += fed;
        }
        if kept.is_empty() {
            return None;
        }
        // Copies the rows, so that only these rows stay in memory until the drafter reads them.
        let rows = |of: &Tensor| copy_row_runs(of, kept.iter().flat_map(|kept| kept.runs(0)));
        // The next token of a row is the token of the following row. For a chunk's last kept row it
        // is the drawn token.
        let all = Tensor::cat(&[tokens, drawn], 0);
        let drawn_row = |kept: &CommittedRows| (row as i64 + kept.chunk, 1);
        let behind = kept.iter().flat_map(|kept| kept.runs(1).chain([drawn_row(kept)]));
        Some(Context {
            captured_states: rows(&states.captured_states),
            hidden: reads_hidden.then(|| rows(&states.hidden)),
            tokens: rows(tokens),
            next: cat_row_runs(&all, behind),
            chunks: kept.iter().map(|kept| (kept.update.slot, kept.update.rows())).collect(),
        })
    }

    /// Moves the accepted rows of trees together in the target's KV cache. The moves take memory, so that they come before any other
    /// change: [`Engine::fail_largest`] cuts the rows off again.
    pub(super) fn keep_accepted_rows(&mut self, updates: &[SlotUpdate]) {
        let Some(target) = self.target.as_tree_target() else { return };
        for SlotUpdate { slot, kept, end, .. } in updates {
            if let (SlotEnd::Continues, Some(sequence), 2..) = (end, &self.slots[*slot], kept.len()) {
                target.keep_rows(*slot, sequence.target_len, kept);
            }
        }
    }

    /// Applies the updates to the sequences and returns their events.
    pub(super) fn commit(&mut self, updates: Vec<SlotUpdate>) -> Vec<Event> {
        let mut events = vec![];
        for update in updates {
            let rows = update.rows();
            let SlotUpdate { slot, tokens, cycle, end, .. } = update;
            let Some(sequence) = self.slots[slot].as_mut() else { continue };
            if let SlotEnd::NotFinite = end {
                events.push(Event::Failed(sequence.request_id, EngineError::NotFinite));
                self.free_slot(slot);
                continue;
            }
            if let Some(cycle) = cycle {
                self.counts.add_cycle(&cycle);
                sequence.record_cycle(cycle);
            }
            let visible = sequence.commit(&tokens);
            if !visible.is_empty() {
                events.push(Event::Tokens(sequence.request_id, visible));
            }
            sequence.target_len += rows;
            match end {
                SlotEnd::Finished(finish) => {
                    let done = self.free_slot(slot);
                    events
                        .extend(done.map(|done| Event::Done(done.request_id, done.into_completion(finish))));
                }
                SlotEnd::Continues | SlotEnd::NotFinite => {
                    self.target.truncate(slot, sequence.target_len);
                }
            }
        }
        events
    }
}
