//! Settings that a drafter shares with the checkpoint that its training starts from.

use std::fmt::Display;

use deepspec_models::ModelConfig;

/// Settings that decide whether weights can be loaded.
#[derive(Default)]
pub struct WarmStart {
    settings: Vec<Setting>,
    /// Prefixes of parameters that may stay random, because the other drafter lacks them.
    pub may_be_fresh: Vec<&'static str>,
}

/// A setting that shapes the weights, in the checkpoint and in the recipe.
struct Setting {
    key: &'static str,
    there: String,
    here: String,
}

impl WarmStart {
    /// Requires equal values.
    pub fn compare<T: Display>(&mut self, key: &'static str, there: T, here: T) {
        self.settings.push(Setting { key, there: there.to_string(), here: here.to_string() });
    }

    /// Requires equal sizes and equal layers.
    pub(super) fn decoders(&mut self, there: &ModelConfig, here: &ModelConfig) {
        self.compare("family", there.family, here.family);
        self.compare("hidden_size", there.hidden_size, here.hidden_size);
        self.compare("vocab_size", there.vocab_size, here.vocab_size);
        self.compare("num_draft_layers", there.layers.len(), here.layers.len());
        if let Some((there, here)) = there.layers.iter().zip(&here.layers).find(|(there, here)| there != here)
        {
            self.compare("intermediate_size", there.intermediate_size, here.intermediate_size);
            self.compare("attention", there.attention, here.attention);
            self.compare("rope", there.rope, here.rope);
            self.compare("rms_norm_eps", there.eps, here.eps);
        }
    }

    /// Settings that differ, one text each.
    pub(super) fn differences(&self) -> Vec<String> {
        let differing = self.settings.iter().filter(|setting| setting.there != setting.here);
        differing.map(|Setting { key, there, here }| format!("{key} {there} there, {here} here")).collect()
    }
}
