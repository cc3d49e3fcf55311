//! Parts of the layouts of other tools that Eagle3 and P-EAGLE share.

use deepspec_checkpoint::{Drafter, TensorShapes};
use deepspec_core::Tap;

use super::Eagle3Norms;

/// Key of the target layers whose hidden states are captured, in the layouts of speculators and SpecForge.
pub const TAPS_KEY: &str = "eagle_aux_hidden_state_layer_ids";

/// Layers that SpecForge, vLLM and SGLang capture by default: the outputs of layers 1, N/2 − 1 and N − 4.
pub fn default_taps(layers: u64) -> Vec<Tap> {
    let layers = layers as i64;
    let ids = [1, layers / 2 - 1, layers - 4];
    let ascends = ids.windows(2).all(|pair| pair[0] < pair[1]);
    Tap::from_layer_ids(ids.into_iter().filter(|_| ascends)).unwrap_or_default()
}

/// Number of captured layers; three if the config does not say which.
pub fn captured_layers(drafter: &Drafter) -> usize {
    if drafter.taps.is_empty() { 3 } else { drafter.taps.len() }
}

/// Adds the shapes of the norms before `fc`.
pub fn add_fusion_norm_shapes(norms: Eagle3Norms, drafter: &Drafter, shapes: &mut TensorShapes) {
    let (states, width) = (captured_layers(drafter), drafter.hidden_size as usize);
    if norms.before_fc {
        shapes.push(("input_norm.weight".into(), vec![states * width]));
    }
    if norms.fc {
        shapes.extend((0..states).map(|i| (format!("fc_norm.{i}.weight"), vec![width])));
    }
}
