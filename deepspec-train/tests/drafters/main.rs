//! The built binary with every kind of drafter: training, saved checkpoints, and initialisation
//! from other drafters.

#[path = "../common/mod.rs"]
mod common;
mod targets;

use std::fs;
use std::path::PathBuf;

use common::decoding::{greedy, loads};
use common::{Bench, DFLASH2, DSPARK_V4, STEPS};
use deepspec_core::Tap;
use deepspec_models::Weights;
use deepspec_testkit::golden::{Values, arrays};
use serde_json::{Value, json};
use tch::{Device, Kind};

const EAGLE3: &str = "drafter={eagle3: {ttt_length: 3}}";
const DFLASH: &str =
    "drafter={dflash: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6}}";

const XPRESS: &str = "drafter={xpress: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, refiner: {rank: 16}}}";

const XPRESS_ON_DFLASH2: &str = "drafter={xpress: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, \
    backbone: dflash2, refiner: {rank: 16}}}";

fn set<'a>(changes: &[&'a str]) -> Vec<&'a str> {
    changes.iter().flat_map(|change| ["--set", change]).collect()
}

fn trained(changes: &[&str]) -> Bench {
    let bench = Bench::new();
    bench.succeeds(&set(changes));
    bench
}

fn step(bench: &Bench, step: usize) -> PathBuf {
    bench.path("out/t").join(format!("step_{step}"))
}

fn config(bench: &Bench, at: usize) -> Value {
    serde_json::from_slice(&fs::read(step(bench, at).join("config.json")).unwrap()).unwrap()
}

fn last_metrics(bench: &Bench) -> Value {
    let text = fs::read_to_string(bench.path("out/t/metrics.jsonl")).unwrap();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

#[test]
fn eagle3_learns_and_is_saved_for_others() {
    let bench = trained(&[EAGLE3]);
    let losses = bench.losses();
    assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
    let metrics = last_metrics(&bench);
    for key in ["step_loss", "accuracy", "accept_rate", "valid_tokens"] {
        assert_eq!(metrics[key].as_array().map(Vec::len), Some(3), "{key}: {metrics}");
    }
    assert!(["tau_greedy", "tau_probabilistic"].iter().all(|key| metrics[key].as_f64().unwrap() > 1.0));
    let config = config(&bench, STEPS);
    assert_eq!(config["architectures"], json!(["Qwen3Eagle3Model"]));
    assert_eq!((&config["ttt_length"], &config["draft_num_hidden_layers"]), (&json!(3), &json!(1)));
    let drafter = loads(&bench);
    assert_eq!((drafter.taps(), drafter.has_confidence_head()), (&[Tap::Layer(1), Tap::Layer(4)][..], false));
    let split = trained(&[EAGLE3, "train.local_batch_size=1"]);
    for (a, b) in bench.losses().iter().zip(split.losses()) {
        assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{a} and {b}");
    }
}

#[test]
fn eagle3_resumes_to_the_same_bytes() {
    let whole = trained(&[EAGLE3]);
    let bench = Bench::new();
    let mut child = common::start_until(&bench, 4, &set(&[EAGLE3]));
    child.kill().unwrap();
    child.wait().unwrap();
    bench.succeeds(&set(&[EAGLE3]));
    assert!(bench.result() == whole.result());
}

#[test]
fn supervising_labels_trains_another_drafter() {
    let shifted = trained(&[EAGLE3]);
    let labels = trained(&["drafter={eagle3: {ttt_length: 3, supervise: labels}}"]);
    assert!(labels.result() != shifted.result());
    assert!(labels.losses()[STEPS - 1] < labels.losses()[0]);
}

#[test]
fn layers_with_windows_are_saved_as_such() {
    let bench = trained(&[
        "drafter.dspark.num_draft_layers=2",
        "drafter.dspark.sliding_window=32",
        "drafter.dspark.layer_types=[sliding_attention, full_attention]",
    ]);
    let config = config(&bench, STEPS);
    assert_eq!(config["layer_types"], json!(["sliding_attention", "full_attention"]));
    assert_eq!((&config["sliding_window"], &config["use_sliding_window"]), (&json!(32), &json!(true)));
    loads(&bench);
}

/// All values of a tensor in a checkpoint.
fn values(bench: &Bench, at: usize, name: &str) -> Vec<f32> {
    let file = step(bench, at).join("model.safetensors");
    match &arrays(&file)[name].values {
        Values::Float(values) => values.clone(),
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn dspark_starts_from_dflash_with_fresh_heads() {
    let dflash = trained(&[DFLASH]);
    let from = format!("train.init_from={}", step(&dflash, STEPS).display());
    let (warm, cold) = (Bench::new(), Bench::new());
    warm.succeeds(&["--set", &from, "--init-only"]);
    cold.succeeds(&["--init-only"]);
    for name in ["fc.weight", "norm.weight", "layers.0.mlp.up_proj.weight"] {
        assert_eq!(values(&warm, 0, name), values(&dflash, STEPS, name), "{name}");
        assert_ne!(values(&warm, 0, name), values(&cold, 0, name), "{name}");
    }
    for name in
        ["markov_head.markov_w1.weight", "markov_head.gate_proj.weight", "confidence_head.proj.weight"]
    {
        assert_eq!(values(&warm, 0, name), values(&cold, 0, name), "{name}");
    }
    // A trained drafter can be trained further with another recipe. A run that has begun ignores
    // `init_from`.
    let fine = Bench::new();
    fine.succeeds(&set(&[
        &format!("train.init_from={}", warm.path("out/t/step_0").display()),
        "train.lr=1e-4",
    ]));
    assert!(fine.losses()[0] < 20.0);
    fs::remove_dir_all(step(&warm, 0)).unwrap();
    fine.succeeds(&set(&[
        &format!("train.init_from={}", warm.path("out/t/step_0").display()),
        "train.lr=1e-4",
    ]));
}

#[test]
fn a_start_from_another_drafter_is_refused_by_name() {
    let dspark = trained(&[]);
    let bench = Bench::new();
    let from = format!("train.init_from={}", step(&dspark, STEPS).display());
    let refused = |changes: &[&str], hints: &[&str]| {
        let changes = [&[from.as_str()], changes].concat();
        bench.fails(&set(&changes), 2, &[&["train.init_from"], hints].concat());
    };
    refused(&[EAGLE3], &["holds a block drafter", "another kind"]);
    refused(&["drafter.dspark.block_size=6"], &["block_size 5 there, 6 here"]);
    refused(&["drafter.dspark.num_draft_layers=2"], &["num_draft_layers 1 there, 2 here"]);
    refused(&["drafter.dspark.markov.rank=9"], &["rank 8", "rank 9"]);
    refused(&["drafter.dspark.sliding_window=8"], &["full attention there", "sliding_window 8 here"]);
    refused(&[DFLASH], &["markov", "confidence"]);
    bench.fails(&set(&["train.init_from=/nowhere"]), 2, &["train.init_from", "/nowhere"]);
    assert!(!bench.path("out/t/step_latest").exists());
    // A checkpoint that lacks tensors of its config.
    let torn = step(&dspark, STEPS);
    let weights = Weights::open(&torn, "drafter", Device::Cpu, Kind::Float).unwrap();
    let kept: Vec<_> = weights
        .unread_names()
        .into_iter()
        .filter(|name| name != "fc.weight")
        .map(|name| {
            let shape = arrays(&torn.join("model.safetensors"))[&name].shape.clone();
            (name.clone(), weights.get(&name, &shape).unwrap())
        })
        .collect();
    deepspec_models::save(&torn.join("model.safetensors"), &kept, Kind::BFloat16).unwrap();
    bench.fails(&set(&[&from]), 1, &["fc.weight"]);
}

/// The first slot of a block does not draft, so blocks of 5 draft 4 tokens; heads apply only to the
/// slots that draft.
#[test]
fn drafters_learn_to_fill_in() {
    let dflash = DFLASH.replace("block_size: 5", "block_size: 5, slots: fill_in");
    for (changes, heads) in [(dflash.as_str(), false), ("drafter.dspark.slots=fill_in", true)] {
        let bench = trained(&[changes]);
        let losses = bench.losses();
        assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
        let config = config(&bench, STEPS);
        assert_eq!((&config["sample_from_anchor"], &config["block_size"]), (&json!(false), &json!(5)));
        assert_eq!(last_metrics(&bench)["accept_rate"].as_array().map(Vec::len), Some(4));
        let (target, drafter) = (common::workspace().join("assets/tiny-target"), loads(&bench));
        assert_eq!((drafter.draft_len(), drafter.has_confidence_head()), (4, heads));
        assert_eq!(greedy(&target, None), greedy(&target, Some(drafter)), "{changes}");
        let other = ["--set", changes, "--set", "train.max_train_steps=1", "--overwrite"];
        let from = format!("train.init_from={}", step(&bench, STEPS).display());
        let anchored = changes
            .replace("slots: fill_in", "slots: anchor_predicts")
            .replace("=fill_in", "=anchor_predicts");
        let fresh = Bench::new();
        fresh.fails(&["--set", &anchored, "--set", &from], 2, &["slots fill_in there, anchor_predicts here"]);
        fresh.succeeds(&[&other[..], &["--set", &from]].concat());
    }
    let bench = Bench::new();
    let one = DFLASH.replace("block_size: 5", "block_size: 1, slots: fill_in");
    bench.fails(&["--set", &one], 2, &["drafter.dflash.block_size", "at least 2"]);
}

#[test]
fn dflash2_learns_drafts_and_goes_on_after_a_kill() {
    let bench = trained(&[DFLASH2]);
    let losses = bench.losses();
    assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
    let metrics = last_metrics(&bench);
    let recall = metrics["candidate_recall"].as_f64().unwrap();
    assert!(recall > 16.0 / 1024.0 && recall <= 1.0, "{metrics}");
    assert!(
        metrics["selector_loss"].as_f64().unwrap() > 0.0
            && metrics["loss"].as_f64() > metrics["ce_loss"].as_f64()
    );
    let config = config(&bench, STEPS);
    assert_eq!(config["architectures"], json!(["Qwen3DFlash2Model"]));
    assert_eq!((&config["selector_top_k"], &config["conv_group_size"]), (&json!(16), &json!(16)));
    let (target, drafter) = (common::workspace().join("assets/tiny-target"), loads(&bench));
    assert_eq!(drafter.draft_len(), 4);
    assert_eq!(greedy(&target, None), greedy(&target, Some(drafter)));
    let killed = Bench::new();
    let mut child = common::start_until(&killed, 4, &set(&[DFLASH2]));
    child.kill().unwrap();
    child.wait().unwrap();
    killed.succeeds(&set(&[DFLASH2]));
    assert!(killed.result() == bench.result());
    let wrong = |change: &str, hints: &[&str]| {
        Bench::new().fails(&set(&[DFLASH2, change]), 2, hints);
    };
    wrong(
        "drafter.dflash2.convolution.group_size=17",
        &["drafter.dflash2.convolution.group_size", "17 does not divide"],
    );
    wrong(
        "drafter.dflash2.selector.top_k=5000",
        &["drafter.dflash2.selector.top_k", "5000 is not between 1 and 1024"],
    );
    wrong("drafter.dflash2.block_size=1", &["drafter.dflash2.block_size", "at least 2"]);
    wrong("drafter.dflash2.slots=anchor_predicts", &["drafter.dflash2.slots"]);
    // Planning uses a model of width and vocabulary 64, which is too small for either setting.
    for change in ["selector.top_k=100", "convolution.group_size=48"] {
        let change = format!("drafter.dflash2.{change}");
        Bench::new().succeeds(&[set(&[DFLASH2, &change]), vec!["--plan"]].concat());
    }
}

/// A trained xPress, whose loss fell, which drafts, and which a killed run ends with, too.
fn learned_xpress(recipe: &str, backbone: &Value) -> Bench {
    let bench = trained(&[recipe]);
    let losses = bench.losses();
    assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
    let metrics = last_metrics(&bench);
    let number = |key: &str| metrics[key].as_f64().unwrap_or_else(|| panic!("no {key} in {metrics}"));
    let forced = 0.1 * number("ce_loss") + 0.45 * number("l1_loss");
    let whole = forced + 0.3 * number("consistency_loss") + 0.6 * number("base_loss");
    assert!((number("loss") - whole).abs() < 1e-5 * whole, "{metrics}");
    for key in ["consistency_accept_rate", "base_accept_rate"] {
        assert!(number(key) > 0.0 && number(key) < 1.0, "{key}: {metrics}");
    }
    let config = config(&bench, STEPS);
    assert_eq!(config["architectures"], json!(["Qwen3XPressModel"]));
    assert_eq!((&config["xpress_rank"], &config["xpress_num_passes"]), (&json!(16), &json!(6)));
    assert_eq!(&config["xpress_backbone"], backbone);
    let (target, drafter) = (common::workspace().join("assets/tiny-target"), loads(&bench));
    assert_eq!(drafter.draft_len(), 4);
    assert_eq!(greedy(&target, None), greedy(&target, Some(drafter)));
    let killed = Bench::new();
    let mut child = common::start_until(&killed, 4, &set(&[recipe]));
    child.kill().unwrap();
    child.wait().unwrap();
    killed.succeeds(&set(&[recipe]));
    assert!(killed.result() == bench.result());
    bench
}

#[test]
fn xpress_learns_drafts_and_goes_on_after_a_kill() {
    let backbones = [(XPRESS, Value::Null), (XPRESS_ON_DFLASH2, json!("dflash2"))];
    let [bench, _] = backbones.map(|(recipe, backbone)| learned_xpress(recipe, &backbone));
    // Sequences share a forward, or have one each.
    let split = trained(&[XPRESS, "train.local_batch_size=1"]);
    for (a, b) in bench.losses().iter().zip(split.losses()) {
        assert!((a - b).abs() < 1e-4 * a.abs().max(1.0), "{a} and {b}");
    }
    let wrong = |change: &str, hints: &[&str]| {
        Bench::new().fails(&set(&[XPRESS, change]), 2, hints);
    };
    wrong("drafter.xpress.refiner.rank=0", &["drafter.xpress.refiner.rank", "0 is not between 1 and"]);
    wrong(
        "drafter.xpress.refiner.num_passes=65",
        &["drafter.xpress.refiner.num_passes", "65 is not between 1 and 64"],
    );
    wrong("drafter.xpress.mask_token_id=5000", &["drafter.xpress.mask_token_id", "5000 is outside"]);
    Bench::new().fails(
        &set(&[XPRESS_ON_DFLASH2, "drafter.xpress.convolution={group_size: 17}"]),
        2,
        &["drafter.xpress.convolution.group_size", "17 does not divide"],
    );
    // Planning uses a model of width and vocabulary 64, which is too small for either setting.
    let large = ["drafter.xpress.refiner.rank=100", "drafter.xpress.convolution={group_size: 48}"];
    let large = [&[XPRESS_ON_DFLASH2], &large[..]].concat();
    Bench::new().succeeds(&[set(&large), vec!["--plan"]].concat());
    // Another number of passes fits the same weights, another rank does not.
    let init = format!("train.init_from={}", step(&bench, STEPS).display());
    let again = Bench::new();
    again.succeeds(&set(&[XPRESS, &init, "drafter.xpress.refiner.num_passes=2", "train.max_train_steps=1"]));
    let other = Bench::new();
    other.fails(
        &set(&[XPRESS, &init, "drafter.xpress.refiner.rank=8"]),
        2,
        &["refiner.rank 16 there, 8 here"],
    );
    other.fails(
        &set(&[XPRESS, &init, "drafter.xpress.backbone=dflash2"]),
        2,
        &["backbone dflash there, dflash2 here"],
    );
}

#[test]
fn dspark_of_deepseek_v4_learns_drafts_and_goes_on_after_a_kill() {
    let bench = trained(&[DSPARK_V4]);
    let losses = bench.losses();
    assert!(losses[STEPS - 1] < 0.95 * losses[0], "the loss does not fall: {losses:?}");
    let metrics = last_metrics(&bench);
    assert!(metrics["confidence_loss"].as_f64().is_some_and(|loss| loss > 0.0), "{metrics}");
    let config = config(&bench, STEPS);
    assert_eq!(config["architectures"], json!(["Qwen3DSparkV4Model"]));
    assert_eq!(config["stage_config"]["hc_mult"], json!(4));
    let (target, drafter) = (common::workspace().join("assets/tiny-target"), loads(&bench));
    assert_eq!(drafter.draft_len(), 4);
    assert_eq!(greedy(&target, None), greedy(&target, Some(drafter)));
    let killed = Bench::new();
    let mut child = common::start_until(&killed, 4, &set(&[DSPARK_V4]));
    child.kill().unwrap();
    child.wait().unwrap();
    killed.succeeds(&set(&[DSPARK_V4]));
    assert!(killed.result() == bench.result());
    let wrong = |change: &str, hints: &[&str]| {
        Bench::new().fails(&set(&[DSPARK_V4, change]), 2, hints);
    };
    wrong(
        "drafter.dspark_v4.stage_config.o_groups=3",
        &["drafter.dspark_v4.stage_config", "3 does not divide the 2"],
    );
    wrong("drafter.dspark_v4.stage_config.heads=3", &["drafter.dspark_v4.stage_config.heads"]);
    wrong("drafter.dspark_v4.markov_rank=0", &["drafter.dspark_v4.markov_rank", "0 is not between 1 and"]);
    let init = format!("train.init_from={}", step(&bench, STEPS).display());
    let warm = Bench::new();
    warm.succeeds(&set(&[DSPARK_V4, &init, "train.max_train_steps=1"]));
    assert!(warm.losses()[0] < 0.95 * losses[0], "{:?} after {losses:?}", warm.losses());
    let other = Bench::new();
    other.fails(&set(&[DSPARK_V4, &init, "drafter.dspark_v4.stage_config.hc_mult=2"]), 2, &["stage_config"]);
}

/// All parameters of a checkpoint except the target's embedding and head: names and values.
fn parameters(bench: &Bench, at: usize) -> Vec<(String, Vec<f32>)> {
    let file = step(bench, at).join("model.safetensors");
    let names = arrays(&file).into_keys();
    let own = names.filter(|name| name != "embed_tokens.weight" && name != "lm_head.weight");
    own.map(|name| (name.clone(), values(bench, at, &name))).collect()
}

/// Frozen parameters keep every bit of the initial drafter, and the others change. A killed and
/// resumed run ends like an undisturbed one.
#[test]
fn frozen_parts_stay_and_the_others_learn() {
    let heads = ["markov_head.", "confidence_head."];
    let block = trained(&["train.max_train_steps=6"]);
    let eagle3 = trained(&[EAGLE3, "train.max_train_steps=6"]);
    let dflash2 = trained(&[DFLASH2, "train.max_train_steps=6"]);
    let xpress = trained(&[XPRESS_ON_DFLASH2, "train.max_train_steps=6"]);
    type Case<'a> = (&'a Bench, &'a [&'a str], &'a str, &'a [&'a str]);
    let cases: [Case; 8] = [
        (&block, &[], "backbone", &heads),
        (&block, &["train.precision=bf16"], "backbone", &heads),
        (&block, &[], "backbone, markov", &["confidence_head."]),
        (&block, &[], "backbone, confidence", &["markov_head."]),
        (&eagle3, &[EAGLE3], "fusion, layers", &["norm."]),
        (&dflash2, &[DFLASH2], "backbone", &["candidate_selector."]),
        (&xpress, &[XPRESS_ON_DFLASH2], "backbone", &["xpress_head."]),
        (&xpress, &[XPRESS_ON_DFLASH2], "refiner", &["fc.", "hidden_norm.", "layers.", "norm."]),
    ];
    for (from, more, frozen, learns) in cases {
        let given = parameters(from, 6);
        let from = format!("train.init_from={}", step(from, 6).display());
        let freeze = format!("train.freeze=[{frozen}]");
        let changes = set(&[more, &[&from, &freeze]].concat());
        let whole = Bench::new();
        whole.succeeds(&changes);
        for ((name, before), (_, after)) in given.iter().zip(parameters(&whole, STEPS)) {
            let is_to_learn = learns.iter().any(|part| name.starts_with(part));
            assert_eq!(*before != after, is_to_learn, "{frozen} frozen: {name}");
        }
        let killed = Bench::new();
        let mut child = common::start_until(&killed, 4, &changes);
        child.kill().unwrap();
        child.wait().unwrap();
        killed.succeeds(&changes);
        assert!(killed.result() == whole.result(), "{frozen} frozen");
    }
}

#[test]
fn mistakes_about_frozen_parts_are_named() {
    let dflash = trained(&[DFLASH, "train.max_train_steps=3"]);
    let from = format!("train.init_from={}", step(&dflash, 3).display());
    let bench = Bench::new();
    let wrong = |changes: &[&str], hints: &[&str]| bench.fails(&set(changes), 2, hints);
    wrong(&["train.freeze=[backbone]"], &["train.freeze", "train.init_from"]);
    wrong(&[&from, "train.freeze=[bakbone]"], &["`train.freeze`", "`markov`", "did you mean `backbone`?"]);
    wrong(&[&from, DFLASH, "train.freeze=[backbone]"], &["nothing is left that could learn"]);
    wrong(&[&from, EAGLE3, "train.freeze=[backbone]"], &["Eagle3 has no part `backbone`", "`fusion`"]);
}

/// A setting that an earlier version did not have gets its default.
#[test]
fn a_run_of_before_a_setting_existed_goes_on() {
    let bench = trained(&["train.max_train_steps=3"]);
    let saved = step(&bench, 3).join("config.yaml");
    let text = fs::read_to_string(&saved).unwrap();
    let without: Vec<&str> = text.lines().filter(|line| line.trim() != "alpha: 1.0").collect();
    assert!(without.len() < text.lines().count(), "{text}");
    fs::write(&saved, without.join("\n")).unwrap();
    bench.succeeds(&set(&["train.max_train_steps=3"]));
    bench.fails(
        &set(&["train.max_train_steps=3", "drafter.dspark.confidence.alpha=0.5"]),
        2,
        &["alpha (was 1.0, is 0.5)"],
    );
}
