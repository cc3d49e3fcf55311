//! The mixture of experts by libtorch's operators: every expert computes every row. For tests.
#![cfg(test)]

use tch::{Kind, Tensor};

use super::RouterScores;

/// See [`super::mixture_of_experts`], with SiLU. The weights are stacked: router `[E, d]`, gate and up `[E, I, d]`, and
/// down `[E, d, I]`.
pub(super) fn mixture_of_experts(
    x: &Tensor,
    weights: &[Tensor; 4],
    active: i64,
    scores: RouterScores,
) -> Tensor {
    of_logits(x, &x.matmul(&weights[0].tr()), weights, active, scores)
}

/// The mixture with given logits `[N, E]` of the router.
pub(super) fn of_logits(
    x: &Tensor,
    logits: &Tensor,
    [_, gate, up, down]: &[Tensor; 4],
    active: i64,
    scores: RouterScores,
) -> Tensor {
    // A softmax of the chosen logits is one over all, renormalised.
    let probabilities = logits.softmax(-1, Kind::Float);
    // The k-th largest value is the limit; random logits have no equal values.
    let limit = probabilities.sort(-1, true).0.narrow(1, active - 1, 1);
    let kept = &probabilities * probabilities.ge_tensor(&limit).to_kind(Kind::Float);
    let kept = match scores {
        RouterScores::SoftmaxOverAll { renormalise: true } | RouterScores::SoftmaxOfChosen => {
            &kept / kept.sum_dim_intlist(-1, true, Kind::Float)
        }
        RouterScores::SoftmaxOverAll { renormalise: false } => kept,
        RouterScores::SqrtSoftplus => unreachable!("compared with its own formula"),
    };
    // [1, N, d] with [E, d, I]: [E, N, I]; then [E, N, d].
    let rows = x.unsqueeze(0);
    let project = |weight: &Tensor| rows.matmul(&weight.transpose(1, 2));
    let each = (project(gate).silu() * project(up)).matmul(&down.transpose(1, 2));
    (each * kept.tr().unsqueeze(-1)).sum_dim_intlist(0, false, Kind::Float)
}
