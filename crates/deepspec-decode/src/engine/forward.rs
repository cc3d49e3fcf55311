//! What the target runs, and what it says of the blocks.

use tch::{Kind, Tensor};

use super::{Engine, Numbers, Step, to_host};
use crate::outcome::{Outcome, padding};
use crate::{Part, Proposal, Proposer, Target, Upload, Uploaded, verify};

/// The numbers of a step that follow from the lengths of its blocks, sent to the device at once.
pub(super) struct Lengths {
    sent: Uploaded,
    /// All prompts, one after the other.
    prompts: Part,
    /// The last row of each prompt.
    ends: Part,
    /// Where blocks are of several lengths: γ' of each, which rows of `[S, 1+Γ]` run, and [`padding`].
    ragged: Option<(Part, Part, Part)>,
    /// The sequence of every verified row, where settings are asked for.
    of_row: Option<Part>,
}

impl<T: Target, P: Proposer> Engine<T, P> {
    pub(super) fn lengths(&self, step: &Step, numbers: &Numbers) -> Lengths {
        let mut upload = Upload::default();
        let prompts = self.sequences(&step.prefilling).flat_map(|sequence| &sequence.request.prompt);
        let prompts = upload.push(prompts.copied());
        let ends = upload.push(step.prompt_ends());
        let ragged = padding(&step.lens, step.longest()).map(|padding| {
            let width = self.draft_len() as i64 + 1;
            let rows = |(s, &len): (usize, &usize)| (0..=len as i64).map(move |k| s as i64 * width + k);
            let lens = upload.push(step.lens.iter().map(|&len| len as i64));
            (lens, upload.push(step.lens.iter().enumerate().flat_map(rows)), upload.push(padding))
        });
        let rows = step.lens.iter().enumerate().flat_map(|(s, len)| std::iter::repeat_n(s as i64, len + 1));
        let of_row = (!numbers.decoding.is_greedy()).then(|| upload.push(rows));
        Lengths { sent: upload.send(self.target.device()), prompts, ends, ragged, of_row }
    }

    /// The tokens to run: `anchor, drafts…` per decoding slot, then the prompts.
    pub(super) fn feed(&self, step: &Step, numbers: &Numbers, lengths: &Lengths) -> Tensor {
        let prompts = lengths.sent.of(lengths.prompts);
        if step.decoding.is_empty() {
            return prompts;
        }
        let blocks = self.blocks(step, numbers, lengths);
        if step.prefilling.is_empty() { blocks } else { Tensor::cat(&[blocks, prompts], 0) }
    }

    /// Anchors and drafts of the decoding slots `[Σ(1+γ')]`.
    fn blocks(&self, step: &Step, numbers: &Numbers, lengths: &Lengths) -> Tensor {
        let anchors = &numbers.anchors;
        let Some(proposal) = &step.proposal else { return anchors.shallow_clone() };
        let blocks = Tensor::cat(&[anchors.unsqueeze(1), proposal.tokens.shallow_clone()], 1); // [S, 1+Γ]
        match &lengths.ragged {
            Some((_, rows, _)) => blocks.reshape([-1]).index_select(0, &lengths.sent.of(*rows)),
            None => blocks.narrow(1, 0, step.longest() as i64 + 1).reshape([-1]),
        }
    }

    /// Verifies the blocks, draws the prompts' first tokens, and reads everything the host needs in one transfer.
    pub(super) fn judge(
        &self,
        step: &Step,
        numbers: &Numbers,
        lengths: &Lengths,
        hidden: &Tensor,
    ) -> Outcome {
        let (mut parts, mut finite) = (vec![], vec![]);
        // A sum is finite where all of its logits are: none comes near what float32 can hold.
        let rows_finite = |logits: &Tensor| logits.sum_dim_intlist(-1, false, Kind::Float).isfinite();
        if !step.decoding.is_empty() {
            let logits = self.target.logits(&hidden.narrow(0, 0, step.verified() as i64));
            finite.push(rows_finite(&logits));
            parts.extend(self.verdicts(step, numbers, lengths, &logits));
        }
        if !step.prefilling.is_empty() {
            let ends = lengths.sent.of(lengths.ends);
            let logits = self.target.logits(&hidden.index_select(0, &ends));
            finite.push(rows_finite(&logits));
            let sampling = &numbers.prefilling;
            parts.push(sampling.draw(&sampling.distributions(&logits), &numbers.first));
        }
        let parts: Vec<Tensor> = finite.iter().chain(&parts).map(|part| part.to_kind(Kind::Double)).collect();
        let read = to_host(&Tensor::cat(&parts, 0));
        let ends_at_stop_tokens = self.proposer.as_ref().is_some_and(Proposer::ends_at_stop_tokens);
        Outcome::new(&read, step.prefilling.len(), &step.lens, ends_at_stop_tokens)
    }

    /// Accepted counts, next tokens, drafted tokens and their confidence logits of all blocks; `logits [Σ(1+γ'), V]`.
    fn verdicts(&self, step: &Step, numbers: &Numbers, lengths: &Lengths, logits: &Tensor) -> Vec<Tensor> {
        let sent = |part: Part| lengths.sent.of(part);
        let repeats: Vec<usize> = step.lens.iter().map(|len| len + 1).collect();
        let of_row = lengths.of_row.map(sent);
        let probs = numbers.decoding.repeated(&repeats, of_row.as_ref()).distributions(logits);
        let (sequences, longest) = (step.decoding.len() as i64, step.longest() as i64);
        let device = self.target.device();
        let (tokens, draft_probs) = match &step.proposal {
            Some(Proposal { tokens, probs, .. }) => {
                (tokens.narrow(1, 0, longest), probs.narrow(1, 0, longest))
            }
            None => (
                Tensor::zeros([sequences, 0], (Kind::Int64, device)),
                Tensor::zeros([0], (Kind::Float, device)),
            ),
        };
        let (gamma, probs) = match lengths.ragged {
            Some((lens, _, padding)) => (sent(lens), probs.index_select(0, &sent(padding))),
            None => (Tensor::full([sequences], longest, (Kind::Int64, device)), probs),
        };
        let probs = probs.view([sequences, longest + 1, -1]);
        let accept = numbers.accept.narrow(1, 0, longest);
        let verdict = verify(&probs, &draft_probs, &tokens, &gamma, &accept, &numbers.next);
        let confidence = step.proposal.as_ref().and_then(|proposal| proposal.confidence.as_ref());
        let confidence = confidence.map(|logits| logits.narrow(1, 0, longest).reshape([-1]));
        [verdict.accepted, verdict.next, tokens.reshape([-1])].into_iter().chain(confidence).collect()
    }
}
