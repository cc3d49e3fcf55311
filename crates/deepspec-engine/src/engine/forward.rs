//! The target's forward and the verification of the blocks.

use deepspec_ops::{Verification, argmax, cat_row_runs, verify, verify_block, verify_greedy};
use tch::{Kind, Tensor};

use super::{Engine, StepInputs, StepPlan, to_host};
use crate::outcome::{VerifyOutcome, padding_indices};
use crate::{Proposer, Target, VerifyRule};

/// Draft lengths of a step's blocks, and the row indices that follow from them, on the device.
pub(super) struct BlockLengths {
    /// γ' of each block, `[S]` int64.
    lens: Tensor,
    /// Indices of [`padding_indices`], if the blocks differ in length.
    padding: Option<Tensor>,
    /// Sequence of every verified row, if some sequence is not greedy.
    sequence_of_row: Option<Tensor>,
}

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Copies the draft lengths and the derived row indices to the device.
    pub(super) fn block_lengths(&self, step: &StepPlan, inputs: &StepInputs) -> BlockLengths {
        let arange = &self.device_state.arange;
        let lens = arange.int_tensor(step.lens.iter().copied());
        let padding = padding_indices(&step.lens, step.max_draft_len());
        let sequence_of_row = (!inputs.decoding.is_greedy()).then(|| {
            let rows = step.lens.iter().enumerate().map(|(sequence, len)| (sequence, len + 1));
            arange.repeat_each(rows)
        });
        BlockLengths { lens, padding: padding.map(|rows| arange.int_tensor(rows)), sequence_of_row }
    }

    /// The tokens to run: `anchor, drafts…` of each decoding slot, then the prompts.
    pub(super) fn input_tokens(&self, step: &StepPlan, inputs: &StepInputs) -> Tensor {
        let prompts = &inputs.prompts;
        if step.decoding.is_empty() {
            return prompts.shallow_clone();
        }
        let blocks = match step.trees() {
            Some(trees) => self.tree_tokens(trees, inputs),
            None => self.block_tokens(step, inputs),
        };
        if step.prefilling.is_empty() { blocks } else { Tensor::cat(&[&blocks, prompts], 0) }
    }

    /// `anchor, drafts…` of each decoding slot, concatenated: `[Σ(1+γ')]`.
    fn block_tokens(&self, step: &StepPlan, inputs: &StepInputs) -> Tensor {
        let anchors = &inputs.anchors;
        let Some(proposal) = step.proposal() else { return anchors.shallow_clone() };
        let blocks = Tensor::cat(&[anchors.unsqueeze(1), proposal.tokens.shallow_clone()], 1); // [S, 1+Γ]
        let width = blocks.size()[1];
        cat_row_runs(
            &blocks.reshape([-1]),
            (0..).zip(&step.lens).map(|(s, &len)| (s * width, len as i64 + 1)),
        )
    }

    /// Verifies the blocks, draws the prompts' first tokens, and copies all results to the host in
    /// one transfer. Also returns the token drawn after each chunk, `[S + P]` int64 on the device.
    pub(super) fn verify_step(
        &self,
        step: &StepPlan,
        inputs: &StepInputs,
        lengths: &BlockLengths,
        hidden: &Tensor,
    ) -> (VerifyOutcome, Tensor) {
        let (mut parts, mut finite, mut drawn) = (vec![], vec![], vec![]);
        if !step.decoding.is_empty() {
            let logits = self.target.logits(&hidden.narrow(0, 0, step.verified_rows() as i64));
            finite.push(rows_finite(&logits));
            let (verification, more) = self.verify_blocks(step, inputs, lengths, &logits);
            drawn.push(verification.next.shallow_clone());
            parts.extend([verification.accepted, verification.next].into_iter().chain(more));
        }
        if let Some((rows, first)) = self.draw_first_tokens(step, inputs, hidden) {
            finite.push(rows);
            drawn.push(first.shallow_clone());
            parts.push(first);
        }
        let parts: Vec<Tensor> = finite.iter().chain(&parts).map(|part| part.to_kind(Kind::Double)).collect();
        let read = to_host(&Tensor::cat(&parts, 0));
        let ends_at_stop_tokens = self.proposer.as_ref().is_some_and(Proposer::ends_at_stop_tokens);
        let outcome = VerifyOutcome::new(&read, step.prefilling.len(), &step.lens, ends_at_stop_tokens);
        let drawn = if let [only] = drawn.as_slice() { only.shallow_clone() } else { Tensor::cat(&drawn, 0) };
        (outcome, drawn)
    }

    /// Draws the prompts' first tokens. Returns whether their logits are finite, and the tokens, `[P]` each. None without prompts.
    pub(super) fn draw_first_tokens(
        &self,
        step: &StepPlan,
        inputs: &StepInputs,
        hidden: &Tensor,
    ) -> Option<(Tensor, Tensor)> {
        if step.prefilling.is_empty() {
            return None;
        }
        let logits = self.target.logits(&cat_row_runs(hidden, step.prompt_ends().map(|end| (end, 1))));
        let (first, _) = inputs.prefilling.sample(&logits, &inputs.first);
        Some((rows_finite(&logits), first))
    }

    /// Verifies all blocks; `logits [Σ(1+γ'), V]`. Also returns the drafted tokens and, if there
    /// are any, their confidence logits.
    fn verify_blocks(
        &self,
        step: &StepPlan,
        inputs: &StepInputs,
        lengths: &BlockLengths,
        logits: &Tensor,
    ) -> (Verification, Vec<Tensor>) {
        let (sequences, longest) = (step.decoding.len() as i64, step.max_draft_len() as i64);
        let tokens = match step.proposal() {
            Some(proposal) => proposal.tokens.narrow(1, 0, longest),
            None => Tensor::zeros([sequences, 0], (Kind::Int64, self.target.device())),
        };
        // Pads the rows of ragged blocks to `[S, Γ+1, …]`.
        let by_block = |rows: Tensor| {
            let rows = lengths
                .padding
                .as_ref()
                .map_or_else(|| rows.shallow_clone(), |padding| rows.index_select(0, padding));
            let inner = &rows.size()[1..];
            rows.view([&[sequences, longest + 1], inner].concat().as_slice())
        };
        let verification = if inputs.decoding.is_greedy() {
            verify_greedy(&by_block(argmax(logits)), &tokens, &lengths.lens)
        } else {
            let repeats: Vec<usize> = step.lens.iter().map(|len| len + 1).collect();
            let probs =
                inputs.decoding.repeat_rows(&repeats, lengths.sequence_of_row.as_ref()).distributions(logits);
            let draft = match step.proposal() {
                Some(proposal) => proposal.draft_probs(longest, self.target.vocab_size()),
                None => Tensor::zeros([0], (Kind::Float, self.target.device())),
            };
            let accept = inputs.accept.narrow(1, 0, longest);
            let verify = match self.options.verify_rule {
                VerifyRule::Block => verify_block,
                // Without drafts all rules draw from the target's distribution.
                VerifyRule::Token | VerifyRule::Tree(_) => verify,
            };
            verify(&by_block(probs), &draft, &tokens, &lengths.lens, &accept, &inputs.next)
        };
        let confidence = step.proposal().and_then(|proposal| proposal.confidence.as_ref());
        let confidence = confidence.map(|logits| logits.narrow(1, 0, longest).reshape([-1]));
        (verification, [tokens.reshape([-1])].into_iter().chain(confidence).collect())
    }
}

/// Whether all logits of each row are finite, `[R]` bool of `[R, V]`. The sum of a row is finite if all its logits are, because logits
/// are far below the float32 limit.
pub(super) fn rows_finite(logits: &Tensor) -> Tensor {
    logits.sum_dim_intlist(-1, false, Kind::Float).isfinite()
}
