//! The built binary with Domino, whose loss moves from the plain to the corrected logits.

mod common;

use std::fs;

use common::decoding::{greedy, loads};
use common::{Bench, STEPS, start_until, workspace};
use deepspec_testkit::tiny;
use serde_json::{Value, json};
use tch::Tensor;

const DOMINO: &str = "drafter={domino: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, \
                      gru: {hidden_size: 16, rank: 8}, lambda_base: {decay_ratio: 0.5}}}";

fn set<'a>(changes: &[&'a str]) -> Vec<&'a str> {
    changes.iter().flat_map(|change| ["--set", change]).collect()
}

fn trained(changes: &[&str]) -> Bench {
    let bench = Bench::new();
    bench.succeeds(&set(changes));
    bench
}

fn config(bench: &Bench) -> Value {
    serde_json::from_slice(&fs::read(bench.path("out/t/step_latest/config.json")).unwrap()).unwrap()
}

/// λ of every step.
fn lambdas(bench: &Bench) -> Vec<f64> {
    bench.metrics().iter().map(|line| line["lambda_base"].as_f64().unwrap()).collect()
}

#[test]
fn it_learns_by_its_schedule_and_drafts() {
    for slots in ["anchor_predicts", "fill_in"] {
        let slots_setting = format!("drafter.domino.slots={slots}");
        let changes = [DOMINO, &slots_setting];
        let bench = trained(&changes);
        let losses = bench.losses();
        assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
        for (step, (lambda, line)) in lambdas(&bench).into_iter().zip(bench.metrics()).enumerate() {
            let expected = (1.0 - step as f64 / (0.5 * STEPS as f64)).max(0.0);
            assert!((lambda - expected).abs() < 1e-6, "step {step}: {lambda}, {expected}");
            let of = |key: &str| line[key].as_f64().unwrap();
            let both = (1.0 - lambda) * of("ce_loss") + lambda * of("base_loss");
            assert!((of("loss") - both).abs() < 1e-5 * both, "{line}");
            assert!(of("tau_probabilistic") > 1.0 && of("base_tau_probabilistic") > 1.0, "{line}");
        }
        let (gamma, fills_in) = if slots == "fill_in" { (4, json!(false)) } else { (5, Value::Null) };
        let config = config(&bench);
        assert_eq!(config["architectures"], json!(["Qwen3DominoModel"]));
        assert_eq!((&config["gru_hidden_dim"], &config["emb_dim"]), (&json!(16), &json!(8)));
        assert_eq!((&config["pure_draft_prefix_len"], &config["sample_from_anchor"]), (&json!(1), &fills_in));
        let (target, drafter) = (workspace().join("assets/tiny-target"), loads(&bench));
        assert_eq!((drafter.draft_len(), drafter.has_confidence_head()), (gamma, false));
        assert_eq!(greedy(&target, None), greedy(&target, Some(drafter)), "{slots}");
        // Sequences share a forward, or have one each; layers are kept, or computed again.
        for more in ["train.local_batch_size=1", "train.recompute=true"] {
            let other = trained(&[&changes[..], &[more]].concat());
            for (a, b) in losses.iter().zip(other.losses()) {
                assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{more}: {a} and {b}");
            }
        }
    }
}

/// A resumed run goes on with the λ of its step.
#[test]
fn a_killed_run_ends_with_the_same_bytes() {
    let (whole, killed) = (trained(&[DOMINO]), Bench::new());
    let mut child = start_until(&killed, 4, &set(&[DOMINO]));
    child.kill().unwrap();
    child.wait().unwrap();
    killed.succeeds(&set(&[DOMINO]));
    assert!(killed.result() == whole.result());
    assert_eq!(lambdas(&killed), lambdas(&whole));
}

#[test]
fn parts_are_frozen_and_mistakes_are_named() {
    let from = trained(&[DOMINO, "train.max_train_steps=3"]);
    let init = format!("train.init_from={}", from.path("out/t/step_3").display());
    let parts = |bench: &Bench| {
        let mut tensors =
            Tensor::read_safetensors(bench.path("out/t/step_latest/model.safetensors")).unwrap();
        tensors.retain(|(name, _)| name != "embed_tokens.weight" && name != "lm_head.weight");
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        tensors
    };
    for part in ["backbone", "correction"] {
        let bench = Bench::new();
        bench.succeeds(&set(&[DOMINO, &init, &format!("train.freeze=[{part}]"), "train.max_train_steps=6"]));
        for ((name, before), (_, after)) in parts(&from).iter().zip(parts(&bench)) {
            let is_head = name.starts_with("prefix_gru.") || name.starts_with("embed_proj.");
            assert_eq!(before.equal(&after), is_head == (part == "correction"), "{part} frozen: {name}");
        }
    }
    let bench = Bench::new();
    let wrong = |changes: &[&str], hints: &[&str]| {
        bench.fails(&set(&[&[DOMINO], changes].concat()), 2, hints);
    };
    wrong(&[&init, "train.freeze=[markov]"], &["Domino has no part `markov`", "`correction`"]);
    wrong(&[&init, "drafter.domino.gru.rank=9"], &["train.init_from", "gru.rank 8 there, 9 here"]);
    wrong(&["drafter.domino.gru.hidden_size=0"], &["drafter.domino.gru.hidden_size", "0 is not between 1"]);
    wrong(&["drafter.domino.block_size=1"], &["drafter.domino.block_size", "a block drafts 1 token"]);
    wrong(
        &["drafter.domino.block_size=2", "drafter.domino.slots=fill_in"],
        &["drafter.domino.block_size", "the first one is not corrected"],
    );
    wrong(
        &["drafter.domino.mask_token_id=5000"],
        &["drafter.domino.mask_token_id", "outside the vocabulary"],
    );
}

/// A Gemma 4 and a Llama target that compute their states while their drafters train.
#[test]
fn other_families_have_drafters() {
    for family in ["gemma4", "llama"] {
        let bench = Bench::new();
        let dir = bench.path(family);
        fs::create_dir(&dir).unwrap();
        match family {
            "llama" => tiny::llama(&dir),
            _ => tiny::gemma4(&dir, 512),
        }
        let target = format!("target={{model: {}, layer_ids: [0, 1]}}", dir.display());
        let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
        let marks = "data.chat_template={name: mine, assistant_header: \"<|im_start|>assistant\\n\", end_of_turn: \"<|im_end|>\\n\"}";
        let changes = [
            target.as_str(),
            DOMINO,
            "drafter.domino.mask_token_id=4",
            &input,
            if family == "llama" { marks } else { "data.chat_template=gemma4" },
            "data.states=online",
            "data.max_length=512",
            "train.max_train_steps=4",
        ];
        bench.succeeds(&set(&changes));
        // A Llama's block drafter has the Qwen3 layers that engines run.
        let class = if family == "llama" { "Qwen3DominoModel" } else { "Gemma4DominoModel" };
        assert_eq!(config(&bench)["architectures"], json!([class]));
        assert_eq!(greedy(&dir, None), greedy(&dir, Some(loads(&bench))), "{family}");
    }
}
