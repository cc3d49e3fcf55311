//! The loop: admit, propose, forward, verify, commit.

mod commit;
mod draft;
mod forward;
mod sequence;

use std::collections::VecDeque;
use std::time::Instant;

use deepspec_core::rng::Purpose;
use tch::Tensor;

use crate::{
    Completion, Context, EngineError, EngineOptions, Event, Feed, Proposal, Proposer, Request, SamplingBatch,
    StepTimes, Target, Ticket,
};
pub use draft::kept_lengths;
use sequence::Sequence;

/// Prompt tokens that one step takes in, unless a single prompt is longer.
const PREFILL_TOKENS: usize = 8192;

/// A batched generation engine over one target and at most one drafter.
pub struct Engine<T, P> {
    target: T,
    proposer: Option<P>,
    options: EngineOptions,
    slots: Vec<Option<Sequence>>,
    queue: VecDeque<(Ticket, Request)>,
    next_ticket: u64,
    /// States of committed tokens that the drafter has not seen.
    context: Context,
    times: StepTimes,
    /// Divide the confidence logits, position by position; empty leaves them.
    temperatures: Vec<f64>,
}

/// One turn of the loop: the slots that take part, and with what.
struct Step {
    /// Slots whose blocks are verified.
    decoding: Vec<usize>,
    /// Slots whose prompts are run.
    prefilling: Vec<usize>,
    /// Blocks of the decoding slots; None where each is its anchor alone.
    proposal: Option<Proposal>,
    /// γ' of each decoding slot.
    lens: Vec<usize>,
    /// Slots and how many tokens of each are run, the decoding ones first.
    chunks: Vec<(usize, usize)>,
}

impl Step {
    /// Rows of the decoding slots, Σ(1+γ').
    fn verified(&self) -> usize {
        self.lens.iter().map(|len| len + 1).sum()
    }

    /// The last row of each prompt.
    fn prompt_ends(&self) -> impl Iterator<Item = i64> {
        self.chunks[self.decoding.len()..].iter().scan(self.verified(), |end, &(_, len)| {
            *end += len;
            Some(*end as i64 - 1)
        })
    }
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// An engine with all slots empty. Target and drafter must hold at least `options.slots` sequences.
    pub fn new(target: T, proposer: Option<P>, options: EngineOptions) -> Self {
        let slots = (0..options.slots.max(1)).map(|_| None).collect();
        let [taps, tokens, next] = [(); 3].map(|()| Tensor::new());
        let context = Context { taps, tokens, next, chunks: vec![] };
        Self {
            target,
            proposer,
            options,
            slots,
            queue: VecDeque::new(),
            next_ticket: 0,
            context,
            times: StepTimes::default(),
            temperatures: vec![],
        }
    }

    /// Divides the drafter's confidence logits by one temperature per position of a block, as a calibration found them;
    /// positions past the last one keep theirs.
    #[must_use]
    pub fn with_temperatures(mut self, temperatures: Vec<f64>) -> Self {
        self.temperatures = temperatures;
        self
    }

    /// Queues a request.
    ///
    /// # Errors
    /// If the request cannot be run; see [`EngineError`].
    pub fn submit(&mut self, request: Request) -> Result<Ticket, EngineError> {
        let (prompt, max_new_tokens, context) =
            (request.prompt.len(), request.max_new_tokens, self.options.context);
        if prompt == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if max_new_tokens == 0 {
            return Err(EngineError::NoTokens);
        }
        if prompt.saturating_add(max_new_tokens) > context {
            return Err(EngineError::TooLong { prompt, max_new_tokens, context });
        }
        let vocab = self.target.vocab_size();
        if let Some(&token) = request.prompt.iter().find(|&&token| token < 0 || token >= vocab as i64) {
            return Err(EngineError::UnknownToken { token, vocab });
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.queue.push_back((ticket, request));
        Ok(ticket)
    }

    /// Drops a queued or running sequence; nothing more is reported of it.
    pub fn cancel(&mut self, ticket: Ticket) {
        self.queue.retain(|(queued, _)| *queued != ticket);
        for slot in &mut self.slots {
            slot.take_if(|sequence| sequence.ticket == ticket);
        }
    }

    /// Whether nothing is queued or running.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.slots.iter().all(Option::is_none)
    }

    /// Sequences waiting for a slot.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Where the time went so far.
    pub fn times(&self) -> StepTimes {
        self.times
    }

    /// γ of the drafter, 0 without one.
    pub fn block_size(&self) -> usize {
        let block = self.proposer.as_ref().map_or(0, Proposer::block_size);
        self.options.max_draft_tokens.map_or(block, |limit| block.min(limit))
    }

    /// Ids of the target's vocabulary: those of answers are below.
    pub fn vocab_size(&self) -> usize {
        self.target.vocab_size()
    }

    /// Runs all requests to their end and returns the completions in the order of the requests.
    ///
    /// # Errors
    /// If a request cannot be taken, and nothing is generated then; or [`EngineError::NotFinite`].
    pub fn run(
        &mut self,
        requests: Vec<Request>,
        mut on_done: impl FnMut(&Completion),
    ) -> Result<Vec<Completion>, EngineError> {
        let mut tickets = Vec::with_capacity(requests.len());
        for request in requests {
            match self.submit(request) {
                Ok(ticket) => tickets.push(ticket),
                Err(error) => {
                    tickets.into_iter().for_each(|ticket| self.cancel(ticket));
                    return Err(error);
                }
            }
        }
        let mut done = Vec::with_capacity(tickets.len());
        while !self.is_idle() {
            for event in self.step()? {
                if let Event::Done(ticket, completion) = event {
                    on_done(&completion);
                    done.push((ticket, completion));
                }
            }
        }
        done.sort_by_key(|(ticket, _)| *ticket);
        Ok(done.into_iter().map(|(_, completion)| completion).collect())
    }

    /// Advances every running sequence by one cycle.
    ///
    /// # Errors
    /// [`EngineError::NotFinite`]; what was running is in no state to go on.
    pub fn step(&mut self) -> Result<Vec<Event>, EngineError> {
        let _guard = tch::no_grad_guard();
        let started = Instant::now();
        self.admit();
        let (decoding, prefilling) = self.occupied();
        if decoding.is_empty() && prefilling.is_empty() {
            return Ok(vec![]);
        }
        let drafting = Instant::now();
        let drafted = self.draft(&decoding);
        let verifying = Instant::now();

        let step = self.plan(decoding, prefilling, drafted);
        let forwarded = self.target.forward(&Feed { chunks: &step.chunks, tokens: self.feed(&step) });
        let outcome = self.judge(&step, &forwarded.hidden);
        if !outcome.finite {
            return Err(EngineError::NotFinite);
        }
        let committing = Instant::now();

        let events = self.commit(&step, &outcome, &forwarded.taps);
        self.times.draft += verifying - drafting;
        self.times.verify += committing - verifying;
        self.times.host += (drafting - started) + committing.elapsed();
        self.times.steps += 1;
        Ok(events)
    }

    /// Slots whose prompts have been run, and slots whose prompts wait for it.
    fn occupied(&self) -> (Vec<usize>, Vec<usize>) {
        let occupied = |slot: &usize| self.slots[*slot].is_some();
        let decodes = |slot: &usize| self.slots[*slot].as_ref().is_some_and(|s| s.anchor.is_some());
        (0..self.slots.len()).filter(occupied).partition(decodes)
    }

    fn plan(
        &self,
        decoding: Vec<usize>,
        prefilling: Vec<usize>,
        drafted: Option<(Proposal, Vec<usize>)>,
    ) -> Step {
        let (proposal, lens) = drafted.unzip();
        let lens = lens.unwrap_or_else(|| vec![0; decoding.len()]);
        let blocks = decoding.iter().zip(&lens).map(|(&slot, len)| (slot, 1 + len));
        let prompts = self.sequences(&prefilling).map(|sequence| sequence.request.prompt.len());
        let chunks = blocks.chain(prefilling.iter().copied().zip(prompts)).collect();
        Step { decoding, prefilling, proposal, lens, chunks }
    }

    fn admit(&mut self) {
        let mut admitted = 0;
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_none() {
                let next = self.queue.front().map_or(0, |(_, request)| request.prompt.len());
                if admitted > 0 && admitted + next > PREFILL_TOKENS {
                    return;
                }
                let Some((ticket, request)) = self.queue.pop_front() else { return };
                admitted += next;
                self.forget(slot);
                self.target.truncate(slot, 0);
                if let Some(proposer) = &mut self.proposer {
                    proposer.reset(slot);
                }
                self.slots[slot] = Some(Sequence::new(ticket, request));
            }
        }
    }

    /// Drops states that a cancelled sequence left for the drafter.
    fn forget(&mut self, slot: usize) {
        let Some(at) = self.context.chunks.iter().position(|&(s, _)| s == slot) else { return };
        let first: usize = self.context.chunks[..at].iter().map(|&(_, rows)| rows).sum();
        let (_, rows) = self.context.chunks.remove(at);
        let kept = (0..self.context.taps.size()[0])
            .filter(|row| !(first as i64..(first + rows) as i64).contains(row));
        let kept = index(kept, &self.context.taps);
        for rows in [&mut self.context.taps, &mut self.context.tokens, &mut self.context.next] {
            *rows = rows.index_select(0, &kept);
        }
    }

    fn sequences<'a>(&'a self, slots: &'a [usize]) -> impl Iterator<Item = &'a Sequence> {
        slots.iter().filter_map(|&slot| self.slots[slot].as_ref())
    }

    fn anchors(&self, decoding: &[usize]) -> Tensor {
        let anchors: Vec<i64> = self.sequences(decoding).filter_map(|s| s.anchor).collect();
        Tensor::from_slice(&anchors).to_device(self.target.device())
    }

    fn sampling(&self, slots: &[usize]) -> SamplingBatch {
        SamplingBatch::new(self.sequences(slots).map(|s| s.request.sampling).collect(), self.target.device())
    }

    /// Uniform numbers `[slots, lanes]` float64, each keyed by its sequence, step, purpose and lane.
    fn uniforms(&self, slots: &[usize], purpose: Purpose, lanes: usize) -> Tensor {
        let draws: Vec<f64> = self
            .sequences(slots)
            .flat_map(|s| (0..lanes as u64).map(move |lane| s.stream.uniform(s.step(), purpose, lane)))
            .collect();
        Tensor::from_slice(&draws).view([slots.len() as i64, lanes as i64]).to_device(self.target.device())
    }
}

/// Row numbers as a tensor beside `like`.
pub(crate) fn index(rows: impl Iterator<Item = i64>, like: &Tensor) -> Tensor {
    Tensor::from_slice(&rows.collect::<Vec<_>>()).to_device(like.device())
}

/// Copies a float64 vector to the host.
fn to_host(tensor: &Tensor) -> Vec<f64> {
    let mut values = vec![0.0; tensor.numel()];
    tensor.copy_data(&mut values, tensor.numel());
    values
}
