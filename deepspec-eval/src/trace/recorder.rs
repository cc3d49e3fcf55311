//! A drafter that records its proposals.

use std::cell::RefCell;
use std::rc::Rc;

use deepspec_engine::{DraftRequest, Proposal, Proposer};

/// Forwards the calls to a drafter, and records its proposals for the first slot.
pub struct Recorder<P> {
    drafter: P,
    blocks: Rc<RefCell<Vec<Vec<i64>>>>,
}

impl<P> Recorder<P> {
    /// A recorder without recorded blocks.
    pub fn new(drafter: P) -> Self {
        Self { drafter, blocks: Rc::default() }
    }

    /// All recorded blocks; the list grows with every proposal.
    pub fn blocks(&self) -> Rc<RefCell<Vec<Vec<i64>>>> {
        self.blocks.clone()
    }
}

impl<P: Proposer> Proposer for Recorder<P> {
    fn draft_len(&self) -> usize {
        self.drafter.draft_len()
    }

    fn ends_at_stop_tokens(&self) -> bool {
        self.drafter.ends_at_stop_tokens()
    }

    fn reads_hidden(&self) -> bool {
        self.drafter.reads_hidden()
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let proposal = self.drafter.propose(request);
        let first = proposal.tokens.get(0);
        let mut block = vec![0; first.numel()];
        first.copy_data(&mut block, first.numel());
        self.blocks.borrow_mut().push(block);
        proposal
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.drafter.truncate(slot, len);
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        self.drafter.kv_cache_bytes(tokens)
    }

    fn free_cached_memory(&mut self) {
        self.drafter.free_cached_memory();
    }
}
