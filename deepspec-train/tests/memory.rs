//! Compares the memory that `--plan` predicts with the peak that `--bench` measures, and with real
//! runs.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::Bench;
use deepspec_checkpoint::DraftVocab;
use deepspec_testkit::skip::{Kind, skip};
use serde_json::{Value, json};

/// Largest relative error of a plan with estimated activations, as on a CPU.
const TOLERANCE: f64 = 0.3;
/// Minimum memory of a real run beyond the program itself; its samples are those of the toy target.
const LEAST_REAL: u64 = 150 << 20;
/// Minimum memory beyond the program itself, so that the comparison is about tensors.
const LEAST_TENSORS: u64 = 300 << 20;
const VOCAB: usize = 4096;
/// Shapes of targets in `configs/shapes`.
const QWEN3: &str = "qwen3_4b";
const GEMMA4: &str = "gemma4_12b";
const MIXTURE: &str = "qwen3_5_35b_a3b";

/// One setting: drafter and sizes.
struct Case {
    drafter: Value,
    target: &'static str,
    precision: &'static str,
    samples: usize,
    tokens: usize,
    recompute: bool,
}

fn block(anchors: usize, block_size: usize, layers: usize) -> Value {
    json!({"block_size": block_size, "num_draft_layers": layers, "mask_token_id": VOCAB - 1, "num_anchors": anchors})
}

fn dspark(anchors: usize, layers: usize) -> Value {
    let mut block = block(anchors, 7, layers);
    block["markov"] = json!({"type": "vanilla", "rank": 128});
    block["confidence"] = json!({"with_markov": true, "alpha": 1.0});
    block["loss"] = json!({"ce_alpha": 0.1, "l1_alpha": 0.9, "decay_gamma": 4.0});
    json!({"dspark": block})
}

fn dflash(anchors: usize, block_size: usize) -> Value {
    let mut block = block(anchors, block_size, 2);
    block["loss"] = json!({"ce_alpha": 1.0, "l1_alpha": 0.0, "decay_gamma": 4.0});
    json!({"dflash": block})
}

/// DFlash with causal blocks.
fn jetspec() -> Value {
    let mut block = block(96, 8, 2);
    block["causal"] = json!(true);
    block["loss"] = json!({"kl_alpha": 1.0, "decay_gamma": 4.0});
    json!({"dflash": block})
}

fn dspark_with_sinks() -> Value {
    let mut drafter = dspark(96, 2);
    drafter["dspark"]["attention_sinks"] = json!(true);
    drafter
}

fn dflash2() -> Value {
    let mut block = block(96, 8, 2);
    block["convolution"] = json!({"kernel_size": 6, "group_size": 16});
    block["selector"] = json!({"rank": 64, "top_k": 16});
    json!({"dflash2": block})
}

fn domino(anchors: usize, block_size: usize) -> Value {
    let mut block = block(anchors, block_size, 2);
    block["gru"] = json!({"hidden_size": 1024, "rank": 256});
    json!({"domino": block})
}

fn xpress() -> Value {
    let mut block = block(96, 8, 2);
    block["refiner"] = json!({"rank": 128});
    block["backbone"] = json!("dflash2");
    block["convolution"] = json!({"kernel_size": 6, "group_size": 16});
    json!({"xpress": block})
}

fn dspark_v4() -> Value {
    json!({"dspark_v4": {"mask_token_id": VOCAB - 1, "num_anchors": 96, "markov_rank": 128, "stage_config": {
        "num_attention_heads": 8, "head_dim": 128, "q_lora_rank": 256, "o_lora_rank": 128, "o_groups": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    }}})
}

fn eagle3() -> Value {
    json!({"eagle3": {"num_draft_layers": 1, "ttt_length": 7, "step_loss_decay": 0.8}})
}

fn mtp() -> Value {
    json!({"mtp": {"num_speculative_steps": 3}})
}

/// An assistant, whose target has 12 layers.
fn assistant() -> Value {
    let sizes = json!({"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 8});
    json!({"gemma4_assistant": sizes})
}

fn peagle(segments: usize) -> Value {
    json!({"peagle": {"num_draft_layers": 2, "mask_token_id": VOCAB - 1, "segments": segments}})
}

/// A folder with the config.json of a medium-sized target.
fn target(dir: &Path, shape: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/shapes").join(format!("{shape}.json"));
    let mut config: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let sizes = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    for (key, size) in [
        ("hidden_size", 512),
        ("intermediate_size", 1536),
        ("num_hidden_layers", 12),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 64),
        ("vocab_size", VOCAB),
    ] {
        sizes[key] = json!(size);
    }
    let own: &[(&str, usize)] = match shape {
        GEMMA4 => &[("global_head_dim", 128)],
        MIXTURE => &[
            ("num_experts", 16),
            ("num_experts_per_tok", 4),
            ("moe_intermediate_size", 256),
            ("shared_expert_intermediate_size", 256),
        ],
        _ => &[],
    };
    for (key, size) in own {
        sizes[key] = json!(size);
    }
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn asked(recipe: &Path, args: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-train"));
    command.arg("--config").arg(recipe).args(args).args(["--json", "--device", "cpu"]);
    let output = command.env("OMP_NUM_THREADS", "1").env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Whether bfloat16 products run in instructions of the processor. Elsewhere these tests take minutes.
fn has_bfloat16_products() -> bool {
    let has = fs::read_to_string("/proc/cpuinfo").is_ok_and(|cpu| cpu.contains("amx_bf16"));
    if !has {
        skip(Kind::Absent, "this processor has no AMX, without which bfloat16 products take minutes");
    }
    has
}

impl Case {
    /// Runs both commands as a user would.
    fn check(self) {
        self.check_with(&json!({}));
    }

    /// As [`Self::check`], with these further keys of `train`.
    fn check_with(self, own: &Value) {
        let dir = tempfile::tempdir().unwrap();
        target(dir.path(), self.target);
        let layers: &[i64] = match () {
            () if self.drafter.get("mtp").is_some() => &[],
            () if self.drafter.get("gemma4_assistant").is_some() => &[9, 10],
            () => &[1, 3, 5],
        };
        let mut recipe = json!({
            "name": "memory",
            "target": {"model": dir.path(), "layer_ids": layers},
            "drafter": self.drafter,
            "data": {
                "states": {"cache": dir.path().join("none")},
                "chat_template": "qwen",
                "max_length": self.tokens
            },
            "train": {
                "lr": 1e-3,
                "precision": self.precision,
                "local_batch_size": self.samples,
                "global_batch_size": self.samples,
                "recompute": self.recompute,
                "max_train_steps": 1
            },
            "logging": {"output_dir": dir.path().join("out")}
        });
        recipe["train"].as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let path = dir.path().join("recipe.yaml");
        fs::write(&path, recipe.to_string()).unwrap();
        let plan = asked(&path, &["--plan"]);
        // The bench reads no cache.
        let planned = plan["memory_total"].as_u64().unwrap() - plan["memory"]["cache"].as_u64().unwrap();
        let measured = asked(&path, &["--bench", "1"])["host_memory_peak_bytes"].as_u64().unwrap();
        let ratio = planned as f64 / measured as f64;
        eprintln!("planned {planned}, measured {measured}, ratio {ratio:.3}: {}", plan["memory"]);
        let tensors = planned - plan["memory"]["program"].as_u64().unwrap();
        assert!(tensors >= LEAST_TENSORS, "{tensors} bytes of tensors prove little");
        assert!(
            (ratio - 1.0).abs() <= TOLERANCE,
            "planned {planned}, measured {measured}: {}",
            plan["memory"]
        );
    }
}

#[test]
fn dspark_in_float32() {
    Case {
        drafter: dspark(128, 2),
        target: QWEN3,
        precision: "fp32",
        samples: 2,
        tokens: 1024,
        recompute: false,
    }
    .check();
}

#[test]
fn dspark_in_bfloat16() {
    if !has_bfloat16_products() {
        return;
    }
    Case {
        drafter: dspark(128, 3),
        target: QWEN3,
        precision: "bf16",
        samples: 2,
        tokens: 1024,
        recompute: false,
    }
    .check();
}

#[test]
fn dspark_with_many_short_samples() {
    Case {
        drafter: dspark(48, 4),
        target: QWEN3,
        precision: "fp32",
        samples: 6,
        tokens: 384,
        recompute: false,
    }
    .check();
}

#[test]
fn dspark_that_recomputes_its_layers() {
    let drafter = dspark(128, 6);
    Case { drafter, target: QWEN3, precision: "fp32", samples: 2, tokens: 1024, recompute: true }.check();
}

/// LoRA holds target weights twice, and a backward pass computes their gradients. Neither plan nor bench
/// reads the drafter.
#[test]
fn dspark_with_lora() {
    let drafter = dspark(16, 7);
    Case { drafter, target: QWEN3, precision: "fp32", samples: 1, tokens: 256, recompute: false }
        .check_with(&json!({"lora": {"r": 16}, "init_from": "unread"}));
}

#[test]
fn dflash_with_long_blocks() {
    Case {
        drafter: dflash(64, 16),
        target: QWEN3,
        precision: "fp32",
        samples: 2,
        tokens: 768,
        recompute: false,
    }
    .check();
}

#[test]
fn jetspec_in_float32() {
    Case { drafter: jetspec(), target: QWEN3, precision: "fp32", samples: 2, tokens: 768, recompute: false }
        .check();
}

#[test]
fn dspark_with_attention_sinks() {
    let drafter = dspark_with_sinks();
    Case { drafter, target: QWEN3, precision: "fp32", samples: 2, tokens: 1024, recompute: false }.check();
}

#[test]
fn xpress_with_three_rounds_on_dflash2() {
    Case { drafter: xpress(), target: QWEN3, precision: "fp32", samples: 2, tokens: 768, recompute: false }
        .check();
}

#[test]
fn dflash2_with_six_taps() {
    Case { drafter: dflash2(), target: QWEN3, precision: "fp32", samples: 2, tokens: 768, recompute: false }
        .check();
}

#[test]
fn domino_in_float32() {
    let drafter = domino(64, 16);
    Case { drafter, target: QWEN3, precision: "fp32", samples: 2, tokens: 768, recompute: false }.check();
}

#[test]
fn domino_that_recomputes_its_layers() {
    let drafter = domino(96, 16);
    Case { drafter, target: QWEN3, precision: "fp32", samples: 2, tokens: 768, recompute: true }.check();
}

#[test]
fn dspark_of_deepseek_v4_in_float32() {
    let drafter = dspark_v4();
    Case { drafter, target: QWEN3, precision: "fp32", samples: 2, tokens: 768, recompute: false }.check();
}

#[test]
fn eagle3_in_float32() {
    Case { drafter: eagle3(), target: QWEN3, precision: "fp32", samples: 2, tokens: 512, recompute: false }
        .check();
}

#[test]
fn eagle3_in_bfloat16() {
    if !has_bfloat16_products() {
        return;
    }
    Case { drafter: eagle3(), target: QWEN3, precision: "bf16", samples: 1, tokens: 1024, recompute: false }
        .check();
}

#[test]
fn eagle3_with_a_reduced_vocabulary() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vocab.safetensors");
    DraftVocab::most_frequent(&[1; VOCAB], VOCAB / 4).unwrap().write(&file).unwrap();
    let mut drafter = eagle3();
    drafter["eagle3"]["draft_vocab"] = json!(file);
    Case { drafter, target: QWEN3, precision: "fp32", samples: 2, tokens: 640, recompute: false }.check();
}

#[test]
fn p_eagle_in_float32() {
    Case { drafter: peagle(1), target: QWEN3, precision: "fp32", samples: 2, tokens: 768, recompute: false }
        .check();
}

#[test]
fn p_eagle_in_segments() {
    Case { drafter: peagle(3), target: QWEN3, precision: "fp32", samples: 2, tokens: 1024, recompute: false }
        .check();
}

#[test]
fn p_eagle_in_bfloat16() {
    if !has_bfloat16_products() {
        return;
    }
    Case { drafter: peagle(1), target: QWEN3, precision: "bf16", samples: 2, tokens: 1024, recompute: false }
        .check();
}

#[test]
fn mtp_1_in_float32() {
    Case { drafter: mtp(), target: QWEN3, precision: "fp32", samples: 2, tokens: 1024, recompute: false }
        .check();
}

#[test]
fn mtp_1_in_bfloat16() {
    if !has_bfloat16_products() {
        return;
    }
    Case { drafter: mtp(), target: QWEN3, precision: "bf16", samples: 2, tokens: 1024, recompute: false }
        .check();
}

#[test]
fn mtp_1_for_gemma4() {
    Case { drafter: mtp(), target: GEMMA4, precision: "fp32", samples: 2, tokens: 1024, recompute: false }
        .check();
}

#[test]
fn mtp_1_with_experts() {
    Case { drafter: mtp(), target: MIXTURE, precision: "fp32", samples: 2, tokens: 768, recompute: false }
        .check();
}

#[test]
fn an_assistant_of_gemma4() {
    Case {
        drafter: assistant(),
        target: GEMMA4,
        precision: "fp32",
        samples: 1,
        tokens: 640,
        recompute: false,
    }
    .check();
}

#[test]
fn dspark_for_gemma4() {
    Case {
        drafter: dspark(128, 2),
        target: GEMMA4,
        precision: "fp32",
        samples: 2,
        tokens: 1024,
        recompute: false,
    }
    .check();
}

/// Runs a few steps as a user would, with enough layers and anchors to matter.
fn real(settings: &[&str]) {
    real_in(&Bench::new(), settings);
}

fn real_in(bench: &Bench, settings: &[&str]) {
    let sizes = ["train.max_train_steps=6", "train.local_batch_size=4", "logging.logging_steps=6"];
    let args: Vec<&str> = sizes.iter().chain(settings).flat_map(|setting| ["--set", setting]).collect();
    let mut asking = args.clone();
    asking.extend(["--plan", "--json"]);
    let plan: Value = serde_json::from_slice(&bench.run(&asking).stdout).unwrap();
    let planned = plan["memory_total"].as_u64().unwrap();
    bench.succeeds(&args);
    let lines = bench.metrics();
    let measured = lines.iter().rev().find_map(|line| line["peak_memory_bytes"].as_u64()).unwrap();
    let ratio = planned as f64 / measured as f64;
    eprintln!("planned {planned}, measured {measured}, ratio {ratio:.3}: {}", plan["memory"]);
    let tensors = planned - plan["memory"]["program"].as_u64().unwrap();
    assert!(tensors >= LEAST_REAL, "{tensors} bytes of tensors prove little");
    assert!((ratio - 1.0).abs() <= TOLERANCE, "planned {planned}, measured {measured}: {}", plan["memory"]);
}

#[test]
fn of_a_run_on_a_cache() {
    real(&[
        "drafter.dspark.num_anchors=64",
        "drafter.dspark.num_draft_layers=6",
        "drafter.dspark.block_size=8",
    ]);
}

#[test]
fn of_a_run_beside_its_target() {
    let bench = Bench::new();
    let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
    real_in(
        &bench,
        &[
            "data.states=online",
            &input,
            "drafter.dspark.num_anchors=64",
            "drafter.dspark.num_draft_layers=6",
            "drafter.dspark.block_size=8",
            // A whole epoch, because the plan is for its largest forward.
            "train.max_train_steps=18",
        ],
    );
}

#[test]
fn of_a_run_that_measures_accepted_lengths() {
    // The plan counts KV caches at their maximum length, and memory follows their actual length:
    // most of these answers are truncated.
    let suites = common::workspace().join("eval_datasets");
    let eval = format!(
        "eval={{suites_dir: {}, suites: [smoke-math], limit: 24, slots: 24, max_new_tokens: 96}}",
        suites.display()
    );
    real(&[
        "drafter.dspark.num_anchors=64",
        "drafter.dspark.num_draft_layers=8",
        "logging.eval_every=3",
        &eval,
    ]);
}
