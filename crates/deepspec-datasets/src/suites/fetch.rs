//! Finds the files that a suite's rows are in.

use std::path::PathBuf;

use deepspec_core::atomic::FileError;
use deepspec_core::cli::{UsageError, Verbosity, one_line};
use deepspec_core::digest;
use deepspec_hub::{Glob, Hub, HubError, Kind, Repo};

use crate::suites::plan::{Place, Plan, Wanted};
use crate::suites::record::{Origin, SourceFile};

/// Gets files, from the hub or from disk.
pub struct Fetcher {
    verbosity: Verbosity,
    /// Made when the first suite asks for it, so that files on disk need no cache folder.
    hub: Option<Hub>,
}

impl Fetcher {
    /// Asks nobody yet.
    pub fn new(verbosity: Verbosity) -> Self {
        Self { verbosity, hub: None }
    }

    /// The files of a suite in their order, and what to record of them.
    ///
    /// # Errors
    /// If the hub cannot be reached or refuses, the dataset has no such part, or a file on disk cannot be read.
    pub fn fetch(&mut self, plan: &Plan) -> anyhow::Result<(Vec<PathBuf>, Origin)> {
        match &plan.wanted {
            Wanted::Files(files) => Ok((files.clone(), origin_of(files)?)),
            Wanted::Hub { dataset, revision, place } => {
                self.ask_hub(dataset, revision.as_deref(), place).map_err(|error| advise(&error, &plan.name))
            }
        }
    }

    fn ask_hub(
        &mut self,
        dataset: &str,
        revision: Option<&str>,
        place: &Place,
    ) -> anyhow::Result<(Vec<PathBuf>, Origin)> {
        let repo = Repo::parse(Kind::Dataset, dataset, revision).map_err(HubError::report)?;
        let hub = match &mut self.hub {
            Some(hub) => hub,
            none => none.insert(Hub::from_env(self.verbosity).map_err(HubError::report)?),
        };
        let files = match place {
            Place::Split(config, split) => {
                hub.dataset(&repo, config.as_deref(), Some(split)).map_err(HubError::report)?
            }
            Place::Files(patterns) => {
                let mut files = vec![];
                for pattern in patterns {
                    for path in matching(hub, &repo, pattern)? {
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

/// The paths of a pattern, sorted; of one without a wildcard, itself, whether it is there or not. What a suite was made
/// from is recorded, so that it must be all files: where they are not known, the hub's refusal is passed on.
fn matching(hub: &Hub, repo: &Repo, pattern: &str) -> anyhow::Result<Vec<String>> {
    if !pattern.contains(['*', '?', '[']) {
        return Ok(vec![pattern.into()]);
    }
    let glob = Glob::new(pattern);
    let files = hub.files(repo).map_err(HubError::report)?;
    let found: Vec<String> = files.into_iter().filter(|path| glob.matches(path)).collect();
    // Asking for the pattern itself makes the hub say which files there are.
    Ok(if found.is_empty() { vec![pattern.into()] } else { found })
}

/// The hub's refusal, with the way around it.
fn advise(error: &anyhow::Error, suite: &str) -> anyhow::Error {
    let told = format!("{}; --source {suite}=FILE reads the dataset's file from disk", one_line(error));
    if error.is::<UsageError>() { UsageError(told).into() } else { anyhow::anyhow!(told) }
}

/// The origin of files on disk.
///
/// # Errors
/// If one of them cannot be read.
fn origin_of(files: &[PathBuf]) -> Result<Origin, FileError> {
    let one = |path: &PathBuf| Ok(SourceFile { path: path.clone(), sha256: digest::file(path)? });
    files.iter().map(one).collect::<Result<_, _>>().map(Origin::Files)
}
