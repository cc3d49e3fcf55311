//! A mixture of experts: a router sends each row to a few of many gated MLPs.
//!
//! Shapes: N rows, d hidden size, E experts, k experts of a row, I width inside an expert.

mod reference;

use tch::{Device, Kind, Tensor};

use crate::HOST;
use crate::gated_mlp::{Activation, GatedMlp, gated_mlp};
use crate::linear::{Weight, linear, linear_in_float32};

/// How a router turns its logits into the weights of a row's k experts. The softmax is in float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterScores {
    /// The k largest values of the softmax over all experts.
    SoftmaxOverAll {
        /// Whether they are divided by their sum (`norm_topk_prob`).
        renormalise: bool,
    },
    /// The softmax over the k largest logits.
    SoftmaxOfChosen,
    /// `√softplus(logit)` of the k experts whose score and bias have the largest sums, divided by the sum of the k scores. The
    /// bias selects, and is no part of the weights (DeepSeek-V4). Logits, scores and weights are float32 whatever the dtype of
    /// the rows is, as in DeepSeek's own code. Otherwise rounded logits would choose other experts.
    SqrtSoftplus,
}

/// The router of a layer with experts.
#[derive(Clone, Copy)]
pub struct Router<'a> {
    /// Weight of the logits, `[E, d]`.
    pub weight: &'a Weight,
    /// Bias of the logits, or of the selection with [`RouterScores::SqrtSoftplus`], `[E]`.
    pub bias: Option<&'a Tensor>,
    /// k, experts of a row.
    pub active: i64,
    /// How logits become weights.
    pub scores: RouterScores,
}

/// Weights of one expert: `gate` and `up` are `[I, d]`, `down` is `[d, I]`.
pub struct Expert {
    /// Gate projection `[I, d]`.
    pub gate: Weight,
    /// Up projection `[I, d]`.
    pub up: Weight,
    /// Down projection `[d, I]`.
    pub down: Weight,
    /// Biases of gate `[I]`, up `[I]` and down `[d]`; None if there are none.
    pub biases: Option<[Tensor; 3]>,
}

/// Weights of a layer's experts.
#[derive(Clone, Copy)]
pub struct MixtureOfExperts<'a> {
    /// The router.
    pub router: Router<'a>,
    /// The E experts.
    pub experts: &'a [Expert],
    /// Activation function of the gates.
    pub activation: Activation,
}

impl Router<'_> {
    /// Weights `[N, k]` and experts `[N, k]` of each row of `x [N, d]`, in the order of selection. The weights have the dtype of
    /// `x`, and are float32 with [`RouterScores::SqrtSoftplus`].
    fn route(&self, x: &Tensor) -> (Tensor, Tensor) {
        let is_wide = self.scores == RouterScores::SqrtSoftplus;
        let logits = match is_wide {
            true => linear_in_float32(x, self.weight),
            false => linear(x, self.weight, self.bias),
        };
        let largest = |of: &Tensor| of.topk(self.active, -1, true, true);
        let (scores, experts) = match self.scores {
            RouterScores::SoftmaxOverAll { renormalise } => {
                let (scores, experts) = largest(&logits.softmax(-1, Kind::Float));
                let sums = renormalise.then(|| scores.sum_dim_intlist(-1, true, Kind::Float));
                (sums.map_or_else(|| scores.shallow_clone(), |sums| &scores / sums), experts)
            }
            RouterScores::SoftmaxOfChosen => {
                let (chosen, experts) = largest(&logits);
                (chosen.softmax(-1, Kind::Float), experts)
            }
            RouterScores::SqrtSoftplus => {
                let all = logits.softplus().sqrt();
                let biased =
                    self.bias.map_or_else(|| all.shallow_clone(), |bias| &all + bias.to_kind(Kind::Float));
                let experts = largest(&biased.detach()).1;
                let scores = all.gather(-1, &experts, false);
                (&scores / scores.sum_dim_intlist(-1, true, Kind::Float), experts)
            }
        };
        (if is_wide { scores } else { scores.to_kind(x.kind()) }, experts)
    }
}

/// `Σ_j s_j · expert_{e_j}(x)` of `x [N, d]`, with the weights s and the experts e of each row: `[N, d]`. The experts are gated
/// MLPs, by [`gated_mlp`]; otherwise as [`combine_experts`]. Stored weights have gradients, packed ones have none.
pub fn mixture_of_experts(x: &Tensor, weights: MixtureOfExperts<'_>) -> Tensor {
    let MixtureOfExperts { router, experts, activation } = weights;
    combine_experts(x, router, experts.len(), |expert, rows| {
        let Expert { gate, up, down, biases } = &experts[expert];
        gated_mlp(rows, GatedMlp { gate, up, down, activation, biases: biases.as_ref() })
    })
}

/// `Σ_j s_j · run(e_j, x)` of `x [N, d]`, with the weights s and the experts e of each row: `[N, d]`. `run` computes the rows of
/// one of the `count` experts. Gradients go through the weights and through `run`, if that records them.
///
/// The rows of an expert run together. A row adds its experts by ascending index, in float32, so that its
/// result depends on other rows no more than that of [`linear`] does. The host reads the experts of the rows, and
/// waits for the device once.
pub fn combine_experts(
    x: &Tensor,
    router: Router<'_>,
    count: usize,
    run: impl Fn(usize, &Tensor) -> Tensor,
) -> Tensor {
    let (scores, chosen) = router.route(x);
    let groups = RowGroups::new(&chosen, count, x.device());
    let scores = scores.to_kind(Kind::Float).view([-1, 1]).index_select(0, &groups.places);
    let mut sum = Tensor::zeros_like(x).to_kind(Kind::Float);
    let all = x.size()[0];
    for Group { expert, first, len } in groups.groups {
        let rows = groups.rows.narrow(0, first, len);
        let own = if len == all { x.shallow_clone() } else { x.index_select(0, &rows) };
        let y = run(expert, &own).to_kind(Kind::Float) * scores.narrow(0, first, len);
        if len == all {
            sum += y;
        } else {
            // A row has an expert once, so that no two additions meet.
            let _ = sum.index_add_(0, &rows, &y);
        }
    }
    sum.to_kind(x.kind())
}

/// Rows of one expert.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    expert: usize,
    /// Index of its first entry in the lists of [`RowGroups`].
    first: i64,
    /// Number of its rows.
    len: i64,
}

/// All pairs of a row and one of its experts, sorted by expert, then by row.
struct RowGroups {
    /// Row of each pair, `[N·k]`.
    rows: Tensor,
    /// Index of each pair in `[N, k]`, `[N·k]`.
    places: Tensor,
    /// Experts that have rows, by ascending index.
    groups: Vec<Group>,
}

impl RowGroups {
    /// Sorts the experts `[N, k]` of N rows. The lists are on `device`.
    fn new(chosen: &Tensor, experts: usize, device: Device) -> Self {
        let active = chosen.size()[1];
        let flat = chosen.to_device(HOST).contiguous();
        let mut ids = vec![0i64; flat.numel()];
        flat.copy_data(&mut ids, flat.numel());
        let mut of_expert: Vec<Vec<i64>> = vec![vec![]; experts];
        for (place, &expert) in ids.iter().enumerate() {
            of_expert[expert as usize].push(place as i64);
        }
        let (mut groups, mut places) = (vec![], Vec::with_capacity(ids.len()));
        for (expert, own) in of_expert.into_iter().enumerate().filter(|(_, own)| !own.is_empty()) {
            groups.push(Group { expert, first: places.len() as i64, len: own.len() as i64 });
            places.extend(own);
        }
        let rows: Vec<i64> = places.iter().map(|place| place / active).collect();
        let [rows, places] = [rows, places].map(|list| Tensor::from_slice(&list).to_device(device));
        Self { rows, places, groups }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: i64 = 64;
    const INNER: i64 = 48;

    fn values(shape: &[i64], seed: u64) -> Tensor {
        let count = shape.iter().product::<i64>() as usize;
        Tensor::from_slice(&deepspec_testkit::noise(seed, count)).view(shape)
    }

    /// A router and the projections of `experts` experts, stacked: `[E, d]`, twice `[E, I, d]`, `[E, d, I]`.
    fn stacked(experts: i64, kind: Kind) -> [Tensor; 4] {
        let inner = [experts, INNER, D];
        [values(&[experts, D], 1), values(&inner, 2), values(&inner, 3), values(&[experts, D, INNER], 4)]
            .map(|tensor| (tensor * 0.3).to_kind(kind))
    }

    struct Layer {
        router: Weight,
        experts: Vec<Expert>,
        bias: Option<Tensor>,
        activation: Activation,
    }

    impl Layer {
        fn new([router, gate, up, down]: &[Tensor; 4], form: fn(Tensor) -> Weight) -> Self {
            let of = |all: &Tensor, expert: i64| form(all.get(expert));
            let expert = |e| Expert { gate: of(gate, e), up: of(up, e), down: of(down, e), biases: None };
            Self {
                router: form(router.shallow_clone()),
                experts: (0..router.size()[0]).map(expert).collect(),
                bias: None,
                activation: Activation::Silu,
            }
        }

        /// With biases and clamped gates.
        fn like_gpt_oss(mut self) -> Self {
            let biases =
                |seed: u64| [(INNER, 0), (INNER, 100), (D, 200)].map(|(n, more)| values(&[n], seed + more));
            for (expert, seed) in self.experts.iter_mut().zip(10..) {
                expert.biases = Some(biases(seed));
            }
            Self { bias: Some(values(&[16], 6)), activation: Activation::ClampedSwiglu, ..self }
        }

        fn run(&self, x: &Tensor, active: i64, scores: RouterScores) -> Tensor {
            let router = Router { weight: &self.router, bias: self.bias.as_ref(), active, scores };
            let (experts, activation) = (&self.experts, self.activation);
            mixture_of_experts(x, MixtureOfExperts { router, experts, activation })
        }
    }

    const SCORES: [RouterScores; 3] = [
        RouterScores::SoftmaxOverAll { renormalise: false },
        RouterScores::SoftmaxOverAll { renormalise: true },
        RouterScores::SoftmaxOfChosen,
    ];
    /// The bias of DeepSeek-V4 decides who is chosen, and is no part of the weights.
    #[test]
    fn a_bias_of_the_selection_leaves_the_weights() {
        let x = Tensor::from_slice(&[1.0f32]).view([1, 1]);
        let logits = [3.0f32, -1.0, 0.5];
        let weight = Weight::Stored(Tensor::from_slice(&logits).view([3, 1]));
        let bias = Tensor::from_slice(&[-9.0f32, 0.0, 0.0]);
        let router =
            Router { weight: &weight, bias: Some(&bias), active: 2, scores: RouterScores::SqrtSoftplus };
        let (weights, experts) = router.route(&x);
        assert_eq!(Vec::<i64>::try_from(experts.get(0)).unwrap(), [2, 1]);
        let score = |of: f32| f64::from(of).exp().ln_1p().sqrt();
        let sum = score(0.5) + score(-1.0);
        for (place, logit) in [(0, 0.5), (1, -1.0)] {
            assert!((weights.double_value(&[0, place]) - score(logit) / sum).abs() < 1e-6, "{weights}");
        }
    }

    /// In bfloat16 both logits would be 256, and both weights 0.5.
    #[test]
    fn deepseek_v4_routes_bfloat16_in_float32() {
        let x = Tensor::from_slice(&[1.0f32, 1.0]).view([1, 2]).to_kind(Kind::BFloat16);
        let weight = Tensor::from_slice(&[256.0f32, 0.0, 256.0, 0.5]).view([2, 2]).to_kind(Kind::BFloat16);
        let weight = Weight::Stored(weight);
        let router = Router { weight: &weight, bias: None, active: 2, scores: RouterScores::SqrtSoftplus };
        let (weights, experts) = router.route(&x);
        assert_eq!(
            (Vec::<i64>::try_from(experts.get(0)).unwrap(), weights.kind()),
            (vec![1, 0], Kind::Float)
        );
        let expected = 256.5f64.sqrt() / (256.5f64.sqrt() + 16.0);
        assert!((weights.double_value(&[0, 0]) - expected).abs() < 1e-6, "{weights}");
    }

    /// Gradients go through rows and weights of the experts.
    #[test]
    fn combined_experts_have_the_gradients_of_their_sum() {
        let x = values(&[5, D], 1).set_requires_grad(true);
        let router = values(&[4, D], 2).set_requires_grad(true);
        let factors = values(&[4], 3).set_requires_grad(true);
        let weight = Weight::Stored(router.shallow_clone());
        let of = Router { weight: &weight, bias: None, active: 2, scores: RouterScores::SqrtSoftplus };
        let y = combine_experts(&x, of, 4, |expert, rows| rows * factors.get(expert as i64));
        let scores = x.matmul(&router.tr()).softplus().sqrt();
        let limit = scores.sort(-1, true).0.narrow(1, 1, 1);
        let kept = &scores * scores.ge_tensor(&limit).to_kind(Kind::Float);
        let kept = &kept / kept.sum_dim_intlist(-1, true, Kind::Float);
        let expected = &x * kept.matmul(&factors.unsqueeze(1));
        let loss = |y: &Tensor| (y * values(&[5, D], 4)).sum(Kind::Float);
        let inputs = [&x, &router, &factors];
        let found = Tensor::run_backward(&[loss(&y)], &inputs, false, false);
        let expected = Tensor::run_backward(&[loss(&expected)], &inputs, false, false);
        for (found, expected) in found.iter().zip(&expected) {
            assert!(largest(expected) > 0.0 && largest(&(found - expected)) < 1e-4 * largest(expected));
        }
    }

    /// Rows, router and experts have the gradients that they have where every expert computes every row.
    #[test]
    fn stored_experts_have_the_gradients_of_the_reference() {
        const EXPERTS: i64 = 6;
        let learned = |tensor: Tensor| tensor.detach().copy().set_requires_grad(true);
        let gradient = |tensor: &Tensor| crate::grad_or_zeros(tensor).copy();
        let weights = stacked(EXPERTS, Kind::Float);
        for scores in SCORES {
            let form: fn(Tensor) -> Weight =
                |tensor| Weight::Stored(tensor.detach().copy().set_requires_grad(true));
            let (layer, x) = (Layer::new(&weights, form), learned(values(&[9, D], 5)));
            let loss = |y: &Tensor| (y * values(&[9, D], 6)).sum(Kind::Float);
            loss(&layer.run(&x, 2, scores)).backward();
            let of = |part: fn(&Expert) -> &Weight| {
                let each = layer.experts.iter().map(|expert| gradient(&part(expert).to_tensor()));
                Tensor::stack(&each.collect::<Vec<_>>(), 0)
            };
            let found = [
                gradient(&layer.router.to_tensor()),
                of(|expert| &expert.gate),
                of(|expert| &expert.up),
                of(|expert| &expert.down),
                gradient(&x),
            ];
            let (all, rows) = (weights.each_ref().map(|own| learned(own.shallow_clone())), learned(x));
            loss(&reference::mixture_of_experts(&rows, &all, 2, scores)).backward();
            for (found, own) in found.iter().zip(all.iter().chain([&rows])) {
                let expected = own.grad();
                let (off, most) = (largest(&(found - &expected)), largest(&expected));
                assert!(most > 0.0 && off < 1e-4 * most, "{scores:?}: {off:e} of {most:e}");
            }
        }
    }

    const FORMS: [fn(Tensor) -> Weight; 2] = [Weight::Stored, |tensor| Weight::Stored(tensor).pack()];

    fn largest(of: &Tensor) -> f64 {
        of.abs().max().double_value(&[])
    }

    #[test]
    fn rows_by_expert_give_what_all_experts_of_all_rows_give() {
        let _no_grad = tch::no_grad_guard();
        for (experts, active, rows) in [(7, 1, 5), (16, 4, 1), (16, 4, 33), (6, 6, 9)] {
            for scores in SCORES {
                let weights = stacked(experts, Kind::Float);
                let x = values(&[rows, D], 5);
                let expected = reference::mixture_of_experts(&x, &weights, active, scores);
                for form in FORMS {
                    let found = Layer::new(&weights, form).run(&x, active, scores);
                    let off = largest(&(&found - &expected));
                    let what = format!("{active} of {experts}, {rows} rows, {scores:?}");
                    assert!(off < 1e-5 * largest(&expected), "{what}: {off:e}");
                }
            }
        }
    }

    /// The form of gpt-oss, beside a loop over rows.
    #[test]
    fn biases_and_scores_of_the_chosen_experts_count() {
        let _no_grad = tch::no_grad_guard();
        let weights = stacked(16, Kind::Float);
        let layer = Layer::new(&weights, Weight::Stored).like_gpt_oss();
        let bias = layer.bias.as_ref().unwrap();
        let x = values(&[9, D], 5);
        let found = layer.run(&x, 4, RouterScores::SoftmaxOfChosen);
        for row in 0..9 {
            let own = x.narrow(0, row, 1);
            let (chosen, experts) = own.linear(&weights[0], Some(bias)).topk(4, -1, true, true);
            let scores = chosen.softmax(-1, Kind::Float);
            let mut expected = Tensor::zeros([1, D], (Kind::Float, HOST));
            for place in 0..4 {
                let Expert { gate, up, down, biases } =
                    &layer.experts[experts.int64_value(&[0, place]) as usize];
                let (biases, activation) = (biases.as_ref(), Activation::ClampedSwiglu);
                let y = gated_mlp(&own, GatedMlp { gate, up, down, activation, biases });
                expected += y * scores.double_value(&[0, place]);
            }
            let off = largest(&(found.narrow(0, row, 1) - &expected));
            assert!(off < 1e-5 * largest(&expected), "row {row}: {off:e}");
        }
    }

    /// Sums are in float32; the weights of the experts and each expert's output are rounded to bfloat16.
    #[test]
    fn bfloat16_is_near_the_result_in_float32() {
        let _no_grad = tch::no_grad_guard();
        let weights = stacked(16, Kind::BFloat16);
        let x = values(&[33, D], 5).to_kind(Kind::BFloat16);
        let scores = RouterScores::SoftmaxOverAll { renormalise: true };
        let found = Layer::new(&weights, Weight::Stored).run(&x, 4, scores);
        assert_eq!(found.kind(), Kind::BFloat16);
        let wide = weights.map(|tensor| tensor.to_kind(Kind::Float));
        // The router's logits are rounded, too, and decide the experts.
        let logits = x.linear(&wide[0].to_kind(Kind::BFloat16), None::<&Tensor>).to_kind(Kind::Float);
        let expected = reference::of_logits(&x.to_kind(Kind::Float), &logits, &wide, 4, scores);
        let off = largest(&(found.to_kind(Kind::Float) - &expected));
        assert!(off < 0.02 * largest(&expected), "{off:e} of {:e}", largest(&expected));
    }

    #[test]
    #[cfg_attr(not(feature = "kernels"), ignore = "rows have the same bits in every batch with kernels only")]
    fn a_row_has_the_same_bits_alone_and_among_others() {
        let _no_grad = tch::no_grad_guard();
        let layer = || Layer::new(&stacked(16, Kind::Float), FORMS[1]);
        let x = values(&[21, D], 5);
        let layers = [layer(), layer().like_gpt_oss()];
        for (layer, scores) in layers.iter().flat_map(|layer| SCORES.map(|scores| (layer, scores))) {
            let all = layer.run(&x, 4, scores);
            for (first, count) in [(0, 1), (7, 1), (20, 1), (3, 5), (2, 19)] {
                let alone = layer.run(&x.narrow(0, first, count), 4, scores);
                assert!(alone.equal(&all.narrow(0, first, count)), "{count} rows from {first}");
            }
        }
    }

    #[test]
    fn pairs_are_sorted_by_expert_then_by_row() {
        let chosen = Tensor::from_slice(&[3i64, 1, 1, 0, 3, 0]).view([3, 2]);
        let RowGroups { rows, places, groups } = RowGroups::new(&chosen, 5, HOST);
        let list = |tensor: &Tensor| Vec::<i64>::try_from(tensor).unwrap();
        assert_eq!((list(&places), list(&rows)), (vec![3, 5, 1, 2, 0, 4], vec![1, 2, 0, 1, 0, 2]));
        let group = |expert, first, len| Group { expert, first, len };
        assert_eq!(groups, [group(0, 0, 2), group(1, 2, 2), group(3, 4, 2)]);
    }
}
