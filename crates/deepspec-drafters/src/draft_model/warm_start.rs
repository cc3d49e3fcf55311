//! Compares the settings of a recipe with those of the checkpoint that training starts from.

use std::fmt::Display;

use deepspec_models::ModelConfig;
use deepspec_models::nn::LayerSpec;

/// Collects settings that must be equal for the weights to be loaded.
#[derive(Default)]
pub struct WarmStartCheck {
    settings: Vec<Setting>,
    /// Prefixes of parameters that stay random if the checkpoint lacks them.
    pub may_stay_random: Vec<&'static str>,
}

/// A setting's values in the checkpoint (`there`) and in the recipe (`here`).
struct Setting {
    key: &'static str,
    there: String,
    here: String,
}

impl WarmStartCheck {
    /// Requires that checkpoint and recipe have equal values of a setting.
    pub fn compare<T: Display>(&mut self, key: &'static str, there: T, here: T) {
        self.settings.push(Setting { key, there: there.to_string(), here: here.to_string() });
    }

    /// Requires equal sizes and layers of the decoders.
    pub(crate) fn compare_decoders(&mut self, there: &ModelConfig, here: &ModelConfig) {
        self.compare("family", there.family, here.family);
        self.compare("hidden_size", there.hidden_size, here.hidden_size);
        self.compare("vocab_size", there.vocab_size, here.vocab_size);
        self.compare("num_draft_layers", there.layers.len(), here.layers.len());
        if let Some((there, here)) = there.layers.iter().zip(&here.layers).find(|(there, here)| there != here)
        {
            self.compare("intermediate_size", there.intermediate_size, here.intermediate_size);
            let experts = |layer: &LayerSpec| layer.experts.map_or("none".into(), |own| own.to_string());
            self.compare("experts", experts(there), experts(here));
            self.compare("attention", there.attention, here.attention);
            self.compare("rope", there.rope, here.rope);
            self.compare("rms_norm_eps", there.eps, here.eps);
            self.compare("values", format!("{:?}", there.value), format!("{:?}", here.value));
        }
    }

    /// One text per setting that differs.
    pub(crate) fn differences(&self) -> Vec<String> {
        let differing = self.settings.iter().filter(|setting| setting.there != setting.here);
        differing.map(|Setting { key, there, here }| format!("{key} {there} there, {here} here")).collect()
    }
}
