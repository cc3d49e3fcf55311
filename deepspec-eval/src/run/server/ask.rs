//! Asks a server for the answers to all suites, timed suite by suite.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::bail;
use deepspec_core::cli::Verbosity;
use deepspec_core::progress::Progress;
use deepspec_datasets::suites::TokenizedSuite;
use deepspec_engine::{Completion, Request};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::answer::CheckedAnswer;
use super::counters::Counters;
use super::engine::Server;
use super::figures::{AcceptanceCounts, ReportedCycles, check_entry, cycles_of};
use super::score::Tally;
use crate::results::{FiguresSource, Timing};
use crate::run::decode::{Answer, DecodePlan, SuitePass};
use crate::run::entry::{DecodeMode, JournalEntry};
use crate::run::journal::Journal;
use crate::run::turns::{Following, PendingTurn};

/// Number of samples of the untimed warm-up, and most tokens of each.
const WARM_UP: (usize, usize) = (4, 32);
/// Pause between two readings of counters that are to agree.
const COUNTERS_PAUSE: Duration = Duration::from_millis(100);

/// Share of tokens beyond the answers' own above which the counters have other requests.
const FOREIGN_SHARE: f64 = 0.02;

/// A pass over all suites.
#[derive(Clone, Copy)]
pub struct AskedPass {
    /// Mode in the journal: with or without the drafter.
    pub mode: DecodeMode,
    /// Where acceptance figures come from.
    pub source: FiguresSource,
    /// Requests at once.
    pub slots: usize,
}

/// Answers to the first prompts, before anything is timed. They show what the server reports, and
/// let it compile its kernels.
///
/// # Errors
/// Fails if the server does not answer.
pub async fn warm_up(server: &Server, suites: &[TokenizedSuite]) -> anyhow::Result<Vec<CheckedAnswer>> {
    let (samples, tokens) = WARM_UP;
    let mut answers = vec![];
    for request in suites.iter().flat_map(|suite| &suite.requests).take(samples) {
        let max_new_tokens = request.max_new_tokens.min(tokens);
        answers.push(server.ask(&Request { max_new_tokens, ..request.clone() }).await?);
    }
    Ok(answers)
}

/// Asks for all suites one after the other. Answers in `journal` are reused, and new ones are added
/// to it.
///
/// # Errors
/// Fails if the server stops answering, or if the journal cannot be written.
pub async fn ask_suites(
    server: &Server,
    plan: &DecodePlan<'_>,
    pass: AskedPass,
    journal: &mut Journal,
    verbosity: Verbosity,
) -> anyhow::Result<Vec<SuitePass>> {
    let total = plan.suites.iter().map(|suite| (suite.requests.len() * plan.seeds.len()) as u64).sum();
    let what = if pass.mode == DecodeMode::Main { "served" } else { "plain" };
    let mut progress = Progress::new(verbosity, what, total, 0);
    let mut passes = Vec::with_capacity(plan.suites.len());
    for suite in plan.suites {
        let answered = SuitePass { answers: vec![], unasked: 0, timing: Timing::ZERO };
        let asker = SuiteAsker {
            server,
            plan,
            suite,
            options: pass,
            journal: &mut *journal,
            progress: &mut progress,
            pending: VecDeque::new(),
            running: JoinSet::new(),
            counters: None,
            own_tokens: 0,
            held_back: vec![],
            tally: Tally::default(),
            clock: Instant::now(),
            pass: answered,
        };
        passes.push(asker.run().await?);
    }
    progress.finish();
    Ok(passes)
}

/// A turn, its request, and the server's answer.
type Asked = (PendingTurn, Request, anyhow::Result<CheckedAnswer>);

/// State of asking for one suite.
struct SuiteAsker<'a> {
    server: &'a Server,
    plan: &'a DecodePlan<'a>,
    suite: &'a TokenizedSuite,
    options: AskedPass,
    journal: &'a mut Journal,
    progress: &'a mut Progress,
    /// Turns and their requests that wait for a free slot.
    pending: VecDeque<(PendingTurn, Request)>,
    running: JoinSet<Asked>,
    /// Counters at the last reading.
    counters: Option<Counters>,
    /// Tokens of answers since then.
    own_tokens: u64,
    /// Entries that enter the journal with the counts of the suite.
    held_back: Vec<JournalEntry>,
    tally: Tally,
    /// Time when the last answer ended.
    clock: Instant,
    pass: SuitePass,
}

impl SuiteAsker<'_> {
    async fn run(mut self) -> anyhow::Result<SuitePass> {
        for &seed in self.plan.seeds {
            for sample in 0..self.suite.requests.len() {
                self.enqueue(PendingTurn::first(self.suite, sample, seed))?;
            }
        }
        if self.options.source == FiguresSource::Counters && !self.pending.is_empty() {
            self.counters = Some(self.settled_counters().await?);
        }
        self.clock = Instant::now();
        self.fill_slots();
        while let Some(asked) = self.running.join_next().await {
            let (turn, request, answer) = asked?;
            self.complete(turn, request, answer?).await?;
            self.fill_slots();
        }
        self.end_with_counters().await?;
        self.pass.sort_answers(self.plan);
        Ok(self.pass)
    }

    /// Reuses the journal's answers to the turn and the turns after it, then enqueues the first
    /// unanswered turn.
    fn enqueue(&mut self, mut turn: PendingTurn) -> anyhow::Result<()> {
        loop {
            let request = match turn.request(self.plan, self.suite)? {
                Ok(request) => request,
                Err(unasked) => {
                    self.pass.unasked += unasked;
                    return Ok(());
                }
            };
            let key = turn.key(self.suite, self.options.mode);
            let Some(entry) = self.journal.take_checked(&key, |entry| check_entry(entry, &request)) else {
                // The next turn of a conversation comes before conversations that are not begun.
                match turn.turn {
                    0 => self.pending.push_back((turn, request)),
                    _ => self.pending.push_front((turn, request)),
                }
                return Ok(());
            };
            match self.record(turn, entry)? {
                Some(next) => turn = next,
                None => return Ok(()),
            }
        }
    }

    /// Sends pending requests while there are free slots.
    fn fill_slots(&mut self) {
        while self.running.len() < self.options.slots {
            let Some((turn, request)) = self.pending.pop_front() else { return };
            let server = self.server.clone();
            self.running.spawn(async move {
                let answer = server.ask(&request).await;
                (turn, request, answer)
            });
        }
    }

    /// Writes the answer to the journal, and enqueues the next turn.
    async fn complete(
        &mut self,
        turn: PendingTurn,
        request: Request,
        answer: CheckedAnswer,
    ) -> anyhow::Result<()> {
        let wall_s = self.clock.elapsed().as_secs_f64();
        self.clock = Instant::now();
        let is_lacking = answer.figures.cycles == ReportedCycles::Unreported && self.counters.is_none();
        if is_lacking && self.options.mode == DecodeMode::Main {
            bail!(
                "{}: the answer to {} has no figures of acceptance, while earlier ones had them; start this run again",
                self.server.client.name(),
                request.id
            );
        }
        self.own_tokens += answer.figures.tokens;
        let mut entry = JournalEntry {
            key: turn.key(self.suite, self.options.mode),
            prompt_tokens: request.prompt.len(),
            tokens: answer.tokens,
            finish: answer.finish,
            cycles: vec![],
            timing: Timing { wall_s, ..Timing::ZERO },
            served: Some(answer.figures),
        };
        if self.counters.is_some() && self.options.slots > 1 {
            self.held_back.push(entry.clone());
        } else {
            if self.counters.is_some() {
                let totals = self.counted_since().await?;
                if let Some(served) = &mut entry.served {
                    served.cycles = ReportedCycles::Totals(totals);
                }
                self.clock = Instant::now();
            }
            self.journal.append_answer(&entry)?;
        }
        match self.record(turn, entry)? {
            Some(next) => self.enqueue(next),
            None => Ok(()),
        }
    }

    /// Counts an answer, and returns the next turn.
    fn record(&mut self, turn: PendingTurn, entry: JournalEntry) -> anyhow::Result<Option<PendingTurn>> {
        let (sample, seed, index) = (turn.sample, turn.seed, turn.turn);
        let JournalEntry { prompt_tokens, tokens, finish, timing, served, .. } = entry;
        let cycles = match served.as_ref().map(|served| (&served.cycles, served.committed())) {
            Some((ReportedCycles::Steps(steps), committed)) => cycles_of(steps, committed),
            _ => vec![],
        };
        let completion = Completion { id: String::new(), tokens, finish, cycles };
        let tokenizer = self.plan.asking.tokenizer;
        let told = served.as_ref().and_then(|served| served.text.clone());
        let ids = &completion.tokens;
        let text = || Ok(told.map_or_else(|| tokenizer.decode_answer(ids), Ok)?);
        let following = turn.following(self.plan, self.suite, finish, text)?;
        let answer = Answer { sample, seed, turn: index, prompt_tokens, completion, served };
        self.tally.add(&answer);
        let (tally, name) = (&self.tally, &self.suite.rows.suite.name);
        self.progress.add(u64::from(index == 0), || match tally.stats.accepted_length() {
            Some(tau) => format!("{name}, accepted length {tau:.2}"),
            None => name.to_string(),
        });
        self.pass.timing.add(&timing);
        self.pass.answers.push(answer);
        match following {
            Following::Turn(next) => Ok(Some(next)),
            Following::Nothing { unasked } => {
                self.pass.unasked += unasked;
                Ok(None)
            }
        }
    }

    /// Gives the suite's counts to its last answer, and writes the answers to the journal. An
    /// interrupted suite has no counts, and none of its answers enters the journal.
    async fn end_with_counters(&mut self) -> anyhow::Result<()> {
        if self.held_back.is_empty() {
            return Ok(());
        }
        let suite = ReportedCycles::Suite(self.counted_since().await?);
        if let Some(served) = self.held_back.last_mut().and_then(|last| last.served.as_mut()) {
            served.cycles = suite.clone();
        }
        if let Some(served) = self.pass.answers.last_mut().and_then(|last| last.served.as_mut()) {
            served.cycles = suite;
        }
        std::mem::take(&mut self.held_back).iter().try_for_each(|entry| self.journal.append_answer(entry))
    }

    /// Growth of the counters since the last reading.
    async fn counted_since(&mut self) -> anyhow::Result<AcceptanceCounts> {
        let now = self.settled_counters().await?;
        let before = self.counters.replace(now.clone()).unwrap_or_default();
        let (generated, own) =
            (now.generated - before.generated, std::mem::take(&mut self.own_tokens) as f64);
        // llama.cpp writes six digits.
        if generated > own * (1.0 + FOREIGN_SHARE) + 1e-5 * now.generated {
            tracing::warn!(
                "{}: the engine generated {generated} tokens, the answers to {} have {own}; other requests are in its \
                 counters, so keep the engine to this run",
                self.server.client.url(),
                self.suite.rows.suite.name
            );
        }
        match now.since(&before) {
            Ok(totals) => Ok(totals),
            Err(problem) => bail!("{}: {problem}", self.server.client.name()),
        }
    }

    /// The counters once two readings agree. Engines update them shortly after an answer.
    async fn settled_counters(&self) -> anyhow::Result<Counters> {
        let mut last = None;
        loop {
            let now = Counters::read(self.server).await?;
            match now {
                Some(now) if last.as_ref() == Some(&now) => return Ok(now),
                None => bail!("{}: its counters of /metrics are gone", self.server.client.name()),
                now => last = now,
            }
            sleep(COUNTERS_PAUSE).await;
        }
    }
}
