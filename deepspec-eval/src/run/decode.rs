//! Decodes all suites in one pass, timed suite by suite.

use std::collections::HashMap;
use std::time::Instant;

use anyhow::Context;
use deepspec_core::cli::Verbosity;
use deepspec_core::progress::Progress;
use deepspec_datasets::suites::{RequestTemplate, TokenizedSuite};
use deepspec_engine::{AcceptanceStats, Completion, Event, Generator, Request, RequestId, StepTimes};
use deepspec_ops::StepTrace;

use super::args::Worker;
use super::entry::{DecodeMode, JournalEntry};
use super::journal::Journal;
use super::journal_check;
use super::server::ServedFigures;
use super::turns::{Following, PendingTurn};
use crate::results::{Timing, Turns};

/// Number of samples of an engine's untimed warm-up, and tokens of each.
const WARM_UP: (usize, usize) = (4, 4);

/// Everything that a pass decodes.
pub struct DecodePlan<'a> {
    /// The suites, decoded one after the other.
    pub suites: &'a [TokenizedSuite],
    /// Template that turns conversations into requests.
    pub asking: &'a RequestTemplate<'a>,
    /// Seeds; each sample is answered once per seed.
    pub seeds: &'a [u64],
    /// Turns that are answered.
    pub turns: Turns,
    /// The worker whose share of samples is decoded; all samples without one.
    pub worker: Option<Worker>,
    /// Most nodes of a verified tree; 0 if blocks are verified.
    pub tree_nodes: usize,
}

impl DecodePlan<'_> {
    /// Number of conversations, and tokens of the longest one after its first answer.
    pub fn count_and_longest(&self) -> (usize, usize) {
        let owned = |suite: &'_ TokenizedSuite| {
            let requests =
                suite.requests.iter().enumerate().filter(|(sample, _)| self.is_own_sample(*sample));
            requests.map(|(_, request)| request.prompt.len() + request.max_new_tokens).collect::<Vec<_>>()
        };
        let tokens: Vec<usize> = self.suites.iter().flat_map(owned).collect();
        (tokens.len() * self.seeds.len(), tokens.into_iter().max().unwrap_or(0))
    }

    fn is_own_sample(&self, sample: usize) -> bool {
        self.worker.is_none_or(|worker| sample % worker.count == worker.index)
    }
}

/// The answer to one turn of a sample.
pub struct Answer {
    /// Index of the suite's request.
    pub sample: usize,
    /// Sampling seed.
    pub seed: u64,
    /// Turn of the conversation, from 0.
    pub turn: usize,
    /// Number of prompt tokens.
    pub prompt_tokens: usize,
    /// Completion that the engine returned.
    pub completion: Completion,
    /// Counts that a server reported; None for an answer of this program.
    pub served: Option<ServedFigures>,
}

/// Results of decoding one suite.
pub struct SuitePass {
    /// Answers by seed, sample and turn.
    pub answers: Vec<Answer>,
    /// Number of turns that could not be asked.
    pub unasked: usize,
    /// Times of the suite.
    pub timing: Timing,
}

impl SuitePass {
    /// Orders the answers by seed, sample and turn.
    pub fn sort_answers(&mut self, plan: &DecodePlan) {
        let order = |seed| plan.seeds.iter().position(|&other| other == seed);
        self.answers.sort_by_key(|answer| (order(answer.seed), answer.sample, answer.turn));
    }
}

/// Decodes the suites one after the other, each from empty slots to empty slots. Answers in
/// `journal` are reused, and new ones are added to it. `trace` records steps of the main pass.
///
/// # Errors
/// Fails if the engine refuses a request, or if the journal cannot be written.
pub fn decode(
    engine: &mut dyn Generator,
    plan: &DecodePlan,
    mode: DecodeMode,
    journal: &mut Journal,
    trace: &mut StepTrace,
    verbosity: Verbosity,
) -> anyhow::Result<Vec<SuitePass>> {
    let drafting = engine.draft_len() > 0;
    warm_up(engine, plan.suites)?;
    let mut none = StepTrace::disabled();
    let trace = if mode == DecodeMode::Main { trace } else { &mut none };
    let mine = |suite: &TokenizedSuite| {
        (0..suite.requests.len()).filter(|&sample| plan.is_own_sample(sample)).count()
    };
    let total = plan.suites.iter().map(|suite| (mine(suite) * plan.seeds.len()) as u64).sum();
    let mut progress = Progress::new(verbosity, if drafting { "drafted" } else { "plain" }, total, 0);
    let mut passes = Vec::with_capacity(plan.suites.len());
    for suite in plan.suites {
        let tally = AcceptanceStats::new(engine.draft_len());
        let clock = AnswerClock { times: engine.times(), instant: Instant::now() };
        let pass = SuitePass { answers: vec![], unasked: 0, timing: Timing::ZERO };
        let (running, engine, journal, progress) =
            (HashMap::new(), &mut *engine, &mut *journal, &mut progress);
        let mut decoding =
            SuiteDecoder { plan, suite, mode, engine, journal, progress, running, tally, clock, pass };
        decoding.run(trace)?;
        passes.push(decoding.pass);
    }
    progress.finish();
    trace.finish();
    Ok(passes)
}

/// Engine times and wall clock when the last answer ended.
struct AnswerClock {
    times: StepTimes,
    instant: Instant,
}

/// State of decoding one suite.
struct SuiteDecoder<'a> {
    plan: &'a DecodePlan<'a>,
    suite: &'a TokenizedSuite,
    mode: DecodeMode,
    engine: &'a mut dyn Generator,
    journal: &'a mut Journal,
    progress: &'a mut Progress,
    running: HashMap<RequestId, (PendingTurn, usize)>,
    tally: AcceptanceStats,
    clock: AnswerClock,
    pass: SuitePass,
}

impl SuiteDecoder<'_> {
    fn run(&mut self, trace: &mut StepTrace) -> anyhow::Result<()> {
        for &seed in self.plan.seeds {
            for sample in (0..self.suite.requests.len()).filter(|&sample| self.plan.is_own_sample(sample)) {
                self.submit_turn(PendingTurn::first(self.suite, sample, seed))?;
            }
        }
        self.clock = AnswerClock { times: self.engine.times(), instant: Instant::now() };
        while !self.engine.is_idle() {
            let begun = Instant::now();
            trace.begin_step();
            self.clock.instant += begun.elapsed();
            for event in self.engine.step() {
                match event {
                    Event::Tokens(..) => {}
                    Event::Done(ticket, completion) => self.complete_turn(ticket, completion)?,
                    Event::Failed(ticket, error) => {
                        let asked =
                            self.running.get(&ticket).map(|(asked, _)| self.suite.ids[asked.sample].as_str());
                        let sample = format!("{}/{}", self.suite.rows.suite.name, asked.unwrap_or("?"));
                        return Err(error).context(sample);
                    }
                }
            }
        }
        self.pass.sort_answers(self.plan);
        Ok(())
    }

    /// Reuses the journal's answers to the turn and the turns after it, then submits the first
    /// unanswered turn.
    fn submit_turn(&mut self, mut asked: PendingTurn) -> anyhow::Result<()> {
        loop {
            let request = match asked.request(self.plan, self.suite)? {
                Ok(request) => request,
                Err(unasked) => {
                    self.pass.unasked += unasked;
                    return Ok(());
                }
            };
            let prompt_tokens = request.prompt.len();
            let question = journal_check::ExpectedAnswer {
                request: &request,
                block_size: self.engine.draft_len(),
                vocab_size: self.engine.vocab_size(),
                tree_nodes: self.plan.tree_nodes,
            };
            let Some(entry) = self.journal.take_answer(&asked.key(self.suite, self.mode), &question) else {
                let ticket = self.engine.submit(request)?;
                self.running.insert(ticket, (asked, prompt_tokens));
                return Ok(());
            };
            self.pass.timing.add(&entry.timing);
            match self.record_answer(asked, prompt_tokens, entry.into_completion(request.id))? {
                Some(next) => asked = next,
                None => return Ok(()),
            }
        }
    }

    /// Records the completion of a turn, and asks the next one.
    fn complete_turn(&mut self, ticket: RequestId, completion: Completion) -> anyhow::Result<()> {
        let Some((asked, prompt_tokens)) = self.running.remove(&ticket) else { return Ok(()) };
        let timing =
            Timing::from_step_times(self.clock.times, self.engine.times(), self.clock.instant.elapsed());
        self.clock = AnswerClock { times: self.engine.times(), instant: Instant::now() };
        self.pass.timing.add(&timing);
        self.journal.append_answer(&JournalEntry {
            key: asked.key(self.suite, self.mode),
            prompt_tokens,
            tokens: completion.tokens.clone(),
            finish: completion.finish,
            cycles: completion.cycles.clone(),
            timing,
            served: None,
        })?;
        match self.record_answer(asked, prompt_tokens, completion)? {
            Some(next) => self.submit_turn(next),
            None => Ok(()),
        }
    }

    /// Counts an answer, and returns the next turn.
    fn record_answer(
        &mut self,
        asked: PendingTurn,
        prompt_tokens: usize,
        completion: Completion,
    ) -> anyhow::Result<Option<PendingTurn>> {
        let PendingTurn { sample, seed, turn, .. } = asked;
        self.tally.add(&completion);
        let (tally, name) = (&self.tally, &self.suite.rows.suite.name);
        self.progress.add(u64::from(turn == 0), || match tally.accepted_length() {
            Some(tau) if !tally.proposed_at.is_empty() => format!("{name}, accepted length {tau:.2}"),
            _ => name.to_string(),
        });
        let tokenizer = self.plan.asking.tokenizer;
        let text = || Ok(tokenizer.decode_answer(&completion.tokens)?);
        let following = asked.following(self.plan, self.suite, completion.finish, text)?;
        self.pass.answers.push(Answer { sample, seed, turn, prompt_tokens, completion, served: None });
        match following {
            Following::Turn(next) => Ok(Some(next)),
            Following::Nothing { unasked } => {
                self.pass.unasked += unasked;
                Ok(None)
            }
        }
    }
}

/// Runs untimed requests, because the first forwards set up libtorch and its threads.
fn warm_up(engine: &mut dyn Generator, suites: &[TokenizedSuite]) -> anyhow::Result<()> {
    let (samples, tokens) = WARM_UP;
    let requests = suites.iter().flat_map(|suite| &suite.requests);
    let count = requests.clone().count().min(samples) * engine.engines();
    for request in requests.cycle().take(count) {
        let max_new_tokens = request.max_new_tokens.min(tokens);
        engine.submit(Request { max_new_tokens, ..request.clone() })?;
    }
    while !engine.is_idle() {
        for event in engine.step() {
            if let Event::Failed(_, error) = event {
                return Err(error.into());
            }
        }
    }
    Ok(())
}
