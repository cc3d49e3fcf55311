//! The built binary on real hidden states: resuming, refusals, and checkpoints that other tools
//! read.

mod common;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use common::{Bench, STEPS, start_until, workspace};
use deepspec_capture::cache::Encoding;
use deepspec_drafters::DSpark;
use deepspec_models::save_checkpoint;
use deepspec_testkit::hub::{FakeHub, FakeRepo};
use deepspec_testkit::{signal, skip};
use serde_json::Value;
use tch::{Device, Kind};

fn undisturbed() -> Bench {
    let bench = Bench::new();
    bench.succeeds(&[]);
    bench
}

#[test]
fn a_killed_run_resumes_to_the_same_bytes() {
    let whole = undisturbed();
    let full = std::env::var_os("DEEPSPEC_TEST_FULL").is_some();
    // Before the first checkpoint, right after one, and between two; the long form tests all steps.
    let steps: Vec<usize> = if full { (1..STEPS).collect() } else { vec![2, 4, 9] };
    for step in steps {
        let bench = Bench::new();
        let mut child = start_until(&bench, step, &[]);
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "it ended before it was killed");
        bench.succeeds(&[]);
        assert!(bench.result() == whole.result(), "killed at step {step}: other weights");
        assert_eq!(bench.losses(), whole.losses(), "killed at step {step}");
    }
}

#[test]
fn engines_find_nothing_but_the_drafter_and_earlier_folders_resume() {
    let whole = undisturbed();
    let bench = Bench::new();
    let mut child = start_until(&bench, 4, &[]);
    child.kill().unwrap();
    child.wait().unwrap();
    let step = bench.path("out/t/step_3");
    let names = fs::read_dir(&step).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let weights: Vec<String> = names.filter(|name| name.ends_with(".safetensors")).collect();
    assert_eq!(weights, ["model.safetensors"]);
    // In the format of earlier versions.
    fs::rename(step.join("train_state/optimizer.safetensors"), step.join("train_state.safetensors")).unwrap();
    fs::remove_dir(step.join("train_state")).unwrap();
    bench.succeeds(&[]);
    assert!(bench.result() == whole.result());
}

#[test]
fn whatever_a_kill_leaves_of_a_save_is_no_obstacle() {
    let whole = undisturbed();
    let bench = Bench::new();
    bench.succeeds(&["--init-only"]);
    // Killed while writing step 3, and in an earlier attempt between the rename and the move of the
    // link.
    for leftover in ["step_3.partial", "step_3"] {
        let dir = bench.path("out/t").join(leftover);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("model.safetensors"), "half").unwrap();
    }
    bench.succeeds(&[]);
    assert!(bench.result() == whole.result());
    assert!(!bench.path("out/t/step_3.partial").exists());
}

#[test]
fn bfloat16_training_resumes_to_the_same_bytes_too() {
    let precision = ["--set", "train.precision=bf16"];
    let (whole, bench) = (Bench::new(), Bench::new());
    whole.succeeds(&precision);
    let mut child = start_until(&bench, 4, &precision);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9), "it ended before it was killed");
    bench.succeeds(&precision);
    assert!(bench.result() == whole.result());
    let losses = whole.losses();
    assert!(losses[STEPS - 1] < losses[0], "the loss does not fall: {losses:?}");
}

#[test]
fn states_in_another_encoding_are_other_data_where_it_rounds_them() {
    let (exact, rounded) = (Bench::new(), Bench::new());
    let short = "--set=train.max_train_steps=3";
    exact.succeeds(&[short]);
    let fp8 = exact.cache_as(Encoding::Fp8);
    exact.fails(
        &[short, &fp8],
        2,
        &["trained on states that no encoding has rounded", "encoding fp8", "--overwrite"],
    );
    exact.succeeds(&[short, &exact.cache_as(Encoding::Bf16z)]);

    let fp8 = rounded.cache_as(Encoding::Fp8);
    rounded.succeeds(&[short, &fp8]);
    rounded.succeeds(&[short, &fp8]);
    rounded.fails(&[short], 2, &["trained on states of encoding fp8", "no encoding has rounded"]);
}

/// Writes a checkpoint in shards, as one of more than 5 GB is written.
fn in_shards(dir: &Path) {
    let drafter = DSpark::load(dir, Device::Cpu, Kind::BFloat16).unwrap();
    fs::remove_file(dir.join("model.safetensors")).unwrap();
    save_checkpoint(dir, &drafter.checkpoint(), Kind::BFloat16, 200_000).unwrap();
}

#[test]
fn a_checkpoint_in_shards_is_gone_on_from() {
    let (whole, bench) = (undisturbed(), Bench::new());
    bench.succeeds(&["--init-only"]);
    let single = bench.path("single");
    fs::create_dir(&single).unwrap();
    let step = bench.path("out/t/step_0");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(step.join(name), single.join(name)).unwrap();
    }
    in_shards(&step);
    let text = fs::read_to_string(step.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&text).unwrap();
    assert!(index["weight_map"].as_object().unwrap().len() == 22 && !step.join("model.safetensors").exists());
    // A fresh drafter with another seed takes over the weights in either form.
    let started = |from: &Path| {
        let bench = Bench::new();
        let from = format!("--set=train.init_from={}", from.display());
        bench.succeeds(&["--init-only", "--set=seed=8", &from]);
        fs::read(bench.path("out/t/step_0/model.safetensors")).unwrap()
    };
    assert!(started(&step) == started(&single));
    bench.succeeds(&[]);
    assert!(bench.result() == whole.result());
}

#[test]
fn transformers_and_safetensors_read_a_checkpoint_in_shards() {
    let Some(python) = skip::python("transformers") else { return };
    let bench = Bench::new();
    bench.succeeds(&["--init-only"]);
    let (step, single) = (bench.path("out/t/step_0"), bench.path("single.safetensors"));
    fs::copy(step.join("model.safetensors"), &single).unwrap();
    in_shards(&step);
    let script = "
import glob, os, sys
import torch
from safetensors.torch import load_file
from transformers.utils.hub import get_checkpoint_shard_files
files, facts = get_checkpoint_shard_files(sys.argv[1], sys.argv[1] + '/model.safetensors.index.json')
assert sorted(files) == sorted(glob.glob(sys.argv[1] + '/model-*')) and len(files) > 2, files
tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
expected = load_file(sys.argv[2])
assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)
assert facts['total_size'] == sum(tensor.numel() * 2 for tensor in tensors.values()), facts
for name, file in facts['weight_map'].items():
    assert name in load_file(os.path.join(sys.argv[1], file)), name
";
    let output = Command::new(python).args(["-c", script]).arg(&step).arg(&single).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn where_the_time_of_some_steps_goes_can_be_seen() {
    let (bench, plain) = (Bench::new(), undisturbed());
    let trace = bench.path("trace.json");
    let args = ["--torch-profile", trace.to_str().unwrap()];
    bench.succeeds(&args);
    assert!(bench.result() == plain.result(), "looking changed the weights");
    let events: Value = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
    let events = events["traceEvents"].as_array().unwrap();
    let count = |name: &str| events.iter().filter(|event| event["name"] == name).count();
    for name in ["data", "upload", "forward", "objective", "backward"] {
        assert!(count(name) >= 5, "{name}: {}", count(name));
    }
    assert_eq!(count("optimiser"), 5);
    let written = fs::read(&trace).unwrap();
    bench.succeeds(&[&args[..], &["--overwrite"]].concat());
    assert!(fs::read(&trace).unwrap() == written, "a trace was overwritten");
    bench.fails(
        &["--overwrite", "--torch-profile", "nowhere/trace.json"],
        2,
        &["--torch-profile", "nowhere"],
    );
    assert!(bench.result() == plain.result(), "what there was is gone, though nothing could run");
}

#[test]
fn a_plan_runs_nothing() {
    let bench = Bench::new();
    let output = bench.run(&["--plan", "--quiet"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("24 samples") && text.contains("starts anew"), "{text}");
    assert!(!bench.path("out").exists());
}

#[test]
fn one_experiment_has_one_writer() {
    let bench = Bench::new();
    let mut child = start_until(&bench, 1, &[]);
    bench.fails(&[], 2, &["another training run"]);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn divergence_is_an_error_not_a_checkpoint() {
    let bench = Bench::new();
    bench.fails(&["--set", "train.lr=1e30"], 1, &["diverged", "train.lr"]);
}

#[test]
fn sigterm_saves_and_asks_to_be_run_again() {
    let whole = undisturbed();
    let bench = Bench::new();
    let mut child = start_until(&bench, 2, &[]);
    assert!(signal::send("TERM", child.id().into()));
    assert_eq!(child.wait().unwrap().code(), Some(75));
    bench.succeeds(&[]);
    assert!(bench.result() == whole.result());
}

#[test]
fn a_finished_run_is_left_alone_and_another_recipe_is_refused() {
    let bench = undisturbed();
    let before = bench.result();
    bench.succeeds(&[]);
    bench.fails(&["--set", "train.lr=2e-3"], 2, &["train.lr (was 0.001, is 0.002)", "--overwrite"]);
    assert!(bench.result() == before);
    bench.succeeds(&["--set", "train.lr=2e-3", "--overwrite"]);
    assert!(bench.result() != before);
}

#[test]
fn the_split_of_a_batch_changes_nothing() {
    let two = undisturbed();
    // The rows have different lengths, so a forward processes one to three of the four rows.
    let by_tokens = ["train.local_batch_size=4", "train.max_tokens_per_batch=60"];
    for split in [&["train.local_batch_size=1"][..], &by_tokens, &["train.recompute=true"]] {
        let other = Bench::new();
        // Begun without this setting.
        let mut child = start_until(&other, 2, &[]);
        child.kill().unwrap();
        child.wait().unwrap();
        other.succeeds(&split.iter().flat_map(|setting| ["--set", setting]).collect::<Vec<_>>());
        for (a, b) in two.losses().iter().zip(other.losses()) {
            let near = (a - b).abs() < 1e-5 * a.abs().max(1.0);
            assert!(near, "{split:?}: {:?} and {:?}", two.losses(), other.losses());
        }
    }
    let losses = two.losses();
    assert!(losses[STEPS - 1] < losses[0], "the loss does not fall: {losses:?}");
}

#[test]
fn training_may_begin_from_the_untrained_checkpoint() {
    let (whole, bench) = (undisturbed(), Bench::new());
    bench.succeeds(&["--init-only"]);
    assert_eq!(fs::read_link(bench.path("out/t/step_latest")).unwrap(), Path::new("step_0"));
    bench.succeeds(&[]);
    assert!(bench.result() == whole.result());
    bench.fails(&["--init-only"], 2, &["already trained"]);
}

#[test]
fn mistakes_are_named_before_anything_runs() {
    let bench = Bench::new();
    bench.fails(&["--set", "train.lrr=1"], 2, &["`train.lrr`", "did you mean `lr`?"]);
    bench.fails(&["--set", "target.layer_ids=[1, 3]"], 2, &["taps"]);
    bench.fails(&["--set", "target.layer_ids=[1, 40]"], 2, &["40"]);
    bench.fails(&["--set", "data.max_length=128"], 2, &["max_length"]);
    bench.fails(&["--set", "data.chat_template=llama"], 2, &["llama", "qwen"]);
    bench.fails(&["--set", "data.states.cache=nowhere"], 2, &["nowhere", "cache build"]);
    bench.fails(&["--set", "target.model=nowhere"], 2, &["nowhere"]);
    bench.fails(&["--set", "train.global_batch_size=5"], 2, &["not divisible"]);
    bench.fails(&["--set", "train.global_batch_size=400"], 2, &["24 samples"]);
    bench.fails(&["--set", "drafter.dspark.mask_token_id=5000"], 2, &["mask_token_id", "5000"]);
    bench.fails(&["--device", "tpu"], 2, &["tpu"]);
    fs::write(bench.path("recipe.yaml"), "name: t\ntrain:\n  lrr: 1\n").unwrap();
    bench.fails(&[], 2, &["recipe.yaml"]);
    fs::remove_file(bench.path("recipe.yaml")).unwrap();
    bench.fails(&[], 2, &["recipe.yaml"]);
}

#[test]
fn damaged_caches_are_refused() {
    let bench = Bench::new();
    let shard = bench.path("cache/shard-00000.safetensors");
    let good = fs::read(&shard).unwrap();
    fs::write(&shard, &good[..good.len() - 10]).unwrap();
    bench.fails(&[], 1, &["shard-00000.safetensors"]);
    let mut flipped = good.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 4;
    fs::write(&shard, &flipped).unwrap();
    bench.fails(&[], 1, &["shard-00000.safetensors", "sample"]);
    fs::write(&shard, &good).unwrap();
    bench.succeeds(&[]);
}

#[test]
fn another_target_is_refused() {
    let bench = Bench::new();
    let other = bench.path("other-target");
    fs::create_dir(&other).unwrap();
    for entry in fs::read_dir(workspace().join("assets/tiny-target")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, other.join(path.file_name().unwrap())).unwrap();
    }
    let same = format!("target.model={}", other.display());
    let weights = other.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let place = bytes.len() - 100;
    bytes[place] ^= 1;
    fs::write(&weights, bytes).unwrap();
    bench.fails(&["--set", &same], 2, &["target_weights"]);
}

#[test]
fn transformers_and_safetensors_read_a_checkpoint() {
    let Some(python) = skip::python("transformers, torch and safetensors") else { return };
    let bench = undisturbed();
    let script = "
import sys
from transformers import AutoConfig
from safetensors.torch import load_file
config = AutoConfig.from_pretrained(sys.argv[1])
assert config.architectures == ['Qwen3DSparkModel'] and config.block_size == 5 and config.num_hidden_layers == 1
assert config.target_layer_ids == [1, 4] and config.markov_rank == 8 and config.mask_token_id == 1023
weights = load_file(sys.argv[1] + '/model.safetensors')
assert weights['fc.weight'].shape == (config.hidden_size, 2 * config.hidden_size)
assert weights['markov_head.gate_proj.weight'].shape == (8, config.hidden_size + 8)
assert str(weights['lm_head.weight'].dtype) == 'torch.bfloat16' and len(weights) == 22, sorted(weights)
";
    let output =
        Command::new(python).args(["-c", script]).arg(bench.path("out/t/step_latest")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_target_by_hub_id_is_fetched_once_and_stays_an_id() {
    let bench = Bench::new();
    let repo = FakeRepo::model("own/tiny").at("v1").folder(&workspace().join("assets/tiny-target"));
    let hub = FakeHub::start([repo]);
    let run = |args: &[&str], offline: &str| {
        let mut command = bench.command(args);
        command
            .env("HF_ENDPOINT", hub.url())
            .env("HF_HUB_CACHE", bench.path("hub"))
            .env("HF_HUB_OFFLINE", offline);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let id = ["--set", "target.model=own/tiny", "--set", "target.revision=v1"];
    let (code, text) = run(&[&id[..], &["--init-only"]].concat(), "0");
    assert_eq!(code, Some(0), "{text}");
    let saved = fs::read_to_string(bench.path("out/t/step_0/config.yaml")).unwrap();
    assert!(saved.contains("model: own/tiny\n") && saved.contains("revision: v1\n"), "{saved}");
    hub.forget();
    let (code, text) = run(&[&id[..], &["--plan"]].concat(), "1");
    assert_eq!((code, hub.requests()), (Some(0), vec![]), "{text}");
    let (code, text) = run(&["--plan", "--set", "target.model=own/other"], "0");
    assert!(
        code == Some(2) && text.contains("own/other") && text.contains("no model of that name"),
        "{text}"
    );
    let (code, text) = run(&["--plan", "--set", "target.model=own/other"], "1");
    assert!(code == Some(1) && text.contains("HF_HUB_OFFLINE") && text.contains("local path"), "{text}");
}
