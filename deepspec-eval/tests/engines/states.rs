//! Hidden states from a real vLLM server, by the commands of docs/large-targets.md.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use deepspec_testkit::skip::{python, vllm_python};
use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{repository, results, target_dir};
use crate::server::Server;
use crate::vllm::converted;

/// Architectures without a family here, with random weights.
const FOREIGN: &str = r#"
import shutil, sys, torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig
kind, tiny, out = sys.argv[1:]
common = dict(vocab_size=1024, hidden_size=192, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2, head_dim=32,
              max_position_embeddings=2048, bos_token_id=1018, eos_token_id=1020, pad_token_id=1018, tie_word_embeddings=False)
configs = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**common, intermediate_size=256, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
                                        decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[]),
    "gpt_oss": lambda: GptOssConfig(**common, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=64),
}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.float32)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0, 0.06)
        elif "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)
model.save_pretrained(out)
for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
    shutil.copy(f"{tiny}/{file}", out)
"#;

/// A folder with the states of a server.
struct Bench {
    root: TempDir,
    recipe: PathBuf,
}

impl Bench {
    /// A folder with the toy recipe of a drafter for `target`.
    fn new(drafter: &str, target: &Path) -> Self {
        let root = tempfile::tempdir().unwrap();
        let recipe = root.path().join("recipe.yaml");
        let text = fs::read_to_string(repository(&format!("configs/tiny/{drafter}.yaml"))).unwrap();
        fs::write(&recipe, text.replace("assets/tiny-target", target.to_str().unwrap())).unwrap();
        let rows: String = (0..24).map(|index| row(index) + "\n").collect();
        fs::write(root.path().join("answers.jsonl"), rows).unwrap();
        Self { root, recipe }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Starts the server by the arguments that `states vllm-command` prints, adapted to the build for
    /// CPUs.
    fn start_vllm(&self, python: &str) -> Server {
        let folder = format!(
            "data.states={{cache: served, server: http://127.0.0.1:1, folder: '{}'}}",
            self.path("states").display()
        );
        let printed = self.data(&["states", "vllm-command", "--set", &folder]);
        let line = String::from_utf8(printed.stdout).unwrap();
        let words = shell_words(line.trim());
        assert_eq!(words[..2], ["vllm", "serve"], "{line}");
        let mut command = vllm_command(python, &words[2]);
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
        let program = Path::new(env!("CARGO_BIN_EXE_deepspec-eval")).with_file_name(name);
        Command::new(program).args(args).current_dir(self.root.path()).output().unwrap()
    }

    fn data(&self, args: &[&str]) -> Output {
        let recipe = self.recipe.to_str().unwrap();
        let output = self.program("deepspec-data", &[args, &["--config", recipe]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Trains a few steps; returns the last logged loss.
    fn train(&self, states: &str, run: &str) -> f64 {
        let recipe = self.recipe.to_str().unwrap();
        let name = format!("name={run}");
        let mut args =
            vec!["--config", recipe, "--set", states, "--set", &name, "--set", "train.max_train_steps=20"];
        args.extend([
            "--set",
            "logging.logging_steps=20",
            "--set",
            "logging.output_dir=runs",
            "--device",
            "cpu",
        ]);
        if !states.contains("cache") {
            args.extend(["--set", "data.input=[answers.jsonl]"]);
        }
        let output = self.program("deepspec-train", &args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metrics = fs::read_to_string(self.path("runs").join(run).join("metrics.jsonl")).unwrap();
        let last: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
        last["loss"].as_f64().unwrap()
    }
}

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
fn vllm_command(python: &str, model: &str) -> Command {
    let mut command = Command::new(python);
    command.env_remove("LD_LIBRARY_PATH").env("VLLM_CPU_KVCACHE_SPACE", "1").env("VLLM_NO_USAGE_STATS", "1");
    command.env("PYTHONPATH", repository("scripts/vllm_cpu")).env("HF_HUB_OFFLINE", "1");
    command.args(["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--dtype", "float32"]);
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
            let halves = file
                .tensor(name)
                .unwrap()
                .data()
                .chunks_exact(2)
                .map(|half| u16::from_le_bytes([half[0], half[1]]));
            values.extend(halves.map(|half| f32::from_bits(u32::from(half) << 16)));
        }
    }
    values
}

#[test]
fn vllm_gives_the_states_of_the_tiny_target() {
    let Some(python) = vllm_python() else { return };
    let bench = Bench::new("dspark", &target_dir());
    let server = bench.start_vllm(&python);
    let input = ["--input", "answers.jsonl"];
    let own = [&["cache", "build", "--device", "cpu", "--output-dir", "own"][..], &input].concat();
    bench.data(&own);
    let cache = bench.states(&server, "cache: served, ");
    let served =
        [&["cache", "build", "--device", "cpu", "--output-dir", "served", "--set", &cache][..], &input]
            .concat();
    bench.data(&served);
    let (own, served) = (cached_values(&bench.path("own")), cached_values(&bench.path("served")));
    assert_eq!(own.len(), served.len());
    let largest = own.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    // Float32 sums of two programs are rounded to bfloat16: now and then a value falls on the other side.
    let step = |value: f32| (value.abs() / 128.0).max(largest * 2e-6);
    let off = own.iter().zip(&served).filter(|(own, served)| (**own - **served).abs() > step(**own)).count();
    let other = own.iter().zip(&served).filter(|(own, served)| own != served).count();
    assert_eq!(off, 0, "values differ by more than a rounding");
    assert!(other * 100 < own.len(), "{other} of {} values differ", own.len());
    let manifest = fs::read_to_string(bench.path("served/manifest.json")).unwrap();
    assert!(manifest.contains("vLLM 0.32.0, layer ids [1, 3, 5, 6]"), "{manifest}");

    let check = bench.data(&["states", "check", "--set", &cache]);
    let said = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(said.contains("the head gives the server's log-probability"), "{said}");
    let own = bench.train("data.states.cache=own", "own");
    let online = bench.train(&bench.states(&server, ""), "online");
    assert!((own - online).abs() < 0.01 * own, "{own} from our cache, {online} from the server");
    assert_eq!(fs::read_dir(bench.path("states")).unwrap().count(), 0, "files are left behind");
}

/// From states to a drafter that vLLM serves, for targets that no family here reads. Drafters other
/// than Eagle3 need Triton in the build for CPUs.
#[test]
fn targets_without_a_family_are_trained_and_judged_by_vllm() {
    let (Some(vllm), Some(peers)) = (vllm_python(), python("transformers")) else { return };
    for kind in ["qwen3_moe", "gpt_oss"] {
        let models = tempfile::tempdir().unwrap();
        let model = models.path().join(kind);
        let made =
            Command::new(&peers).args(["-c", FOREIGN, kind]).arg(target_dir()).arg(&model).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let bench = Bench::new("eagle3", &model);
        let server = bench.start_vllm(&vllm);
        let loss = bench.train(&bench.states(&server, "hybrid: hybrid, "), "drafter");
        assert!(loss.is_finite(), "{kind}: {loss}");
        drop(server);
        let (draft, target) = (bench.path("runs/drafter/step_latest"), model.to_str().unwrap());
        let local = ["run", "--target", target, "--draft", draft.to_str().unwrap(), "--output-dir", "run"];
        let local = bench.program("deepspec-eval", &local);
        let said = String::from_utf8_lossy(&local.stderr).into_owned();
        assert!(!local.status.success() && said.contains(kind), "{said}");

        let config = converted(&draft, &model, &bench.path("vllm"));
        let mut command = vllm_command(&vllm, target);
        command.args(["--per-request-spec-decode-metrics", "detailed", "--speculative-config", &config]);
        let server = Server::start(command, "Application startup complete");
        let suites = repository("eval_datasets");
        let run =
            ["run", "--server", &server.url, "--target", target, "--suite", "smoke-chat", "--limit", "2"];
        let rest = ["--max-new-tokens", "24", "--temperature", "0", "--output-dir", "served", "--suites-dir"];
        let run = bench.program("deepspec-eval", &[&run[..], &rest, &[suites.to_str().unwrap()]].concat());
        assert!(run.status.success(), "{kind}: {}", String::from_utf8_lossy(&run.stderr));
        let tau = results(&bench.path("served"))["suites"][0]["metrics"]["accepted_length"].as_f64().unwrap();
        assert!((1.0..=8.0).contains(&tau), "{kind}: {tau}");
    }
}
