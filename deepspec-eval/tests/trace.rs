//! `trace`: the shown tokens add up to the answer, and rejected drafts are marked.

mod common;

use common::{assert_refused, deepspec_eval, run_ok, target_dir, write_bigram_drafter};
use serde_json::Value;

const PROMPT: &str = "Tom has 3 apples and buys 4 more. How many apples has Tom?";

fn trace(draft: &str, more: &[&str]) -> String {
    let target = target_dir();
    let mut args = vec!["trace", PROMPT, "--target", target.to_str().unwrap(), "--draft", draft];
    args.extend(["--device", "cpu", "--max-new-tokens", "40", "--temperature", "0"]);
    args.extend(more);
    let output = deepspec_eval(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn answer(trace: &Value) -> String {
    let mut text = trace["first"].as_str().unwrap().to_string();
    for cycle in trace["cycles"].as_array().unwrap() {
        let accepted = cycle["accepted"].as_array().unwrap().iter();
        accepted.chain([&cycle["bonus"]]).filter_map(Value::as_str).for_each(|token| text.push_str(token));
    }
    text
}

#[test]
fn a_generation_is_shown_cycle_by_cycle() {
    let dir = tempfile::tempdir().unwrap();
    let (corpus, draft) = (dir.path().join("corpus"), dir.path().join("drafter"));
    run_ok("none", &corpus, &["--suite", "smoke-math", "--limit", "8", "--max-new-tokens", "64"]);
    write_bigram_drafter(&draft, common::answers(&corpus).values());
    let draft = draft.to_str().unwrap();

    let shown: Value = serde_json::from_str(&trace(draft, &["--json"])).unwrap();
    let itself: Value = serde_json::from_str(&trace(target_dir().to_str().unwrap(), &["--json"])).unwrap();
    assert_eq!(answer(&shown), answer(&itself), "the drafter changes no token");
    let cycles = shown["cycles"].as_array().unwrap();
    let count = |what: &str| cycles.iter().map(|cycle| cycle[what].as_array().unwrap().len()).sum::<usize>();
    assert!(count("accepted") > 0 && count("rejected") > 0);
    assert_eq!(count("confidences"), count("accepted") + count("rejected"));
    let rejections = itself["cycles"].as_array().unwrap().iter().map(|cycle| &cycle["rejected"]);
    assert!(rejections.clone().all(|rejected| rejected.as_array().unwrap().is_empty()));

    let plain = trace(draft, &["--color", "never"]);
    assert_eq!(plain.lines().count(), cycles.len() + 3, "a legend, a line each from 0 on, a summary");
    assert!(plain.contains("[-") && plain.contains("{+") && !plain.contains('\x1b'), "{plain}");
    let coloured = trace(draft, &["--color", "always"]);
    assert!(["\x1b[32m", "\x1b[9;31m", "\x1b[1;36m"].iter().all(|colour| coloured.contains(colour)));
    assert!(!coloured.contains("[-"));
}

#[test]
fn wrong_arguments_are_refused() {
    let (target, dir) = (target_dir(), tempfile::tempdir().unwrap());
    let (target, gemma) = (target.to_str().unwrap(), dir.path().to_str().unwrap());
    deepspec_testkit::tiny::gemma4(dir.path(), 64);
    let refused = |more: &[&str], words: &[&str]| {
        let args = [&["trace", PROMPT, "--target", target, "--draft", target], more].concat();
        assert_refused(&deepspec_eval(&args), 2, words);
    };
    refused(&["--max-draft-tokens", "0"], &["--max-draft-tokens", "at least 1"]);
    refused(&["--confidence-threshold", "0.5"], &["no confidence head"]);
    let args = ["trace", PROMPT, "--target", target, "--draft", gemma];
    assert_refused(&deepspec_eval(&args), 2, &["its own tokenizer", "token 0"]);
}
