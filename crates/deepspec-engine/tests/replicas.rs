//! Engines side by side answer like a single one, and the failure of one is reported.

mod common;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread;

use common::{PROMPT, ToyDrafter, ToyTarget, V};
use deepspec_engine::{
    DraftSampling, Engine, EngineError, EngineOptions, EngineReplicas, Event, Generator, ModelInput,
    ModelOutput, Request, RequestId, Sampling, Target, VerifyRule, split_evenly,
};
use tch::{Device, Tensor};

const CONTEXT: usize = 64;

fn options(slots: usize) -> EngineOptions {
    EngineOptions {
        slots,
        context: CONTEXT,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
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

/// The outcome of each request.
type Outcomes = BTreeMap<RequestId, Result<Vec<i64>, EngineError>>;

/// Runs all submitted requests; the streamed pieces must add up to the final result.
fn drain(generator: &mut dyn Generator) -> Outcomes {
    let (mut pieces, mut outcomes) = (BTreeMap::<RequestId, Vec<i64>>::new(), Outcomes::new());
    while !generator.is_idle() {
        for event in generator.step() {
            let (request_id, outcome) = match event {
                Event::Tokens(request_id, tokens) => {
                    pieces.entry(request_id).or_default().extend(tokens);
                    continue;
                }
                Event::Done(request_id, completion) => {
                    assert_eq!(pieces[&request_id], completion.tokens);
                    (request_id, Ok(completion.tokens))
                }
                Event::Failed(request_id, error) => (request_id, Err(error)),
            };
            assert!(outcomes.insert(request_id, outcome).is_none(), "{request_id:?} ended twice");
        }
    }
    outcomes
}

#[test]
fn replicas_answer_as_one_engine_does() {
    let requests: Vec<Request> = (0..40).map(request).collect();
    let mut alone = engine(1);
    let expected = alone.run(requests.clone(), |_| {}).unwrap();
    for replicas in [vec![1], vec![2, 2], vec![3, 1, 2]] {
        let mut replicas = EngineReplicas::new(replicas.into_iter().map(engine).collect(), 1);
        assert_eq!(
            (replicas.draft_len(), replicas.vocab_size()),
            (Generator::draft_len(&alone), Generator::vocab_size(&alone))
        );
        // Twice, because idle engines must accept work again.
        for _ in 0..2 {
            let request_ids: Vec<RequestId> =
                requests.iter().map(|request| replicas.submit(request.clone()).unwrap()).collect();
            let outcomes = drain(&mut replicas);
            assert_eq!(outcomes.len(), requests.len());
            for (request_id, completion) in request_ids.iter().zip(&expected) {
                assert_eq!(outcomes[request_id].as_ref(), Ok(&completion.tokens), "{}", completion.id);
            }
        }
        assert!(replicas.times().steps > 0);
    }
}

#[test]
fn a_request_that_no_engine_takes_is_said_to_have_failed() {
    let mut replicas = EngineReplicas::new(vec![engine(2), engine(2)], 1);
    let mut request_ids = vec![];
    for id in 0..8 {
        let mut request = request(id);
        if id % 3 == 0 {
            request.max_new_tokens = CONTEXT;
        }
        request_ids.push(replicas.submit(request).unwrap());
    }
    let outcomes = drain(&mut replicas);
    for (id, request_id) in request_ids.iter().enumerate() {
        let refused = matches!(outcomes[request_id], Err(EngineError::TooLong { .. }));
        assert_eq!(refused, id % 3 == 0, "{id}: {:?}", outcomes[request_id]);
    }
}

#[test]
fn replicas_that_are_let_go_end_at_once() {
    let mut replicas = EngineReplicas::new(vec![engine(1), engine(1)], 1);
    for id in 0..1000 {
        replicas.submit(request(id)).unwrap();
    }
    replicas.step();
    // Waits for the threads.
    drop(replicas);
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
    let mut replicas = EngineReplicas::new(vec![engine(), engine()], 1);
    replicas.submit(request(0)).unwrap();
    for words in ["a mistake of ours", "the engines have ended"] {
        let panic = catch_unwind(AssertUnwindSafe(|| drain(&mut replicas))).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&words));
    }
}

/// Submitted requests wait for the first step, which starts the clock of a measurement. An engine
/// that started earlier would run its first request alone.
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
    let mut replicas = EngineReplicas::new(first.iter().map(engine).collect(), 1);
    for id in 0..6 {
        replicas.submit(request(id)).unwrap();
        thread::yield_now();
    }
    assert_eq!(drain(&mut replicas).len(), 6);
    let most = first.iter().filter_map(|first| first.get()).max();
    assert_eq!(most, Some(&3), "half of what was there");
}

#[test]
fn a_whole_is_shared_out_evenly() {
    assert_eq!(split_evenly(16, 2), [8, 8]);
    assert_eq!(split_evenly(7, 3), [3, 2, 2]);
    assert_eq!(split_evenly(4, 1), [4]);
}
