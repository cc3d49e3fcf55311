//! The engine's loop: admit, propose, forward, verify, commit.

mod commit;
mod draft;
mod forward;
mod guard;
mod memory;
mod sequence;
mod step_inputs;
mod tree;
mod uniforms;

pub use guard::catch_out_of_memory;
pub use memory::sequence_bytes;
use std::collections::VecDeque;
use std::sync::Once;
use std::time::Instant;

use deepspec_cost::planner::Planner;
use deepspec_cost::policy::Policy;
use deepspec_ops::{DraftTree, range};
use tch::{Device, Tensor};

use crate::{
    AcceptanceStats, Completion, Context, EngineError, EngineOptions, Event, ModelInput, Proposal, Proposer,
    Request, RequestId, StepTimes, Target,
};
use sequence::Sequence;
use step_inputs::{DeviceState, StepInputs};

/// Maximum number of prompt tokens per step, unless a single prompt is longer.
const MAX_PREFILL_TOKENS: usize = 8192;

/// A batched generation engine over one target and at most one drafter.
pub struct Engine<T, P> {
    target: T,
    proposer: Option<P>,
    options: EngineOptions,
    slots: Vec<Option<Sequence>>,
    queue: VecDeque<(RequestId, Request)>,
    next_request_id: u64,
    /// Hidden states of committed tokens that the drafter has not read, one entry per step.
    pending: Vec<Context>,
    /// Tensors of earlier steps that stay on the device.
    device_state: DeviceState,
    /// Decides when to draft and how many drafted tokens to verify.
    planner: Planner,
    times: StepTimes,
    /// Counts of all cycles since the start, including those of unfinished sequences.
    counts: AcceptanceStats,
    /// Whether to synchronise after drafting, so that the times of drafting and verification are
    /// separate on a GPU.
    exact_times: bool,
    /// Divisors of the confidence logits, one per position. Empty leaves the logits unchanged.
    temperatures: Vec<f64>,
    /// Byte limit of all KV caches; None without a limit.
    memory: Option<u64>,
}

/// Plan of one iteration of the loop: its slots and the number of tokens that each slot runs.
struct StepPlan {
    /// Slots whose blocks are verified.
    decoding: Vec<usize>,
    /// Slots whose prompts are run.
    prefilling: Vec<usize>,
    /// Drafts of the decoding slots; None if each slot runs only its anchor.
    drafts: Option<Drafts>,
    /// γ' of each decoding slot, or the number of its tree's nodes.
    lens: Vec<usize>,
    /// (slot, number of tokens to run), the decoding slots first.
    chunks: Vec<(usize, usize)>,
}

/// Drafts of a step's decoding slots.
enum Drafts {
    /// A block per slot.
    Blocks(Proposal),
    /// A tree per slot.
    Trees(Vec<DraftTree>),
}

impl StepPlan {
    /// Blocks of the decoding slots.
    fn proposal(&self) -> Option<&Proposal> {
        if let Some(Drafts::Blocks(proposal)) = &self.drafts { Some(proposal) } else { None }
    }

    /// Trees of the decoding slots.
    fn trees(&self) -> Option<&[DraftTree]> {
        if let Some(Drafts::Trees(trees)) = &self.drafts { Some(trees) } else { None }
    }

    /// Rows of the decoding slots, Σ(1+γ').
    fn verified_rows(&self) -> usize {
        self.lens.iter().map(|len| len + 1).sum()
    }

    /// Γ, the largest number of drafted tokens verified in a block.
    fn max_draft_len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Index of the last row of each prompt.
    fn prompt_ends(&self) -> impl Iterator<Item = i64> {
        self.chunks[self.decoding.len()..].iter().scan(self.verified_rows(), |end, &(_, len)| {
            *end += len;
            Some(*end as i64 - 1)
        })
    }
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// An engine with empty slots. Target and drafter must have room for `options.slots` sequences.
    pub fn new(target: T, proposer: Option<P>, options: EngineOptions) -> Self {
        let slots = (0..options.slots.max(1)).map(|_| None).collect();
        let device = target.device();
        Self {
            target,
            proposer,
            options,
            slots,
            queue: VecDeque::new(),
            next_request_id: 0,
            pending: vec![],
            device_state: DeviceState::new(device),
            planner: Planner::default(),
            times: StepTimes::default(),
            counts: AcceptanceStats::default(),
            exact_times: false,
            temperatures: vec![],
            memory: None,
        }
    }

    /// Divides the drafter's confidence logits by one calibrated temperature per position of a
    /// block. Positions past the last temperature keep their logits.
    #[must_use]
    pub fn with_temperatures(mut self, temperatures: Vec<f64>) -> Self {
        self.temperatures = temperatures;
        self
    }

    /// Synchronises after drafting, because a GPU's drafting time is otherwise counted as
    /// verification. This costs speed.
    #[must_use]
    pub fn with_exact_times(mut self) -> Self {
        self.exact_times = true;
        self
    }

    /// Lets the planner decide when to draft and how many tokens of each block to verify. Without a
    /// planner whole blocks are verified. A planner that never drafts drops the drafter.
    #[must_use]
    pub fn with_planner(mut self, planner: Planner) -> Self {
        if planner.policy() == Policy::Plain {
            self.proposer = None;
        }
        self.planner = planner;
        self
    }

    /// Queues a request.
    ///
    /// # Errors
    /// Fails if the request cannot be run; see [`EngineError`].
    pub fn submit(&mut self, request: Request) -> Result<RequestId, EngineError> {
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
        self.check_trees()?;
        self.warn_of_unverified_drafts();
        let vocab = self.target.vocab_size();
        if let Some(&token) = request.prompt.iter().find(|&&token| token < 0 || token >= vocab as i64) {
            return Err(EngineError::UnknownToken { token, vocab });
        }
        let ((tokens, bytes), memory) = (self.memory_needed(&request), self.memory.unwrap_or(u64::MAX));
        if bytes > memory {
            return Err(EngineError::TooLarge { tokens, bytes, memory });
        }
        let request_id = RequestId(self.next_request_id);
        self.next_request_id += 1;
        self.queue.push_back((request_id, request));
        Ok(request_id)
    }

    /// Drops a queued or running sequence; no further events report it.
    pub fn cancel(&mut self, request_id: RequestId) {
        self.queue.retain(|(queued, _)| *queued != request_id);
        let holds = |slot: &Option<Sequence>| slot.as_ref().is_some_and(|s| s.request_id == request_id);
        if let Some(slot) = self.slots.iter().position(holds) {
            self.free_slot(slot);
        }
    }

    /// Whether nothing is queued or running.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.slots.iter().all(Option::is_none)
    }

    /// Number of sequences decoded at once.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Sequences waiting for a slot.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Wall-clock time of the parts of all steps so far.
    pub fn times(&self) -> StepTimes {
        self.times
    }

    /// Counts of all cycles since the start, including those of unfinished sequences. Samples and
    /// output tokens are not counted.
    pub fn counts(&self) -> &AcceptanceStats {
        &self.counts
    }

    /// γ of the drafter, at most `max_draft_tokens` and what the target can roll back; 0 without a drafter.
    pub fn draft_len(&self) -> usize {
        let wanted = self.wanted_draft_len();
        // A block runs behind its anchor, and all of its rows may be rolled back.
        self.target.max_rollback().map_or(wanted, |rows| wanted.min(rows.saturating_sub(1)))
    }

    /// As [`Engine::draft_len`] for a target that can roll back any number of tokens.
    fn wanted_draft_len(&self) -> usize {
        let block = self.proposer.as_ref().map_or(0, Proposer::draft_len);
        self.options.max_draft_tokens.map_or(block, |most| block.min(most))
    }

    /// Warns once if the target cannot roll back as many tokens as the drafter drafts. Several engines may
    /// share a drafter.
    fn warn_of_unverified_drafts(&self) {
        static TOLD: Once = Once::new();
        let (wanted, verified) = (self.wanted_draft_len(), self.draft_len());
        if verified < wanted {
            TOLD.call_once(|| {
                tracing::warn!(
                    "the drafter drafts {wanted} tokens per step, and {verified} of them are verified: the target \
                     rolls back {} tokens at most",
                    verified + 1
                );
            });
        }
    }

    /// Size of the target's vocabulary. Token ids of answers are below it.
    pub fn vocab_size(&self) -> usize {
        self.target.vocab_size()
    }

    /// Runs all requests to completion. Returns the completions in the order of the requests.
    ///
    /// # Errors
    /// Fails if a request is refused, before anything is generated. Fails if a request fails, and
    /// drops the other requests.
    pub fn run(
        &mut self,
        requests: Vec<Request>,
        mut on_done: impl FnMut(&Completion),
    ) -> Result<Vec<Completion>, EngineError> {
        let mut request_ids = Vec::with_capacity(requests.len());
        for request in requests {
            match self.submit(request) {
                Ok(request_id) => request_ids.push(request_id),
                Err(error) => {
                    request_ids.into_iter().for_each(|request_id| self.cancel(request_id));
                    return Err(error);
                }
            }
        }
        let mut done = Vec::with_capacity(request_ids.len());
        while !self.is_idle() {
            for event in self.step() {
                match event {
                    Event::Tokens(..) => {}
                    Event::Done(request_id, completion) => {
                        on_done(&completion);
                        done.push((request_id, completion));
                    }
                    Event::Failed(_, error) => {
                        request_ids.into_iter().for_each(|request_id| self.cancel(request_id));
                        return Err(error);
                    }
                }
            }
        }
        done.sort_by_key(|(request_id, _)| *request_id);
        Ok(done.into_iter().map(|(_, completion)| completion).collect())
    }

    /// Advances every running sequence by one cycle. Sequences that cannot continue are reported as
    /// failed. If memory ran out, the other sequences repeat the step without the failed one.
    pub fn step(&mut self) -> Vec<Event> {
        let _guard = tch::no_grad_guard();
        // Admits once. A request that takes the slot of an ended sequence waits for the next step.
        self.admit_requests();
        let mut events = vec![];
        while !self.is_idle() {
            match guard::catch_out_of_memory(|| self.try_step()) {
                Ok(more) => {
                    events.extend(more);
                    return events;
                }
                Err(message) => match self.fail_largest(&message) {
                    Some(failed) => events.push(failed),
                    None => return events,
                },
            }
        }
        events
    }

    /// Runs one step. Until all its tensors are computed, it changes only the models' KV caches and
    /// the random number tables.
    fn try_step(&mut self) -> Vec<Event> {
        let started = Instant::now();
        let (decoding, prefilling) = self.running_slots();
        if decoding.is_empty() && prefilling.is_empty() {
            return vec![];
        }
        let inputs = self.step_inputs(&decoding, &prefilling);
        let drafting = Instant::now();
        let drafted = {
            let _range = range(c"draft");
            self.draft(&decoding, &inputs)
        };
        if let (true, Device::Cuda(index)) = (self.exact_times, self.target.device()) {
            tch::Cuda::synchronize(index as i64);
        }
        let verifying = Instant::now();

        let load = self.step_load(&decoding);
        let step = self.plan_step(decoding, prefilling, drafted);
        let verify = range(c"verify");
        let tokens = self.input_tokens(&step, &inputs);
        let (forwarded, (outcome, drawn)) = if let Some(trees) = step.trees() {
            let forwarded = self.forward_trees(&step, trees, &tokens);
            let verified = self.verify_trees(&step, trees, &inputs, &forwarded.hidden);
            (forwarded, verified)
        } else {
            let lengths = self.block_lengths(&step, &inputs);
            let input = ModelInput { chunks: &step.chunks, tokens: tokens.shallow_clone() };
            let forwarded = self.target.forward(&input);
            let verified = self.verify_step(&step, &inputs, &lengths, &forwarded.hidden);
            (forwarded, verified)
        };
        drop(verify);
        let committing = Instant::now();
        let _range = range(c"commit");

        let updates = self.slot_updates(&step, &outcome);
        let context = self.drafter_context(&step, &updates, &tokens, &drawn, &forwarded);
        self.keep_accepted_rows(&updates);
        self.pending.extend(context);
        self.device_state.last_tokens = Some((step.chunks.iter().map(|&(slot, _)| slot).collect(), drawn));
        let events = self.commit(updates);
        if step.prefilling.is_empty() {
            let seconds = started.elapsed().as_secs_f64();
            self.planner.observe_step(load, step.verified_rows(), step.drafts.is_some(), seconds);
        }
        self.times.draft += verifying - drafting;
        self.times.verify += committing - verifying;
        self.times.host += (drafting - started) + committing.elapsed();
        self.times.steps += 1;
        events
    }

    /// Occupied slots: (slots that decode, slots whose prompts have not been run).
    fn running_slots(&self) -> (Vec<usize>, Vec<usize>) {
        let occupied = |slot: &usize| self.slots[*slot].is_some();
        let decodes = |slot: &usize| self.slots[*slot].as_ref().is_some_and(|s| s.anchor.is_some());
        (0..self.slots.len()).filter(occupied).partition(decodes)
    }

    /// Plans the step: decoding slots run anchor and drafts, and new slots run their prompts.
    fn plan_step(
        &self,
        decoding: Vec<usize>,
        prefilling: Vec<usize>,
        drafted: Option<(Drafts, Vec<usize>)>,
    ) -> StepPlan {
        let (drafts, lens) = drafted.unzip();
        let lens = lens.unwrap_or_else(|| vec![0; decoding.len()]);
        let blocks = decoding.iter().zip(&lens).map(|(&slot, len)| (slot, 1 + len));
        let prompts = self.sequences(&prefilling).map(|sequence| sequence.request.prompt.len());
        let chunks = blocks.chain(prefilling.iter().copied().zip(prompts)).collect();
        StepPlan { decoding, prefilling, drafts, lens, chunks }
    }

    /// Moves queued requests to free slots while prompt tokens and memory allow it.
    fn admit_requests(&mut self) {
        let mut admitted = 0;
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_none() {
                let Some((_, next)) = self.queue.front() else { return };
                let (prompt, (_, bytes)) = (next.prompt.len(), self.memory_needed(next));
                if (admitted > 0 && admitted + prompt > MAX_PREFILL_TOKENS) || !self.can_start(bytes) {
                    return;
                }
                let Some((request_id, request)) = self.queue.pop_front() else { return };
                admitted += prompt;
                self.free_slot(slot);
                self.slots[slot] = Some(Sequence::new(request_id, request, bytes));
            }
        }
    }

    /// Frees a slot and everything that is cached for it.
    fn free_slot(&mut self, slot: usize) -> Option<Sequence> {
        self.drop_pending(slot);
        self.target.truncate(slot, 0);
        if let Some(proposer) = &mut self.proposer {
            proposer.truncate(slot, 0);
        }
        self.slots[slot].take()
    }

    /// Drops the hidden states of a slot that wait for the drafter. If memory does not suffice to
    /// copy the remaining slots' states, these are dropped too. Fewer drafts are then accepted, but
    /// the answers do not change.
    fn drop_pending(&mut self, slot: usize) {
        for context in &mut self.pending {
            context.drop_slot(slot);
        }
    }

    fn sequences<'a>(&'a self, slots: &'a [usize]) -> impl Iterator<Item = &'a Sequence> {
        slots.iter().filter_map(|&slot| self.slots[slot].as_ref())
    }
}

/// Copies a float64 vector to the host.
pub(crate) fn to_host(tensor: &Tensor) -> Vec<f64> {
    let mut values = vec![0.0; tensor.numel()];
    tensor.copy_data(&mut values, tensor.numel());
    values
}
