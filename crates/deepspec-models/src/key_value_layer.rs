//! Keys and values of a target's layer, computed outside of the target.

use std::path::Path;

use deepspec_ops::Rotation;
use tch::{Device, Kind, Tensor};

use crate::families::TensorNames;
use crate::nn::{Builder, KeyValueProjection, LayerSpec, RmsNorm, StateDict};
use crate::{ModelConfig, ModelError, Weights};

/// Input norm and projections of a target's layer that compute what the layer stores in the KV cache.
///
/// Drafters that read the target's KV cache recompute it from captured hidden states.
pub struct KeyValueLayer {
    input_norm: RmsNorm,
    projection: KeyValueProjection,
}

impl KeyValueLayer {
    /// Requests the tensors of layer `layer` of a target, by the target's names without a prefix.
    pub fn new(b: &Builder, layer: usize, spec: &LayerSpec) -> Self {
        Self::with_prefix(b, "", layer, spec)
    }

    fn with_prefix(b: &Builder, body: &str, layer: usize, spec: &LayerSpec) -> Self {
        let name = format!("{body}layers.{layer}");
        let (width, eps, form) = (spec.hidden_size, spec.eps, spec.norm_weight);
        Self {
            input_norm: RmsNorm::with_weight(b, &format!("{name}.input_layernorm"), width, eps, form),
            projection: KeyValueProjection::new(b, &format!("{name}.self_attn"), spec),
        }
    }

    /// Reads the tensors of these layers from the folder of a target, named as [`KeyValueLayer::new`] asks for them.
    ///
    /// # Errors
    /// If the folder has no readable weights, or if a tensor is missing or of another shape.
    pub fn load(
        dir: &Path,
        config: &ModelConfig,
        layers: &[usize],
        device: Device,
        kind: Kind,
    ) -> Result<StateDict, ModelError> {
        let weights = Weights::open(dir, config.family.class(), device, kind)?;
        let body = TensorNames::detect(&weights).body;
        let b = Builder::from_checkpoint(&weights).with_packing();
        for &layer in layers {
            let _ = Self::with_prefix(&b, body, layer, &config.layers[layer]);
        }
        b.check()?;
        let StateDict { mut parameters, buffers, mut packed, .. } = b.take_state_dict();
        let strip = |name: &mut String| *name = name.strip_prefix(body).unwrap_or(name).to_string();
        parameters.iter_mut().for_each(|(name, _)| strip(name));
        packed.iter_mut().for_each(|(name, _)| strip(name));
        Ok(StateDict { parameters, buffers, packed, linear: vec![] })
    }

    /// Keys and values `[N, G, D]` of the layer's inputs `x [N, d]`, normed and rotated.
    pub fn project(&self, x: &Tensor, rotation: &Rotation) -> (Tensor, Tensor) {
        self.projection.project(&self.input_norm.forward(x), rotation)
    }
}
