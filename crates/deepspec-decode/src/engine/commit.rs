//! What a step leaves behind: answers grow or end, histories are cut to what was committed.

use tch::Tensor;

use super::{Engine, Step};
use crate::outcome::Outcome;
use crate::{Context, Cycle, EngineError, Event, Finish, Forwarded, Proposer, Target, Upload};

/// What becomes of a slot.
pub(super) struct Fate {
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

/// The committed rows of a step's forward, which the drafter has not seen.
#[derive(Default)]
struct Kept {
    chunks: Vec<(usize, usize)>,
    rows: Vec<i64>,
    /// The token of each row, and the one after it.
    tokens: Vec<i64>,
    next: Vec<i64>,
}

impl Kept {
    /// `count` rows of `slot` from `first` on, which stand for the first ones of `tokens`; one more token is known.
    fn add(&mut self, slot: usize, first: usize, count: usize, tokens: impl Iterator<Item = i64> + Clone) {
        self.chunks.push((slot, count));
        self.rows.extend(first as i64..(first + count) as i64);
        self.tokens.extend(tokens.clone().take(count));
        self.next.extend(tokens.skip(1).take(count));
    }

    /// With what the drafter reads of the states of all rows of the forward.
    fn into_context(self, states: &Forwarded, reads_hidden: bool) -> Context {
        let mut upload = Upload::default();
        let parts = [self.rows, self.tokens, self.next].map(|ids| upload.push(ids));
        let sent = upload.send(states.taps.device());
        let [rows, tokens, next] = parts.map(|part| sent.of(part));
        let kept = |states: &Tensor| states.index_select(0, &rows);
        let hidden = reads_hidden.then(|| kept(&states.hidden));
        Context { taps: kept(&states.taps), hidden, tokens, next, chunks: self.chunks }
    }
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// What the target's word means for every slot.
    pub(super) fn fates(&self, step: &Step, outcome: &Outcome) -> Vec<Fate> {
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
            fates.push(Fate { slot, tokens, cycle, rows, end });
        }
        fates
    }

    /// States of what is committed for the drafter, of sequences that go on; `states` are those of the rows that ran.
    pub(super) fn news(&self, step: &Step, fates: &[Fate], states: &Forwarded) -> Option<Context> {
        let reads_hidden = self.proposer.as_ref()?.reads_hidden();
        let (mut kept, mut row) = (Kept::default(), 0);
        for (fate, &(slot, fed)) in fates.iter().zip(&step.chunks) {
            let first = row;
            row += fed;
            let (End::GoesOn, Some(sequence)) = (&fate.end, &self.slots[slot]) else { continue };
            let prompt = if sequence.anchor.is_none() { sequence.request.prompt.as_slice() } else { &[] };
            let tokens = prompt.iter().chain(&sequence.anchor).chain(&fate.tokens).copied();
            kept.add(slot, first, fate.rows, tokens);
        }
        Some(kept.into_context(states, reads_hidden))
    }

    /// Commits what was decided.
    pub(super) fn commit(&mut self, fates: Vec<Fate>) -> Vec<Event> {
        let mut events = vec![];
        for Fate { slot, tokens, cycle, rows, end } in fates {
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
