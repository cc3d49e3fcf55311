//! A cache of the tiny target's hidden states, its source rows, and runs of the built binary on
//! them.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod decoding;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;

use deepspec_capture::cache::{Builder, Encoding, FinalStates, Plan};
use deepspec_capture::{Capture, TargetSpec, fill_shards, tokenise};
use deepspec_core::cli::Verbosity;
use deepspec_testkit::fake_gpu::{FakeGpu, Report};
use serde_json::{Value, json};
use tch::{Device, Kind};

/// Number of steps of a whole run.
pub const STEPS: usize = 24;

/// The override for a DFlash 2.
pub const DFLASH2: &str = "drafter={dflash2: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, selector: {rank: 8}}}";

/// The override for a DSpark of DeepSeek-V4.
pub const DSPARK_V4: &str = "drafter={dspark_v4: {block_size: 4, num_nextn_predict_layers: 1, mask_token_id: 1023, num_anchors: 6, \
    markov_rank: 16, stage_config: {num_attention_heads: 2, head_dim: 16, qk_rope_head_dim: 8, q_lora_rank: 16, o_lora_rank: 16, \
    o_groups: 2, sliding_window: 16, n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32}}}";

pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn recipe_text(dir: &Path) -> String {
    format!(
        "name: t
seed: 7
target: {{model: {target}, layer_ids: [1, 4]}}
drafter:
  dspark:
    block_size: 5
    num_draft_layers: 1
    mask_token_id: 1023
    num_anchors: 6
    markov: {{type: gated, rank: 8}}
    confidence: {{with_markov: true}}
data: {{states: {{cache: {cache}}}, chat_template: qwen, max_length: 256}}
train: {{lr: 1.0e-3, precision: fp32, local_batch_size: 2, global_batch_size: 4, max_train_steps: {STEPS}}}
logging: {{logging_steps: 1, checkpointing_steps: 3, output_dir: {out}}}
",
        target = workspace().join("assets/tiny-target").display(),
        cache = dir.join("cache").display(),
        out = dir.join("out").display(),
    )
}

/// A folder with a cache of 24 samples; it is made once and copied for every test.
static MASTER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    // As in the runs: the last bits of float32 sums depend on the number of threads.
    tch::set_num_threads(1);
    let dir = tempfile::tempdir().unwrap();
    let prompts = fs::read_to_string(workspace().join("assets/demo-prompts.jsonl")).unwrap();
    let rows: Vec<String> = prompts
        .lines()
        .take(24)
        .map(|line| {
            let row: Value = serde_json::from_str(line).unwrap();
            let said = row["conversations"].as_array().unwrap().iter().map(|message| {
                let role = match message["from"].as_str().unwrap() {
                    "human" => "user",
                    "gpt" => "assistant",
                    own => own,
                };
                json!({"role": role, "content": message["value"]})
            });
            json!({"id": row["id"], "conversations": said.collect::<Vec<_>>()}).to_string()
        })
        .collect();
    fs::write(dir.path().join("rows.jsonl"), rows.join("\n")).unwrap();
    fs::write(dir.path().join("recipe.yaml"), recipe_text(dir.path())).unwrap();
    write_cache(dir.path(), "cache", FinalStates::Supervised, Encoding::Bf16);
    write_cache(dir.path(), "cache-all", FinalStates::All, Encoding::Bf16);
    dir
});

/// Writes a cache of the hidden states of `rows.jsonl` into the folder `cache`.
fn write_cache(dir: &Path, cache: &str, last: FinalStates, encoding: Encoding) {
    let recipe = deepspec_drafters::load_recipe(&dir.join("recipe.yaml"), &[]).unwrap();
    let source = TargetSpec::open(&recipe, Verbosity::Quiet).unwrap();
    let samples = tokenise(&[dir.join("rows.jsonl")], &source, |_| {}).unwrap().samples;
    let longest = samples.iter().map(|sample| sample.input_ids.len()).max().unwrap();
    let plan = Plan::new(samples, source.layout(last, encoding), 1 << 20).unwrap();
    let mut builder = Builder::open(&dir.join(cache), &plan, &source.identity).unwrap();
    let mut capture = Capture::load(&source.dir, &recipe, longest, Device::Cpu, Kind::Float).unwrap();
    fill_shards(&mut builder, &mut capture, |_| {}).unwrap();
    builder.publish().unwrap();
}

/// A private copy of the cache, and a recipe that uses it.
pub struct Bench {
    dir: tempfile::TempDir,
    gpu: Option<FakeGpu>,
}

/// The stand-in GPU; None if there are real GPUs.
pub fn gpu() -> Option<FakeGpu> {
    FakeGpu::for_program(Path::new(env!("CARGO_BIN_EXE_deepspec-train")))
}

impl Bench {
    pub fn new() -> Self {
        Self::with_cache("cache")
    }

    /// Its cache holds the final states of all tokens, beside the taps.
    pub fn with_all_final_states() -> Self {
        Self::with_cache("cache-all")
    }

    fn with_cache(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("cache");
        fs::create_dir(&cache).unwrap();
        for entry in fs::read_dir(MASTER.path().join(name)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::copy(&path, cache.join(path.file_name().unwrap())).unwrap();
            }
        }
        fs::copy(MASTER.path().join("rows.jsonl"), dir.path().join("rows.jsonl")).unwrap();
        fs::write(dir.path().join("recipe.yaml"), recipe_text(dir.path())).unwrap();
        Self { dir, gpu: None }
    }

    /// Runs on this GPU from now on, with a report of its operations.
    pub fn on(self, gpu: FakeGpu) -> Self {
        Self { gpu: Some(gpu), ..self }
    }

    /// The report of the last run's GPU operations.
    pub fn report(&self) -> Report {
        Report::load(&self.path("report.json"))
    }

    /// Writes another cache of these states, in another encoding; returns the override that selects
    /// it.
    pub fn cache_as(&self, encoding: Encoding) -> String {
        let name = format!("cache-{encoding}");
        write_cache(self.dir.path(), &name, FinalStates::Supervised, encoding);
        format!("--set=data.states={{cache: '{}'}}", self.path(&name).display())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-train"));
        command.arg("--config").arg(self.path("recipe.yaml")).args(args).env("OMP_NUM_THREADS", "1");
        command.env("DEEPSPEC_CACHE", self.path("kept"));
        if let Some(gpu) = &self.gpu {
            gpu.attach_with_report(&mut command, &self.path("report.json")).args(["--device", "cuda"]);
        }
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    pub fn succeeds(&self, args: &[&str]) {
        let output = self.run(args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    pub fn fails(&self, args: &[&str], code: i32, hints: &[&str]) {
        let output = self.run(args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(hints.iter().all(|hint| last.contains(hint)), "expected {hints:?} in: {last}");
        assert!(!text.contains("panicked"), "{text}");
    }

    /// Weights, master weights and moments of the last checkpoint, which must be that of a whole
    /// run.
    pub fn result(&self) -> Vec<Vec<u8>> {
        self.result_of(STEPS)
    }

    /// Weights, master weights and moments after a run of `steps` steps.
    pub fn result_of(&self, steps: usize) -> Vec<Vec<u8>> {
        let step = self.path("out/t").join(format!("step_{steps}"));
        assert_eq!(
            fs::read_link(self.path("out/t/step_latest")).unwrap(),
            Path::new(&format!("step_{steps}"))
        );
        ["model.safetensors", "train_state/optimizer.safetensors", "config.json"]
            .map(|name| fs::read(step.join(name)).unwrap())
            .to_vec()
    }

    /// The parsed lines of metrics.jsonl.
    pub fn metrics(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("out/t/metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn losses(&self) -> Vec<f64> {
        self.metrics().iter().map(|line| line["loss"].as_f64().unwrap()).collect()
    }
}

/// Starts a run and waits until it has logged `step`.
pub fn start_until(bench: &Bench, step: usize, args: &[&str]) -> Child {
    let mut child = bench.command(args).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mark = format!("step {step}/");
    while let Some(line) = lines.next() {
        if line.unwrap().contains(&mark) {
            std::thread::spawn(|| lines.for_each(drop));
            return child;
        }
    }
    let status = child.wait().unwrap();
    panic!("the run ended before step {step}: {status}");
}
