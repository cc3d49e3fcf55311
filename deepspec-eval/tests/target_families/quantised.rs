//! Quantised targets in every stage, beside the plain models whose weights other packages de-quantise from them.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with compressed-tensors, transformers and AutoRound.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_testkit::{skip, tiny};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::training::{Lessons, smoke, write_dspark_drafter};
use crate::common::{answers, conversation_rows, deepspec_eval, program, repository, results, run_on};
use crate::{LIMIT, TOKENS, convert_to_vllm_and_back, counts};

const MASK: i64 = 1023;
const STEPS: usize = 150;
/// Steps of the trainer on states that are computed in training.
const ONLINE_STEPS: usize = 3;

/// A quantised target, the plain one with its weights, and conversations.
struct Bench {
    root: TempDir,
    quantised: PathBuf,
    plain: PathBuf,
}

impl Bench {
    /// Quantises `target` by each scheme.
    fn all(python: &str, target: &Path, schemes: &[&str]) -> Vec<Self> {
        let script = repository("crates/deepspec-models/tests/quantised_targets.py");
        let out = tempfile::tempdir().unwrap();
        let mut command = Command::new(python);
        command.arg(&script).args([target, out.path()]).args(schemes).env("HF_HUB_OFFLINE", "1");
        let run = command.output().unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        schemes.iter().map(|scheme| Self::new(target, &out.path().join(scheme))).collect()
    }

    fn new(target: &Path, scheme: &Path) -> Self {
        let root = tempfile::tempdir().unwrap();
        let [quantised, plain] = ["quantised", "expected"].map(|name| {
            let to = root.path().join(name);
            fs::rename(scheme.join(name), &to).unwrap();
            for entry in fs::read_dir(target).unwrap() {
                let entry = entry.unwrap();
                if !to.join(entry.file_name()).exists() {
                    fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
                }
            }
            to
        });
        fs::write(root.path().join("rows.jsonl"), conversation_rows(6)).unwrap();
        let written = format!(
            "name: t\ntarget: {{model: '', layer_ids: [embedding, 1, 3]}}\n\
             drafter: {{dspark: {{block_size: 3, num_draft_layers: 1, mask_token_id: {MASK}, num_anchors: 4}}}}\n\
             data: {{states: {{cache: cache}}, chat_template: qwen, max_length: 512}}\n\
             train: {{lr: 1.0e-3, precision: fp32, local_batch_size: 2, global_batch_size: 2, max_train_steps: {ONLINE_STEPS}}}\n\
             logging: {{logging_steps: 1, checkpointing_steps: {ONLINE_STEPS}, output_dir: runs}}\n"
        );
        fs::write(root.path().join("recipe.yaml"), written).unwrap();
        Self { root, quantised, plain }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Runs another binary of the workspace with the recipe for `target`.
    fn program(&self, name: &str, target: &Path, args: &[&str]) {
        let model = format!("target.model={}", target.display());
        let mut command = program(name);
        command.args(args).args(["--config", "recipe.yaml", "--device", "cpu", "--set", &model]);
        let output = command.current_dir(self.root.path()).output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The shards of a cache of the target's states.
    fn cached(&self, target: &Path) -> Vec<Vec<u8>> {
        let cache = self.path("cache");
        let args = ["cache", "build", "--input", "rows.jsonl", "--output-dir", "cache", "--overwrite"];
        self.program("deepspec-data", target, &args);
        let mut shards: Vec<PathBuf> =
            fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path()).collect();
        shards.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        shards.sort();
        shards.iter().map(|path| fs::read(path).unwrap()).collect()
    }

    /// Losses of steps on states that are computed in training.
    fn online_losses(&self, target: &Path) -> Vec<f64> {
        let args = ["--set", "data.states=online", "--set", "data.input=[rows.jsonl]", "--overwrite"];
        self.program("deepspec-train", target, &args);
        let text = fs::read_to_string(self.path("runs/t/metrics.jsonl")).unwrap();
        let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        rows.filter_map(|row| row["loss"].as_f64()).collect()
    }

    /// Results of greedy answers of the quantised target.
    fn run(&self, draft: &Path, name: &str) -> Value {
        let (out, limit, tokens) = (self.path(name), LIMIT.to_string(), TOKENS.to_string());
        let args = ["--temperature", "0", "--no-baseline", "--limit", &limit, "--max-new-tokens", &tokens];
        let output = run_on(&self.quantised, draft.to_str().unwrap(), &out, &args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        results(&out)
    }
}

/// States and losses are those of the plain model. A drafter that has learned the quantised target's answers drafts
/// for it without changing one, is judged by the doctor, and is converted for vLLM.
fn check(target: &Path, schemes: &[&str]) {
    let packages = "compressed-tensors, transformers and AutoRound";
    let Some(python) = skip::speculators_python(packages) else { return };
    for (bench, scheme) in Bench::all(&python, target, schemes).into_iter().zip(schemes) {
        let shards = bench.cached(&bench.quantised);
        assert!(!shards.is_empty() && shards == bench.cached(&bench.plain), "{scheme}: the states differ");
        let losses = bench.online_losses(&bench.quantised);
        assert!(losses.len() == ONLINE_STEPS && losses == bench.online_losses(&bench.plain), "{scheme}");

        let draft = bench.path("draft");
        let target = bench.quantised.clone();
        let lessons = Lessons { target, suites: smoke(), rows: 0..LIMIT, tokens: TOKENS, thinking: false };
        write_dspark_drafter(&lessons, &draft, MASK, STEPS);
        bench.run(Path::new("none"), "undrafted");
        let expected = answers(&bench.path("undrafted"));
        let drafted = bench.run(&draft, "drafted");
        let tau = drafted["overall"]["accepted_length"].as_f64().unwrap();
        assert!(tau > 1.2, "{scheme}: {tau}");
        assert_eq!(answers(&bench.path("drafted")), expected, "{scheme}");

        let [draft, target, suites] = [&draft, &bench.quantised, &repository("eval_datasets")]
            .map(|path| path.to_str().unwrap().to_string());
        let mut judge =
            vec!["checkpoint", "doctor", "--json", "--quiet", "--draft", &draft, "--target", &target];
        judge.extend(["--device", "cpu", "--temperature", "0", "--suites-dir", &suites, "--limit", "2"]);
        judge.extend(["--max-new-tokens", "16"]);
        let told = deepspec_eval(&judge);
        assert!(told.status.success(), "{scheme}: {}", String::from_utf8_lossy(&told.stderr));
        let report: Value = serde_json::from_slice(&told.stdout).unwrap();
        assert!(report["estimated"].as_f64().unwrap() > 1.2, "{scheme}: {report:#}");
        let back = convert_to_vllm_and_back(Path::new(&draft), &bench.quantised, bench.root.path());
        let converted = bench.run(&back, "converted");
        assert_eq!(answers(&bench.path("converted")), expected, "{scheme}");
        assert_eq!(counts(&converted), counts(&drafted), "{scheme}");
    }
}

#[test]
fn quantised_targets_pass_all_stages() {
    let target = tempfile::tempdir().unwrap();
    tiny::llama(target.path());
    check(target.path(), &["fp8 blocks", "compressed float8 channels", "awq", "gptq int4"]);
}

#[test]
fn float4_targets_pass_all_stages() {
    let target = tempfile::tempdir().unwrap();
    tiny::target(target.path(), "gpt_oss");
    check(target.path(), &["mxfp4"]);
}
