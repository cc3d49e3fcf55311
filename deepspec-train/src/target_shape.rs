//! Reads the sizes of a target without its weights.

use std::path::Path;

use deepspec_core::cli::Verbosity;
use deepspec_core::env;
use deepspec_drafters::Recipe;
use deepspec_hub::{Hub, HubError, HubOptions, ModelFiles, Repo, RepoType, model_dir};
use deepspec_models::{ModelConfig, ModelError, SHAPES_WITHOUT_FAMILY, Weights, families};
use deepspec_ops::HOST;

/// Hub ids and config.json of the targets in `configs/`; see
/// `configs/shapes/README.md`.
fn built_in_configs() -> impl Iterator<Item = (&'static str, &'static str)> {
    families().flat_map(|family| family.shapes).chain(SHAPES_WITHOUT_FAMILY).copied()
}

const CONFIG_FILE: &str = "config.json";

/// A target's architecture and the place where its config.json was found.
pub struct TargetShape {
    /// The architecture.
    pub config: ModelConfig,
    /// Where config.json was found, for messages.
    pub origin: String,
    /// Whether the target's weights are on this machine.
    pub has_weights: bool,
}

impl TargetShape {
    /// Reads the config.json in the target's folder or in the hub cache. Without one, uses the
    /// built-in sizes, and without those downloads the hub's config.json.
    ///
    /// # Errors
    /// Fails if no config.json is found, or if it describes an unknown architecture.
    pub fn resolve(recipe: &Recipe, verbosity: Verbosity) -> anyhow::Result<Self> {
        let (target, runs_target) = (&recipe.target, recipe.data.states.runs_target());
        let needs_layers = recipe.drafter.reads_target_layers();
        let wanted = match recipe.data.states.come_from_engine() && !needs_layers {
            true => ModelFiles::WithoutLayers,
            false => ModelFiles::Whole,
        };
        let place = env::expand_home(&target.model);
        if place.is_dir() || place.is_file() {
            let dir = model_dir(&target.model, target.revision.as_deref(), verbosity);
            return Ok(Self::read_folder(&dir.map_err(HubError::report)?, runs_target)?);
        }
        let repo = Repo::parse(RepoType::Model, &target.model, target.revision.as_deref())
            .map_err(HubError::report)?;
        let settings = HubOptions::from_env(verbosity).map_err(HubError::report)?;
        let offline = HubOptions { offline: Some("looking into the cache alone"), ..settings.clone() };
        let cache = Hub::new(offline);
        if let Some(dir) = cache.fetch(&repo, CONFIG_FILE).ok().as_deref().and_then(Path::parent) {
            let has_weights = cache.model_files(&repo, wanted).is_ok();
            return Ok(Self { has_weights, ..Self::read_folder(dir, runs_target)? });
        }
        if let Some((id, text)) = built_in_configs().find(|(id, _)| *id == target.model) {
            let map = serde_json::from_str(text)?;
            let origin = format!("built-in sizes of {id}");
            let parse = if runs_target { ModelConfig::parse } else { ModelConfig::parse_any };
            return Ok(Self { config: parse(Path::new(&origin), map)?, origin, has_weights: false });
        }
        let fetched = Hub::new(settings).fetch(&repo, CONFIG_FILE);
        let path = fetched.map_err(|error| error.with_path_hint(&target.model).report())?;
        Ok(Self::read_folder(path.parent().unwrap_or(&path), runs_target)?)
    }

    /// A target that runs in this program needs a family here.
    fn read_folder(dir: &Path, runs_target: bool) -> Result<Self, ModelError> {
        Ok(Self {
            config: if runs_target { ModelConfig::load(dir)? } else { ModelConfig::load_any(dir)? },
            origin: dir.join(CONFIG_FILE).display().to_string(),
            has_weights: Weights::open_outer_tensors(dir, "the target", HOST).is_ok(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_sizes_are_read() {
        let layers = [36, 36, 40, 48, 48, 24, 32, 40, 43];
        assert_eq!(built_in_configs().count(), layers.len());
        for ((id, text), layers) in built_in_configs().zip(layers) {
            let map = serde_json::from_str(text).unwrap();
            let config = ModelConfig::parse_any(Path::new(id), map).unwrap();
            assert_eq!(config.layers.len(), layers, "{id}");
        }
    }
}
