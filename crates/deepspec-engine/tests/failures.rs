//! A failure that ends one sequence does not change the others: values that are not finite, out of
//! memory, and too little memory.

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use common::{PROMPT, ToyDrafter, ToyTarget, V};
use deepspec_engine::{
    Completion, DraftRequest, DraftSampling, Engine, EngineError, EngineOptions, Event, ModelInput,
    ModelOutput, Proposal, Proposer, Request, Sampling, Target, TreeBudget, TreeTarget, VerifyRule,
};
use deepspec_ops::DraftTree;
use tch::{Device, Kind, Tensor};

/// More memory than any machine has.
const ABSURD: i64 = 1 << 45;
/// Bytes per token that the toy reports.
const TOKEN_BYTES: u64 = 10;

/// libtorch's own out-of-memory error, which panics out of any operator.
fn run_out_of_memory() {
    let _ = Tensor::zeros([ABSURD], (Kind::Float, Device::Cpu));
}

/// A toy target that can fail.
struct Weak {
    toy: ToyTarget,
    /// A step with more tokens than this runs out of memory.
    most_tokens: usize,
    /// The first prompt token after which the hidden states become NaN.
    poison: Option<i64>,
    /// Moves of accepted rows so far, and the number of the move that runs out of memory.
    moves: usize,
    fails_at_move: usize,
    /// The number of slots of each successful forward.
    log: Rc<RefCell<Vec<usize>>>,
}

impl Weak {
    fn new(slots: usize) -> Self {
        Self {
            toy: ToyTarget::new(slots),
            most_tokens: usize::MAX,
            poison: None,
            moves: 0,
            fails_at_move: usize::MAX,
            log: Rc::default(),
        }
    }
}

impl Target for Weak {
    fn forward(&mut self, feed: &ModelInput) -> ModelOutput {
        let forwarded = self.toy.forward(feed);
        // Fails only now, after the KV caches have grown.
        if feed.chunks.iter().map(|&(_, tokens)| tokens).sum::<usize>() > self.most_tokens {
            run_out_of_memory();
        }
        self.log.borrow_mut().push(feed.chunks.len());
        forwarded
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        let logits = self.toy.logits(hidden);
        let Some(poison) = self.poison else { return logits };
        // The digit after the leading 1 is the prompt's first token.
        let first = |mut prefix: i64| {
            while prefix >= V * V {
                prefix /= V;
            }
            prefix - V
        };
        let rows: Vec<f32> = common::prefixes(hidden)
            .into_iter()
            .map(|prefix| if first(prefix) == poison { f32::NAN } else { 0.0 })
            .collect();
        logits + Tensor::from_slice(&rows).unsqueeze(1)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.toy.truncate(slot, len);
    }

    fn kv_cache_bytes(&self, tokens: usize) -> u64 {
        tokens as u64 * TOKEN_BYTES
    }

    fn tree_mask_bytes(&self, rows: usize, tokens: usize) -> u64 {
        (rows * tokens) as u64
    }

    fn vocab_size(&self) -> usize {
        self.toy.vocab_size()
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn as_tree_target(&mut self) -> Option<&mut dyn TreeTarget> {
        Some(self)
    }
}

impl TreeTarget for Weak {
    fn forward_trees(&mut self, input: &ModelInput, trees: &[DraftTree]) -> ModelOutput {
        self.toy.forward_trees(input, trees)
    }

    fn keep_rows(&mut self, slot: usize, past_len: usize, runs: &[(i64, i64)]) {
        self.toy.keep_rows(slot, past_len, runs);
        self.moves += 1;
        if self.moves == self.fails_at_move {
            run_out_of_memory();
        }
    }
}

/// A drafter that runs out of memory in some proposals, after it has received its context.
struct Faltering {
    toy: ToyDrafter,
    proposals: usize,
    fails_at: usize,
}

impl Proposer for Faltering {
    fn draft_len(&self) -> usize {
        self.toy.draft_len()
    }

    fn reads_hidden(&self) -> bool {
        self.toy.reads_hidden()
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let proposal = self.toy.propose(request);
        self.proposals += 1;
        if self.proposals == self.fails_at {
            run_out_of_memory();
        }
        proposal
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.toy.truncate(slot, len);
    }
}

fn options(slots: usize) -> EngineOptions {
    EngineOptions {
        slots,
        context: 64,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
        counts_overrun: false,
    }
}

fn request(id: usize, prompt: &[i64]) -> Request {
    Request {
        id: format!("sample-{id}"),
        prompt: prompt.to_vec(),
        sampling: Sampling::new(1.0, 9),
        max_new_tokens: 10,
        stop_ids: vec![],
    }
}

/// The answers by id, and the errors of the other requests.
fn drain<P: Proposer>(
    engine: &mut Engine<Weak, P>,
    requests: &[Request],
) -> (BTreeMap<String, Completion>, Vec<(String, EngineError)>) {
    let submit = |request: &Request| (engine.submit(request.clone()).unwrap(), request.id.clone());
    let ids: BTreeMap<_, _> = requests.iter().map(submit).collect();
    let (mut done, mut failed) = (BTreeMap::new(), vec![]);
    while !engine.is_idle() {
        for event in engine.step() {
            match event {
                Event::Tokens(..) => {}
                Event::Done(_, completion) => drop(done.insert(completion.id.clone(), completion)),
                Event::Failed(request_id, error) => failed.push((ids[&request_id].clone(), error)),
            }
        }
    }
    assert_eq!(done.len() + failed.len(), requests.len(), "every request ends once");
    (done, failed)
}

/// The answers to these requests if nothing fails.
fn undisturbed(requests: &[Request]) -> BTreeMap<String, Completion> {
    let mut engine = Engine::new(Weak::new(1), Some(ToyDrafter::new(1)), options(1));
    drain(&mut engine, requests).0
}

fn assert_same(found: &BTreeMap<String, Completion>, expected: &BTreeMap<String, Completion>) {
    for (id, found) in found {
        let expected = &expected[id];
        assert_eq!((&found.tokens, &found.cycles), (&expected.tokens, &expected.cycles), "{id}");
    }
}

#[test]
fn what_is_not_finite_ends_its_own_sequence() {
    let requests: Vec<Request> = (0..9).map(|i| request(i, &[i as i64 % 3, 1])).collect();
    let target = Weak { poison: Some(2), ..Weak::new(4) };
    let mut engine = Engine::new(target, Some(ToyDrafter::new(4)), options(4));
    let (done, failed) = drain(&mut engine, &requests);
    assert_eq!(failed.len(), 3);
    assert!(failed.iter().all(|(_, error)| *error == EngineError::NotFinite));
    assert_same(&done, &undisturbed(&requests));
}

#[test]
fn without_memory_the_largest_ends_and_the_others_go_on() {
    let mut requests: Vec<Request> = (0..8).map(|i| request(i, &PROMPT)).collect();
    requests[2].prompt = PROMPT.repeat(8);
    let target = Weak { most_tokens: 17, ..Weak::new(4) };
    let mut engine = Engine::new(target, Some(ToyDrafter::new(4)), options(4));
    let (done, failed) = drain(&mut engine, &requests);
    let [(id, EngineError::OutOfMemory { tokens: 16, message })] = failed.as_slice() else {
        panic!("{failed:?}")
    };
    assert_eq!(id, "sample-2");
    assert!(message.contains("memory") && !message.contains('\n'), "{message}");
    assert_same(&done, &undisturbed(&requests));
}

/// The drafter had received the context before the failed step. After the rollback it receives it
/// exactly once more; the toy panics otherwise.
#[test]
fn a_drafter_without_memory_takes_its_context_in_again() {
    let requests: Vec<Request> = (0..6).map(|i| request(i, &PROMPT)).collect();
    for fails_at in 1..6 {
        let drafter = Faltering { toy: ToyDrafter::new(3), proposals: 0, fails_at };
        let (done, failed) = drain(&mut Engine::new(Weak::new(3), Some(drafter), options(3)), &requests);
        assert_eq!((done.len(), failed.len()), (5, 1));
        assert_same(&done, &undisturbed(&requests));
    }
}

/// The failed step changes no sequence, also if some accepted rows had moved. The toy panics if a drafter's context is doubled.
#[test]
fn a_step_without_memory_to_move_rows_is_repeated() {
    let requests: Vec<Request> = (0..6).map(|i| request(i, &PROMPT)).collect();
    let trees = |slots| EngineOptions {
        verify_rule: VerifyRule::Tree(TreeBudget { nodes: 12, width: 3 }),
        ..options(slots)
    };
    let run = |slots, fails_at_move| {
        let target = Weak { fails_at_move, ..Weak::new(slots) };
        drain(&mut Engine::new(target, Some(ToyDrafter::new(slots)), trees(slots)), &requests)
    };
    let (expected, _) = run(1, usize::MAX);
    for fails_at_move in 1..6 {
        let (done, failed) = run(3, fails_at_move);
        assert_eq!((done.len(), failed.len()), (5, 1));
        assert_same(&done, &expected);
    }
}

#[test]
fn other_panics_are_no_lack_of_memory() {
    struct Wrong(Weak);
    impl Target for Wrong {
        fn forward(&mut self, _: &ModelInput) -> ModelOutput {
            panic!("a mistake of ours")
        }
        fn logits(&self, hidden: &Tensor) -> Tensor {
            self.0.logits(hidden)
        }
        fn truncate(&mut self, _: usize, _: usize) {}
        fn vocab_size(&self) -> usize {
            V as usize
        }
        fn device(&self) -> Device {
            Device::Cpu
        }
    }
    let message = deepspec_core::cli::catch_panic(|| {
        let mut engine: Engine<Wrong, ToyDrafter> = Engine::new(Wrong(Weak::new(1)), None, options(1));
        engine.submit(request(0, &PROMPT)).unwrap();
        engine.step()
    });
    assert_eq!(message.unwrap_err(), "a mistake of ours");
}

#[test]
fn sequences_start_when_their_memory_is_there() {
    // Prompt, answer and a block: 2 + 10 + 3 tokens. Memory suffices for two such requests.
    let requests: Vec<Request> = (0..6).map(|i| request(i, &PROMPT)).collect();
    let target = Weak::new(4);
    let log = target.log.clone();
    let mut engine =
        Engine::new(target, Some(ToyDrafter::new(4)), options(4)).with_kv_cache_limit(31 * TOKEN_BYTES);
    let (done, failed) = drain(&mut engine, &requests);
    assert_eq!((done.len(), failed.len()), (6, 0));
    assert_same(&done, &undisturbed(&requests));
    assert_eq!(log.borrow().iter().max(), Some(&2));

    let large = Request { max_new_tokens: 40, ..request(7, &PROMPT) };
    let refused = engine.submit(large).unwrap_err();
    assert_eq!(refused, EngineError::TooLarge { tokens: 45, bytes: 450, memory: 310 });
    assert!(engine.is_idle());
}

#[test]
fn the_nodes_of_trees_and_their_masks_take_memory() {
    // Prompt, answer and a tree: 2 + 10 + 5 tokens. The anchor and the nodes have a mask over them.
    let needed = 17 * TOKEN_BYTES + 6 * 17;
    for (memory, fits) in [(needed, true), (needed - 1, false)] {
        let verify_rule = VerifyRule::Tree(TreeBudget { nodes: 5, width: 2 });
        let options = EngineOptions { verify_rule, ..options(1) };
        let mut engine =
            Engine::new(Weak::new(1), Some(ToyDrafter::new(1)), options).with_kv_cache_limit(memory);
        let submitted = engine.submit(request(1, &PROMPT));
        let refusal = EngineError::TooLarge { tokens: 17, bytes: needed, memory };
        assert_eq!(submitted.err(), (!fits).then_some(refusal), "{memory} bytes");
    }
}
