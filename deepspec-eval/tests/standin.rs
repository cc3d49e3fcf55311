//! Evaluation on the stand-in GPU (`tests/standin`) gives the same greedy answers as on the CPU.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{
    Answers, answers, drafter_config, repository, results, run_ok, run_on, target_dir, write_bigram_drafter,
    write_domino, write_drafter, write_dspark_v4, write_eagle3, write_mtp, write_peagle, write_xpress,
};
use deepspec_checkpoint::ATTENTION_SINK_BIAS;
use deepspec_drafters::{MarkovKind, MarkovSettings};
use deepspec_testkit::fake_gpu::{FakeGpu, Report};
use deepspec_testkit::tiny;
use serde_json::Value;

const FEW: [&str; 9] =
    ["--temperature", "0", "--limit", "3", "--max-new-tokens", "40", "--max-num-seqs", "4", "--no-baseline"];

/// A run on the tiny target, with these additional arguments.
#[track_caller]
fn on_gpu(draft: &str, dir: &Path, dtype: &str, more: &[&str]) -> Option<(Answers, Report)> {
    target_on_gpu(&target_dir(), draft, dir, &[&["--dtype", dtype][..], more].concat())
}

/// A run on this target, with these additional arguments. Returns the answers and the report of the GPU.
#[track_caller]
fn target_on_gpu(target: &Path, draft: &str, dir: &Path, more: &[&str]) -> Option<(Answers, Report)> {
    let program = Path::new(env!("CARGO_BIN_EXE_deepspec-eval"));
    let gpu = FakeGpu::for_program(program)?;
    let report = dir.with_extension("report");
    let mut command = Command::new(program);
    command.args(["run", "--quiet", "--device", "cuda", "--draft", draft]).args(FEW).args(more);
    command.arg("--target").arg(target).arg("--suites-dir").arg(repository("eval_datasets"));
    command.arg("--output-dir").arg(dir);
    command.env("OMP_NUM_THREADS", "1").env_remove("RUST_LOG");
    let output = gpu.attach_with_report(&mut command, &report).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some((answers(dir), Report::load(&report)))
}

#[test]
fn drafters_of_the_tiny_target_answer_as_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    run_ok("none", &path("cpu"), &FEW);
    let expected = answers(&path("cpu"));
    write_bigram_drafter(&path("dspark"), expected.values());
    let mut config = drafter_config();
    (config.settings.markov, config.settings.confidence) = (None, None);
    write_drafter(&path("dflash"), config, |_, tensor| tensor);
    let mut config = drafter_config();
    config.settings.markov = Some(MarkovSettings { kind: MarkovKind::Rnn, rank: 16 });
    write_drafter(&path("rnn"), config, |_, tensor| tensor);
    let mut config = drafter_config();
    config.decoder.model = config.decoder.model.with_attention_sinks().unwrap();
    write_drafter(&path("sinks"), config, |name, tensor| match name.ends_with(ATTENTION_SINK_BIAS) {
        true => tensor + 1.0,
        false => tensor,
    });
    write_dspark_v4(&path("dspark_v4"));
    write_eagle3(&path("eagle3"));
    write_mtp(&path("mtp"));
    write_peagle(&path("peagle"));
    write_domino(&path("domino"));
    write_xpress(&path("xpress"));
    std::os::unix::fs::symlink(repository("assets/tiny-dflash2"), path("dflash2")).unwrap();
    // A language model: the target itself.
    std::os::unix::fs::symlink(target_dir(), path("causal")).unwrap();
    for draft in [
        "none",
        "dspark",
        "dflash",
        "rnn",
        "sinks",
        "dspark_v4",
        "dflash2",
        "domino",
        "xpress",
        "eagle3",
        "peagle",
        "mtp",
        "causal",
    ] {
        let drafter = path(draft).display().to_string();
        let named = if draft == "none" { draft } else { &drafter };
        let output = path(&format!("{draft}-gpu"));
        let Some((found, report)) = on_gpu(named, &output, "float32", &[]) else { return };
        assert_eq!(found, expected, "{draft}");
        assert!(report.memory(0, "peak_bytes") > 0, "nothing ran on the GPU");
    }
    let dspark = path("dspark").display().to_string();
    let trees = on_gpu(&dspark, &path("trees-gpu"), "float32", &["--verify", "tree:12"]);
    assert_eq!(trees.unwrap().0, expected, "trees");
    // With any drafter, greedy answers in bfloat16 equal the target's own in bfloat16.
    let Some((plain, _)) = on_gpu("none", &path("plain-bf16"), "bfloat16", &[]) else { return };
    assert_eq!(plain.len(), expected.len());
    on_gpu(&dspark, &path("dspark-bf16"), "bfloat16", &[]);
}

#[test]
fn an_assistant_answers_as_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let [target, assistant, cpu, gpu] =
        ["target", "assistant", "cpu", "gpu"].map(|name| dir.path().join(name));
    for model in [&target, &assistant] {
        fs::create_dir(model).unwrap();
    }
    tiny::gemma4(&target, 1024);
    tiny::gemma4_assistant(&assistant, 1024);
    let draft = assistant.display().to_string();
    let output = run_on(&target, &draft, &cpu, &FEW);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let Some((found, _)) = target_on_gpu(&target, &draft, &gpu, &["--dtype", "float32"]) else { return };
    assert_eq!(found, answers(&cpu));
    // Wrong drafts change the counts, and not the answers.
    let counts = |dir: &Path| -> Vec<Value> {
        results(dir)["suites"].as_array().unwrap().iter().map(|suite| suite["counts"].clone()).collect()
    };
    assert_eq!(counts(&gpu), counts(&cpu));
}

/// If memory does not suffice for all answers at once, they run one after the other. If it does not
/// suffice for a single answer, the run ends with an error.
#[test]
fn memory_for_fewer_answers_is_said() {
    let program = Path::new(env!("CARGO_BIN_EXE_deepspec-eval"));
    let Some(gpu) = FakeGpu::for_program(program) else { return };
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("target");
    fs::create_dir(&target).unwrap();
    for (name, bytes) in deepspec_testkit::folder::files(&target_dir()) {
        fs::write(target.join(name), bytes).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&fs::read(target.join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = 65_536.into();
    fs::write(target.join("config.json"), config.to_string()).unwrap();
    let run = |tokens: &str, out: &str| {
        let mut command = Command::new(program);
        command.args(["run", "--device", "cuda", "--draft", "none", "--suite", "smoke-math", "--limit", "2"]);
        command.args(["--max-num-seqs", "4", "--temperature", "0", "--max-new-tokens", tokens]);
        command.arg("--target").arg(&target).arg("--suites-dir").arg(repository("eval_datasets"));
        command
            .arg("--output-dir")
            .arg(dir.path().join(out))
            .env("OMP_NUM_THREADS", "1")
            .env_remove("RUST_LOG");
        let output = gpu.attach(&mut command).env("DEEPSPEC_STANDIN_MEMORY", "180000000").output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, told) = run("16000", "some");
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("the others wait"), "{told}");
    assert_eq!(answers(&dir.path().join("some")).len(), 2);
    let (code, told) = run("60000", "none");
    assert_ne!(code, Some(0), "{told}");
    assert!(told.contains("ask for fewer tokens") && !told.contains("panicked"), "{told}");
}
