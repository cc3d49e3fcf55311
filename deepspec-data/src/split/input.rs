//! Inputs of `split`: one dataset, or a mix of several from a YAML file.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use deepspec_core::cli::Verbosity;
use deepspec_core::{config, env, usage};
use deepspec_hub::{Hub, HubError, Repo, RepoType};
use serde::{Deserialize, Serialize};

use super::args::Args;
use super::roles::{RoleTarget, Roles};
use deepspec_datasets::rows::{DataFile, DatasetFiles};

/// A mix of several datasets in given proportions.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mix {
    sources: Vec<MixSource>,
}

/// One dataset of a mix.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MixSource {
    /// Prefix of its rows' ids.
    name: String,
    dataset: String,
    revision: Option<String>,
    config_name: Option<String>,
    split: Option<String>,
    /// Proportion of the output, relative to the weights of the other datasets.
    weight: f64,
    /// Roles of this dataset's speakers, in addition to `--role`.
    #[serde(default)]
    roles: BTreeMap<String, RoleTarget>,
}

/// The dataset's arguments, for the report.
#[derive(Debug, Clone, Serialize)]
pub struct Origin {
    /// Hub id or local path.
    pub dataset: String,
    /// Branch, tag or commit on the hub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Configuration on the hub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_name: Option<String>,
    /// Split on the hub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// The resolved commit of a dataset on the hub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
}

/// One dataset to split.
pub struct Input {
    /// Name of the dataset in a mix; None if there is no mix.
    pub name: Option<String>,
    /// The dataset's arguments.
    pub origin: Origin,
    /// Files of the dataset.
    pub source: DatasetFiles,
    /// Roles of the dataset's speakers.
    pub roles: Roles,
    /// Speaker-to-role map as the user gave it. Roles in the mix override roles of `--role`.
    pub given: BTreeMap<String, RoleTarget>,
    /// Proportion of the output, relative to the weights of the other datasets.
    pub weight: f64,
}

/// Opens the datasets of the arguments, and downloads them from the hub if needed.
pub fn open_inputs(args: &Args, verbosity: Verbosity) -> anyhow::Result<Vec<Input>> {
    let given: BTreeMap<String, RoleTarget> = args.role.iter().cloned().collect();
    let path = env::expand_home(&args.dataset);
    let is_mix = path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
    if !is_mix {
        let mut origin = Origin {
            dataset: args.dataset.clone(),
            revision: args.revision.clone(),
            config_name: args.config_name.clone(),
            split: args.split.clone(),
            commit: None,
        };
        let source = open(&mut origin, "--dataset", verbosity)?;
        let roles = Roles::new(given.clone(), args.drop_system);
        return Ok(vec![Input { name: None, origin, source, roles, given, weight: 1.0 }]);
    }
    let pins =
        [("--revision", &args.revision), ("--config-name", &args.config_name), ("--split", &args.split)];
    if let Some((flag, _)) = pins.iter().find(|(_, value)| value.is_some()) {
        usage!("{flag} goes with one dataset; in a mix, write it into {}", args.dataset);
    }
    let mix: Mix = config::load(&path, &[])?;
    check(&mix, &args.dataset)?;
    let input = |part: MixSource| {
        let MixSource { name, dataset, revision, config_name, split, weight, roles } = part;
        let mut origin = Origin { dataset, revision, config_name, split, commit: None };
        let source = open(&mut origin, &format!("{}: source `{name}`:", args.dataset), verbosity)?;
        let given: BTreeMap<String, RoleTarget> = given.clone().into_iter().chain(roles).collect();
        let roles = Roles::new(given.clone(), args.drop_system);
        Ok(Input { name: Some(name), origin, source, roles, given, weight })
    };
    mix.sources.into_iter().map(input).collect()
}

fn check(mix: &Mix, file: &str) -> anyhow::Result<()> {
    if mix.sources.is_empty() {
        usage!("{file}: `sources`: the mix has no sources");
    }
    let mut names = HashSet::new();
    for (at, MixSource { name, weight, .. }) in mix.sources.iter().enumerate() {
        if name.is_empty() || name.contains('/') {
            usage!(
                "{file}: `sources[{at}].name`: `{name}` goes before ids and a `/`; give a name without one"
            );
        }
        if !names.insert(name) {
            usage!("{file}: `sources[{at}].name`: `{name}` was used before; ids would not be unique");
        }
        if !(weight.is_finite() && *weight > 0.0) {
            usage!("{file}: `sources[{at}].weight`: {weight} is not above 0; leave the source out instead");
        }
    }
    Ok(())
}

/// Opens the dataset of `origin`; `what` precedes its name in messages.
fn open(origin: &mut Origin, what: &str, verbosity: Verbosity) -> anyhow::Result<DatasetFiles> {
    let Origin { dataset, revision, config_name, split, commit } = origin;
    // A name with a data file's suffix is a local file, not a hub id.
    let is_file_name = DataFile::new(Path::new(dataset.as_str()).into()).is_some();
    if !is_file_name && deepspec_hub::is_hub_id(dataset) {
        let as_id = |source| HubError::with_path_hint(source, dataset).report();
        let repo = Repo::parse(RepoType::Dataset, dataset, revision.as_deref()).map_err(as_id)?;
        let hub = Hub::from_env(verbosity).map_err(HubError::report)?;
        let files = hub.dataset(&repo, config_name.as_deref(), split.as_deref());
        let source = DatasetFiles::from_files(files.map_err(as_id)?)?;
        *commit = Some(hub.commit(&repo).map_err(as_id)?);
        return Ok(source);
    }
    let pins = [("revision", revision), ("config name", config_name), ("split", split)];
    if let Some((pin, _)) = pins.iter().find(|(_, value)| value.is_some()) {
        usage!(
            "{what} {dataset}: a {pin} goes with a dataset of the hub, and this is a local file or folder"
        );
    }
    DatasetFiles::open(dataset)
}
