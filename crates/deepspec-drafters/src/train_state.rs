//! `train_state.json`, which training writes into a checkpoint.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// Name of the file with the training state in a checkpoint.
pub const TRAIN_STATE_FILE: &str = "train_state.json";

/// Whether the drafter in `dir` was trained on answers with thinking on. None if the folder has no training state, or
/// the state has no such entry.
pub fn trained_with_thinking(dir: &Path) -> Option<bool> {
    let text = fs::read_to_string(dir.join(TRAIN_STATE_FILE)).ok()?;
    serde_json::from_str::<Value>(&text).ok()?.get("thinking")?.as_bool()
}
