//! Names of models and datasets on the hub.

use std::fmt;
use std::path::Path;

use deepspec_core::env;

/// The branch if no revision is given.
const DEFAULT_REVISION: &str = "main";

/// The type of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RepoType {
    /// Weights, configuration and tokenizer.
    Model,
    /// Rows in data files.
    Dataset,
}

impl fmt::Display for RepoType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        })
    }
}

/// A repository of the hub at a revision.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Repo {
    /// Model or dataset.
    pub kind: RepoType,
    /// `owner/name`.
    pub id: String,
    /// A branch, tag or commit; None for the main branch.
    pub revision: Option<String>,
}

impl Repo {
    /// A model's repository.
    pub fn model(id: &str, revision: Option<&str>) -> Self {
        Self { kind: RepoType::Model, id: id.into(), revision: revision.map(Into::into) }
    }

    /// A dataset's repository.
    pub fn dataset(id: &str, revision: Option<&str>) -> Self {
        Self { kind: RepoType::Dataset, id: id.into(), revision: revision.map(Into::into) }
    }

    /// The revision, by default `main`.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(DEFAULT_REVISION)
    }

    /// Whether the revision is a full commit hash.
    pub(crate) fn is_pinned(&self) -> bool {
        is_commit_hash(self.revision())
    }

    /// The repository at `revision` as a type of the `hf-hub` crate.
    pub(crate) fn to_hf_repo(&self, revision: &str) -> hf_hub::Repo {
        let kind = match self.kind {
            RepoType::Model => hf_hub::RepoType::Model,
            RepoType::Dataset => hf_hub::RepoType::Dataset,
        };
        hf_hub::Repo::with_revision(self.id.clone(), kind, revision.into())
    }
}

/// `model owner/name` or `dataset owner/name`, then `@revision` if given.
impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.id)?;
        self.revision.as_ref().map_or(Ok(()), |revision| write!(f, "@{revision}"))
    }
}

/// Whether `text` has the form `owner/name` or `owner/name@revision` and is not a local file or
/// folder.
pub fn is_hub_id(text: &str) -> bool {
    let (id, revision) = split_revision(text);
    is_repo_name(id) && revision.is_none_or(is_safe_path) && !env::expand_home(text).exists()
}

pub(crate) fn split_revision(text: &str) -> (&str, Option<&str>) {
    text.split_once('@').map_or((text, None), |(id, revision)| (id, Some(revision)))
}

pub(crate) fn is_repo_name(id: &str) -> bool {
    let is_part = |part: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty()
            && part.chars().all(plain)
            && !part.starts_with(['.', '-'])
            && !part.ends_with(['.', '-'])
            && !part.contains("--")
            && !part.contains("..")
    };
    id.split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name))
}

/// Whether `text` is a relative path that stays inside the folder to which it is joined.
pub(crate) fn is_safe_path(text: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0', ':']);
    text.split('/').all(plain) && !text.chars().any(char::is_control) && Path::new(text).is_relative()
}

/// Whether `text` is a full commit hash.
pub(crate) fn is_commit_hash(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_from_paths() {
        for id in ["Qwen/Qwen3-4B", "a/b@v1.0", "a/b@refs/pr/3", "google-research-datasets/mbpp"] {
            assert!(is_hub_id(id), "{id}");
        }
        let paths =
            ["gpt2", "./a/b", "/a/b", "~/a", "a/b/c", "../b", "a/..", "a/", "", "a b/c", "a/b@", "a/b@../c"];
        for path in paths {
            assert!(!is_hub_id(path), "{path}");
        }
        let dir = std::env::current_dir().unwrap();
        assert!(dir.join("src/lib.rs").exists() && !is_hub_id("src/lib.rs"));
    }

    #[test]
    fn a_revision_stands_in_the_id_or_beside_it() {
        let parse = |text, revision| Repo::parse(RepoType::Model, text, revision);
        assert_eq!(parse("a/b", None).unwrap(), Repo::model("a/b", None));
        assert_eq!(parse("a/b@v1", None).unwrap(), Repo::model("a/b", Some("v1")));
        assert_eq!(parse("a/b", Some("v1")).unwrap(), parse("a/b@v1", Some("v1")).unwrap());
        let error = parse("a/b@v1", Some("v2")).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("v2"), "{error}");
        assert!(parse("gpt2", None).unwrap_err().to_string().contains("owner/name"));
    }
}
