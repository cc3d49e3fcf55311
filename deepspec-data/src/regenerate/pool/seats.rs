//! Who may ask which server now. One lock around plain data; nothing here waits or talks.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::super::answer::Tokens;
use super::accounts::Account;
use super::failure::Class;
use super::health::{Change, Health, Standing};

/// A seat that is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// The server's number.
    pub server: usize,
    /// Whether this is the one request that a server is tried with.
    pub trial: bool,
}

/// What somebody gets who wants a seat.
pub enum Turn {
    Now(Taken),
    /// The end of the line; it is broken off when the run ends.
    Later(oneshot::Receiver<Taken>),
}

/// Somebody in line.
struct Waiting {
    sender: oneshot::Sender<Taken>,
    avoid: Option<usize>,
}

/// A server's seats.
struct Seat {
    health: Health,
    account: Account,
    taken: usize,
    /// Whether the request that it is tried with is under way. Older ones may be as well.
    tried: bool,
    /// How many may be taken: fewer than allowed where the server asked for less.
    limit: usize,
    /// Answers since the limit was last changed.
    answers: usize,
    problem: String,
}

impl Seat {
    fn has_room(&self) -> bool {
        match self.health.standing() {
            Standing::Serving => self.taken < self.limit,
            Standing::OnTrial => !self.tried,
            Standing::Paused | Standing::Out | Standing::Dismissed => false,
        }
    }

    /// Takes a seat; whether it is that of a trial.
    fn take(&mut self) -> bool {
        let trial = self.health.standing() == Standing::OnTrial;
        self.taken += 1;
        self.tried |= trial;
        trial
    }

    fn give_back(&mut self, trial: bool) {
        self.taken -= 1;
        self.tried &= !trial;
    }
}

/// The seats of all servers and those who wait for one.
pub struct Seats {
    seats: Vec<Seat>,
    allowed: usize,
    waiting: VecDeque<Waiting>,
    none_serves_since: Option<Instant>,
    /// The moment from which on somebody watches already.
    watched: Option<Instant>,
    closed: Option<String>,
}

impl Seats {
    /// So many servers with so many seats each.
    pub fn new(servers: usize, allowed: usize) -> Self {
        let seat = || Seat {
            health: Health::new(),
            account: Account::default(),
            taken: 0,
            tried: false,
            limit: allowed,
            answers: 0,
            problem: String::new(),
        };
        Self {
            seats: (0..servers).map(|_| seat()).collect(),
            allowed,
            waiting: VecDeque::new(),
            none_serves_since: None,
            watched: None,
            closed: None,
        }
    }

    /// Takes a seat, at `home` if it has one free, at `avoid` only if no other server serves; or a place in line.
    ///
    /// # Errors
    /// Why the run has ended.
    pub fn take(&mut self, home: Option<usize>, avoid: Option<usize>) -> Result<Turn, String> {
        if let Some(problem) = &self.closed {
            return Err(problem.clone());
        }
        if let Some(server) = self.free(home, avoid) {
            return Ok(Turn::Now(Taken { server, trial: self.seats[server].take() }));
        }
        let (sender, turn) = oneshot::channel();
        self.waiting.push_back(Waiting { sender, avoid });
        Ok(Turn::Later(turn))
    }

    /// Gives a seat to the next in line.
    pub fn give_back(&mut self, taken: Taken) {
        self.seats[taken.server].give_back(taken.trial);
        self.hand_out();
    }

    /// A request was answered.
    pub fn answer(&mut self, server: usize, tokens: Tokens) -> Change {
        let allowed = self.allowed;
        let seat = &mut self.seats[server];
        seat.account.answered += 1;
        seat.account.tokens += tokens;
        seat.answers += 1;
        // As carefully back up as its wishes brought it down: one seat for every round of answers.
        if seat.limit < allowed && seat.answers >= seat.limit {
            (seat.limit, seat.answers) = (seat.limit + 1, 0);
        }
        let change = seat.health.answer();
        self.changed();
        change
    }

    /// Counts a failure in the server's account.
    pub fn count(&mut self, server: usize, class: Class) {
        self.seats[server].account.fail(class);
    }

    /// A request failed.
    pub fn failure(&mut self, server: usize, problem: &str) -> Change {
        self.trouble(server, problem, Health::failure)
    }

    /// A server cannot be reached.
    pub fn unreachable(&mut self, server: usize, problem: &str) -> Change {
        self.trouble(server, problem, Health::unreachable)
    }

    /// A server was looked at in vain.
    pub fn still_out(&mut self, server: usize, problem: &str) -> Change {
        self.seats[server].problem = problem.into();
        self.seats[server].health.still_out()
    }

    /// A server asks to be left alone: it gets fewer requests at once, and none for a while.
    pub fn limit(&mut self, server: usize, wish: Option<Duration>, problem: &str) -> Change {
        let seat = &mut self.seats[server];
        (seat.limit, seat.answers) = (seat.limit.min(seat.taken.saturating_sub(1)).max(1), 0);
        self.trouble(server, problem, |health| health.limit(wish))
    }

    fn trouble(
        &mut self,
        server: usize,
        problem: &str,
        change: impl FnOnce(&mut Health) -> Change,
    ) -> Change {
        let seat = &mut self.seats[server];
        seat.problem = problem.into();
        let change = change(&mut seat.health);
        if matches!(change, Change::Look(_)) {
            seat.account.given_up += 1;
        }
        self.changed();
        change
    }

    /// A server's pause is over.
    pub fn resume(&mut self, server: usize) {
        self.seats[server].health.resume();
        self.changed();
    }

    /// A server answers again.
    pub fn try_again(&mut self, server: usize) {
        self.seats[server].health.try_again();
        self.changed();
    }

    /// A server refused a request as it would refuse every other; whether it is now given up for good.
    pub fn deny(&mut self, server: usize, problem: &str) -> bool {
        let seat = &mut self.seats[server];
        seat.problem = problem.into();
        let dismissed = seat.health.deny();
        self.changed();
        dismissed
    }

    /// Whether a request that a server just got will be taken back.
    pub fn is_out(&self, server: usize) -> bool {
        self.seats[server].health.standing() == Standing::Out
    }

    /// The servers that were given up for a while.
    pub fn out(&self) -> Vec<usize> {
        (0..self.seats.len()).filter(|&server| self.is_out(server)).collect()
    }

    /// Whether anything may still come: requests are under way, or a server asked for time.
    pub fn may_hope(&self) -> bool {
        self.seats.iter().any(|seat| seat.taken > 0 || seat.health.standing() == Standing::Paused)
    }

    /// Whether so many requests were refused and none was ever answered.
    pub fn only_refusals(&self, most: u64) -> bool {
        let refused: u64 = self.accounts().map(|account| account.count(Class::Refused)).sum();
        refused >= most && self.seats.iter().all(|seat| !seat.health.answered)
    }

    /// Whether nobody is left to ask.
    pub fn all_dismissed(&self) -> bool {
        self.seats.iter().all(|seat| seat.health.standing() == Standing::Dismissed)
    }

    /// Whether a server ever answered.
    pub fn answered(&self, server: usize) -> bool {
        self.seats[server].health.answered
    }

    /// What a server's last trouble was.
    pub fn problem(&self, server: usize) -> &str {
        &self.seats[server].problem
    }

    /// The last troubles of all servers.
    pub fn problems(&self, urls: &[&str]) -> String {
        let known = self.seats.iter().zip(urls);
        let known =
            known.map(|(seat, url)| if seat.problem.is_empty() { url } else { seat.problem.as_str() });
        known.collect::<Vec<_>>().join("; ")
    }

    /// How many servers serve.
    pub fn serving(&self) -> usize {
        self.seats.iter().filter(|seat| seat.health.standing() == Standing::Serving).count()
    }

    /// Since when no server serves.
    pub fn none_serves_since(&self) -> Option<Instant> {
        self.none_serves_since
    }

    /// The same, but only to the first who asks: the one who watches.
    pub fn watch(&mut self) -> Option<Instant> {
        let since = self.none_serves_since.filter(|_| self.watched != self.none_serves_since)?;
        self.watched = Some(since);
        Some(since)
    }

    /// Why everybody was sent away, if so.
    pub fn closed(&self) -> Option<&str> {
        self.closed.as_deref()
    }

    /// Sends everybody away.
    pub fn close(&mut self, problem: String) {
        self.closed = Some(problem);
        self.waiting.clear();
    }

    /// Requests at the servers.
    pub fn in_flight(&self) -> usize {
        self.seats.iter().map(|seat| seat.taken).sum()
    }

    /// The accounts of all servers.
    pub fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.seats.iter().map(|seat| &seat.account)
    }

    /// Hands out seats that a change may have freed.
    fn changed(&mut self) {
        match self.serving() {
            0 => drop(self.none_serves_since.get_or_insert_with(Instant::now)),
            _ => self.none_serves_since = None,
        }
        self.hand_out();
    }

    /// Gives free seats to those in line, the first first.
    fn hand_out(&mut self) {
        let mut place = 0;
        while place < self.waiting.len() && self.seats.iter().any(Seat::has_room) {
            match self.free(None, self.waiting[place].avoid) {
                None => place += 1,
                Some(server) => {
                    let Some(next) = self.waiting.remove(place) else { break };
                    let trial = self.seats[server].take();
                    if next.sender.send(Taken { server, trial }).is_err() {
                        self.seats[server].give_back(trial);
                    }
                }
            }
        }
    }

    /// The server to ask: `home` if it has room, else the one with the largest part of its seats free.
    fn free(&self, home: Option<usize>, avoid: Option<usize>) -> Option<usize> {
        let others = self.seats.iter().enumerate();
        let others = others
            .filter(|(index, seat)| Some(*index) != avoid && seat.health.standing() == Standing::Serving);
        let avoid = avoid.filter(|_| others.count() > 0);
        let open = |index: &usize| Some(*index) != avoid && self.seats[*index].has_room();
        if let Some(home) = home.filter(open) {
            return Some(home);
        }
        let load = |&index: &usize| {
            let seat = &self.seats[index];
            // Few seats are compared exactly: taken / limit as a fraction of 2³².
            ((seat.taken as u64) << 32) / seat.limit.max(1) as u64
        };
        (0..self.seats.len()).filter(open).min_by_key(load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(seats: &mut Seats, avoid: Option<usize>) -> oneshot::Receiver<Taken> {
        let (sender, receiver) = oneshot::channel();
        seats.waiting.push_back(Waiting { sender, avoid });
        receiver
    }

    #[test]
    fn the_emptiest_server_is_asked_and_home_before_it() {
        let mut seats = Seats::new(3, 4);
        seats.seats[0].taken = 1;
        seats.seats[1].taken = 2;
        assert_eq!(seats.free(None, None), Some(2));
        assert_eq!(seats.free(Some(1), None), Some(1));
        assert_eq!(seats.free(Some(2), Some(2)), Some(0));
        seats.seats[1].taken = 4;
        assert_eq!(seats.free(Some(1), None), Some(2));
    }

    #[test]
    fn a_server_is_avoided_only_where_there_is_another() {
        let mut seats = Seats::new(2, 1);
        seats.seats[1].taken = 1;
        assert_eq!(seats.free(None, Some(0)), None, "the other one will have a seat");
        seats.unreachable(1, "x");
        assert_eq!(seats.free(None, Some(0)), Some(0));
    }

    #[test]
    fn freed_seats_go_to_the_first_who_may_have_them() {
        let mut seats = Seats::new(2, 1);
        (seats.seats[0].taken, seats.seats[1].taken) = (1, 1);
        let (mut first, mut second) = (line(&mut seats, Some(0)), line(&mut seats, None));
        let gone = line(&mut seats, None);
        drop(gone);
        seats.seats[0].taken = 0;
        seats.hand_out();
        assert!(first.try_recv().is_err());
        assert_eq!(second.try_recv(), Ok(Taken { server: 0, trial: false }));
        seats.seats[1].taken = 0;
        seats.hand_out();
        assert_eq!(first.try_recv(), Ok(Taken { server: 1, trial: false }));
        assert_eq!(seats.in_flight(), 2);
        seats.seats[0].taken = 0;
        seats.hand_out();
        assert_eq!(seats.in_flight(), 1, "nobody is there to take the seat");
    }

    #[test]
    fn a_server_that_wants_less_gets_less_and_slowly_more() {
        let mut seats = Seats::new(1, 8);
        seats.seats[0].taken = 5;
        assert!(matches!(seats.limit(0, None, "429"), Change::Resume(_)));
        assert_eq!((seats.seats[0].limit, seats.none_serves_since().is_some()), (4, true));
        seats.resume(0);
        assert_eq!(seats.none_serves_since(), None);
        for _ in 0..4 {
            seats.answer(0, Tokens::default());
        }
        assert_eq!(seats.seats[0].limit, 5);
    }

    #[test]
    fn a_server_on_trial_has_one_seat() {
        let mut seats = Seats::new(1, 8);
        seats.unreachable(0, "x");
        assert_eq!((seats.free(None, None), seats.serving()), (None, 0));
        let mut waiting = [line(&mut seats, None), line(&mut seats, None)];
        // A request from before is still under way; the trial does not wait for it.
        seats.seats[0].taken = 1;
        seats.try_again(0);
        assert_eq!((seats.in_flight(), seats.may_hope()), (2, true));
        assert_eq!(seats.answer(0, Tokens::default()), Change::Back);
        assert_eq!(
            waiting.each_mut().map(|waiting| waiting.try_recv()),
            [Ok(Taken { server: 0, trial: true }), Ok(Taken { server: 0, trial: false })]
        );
    }
}
