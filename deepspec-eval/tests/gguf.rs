//! A target in a GGUF file gives the same results as its folder.

mod common;

use std::path::Path;

use common::gguf::target_gguf;
use common::{answers, assert_refused, deepspec_eval, repository, results, run_ok};

#[test]
fn a_target_in_a_gguf_answers_as_its_folder_does() {
    let dir = tempfile::tempdir().unwrap();
    let [file, folder, packed, cache] =
        ["target.gguf", "folder", "packed", "cache"].map(|name| dir.path().join(name));
    target_gguf(&file);
    let draft = repository("assets/tiny-dspark");
    let draft = draft.to_str().unwrap();
    let limits = ["--suite", "smoke-code", "--limit", "6", "--max-new-tokens", "48"];
    run_ok(draft, &folder, &limits);

    let suites = repository("eval_datasets");
    let mut args = vec!["run", "--quiet", "--device", "cpu", "--dtype", "float32"];
    args.extend(["--target", file.to_str().unwrap(), "--suites-dir", suites.to_str().unwrap()]);
    args.extend(["--draft", draft, "--output-dir", packed.to_str().unwrap()]);
    args.extend(limits);
    // A private cache for unpacked files; the machine's own cache is not touched.
    let run = common::deepspec_eval_in(&args, &[("DEEPSPEC_CACHE", cache.to_str().unwrap())]);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert_eq!(answers(&packed), answers(&folder));
    let tau = |dir| results(dir)["suites"][0]["metrics"]["accepted_length"].as_f64().unwrap();
    assert_eq!(tau(&packed), tau(&folder));
    assert_eq!(std::fs::read_dir(cache.join("gguf")).unwrap().count(), 1);
}

#[test]
fn files_that_are_no_models_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("notes.txt");
    std::fs::write(&file, "not a model").unwrap();
    let draft = repository("assets/tiny-dspark");
    let out = dir.path().join("out");
    let run = |target: &Path| {
        let (draft, out) = (draft.to_str().unwrap(), out.to_str().unwrap());
        deepspec_eval(&["run", "--target", target.to_str().unwrap(), "--draft", draft, "--output-dir", out])
    };
    assert_refused(&run(&file), 2, &["notes.txt", "does not begin with `GGUF`"]);
    assert_refused(&run(&dir.path().join("absent.gguf")), 2, &["absent.gguf", "no such folder or file"]);
}
