//! Repositories of the fake hub.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use deepspec_core::digest;

/// A repository at one commit.
#[derive(Clone)]
pub struct FakeRepo {
    pub(super) kind: &'static str,
    pub(super) id: String,
    pub(super) revisions: Vec<String>,
    pub(super) files: BTreeMap<String, (Vec<u8>, bool)>,
}

impl FakeRepo {
    /// A model repository on its main branch, without files.
    pub fn model(id: &str) -> Self {
        Self { kind: "models", id: id.into(), revisions: vec!["main".into()], files: BTreeMap::new() }
    }

    /// A dataset repository on its main branch, without files.
    pub fn dataset(id: &str) -> Self {
        Self { kind: "datasets", ..Self::model(id) }
    }

    /// Sets another branch or tag instead of `main`.
    pub fn at(mut self, revision: &str) -> Self {
        self.revisions = vec![revision.into()];
        self
    }

    /// Adds a file that is stored in git itself.
    pub fn file(mut self, path: &str, bytes: impl AsRef<[u8]>) -> Self {
        self.files.insert(path.into(), (bytes.as_ref().to_vec(), false));
        self
    }

    /// Adds a large file, whose ETag is its SHA-256.
    pub fn lfs(mut self, path: &str, bytes: impl AsRef<[u8]>) -> Self {
        self.files.insert(path.into(), (bytes.as_ref().to_vec(), true));
        self
    }

    /// Adds the files of a folder; safetensors files are added as large files.
    pub fn folder(mut self, dir: &Path) -> Self {
        for entry in fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display())) {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_string();
            if let Ok(bytes) = fs::read(&path) {
                let lfs = name.ends_with(".safetensors");
                self.files.insert(name, (bytes, lfs));
            }
        }
        self
    }

    /// Commit hash, which depends on the content.
    pub fn commit(&self) -> String {
        let mut text = self.id.clone();
        for (path, (bytes, _)) in &self.files {
            text.push_str(&format!("\n{path} {}", digest::sha256_of_bytes(bytes)));
        }
        digest::sha256_of_bytes(text.as_bytes())[..40].to_string()
    }

    pub(super) fn prefix(&self) -> String {
        if self.kind == "models" { self.id.clone() } else { format!("{}/{}", self.kind, self.id) }
    }

    pub(super) fn answers_to(&self, revision: &str) -> bool {
        revision == self.commit() || self.revisions.iter().any(|own| own == revision)
    }
}
