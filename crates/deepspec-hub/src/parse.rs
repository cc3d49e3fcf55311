//! Parses hub ids from arguments and settings.

use crate::HubError;
use crate::repo::{Repo, RepoType, is_hub_id, is_repo_name, is_safe_path, split_revision};

/// Suffixes that mark a name as a local file rather than a hub id.
const FILE_SUFFIXES: [&str; 6] = [".gguf", ".safetensors", ".json", ".jsonl", ".parquet", ".yaml"];

impl Repo {
    /// Parses `owner/name` or `owner/name@revision`; `revision` is a separate setting, such as a
    /// flag.
    ///
    /// # Errors
    /// If the text has another form, or if the two revisions differ.
    pub fn parse(kind: RepoType, text: &str, revision: Option<&str>) -> Result<Self, HubError> {
        let (id, own) = split_revision(text);
        let is_file = FILE_SUFFIXES.iter().any(|end| id.to_ascii_lowercase().ends_with(end));
        if !is_repo_name(id) || is_file {
            return Err(HubError::NotAnId { kind, text: text.into() });
        }
        match (own, revision) {
            (Some(own), Some(other)) if own != other => {
                Err(HubError::TwoRevisions { text: text.into(), other: other.into() })
            }
            _ => Ok(Self { kind, id: id.into(), revision: own.or(revision).map(Into::into) }),
        }
    }

    /// The repository of a model that is named by its hub id; `None` for a path.
    pub fn of_model_name(name: &str, revision: Option<&str>) -> Option<Self> {
        is_hub_id(name).then(|| Self::parse(RepoType::Model, name, revision).ok()).flatten()
    }

    /// Refuses names that would lead outside the cache or to another URL.
    pub(crate) fn check(&self) -> Result<(), HubError> {
        if !is_repo_name(&self.id) {
            return Err(HubError::NotAnId { kind: self.kind, text: self.id.clone() });
        }
        if !is_safe_path(self.revision()) || self.revision().contains(['?', '#', '%']) {
            return Err(HubError::NoRevision { repo: self.clone() });
        }
        Ok(())
    }
}
