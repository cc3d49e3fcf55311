//! A copy of the tiny target, and recipes that point to it.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod fake_vllm;

use std::fs;
use std::path::{Path, PathBuf};

use deepspec_capture::{StatesError, TargetSpec};
use deepspec_core::cli::Verbosity;
use deepspec_drafters::Recipe;
use tempfile::TempDir;

/// A temporary folder with its own copy of the tiny target, so that a test may change it.
pub struct Bench {
    dir: TempDir,
}

impl Bench {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("target");
        fs::create_dir(&target).unwrap();
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
        for file in fs::read_dir(tiny).unwrap().map(|entry| entry.unwrap().path()) {
            fs::copy(&file, target.join(file.file_name().unwrap())).unwrap();
        }
        Self { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A recipe with `key=value` overrides.
    pub fn recipe(&self, overrides: &[&str]) -> Recipe {
        let text = format!(
            "name: t\ntarget: {{model: '{}', layer_ids: [embedding, 1, 4]}}\n\
             drafter: {{dspark: {{block_size: 3, num_draft_layers: 1, mask_token_id: 1023}}}}\n\
             data: {{states: {{cache: unused}}, chat_template: qwen, max_length: 300}}\n",
            self.path("target").display()
        );
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        let path = self.path("recipe.yaml");
        fs::write(&path, text).unwrap();
        deepspec_drafters::load_recipe(&path, &overrides).unwrap()
    }

    pub fn source(&self, overrides: &[&str]) -> Result<TargetSpec, StatesError> {
        TargetSpec::open(&self.recipe(overrides), Verbosity::Quiet)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// Replaces text within a file of the target.
    pub fn edit(&self, file: &str, from: &str, to: &str) {
        let path = self.path("target").join(file);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{file} has no {from}");
        fs::write(path, text.replace(from, to)).unwrap();
    }
}
