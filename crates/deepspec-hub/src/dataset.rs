//! The data files of a dataset by configuration and split.

use std::fs;
use std::path::PathBuf;

use crate::hub::RepoListing;
use crate::layout::{Config, configs_from_files, parse_shard_name};
use crate::{Hub, HubError, Repo};

/// The dataset card.
const DATASET_CARD: &str = "README.md";

impl Hub {
    /// Local paths of the data files of a dataset's configuration and split, in order. Parquet is
    /// preferred to JSON lines, JSON lines to JSON.
    ///
    /// Without `config`, the only configuration or the dataset's default is used; without `split`,
    /// the only split or `train`.
    ///
    /// # Errors
    /// As [`Hub::fetch`], and if the configuration or split is unknown or ambiguous, or if
    /// the cache is used and lacks files of the split.
    pub fn dataset(
        &self,
        repo: &Repo,
        config: Option<&str>,
        split: Option<&str>,
    ) -> Result<Vec<PathBuf>, HubError> {
        let listing = self.listing(repo)?;
        let partial = listing.all.is_none();
        let has_card = listing.known_files().iter().any(|file| file == DATASET_CARD);
        let card = if has_card { fs::read_to_string(self.fetch(repo, DATASET_CARD)?).ok() } else { None };
        let configs =
            configs_from_files(card.as_deref(), listing.known_files(), partial).or_else(|problem| {
                tracing::warn!("{repo}: {DATASET_CARD}: {problem}; going by file names instead");
                configs_from_files(None, listing.known_files(), partial)
            });
        let configs = configs.unwrap_or_default();
        if let (true, Some(reason)) = (configs.is_empty(), &listing.local) {
            return Err(self.not_cached_error(&format!("data of {repo}"), reason));
        }
        let config = choose_config(repo, &listing, &configs, config)?;
        if let (true, Some(reason)) = (config.splits.is_empty(), &listing.local) {
            return Err(
                self.not_cached_error(&format!("data of {repo}, configuration {}", config.name), reason)
            );
        }
        let (split, files) = choose_split(repo, config, split)?;
        check_all_shards(repo, files)?;
        if let Some(reason) = &listing.local {
            let unmatched = config.unmatched.iter().filter(|(of, _)| of == split).map(|(_, pattern)| pattern);
            let unmatched: Vec<&str> = unmatched.map(String::as_str).collect();
            if partial && !unmatched.is_empty() {
                return Err(self.not_cached_error(&format!("{} of {repo}", unmatched.join(", ")), reason));
            }
            let missing: Vec<String> =
                files.iter().filter(|file| !listing.files.contains(file)).cloned().collect();
            if !missing.is_empty() {
                return Err(HubError::Incomplete { repo: repo.clone(), missing, total: files.len() });
            }
            if partial {
                tracing::warn!(
                    "{repo}: {reason}, and nothing in the cache says which files it has; the {} that are there are \
                     taken for all of split {split}",
                    files.len()
                );
            }
        }
        files.iter().map(|file| self.fetch(repo, file)).collect()
    }
}

fn choose_config<'a>(
    repo: &Repo,
    listing: &RepoListing,
    configs: &'a [Config],
    wanted: Option<&str>,
) -> Result<&'a Config, HubError> {
    let known = || configs.iter().map(|config| config.name.clone()).collect();
    if configs.is_empty() {
        let (place, files) = (wanted.unwrap_or_default().to_string(), listing.files.clone());
        return Err(HubError::NoData { repo: repo.clone(), place, files });
    }
    if let Some(wanted) = wanted {
        return configs.iter().find(|config| config.name == wanted).ok_or_else(|| HubError::UnknownConfig {
            repo: repo.clone(),
            wanted: wanted.into(),
            known: known(),
        });
    }
    let default = configs.iter().find(|config| config.is_default);
    match (configs, default) {
        ([only], _) => Ok(only),
        (_, Some(default)) => Ok(default),
        _ => Err(HubError::WhichConfig { repo: repo.clone(), known: known() }),
    }
}

fn choose_split<'a>(
    repo: &Repo,
    config: &'a Config,
    wanted: Option<&str>,
) -> Result<(&'a str, &'a [String]), HubError> {
    let (repo, name) = (repo.clone(), config.name.clone());
    let known = || config.splits.iter().map(|(split, _)| split.clone()).collect();
    let find = |wanted: &str| config.splits.iter().find(|(split, _)| split == wanted);
    let chosen = match (wanted, config.splits.as_slice()) {
        (Some(wanted), _) => find(wanted).ok_or_else(|| HubError::UnknownSplit {
            repo: Box::new(repo),
            config: name,
            wanted: wanted.into(),
            known: known(),
        })?,
        (None, [only]) => only,
        (None, _) => {
            find("train").ok_or_else(|| HubError::WhichSplit { repo, config: name, known: known() })?
        }
    };
    Ok((&chosen.0, &chosen.1))
}

/// Checks that the list has every shard of a `split-00000-of-00002` set. A partly filled cache may
/// lack some.
fn check_all_shards(repo: &Repo, files: &[String]) -> Result<(), HubError> {
    let Some((split, _, total)) = files.first().and_then(|file| parse_shard_name(file)) else {
        return Ok(());
    };
    let numbers: Vec<usize> = files
        .iter()
        .filter_map(|file| parse_shard_name(file))
        .filter(|set| set.2 == total)
        .map(|set| set.1)
        .collect();
    let missing: Vec<String> = (0..total)
        .filter(|number| !numbers.contains(number))
        .map(|number| format!("{split}-{number:05}-of-{total:05}"))
        .collect();
    if missing.is_empty() { Ok(()) } else { Err(HubError::Incomplete { repo: repo.clone(), missing, total }) }
}
