//! Several engines in parallel threads. A small model's kernels finish sooner than intra-op threads
//! wake, so replicas use the cores better.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{Engine, EngineError, Event, Proposer, Request, RequestId, StepTimes, Target};

/// Generates answers to requests: one [`Engine`], or several as [`EngineReplicas`].
pub trait Generator {
    /// γ of the drafter, 0 without one.
    fn draft_len(&self) -> usize;

    /// Size of the target's vocabulary. Token ids of answers are below it.
    fn vocab_size(&self) -> usize;

    /// Queues a request.
    ///
    /// # Errors
    /// Fails if the request cannot be run. Errors found later are reported by [`Event::Failed`].
    fn submit(&mut self, request: Request) -> Result<RequestId, EngineError>;

    /// Whether nothing is queued or running.
    fn is_idle(&self) -> bool;

    /// Runs a step, or waits for a replica's step, and returns its events. The order among
    /// sequences is arbitrary.
    fn step(&mut self) -> Vec<Event>;

    /// Wall-clock time of the parts of all steps so far.
    fn times(&self) -> StepTimes;

    /// Number of engines.
    fn engines(&self) -> usize {
        1
    }
}

impl<T: Target, P: Proposer> Generator for Engine<T, P> {
    fn draft_len(&self) -> usize {
        self.draft_len()
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size()
    }

    fn submit(&mut self, request: Request) -> Result<RequestId, EngineError> {
        self.submit(request)
    }

    fn is_idle(&self) -> bool {
        self.is_idle()
    }

    fn step(&mut self) -> Vec<Event> {
        self.step()
    }

    fn times(&self) -> StepTimes {
        self.times()
    }
}

/// Several engines, each on its own thread with a share of the cores. All engines run on one device
/// and share a queue. Submitted requests wait for the next step. An answer is independent of its
/// engine if the model's rows do not depend on the batch.
pub struct EngineReplicas {
    draft_len: usize,
    vocab_size: usize,
    /// Requests submitted since the last step.
    submitted: Vec<(RequestId, Request)>,
    queue: Arc<Queue>,
    reports: Receiver<StepReport>,
    threads: Vec<JoinHandle<()>>,
    /// Times of each worker.
    times: Vec<StepTimes>,
    next_request_id: u64,
    /// Number of queued or running requests.
    open: usize,
}

/// Requests that no engine has taken yet.
#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    requests: VecDeque<(RequestId, Request)>,
    /// Whether the engines must stop, even with requests running.
    closed: bool,
}

/// The result of one step of a worker.
struct StepReport {
    worker: usize,
    /// Events and times, or the engine's panic, which ends the worker.
    outcome: thread::Result<(Vec<Event>, StepTimes)>,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // No code that holds the lock can leave the queue in an invalid state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes all engines stop.
    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Takes at most `room` requests: this engine's share of the queue, rounded up. An idle engine
    /// waits for requests. None if the engine must stop.
    fn take_share(&self, room: usize, workers: usize, is_idle: bool) -> Option<Vec<(RequestId, Request)>> {
        let waits = |queued: &mut QueueState| is_idle && !queued.closed && queued.requests.is_empty();
        let mut queued = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        if queued.closed {
            return None;
        }
        let share = queued.requests.len().div_ceil(workers).min(room);
        Some(queued.requests.drain(..share).collect())
    }
}

/// Splits `whole` into `workers` parts that differ by at most 1.
pub fn split_evenly(whole: usize, workers: usize) -> Vec<usize> {
    (0..workers).map(|worker| whole / workers + usize::from(worker < whole % workers)).collect()
}

impl EngineReplicas {
    /// Starts one thread per engine. The engines share `threads` libtorch threads, and each engine
    /// has at least one.
    pub fn new<T, P>(engines: Vec<Engine<T, P>>, threads: usize) -> Self
    where
        T: Target + Send + 'static,
        P: Proposer + Send + 'static,
    {
        let first = engines.first();
        let (draft_len, vocab_size) =
            first.map_or((0, 0), |engine| (engine.draft_len(), engine.vocab_size()));
        let (queue, (send, reports), workers) = (Arc::new(Queue::default()), channel(), engines.len());
        let threads = split_evenly(threads, workers);
        let start = |(worker, engine): (usize, Engine<T, P>)| {
            let (queue, send, own) = (Arc::clone(&queue), send.clone(), threads[worker]);
            thread::spawn(move || {
                tch::set_num_threads(i32::try_from(own.max(1)).unwrap_or(1));
                Worker { worker, workers, engine, request_ids: HashMap::new() }.run(&queue, &send);
            })
        };
        let threads = engines.into_iter().enumerate().map(start).collect();
        let times = vec![StepTimes::default(); workers];
        let submitted = vec![];
        Self { draft_len, vocab_size, submitted, queue, reports, threads, times, next_request_id: 0, open: 0 }
    }
}

impl Generator for EngineReplicas {
    fn draft_len(&self) -> usize {
        self.draft_len
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn submit(&mut self, request: Request) -> Result<RequestId, EngineError> {
        let request_id = RequestId(self.next_request_id);
        self.next_request_id += 1;
        self.open += 1;
        self.submitted.push((request_id, request));
        Ok(request_id)
    }

    fn is_idle(&self) -> bool {
        self.open == 0
    }

    /// Submits queued requests, then waits for one replica's step.
    ///
    /// # Panics
    /// Panics if an engine panicked. The other engines stop, and further calls panic once their
    /// remaining reports are returned.
    fn step(&mut self) -> Vec<Event> {
        if self.is_idle() {
            return vec![];
        }
        if !self.submitted.is_empty() {
            self.queue.lock().requests.extend(self.submitted.drain(..));
            self.queue.changed.notify_all();
        }
        // The channel closes only after a panic has stopped the engines. Later calls then panic
        // instead of waiting forever.
        let Ok(StepReport { worker, outcome }) = self.reports.recv() else {
            panic!("the engines have ended")
        };
        let (events, times) = outcome.unwrap_or_else(|panic| {
            self.queue.close();
            resume_unwind(panic)
        });
        self.times[worker] = times;
        self.open -= events.iter().filter(|event| !matches!(event, Event::Tokens(..))).count();
        events
    }

    /// Mean times over the engines, without idle time; `steps` is the sum.
    fn times(&self) -> StepTimes {
        let workers = self.times.len().max(1) as u32;
        let mean = |part: fn(&StepTimes) -> Duration| self.times.iter().map(part).sum::<Duration>() / workers;
        StepTimes {
            draft: mean(|times| times.draft),
            verify: mean(|times| times.verify),
            host: mean(|times| times.host),
            steps: self.times.iter().map(|times| times.steps).sum(),
        }
    }

    fn engines(&self) -> usize {
        self.threads.len()
    }
}

impl Drop for EngineReplicas {
    fn drop(&mut self) {
        self.queue.close();
        for thread in self.threads.drain(..) {
            // The engine's panic was reported already.
            let _ = thread.join();
        }
    }
}

/// One of several engines, with the state of its thread.
struct Worker<T, P> {
    worker: usize,
    workers: usize,
    engine: Engine<T, P>,
    /// Request id of [`EngineReplicas`] for each request id of this engine.
    request_ids: HashMap<RequestId, RequestId>,
}

impl<T: Target, P: Proposer> Worker<T, P> {
    /// Runs steps until the queue is closed, the receiver is gone or the engine panics.
    fn run(mut self, queue: &Queue, reports: &Sender<StepReport>) {
        let worker = self.worker;
        loop {
            let room = self.engine.slots().saturating_sub(self.request_ids.len());
            let Some(requests) = queue.take_share(room, self.workers, self.request_ids.is_empty()) else {
                return;
            };
            let outcome = catch_unwind(AssertUnwindSafe(|| (self.step(requests), self.engine.times())));
            let panicked = outcome.is_err();
            if reports.send(StepReport { worker, outcome }).is_err() || panicked {
                return;
            }
        }
    }

    /// Submits the requests, runs one step and returns its events with the callers' ids.
    fn step(&mut self, requests: Vec<(RequestId, Request)>) -> Vec<Event> {
        let mut events = vec![];
        for (request_id, request) in requests {
            match self.engine.submit(request) {
                Ok(own) => drop(self.request_ids.insert(own, request_id)),
                Err(error) => events.push(Event::Failed(request_id, error)),
            }
        }
        for event in self.engine.step() {
            events.extend(self.with_caller_id(event));
        }
        events
    }

    /// Replaces the request id of the engine by the id that the caller got for the request.
    fn with_caller_id(&mut self, event: Event) -> Option<Event> {
        Some(match event {
            Event::Tokens(own, tokens) => Event::Tokens(*self.request_ids.get(&own)?, tokens),
            Event::Done(own, completion) => Event::Done(self.request_ids.remove(&own)?, completion),
            Event::Failed(own, error) => Event::Failed(self.request_ids.remove(&own)?, error),
        })
    }
}
