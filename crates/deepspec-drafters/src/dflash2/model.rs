//! DFlash 2: a backbone with convolutions in its layers, and the selector behind it.

use deepspec_models::nn::{Builder, LayerHook};
use tch::Tensor;

use super::config::DFlash2Config;
use super::convolution::Convolutions;
use super::selector::PathSelector;
use crate::block_common::{Backbone, BlockDrafter, BlockSpec};
use crate::draft_model::DraftModel;

/// A DFlash 2 drafter.
pub type DFlash2 = DraftModel<DFlash2Parts>;

/// Backbone, convolutions and selector.
pub struct DFlash2Parts {
    backbone: Backbone,
    /// The convolutions of each layer.
    convolutions: Vec<LayerConvolutions>,
    pub(super) selector: PathSelector,
}

/// Convolutions around attention and around the MLP of one layer.
struct LayerConvolutions {
    attention: Convolutions,
    mlp: Convolutions,
}

impl LayerHook for LayerConvolutions {
    fn around_attention(&self, normed: &Tensor, attention: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor {
        self.attention.around(normed, attention)
    }

    fn around_mlp(&self, normed: &Tensor, mlp: &mut dyn FnMut(&Tensor) -> Tensor) -> Tensor {
        self.mlp.around(normed, mlp)
    }
}

impl DFlash2Parts {
    /// Asks for the tensors in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &DFlash2Config) -> Self {
        let (model, size) = (&config.decoder.model, config.blocks.block_size);
        let convolutions = |layer: usize| {
            let of = |half: &str| {
                let name = format!("layers.{layer}.{half}_conv");
                Convolutions::new(b, &name, model.hidden_size, config.convolution, size)
            };
            LayerConvolutions { attention: of("attention"), mlp: of("mlp") }
        };
        Self {
            backbone: Backbone::new(b, model),
            convolutions: (0..model.layers.len()).map(convolutions).collect(),
            selector: PathSelector::new(b, config),
        }
    }
}

impl BlockDrafter for DFlash2Parts {
    type State = ();

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn hook(&self, layer: usize) -> Option<&dyn LayerHook> {
        Some(&self.convolutions[layer])
    }

    fn blocks(config: &DFlash2Config) -> &BlockSpec {
        &config.blocks
    }

    fn step(
        model: &DFlash2,
        base: Tensor,
        hidden: &Tensor,
        previous: &Tensor,
        (): &mut (),
    ) -> (Tensor, Option<Tensor>) {
        let selector = &model.parts.selector;
        let features = selector.features(hidden, &selector.embed(previous));
        (selector.restrict(&base, &features), None)
    }

    fn features(model: &DFlash2, hidden: &Tensor, previous: &Tensor) -> Option<(Tensor, Tensor)> {
        let selector = &model.parts.selector;
        let embeddings = selector.embed(previous);
        let features = selector.features(hidden, &embeddings);
        Some((embeddings, features))
    }

    fn slot_logits(model: &DFlash2, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        let base = model.base_logits(hidden);
        match features {
            Some(features) => model.parts.selector.restrict(&base, features),
            None => base,
        }
    }
}
