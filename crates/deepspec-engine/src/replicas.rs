//! Engines side by side: what a small model does in a step is over sooner than threads that share it wake.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{Engine, EngineError, Event, Proposer, Request, RequestId, StepTimes, Target};

/// Whatever takes requests and says what becomes of them: an [`Engine`], or several as [`EngineReplicas`].
pub trait Generator {
    /// γ of the drafter, 0 without one.
    fn draft_len(&self) -> usize;

    /// Ids of the target's vocabulary: those of answers are below.
    fn vocab_size(&self) -> usize;

    /// Queues a request.
    ///
    /// # Errors
    /// If it cannot be run; what finds that out later says so by [`Event::Failed`].
    fn submit(&mut self, request: Request) -> Result<RequestId, EngineError>;

    /// Whether nothing is queued or running.
    fn is_idle(&self) -> bool;

    /// Takes a step, or waits for one that is taken: what it brought, in no order among sequences.
    fn step(&mut self) -> Vec<Event>;

    /// Where the time went so far.
    fn times(&self) -> StepTimes;

    /// Engines that take requests.
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

/// Engines that take their requests from one queue, each on a thread of its own with its share of the cores. What is submitted waits for the next
/// step, as it does with one engine. As far as a row does not depend on those that it is computed with, an answer does not depend on the engine that
/// gives it either.
pub struct EngineReplicas {
    draft_len: usize,
    vocab_size: usize,
    /// What was submitted since the last step.
    submitted: Vec<(RequestId, Request)>,
    queue: Arc<Queue>,
    reports: Receiver<Report>,
    threads: Vec<JoinHandle<()>>,
    /// By lane.
    times: Vec<StepTimes>,
    next_ticket: u64,
    /// Requests that are queued or running.
    open: usize,
}

/// What no engine has taken yet.
#[derive(Default)]
struct Queue {
    state: Mutex<Queued>,
    changed: Condvar,
}

#[derive(Default)]
struct Queued {
    requests: VecDeque<(RequestId, Request)>,
    /// Whether the engines are to end, whatever they are at.
    closed: bool,
}

/// What became of a lane's step.
struct Report {
    lane: usize,
    /// An engine's panic ends the lane.
    outcome: thread::Result<(Vec<Event>, StepTimes)>,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Queued> {
        // Nothing that holds it can panic halfway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has all engines end.
    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Requests for an engine that has room for `room`, one of `lanes`: its share of what waits, at least one. Where it has nothing else to do it waits
    /// for some. None where it is to end.
    fn take(&self, room: usize, lanes: usize, is_idle: bool) -> Option<Vec<(RequestId, Request)>> {
        let waits = |queued: &mut Queued| is_idle && !queued.closed && queued.requests.is_empty();
        let mut queued = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        if queued.closed {
            return None;
        }
        let share = queued.requests.len().div_ceil(lanes).min(room);
        Some(queued.requests.drain(..share).collect())
    }
}

/// What each of so many lanes gets of a whole: as much as another, or one more.
pub fn shares(whole: usize, lanes: usize) -> Vec<usize> {
    (0..lanes).map(|lane| whole / lanes + usize::from(lane < whole % lanes)).collect()
}

impl EngineReplicas {
    /// Sets the engines to work, which share so many threads of libtorch's; each has one at least.
    pub fn new<T, P>(engines: Vec<Engine<T, P>>, threads: usize) -> Self
    where
        T: Target + Send + 'static,
        P: Proposer + Send + 'static,
    {
        let first = engines.first();
        let (draft_len, vocab_size) =
            first.map_or((0, 0), |engine| (engine.draft_len(), engine.vocab_size()));
        let (queue, (send, reports), lanes) = (Arc::new(Queue::default()), channel(), engines.len());
        let threads = shares(threads, lanes);
        let start = |(lane, engine): (usize, Engine<T, P>)| {
            let (queue, send, own) = (Arc::clone(&queue), send.clone(), threads[lane]);
            thread::spawn(move || {
                tch::set_num_threads(i32::try_from(own.max(1)).unwrap_or(1));
                Lane { lane, lanes, engine, tickets: HashMap::new() }.run(&queue, &send);
            })
        };
        let threads = engines.into_iter().enumerate().map(start).collect();
        let times = vec![StepTimes::default(); lanes];
        let submitted = vec![];
        Self { draft_len, vocab_size, submitted, queue, reports, threads, times, next_ticket: 0, open: 0 }
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
        let ticket = RequestId(self.next_ticket);
        self.next_ticket += 1;
        self.open += 1;
        self.submitted.push((ticket, request));
        Ok(ticket)
    }

    fn is_idle(&self) -> bool {
        self.open == 0
    }

    /// # Panics
    /// As an engine does. The others end too, and it panics again when all that they have reported was handed out.
    fn step(&mut self) -> Vec<Event> {
        if self.is_idle() {
            return vec![];
        }
        if !self.submitted.is_empty() {
            self.queue.lock().requests.extend(self.submitted.drain(..));
            self.queue.changed.notify_all();
        }
        // Engines end when one has panicked, and not before: whoever goes on after that is told so, not left waiting.
        let Ok(Report { lane, outcome }) = self.reports.recv() else { panic!("the engines have ended") };
        let (events, times) = outcome.unwrap_or_else(|panic| {
            self.queue.close();
            resume_unwind(panic)
        });
        self.times[lane] = times;
        self.open -= events.iter().filter(|event| !matches!(event, Event::Tokens(..))).count();
        events
    }

    /// Means over the engines, without the time in which one has nothing to do; steps are those of all.
    fn times(&self) -> StepTimes {
        let lanes = self.times.len().max(1) as u32;
        let mean = |part: fn(&StepTimes) -> Duration| self.times.iter().map(part).sum::<Duration>() / lanes;
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
            // What an engine panicked with was reported.
            let _ = thread.join();
        }
    }
}

/// One of several engines, on its thread.
struct Lane<T, P> {
    lane: usize,
    lanes: usize,
    engine: Engine<T, P>,
    /// Tickets of all lanes by the engine's own.
    tickets: HashMap<RequestId, RequestId>,
}

impl<T: Target, P: Proposer> Lane<T, P> {
    /// Works until it is to end, or nobody listens.
    fn run(mut self, queue: &Queue, reports: &Sender<Report>) {
        let lane = self.lane;
        loop {
            let room = self.engine.slots().saturating_sub(self.tickets.len());
            let Some(requests) = queue.take(room, self.lanes, self.tickets.is_empty()) else { return };
            let outcome = catch_unwind(AssertUnwindSafe(|| (self.step(requests), self.engine.times())));
            let panicked = outcome.is_err();
            if reports.send(Report { lane, outcome }).is_err() || panicked {
                return;
            }
        }
    }

    fn step(&mut self, requests: Vec<(RequestId, Request)>) -> Vec<Event> {
        let mut events = vec![];
        for (ticket, request) in requests {
            match self.engine.submit(request) {
                Ok(own) => drop(self.tickets.insert(own, ticket)),
                Err(error) => events.push(Event::Failed(ticket, error)),
            }
        }
        for event in self.engine.step() {
            events.extend(self.renamed(event));
        }
        events
    }

    /// The event under the ticket that its request was given first.
    fn renamed(&mut self, event: Event) -> Option<Event> {
        Some(match event {
            Event::Tokens(own, tokens) => Event::Tokens(*self.tickets.get(&own)?, tokens),
            Event::Done(own, completion) => Event::Done(self.tickets.remove(&own)?, completion),
            Event::Failed(own, error) => Event::Failed(self.tickets.remove(&own)?, error),
        })
    }
}
