//! What a step leaves behind: answers grow or end, histories are cut to what was committed.

use tch::Tensor;

use super::{Engine, Step, index};
use crate::outcome::Outcome;
use crate::{Context, Event, Proposer, Target};

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

    /// With the states `taps [N, m·d]` of all rows of the forward.
    fn into_context(self, taps: &Tensor) -> Context {
        let [rows, tokens, next] =
            [self.rows, self.tokens, self.next].map(|ids| index(ids.into_iter(), taps));
        Context { taps: taps.index_select(0, &rows), tokens, next, chunks: self.chunks }
    }
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Commits what the target decided; `taps [N, m·d]` are the states of the rows that ran.
    pub(super) fn commit(&mut self, step: &Step, outcome: &Outcome, taps: &Tensor) -> Vec<Event> {
        let overrun = self.options.counts_overrun && self.proposer.is_some();
        let (mut events, mut kept, mut row) = (vec![], Kept::default(), 0);
        for (i, &(slot, fed)) in step.chunks.iter().enumerate() {
            let first_row = row;
            row += fed;
            let Some(sequence) = self.slots[slot].as_mut() else { continue };
            let (tokens, rows) = match i.checked_sub(step.decoding.len()) {
                Some(prompt) => (vec![outcome.first[prompt]], fed),
                None => {
                    let (cycle, tokens) = outcome.cycle(i, step.lens[i], &sequence.request.stop_ids);
                    let rows = 1 + cycle.accepted as usize;
                    sequence.record(cycle);
                    (tokens, rows)
                }
            };
            let before = sequence.anchor;
            let visible = sequence.commit(&tokens);
            if !visible.is_empty() {
                events.push(Event::Tokens(sequence.ticket, visible));
            }
            if let Some(finish) = sequence.finish(overrun) {
                let done = self.slots[slot].take();
                events.extend(done.map(|done| Event::Done(done.ticket, done.into_completion(finish))));
                continue;
            }
            let prompt = if before.is_none() { sequence.request.prompt.as_slice() } else { &[] };
            kept.add(slot, first_row, rows, prompt.iter().chain(&before).chain(&tokens).copied());
            sequence.held += rows;
            self.target.truncate(slot, sequence.held);
        }
        if self.proposer.is_some() {
            self.context = kept.into_context(taps);
        }
        events
    }
}
