//! The circuit breaker of a server: when it is not asked any more, and when it is asked again.

use std::time::Duration;

/// Failures in a row after which a server is given up for a while.
const GIVEN_UP_AFTER: u32 = 5;
/// First and longest pause of a server that is given up; it doubles from one to the next.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// First and longest pause of a server that wants to be left alone but does not say how long.
const LIMITED: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// Longest pause that a server may ask for.
const LONGEST_WISH: Duration = Duration::from_secs(600);
/// Denials after which a server that never answered is given up for good.
const DISABLED_AFTER: u32 = 3;
/// Answers after which a server's earlier troubles are forgotten.
const FORGOTTEN_AFTER: u32 = 20;

/// Whether a server is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CircuitState {
    /// It is asked.
    Closed,
    /// It asked to be left alone; it is asked again after a while.
    Paused,
    /// It was given up; it is looked after until it answers again.
    Open,
    /// It answers again and is tried with one request.
    HalfOpen,
    /// It refuses everything and never answered: it is not asked again.
    Disabled,
}

/// What the caller has to do after a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// Ask it again after this time.
    Resume(Duration),
    /// Look after this time whether it answers.
    Look(Duration),
    /// It is back.
    Back,
}

/// A server's state and what it depends on.
#[derive(Debug)]
pub struct CircuitBreaker {
    state: CircuitState,
    /// Failures since the last answer.
    failures: u32,
    /// Answers since the last trouble.
    answers: u32,
    /// How often it was given up, until that is forgotten.
    given_up: u32,
    /// How often in a row it asked to be left alone.
    limited: u32,
    /// Requests that it refused as it would refuse every other.
    denials: u32,
    /// Whether it ever answered.
    pub answered: bool,
}

impl CircuitBreaker {
    /// A closed circuit: nothing is known of the server.
    pub fn new() -> Self {
        let state = CircuitState::Closed;
        Self { state, failures: 0, answers: 0, given_up: 0, limited: 0, denials: 0, answered: false }
    }

    /// Whether it is asked.
    pub fn state(&self) -> CircuitState {
        self.state
    }

    /// It answered a request.
    pub fn answer(&mut self) -> Change {
        self.answered = true;
        (self.failures, self.limited) = (0, 0);
        self.answers += 1;
        if self.answers >= FORGOTTEN_AFTER {
            self.given_up = 0;
        }
        match self.state {
            CircuitState::HalfOpen | CircuitState::Disabled => {
                self.state = CircuitState::Closed;
                Change::Back
            }
            // The answer to a request from before.
            CircuitState::Closed | CircuitState::Paused | CircuitState::Open => Change::None,
        }
    }

    /// A request failed for a reason that may be the request's own.
    pub fn failure(&mut self) -> Change {
        self.failures += 1;
        match self.state {
            CircuitState::HalfOpen => self.unreachable(),
            CircuitState::Closed if self.failures >= GIVEN_UP_AFTER => self.unreachable(),
            _ => Change::None,
        }
    }

    /// It cannot be reached, or has failed too often.
    pub fn unreachable(&mut self) -> Change {
        if matches!(self.state, CircuitState::Open | CircuitState::Disabled) {
            return Change::None;
        }
        self.state = CircuitState::Open;
        (self.failures, self.answers) = (0, 0);
        self.given_up += 1;
        Change::Look(doubled(PAUSE, self.given_up))
    }

    /// It was looked at in vain.
    pub fn still_out(&mut self) -> Change {
        self.given_up += 1;
        Change::Look(doubled(PAUSE, self.given_up))
    }

    /// It asks to be left alone, for a time if it says so.
    pub fn limit(&mut self, wish: Option<Duration>) -> Change {
        if !matches!(self.state, CircuitState::Closed | CircuitState::HalfOpen) {
            return Change::None;
        }
        self.state = CircuitState::Paused;
        self.limited += 1;
        let own = doubled(LIMITED, self.limited);
        // A wish for no time at all would have us back at once, again and again.
        Change::Resume(wish.map_or(own, |wish| wish.clamp(own, LONGEST_WISH)))
    }

    /// The time that it asked for is over.
    pub fn resume(&mut self) {
        if self.state == CircuitState::Paused {
            self.state = CircuitState::Closed;
        }
    }

    /// It answers again.
    pub fn try_again(&mut self) {
        if self.state == CircuitState::Open {
            self.state = CircuitState::HalfOpen;
        }
    }

    /// It refused a request as it would refuse every other; whether it is now given up for good, which takes a few of
    /// those and no answer ever.
    pub fn deny(&mut self) -> bool {
        self.denials += 1;
        let now = !self.answered && self.denials >= DISABLED_AFTER && self.state != CircuitState::Disabled;
        if now {
            self.state = CircuitState::Disabled;
        }
        now
    }
}

fn doubled((first, longest): (Duration, Duration), times: u32) -> Duration {
    first.saturating_mul(1 << times.saturating_sub(1).min(16)).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_falls_out_is_tried_and_comes_back() {
        let mut circuit = CircuitBreaker::new();
        for _ in 1..GIVEN_UP_AFTER {
            assert_eq!(circuit.failure(), Change::None);
        }
        assert_eq!(circuit.answer(), Change::None);
        for _ in 1..GIVEN_UP_AFTER {
            assert_eq!(circuit.failure(), Change::None);
        }
        assert_eq!(circuit.failure(), Change::Look(PAUSE.0));
        assert_eq!(
            (circuit.failure(), circuit.unreachable()),
            (Change::None, Change::None),
            "it is out already"
        );
        assert_eq!(circuit.still_out(), Change::Look(2 * PAUSE.0));
        circuit.try_again();
        assert_eq!(circuit.state(), CircuitState::HalfOpen);
        assert_eq!(circuit.failure(), Change::Look(4 * PAUSE.0));
        circuit.try_again();
        assert_eq!(circuit.answer(), Change::Back);
        assert_eq!(circuit.state(), CircuitState::Closed);
        assert_eq!(
            circuit.unreachable(),
            Change::Look(8 * PAUSE.0),
            "its troubles are not forgotten at once"
        );
        circuit.try_again();
        for _ in 0..FORGOTTEN_AFTER {
            circuit.answer();
        }
        assert_eq!(circuit.unreachable(), Change::Look(PAUSE.0));
    }

    #[test]
    fn wishes_are_respected_within_reason() {
        let mut circuit = CircuitBreaker::new();
        assert_eq!(circuit.limit(Some(Duration::from_secs(7))), Change::Resume(Duration::from_secs(7)));
        assert_eq!(circuit.limit(None), Change::None, "it is paused already");
        circuit.resume();
        assert_eq!(circuit.limit(Some(Duration::MAX)), Change::Resume(LONGEST_WISH));
        circuit.resume();
        assert_eq!(circuit.limit(None), Change::Resume(4 * LIMITED.0));
        circuit.resume();
        assert_eq!(circuit.limit(Some(Duration::ZERO)), Change::Resume(8 * LIMITED.0), "no time is no pause");
        circuit.resume();
        circuit.answer();
        assert_eq!(circuit.limit(None), Change::Resume(LIMITED.0));
    }

    #[test]
    fn a_server_that_refuses_everything_is_disabled_unless_it_answers_after_all() {
        let mut circuit = CircuitBreaker::new();
        assert_eq!(
            (circuit.deny(), circuit.deny(), circuit.deny(), circuit.deny()),
            (false, false, true, false)
        );
        assert_eq!(circuit.state(), CircuitState::Disabled);
        assert_eq!(circuit.answer(), Change::Back);
        assert_eq!((circuit.state(), circuit.deny()), (CircuitState::Closed, false));
    }

    #[test]
    fn pauses_never_grow_past_their_bound() {
        assert_eq!(doubled(PAUSE, 1000), PAUSE.1);
    }
}
