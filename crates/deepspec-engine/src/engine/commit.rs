//! The end of a step: appends tokens to answers, finishes sequences and cuts KV caches to the
//! committed tokens.

use deepspec_ops::{copied_runs, runs};
use tch::Tensor;

use super::{Engine, Step};
use crate::outcome::VerifyOutcome;
use crate::{Context, Cycle, EngineError, Event, Finish, ModelOutput, Proposer, Target};

/// The result of a step for one slot.
pub(super) struct SlotUpdate {
    slot: usize,
    tokens: Vec<i64>,
    cycle: Option<Cycle>,
    /// Rows of the forward that stay in the slot's KV cache.
    rows: usize,
    end: End,
}

enum End {
    GoesOn,
    Finished(Finish),
    NotFinite,
}

/// Committed rows of one slot in a step's forward, which are contiguous.
struct Kept {
    slot: usize,
    first: i64,
    count: i64,
    /// Index of the slot among the step's chunks.
    chunk: i64,
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Computes the update of every slot from the verification's result.
    pub(super) fn fates(&self, step: &Step, outcome: &VerifyOutcome) -> Vec<SlotUpdate> {
        let overrun = self.options.counts_overrun && self.proposer.is_some();
        let mut fates = Vec::with_capacity(step.chunks.len());
        for (i, &(slot, fed)) in step.chunks.iter().enumerate() {
            let Some(sequence) = &self.slots[slot] else { continue };
            let (cycle, tokens, rows) = match i.checked_sub(step.decoding.len()) {
                Some(prompt) => (None, vec![outcome.first[prompt]], fed),
                None => {
                    let (cycle, tokens) = outcome.cycle(i, step.lens[i], &sequence.request.stop_ids);
                    let rows = 1 + cycle.accepted as usize;
                    (Some(cycle), tokens, rows)
                }
            };
            let end = match sequence.finish(&tokens, overrun) {
                _ if !outcome.finite[i] => End::NotFinite,
                Some(finish) => End::Finished(finish),
                None => End::GoesOn,
            };
            fates.push(SlotUpdate { slot, tokens, cycle, rows, end });
        }
        fates
    }

    /// Hidden states of the committed tokens for the drafter, of sequences that continue. `tokens`
    /// are the tokens that the target ran and `states` their hidden states. `drawn` are the tokens
    /// drawn after each chunk.
    pub(super) fn news(
        &self,
        step: &Step,
        fates: &[SlotUpdate],
        tokens: &Tensor,
        drawn: &Tensor,
        states: &ModelOutput,
    ) -> Option<Context> {
        let reads_hidden = self.proposer.as_ref()?.reads_hidden();
        let (mut kept, mut row) = (vec![], 0);
        for (chunk, (fate, &(slot, fed))) in fates.iter().zip(&step.chunks).enumerate() {
            if let End::GoesOn = fate.end {
                kept.push(Kept { slot, first: row as i64, count: fate.rows as i64, chunk: chunk as i64 });
            }
            row += fed;
        }
        if kept.is_empty() {
            return None;
        }
        // Copies the rows, so that only these rows stay in memory until the drafter reads them.
        let rows = |of: &Tensor| copied_runs(of, kept.iter().map(|kept| (kept.first, kept.count)));
        // The next token of a row is the token of the following row. For a chunk's last kept row it
        // is the drawn token.
        let all = Tensor::cat(&[tokens, drawn], 0);
        let behind = |kept: &Kept| [(kept.first + 1, kept.count - 1), (row as i64 + kept.chunk, 1)];
        Some(Context {
            taps: rows(&states.taps),
            hidden: reads_hidden.then(|| rows(&states.hidden)),
            tokens: rows(tokens),
            next: runs(&all, kept.iter().flat_map(behind)),
            chunks: kept.iter().map(|kept| (kept.slot, kept.count as usize)).collect(),
        })
    }

    /// Applies the updates to the sequences and returns their events.
    pub(super) fn commit(&mut self, fates: Vec<SlotUpdate>) -> Vec<Event> {
        let mut events = vec![];
        for SlotUpdate { slot, tokens, cycle, rows, end } in fates {
            let Some(sequence) = self.slots[slot].as_mut() else { continue };
            if let End::NotFinite = end {
                events.push(Event::Failed(sequence.ticket, EngineError::NotFinite));
                self.vacate(slot);
                continue;
            }
            if let Some(cycle) = cycle {
                self.counts.add_cycle(&cycle);
                sequence.record(cycle);
            }
            let visible = sequence.commit(&tokens);
            if !visible.is_empty() {
                events.push(Event::Tokens(sequence.ticket, visible));
            }
            sequence.held += rows;
            match end {
                End::Finished(finish) => {
                    let done = self.vacate(slot);
                    events.extend(done.map(|done| Event::Done(done.ticket, done.into_completion(finish))));
                }
                End::GoesOn | End::NotFinite => self.target.truncate(slot, sequence.held),
            }
        }
        events
    }
}
