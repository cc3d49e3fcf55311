//! Short convolutions along the slots of a block, around attention and MLP of every layer. They make DFlash 2's backbone out of DFlash's.

use deepspec_checkpoint::{CheckpointError, Drafter, Fields, TensorShapes};
use deepspec_models::ModelConfig;
use deepspec_models::nn::{Builder, Init, LayerHook, Linear};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::BlockSpec;
use crate::{ConfigIssue, WarmStartCheck};

/// The convolutions along the slots of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Convolution {
    /// K, in slots: a slot and the K − 1 before it.
    pub kernel_size: i64,
    /// c, channels that share a dynamic part of their coefficients.
    pub group_size: i64,
}

impl Default for Convolution {
    fn default() -> Self {
        Self { kernel_size: 2, group_size: 16 }
    }
}

/// Key of config.json with the kernel size.
const KERNEL_SIZE: &str = "conv_kernel_size";
/// Key of config.json with the group size.
const GROUP_SIZE: &str = "conv_group_size";
/// Keys of config.json with the sizes, in the order of [`Convolution::named_sizes`].
pub const CONVOLUTION_KEYS: [&str; 2] = [KERNEL_SIZE, GROUP_SIZE];
/// Pairs (key of config.json, key of the recipe).
pub const CONVOLUTION_RECIPE_KEYS: [(&str, &str); 2] =
    [(KERNEL_SIZE, "convolution.kernel_size"), (GROUP_SIZE, "convolution.group_size")];

/// Sublayers of a layer that convolutions wrap: attention and MLP.
const SUBLAYERS: [&str; 2] = ["attention", "mlp"];
/// Convolutions per sublayer: one before and one after.
const PER_SUBLAYER: i64 = 2;
/// Index of the convolution before attention or MLP.
const PRE_CONV: i64 = 0;
/// Index of the convolution after attention or MLP.
const POST_CONV: i64 = 1;

impl Convolution {
    /// Reads the sizes from config.json, where both are required.
    pub fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        Ok(Self {
            kernel_size: fields.required_size(KERNEL_SIZE)?,
            group_size: fields.required_size(GROUP_SIZE)?,
        })
    }

    /// Reads the sizes from config.json. Absent ones have their default.
    pub fn read_or_default(fields: &Fields) -> Result<Self, CheckpointError> {
        let Self { kernel_size, group_size } = Self::default();
        Ok(Self {
            kernel_size: fields.size(KERNEL_SIZE)?.unwrap_or(kernel_size),
            group_size: fields.size(GROUP_SIZE)?.unwrap_or(group_size),
        })
    }

    /// Keys of config.json with the sizes.
    pub fn named_sizes(&self) -> [(&'static str, i64); 2] {
        [(KERNEL_SIZE, self.kernel_size), (GROUP_SIZE, self.group_size)]
    }

    /// Checks the sizes against the blocks and the hidden size `width`. An error is a key of config.json and its problem.
    pub fn check(&self, blocks: &BlockSpec, width: i64) -> Result<(), ConfigIssue> {
        let (kernel_size, slots) = (self.kernel_size, blocks.block_size);
        if !(1..=slots as i64).contains(&kernel_size) {
            return Err((KERNEL_SIZE, format!("{kernel_size} is not between 1 and {slots}")));
        }
        let group = self.group_size;
        if group < 1 || width % group != 0 {
            return Err((GROUP_SIZE, format!("{group} does not divide the hidden size {width}")));
        }
        Ok(())
    }

    /// Sets the smallest groups, for dummy runs: they divide any width.
    pub fn shrink(&mut self) {
        self.group_size = 1;
    }

    /// See [`crate::DrafterSettings::compare_for_warm_start`].
    pub fn compare_for_warm_start(&self, from: &Self, transfer: &mut WarmStartCheck) {
        for ((_, key), ((_, there), (_, here))) in
            CONVOLUTION_RECIPE_KEYS.into_iter().zip(from.named_sizes().into_iter().zip(self.named_sizes()))
        {
            transfer.compare(key, there, here);
        }
    }

    /// The sizes in words, for `checkpoint inspect`.
    pub fn describe(&self) -> String {
        format!("{} taps, groups of {} channels", self.kernel_size, self.group_size)
    }

    /// Adds names and shapes of the convolutions' tensors in all layers.
    pub fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let (width, kernel_size) = (drafter.hidden_size as i64, self.kernel_size as usize);
        for (layer, half) in (0..drafter.layers).flat_map(|layer| SUBLAYERS.map(|half| (layer, half))) {
            let (base, projection) = tensor_names(&format!("layers.{layer}.{half}_conv"));
            let deltas = self.coefficients(width) as usize;
            shapes.push((base, vec![PER_SUBLAYER as usize, kernel_size, width as usize]));
            shapes.push((format!("{projection}.weight"), vec![deltas, width as usize]));
        }
    }

    /// Number of coefficients δ per row that the projection of a sublayer computes.
    fn coefficients(&self, width: i64) -> i64 {
        PER_SUBLAYER * self.kernel_size * (width / self.group_size)
    }

    /// Multiplications of a slot in the projections of all layers.
    pub fn multiplications(&self, model: &ModelConfig) -> f64 {
        let width = model.hidden_size;
        (SUBLAYERS.len() * model.layers.len()) as f64 * (self.coefficients(width) * width) as f64
    }

    /// Values per row and layer that autograd saves: each convolution's input once per kernel position, and the coefficients.
    pub fn saved_values(&self, model: &ModelConfig) -> usize {
        let width = model.hidden_size;
        SUBLAYERS.len() * (PER_SUBLAYER * self.kernel_size * width + self.coefficients(width)) as usize
    }
}

/// Names of the static kernels and of the projection's layer of the convolutions `name`.
fn tensor_names(name: &str) -> (String, String) {
    (format!("{name}.base_kernel"), format!("{name}.kernel_projection"))
}

/// Two causal depthwise convolutions with input-dependent kernels. The normed input determines both kernels, including the kernel of the
/// convolution after the sublayer. Both are initialised to the identity.
///
/// Output of slot t: `Σ_{o<K} (base[o] + δ_t[o, group]) ⊙ x_{t−o}`, with zeros before the block. δ is a projection of the normed input.
struct ConvolutionPair {
    base: Tensor,       // [2, K, d]
    projection: Linear, // d -> 2·K·d/c
    shape: Convolution,
    /// Slots of a block, B.
    block_size: i64,
}

impl ConvolutionPair {
    /// Requests the parameters of the convolutions `name` from the builder.
    fn new(b: &Builder, name: &str, width: i64, shape: Convolution, block_size: usize) -> Self {
        let (base, projection) = tensor_names(name);
        Self {
            base: b.get(&base, &[PER_SUBLAYER, shape.kernel_size, width], Init::Identity),
            projection: Linear::zero_init(b, &projection, width, shape.coefficients(width)),
            shape,
            block_size: block_size as i64,
        }
    }

    /// Convolves `normed`, runs `sublayer` on it and convolves the output. Rows are whole blocks, `[N·B, d]`.
    fn convolve_around(&self, normed: &Tensor, sublayer: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor {
        let Convolution { kernel_size, group_size } = self.shape;
        let groups = normed.size()[1] / group_size;
        let deltas =
            self.projection.forward(normed).view([-1, self.block_size, PER_SUBLAYER, kernel_size, groups, 1]);
        let deltas = deltas.permute([2, 3, 0, 1, 4, 5]); // [2, K, N, B, d/c, 1]
        let input = self.convolve(PRE_CONV, &deltas, normed);
        self.convolve(POST_CONV, &deltas, &sublayer(&input))
    }

    /// Applies the convolution `place` ([`PRE_CONV`] or [`POST_CONV`]) to rows of whole blocks `[N·B, d]`.
    fn convolve(&self, place: i64, deltas: &Tensor, x: &Tensor) -> Tensor {
        let (size, groups) = (self.block_size, deltas.size()[4]);
        let x = x.view([-1, size, groups, self.shape.group_size]);
        let term_at = |offset: i64| {
            // Shifts by `offset` slots: x_{t−o}, zeros before the block.
            let read = if offset == 0 {
                x.shallow_clone()
            } else {
                let kept = size - offset;
                x.narrow(1, 0, kept).constant_pad_nd([0, 0, 0, 0, size - kept, 0])
            };
            let base = self.base.get(place).get(offset).view([groups, self.shape.group_size]);
            &read * base + &read * deltas.get(place).get(offset)
        };
        let first = term_at(0);
        let y = (1..self.shape.kernel_size).fold(first, |sum, offset| sum + term_at(offset));
        y.view([-1, groups * self.shape.group_size])
    }
}

/// Convolutions around attention and around the MLP of one layer.
pub struct LayerConvolutions {
    attention: ConvolutionPair,
    mlp: ConvolutionPair,
}

impl LayerConvolutions {
    /// Requests the convolutions of all layers from the builder.
    pub fn of_layers(b: &Builder, model: &ModelConfig, shape: Convolution, blocks: &BlockSpec) -> Vec<Self> {
        let of_layer = |layer: usize| {
            let [attention, mlp] = SUBLAYERS.map(|half| {
                let name = format!("layers.{layer}.{half}_conv");
                ConvolutionPair::new(b, &name, model.hidden_size, shape, blocks.block_size)
            });
            Self { attention, mlp }
        };
        (0..model.layers.len()).map(of_layer).collect()
    }
}

impl LayerHook for LayerConvolutions {
    fn around_attention(&self, normed: &Tensor, attention: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor {
        self.attention.convolve_around(normed, attention)
    }

    fn around_mlp(&self, normed: &Tensor, mlp: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor {
        self.mlp.convolve_around(normed, mlp)
    }
}
