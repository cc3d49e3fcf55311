//! The GPU operations that a decoding step may use, counted on the stand-in GPU. A step with whole
//! blocks waits for one result and uploads nothing, whatever the number of slots. Two kinds of drafters are not counted:
//! with DSpark of DeepSeek-V4 the host waits for the routers of the experts, and assistants need another target.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{
    answers, repository, results, run_ok, target_dir, write_bigram_drafter, write_domino, write_eagle3,
    write_mtp, write_peagle, write_xpress,
};
use deepspec_testkit::fake_gpu::{FakeGpu, Report};

const LENGTHS: [&str; 2] = ["8", "30"];
const GREEDY: [&str; 2] = ["--temperature", "0"];

/// Runs with this number of slots, each busy from the first step on. Returns the number of steps
/// and the GPU operations.
#[track_caller]
fn run(draft: &str, slots: &str, tokens: &str, more: &[&str], dir: &Path) -> Option<(i64, Report)> {
    let program = Path::new(env!("CARGO_BIN_EXE_deepspec-eval"));
    let gpu = FakeGpu::for_program(program)?;
    let report = dir.with_extension("report");
    let mut command = Command::new(program);
    command.args([
        "run",
        "--quiet",
        "--device",
        "cuda",
        "--dtype",
        "float32",
        "--no-baseline",
        "--suite",
        "smoke-math",
    ]);
    command.args(["--draft", draft, "--max-num-seqs", slots, "--limit", slots, "--max-new-tokens", tokens]);
    command.args(more);
    command.arg("--target").arg(target_dir()).arg("--suites-dir").arg(repository("eval_datasets"));
    command.arg("--output-dir").arg(dir).env("OMP_NUM_THREADS", "1").env_remove("RUST_LOG");
    let output = gpu.attach_with_report(&mut command, &report).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some((results(dir)["suites"][0]["timing"]["steps"].as_i64().unwrap(), Report::load(&report)))
}

#[track_caller]
fn within_budget(draft: &str, more: &[&str], dir: &Path) {
    for slots in ["1", "8"] {
        let mut runs = vec![];
        for tokens in LENGTHS {
            let out: PathBuf = dir.join(format!("{}-{slots}-{tokens}", more.concat()));
            let Some(found) = run(draft, slots, tokens, more, &out) else { return };
            runs.push(found);
        }
        let [(short, before), (long, after)] = &runs[..] else { unreachable!("one run a length") };
        let steps = long - short;
        assert!(steps > 3, "{draft}: only {steps} steps more");
        let (downloads, by) = before.added_operations(after, "downloads");
        assert_eq!(downloads, steps, "{draft}, {slots} slots: downloads in {steps} steps:\n{by}");
        let (waits, by) = before.added_operations(after, "waits");
        assert_eq!(waits, 0, "{draft}, {slots} slots: waits in {steps} steps:\n{by}");
        let (uploads, by) = before.added_operations(after, "uploads");
        assert_eq!(uploads, 0, "{draft}, {slots} slots: uploads in {steps} steps:\n{by}");
    }
}

#[test]
fn a_step_without_a_drafter_waits_once() {
    let dir = tempfile::tempdir().unwrap();
    within_budget("none", &GREEDY, dir.path());
}

#[test]
fn a_step_with_a_block_drafter_waits_once() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("corpus");
    run_ok("none", &corpus, &["--limit", "4", "--max-new-tokens", "60", "--no-baseline"]);
    let draft = dir.path().join("draft");
    write_bigram_drafter(&draft, answers(&corpus).values());
    within_budget(draft.to_str().unwrap(), &GREEDY, dir.path());
    within_budget(draft.to_str().unwrap(), &["--temperature", "1", "--other-rule", "off"], dir.path());
}

#[test]
fn a_step_with_dflash_2_waits_once() {
    let dir = tempfile::tempdir().unwrap();
    within_budget(repository("assets/tiny-dflash2").to_str().unwrap(), &GREEDY, dir.path());
}

#[test]
fn a_step_with_domino_waits_once() {
    let dir = tempfile::tempdir().unwrap();
    let draft = dir.path().join("draft");
    write_domino(&draft);
    within_budget(draft.to_str().unwrap(), &GREEDY, dir.path());
}

#[test]
fn a_step_with_xpress_waits_once() {
    let dir = tempfile::tempdir().unwrap();
    let draft = dir.path().join("draft");
    write_xpress(&draft);
    within_budget(draft.to_str().unwrap(), &GREEDY, dir.path());
}

#[test]
fn a_step_with_eagle3_waits_once() {
    let dir = tempfile::tempdir().unwrap();
    let draft = dir.path().join("draft");
    write_eagle3(&draft);
    within_budget(draft.to_str().unwrap(), &GREEDY, dir.path());
}

#[test]
fn a_step_with_p_eagle_waits_once() {
    let dir = tempfile::tempdir().unwrap();
    let draft = dir.path().join("draft");
    write_peagle(&draft);
    within_budget(draft.to_str().unwrap(), &GREEDY, dir.path());
}

#[test]
fn a_step_with_mtp_1_waits_once() {
    let dir = tempfile::tempdir().unwrap();
    let draft = dir.path().join("draft");
    write_mtp(&draft);
    within_budget(draft.to_str().unwrap(), &GREEDY, dir.path());
}

/// The target drafts for itself, a few tokens at a time: all drafts are accepted, and there are
/// enough steps to count.
#[test]
fn a_step_with_a_language_model_waits_once() {
    let (target, dir) = (target_dir(), tempfile::tempdir().unwrap());
    let little = [&GREEDY[..], &["--max-draft-tokens", "2"]].concat();
    within_budget(target.to_str().unwrap(), &little, dir.path());
}
