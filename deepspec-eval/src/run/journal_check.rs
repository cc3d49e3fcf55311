//! Checks that a line of a journal can be the answer to its request. A damaged line would spoil the
//! results, and unbounded counts could exhaust memory.

use deepspec_engine::{Cycle, Finish, Request};

use super::entry::JournalEntry;

/// The request that an answer is checked against.
pub struct ExpectedAnswer<'a> {
    /// The request to the engine.
    pub request: &'a Request,
    /// γ of the drafter, 0 without one.
    pub block_size: usize,
    /// Size of the target's vocabulary.
    pub vocab_size: usize,
    /// Most nodes of a verified tree; 0 if blocks are verified.
    pub tree_nodes: usize,
}

impl ExpectedAnswer<'_> {
    /// Checks that the engine can have returned `entry`.
    ///
    /// # Errors
    /// A phrase that names the field and its problem.
    pub fn check(&self, entry: &JournalEntry) -> Result<(), String> {
        let Request { prompt, max_new_tokens: limit, stop_ids, .. } = self.request;
        if entry.prompt_tokens != prompt.len() {
            return Err(format!("`prompt_tokens` is {}, not {}", entry.prompt_tokens, prompt.len()));
        }
        if let Some(id) = entry.tokens.iter().find(|id| !(0..self.vocab_size as i64).contains(*id)) {
            return Err(format!("`tokens` has {id}, the vocabulary has {} ids", self.vocab_size));
        }
        let length = entry.tokens.len();
        let stop = entry.tokens.iter().position(|id| stop_ids.contains(id)).map(|at| at + 1);
        let ended = match entry.finish {
            Finish::Stop => stop == Some(length) && length <= *limit,
            Finish::Length => stop.is_none() && length == *limit,
        };
        if !ended {
            let finish = match entry.finish {
                Finish::Stop => "stop",
                Finish::Length => "length",
            };
            return Err(format!("`finish` is {finish} after {length} of {limit} `tokens`"));
        }
        for (index, cycle) in entry.cycles.iter().enumerate() {
            let last = index + 1 == entry.cycles.len();
            self.check_cycle(cycle, last).map_err(|problem| format!("`cycles[{index}]` has {problem}"))?;
        }
        check_token_count(entry, *limit)?;
        match entry.timing.is_plausible() {
            true => Ok(()),
            false => Err("`timing` is none that a clock shows".into()),
        }
    }

    /// Checks one cycle. The last one lacks the bonus token if an accepted stop token ended it.
    fn check_cycle(&self, cycle: &Cycle, last: bool) -> Result<(), String> {
        let Cycle { proposed, nodes, until_stop, accepted, committed, confidence } = cycle;
        let block = self.block_size;
        if *proposed as usize > block {
            return Err(format!("proposed {proposed}, the block has {block}"));
        }
        // A tree of this depth has a node at every depth.
        let known = if self.tree_nodes == 0 { 0..=0 } else { *proposed..=self.tree_nodes as u32 };
        if !known.contains(nodes) || (*proposed == 0 && *nodes > 0) {
            return Err(format!("{nodes} nodes for proposed {proposed}"));
        }
        if accepted > proposed {
            return Err(format!("accepted {accepted} of proposed {proposed}"));
        }
        let stopped = last && committed == accepted && *accepted > 0;
        if !(stopped || accepted.checked_add(1) == Some(*committed)) {
            return Err(format!("committed {committed} for accepted {accepted}"));
        }
        // `until_stop` ends at the first drafted stop token. An accepted stop token also ends the
        // proposal, so both counts are equal.
        let fewest = if stopped { *proposed } else { (*accepted).max(1).min(*proposed) };
        if !(fewest..=*proposed).contains(until_stop) {
            return Err(format!("usable {until_stop} of proposed {proposed} with accepted {accepted}"));
        }
        let logits = confidence.len();
        if logits > 0 && logits != *proposed as usize {
            return Err(format!("{logits} values of confidence for proposed {proposed}"));
        }
        match confidence.iter().find(|logit| !logit.is_finite()) {
            Some(logit) => Err(format!("confidence {logit}")),
            None => Ok(()),
        }
    }
}

/// Checks the token count: the first token from the prefill plus the committed tokens, cut at the
/// limit. No cycle begins beyond the limit.
fn check_token_count(entry: &JournalEntry, limit: usize) -> Result<(), String> {
    let committed: u64 = entry.cycles.iter().map(|cycle| u64::from(cycle.committed)).sum();
    let last = entry.cycles.last().map_or(0, |cycle| u64::from(cycle.committed));
    let (generated, tokens) = (1 + committed, entry.tokens.len() as u64);
    let adds_up = match entry.finish {
        Finish::Stop => generated == tokens,
        Finish::Length => generated >= tokens && generated - last <= limit as u64,
    };
    match adds_up {
        true => Ok(()),
        false => Err(format!("`cycles` committed {committed} for {tokens} `tokens`")),
    }
}
