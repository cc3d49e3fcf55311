//! What the target runs, and what it says of the blocks.

use deepspec_core::rng::Purpose;
use tch::{Kind, Tensor};

use super::{Engine, Step, index, to_host};
use crate::outcome::{Outcome, padded};
use crate::{Proposal, Proposer, Target, verify};

impl<T: Target, P: Proposer> Engine<T, P> {
    /// The tokens to run: `anchor, drafts…` per decoding slot, then the prompts.
    pub(super) fn feed(&self, step: &Step) -> Tensor {
        let mut parts = vec![];
        if !step.decoding.is_empty() {
            parts.push(self.blocks(step));
        }
        for sequence in self.sequences(&step.prefilling) {
            parts.push(Tensor::from_slice(&sequence.request.prompt).to_device(self.target.device()));
        }
        Tensor::cat(&parts, 0)
    }

    /// Anchors and drafts of the decoding slots `[Σ(1+γ')]`.
    fn blocks(&self, step: &Step) -> Tensor {
        let anchors = self.anchors(&step.decoding);
        let Some(proposal) = &step.proposal else { return anchors };
        let blocks = Tensor::cat(&[anchors.unsqueeze(1), proposal.tokens.shallow_clone()], 1); // [S, 1+Γ]
        let width = blocks.size()[1];
        let flat = blocks.reshape([-1]);
        if step.lens.iter().all(|&len| len as i64 + 1 == width) {
            return flat;
        }
        let lens = step.lens.iter().enumerate();
        let rows = lens.flat_map(|(s, &len)| (0..=len as i64).map(move |k| s as i64 * width + k));
        flat.index_select(0, &index(rows, &flat))
    }

    /// Verifies the blocks, draws the prompts' first tokens, and reads everything the host needs in one transfer.
    pub(super) fn judge(&self, step: &Step, hidden: &Tensor) -> Outcome {
        let (mut parts, mut finite) = (vec![], vec![]);
        if !step.decoding.is_empty() {
            let logits = self.target.logits(&hidden.narrow(0, 0, step.verified() as i64));
            finite.push(logits.isfinite().all());
            parts.extend(self.verdicts(step, &logits));
        }
        if !step.prefilling.is_empty() {
            let logits = self.target.logits(&hidden.index_select(0, &index(step.prompt_ends(), hidden)));
            finite.push(logits.isfinite().all());
            let sampling = self.sampling(&step.prefilling);
            let uniforms = self.uniforms(&step.prefilling, Purpose::Target, 1).squeeze_dim(1);
            parts.push(sampling.draw(&sampling.distributions(&logits), &uniforms));
        }
        let finite = Tensor::stack(&finite, 0).all().reshape([1]);
        let parts: Vec<Tensor> =
            std::iter::once(&finite).chain(&parts).map(|part| part.to_kind(Kind::Double)).collect();
        let read = to_host(&Tensor::cat(&parts, 0));
        Outcome::new(&read, step.decoding.len(), step.prefilling.len(), &step.lens)
    }

    /// Accepted counts, next tokens, drafted tokens and their confidence logits of all blocks; `logits [Σ(1+γ'), V]`.
    fn verdicts(&self, step: &Step, logits: &Tensor) -> Vec<Tensor> {
        let (decoding, lens) = (&step.decoding, &step.lens);
        let repeats: Vec<usize> = lens.iter().map(|len| len + 1).collect();
        let probs = self.sampling(decoding).repeated(&repeats).distributions(logits);
        let longest = lens.iter().copied().max().unwrap_or(0);
        let device = self.target.device();
        let (tokens, draft_probs) = match &step.proposal {
            Some(Proposal { tokens, probs, .. }) => {
                (tokens.narrow(1, 0, longest as i64), probs.narrow(1, 0, longest as i64))
            }
            None => (
                Tensor::zeros([decoding.len() as i64, 0], (Kind::Int64, device)),
                Tensor::zeros([0], (Kind::Float, device)),
            ),
        };
        let gamma = index(lens.iter().map(|&len| len as i64), logits);
        let accept = self.uniforms(decoding, Purpose::Accept, longest);
        let next = self.uniforms(decoding, Purpose::Target, 1).squeeze_dim(1);
        let verdict = verify(&padded(&probs, lens, longest), &draft_probs, &tokens, &gamma, &accept, &next);
        let confidence = step.proposal.as_ref().and_then(|proposal| proposal.confidence.as_ref());
        let confidence = confidence.map(|logits| logits.narrow(1, 0, longest as i64).reshape([-1]));
        [verdict.accepted, verdict.next, tokens.reshape([-1])].into_iter().chain(confidence).collect()
    }
}
