//! Hyper-connections on a manifold (mHC): m residual streams that a sub-layer reads as a weighted sum, and that it mixes.
//!
//! The mixing matrix is made doubly stochastic by Sinkhorn iterations: rows and columns are divided by their sums in turn. Weights of
//! reading, writing and mixing are computed in float32.

use deepspec_models::nn::{Builder, Init, Weight};
use deepspec_ops::linear_in_float32;
use tch::{Kind, Tensor};

use super::settings::StageSettings;

/// Factors of random hyper-connections, which start near their biases.
const INITIAL_SCALE: f64 = 0.01;

/// Weights of reading from the streams.
pub struct StreamReader {
    function: Weight, // [outputs, m·d]
    base: Tensor,     // [outputs]
    scale: Tensor,    // [1] or [3]
    norm_eps: f64,
    hc_eps: f64,
}

impl StreamReader {
    /// The tensors `{name}_fn`, `{name}_base` and `{name}_scale` of m streams `[m, d]` that give `outputs` numbers.
    fn new(
        b: &Builder,
        name: &str,
        [outputs, scales]: [i64; 2],
        hidden: i64,
        settings: &StageSettings,
    ) -> Self {
        let inputs = settings.hc_mult * hidden;
        Self {
            function: b.linear_weight(&format!("{name}_fn"), &[outputs, inputs], Init::Normal),
            base: b.get(&format!("{name}_base"), &[outputs], Init::Zeros),
            scale: b.get(&format!("{name}_scale"), &[scales], Init::Constant(INITIAL_SCALE)),
            norm_eps: settings.rms_norm_eps,
            hc_eps: settings.hc_eps,
        }
    }

    /// The reader of the streams' final sum, `hc_head_*`.
    pub fn head(b: &Builder, hidden: i64, settings: &StageSettings) -> Self {
        Self::new(b, "hc_head", [settings.hc_mult, 1], hidden, settings)
    }

    /// `fn · x / rms(x)` of the flattened streams `[N, m, d]`: `[N, outputs]` float32.
    fn outputs(&self, streams: &Tensor) -> Tensor {
        let flat = streams.flatten(1, 2).to_kind(Kind::Float);
        let mean = flat.square().mean_dim(-1, true, Kind::Float);
        linear_in_float32(&flat, &self.function) * (mean + self.norm_eps).rsqrt()
    }

    /// Part `index` of `outputs`, from output `first` on, with its factor and bias.
    fn part(&self, outputs: &Tensor, index: i64, first: i64, count: i64) -> Tensor {
        let [base, scale] = [&self.base, &self.scale].map(|of| of.to_kind(Kind::Float));
        outputs.narrow(1, first, count) * scale.narrow(0, index, 1) + base.narrow(0, first, count)
    }

    /// Σ of the streams `[N, m, d]` with weights `σ(..) + ε`: `[N, d]`.
    pub fn read(&self, streams: &Tensor) -> Tensor {
        let count = streams.size()[1];
        let weights = self.part(&self.outputs(streams), 0, 0, count).sigmoid() + self.hc_eps;
        weighted_sum(streams, &weights)
    }
}

/// Σ_i w_i · X_i over the streams X `[N, m, d]` with weights `[N, m]` float32: `[N, d]`.
fn weighted_sum(streams: &Tensor, weights: &Tensor) -> Tensor {
    let wide = streams.to_kind(Kind::Float);
    weights.unsqueeze(1).bmm(&wide).squeeze_dim(1).to_kind(streams.kind())
}

/// The hyper-connection around a sub-layer.
pub struct HyperConnection {
    reader: StreamReader,
    iterations: usize,
}

impl HyperConnection {
    /// The tensors `{name}_fn [m(m + 2), m·d]`, `{name}_base [m(m + 2)]` and `{name}_scale [3]`.
    pub fn new(b: &Builder, name: &str, hidden: i64, settings: &StageSettings) -> Self {
        let outputs = settings.hc_mult * (settings.hc_mult + 2);
        Self {
            reader: StreamReader::new(b, name, [outputs, 3], hidden, settings),
            iterations: settings.hc_sinkhorn_iters,
        }
    }

    /// Runs `sublayer`, `[N, d]` to `[N, d]`, on the streams X `[N, m, d]`, and returns the next streams:
    /// `X'_j = post_j · sublayer(Σ_i pre_i · X_i) + Σ_i comb_ij · X_i`.
    pub fn forward(&self, streams: &Tensor, sublayer: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
        let (reader, count) = (&self.reader, streams.size()[1]);
        let outputs = reader.outputs(streams);
        let pre = reader.part(&outputs, 0, 0, count).sigmoid() + reader.hc_eps;
        let post = reader.part(&outputs, 1, count, count).sigmoid() * 2.0;
        let comb = reader.part(&outputs, 2, 2 * count, count * count).view([-1, count, count]);
        let comb = self.doubly_stochastic(&comb);
        let written = sublayer(&weighted_sum(streams, &pre)).to_kind(Kind::Float);
        let mixed = comb.transpose(1, 2).bmm(&streams.to_kind(Kind::Float));
        (mixed + post.unsqueeze(2) * written.unsqueeze(1)).to_kind(streams.kind())
    }

    /// Softmax of the rows, then divisions by the sums of columns and of rows in turn, columns last: `[N, m, m]`.
    fn doubly_stochastic(&self, logits: &Tensor) -> Tensor {
        let eps = self.reader.hc_eps;
        let normed = |matrix: Tensor, dim: i64| {
            let sums = matrix.sum_dim_intlist(dim, true, Kind::Float) + eps;
            matrix / sums
        };
        let first = normed(logits.softmax(-1, Kind::Float) + eps, -2);
        (1..self.iterations).fold(first, |matrix, _| normed(normed(matrix, -1), -2))
    }
}
