//! The loop: admit, propose, forward, verify, commit.

use std::collections::VecDeque;
use std::time::Instant;

use deepspec_core::rng::{Purpose, Stream};
use tch::{Kind, Tensor};

use crate::outcome::{Outcome, padded};
use crate::{
    Completion, Context, Cycle, EngineError, EngineOptions, Event, Feed, Finish, Proposal, Proposer, Request,
    SamplingBatch, StepTimes, Target, Ticket, verify,
};

/// Prompt tokens that one step takes in, unless a single prompt is longer.
const PREFILL_TOKENS: usize = 8192;

struct Sequence {
    ticket: Ticket,
    request: Request,
    stream: Stream,
    /// Tokens in the target's history.
    held: usize,
    /// Last committed token; None until the prompt has been run.
    anchor: Option<i64>,
    generated: Vec<i64>,
    cycles: Vec<Cycle>,
}

impl Sequence {
    /// Counts forwards of this sequence, the key of its draws.
    fn step(&self) -> u64 {
        if self.anchor.is_some() { 1 + self.cycles.len() as u64 } else { 0 }
    }
}

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

/// Drafted blocks on their way to verification.
struct Drafted {
    proposal: Proposal,
    /// γ' of each decoding slot.
    lens: Vec<usize>,
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
        let is_decoding = |slot: &usize| self.slots[*slot].as_ref().is_some_and(|s| s.anchor.is_some());
        let is_waiting = |slot: &usize| self.slots[*slot].as_ref().is_some_and(|s| s.anchor.is_none());
        let decoding: Vec<usize> = (0..self.slots.len()).filter(is_decoding).collect();
        let prefilling: Vec<usize> = (0..self.slots.len()).filter(is_waiting).collect();
        if decoding.is_empty() && prefilling.is_empty() {
            return Ok(vec![]);
        }
        let drafting = Instant::now();
        let drafted = self.draft(&decoding);
        let verifying = Instant::now();

        let anchors = self.anchors(&decoding);
        let lens: Vec<usize> =
            drafted.as_ref().map_or_else(|| vec![0; decoding.len()], |drafted| drafted.lens.clone());
        let (chunks, tokens) = self.feed(&decoding, &prefilling, &anchors, drafted.as_ref(), &lens);
        let forwarded = self.target.forward(&Feed { chunks: &chunks, tokens });
        let outcome = self.judge(&decoding, &prefilling, drafted.as_ref(), &lens, &chunks, &forwarded.hidden);
        if !outcome.finite {
            return Err(EngineError::NotFinite);
        }
        let committing = Instant::now();

        let events = self.commit(&decoding, &prefilling, &lens, &outcome, &chunks, &forwarded.taps);
        self.times.draft += verifying - drafting;
        self.times.verify += committing - verifying;
        self.times.host += (drafting - started) + committing.elapsed();
        self.times.steps += 1;
        Ok(events)
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
                let stream = Stream::new(request.sampling.seed, &request.id);
                let (generated, cycles) = (vec![], vec![]);
                self.slots[slot] =
                    Some(Sequence { ticket, request, stream, held: 0, anchor: None, generated, cycles });
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

    /// Blocks for all decoding slots, cut by confidence; None without a drafter or anything to draft.
    fn draft(&mut self, decoding: &[usize]) -> Option<Drafted> {
        let block = self.block_size();
        if decoding.is_empty() || block == 0 {
            return None;
        }
        let (anchors, sampling) = (self.anchors(decoding), self.sampling(decoding));
        let full_block = self.proposer.as_ref()?.block_size();
        let uniforms = self.uniforms(decoding, Purpose::Draft, full_block);
        let proposer = self.proposer.as_mut()?;
        let mut proposal = proposer.propose(&self.context, decoding, &anchors, &uniforms, &sampling);
        self.context.chunks.clear();
        if block < full_block {
            proposal.tokens = proposal.tokens.narrow(1, 0, block as i64);
            proposal.probs = proposal.probs.narrow(1, 0, block as i64);
            proposal.confidence = proposal.confidence.map(|c| c.narrow(1, 0, block as i64));
        }
        let ends_at_stop_tokens = proposer.ends_at_stop_tokens();
        let mut lens = match &proposal.confidence {
            Some(logits) if self.options.confidence_threshold > 0.0 => {
                kept_lengths(&self.calibrated(logits), self.options.confidence_threshold)
            }
            _ => vec![block; decoding.len()],
        };
        if ends_at_stop_tokens {
            self.cut_at_stop_tokens(decoding, &proposal.tokens, &mut lens);
        }
        Some(Drafted { proposal, lens })
    }

    /// Confidence logits `[S, γ]` as probabilities.
    fn calibrated(&self, logits: &Tensor) -> Tensor {
        if self.temperatures.is_empty() {
            return logits.sigmoid();
        }
        let of = |k: usize| self.temperatures.get(k).map_or(1.0, |&t| t as f32);
        let temperatures: Vec<f32> = (0..logits.size()[1] as usize).map(of).collect();
        (logits / Tensor::from_slice(&temperatures).to_device(logits.device())).sigmoid()
    }

    /// Shortens blocks `[S, γ]` to end with the first stop token in them.
    fn cut_at_stop_tokens(&self, decoding: &[usize], tokens: &Tensor, lens: &mut [usize]) {
        if self.sequences(decoding).all(|sequence| sequence.request.stop_ids.is_empty()) {
            return;
        }
        let drafted = to_host(&tokens.to_kind(Kind::Double).reshape([-1]));
        let blocks = drafted.chunks(tokens.size()[1] as usize);
        for ((sequence, block), len) in self.sequences(decoding).zip(blocks).zip(lens) {
            let stops = |token: &f64| sequence.request.stop_ids.contains(&(*token as i64));
            *len = block[..*len].iter().position(stops).map_or(*len, |at| at + 1);
        }
    }

    /// The tokens to run: `anchor, drafts…` per decoding slot, then the prompts.
    fn feed(
        &self,
        decoding: &[usize],
        prefilling: &[usize],
        anchors: &Tensor,
        drafted: Option<&Drafted>,
        lens: &[usize],
    ) -> (Vec<(usize, usize)>, Tensor) {
        let mut chunks: Vec<(usize, usize)> =
            decoding.iter().zip(lens).map(|(&slot, &len)| (slot, 1 + len)).collect();
        let mut parts = vec![];
        if let Some(drafted) = drafted {
            let blocks = Tensor::cat(&[anchors.unsqueeze(1), drafted.proposal.tokens.shallow_clone()], 1); // [S, 1+Γ]
            let width = blocks.size()[1];
            let flat = blocks.reshape([-1]);
            if lens.iter().all(|&len| len as i64 + 1 == width) {
                parts.push(flat);
            } else {
                let rows = lens
                    .iter()
                    .enumerate()
                    .flat_map(|(s, &len)| (0..=len as i64).map(move |k| s as i64 * width + k));
                parts.push(flat.index_select(0, &index(rows, &flat)));
            }
        } else if !decoding.is_empty() {
            parts.push(anchors.shallow_clone());
        }
        for (&slot, sequence) in prefilling.iter().zip(self.sequences(prefilling)) {
            chunks.push((slot, sequence.request.prompt.len()));
            parts.push(Tensor::from_slice(&sequence.request.prompt).to_device(self.target.device()));
        }
        (chunks, Tensor::cat(&parts, 0))
    }

    /// Verifies the blocks, draws the prompts' first tokens, and reads everything the host needs in one transfer.
    fn judge(
        &self,
        decoding: &[usize],
        prefilling: &[usize],
        drafted: Option<&Drafted>,
        lens: &[usize],
        chunks: &[(usize, usize)],
        hidden: &Tensor,
    ) -> Outcome {
        let verified: usize = lens.iter().map(|len| len + 1).sum();
        let (mut parts, mut finite) = (vec![], vec![]);
        if !decoding.is_empty() {
            let repeats: Vec<usize> = lens.iter().map(|len| len + 1).collect();
            let logits = self.target.logits(&hidden.narrow(0, 0, verified as i64)); // [Σ(1+γ'), V]
            finite.push(logits.isfinite().all());
            let probs = self.sampling(decoding).repeated(&repeats).distributions(&logits);
            let longest = lens.iter().copied().max().unwrap_or(0);
            let target_probs = padded(&probs, lens, longest);
            let device = self.target.device();
            let (tokens, draft_probs) = match drafted {
                Some(Drafted { proposal, .. }) => (
                    proposal.tokens.narrow(1, 0, longest as i64),
                    proposal.probs.narrow(1, 0, longest as i64),
                ),
                None => (
                    Tensor::zeros([decoding.len() as i64, 0], (Kind::Int64, device)),
                    Tensor::zeros([0], (Kind::Float, device)),
                ),
            };
            let gamma =
                Tensor::from_slice(&lens.iter().map(|&len| len as i64).collect::<Vec<_>>()).to_device(device);
            let accept = self.uniforms(decoding, Purpose::Accept, longest);
            let next = self.uniforms(decoding, Purpose::Target, 1).squeeze_dim(1);
            let verdict = verify(&target_probs, &draft_probs, &tokens, &gamma, &accept, &next);
            parts.extend([verdict.accepted, verdict.next, tokens.reshape([-1])]);
            if let Some(confidence) = drafted.and_then(|d| d.proposal.confidence.as_ref()) {
                parts.push(confidence.narrow(1, 0, longest as i64).reshape([-1]));
            }
        }
        if !prefilling.is_empty() {
            let ends = chunks[decoding.len()..].iter().scan(verified, |end, &(_, len)| {
                *end += len;
                Some(*end as i64 - 1)
            });
            let logits = self.target.logits(&hidden.index_select(0, &index(ends, hidden)));
            finite.push(logits.isfinite().all());
            let sampling = self.sampling(prefilling);
            let probs = sampling.distributions(&logits);
            parts.push(sampling.draw(&probs, &self.uniforms(prefilling, Purpose::Target, 1).squeeze_dim(1)));
        }
        let finite = Tensor::stack(&finite, 0).all().reshape([1]);
        let parts: Vec<Tensor> =
            std::iter::once(&finite).chain(&parts).map(|part| part.to_kind(Kind::Double)).collect();
        Outcome::new(&to_host(&Tensor::cat(&parts, 0)), decoding.len(), prefilling.len(), lens)
    }

    fn commit(
        &mut self,
        decoding: &[usize],
        prefilling: &[usize],
        lens: &[usize],
        outcome: &Outcome,
        chunks: &[(usize, usize)],
        taps: &Tensor,
    ) -> Vec<Event> {
        let mut events = vec![];
        let (mut kept, mut kept_rows, mut row) = (vec![], vec![], 0);
        let (mut kept_tokens, mut kept_next) = (vec![], vec![]);
        for (i, &(slot, fed)) in chunks.iter().enumerate() {
            let first_row = row;
            row += fed;
            let Some(sequence) = self.slots[slot].as_mut() else { continue };
            let (tokens, committed_rows, ended) = if i < decoding.len() {
                let cycle = outcome.cycle(i, lens[i], &sequence.request.stop_ids);
                let rows = 1 + cycle.accepted as usize;
                let ended =
                    cycle.tokens.last().is_some_and(|token| sequence.request.stop_ids.contains(token));
                sequence.cycles.push(Cycle {
                    proposed: cycle.proposed,
                    accepted: cycle.accepted,
                    committed: cycle.tokens.len() as u32,
                    survived: cycle.survived,
                    confidence: cycle.confidence,
                });
                (cycle.tokens, rows, ended)
            } else {
                let first = outcome.first[i - decoding.len()];
                (vec![first], fed, sequence.request.stop_ids.contains(&first))
            };
            let limit = sequence.request.max_new_tokens;
            let room = limit.saturating_sub(sequence.generated.len());
            sequence.generated.extend(&tokens);
            let before = std::mem::replace(&mut sequence.anchor, tokens.last().copied());
            let visible: Vec<i64> = tokens.iter().copied().take(room).collect();
            if !visible.is_empty() {
                events.push(Event::Tokens(sequence.ticket, visible));
            }
            let generated = sequence.generated.len();
            let full = if self.options.counts_overrun && self.proposer.is_some() {
                generated > limit
            } else {
                generated >= limit
            };
            if ended || full {
                if let Some(mut done) = self.slots[slot].take() {
                    let finish = if ended && generated <= limit { Finish::Stop } else { Finish::Length };
                    done.generated.truncate(limit);
                    let completion = Completion {
                        id: done.request.id,
                        tokens: done.generated,
                        finish,
                        cycles: done.cycles,
                    };
                    events.push(Event::Done(done.ticket, completion));
                }
            } else {
                let prompt = if before.is_none() { sequence.request.prompt.as_slice() } else { &[] };
                let committed = || prompt.iter().chain(&before).chain(&tokens);
                kept_tokens.extend(committed().take(committed_rows));
                kept_next.extend(committed().skip(1).take(committed_rows));
                sequence.held += committed_rows;
                self.target.truncate(slot, sequence.held);
                kept.push((slot, committed_rows));
                kept_rows.extend(first_row as i64..(first_row + committed_rows) as i64);
            }
        }
        debug_assert_eq!(decoding.len() + prefilling.len(), chunks.len());
        if self.proposer.is_some() {
            let kept_taps = taps.index_select(0, &index(kept_rows.into_iter(), taps));
            let [tokens, next] = [kept_tokens, kept_next].map(|ids| index(ids.into_iter(), taps));
            self.context = Context { taps: kept_taps, tokens, next, chunks: kept };
        }
        events
    }
}

/// How many tokens of each block stand before the first whose confidence is below the threshold; `confidence [S, γ]`.
pub fn kept_lengths(confidence: &Tensor, threshold: f64) -> Vec<usize> {
    let keeps = confidence.to_kind(Kind::Double).ge(threshold).to_kind(Kind::Int64);
    to_host(&keeps.cumprod(1, Kind::Int64).sum_dim_intlist(1, false, Kind::Double))
        .iter()
        .map(|&n| n as usize)
        .collect()
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
