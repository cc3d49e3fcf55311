//! The state that training writes beside the weights of a checkpoint.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// The file of a checkpoint in which training notes its state.
pub const TRAIN_STATE: &str = "train_state.json";

/// Whether the drafter in `dir` was trained on answers with thinking on. None for a folder that training did not write, and
/// where the samples differed or did not tell.
pub fn trained_thinking(dir: &Path) -> Option<bool> {
    let text = fs::read_to_string(dir.join(TRAIN_STATE)).ok()?;
    serde_json::from_str::<Value>(&text).ok()?.get("thinking")?.as_bool()
}
