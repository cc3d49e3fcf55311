//! LoRA: numbers of PEFT, and the built binary with every kind of drafter.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use common::decoding::{greedy, loads};
use common::{Bench, workspace};
use deepspec_core::recipe::LoraRecipe;
use deepspec_drafters::LoraAdapters;
use deepspec_testkit::golden::{Array, Case, Values};
use deepspec_train::dist::ProcessGroup;
use deepspec_train::optimizer::AdamW;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

/// Steps of a run with LoRA.
const STEPS: usize = 3;
const R: usize = 4;
const LORA: &str = "train.lora={r: 4, lora_alpha: 6}";

/// Every kind of drafter, and whether it needs all final states.
const KINDS: [(&[&str], bool); 9] = [
    (&["drafter.dspark.markov={type: rnn, rank: 8}"], false),
    (&["drafter={dflash: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6}}"], false),
    (
        &[
            "drafter={dflash2: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, selector: {rank: 8}}}",
        ],
        false,
    ),
    (
        &[
            "drafter={domino: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, gru: {hidden_size: 16, rank: 8}, \
             lambda_base: {start: 0.5}}}",
        ],
        false,
    ),
    (
        &[
            "drafter={xpress: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, refiner: {rank: 16}}}",
        ],
        false,
    ),
    (
        &[
            "drafter={dspark_v4: {block_size: 4, num_nextn_predict_layers: 1, mask_token_id: 1023, num_anchors: 6, markov_rank: 16, \
             stage_config: {num_attention_heads: 2, head_dim: 16, qk_rope_head_dim: 8, q_lora_rank: 16, o_lora_rank: 16, o_groups: 2, \
             sliding_window: 16, n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32}}}",
        ],
        false,
    ),
    (&["drafter={eagle3: {ttt_length: 3}}"], false),
    (&["drafter={peagle: {num_draft_layers: 2, num_depths: 4, mask_token_id: 1023}}"], false),
    (&["drafter={mtp: {}}", "target.layer_ids=[]"], true),
];

fn set<'a>(changes: &[&'a str]) -> Vec<&'a str> {
    changes.iter().flat_map(|change| ["--set", change]).collect()
}

fn step(bench: &Bench, step: usize) -> PathBuf {
    bench.path("out/t").join(format!("step_{step}"))
}

fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    Tensor::read_safetensors(file).unwrap().into_iter().collect()
}

fn weights(bench: &Bench, at: usize) -> BTreeMap<String, Tensor> {
    tensors(&step(bench, at).join("model.safetensors"))
}

fn optimizer(bench: &Bench, at: usize) -> BTreeMap<String, Tensor> {
    tensors(&step(bench, at).join("train_state/optimizer.safetensors"))
}

#[track_caller]
fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    let error = (found.to_kind(Kind::Double) - expected.to_kind(Kind::Double)).abs().max().double_value(&[]);
    let scale = expected.to_kind(Kind::Double).abs().max().double_value(&[]);
    assert!(error <= tolerance * scale, "{what}: off by {error:e} of {scale:e}");
}

/// Numbers of PEFT's `get_peft_model` and `merge_and_unload` on `down(tanh(up(tanh(q x))))` with the loss `Σ (out − y)²`, and of one step
/// of `torch.optim.AdamW`. Only q and up have matrices, which are random.
#[test]
fn golden_lora() {
    let case = Case::load("lora");
    let tensor = |array: &Array| match &array.values {
        Values::Float(values) => Tensor::from_slice(values).view(array.shape.as_slice()),
        other => panic!("{other:?}"),
    };
    let input = |name: &str| tensor(case.input(name));
    let near = |found: &Tensor, name: &str| assert_close(found, &tensor(case.expected(name)), 2e-6, name);
    let number = |key: &str| case.json[key].as_f64().unwrap();
    let lora = LoraRecipe {
        r: number("r") as usize,
        lora_alpha: number("lora_alpha"),
        target_modules: serde_json::from_value(case.json["target_modules"].clone()).unwrap(),
    };
    let names = ["q_proj.weight", "up_proj.weight"];
    let net = names.map(|name| (name.to_string(), input(name)));
    let adapters = LoraAdapters::new(&lora, &net, 1);
    adapters.merge();
    for (name, weight) in &net {
        assert!(weight.equal(&input(name)), "{name}: B is zero, so the weight has to stay");
    }
    for (name, matrix) in adapters.parameters() {
        // A is in ±1/√in, and nearly fills that range; B is zero.
        let columns = matrix.size()[1] as f64;
        let most = matrix.abs().max().double_value(&[]) * columns.sqrt();
        let is_a = name.ends_with("lora_A.weight");
        assert!(if is_a { most <= 1.0 && most > 0.7 } else { most == 0.0 }, "{name}: {most}");
        tch::no_grad(|| matrix.shallow_clone().copy_(&input(name)));
    }
    adapters.merge();
    let (q, up) = (&net[0].1, &net[1].1);
    near(q, "before.q_proj");
    near(up, "before.up_proj");
    let hidden = input("x").matmul(&q.tr()).tanh().matmul(&up.tr()).tanh();
    let loss = (hidden.matmul(&input("down_proj.weight").tr()) - input("y")).square().sum(Kind::Float);
    near(&loss.view([1]), "loss");
    let mut adamw = AdamW::new(adapters.parameters(), number("weight_decay"), f64::INFINITY);
    loss.backward();
    adapters.backward();
    for (name, matrix) in adapters.parameters() {
        near(&matrix.grad(), &format!("grad.{name}"));
    }
    assert!(net.iter().all(|(_, weight)| !weight.grad().defined()), "the gradient of a weight is left");
    adamw.accumulate();
    let _ = adamw.step(number("lr"), &ProcessGroup::single_process()).unwrap();
    adapters.merge();
    for (name, matrix) in adapters.parameters() {
        near(matrix, &format!("step.{name}"));
    }
    for ((name, weight), (_, base)) in net.iter().zip(adapters.base()) {
        near(weight, &format!("merged.{name}"));
        let (_, singular, _) = (weight.detach() - base).svd(true, false);
        let beyond = singular.narrow(0, lora.r as i64, singular.size()[0] - lora.r as i64).max();
        assert!((beyond / singular.get(0)).double_value(&[]) < 1e-6, "{name}: rank above {}", lora.r);
    }
}

/// Asserts that `merged` is `base + update`, rounded once to bfloat16.
#[track_caller]
fn assert_merged(merged: &Tensor, base: &Tensor, update: &Tensor, what: &str) {
    let [merged, base] = [merged, base].map(|tensor| tensor.to_kind(Kind::Float));
    let error = (&merged - &base - update).abs();
    // Bfloat16 has 8 significant bits, so rounding is off by 2⁻⁸ of the value at most.
    let beyond = (error - merged.abs() * 2f64.powi(-8)).max().double_value(&[]);
    assert!(beyond <= 1e-6, "{what}: the difference to the frozen weight is no update, by {beyond:e}");
}

/// Gradient of the step `at` from the optimiser's states of a run: the change of exp_avg, `β1 · exp_avg + (1 − β1) · gradient`.
fn gradient(states: &[BTreeMap<String, Tensor>], at: usize, name: &str) -> Tensor {
    const BETA1: f64 = 0.9;
    let average = |step: usize| &states[step - 1][&format!("exp_avg.{name}")];
    let before = if at == 1 { average(1).zeros_like() } else { average(at - 1) * BETA1 };
    (average(at) - before) / (1.0 - BETA1)
}

/// For each kind: an untrained step changes no bit, gradients are those of a full training, frozen weights stay, a resumed run ends with
/// the same bytes, and the merged drafter is one of its kind.
#[test]
fn every_kind_of_drafter_learns_by_lora() {
    for (kind, needs_final_states) in KINDS {
        let bench = || if needs_final_states { Bench::with_all_final_states() } else { Bench::new() };
        let common = [kind, &["train.max_grad_norm=1e9", "logging.checkpointing_steps=1"]].concat();
        let (given, full, slow, lora) = (bench(), bench(), bench(), bench());
        // Some matrices are zero at first, and pass no gradient on.
        given.succeeds(&set(&[&common[..], &["train.max_train_steps=2", "train.lr=0.01"]].concat()));
        let from = format!("train.init_from={}", step(&given, 2).display());
        // Steps so small that both runs have nearly the weights of the first step in the second one, where B is no longer zero.
        let two = [&common[..], &[&from, "train.max_train_steps=2", "train.lr=1e-6"]].concat();
        full.succeeds(&set(&two));
        slow.succeeds(&set(&[&two[..], &[LORA]].concat()));
        let steps = format!("train.max_train_steps={STEPS}");
        let changes = [&common[..], &[&from, &steps, LORA, "train.lr=0.02"]].concat();
        let changes = set(&changes);
        lora.succeeds(&changes);

        let (base, merged) = (weights(&given, 2), weights(&lora, STEPS));
        let [whole, slow] = [&full, &slow].map(|bench| [1, 2].map(|step| optimizer(bench, step)));
        let last = optimizer(&lora, STEPS);
        let kept = tensors(&step(&lora, STEPS).join("train_state/lora_base.safetensors"));
        assert!(base.keys().eq(merged.keys()), "{kind:?}");
        let is_query = |name: &String| name.ends_with("q_proj.weight") || name.ends_with("wq_b.weight");
        assert!(kept.keys().any(is_query) && kept.contains_key("fc.weight"), "{kind:?}");
        for (name, base) in &base {
            let Some(kept) = kept.get(name) else {
                assert!(merged[name].equal(base), "{kind:?}: {name} is frozen");
                continue;
            };
            assert!(kept.equal(base), "{kind:?}: {name}");
            let module = name.strip_suffix(".weight").unwrap();
            let matrix = |matrix: &str| format!("{module}.lora_{matrix}.weight");
            let master = |state: &BTreeMap<String, Tensor>, name: &str| {
                state[&format!("master.{}", matrix(name))].shallow_clone()
            };
            let scale = 6.0 / R as f64;
            // A stays in the first step, because B is zero. The matrices of the second step are those after the first one.
            let (a, b) = (master(&slow[0], "A"), master(&slow[0], "B"));
            let [first, second] = [1, 2].map(|step| gradient(&whole, step, name));
            for (found, expected, tolerance) in [
                (gradient(&slow, 1, &matrix("B")), first.matmul(&a.tr()) * scale, 1e-4),
                (gradient(&slow, 2, &matrix("B")), second.matmul(&a.tr()) * scale, 1e-2),
                (gradient(&slow, 2, &matrix("A")), b.tr().matmul(&second) * scale, 1e-2),
            ] {
                assert!(expected.abs().max().double_value(&[]) > 0.0, "{kind:?}: no gradient of {name}");
                assert_close(&found, &expected, tolerance, &format!("{kind:?}: {name}"));
            }
            let update = master(&last, "B").matmul(&master(&last, "A")) * scale;
            assert!(!merged[name].equal(base), "{kind:?}: {name} has not learnt");
            assert_merged(&merged[name], base, &update, &format!("{kind:?}: {name}"));
        }
        let read = |name: &str| fs::read(step(&lora, STEPS).join(name)).unwrap();
        assert_eq!(read("config.json"), fs::read(step(&given, 2).join("config.json")).unwrap(), "{kind:?}");
        // As if the last checkpoint were copied in part. The run does not need the drafter that it started from.
        let before = lora.result_of(STEPS);
        fs::remove_dir_all(given.path("out")).unwrap();
        fs::remove_file(step(&lora, STEPS).join("train_state/lora_base.safetensors")).unwrap();
        lora.succeeds(&changes);
        assert!(lora.result_of(STEPS) == before, "{kind:?}: a resumed run has other weights");
        let target = workspace().join("assets/tiny-target");
        assert_eq!(greedy(&target, None), greedy(&target, Some(loads(&lora))), "{kind:?}");
    }
}

/// The last matrix of a head, which needs no backward pass through the layers, and the projection of the context below recomputed layers.
#[test]
fn one_linear_layer_learns_alone() {
    let given = Bench::new();
    given.succeeds(&[set(KINDS[3].0), vec!["--init-only"]].concat());
    let from = format!("train.init_from={}", step(&given, 0).display());
    let run = |more: &[&str]| {
        let bench = Bench::new();
        let common = [
            from.as_str(),
            "train.max_train_steps=1",
            "train.max_grad_norm=1e9",
            "logging.checkpointing_steps=1",
        ];
        bench.succeeds(&set(&[KINDS[3].0, &common, more].concat()));
        optimizer(&bench, 1)
    };
    let whole = run(&[]);
    for module in ["embed_proj.2", "fc"] {
        let lora = format!("train.lora={{r: 4, lora_alpha: 4, target_modules: [{module}]}}");
        for recompute in ["train.recompute=false", "train.recompute=true"] {
            let alone = run(&[&lora, recompute]);
            assert!(alone.keys().all(|name| name.contains(&format!(".{module}.lora_"))), "{module}");
            let gradient = &whole[&format!("exp_avg.{module}.weight")];
            let expected = gradient.matmul(&alone[&format!("master.{module}.lora_A.weight")].tr());
            assert!(expected.abs().max().double_value(&[]) > 0.0, "{module}");
            assert_close(&alone[&format!("exp_avg.{module}.lora_B.weight")], &expected, 1e-4, module);
        }
    }
}

/// A DSpark of random weights, and the override that starts from it.
fn base() -> (Bench, String) {
    let bench = Bench::new();
    bench.succeeds(&["--init-only"]);
    let from = format!("train.init_from={}", step(&bench, 0).display());
    (bench, from)
}

#[test]
fn nothing_changes_before_the_first_step_and_processes_and_bfloat16_train_alike() {
    let (given, from) = base();
    let fresh = Bench::new();
    fresh.succeeds(&[set(&[&from, LORA]), vec!["--init-only"]].concat());
    let (base, first) = (weights(&given, 0), weights(&fresh, 0));
    assert!(base.iter().all(|(name, base)| first[name].equal(base)), "a step of nothing changed weights");

    let changes =
        [&from, LORA, "train.local_batch_size=1", "train.max_train_steps=6", "train.max_grad_norm=0.1"];
    let run = |more: &[&str]| {
        let bench = Bench::new();
        bench.succeeds(&[set(&changes), more.to_vec()].concat());
        bench
    };
    let (one, two) = (run(&[]), run(&["--processes=2", "--set=train.sharding_strategy=shard_optimizer"]));
    let (single, pair) = (optimizer(&one, 6), optimizer(&two, 6));
    assert!(single.keys().eq(pair.keys()) && single.keys().all(|name| name.contains(".lora_")));
    for (name, tensor) in single.iter().filter(|(name, _)| name.starts_with("master.")) {
        assert_close(&pair[name], tensor, 1e-3, name);
    }
    // In bfloat16 the matrices stay float32, and a resumed run has the same bytes.
    let bf16 = ["--set=train.precision=bf16", "--set=logging.checkpointing_steps=3"];
    let narrow = run(&bf16);
    let before = narrow.result_of(6);
    fs::remove_dir_all(step(&narrow, 6)).unwrap();
    narrow.succeeds(&[set(&changes), bf16.to_vec()].concat());
    assert!(narrow.result_of(6) == before);
    let (wide, narrow) = (one.losses(), narrow.losses());
    assert!(wide.iter().zip(&narrow).all(|(a, b)| (a - b).abs() < 0.02 * a), "{wide:?} and {narrow:?}");

    // The files of PEFT have the matrices of the optimiser.
    let adapter = step(&one, 6).join("adapter");
    let config: Value =
        serde_json::from_slice(&fs::read(adapter.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(
        (&config["peft_type"], &config["r"], &config["lora_alpha"]),
        (&json!("LORA"), &json!(4), &json!(6.0))
    );
    let matrices = tensors(&adapter.join("adapter_model.safetensors"));
    assert_eq!(matrices.len(), 2 * config["target_modules"].as_array().unwrap().len());
    for (name, matrix) in &matrices {
        let name = name.strip_prefix("base_model.model.").unwrap();
        assert!(single[&format!("master.{name}")].equal(matrix), "{name}");
    }
}

#[test]
fn a_plan_counts_the_matrices_and_mistakes_are_named() {
    let (_given, from) = base();
    let bench = Bench::new();
    let plan = |changes: &[&str]| -> Value {
        let output = bench.run(&[set(changes), vec!["--plan", "--json"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    for precision in ["train.precision=fp32", "train.precision=bf16"] {
        let full = plan(&[&from, precision]);
        let lora = plan(&[&from, precision, "train.lora={r: 4, target_modules: [q_proj]}"]);
        // There is one draft layer.
        let config: Value =
            serde_json::from_slice(&fs::read(workspace().join("assets/tiny-target/config.json")).unwrap())
                .unwrap();
        let size = |key: &str| config[key].as_u64().unwrap();
        let (input, output) = (size("hidden_size"), size("num_attention_heads") * size("head_dim"));
        let trained = 4 * (input + output);
        assert_eq!(lora["trainable_weights"], trained);
        assert_eq!(lora["frozen_weights"], full["trainable_weights"]);
        assert_eq!(lora["memory"]["optimizer"], 8 * trained);
        let bytes = if precision.ends_with("fp32") { 4 } else { 2 };
        assert_eq!(lora["memory"]["gradients"], 4 * trained + bytes * input * output);
    }
    let wrong = |changes: &[&str], hints: &[&str]| bench.fails(&set(changes), 2, hints);
    wrong(&[LORA], &["`train.lora`", "train.init_from"]);
    wrong(
        &[&from, "train.lora={target_modules: [q_prj]}"],
        &[
            "`train.lora.target_modules`",
            "no linear layer `q_prj`",
            "`up_proj`",
            "`fc`",
            "did you mean `q_proj`?",
        ],
    );
    wrong(&[&from, "train.lora={rank: 4}"], &["train.lora", "rank"]);
    wrong(&[&from, LORA, "train.freeze=[backbone]"], &["`train.freeze`", "train.lora"]);
    // DSpark may start from DFlash, whose checkpoint lacks the heads.
    let dflash = Bench::new();
    dflash.succeeds(&[set(KINDS[1].0), vec!["--init-only"]].concat());
    let from = format!("train.init_from={}", step(&dflash, 0).display());
    wrong(&[&from, LORA], &["train.init_from", "confidence_head", "train.freeze"]);
}
