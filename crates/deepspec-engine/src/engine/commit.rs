//! The end of a step: appends tokens to answers, finishes sequences and cuts KV caches to the
//! committed tokens.

use deepspec_ops::{cat_row_runs, copy_row_runs};
use tch::Tensor;

use super::{Engine, StepPlan};
use crate::outcome::VerifyOutcome;
use crate::{Context, Cycle, EngineError, Event, Finish, ModelOutput, Proposer, Target};

/// The result of a step for one slot.
pub(super) struct SlotUpdate {
    slot: usize,
    tokens: Vec<i64>,
    cycle: Option<Cycle>,
    /// Rows of the forward that stay in the slot's KV cache.
    rows: usize,
    end: SlotEnd,
}

/// How a step ends for a slot.
enum SlotEnd {
    Continues,
    Finished(Finish),
    NotFinite,
}

/// Committed rows of one slot in a step's forward, which are contiguous.
struct CommittedRows {
    slot: usize,
    first: i64,
    count: i64,
    /// Index of the slot among the step's chunks.
    chunk: i64,
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Computes every slot's update from the outcome of verification.
    pub(super) fn slot_updates(&self, step: &StepPlan, outcome: &VerifyOutcome) -> Vec<SlotUpdate> {
        let overrun = self.options.counts_overrun && self.proposer.is_some();
        let mut updates = Vec::with_capacity(step.chunks.len());
        for (i, &(slot, fed)) in step.chunks.iter().enumerate() {
            let Some(sequence) = &self.slots[slot] else { continue };
            let (cycle, tokens, rows) = match i.checked_sub(step.decoding.len()) {
                Some(prompt) => (None, vec![outcome.first[prompt]], fed),
                None => {
                    let (cycle, tokens) =
                        outcome.cycle_and_tokens(i, step.lens[i], &sequence.request.stop_ids);
                    let rows = 1 + cycle.accepted as usize;
                    (Some(cycle), tokens, rows)
                }
            };
            let end = match sequence.finish_reason(&tokens, overrun) {
                _ if !outcome.finite[i] => SlotEnd::NotFinite,
                Some(finish) => SlotEnd::Finished(finish),
                None => SlotEnd::Continues,
            };
            updates.push(SlotUpdate { slot, tokens, cycle, rows, end });
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
        for (chunk, (update, &(slot, fed))) in updates.iter().zip(&step.chunks).enumerate() {
            if let SlotEnd::Continues = update.end {
                kept.push(CommittedRows {
                    slot,
                    first: row as i64,
                    count: update.rows as i64,
                    chunk: chunk as i64,
                });
            }
            row += fed;
        }
        if kept.is_empty() {
            return None;
        }
        // Copies the rows, so that only these rows stay in memory until the drafter reads them.
        let rows = |of: &Tensor| copy_row_runs(of, kept.iter().map(|kept| (kept.first, kept.count)));
        // The next token of a row is the token of the following row. For a chunk's last kept row it
        // is the drawn token.
        let all = Tensor::cat(&[tokens, drawn], 0);
        let behind = |kept: &CommittedRows| [(kept.first + 1, kept.count - 1), (row as i64 + kept.chunk, 1)];
        Some(Context {
            captured_states: rows(&states.captured_states),
            hidden: reads_hidden.then(|| rows(&states.hidden)),
            tokens: rows(tokens),
            next: cat_row_runs(&all, kept.iter().flat_map(behind)),
            chunks: kept.iter().map(|kept| (kept.slot, kept.count as usize)).collect(),
        })
    }

    /// Applies the updates to the sequences and returns their events.
    pub(super) fn commit(&mut self, updates: Vec<SlotUpdate>) -> Vec<Event> {
        let mut events = vec![];
        for SlotUpdate { slot, tokens, cycle, rows, end } in updates {
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
                SlotEnd::Continues | SlotEnd::NotFinite => self.target.truncate(slot, sequence.target_len),
            }
        }
        events
    }
}
