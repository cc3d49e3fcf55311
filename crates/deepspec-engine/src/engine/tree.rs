//! The target's forward over drafted trees, and their verification.

use deepspec_ops::{DraftTree, argmax, cat_row_runs, sample};
use tch::{Kind, Tensor};

use super::forward::rows_finite;
use super::{Engine, StepInputs, StepPlan, to_host};
use crate::outcome::VerifyOutcome;
use crate::{EngineError, ModelInput, ModelOutput, Proposer, Target};

impl<T: Target, P: Proposer> Engine<T, P> {
    /// Checks that the models can verify trees, if they are to.
    ///
    /// # Errors
    /// [`EngineError::NoTrees`] with the reason.
    pub(super) fn check_trees(&mut self) -> Result<(), EngineError> {
        let Some(proposer) =
            self.proposer.as_ref().filter(|_| self.options.verify_rule.tree_budget().is_some())
        else {
            return Ok(());
        };
        match proposer.tree_refusal() {
            Some(reason) => Err(EngineError::NoTrees(reason)),
            None if self.target.as_tree_target().is_none() => {
                Err(EngineError::NoTrees("the target verifies chains only"))
            }
            None => Ok(()),
        }
    }

    /// `anchor, nodes…` of each decoding slot, concatenated: `[Σ(1+n)]`.
    pub(super) fn tree_tokens(&self, trees: &[DraftTree], inputs: &StepInputs) -> Tensor {
        let nodes: Vec<i64> = trees.iter().flat_map(DraftTree::tokens).copied().collect();
        let nodes = Tensor::from_slice(&nodes).to_device(self.target.device());
        let all = Tensor::cat(&[&inputs.anchors, &nodes], 0);
        let mut end = trees.len() as i64;
        cat_row_runs(
            &all,
            (0..).zip(trees).flat_map(|(slot, tree)| {
                end += tree.len() as i64;
                [(slot, 1), (end - tree.len() as i64, tree.len() as i64)]
            }),
        )
    }

    /// Runs the trees in one pass of the target, and the prompts in another one. The rows are in the order of the chunks.
    pub(super) fn forward_trees(
        &mut self,
        step: &StepPlan,
        trees: &[DraftTree],
        tokens: &Tensor,
    ) -> ModelOutput {
        let (decoding, prefilling) = step.chunks.split_at(trees.len());
        let rows = step.verified_rows() as i64;
        let target = self.target.as_tree_target().expect("requests are refused without");
        let of_trees =
            target.forward_trees(&ModelInput { chunks: decoding, tokens: tokens.narrow(0, 0, rows) }, trees);
        if prefilling.is_empty() {
            return of_trees;
        }
        let prompts = tokens.narrow(0, rows, tokens.size()[0] - rows);
        let of_prompts = self.target.forward(&ModelInput { chunks: prefilling, tokens: prompts });
        ModelOutput {
            hidden: Tensor::cat(&[of_trees.hidden, of_prompts.hidden], 0),
            captured_states: Tensor::cat(&[of_trees.captured_states, of_prompts.captured_states], 0),
        }
    }

    /// Verifies the trees and draws the prompts' first tokens, as [`Engine::verify_step`] does with blocks.
    pub(super) fn verify_trees(
        &self,
        step: &StepPlan,
        trees: &[DraftTree],
        inputs: &StepInputs,
        hidden: &Tensor,
    ) -> (VerifyOutcome, Tensor) {
        let logits = self.target.logits(&hidden.narrow(0, 0, step.verified_rows() as i64));
        let behind_rows = self.draw_behind_rows(trees, inputs, &logits);
        let (mut finite, mut parts) = (vec![rows_finite(&logits)], vec![behind_rows.shallow_clone()]);
        let first = self.draw_first_tokens(step, inputs, hidden).map(|(rows, first)| {
            finite.push(rows);
            parts.push(first.shallow_clone());
            first
        });
        let parts: Vec<Tensor> = finite.iter().chain(&parts).map(|part| part.to_kind(Kind::Double)).collect();
        let read = to_host(&Tensor::cat(&parts, 0));
        let outcome = VerifyOutcome::of_trees(&read, step.prefilling.len(), trees);
        let mut start = 0;
        let last_rows = trees.iter().zip(&outcome.paths).map(|(tree, path)| {
            start += 1 + tree.len();
            let last = path.rows.last().copied().unwrap_or(0);
            ((start - 1 - tree.len() + last) as i64, 1)
        });
        let next = cat_row_runs(&behind_rows, last_rows);
        let drawn = first.map_or_else(|| next.shallow_clone(), |first| Tensor::cat(&[&next, &first], 0));
        (outcome, drawn)
    }

    /// A token of the target behind every row of the trees, `[Σ(1+n)]`, of `logits [Σ(1+n), V]`: the likeliest, or drawn from the
    /// target's distribution. Rows of one depth share a uniform, because a path has one row of a depth.
    fn draw_behind_rows(&self, trees: &[DraftTree], inputs: &StepInputs, logits: &Tensor) -> Tensor {
        if inputs.decoding.is_greedy() {
            return argmax(logits);
        }
        let arange = &self.device_state.arange;
        let uniforms = Tensor::cat(&[&inputs.accept, &inputs.next.unsqueeze(1)], 1); // [S, Γ+1]
        let columns = uniforms.size()[1] as usize;
        let cells = trees
            .iter()
            .enumerate()
            .flat_map(|(slot, tree)| tree.row_depths().map(move |depth| slot * columns + depth));
        let uniforms = uniforms.reshape([-1]).index_select(0, &arange.int_tensor(cells));
        let repeats: Vec<usize> = trees.iter().map(|tree| 1 + tree.len()).collect();
        let sequence_of_row = arange.repeat_each(repeats.iter().copied().enumerate());
        let sampling = inputs.decoding.repeat_rows(&repeats, Some(&sequence_of_row));
        sample(&sampling.distributions(logits), &uniforms)
    }
}
