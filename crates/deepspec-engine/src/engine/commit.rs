//! What a step leaves behind: answers grow or end, histories are cut to what was committed.

use deepspec_ops::{copied_runs, runs};
use tch::Tensor;

use super::{Engine, Step};
use crate::outcome::VerifyOutcome;
use crate::{Context, Cycle, EngineError, Event, Finish, ModelOutput, Proposer, Target};

/// What becomes of a slot.
pub(super) struct SlotUpdate {
    slot: usize,
    tokens: Vec<i64>,
    cycle: Option<Cycle>,
    /// Rows of the forward that stay in its history.
    rows: usize,
    end: End,
}

enum End {
    GoesOn,
    Finished(Finish),
    NotFinite,
}

/// Rows of a step's forward that were committed: those of one slot, side by side.
struct Kept {
    slot: usize,
    first: i64,
    count: i64,
    /// Its place among the step's chunks.
    chunk: i64,
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// What the target's word means for every slot.
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

    /// States of what is committed for the drafter, of sequences that go on; `tokens` are those that ran, `drawn` those drawn behind the chunks, and
    /// `states` those of the rows that ran.
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
        // What waits for the drafter is all that it holds in memory.
        let rows = |of: &Tensor| copied_runs(of, kept.iter().map(|kept| (kept.first, kept.count)));
        // What stands behind a row is the row behind it, and behind the last one what was drawn there.
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

    /// Commits what was decided.
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
