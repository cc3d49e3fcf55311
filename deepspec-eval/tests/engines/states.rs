//! Hidden states from a real vLLM server, by the commands of docs/large-targets.md.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use deepspec_capture::cache::Reader;
use deepspec_testkit::skip::{python, vllm_python};
use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{program, repository, results, run_on, target_dir};
use crate::drafters::{REAL_TAPS, RealModel, UNUSED};
use crate::families::write_random_model;
use crate::server::Server;
use crate::vllm::converted;

/// A folder with the states of a server.
pub struct Bench {
    root: TempDir,
    recipe: PathBuf,
}

impl Bench {
    /// A folder with the toy recipe of a drafter for `target`, and as many conversations.
    pub fn new(drafter: &str, target: &Path, rows: usize) -> Self {
        let root = tempfile::tempdir().unwrap();
        let recipe = root.path().join("recipe.yaml");
        let text = fs::read_to_string(repository(&format!("configs/tiny/{drafter}.yaml"))).unwrap();
        fs::write(&recipe, text.replace("assets/tiny-target", target.to_str().unwrap())).unwrap();
        let rows: String = (0..rows).map(|index| row(index) + "\n").collect();
        fs::write(root.path().join("answers.jsonl"), rows).unwrap();
        Self { root, recipe }
    }

    /// Replaces text of the recipe.
    fn edit_recipe(&self, changes: &[(&str, String)]) {
        let mut text = fs::read_to_string(&self.recipe).unwrap();
        for (old, new) in changes {
            assert!(text.contains(old), "{old}");
            text = text.replace(old, new);
        }
        fs::write(&self.recipe, text).unwrap();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Starts the server by the arguments that `states vllm-command` prints, adapted to the build for
    /// CPUs.
    pub fn start_vllm(&self, python: &str, build: Build) -> Server {
        let folder = format!(
            "data.states={{cache: served, server: http://127.0.0.1:1, folder: '{}'}}",
            self.path("states").display()
        );
        let printed = self.data(&["states", "vllm-command", "--set", &folder]);
        let line = String::from_utf8(printed.stdout).unwrap();
        let words = shell_words(line.trim());
        assert_eq!(words[..2], ["vllm", "serve"], "{line}");
        let mut command = vllm_command(python, &words[2], build);
        // The port is the test's own.
        let rest = words[3..].iter().scan(false, |skips, word| {
            let skipped = std::mem::replace(skips, word == "--port");
            Some((!skipped && word != "--port").then_some(word))
        });
        command.args(rest.flatten());
        Server::start(command, "Application startup complete")
    }

    fn states(&self, server: &Server, storage: &str) -> String {
        format!(
            "data.states={{{storage}server: '{}', folder: '{}'}}",
            server.url,
            self.path("states").display()
        )
    }

    fn program(&self, name: &str, args: &[&str]) -> Output {
        program(name).args(args).current_dir(self.root.path()).output().unwrap()
    }

    fn data(&self, args: &[&str]) -> Output {
        let recipe = self.recipe.to_str().unwrap();
        let output = self.program("deepspec-data", &[args, &["--config", recipe]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Trains for `steps` steps; returns the last logged loss.
    fn train(&self, states: &str, run: &str, steps: usize) -> f64 {
        let recipe = self.recipe.to_str().unwrap();
        let [name, last, logged] = [
            format!("name={run}"),
            format!("train.max_train_steps={steps}"),
            format!("logging.logging_steps={steps}"),
        ];
        let mut args = vec!["--config", recipe, "--device", "cpu", "--set", states, "--set", &name];
        args.extend(["--set", &last, "--set", &logged, "--set", "logging.output_dir=runs"]);
        if !states.contains("cache") {
            args.extend(["--set", "data.input=[answers.jsonl]"]);
        }
        let output = self.program("deepspec-train", &args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metrics = fs::read_to_string(self.path("runs").join(run).join("metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
        last["loss"].as_f64().unwrap()
    }

    /// Serves the drafter of the run `drafter` on `target`, and asks it; returns its accepted length.
    fn judge(&self, python: &str, target: &Path, build: Build) -> f64 {
        let config = converted(&self.path("runs/drafter/step_latest"), target, &self.path("vllm"));
        let mut command = vllm_command(python, target.to_str().unwrap(), build);
        // Drafts in blocks run there only.
        command.env("VLLM_USE_V2_MODEL_RUNNER", if config.contains("dspark") { "1" } else { "0" });
        command.args(["--max-model-len", "512", "--per-request-spec-decode-metrics", "detailed"]);
        command.args(["--speculative-config", &config]);
        let server = Server::start(command, "Application startup complete");
        let (suites, target) = (repository("eval_datasets"), target.to_str().unwrap());
        let run = ["run", "--server", &server.url, "--target", target, "--output-dir", "served"];
        let args = [&run[..], &QUESTIONS, &["--suites-dir", suites.to_str().unwrap()]].concat();
        let run = self.program("deepspec-eval", &args);
        assert!(run.status.success(), "{target}: {}", String::from_utf8_lossy(&run.stderr));
        accepted_length(&self.path("served"))
    }
}

/// Arguments of `run` for a served drafter.
const QUESTIONS: [&str; 8] =
    ["--suite", "smoke-chat", "--limit", "2", "--max-new-tokens", "24", "--temperature", "0"];

fn accepted_length(run: &Path) -> f64 {
    results(run)["suites"][0]["metrics"]["accepted_length"].as_f64().unwrap()
}

/// How vLLM's build for CPUs runs.
#[derive(Clone, Copy)]
pub struct Build {
    dtype: &'static str,
    /// Whether Triton's kernels are interpreted. Otherwise there are none.
    interprets: bool,
}

pub const PLAIN: Build = Build { dtype: "float32", interprets: false };
pub const INTERPRETED: Build = Build { dtype: "float32", interprets: true };

fn row(index: usize) -> String {
    let answer: Vec<String> =
        (0..20 + index * 7 % 40).map(|word| format!("word {word} of {index}.")).collect();
    serde_json::json!({"id": format!("row-{index}"), "conversations": [
        {"role": "user", "content": format!("Say something of length {index}, please.")},
        {"role": "assistant", "content": answer.join(" ")},
    ]})
    .to_string()
}

/// vLLM's server for `model` on a CPU.
fn vllm_command(python: &str, model: &str, build: Build) -> Command {
    let mut command = Command::new(python);
    command.env_remove("LD_LIBRARY_PATH").env("VLLM_CPU_KVCACHE_SPACE", "1").env("VLLM_NO_USAGE_STATS", "1");
    command.env("PYTHONPATH", repository("scripts/vllm_cpu")).env("HF_HUB_OFFLINE", "1");
    if build.interprets {
        command.env("TRITON_INTERPRET", "1");
    }
    command.args(["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--dtype", build.dtype]);
    command.args(["--model", model]);
    command
}

/// Splits a line of words, some of them in single quotes.
fn shell_words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for (index, part) in line.split('\'').enumerate() {
        if index % 2 == 1 {
            words.last_mut().unwrap().push_str(part);
            continue;
        }
        for (place, word) in part.split(' ').enumerate() {
            if place > 0 {
                words.push(String::new());
            }
            words.last_mut().unwrap().push_str(word);
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Values in bfloat16, as floats.
fn bf16_values(bytes: &[u8]) -> Vec<f32> {
    let halves = bytes.chunks_exact(2).map(|half| u16::from_le_bytes([half[0], half[1]]));
    halves.map(|half| f32::from_bits(u32::from(half) << 16)).collect()
}

/// The values of all shards of a cache in bfloat16, as floats.
fn cached_values(dir: &Path) -> Vec<f32> {
    let mut shards: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    shards.retain(|path| path.extension().is_some_and(|kind| kind == "safetensors"));
    shards.sort();
    let mut values = vec![];
    for shard in shards {
        let bytes = fs::read(shard).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for name in ["taps", "last"] {
            values.extend(bf16_values(file.tensor(name).unwrap().data()));
        }
    }
    values
}

/// Stores the states of a server and those of our own capture in two caches; returns their values.
fn both_caches(bench: &Bench, server: &Server) -> [Vec<f32>; 2] {
    let build = ["cache", "build", "--device", "cpu", "--input", "answers.jsonl", "--output-dir"];
    bench.data(&[&build[..], &["own"]].concat());
    let cache = bench.states(server, "cache: served, ");
    bench.data(&[&build[..], &["served", "--set", &cache]].concat());
    let both = ["own", "served"].map(|name| cached_values(&bench.path(name)));
    assert_eq!(both[0].len(), both[1].len());
    both
}

/// Checks that states of a server are our own, both rounded to bfloat16.
fn check_states([own, served]: &[Vec<f32>; 2]) {
    let largest = own.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    // Float32 sums of two programs are rounded to bfloat16: now and then a value falls on the other side.
    let step = |value: f32| (value.abs() / 128.0).max(largest * 2e-6);
    let off = own.iter().zip(served).filter(|(own, served)| (**own - **served).abs() > step(**own)).count();
    let other = own.iter().zip(served).filter(|(own, served)| own != served).count();
    assert_eq!(off, 0, "values differ by more than a rounding");
    assert!(other * 100 < own.len(), "{other} of {} values differ", own.len());
}

#[test]
fn vllm_gives_the_states_of_the_tiny_target() {
    let Some(python) = vllm_python() else { return };
    let bench = Bench::new("dspark", &target_dir(), 24);
    let server = bench.start_vllm(&python, PLAIN);
    check_states(&both_caches(&bench, &server));
    let manifest = fs::read_to_string(bench.path("served/manifest.json")).unwrap();
    assert!(manifest.contains("vLLM 0.32.0, layer ids [1, 3, 5, 6]"), "{manifest}");

    let cache = bench.states(&server, "cache: served, ");
    let check = bench.data(&["states", "check", "--set", &cache]);
    let said = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(said.contains("the head gives the server's log-probability"), "{said}");
    let own = bench.train("data.states.cache=own", "own", 20);
    let online = bench.train(&bench.states(&server, ""), "online", 20);
    assert!((own - online).abs() < 0.01 * own, "{own} from our cache, {online} from the server");
    assert_eq!(fs::read_dir(bench.path("states")).unwrap().count(), 0, "files are left behind");
}

/// From states to a drafter that vLLM serves, for mixtures of experts and a hybrid. The states of the mixtures equal our
/// own. Those of a hybrid in float32 are compared in `families`.
#[test]
fn mixtures_and_hybrids_are_trained_and_judged_by_vllm() {
    let (Some(vllm), Some(peers)) = (vllm_python(), python("transformers")) else { return };
    // As vLLM's own kernels for CPUs run Gated DeltaNet.
    let hybrid = Build { dtype: "bfloat16", interprets: true };
    for (kind, drafter, states, judged, compares_states) in [
        ("qwen3_moe", "dspark", PLAIN, INTERPRETED, true),
        ("gpt_oss", "eagle3", PLAIN, PLAIN, true),
        ("qwen3_5_text", "dspark", hybrid, hybrid, false),
    ] {
        let models = tempfile::tempdir().unwrap();
        let model = models.path().join(kind);
        write_random_model(&peers, kind, &model);
        let bench = Bench::new(drafter, &model, 8);
        let server = bench.start_vllm(&vllm, states);
        if compares_states {
            check_states(&both_caches(&bench, &server));
        }
        let loss = bench.train(&bench.states(&server, "hybrid: hybrid, "), "drafter", 20);
        assert!(loss.is_finite(), "{kind}: {loss}");
        drop(server);
        let (draft, target) = (bench.path("runs/drafter/step_latest"), model.to_str().unwrap());
        let suites = repository("eval_datasets");
        let local = ["run", "--target", target, "--draft", draft.to_str().unwrap(), "--output-dir", "local"];
        let brief = ["--suites-dir", suites.to_str().unwrap(), "--limit", "1", "--max-new-tokens", "8"];
        let local = bench.program("deepspec-eval", &[&local[..], &brief].concat());
        assert!(local.status.success(), "{kind}: {}", String::from_utf8_lossy(&local.stderr));
        let tau = bench.judge(&vllm, &model, judged);
        assert!((1.0..=8.0).contains(&tau), "{kind}: {tau}");
    }
}

/// A DSpark of a real model, from a server's states to a server's judgement.
#[test]
fn a_real_model_is_trained_and_judged_by_vllm() {
    let (Some(python), Some(real)) = (vllm_python(), RealModel::new()) else { return };
    let models = tempfile::tempdir().unwrap();
    let model = models.path().join("smollm2");
    let mut made = Command::new(&python);
    made.env_remove("LD_LIBRARY_PATH").arg(repository("scripts/vllm_cpu/gguf_folder.py"));
    let made = made.args([&real.file, &model]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let bench = Bench::new("dspark", &model, 8);
    let taps = format!("{REAL_TAPS:?}");
    bench.edit_recipe(&[("[0, 2, 4]", taps), ("mask_token_id: 1023", format!("mask_token_id: {UNUSED}"))]);
    let server = bench.start_vllm(&python, PLAIN);
    let [own, served] = both_caches(&bench, &server);
    let far = own.iter().zip(&served).filter(|(own, served)| (**own - **served).abs() > own.abs() / 64.0);
    let far = far.count();
    eprintln!("{far} of {} values are not within two steps of bfloat16", own.len());
    assert!(far * 1000 < own.len(), "{far} of {} values differ", own.len());
    let loss = bench.train(&bench.states(&server, "hybrid: hybrid, "), "drafter", 8);
    assert!(loss.is_finite(), "{loss}");
    drop(server);
    let (draft, run) = (bench.path("runs/drafter/step_latest"), bench.path("run"));
    let here = run_on(&model, draft.to_str().unwrap(), &run, &QUESTIONS);
    assert!(here.status.success(), "{}", String::from_utf8_lossy(&here.stderr));
    let here = accepted_length(&run);
    let there = bench.judge(&python, &model, INTERPRETED);
    eprintln!("accepted length: {here:.3} here, {there:.3} by vLLM");
    // After eight steps few drafted tokens are accepted. A server that rejects all has length 1.
    assert!(
        there > 1.03 && (here / there - 1.0).abs() < 0.03,
        "accepted length: {here} here, {there} by vLLM"
    );
}

/// One request answers and returns the states of its answer. They are those of our own forward.
#[test]
fn vllm_gives_the_states_with_the_answers() {
    let Some(python) = vllm_python() else { return };
    let bench = Bench::new("dspark", &target_dir(), 24);
    let server = bench.start_vllm(&python, PLAIN);
    let (target, folder) = (target_dir(), bench.path("states"));
    let (target, folder) = (target.to_str().unwrap(), folder.to_str().unwrap());
    let asked = ["regenerate", "--model", target, "--server", &server.url, "--input", "answers.jsonl"];
    let sampled = ["--output", "answered.jsonl", "--temperature", "0.8", "--max-tokens", "48", "--seed", "1"];
    let stored = ["--with-states", "stored", "--states-folder", folder];
    let output = bench.program("deepspec-data", &[&asked[..], &sampled, &stored].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_dir(folder).unwrap().count(), 0, "files are left behind");
    for states in ["{cache: own}", "{cache: with-answers, answers: stored}"] {
        let set = format!("data.states={states}");
        bench.data(&["cache", "build", "--device", "cpu", "--input", "answered.jsonl", "--set", &set]);
    }
    let [own, found] = ["own", "with-answers"].map(|dir| Reader::open(&bench.path(dir)).unwrap());
    assert_eq!(own.len(), found.len());
    for index in 0..found.len() {
        let (own, found) = (own.sample(index).unwrap(), found.sample(index).unwrap());
        assert!(own.input_ids.starts_with(found.input_ids));
        let ([own_taps, _], [taps, _]) = (own.states().unwrap(), found.states().unwrap());
        // The last token's states are never computed.
        let fed = taps.len() / found.len() * (found.len() - 1);
        let (own, found) = (bf16_values(&own_taps[..fed]), bf16_values(&taps[..fed]));
        let largest = own.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let step = |value: f32| (value.abs() / 128.0).max(largest * 2e-6);
        let off = own.iter().zip(&found).filter(|(own, found)| (**own - **found).abs() > step(**own)).count();
        assert_eq!(off, 0, "{off} of {} values of sample {index} differ by more than a rounding", own.len());
    }
}
