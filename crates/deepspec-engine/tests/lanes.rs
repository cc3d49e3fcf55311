//! Engines side by side answer as one does, and what ends one of them is told.

mod common;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread;

use common::{PROMPT, ToyDrafter, ToyTarget, V};
use deepspec_engine::{
    DraftSampling, Engine, EngineError, EngineOptions, EngineReplicas, Event, Generator, ModelInput,
    ModelOutput, Request, RequestId, Sampling, Target, shares,
};
use tch::{Device, Tensor};

const CONTEXT: usize = 64;

fn options(slots: usize) -> EngineOptions {
    EngineOptions {
        slots,
        context: CONTEXT,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        counts_overrun: false,
    }
}

fn engine(slots: usize) -> Engine<ToyTarget, ToyDrafter> {
    Engine::new(ToyTarget::new(slots), Some(ToyDrafter::new(slots)), options(slots))
}

fn request(id: usize) -> Request {
    Request {
        id: format!("sample-{id}"),
        prompt: PROMPT.to_vec(),
        sampling: Sampling::new(1.0, 9),
        max_new_tokens: 1 + id % 12,
        stop_ids: vec![],
    }
}

/// What became of each request.
type Fates = BTreeMap<RequestId, Result<Vec<i64>, EngineError>>;

/// Runs all that was submitted; what is reported in pieces must be what is reported in the end.
fn drain(generator: &mut dyn Generator) -> Fates {
    let (mut pieces, mut fates) = (BTreeMap::<RequestId, Vec<i64>>::new(), Fates::new());
    while !generator.is_idle() {
        for event in generator.step() {
            let (ticket, fate) = match event {
                Event::Tokens(ticket, tokens) => {
                    pieces.entry(ticket).or_default().extend(tokens);
                    continue;
                }
                Event::Done(ticket, completion) => {
                    assert_eq!(pieces[&ticket], completion.tokens);
                    (ticket, Ok(completion.tokens))
                }
                Event::Failed(ticket, error) => (ticket, Err(error)),
            };
            assert!(fates.insert(ticket, fate).is_none(), "{ticket:?} ended twice");
        }
    }
    fates
}

#[test]
fn lanes_answer_as_one_engine_does() {
    let requests: Vec<Request> = (0..40).map(request).collect();
    let mut alone = engine(1);
    let expected = alone.run(requests.clone(), |_| {}).unwrap();
    for lanes in [vec![1], vec![2, 2], vec![3, 1, 2]] {
        let mut lanes = EngineReplicas::new(lanes.into_iter().map(engine).collect(), 1);
        assert_eq!(
            (lanes.draft_len(), lanes.vocab_size()),
            (Generator::draft_len(&alone), Generator::vocab_size(&alone))
        );
        // Twice: engines that had nothing to do take up work again.
        for _ in 0..2 {
            let tickets: Vec<RequestId> =
                requests.iter().map(|request| lanes.submit(request.clone()).unwrap()).collect();
            let fates = drain(&mut lanes);
            assert_eq!(fates.len(), requests.len());
            for (ticket, completion) in tickets.iter().zip(&expected) {
                assert_eq!(fates[ticket].as_ref(), Ok(&completion.tokens), "{}", completion.id);
            }
        }
        assert!(lanes.times().steps > 0);
    }
}

#[test]
fn a_request_that_no_engine_takes_is_said_to_have_failed() {
    let mut lanes = EngineReplicas::new(vec![engine(2), engine(2)], 1);
    let mut tickets = vec![];
    for id in 0..8 {
        let mut request = request(id);
        if id % 3 == 0 {
            request.max_new_tokens = CONTEXT;
        }
        tickets.push(lanes.submit(request).unwrap());
    }
    let fates = drain(&mut lanes);
    for (id, ticket) in tickets.iter().enumerate() {
        let refused = matches!(fates[ticket], Err(EngineError::TooLong { .. }));
        assert_eq!(refused, id % 3 == 0, "{id}: {:?}", fates[ticket]);
    }
}

#[test]
fn lanes_that_are_let_go_end_at_once() {
    let mut lanes = EngineReplicas::new(vec![engine(1), engine(1)], 1);
    for id in 0..1000 {
        lanes.submit(request(id)).unwrap();
    }
    lanes.step();
    // Waits for the threads.
    drop(lanes);
}

#[test]
fn an_engine_s_panic_goes_on_where_its_events_are_waited_for() {
    struct Wrong;
    impl Target for Wrong {
        fn forward(&mut self, _: &ModelInput) -> ModelOutput {
            panic!("a mistake of ours")
        }
        fn logits(&self, hidden: &Tensor) -> Tensor {
            hidden.shallow_clone()
        }
        fn truncate(&mut self, _: usize, _: usize) {}
        fn vocab_size(&self) -> usize {
            V as usize
        }
        fn device(&self) -> Device {
            Device::Cpu
        }
    }
    let engine = || Engine::<Wrong, ToyDrafter>::new(Wrong, None, options(1));
    let mut lanes = EngineReplicas::new(vec![engine(), engine()], 1);
    lanes.submit(request(0)).unwrap();
    for words in ["a mistake of ours", "the engines have ended"] {
        let panic = catch_unwind(AssertUnwindSafe(|| drain(&mut lanes))).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&words));
    }
}

/// What is submitted waits for the first step, with which the clock of a measurement starts: an engine that woke before would run the first request
/// alone.
#[test]
fn engines_begin_with_their_share_of_all_that_was_submitted() {
    struct Noting(ToyTarget, Arc<OnceLock<usize>>);
    impl Target for Noting {
        fn forward(&mut self, feed: &ModelInput) -> ModelOutput {
            self.1.get_or_init(|| feed.chunks.len());
            self.0.forward(feed)
        }
        fn logits(&self, hidden: &Tensor) -> Tensor {
            self.0.logits(hidden)
        }
        fn truncate(&mut self, slot: usize, len: usize) {
            self.0.truncate(slot, len);
        }
        fn vocab_size(&self) -> usize {
            V as usize
        }
        fn device(&self) -> Device {
            Device::Cpu
        }
    }
    let first: [Arc<OnceLock<usize>>; 2] = Default::default();
    let engine = |first: &Arc<OnceLock<usize>>| {
        Engine::new(Noting(ToyTarget::new(4), Arc::clone(first)), Some(ToyDrafter::new(4)), options(4))
    };
    let mut lanes = EngineReplicas::new(first.iter().map(engine).collect(), 1);
    for id in 0..6 {
        lanes.submit(request(id)).unwrap();
        thread::yield_now();
    }
    assert_eq!(drain(&mut lanes).len(), 6);
    let most = first.iter().filter_map(|first| first.get()).max();
    assert_eq!(most, Some(&3), "half of what was there");
}

#[test]
fn a_whole_is_shared_out_evenly() {
    assert_eq!(shares(16, 2), [8, 8]);
    assert_eq!(shares(7, 3), [3, 2, 2]);
    assert_eq!(shares(4, 1), [4]);
}
