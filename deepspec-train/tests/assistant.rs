//! The built binary fine-tunes an assistant of Gemma 4: states beside the target and from a cache, checkpoints, and mistakes.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::decoding::greedy;
use common::{Bench, start_until};
use deepspec_drafters::{DrafterOptions, load_drafter};
use deepspec_testkit::tiny;
use serde_json::{Value, json};
use tch::{Device, Kind};

/// More than one epoch of 6 steps.
const STEPS: usize = 7;

fn read(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap()
}

/// A target and its assistant beside the rows of a bench, and what a recipe says about them.
struct Pair {
    bench: Bench,
    target: PathBuf,
    assistant: PathBuf,
    changes: Vec<String>,
}

impl Pair {
    fn new() -> Self {
        let bench = Bench::new();
        let [target, assistant] = ["gemma", "assistant"].map(|name| bench.path(name));
        for dir in [&target, &assistant] {
            fs::create_dir(dir).unwrap();
        }
        tiny::gemma4(&target, 512);
        tiny::gemma4_assistant(&assistant, 512);
        let text = &read(&assistant)["text_config"];
        let drafter = json!({"gemma4_assistant": {
            "hidden_size": text["hidden_size"], "intermediate_size": text["intermediate_size"],
            "num_attention_heads": text["num_attention_heads"], "layer_types": text["layer_types"],
        }});
        let changes = vec![
            format!("target={{model: '{}', layer_ids: [1, 2]}}", target.display()),
            format!("drafter={drafter}"),
            format!("data.input=['{}']", bench.path("rows.jsonl").display()),
            "data.states=online".into(),
            "data.chat_template=gemma4".into(),
            "data.max_length=512".into(),
            "train.lr=5e-3".into(),
            format!("train.max_train_steps={STEPS}"),
            format!("train.init_from={}", assistant.display()),
        ];
        Self { bench, target, assistant, changes }
    }

    fn with<'a>(&'a self, changes: &[&'a str]) -> Vec<&'a str> {
        let all = self.changes.iter().map(String::as_str).chain(changes.iter().copied());
        all.flat_map(|change| ["--set", change]).collect()
    }

    fn latest(&self) -> PathBuf {
        self.bench.path("out/t/step_latest")
    }
}

#[test]
fn it_is_fine_tuned_and_goes_on_after_a_kill() {
    let pair = Pair::new();
    pair.bench.succeeds(&pair.with(&[]));
    let losses = pair.bench.losses();
    assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
    let metrics = pair.bench.metrics().pop().unwrap();
    assert_eq!(metrics["step_loss"].as_array().map(Vec::len), Some(3), "{metrics}");
    let config = read(&pair.latest());
    assert_eq!(config["architectures"], json!(["Gemma4UnifiedAssistantForCausalLM"]));
    assert_eq!((&config["backbone_hidden_size"], &config["tie_word_embeddings"]), (&json!(32), &json!(true)));
    assert_eq!(config["text_config"]["num_kv_shared_layers"], json!(3));
    let options = DrafterOptions {
        device: Device::Cpu,
        kind: Kind::Float,
        slots: 1,
        target: Some(pair.target.clone()),
    };
    let drafter = load_drafter(&pair.latest(), &options).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(greedy(&pair.target, None), greedy(&pair.target, Some(drafter)));

    // A run goes on without the folder that it started from.
    let killed = Pair::new();
    let mut child = start_until(&killed.bench, 4, &killed.with(&[]));
    child.kill().unwrap();
    child.wait().unwrap();
    fs::remove_dir_all(&killed.assistant).unwrap();
    killed.bench.succeeds(&killed.with(&[]));
    assert!(killed.bench.result_of(STEPS) == pair.bench.result_of(STEPS));

    // The first epoch writes the states into a cache, the second one reads them.
    let cached = Pair::new();
    let states = format!("data.states={{hybrid: '{}'}}", cached.bench.path("written").display());
    cached.bench.succeeds(&cached.with(&[&states, "train.local_batch_size=1"]));
    for (a, b) in losses.iter().zip(cached.bench.losses()) {
        assert!((a - b).abs() < 1e-3 * a, "{a} and {b}");
    }
}

/// LoRA trains matrices beside the layers. Evaluations in between draft with the merged weights.
#[test]
fn lora_and_frozen_parts_train() {
    let pair = Pair::new();
    let suite = pair.bench.path("suite.jsonl");
    fs::write(&suite, "{\"turns\": [\"2 + 3?\"]}\n").unwrap();
    let eval = format!("eval={{suites: ['{}'], limit: 1, max_new_tokens: 8, slots: 1}}", suite.display());
    let short = ["train.max_train_steps=2", "logging.eval_every=2", &eval];
    pair.bench.succeeds(&pair.with(&[&short[..], &["train.lora={r: 2}"]].concat()));
    assert!(pair.latest().join("train_state/lora_base.safetensors").exists());
    let frozen = ["train.freeze=[head, projections]", "name=frozen"];
    pair.bench.succeeds(&pair.with(&[&short[..1], &frozen].concat()));
    let wrong = "train.freeze=[fusion]";
    pair.bench.fails(
        &pair.with(&[wrong]),
        2,
        &["an assistant of Gemma 4 has no part `fusion`", "`projections`"],
    );
    let wide = "drafter.gemma4_assistant.intermediate_size=48";
    pair.bench.fails(
        &pair.with(&[wide, "name=wide"]),
        2,
        &["train.init_from", "intermediate_size 32 there, 48 here"],
    );
}
