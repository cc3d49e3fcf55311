//! Finds or downloads the files with a suite's rows.

use std::path::PathBuf;

use deepspec_core::atomic::FileError;
use deepspec_core::cli::{UsageError, Verbosity, one_line};
use deepspec_core::digest;
use deepspec_hub::{Glob, Hub, HubError, Repo, RepoType};

use crate::suites::plan::{DatasetPart, RowSource, SuitePlan};
use crate::suites::record::{Origin, SourceFile};

/// Provides files from the hub or from disk.
pub struct Fetcher {
    verbosity: Verbosity,
    /// Created at first use, so that local files need no cache folder.
    hub: Option<Hub>,
}

impl Fetcher {
    /// A fetcher that has not contacted the hub yet.
    pub fn new(verbosity: Verbosity) -> Self {
        Self { verbosity, hub: None }
    }

    /// The files of a suite in order, and their origin for the record.
    ///
    /// # Errors
    /// Fails if the hub is unreachable or refuses, if the dataset has no such part, or if a local
    /// file cannot be read.
    pub fn fetch(&mut self, plan: &SuitePlan) -> anyhow::Result<(Vec<PathBuf>, Origin)> {
        match &plan.source {
            RowSource::Files(files) => Ok((files.clone(), origin_of(files)?)),
            RowSource::Hub { dataset, revision, part } => self
                .fetch_from_hub(dataset, revision.as_deref(), part)
                .map_err(|error| add_source_advice(&error, &plan.name)),
        }
    }

    fn fetch_from_hub(
        &mut self,
        dataset: &str,
        revision: Option<&str>,
        part: &DatasetPart,
    ) -> anyhow::Result<(Vec<PathBuf>, Origin)> {
        let repo = Repo::parse(RepoType::Dataset, dataset, revision).map_err(HubError::report)?;
        let hub = match &mut self.hub {
            Some(hub) => hub,
            none => none.insert(Hub::from_env(self.verbosity).map_err(HubError::report)?),
        };
        let files = match part {
            DatasetPart::Split(config, split) => {
                hub.dataset(&repo, config.as_deref(), Some(split)).map_err(HubError::report)?
            }
            DatasetPart::Files(patterns) => {
                let mut files = vec![];
                for pattern in patterns {
                    for path in matching_paths(hub, &repo, pattern)? {
                        files.push(hub.fetch(&repo, &path).map_err(HubError::report)?);
                    }
                }
                files
            }
        };
        let revision = hub.commit(&repo).map_err(HubError::report)?;
        Ok((files, Origin::Hub { dataset: repo.id, revision }))
    }
}

/// Paths that match a pattern, sorted. A pattern without a wildcard is returned without a check. If
/// the hub cannot list the files, its error is returned, because the record must cover all files.
fn matching_paths(hub: &Hub, repo: &Repo, pattern: &str) -> anyhow::Result<Vec<String>> {
    if !pattern.contains(['*', '?', '[']) {
        return Ok(vec![pattern.into()]);
    }
    let glob = Glob::new(pattern);
    let files = hub.files(repo).map_err(HubError::report)?;
    let found: Vec<String> = files.into_iter().filter(|path| glob.matches(path)).collect();
    // Requesting the pattern itself makes the hub's error list the existing files.
    Ok(if found.is_empty() { vec![pattern.into()] } else { found })
}

/// The hub's error, extended by a workaround.
fn add_source_advice(error: &anyhow::Error, suite: &str) -> anyhow::Error {
    let told = format!("{}; --source {suite}=FILE reads the dataset's file from disk", one_line(error));
    if error.is::<UsageError>() { UsageError(told).into() } else { anyhow::anyhow!(told) }
}

/// Origin of local files.
///
/// # Errors
/// Fails if one of them cannot be read.
fn origin_of(files: &[PathBuf]) -> Result<Origin, FileError> {
    let one = |path: &PathBuf| Ok(SourceFile { path: path.clone(), sha256: digest::sha256_of_file(path)? });
    files.iter().map(one).collect::<Result<_, _>>().map(Origin::Files)
}
