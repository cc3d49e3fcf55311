//! Limits the requests to one server: slots, circuit breaker and statistics.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use deepspec_serve::random_u64;
use failsafe::StateMachine;
use failsafe::failure_policy::{ConsecutiveFailures, consecutive_failures};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::super::answer::TokenCounts;
use super::failure::FailureClass;
use super::stats::ServerStats;

/// The circuit opens after this many failures in a row.
const MAX_CONSECUTIVE_FAILURES: u32 = 5;
/// First and longest pause of an open circuit, for [`exponential_backoff`].
const OPEN_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// First and longest pause after a rate limit without `Retry-After`, for [`exponential_backoff`].
const RATE_LIMIT_PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// Upper limit on `Retry-After`.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(600);
/// Answers after which the pauses start from the shortest again.
const ANSWERS_UNTIL_RESET: u32 = 20;
/// A server that never answered is disabled after this many denials.
const MAX_DENIALS: u64 = 3;

/// State of a server's circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CircuitState {
    /// The server gets requests.
    Closed,
    /// The server asked for a pause.
    Paused,
    /// The server failed; it is probed until it responds.
    Open,
    /// The server responds again and gets one trial request.
    HalfOpen,
    /// The server never answered and denied every request. It gets no more.
    Disabled,
}

/// The action that the caller takes after a change of state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateChange {
    /// The caller does nothing.
    None,
    /// Call [`ServerState::resume`] after this time.
    Resume(Duration),
    /// Probe the server whenever [`ServerState::is_due`].
    Look,
    /// Report that the server is back.
    Back,
}

/// Permission for one request at a server, until it is dropped.
pub struct Slot {
    state: Arc<ServerState>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.state.lock().in_flight -= 1;
    }
}

/// A server's circuit breaker: [`MAX_CONSECUTIVE_FAILURES`] failures in a row open it.
type Breaker = StateMachine<ConsecutiveFailures<Pauses>, ()>;

/// Pauses of a circuit breaker. They keep growing after it closes, until [`Pauses::forget`].
#[derive(Clone)]
struct Pauses(Arc<Mutex<ExponentialBackoff>>);

impl Pauses {
    fn lock(&self) -> MutexGuard<'_, ExponentialBackoff> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self) {
        *self.lock() = exponential_backoff(OPEN_PAUSES);
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.lock().next()
    }
}

/// A server's slots and circuit breaker.
pub struct ServerState {
    allowed: usize,
    slots: Arc<Semaphore>,
    /// The single slot of a half-open server.
    trial: Arc<Semaphore>,
    state: Mutex<State>,
}

struct State {
    circuit: CircuitState,
    /// Circuit breaker. It opens the circuit after repeated failures, and decides when to probe an
    /// open circuit.
    breaker: Breaker,
    pauses: Pauses,
    /// Answers since the last failure.
    calm: u32,
    /// Pauses after rate limits without `Retry-After`.
    limited: ExponentialBackoff,
    in_flight: usize,
    /// Current number of slots, below `allowed` after a rate limit.
    limit: usize,
    /// Answers since the limit last changed.
    answers: usize,
    problem: String,
    stats: ServerStats,
}

impl ServerState {
    /// A closed circuit with `allowed` slots.
    pub fn new(allowed: usize) -> Arc<Self> {
        let pauses = Pauses(Arc::new(Mutex::new(exponential_backoff(OPEN_PAUSES))));
        let policy = consecutive_failures(MAX_CONSECUTIVE_FAILURES, pauses.clone());
        let state = State {
            circuit: CircuitState::Closed,
            breaker: StateMachine::new(policy, ()),
            pauses,
            calm: 0,
            limited: exponential_backoff(RATE_LIMIT_PAUSES),
            in_flight: 0,
            limit: allowed,
            answers: 0,
            problem: String::new(),
            stats: ServerStats::default(),
        };
        let (slots, trial) = (Arc::new(Semaphore::new(allowed)), Arc::new(Semaphore::new(1)));
        Arc::new(Self { allowed, slots, trial, state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of the circuit.
    pub fn circuit(&self) -> CircuitState {
        self.lock().circuit
    }

    /// Takes a slot if one is free.
    pub fn try_slot(self: &Arc<Self>) -> Option<Slot> {
        let circuit = self.circuit();
        let permit = Arc::clone(self.semaphore(circuit)?).try_acquire_owned().ok()?;
        self.slot(permit, circuit)
    }

    /// Waits for a slot. It waits for ever if the server gets no requests, so the caller must also
    /// listen for changes.
    pub async fn next_slot(self: &Arc<Self>) -> Slot {
        loop {
            let circuit = self.circuit();
            let Some(semaphore) = self.semaphore(circuit) else { return std::future::pending().await };
            let Ok(permit) = Arc::clone(semaphore).acquire_owned().await else {
                return std::future::pending().await;
            };
            if let Some(slot) = self.slot(permit, circuit) {
                return slot;
            }
        }
    }

    fn semaphore(&self, circuit: CircuitState) -> Option<&Arc<Semaphore>> {
        match circuit {
            CircuitState::Closed => Some(&self.slots),
            CircuitState::HalfOpen => Some(&self.trial),
            CircuitState::Paused | CircuitState::Open | CircuitState::Disabled => None,
        }
    }

    /// The slot of a permit that was acquired in this state; None if the state has changed since.
    fn slot(self: &Arc<Self>, permit: OwnedSemaphorePermit, circuit: CircuitState) -> Option<Slot> {
        let mut state = self.lock();
        (state.circuit == circuit).then(|| {
            state.in_flight += 1;
            Slot { state: Arc::clone(self), _permit: permit }
        })
    }

    /// Fraction of the slots in use, in units of 2⁻³².
    pub fn load(&self) -> u64 {
        let state = self.lock();
        ((state.in_flight as u64) << 32) / state.limit.max(1) as u64
    }

    /// Requests in progress at the server.
    pub fn in_flight(&self) -> usize {
        self.lock().in_flight
    }

    /// Message of the last failure; empty if no request failed.
    pub fn problem(&self) -> String {
        self.lock().problem.clone()
    }

    /// The server's statistics.
    pub fn stats(&self) -> ServerStats {
        self.lock().stats.clone()
    }

    /// Counts a failure in the statistics.
    pub fn count_failure(&self, class: FailureClass) {
        self.lock().stats.fail(class);
    }

    /// Records an answer.
    pub fn record_answer(&self, tokens: TokenCounts) -> StateChange {
        let mut state = self.lock();
        state.stats.answered += 1;
        state.stats.tokens += tokens;
        state.limited = exponential_backoff(RATE_LIMIT_PAUSES);
        state.calm += 1;
        if state.calm == ANSWERS_UNTIL_RESET {
            state.pauses.forget();
        }
        state.answers += 1;
        // After a rate limit, one slot is added back for every `limit` answers.
        if state.limit < self.allowed && state.answers >= state.limit {
            (state.limit, state.answers) = (state.limit + 1, 0);
            self.slots.add_permits(1);
        }
        match state.circuit {
            // The request was sent before the circuit opened.
            CircuitState::Open => StateChange::None,
            CircuitState::Closed | CircuitState::Paused => {
                state.breaker.on_success();
                StateChange::None
            }
            CircuitState::HalfOpen | CircuitState::Disabled => {
                state.breaker.on_success();
                state.circuit = CircuitState::Closed;
                StateChange::Back
            }
        }
    }

    /// Records a failure whose cause may be the request.
    pub fn record_failure(&self, problem: &str) -> StateChange {
        self.record_breaker_failure(problem, false)
    }

    /// Records that the server is unreachable, which opens the circuit at once.
    pub fn record_unreachable(&self, problem: &str) -> StateChange {
        self.record_breaker_failure(problem, true)
    }

    fn record_breaker_failure(&self, problem: &str, at_once: bool) -> StateChange {
        let mut state = self.lock();
        state.problem = problem.into();
        state.calm = 0;
        if matches!(state.circuit, CircuitState::Open | CircuitState::Disabled) {
            return StateChange::None;
        }
        state.breaker.on_error();
        // A trial request has only one attempt.
        while (at_once || state.circuit == CircuitState::HalfOpen) && state.breaker.is_call_permitted() {
            state.breaker.on_error();
        }
        if state.breaker.is_call_permitted() {
            return StateChange::None;
        }
        state.circuit = CircuitState::Open;
        state.stats.given_up += 1;
        StateChange::Look
    }

    /// Whether the pause is over and the server may be probed.
    pub fn is_due(&self) -> bool {
        self.lock().breaker.is_call_permitted()
    }

    /// Records the result of a probe. Returns whether the server now gets a trial request.
    pub fn record_probe(&self, found: Result<(), String>) -> bool {
        let mut state = self.lock();
        match found {
            Ok(()) if state.circuit == CircuitState::Open => state.circuit = CircuitState::HalfOpen,
            Ok(()) => return false,
            Err(problem) => {
                state.breaker.on_error();
                state.problem = problem;
                return false;
            }
        }
        true
    }

    /// Records a rate limit, with `Retry-After` if given: reduces the slots and pauses the server.
    pub fn record_rate_limit(&self, wish: Option<Duration>, problem: &str) -> StateChange {
        let mut state = self.lock();
        state.problem = problem.into();
        let limit = state.limit.min(state.in_flight.saturating_sub(1)).max(1);
        let cut = (state.limit - limit) as u32;
        (state.limit, state.answers) = (limit, 0);
        let change = if matches!(state.circuit, CircuitState::Closed | CircuitState::HalfOpen) {
            state.circuit = CircuitState::Paused;
            let own = state.limited.next().unwrap_or(RATE_LIMIT_PAUSES.1);
            // Jitter of up to a fifth spreads the return of many clients. The pause is at least the
            // exponential backoff, because a server that asks for 0 seconds would get the next
            // request at once.
            let wished = wish.map(|wish| wish.min(MAX_RETRY_AFTER).mul_f64(1.0 + 0.2 * random_fraction()));
            StateChange::Resume(wished.map_or(own, |wished| wished.max(own)))
        } else {
            StateChange::None
        };
        drop(state);
        if cut > 0 {
            let slots = Arc::clone(&self.slots);
            // Slots in use are removed when they are released.
            tokio::spawn(async move {
                if let Ok(cut) = slots.acquire_many_owned(cut).await {
                    cut.forget();
                }
            });
        }
        change
    }

    /// Ends the pause of a rate limit.
    pub fn resume(&self) {
        let mut state = self.lock();
        if state.circuit == CircuitState::Paused {
            state.circuit = CircuitState::Closed;
            state.breaker.reset();
        }
    }

    /// Records a denial, which every request would get. Returns whether it disabled the server,
    /// which takes [`MAX_DENIALS`] denials and no answer.
    pub fn record_denial(&self, problem: &str) -> bool {
        let mut state = self.lock();
        state.problem = problem.into();
        let never = state.stats.answered == 0 && state.stats.count(FailureClass::Denied) >= MAX_DENIALS;
        let now = never && state.circuit != CircuitState::Disabled;
        if now {
            state.circuit = CircuitState::Disabled;
        }
        now
    }
}

/// A random number from 0 to 1.
fn random_fraction() -> f64 {
    random_u64() as f64 / u64::MAX as f64
}

/// Pauses that double from the first to the longest; random jitter adds at most the length of the
/// pause.
pub fn exponential_backoff((first, longest): (Duration, Duration)) -> ExponentialBackoff {
    let pauses = ExponentialBuilder::new().with_min_delay(first).with_max_delay(longest);
    pauses.without_max_times().with_jitter().build()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opens(state: &ServerState) -> bool {
        (1..MAX_CONSECUTIVE_FAILURES).all(|_| state.record_failure("x") == StateChange::None)
            && state.record_failure("x") == StateChange::Look
    }

    #[tokio::test]
    async fn a_server_falls_out_is_tried_with_one_request_and_comes_back() {
        let state = ServerState::new(8);
        assert_eq!(state.record_failure("x"), StateChange::None);
        assert_eq!(state.record_answer(TokenCounts::default()), StateChange::None);
        let early = state.try_slot();
        assert!(opens(&state) && early.is_some(), "an answer in between starts the count anew");
        assert_eq!(
            (state.record_failure("x"), state.record_unreachable("x"), state.is_due()),
            (StateChange::None, StateChange::None, false),
            "it is out already"
        );
        assert_eq!((state.circuit(), state.try_slot().is_none()), (CircuitState::Open, true));
        assert!(!state.record_probe(Err("y".into())));
        assert_eq!((state.circuit(), state.problem().as_str()), (CircuitState::Open, "y"));
        // An earlier request is still in progress; the trial does not wait for it.
        assert!(is_tried(&state));
        let trial = state.try_slot();
        assert_eq!((trial.is_some(), state.try_slot().is_none(), state.in_flight()), (true, true, 2));
        assert_eq!(state.record_answer(TokenCounts::default()), StateChange::Back);
        assert_eq!((state.circuit(), state.try_slot().is_some()), (CircuitState::Closed, true));
        drop((early, trial));
        assert_eq!((state.in_flight(), state.stats().given_up), (0, 1));
    }

    /// Waits until the breaker permits a probe, then reports a successful one.
    fn is_tried(state: &ServerState) -> bool {
        while !state.is_due() {
            std::thread::sleep(Duration::from_millis(20));
        }
        state.record_probe(Ok(()))
    }

    #[tokio::test]
    async fn a_trial_that_fails_is_enough_and_pauses_grow_until_troubles_are_forgotten() {
        let state = ServerState::new(1);
        assert_eq!(state.record_unreachable("x"), StateChange::Look);
        // A late answer changes nothing.
        assert_eq!(
            (state.record_answer(TokenCounts::default()), state.circuit()),
            (StateChange::None, CircuitState::Open)
        );
        assert!(is_tried(&state));
        assert_eq!((state.record_failure("x"), state.circuit()), (StateChange::Look, CircuitState::Open));
        assert_eq!(state.stats().given_up, 2);
        assert!(state.lock().pauses.next() >= Some(4 * OPEN_PAUSES.0), "two pauses are over");
        for _ in 0..ANSWERS_UNTIL_RESET {
            state.record_answer(TokenCounts::default());
        }
        assert!(state.lock().pauses.next() <= Some(2 * OPEN_PAUSES.0));
    }

    #[tokio::test]
    async fn a_trial_that_is_to_wait_ends_trusted() {
        let state = ServerState::new(4);
        assert_eq!(state.record_unreachable("x"), StateChange::Look);
        assert!(is_tried(&state));
        assert!(matches!(state.record_rate_limit(None, "429"), StateChange::Resume(_)));
        state.resume();
        assert_eq!((state.record_failure("x"), state.circuit()), (StateChange::None, CircuitState::Closed));
    }

    #[tokio::test]
    async fn a_permit_of_another_state_is_no_slot() {
        let state = ServerState::new(1);
        let first = state.try_slot();
        let (waits, other) = (Arc::clone(&state), Arc::clone(&state));
        let next = tokio::spawn(async move { waits.next_slot().await });
        tokio::task::yield_now().await;
        assert!(matches!(state.record_rate_limit(None, "429"), StateChange::Resume(_)));
        drop(first);
        tokio::task::yield_now().await;
        assert!(!next.is_finished() && other.in_flight() == 0, "it is paused");
        next.abort();
    }

    #[tokio::test]
    async fn a_server_that_wants_less_gets_less_and_slowly_more() {
        let state = ServerState::new(8);
        let mut taken: Vec<Slot> = (0..5).map_while(|_| state.try_slot()).collect();
        assert!(matches!(state.record_rate_limit(None, "429"), StateChange::Resume(_)));
        assert_eq!((taken.len(), state.circuit()), (5, CircuitState::Paused));
        state.resume();
        // The free slots are gone, and so is the first released one.
        tokio::task::yield_now().await;
        assert!(state.try_slot().is_none());
        taken.truncate(4);
        assert!(state.try_slot().is_none());
        for _ in 0..4 {
            state.record_answer(TokenCounts::default());
        }
        assert!(state.try_slot().is_some(), "a fifth one");
        taken.clear();
        assert_eq!(std::iter::from_fn(|| state.try_slot()).map(|slot| taken.push(slot)).count(), 5);
    }

    #[tokio::test]
    async fn wishes_are_respected_within_reason() {
        let state = ServerState::new(2);
        let paused = |wish: Option<Duration>| match state.record_rate_limit(wish, "429") {
            StateChange::Resume(pause) => {
                state.resume();
                pause
            }
            other => panic!("{other:?}"),
        };
        let near = |pause: Duration, wish: Duration| (wish..=wish.mul_f64(1.2)).contains(&pause);
        assert!(near(paused(Some(Duration::from_secs(7))), Duration::from_secs(7)));
        assert!(near(paused(Some(Duration::MAX)), MAX_RETRY_AFTER));
        assert!(paused(None) >= 4 * RATE_LIMIT_PAUSES.0);
        assert!(paused(Some(Duration::ZERO)) >= 8 * RATE_LIMIT_PAUSES.0, "no time is no pause");
        state.record_answer(TokenCounts::default());
        assert!(paused(None) <= 2 * RATE_LIMIT_PAUSES.0);
        assert!(matches!(state.record_rate_limit(None, "429"), StateChange::Resume(_)));
        assert_eq!(state.record_rate_limit(None, "429"), StateChange::None, "it is paused already");
        for _ in 0..20 {
            assert!(exponential_backoff(RATE_LIMIT_PAUSES).nth(1000) <= Some(2 * RATE_LIMIT_PAUSES.1));
        }
    }

    #[tokio::test]
    async fn a_server_that_refuses_everything_is_disabled_unless_it_answers_after_all() {
        let state = ServerState::new(1);
        let denied = || {
            state.count_failure(FailureClass::Denied);
            state.record_denial("401")
        };
        assert_eq!([denied(), denied(), denied(), denied()], [false, false, true, false]);
        assert_eq!(state.record_answer(TokenCounts::default()), StateChange::Back);
        assert_eq!(state.circuit(), CircuitState::Closed);
    }
}
