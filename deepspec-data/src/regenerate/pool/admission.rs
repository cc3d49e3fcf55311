//! Concurrency limits of all servers: which request goes to which of them, and which has to wait. One lock around plain data;
//! nothing here waits or does I/O.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::super::answer::Tokens;
use super::circuit::{Change, CircuitBreaker, CircuitState};
use super::failure::Class;
use super::stats::ServerStats;

/// A slot that is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The server's number.
    pub server: usize,
    /// Whether this is the one request that a server is tried with.
    pub trial: bool,
}

/// The result of asking for a slot.
pub enum Acquired {
    Now(Slot),
    /// Resolves when a slot is free; fails when the run ends.
    Later(oneshot::Receiver<Slot>),
}

/// A request that waits for a slot.
struct Waiting {
    sender: oneshot::Sender<Slot>,
    avoid: Option<usize>,
}

/// A server's limit, circuit breaker and statistics.
struct ServerSlots {
    circuit: CircuitBreaker,
    stats: ServerStats,
    taken: usize,
    /// Whether the request that it is tried with is under way. Older ones may be as well.
    tried: bool,
    /// How many may be taken: fewer than allowed where the server asked for less.
    limit: usize,
    /// Answers since the limit was last changed.
    answers: usize,
    problem: String,
}

impl ServerSlots {
    fn has_room(&self) -> bool {
        match self.circuit.state() {
            CircuitState::Closed => self.taken < self.limit,
            CircuitState::HalfOpen => !self.tried,
            CircuitState::Paused | CircuitState::Open | CircuitState::Disabled => false,
        }
    }

    /// Takes a slot; whether it is that of a trial.
    fn take(&mut self) -> bool {
        let trial = self.circuit.state() == CircuitState::HalfOpen;
        self.taken += 1;
        self.tried |= trial;
        trial
    }

    fn release(&mut self, trial: bool) {
        self.taken -= 1;
        self.tried &= !trial;
    }
}

/// The slots of all servers and the requests that wait for one.
pub struct Admission {
    servers: Vec<ServerSlots>,
    allowed: usize,
    waiting: VecDeque<Waiting>,
    none_serves_since: Option<Instant>,
    /// The moment for which a watch has been started.
    watched: Option<Instant>,
    closed: Option<String>,
}

impl Admission {
    /// So many servers with so many slots each.
    pub fn new(servers: usize, allowed: usize) -> Self {
        let slots = || ServerSlots {
            circuit: CircuitBreaker::new(),
            stats: ServerStats::default(),
            taken: 0,
            tried: false,
            limit: allowed,
            answers: 0,
            problem: String::new(),
        };
        Self {
            servers: (0..servers).map(|_| slots()).collect(),
            allowed,
            waiting: VecDeque::new(),
            none_serves_since: None,
            watched: None,
            closed: None,
        }
    }

    /// Takes a slot, at `home` if it has one free, at `avoid` only if no other server serves; or a place in line.
    pub fn take(&mut self, home: Option<usize>, avoid: Option<usize>) -> Result<Acquired, String> {
        if let Some(problem) = &self.closed {
            return Err(problem.clone());
        }
        if let Some(server) = self.free(home, avoid) {
            return Ok(Acquired::Now(Slot { server, trial: self.servers[server].take() }));
        }
        let (sender, turn) = oneshot::channel();
        self.waiting.push_back(Waiting { sender, avoid });
        Ok(Acquired::Later(turn))
    }

    /// Frees a slot; the next waiting request gets it.
    pub fn release(&mut self, taken: Slot) {
        self.servers[taken.server].release(taken.trial);
        self.hand_out();
    }

    /// A request was answered.
    pub fn answer(&mut self, server: usize, tokens: Tokens) -> Change {
        let allowed = self.allowed;
        let slots = &mut self.servers[server];
        slots.stats.answered += 1;
        slots.stats.tokens += tokens;
        slots.answers += 1;
        // As carefully back up as its wishes brought it down: one slot for every round of answers.
        if slots.limit < allowed && slots.answers >= slots.limit {
            (slots.limit, slots.answers) = (slots.limit + 1, 0);
        }
        let change = slots.circuit.answer();
        self.changed();
        change
    }

    /// Counts a failure in the server's stats.
    pub fn count(&mut self, server: usize, class: Class) {
        self.servers[server].stats.fail(class);
    }

    /// A request failed.
    pub fn failure(&mut self, server: usize, problem: &str) -> Change {
        self.trouble(server, problem, CircuitBreaker::failure)
    }

    /// A server cannot be reached.
    pub fn unreachable(&mut self, server: usize, problem: &str) -> Change {
        self.trouble(server, problem, CircuitBreaker::unreachable)
    }

    /// A server was looked at in vain.
    pub fn still_out(&mut self, server: usize, problem: &str) -> Change {
        self.servers[server].problem = problem.into();
        self.servers[server].circuit.still_out()
    }

    /// A server asks to be left alone: it gets fewer requests at once, and none for a while.
    pub fn limit(&mut self, server: usize, wish: Option<Duration>, problem: &str) -> Change {
        let slots = &mut self.servers[server];
        (slots.limit, slots.answers) = (slots.limit.min(slots.taken.saturating_sub(1)).max(1), 0);
        self.trouble(server, problem, |circuit| circuit.limit(wish))
    }

    fn trouble(
        &mut self,
        server: usize,
        problem: &str,
        change: impl FnOnce(&mut CircuitBreaker) -> Change,
    ) -> Change {
        let slots = &mut self.servers[server];
        slots.problem = problem.into();
        let change = change(&mut slots.circuit);
        if matches!(change, Change::Look(_)) {
            slots.stats.given_up += 1;
        }
        self.changed();
        change
    }

    /// A server's pause is over.
    pub fn resume(&mut self, server: usize) {
        self.servers[server].circuit.resume();
        self.changed();
    }

    /// A server answers again.
    pub fn try_again(&mut self, server: usize) {
        self.servers[server].circuit.try_again();
        self.changed();
    }

    /// A server refused a request as it would refuse every other; whether it is now given up for good.
    pub fn deny(&mut self, server: usize, problem: &str) -> bool {
        let slots = &mut self.servers[server];
        slots.problem = problem.into();
        let disabled = slots.circuit.deny();
        self.changed();
        disabled
    }

    /// Whether a request that a server just got will be taken back.
    pub fn is_out(&self, server: usize) -> bool {
        self.servers[server].circuit.state() == CircuitState::Open
    }

    /// The servers that were given up for a while.
    pub fn out(&self) -> Vec<usize> {
        (0..self.servers.len()).filter(|&server| self.is_out(server)).collect()
    }

    /// Whether an answer may still come: requests are under way, or a server asked for time.
    pub fn may_hope(&self) -> bool {
        self.servers.iter().any(|slots| slots.taken > 0 || slots.circuit.state() == CircuitState::Paused)
    }

    /// Whether so many requests were refused and none was ever answered.
    pub fn only_refusals(&self, most: u64) -> bool {
        let refused: u64 = self.stats().map(|stats| stats.count(Class::Refused)).sum();
        refused >= most && self.servers.iter().all(|slots| !slots.circuit.answered)
    }

    /// Whether nobody is left to ask.
    pub fn all_disabled(&self) -> bool {
        self.servers.iter().all(|slots| slots.circuit.state() == CircuitState::Disabled)
    }

    /// Whether a server ever answered.
    pub fn answered(&self, server: usize) -> bool {
        self.servers[server].circuit.answered
    }

    /// What a server's last trouble was.
    pub fn problem(&self, server: usize) -> &str {
        &self.servers[server].problem
    }

    /// The last troubles of all servers.
    pub fn problems(&self, urls: &[&str]) -> String {
        let known = self.servers.iter().zip(urls);
        let known =
            known.map(|(slots, url)| if slots.problem.is_empty() { url } else { slots.problem.as_str() });
        known.collect::<Vec<_>>().join("; ")
    }

    /// How many servers serve.
    pub fn serving(&self) -> usize {
        self.servers.iter().filter(|slots| slots.circuit.state() == CircuitState::Closed).count()
    }

    /// Since when no server serves.
    pub fn none_serves_since(&self) -> Option<Instant> {
        self.none_serves_since
    }

    /// The same, but only once for each such moment: its caller watches.
    pub fn watch(&mut self) -> Option<Instant> {
        let since = self.none_serves_since.filter(|_| self.watched != self.none_serves_since)?;
        self.watched = Some(since);
        Some(since)
    }

    /// Why no request is admitted any more, if so.
    pub fn closed(&self) -> Option<&str> {
        self.closed.as_deref()
    }

    /// Admits no request any more, and fails those that wait.
    pub fn close(&mut self, problem: String) {
        self.closed = Some(problem);
        self.waiting.clear();
    }

    /// Requests at the servers.
    pub fn in_flight(&self) -> usize {
        self.servers.iter().map(|slots| slots.taken).sum()
    }

    /// The statistics of all servers.
    pub fn stats(&self) -> impl Iterator<Item = &ServerStats> {
        self.servers.iter().map(|slots| &slots.stats)
    }

    /// Hands out slots that a change may have freed.
    fn changed(&mut self) {
        match self.serving() {
            0 => drop(self.none_serves_since.get_or_insert_with(Instant::now)),
            _ => self.none_serves_since = None,
        }
        self.hand_out();
    }

    /// Gives free slots to waiting requests, in their order.
    fn hand_out(&mut self) {
        let mut place = 0;
        while place < self.waiting.len() && self.servers.iter().any(ServerSlots::has_room) {
            match self.free(None, self.waiting[place].avoid) {
                None => place += 1,
                Some(server) => {
                    let Some(next) = self.waiting.remove(place) else { break };
                    let trial = self.servers[server].take();
                    if next.sender.send(Slot { server, trial }).is_err() {
                        self.servers[server].release(trial);
                    }
                }
            }
        }
    }

    /// The server to ask: `home` if it has room, else the one with the largest part of its slots free.
    fn free(&self, home: Option<usize>, avoid: Option<usize>) -> Option<usize> {
        let others = self.servers.iter().enumerate();
        let others = others
            .filter(|(index, slots)| Some(*index) != avoid && slots.circuit.state() == CircuitState::Closed);
        let avoid = avoid.filter(|_| others.count() > 0);
        let open = |index: &usize| Some(*index) != avoid && self.servers[*index].has_room();
        if let Some(home) = home.filter(open) {
            return Some(home);
        }
        let load = |&index: &usize| {
            let slots = &self.servers[index];
            // Few slots are compared exactly: taken / limit as a fraction of 2³².
            ((slots.taken as u64) << 32) / slots.limit.max(1) as u64
        };
        (0..self.servers.len()).filter(open).min_by_key(load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(admission: &mut Admission, avoid: Option<usize>) -> oneshot::Receiver<Slot> {
        let (sender, receiver) = oneshot::channel();
        admission.waiting.push_back(Waiting { sender, avoid });
        receiver
    }

    #[test]
    fn the_emptiest_server_is_asked_and_home_before_it() {
        let mut admission = Admission::new(3, 4);
        admission.servers[0].taken = 1;
        admission.servers[1].taken = 2;
        assert_eq!(admission.free(None, None), Some(2));
        assert_eq!(admission.free(Some(1), None), Some(1));
        assert_eq!(admission.free(Some(2), Some(2)), Some(0));
        admission.servers[1].taken = 4;
        assert_eq!(admission.free(Some(1), None), Some(2));
    }

    #[test]
    fn a_server_is_avoided_only_where_there_is_another() {
        let mut admission = Admission::new(2, 1);
        admission.servers[1].taken = 1;
        assert_eq!(admission.free(None, Some(0)), None, "the other one will have a slot");
        admission.unreachable(1, "x");
        assert_eq!(admission.free(None, Some(0)), Some(0));
    }

    #[test]
    fn freed_slots_go_to_the_first_who_may_have_them() {
        let mut admission = Admission::new(2, 1);
        (admission.servers[0].taken, admission.servers[1].taken) = (1, 1);
        let (mut first, mut second) = (line(&mut admission, Some(0)), line(&mut admission, None));
        let gone = line(&mut admission, None);
        drop(gone);
        admission.servers[0].taken = 0;
        admission.hand_out();
        assert!(first.try_recv().is_err());
        assert_eq!(second.try_recv(), Ok(Slot { server: 0, trial: false }));
        admission.servers[1].taken = 0;
        admission.hand_out();
        assert_eq!(first.try_recv(), Ok(Slot { server: 1, trial: false }));
        assert_eq!(admission.in_flight(), 2);
        admission.servers[0].taken = 0;
        admission.hand_out();
        assert_eq!(admission.in_flight(), 1, "nobody is there to take the slot");
    }

    #[test]
    fn a_server_that_wants_less_gets_less_and_slowly_more() {
        let mut admission = Admission::new(1, 8);
        admission.servers[0].taken = 5;
        assert!(matches!(admission.limit(0, None, "429"), Change::Resume(_)));
        assert_eq!((admission.servers[0].limit, admission.none_serves_since().is_some()), (4, true));
        admission.resume(0);
        assert_eq!(admission.none_serves_since(), None);
        for _ in 0..4 {
            admission.answer(0, Tokens::default());
        }
        assert_eq!(admission.servers[0].limit, 5);
    }

    #[test]
    fn a_half_open_server_has_one_slot() {
        let mut admission = Admission::new(1, 8);
        admission.unreachable(0, "x");
        assert_eq!((admission.free(None, None), admission.serving()), (None, 0));
        let mut waiting = [line(&mut admission, None), line(&mut admission, None)];
        // A request from before is still under way; the trial does not wait for it.
        admission.servers[0].taken = 1;
        admission.try_again(0);
        assert_eq!((admission.in_flight(), admission.may_hope()), (2, true));
        assert_eq!(admission.answer(0, Tokens::default()), Change::Back);
        assert_eq!(
            waiting.each_mut().map(|waiting| waiting.try_recv()),
            [Ok(Slot { server: 0, trial: true }), Ok(Slot { server: 0, trial: false })]
        );
    }
}
