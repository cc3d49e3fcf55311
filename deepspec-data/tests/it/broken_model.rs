//! A model with damaged weights gives no answers, and the error does not blame the rows.

use std::fs;
use std::path::Path;

use crate::process::{lines, text, tiny};
use crate::regenerate::{question, regenerate};

/// A copy of the embedded target whose last tensor is NaN.
pub(crate) fn broken(dir: &Path) -> String {
    let model = dir.join("model");
    fs::create_dir(&model).unwrap();
    for file in fs::read_dir(tiny()).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, model.join(file.file_name().unwrap())).unwrap();
    }
    let weights = model.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 64..].fill(0xff);
    fs::write(&weights, bytes).unwrap();
    text(&model)
}

#[test]
fn a_model_that_answers_nothing_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let model = broken(dir.path());
    let data: Vec<String> = (0..6).map(|id| question(id, "What is 3 + 4?")).collect();
    let (input, output) = (lines(dir.path(), "in.jsonl", &data), dir.path().join("out.jsonl"));
    let embedded = ["--local-model", &model, "--device", "cpu", "--max-tokens", "8", "--max-num-seqs", "2"];
    let ended = regenerate(&input, &output, &embedded);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("the model tiny answers nothing"), "{ended:?}");
    assert!(ended.stderr.contains("not finite; its weights are damaged"), "{ended:?}");
    assert!(!dir.path().join("out_error.jsonl").exists(), "the rows are not to blame");
}
