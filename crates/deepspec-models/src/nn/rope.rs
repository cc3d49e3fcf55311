//! Rotary embeddings of a stack of layers.

use deepspec_ops::kv_attention::AttentionPlan;
use deepspec_ops::{Rope, RopeSpec, Rotation};
use tch::{Device, Kind, Tensor};

use super::LayerSpec;

/// Rotary embeddings of a stack of layers, one per distinct setting.
pub struct RotaryEmbeddings {
    ropes: Vec<Rope>,
    /// Index into `ropes` for each layer.
    of_layer: Vec<usize>,
}

/// Rotations of N positions, for every layer.
pub struct Rotations<'a> {
    distinct: Vec<Rotation>,
    of_layer: &'a [usize],
}

impl RotaryEmbeddings {
    /// Embeddings of `layers` on `device`.
    pub fn new(layers: &[LayerSpec], device: Device) -> Self {
        let mut specs: Vec<&RopeSpec> = vec![];
        let of_layer = layers
            .iter()
            .map(|layer| {
                specs.iter().position(|spec| **spec == layer.rope).unwrap_or_else(|| {
                    specs.push(&layer.rope);
                    specs.len() - 1
                })
            })
            .collect();
        Self { ropes: specs.into_iter().map(|spec| Rope::new(spec, device)).collect(), of_layer }
    }

    /// Rotations of integer positions `[N]`.
    pub fn at(&self, positions: &Tensor, kind: Kind) -> Rotations<'_> {
        Rotations {
            distinct: self.ropes.iter().map(|rope| rope.at(positions, kind)).collect(),
            of_layer: &self.of_layer,
        }
    }

    /// Rotations of the rows of a plan. For a few rows, they come from a table by `index_select`. A GPU then
    /// runs two kernels instead of eight, and the CPU does not search for the largest position.
    pub fn for_plan(&self, plan: &AttentionPlan, kind: Kind) -> Rotations<'_> {
        let Some(end) = plan.in_place_position_end() else { return self.at(plan.positions(), kind) };
        Rotations {
            distinct: self
                .ropes
                .iter()
                .map(|rope| rope.at_positions_below(end as i64, plan.positions(), kind))
                .collect(),
            of_layer: &self.of_layer,
        }
    }
}

impl Rotations<'_> {
    /// The rotation of one layer.
    pub fn layer(&self, layer: usize) -> &Rotation {
        &self.distinct[self.of_layer[layer]]
    }
}
