//! The recipes in `configs/`: each parses, plans and runs `--bench` with a target of small sizes
//! that has only a config.json.

#[path = "../common/mod.rs"]
mod common;
mod full_size;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use deepspec_core::recipe::TrainDtype;
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{DominoRecipe, DrafterSpec, GruSettings, LambdaBase, StageSettings};
use deepspec_testkit::mutate::Fuzzer;
use serde_json::{Value, json};

use common::workspace;

const ALGORITHMS: [&str; 3] = ["dspark", "dflash", "eagle3"];
const TARGETS: [&str; 4] = ["qwen3_4b", "qwen3_8b", "qwen3_14b", "gemma4_12b"];

/// Small stages of DSpark of DeepSeek-V4.
const SMALL_STAGES: &str = "stage_config={num_attention_heads: 2, head_dim: 16, qk_rope_head_dim: 8, q_lora_rank: 8, o_lora_rank: 8, \
                            o_groups: 2, n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16}";

fn recipes() -> Vec<(&'static str, &'static str, PathBuf)> {
    let path = |algorithm: &str, target: &str| {
        workspace().join("configs").join(algorithm).join(format!("{target}.yaml"))
    };
    ALGORITHMS
        .iter()
        .flat_map(|algorithm| {
            TARGETS.iter().map(move |target| (*algorithm, *target, path(algorithm, target)))
        })
        .chain(
            ["domino", "jetspec", "mtp", "peagle", "xpress"]
                .map(|algorithm| (algorithm, "qwen3_4b", path(algorithm, "qwen3_4b"))),
        )
        .chain(["qwen3_5_4b", "qwen3_5_35b_a3b"].map(|target| ("mtp", target, path("mtp", target))))
        .chain(["deepseek_v4_flash"].map(|target| ("dspark_v4", target, path("dspark_v4", target))))
        .chain(
            ["qwen3_30b_a3b", "gpt_oss_20b", "qwen3_5_4b", "qwen3_5_35b_a3b"]
                .map(|target| ("dspark", target, path("dspark", target))),
        )
        .collect()
}

/// A folder with the config.json of a target with the real number of layers, each of them small.
fn small_target(dir: &Path, target: &str) {
    let path = workspace().join("configs/shapes").join(format!("{target}.json"));
    let mut config: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let gemma = target.starts_with("gemma");
    let sizes = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    for (key, size) in [
        ("hidden_size", 32),
        ("intermediate_size", 48),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("head_dim", 8),
        ("vocab_size", 96),
    ] {
        sizes[key] = json!(size);
    }
    if gemma {
        sizes["global_head_dim"] = json!(16);
    }
    if sizes["shared_expert_intermediate_size"].is_number() {
        sizes["num_experts"] = json!(8);
        sizes["moe_intermediate_size"] = json!(16);
        sizes["shared_expert_intermediate_size"] = json!(16);
    }
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn recipe_has_blocks(algorithm: &str) -> bool {
    !["eagle3", "mtp", "peagle"].contains(&algorithm)
}

fn run(recipe: &Path, args: &[String]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-train"));
    command.arg("--config").arg(recipe).args(args).env("OMP_NUM_THREADS", "1").env("HF_HUB_OFFLINE", "1");
    command.output().unwrap()
}

fn parsed(output: &Output, what: &str) -> Value {
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{what}: {error}"))
}

#[test]
fn all_of_the_reference_are_there_and_some_more() {
    for (algorithm, target, path) in recipes() {
        let recipe = deepspec_drafters::load_recipe(&path, &[]).unwrap();
        let (model, taps, mask) = match target {
            "deepseek_v4_flash" => ("deepseek-ai/DeepSeek-V4-Flash", [40, 41, 42].as_slice(), 128_799),
            "qwen3_4b" => ("Qwen/Qwen3-4B", [1, 9, 17, 25, 33].as_slice(), 151_669),
            "qwen3_8b" => ("Qwen/Qwen3-8B", [1, 9, 17, 25, 33].as_slice(), 151_669),
            "qwen3_14b" => ("Qwen/Qwen3-14B", [1, 10, 19, 28, 37].as_slice(), 151_669),
            "qwen3_30b_a3b" => ("Qwen/Qwen3-30B-A3B", [1, 12, 23, 34, 45].as_slice(), 151_669),
            "qwen3_5_4b" => ("Qwen/Qwen3.5-4B", [1, 8, 15, 22, 29].as_slice(), 248_070),
            "qwen3_5_35b_a3b" => ("Qwen/Qwen3.5-35B-A3B", [1, 10, 19, 28, 37].as_slice(), 248_070),
            "gpt_oss_20b" => ("openai/gpt-oss-20b", [1, 6, 11, 16, 21].as_slice(), 200_000),
            _ => ("google/gemma-4-12B-it", [5, 17, 29, 41, 46].as_slice(), 4),
        };
        let (length, seed) = match algorithm {
            "eagle3" => ("ttt7", 0),
            "mtp" if target == "qwen3_4b" => ("steps3", 0),
            "mtp" => ("", 0),
            "peagle" => ("depths8", 0),
            "domino" | "jetspec" | "xpress" => ("block16", 42),
            "dspark_v4" => ("block5", 42),
            _ => ("block7", 42),
        };
        let taps: &[i64] = if algorithm == "mtp" { &[] } else { taps };
        let parts = [algorithm, length, target];
        assert_eq!(
            recipe.name,
            parts.map(String::from).into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("_")
        );
        assert_eq!(
            (recipe.target.model.as_str(), Tap::layer_ids(&recipe.target.layer_ids), recipe.seed),
            (model, taps.to_vec(), seed)
        );
        let train = &recipe.train;
        // The MTP layer of Qwen3.5 is fine-tuned.
        let (lr, batch, epochs, checkpoints) =
            if length.is_empty() { (1e-4, 64, 3, 1000) } else { (6e-4, 512, 10, 3000) };
        assert_eq!(
            (train.lr, train.warmup_ratio, train.weight_decay, train.max_grad_norm),
            (lr, 0.04, 0.0, 1.0)
        );
        assert_eq!(
            (train.local_batch_size, train.global_batch_size, train.num_train_epochs),
            (1, batch, epochs)
        );
        assert_eq!((train.precision, recipe.data.max_length), (TrainDtype::Bf16, 4096));
        assert_eq!((recipe.logging.logging_steps, recipe.logging.checkpointing_steps), (10, checkpoints));
        assert_eq!(recipe.logging.output_dir, "~/checkpoints/deepspec");
        if let DrafterSpec::PEagle(peagle) = &recipe.drafter {
            assert_eq!((peagle.num_draft_layers, peagle.num_depths, peagle.mask_token_id), (4, 8, mask));
            assert_eq!((peagle.down_sample_ratio, peagle.down_sample_ratio_min), (0.7, 0.2));
        }
        if let DrafterSpec::Domino(domino) = &recipe.drafter {
            assert_eq!((domino.block_size, domino.num_draft_layers, domino.num_anchors), (16, 5, 256));
            assert_eq!((domino.mask_token_id, domino.slots), (mask, SlotTarget::AnchorPredicts));
            assert_eq!((domino.gru, domino.lambda_base), (GruSettings::default(), LambdaBase::default()));
            assert_eq!(domino.loss(), DominoRecipe { loss: None, ..domino.clone() }.loss());
        } else if let DrafterSpec::DSparkV4(own) = &recipe.drafter {
            assert_eq!((own.block_size, own.num_nextn_predict_layers, own.mask_token_id), (5, 3, mask));
            assert_eq!(own.stage_config, StageSettings::default());
        } else if algorithm == "jetspec" {
            let DrafterSpec::DFlash(block) = &recipe.drafter else { panic!("a DFlash") };
            assert_eq!((block.block_size, block.num_draft_layers, block.mask_token_id), (16, 5, mask));
            assert!(block.causal);
        } else if algorithm.starts_with('d') {
            let (DrafterSpec::DSpark(block) | DrafterSpec::DFlash(block)) = recipe.drafter else {
                panic!("a block drafter");
            };
            assert_eq!((block.block_size, block.num_draft_layers, block.num_anchors), (7, 5, 512));
            assert_eq!(block.mask_token_id, mask);
            assert_eq!(block.markov.map(|markov| markov.rank), (algorithm == "dspark").then_some(256));
        }
    }
}

/// Equal to the recipe in `dspark/`, except that the target computes the states. This keeps the two
/// from drifting apart.
#[test]
fn each_target_has_one_that_needs_no_cache() {
    for (target, weights) in
        [("qwen3_4b", 4.02e9), ("qwen3_8b", 8.19e9), ("qwen3_14b", 14.77e9), ("gemma4_12b", 11.9e9)]
    {
        let path = workspace().join("configs/online").join(format!("{target}.yaml"));
        let recipe = deepspec_drafters::load_recipe(&path, &[]).unwrap();
        let sibling = workspace().join("configs/dspark").join(format!("{target}.yaml"));
        let states = ["data.states=online".to_string(), format!("data.input=[runs/{target}/answers.jsonl]")];
        let mut expected = deepspec_drafters::load_recipe(&sibling, &states).unwrap();
        expected.name += "_online";
        assert_eq!(recipe, expected);

        let cache = tempfile::tempdir().unwrap();
        // The resident target, plus its KV cache, which is larger on a GPU: in float32 on the CPU, and in bfloat16 where
        // a GPU is planned for.
        let planned_for = [
            (&[][..], "float32", 4.0, 1.25),
            (&["--hardware", "h100", "--rows", "50000"][..], "bfloat16", 2.0, 1.75),
        ];
        for (hardware, dtype, bytes, most) in planned_for {
            let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-train"));
            command.arg("--config").arg(&path).args(["--plan", "--json", "--device", "cpu"]).args(hardware);
            command.env("HF_HUB_OFFLINE", "1").env("HF_HUB_CACHE", cache.path()).env("HOME", cache.path());
            let plan = parsed(&command.output().unwrap(), target);
            let resident = plan["memory"]["target"].as_f64().unwrap();
            assert!((1.0..most).contains(&(resident / (bytes * weights))), "{target}: {plan}");
            assert_eq!(plan["memory"]["cache"], 0, "{target}: {plan}");
            assert_eq!(plan["target_dtype"], dtype, "{target}: {plan}");
        }
    }
}

/// Without rows there are no times, but the memory of a GPU; a warning says if it is too small.
#[test]
fn memory_is_planned_for_a_gpu_without_rows() {
    let cache = tempfile::tempdir().unwrap();
    for (hardware, fits) in [("h100", false), ("h200", true)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-train"));
        command.arg("--config").arg(workspace().join("configs/online/qwen3_14b.yaml"));
        command.args(["--plan", "--device", "cpu", "--hardware", hardware]).env("HF_HUB_OFFLINE", "1");
        command.env("HF_HUB_CACHE", cache.path()).env("HOME", cache.path());
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("per GPU") && text.contains("no times without --rows"), "{text}");
        assert_eq!(!text.lines().any(|line| line.starts_with("warning ")), fits, "{text}");
    }
}

#[test]
fn each_plans_and_runs_the_bench_at_small_sizes() {
    for (algorithm, target, path) in recipes() {
        let what = format!("{algorithm}/{target}");
        let dir = tempfile::tempdir().unwrap();
        small_target(dir.path(), target);
        let mut args: Vec<String> = [
            format!("target.model={}", dir.path().display()),
            "data.max_length=48".into(),
            "train.global_batch_size=2".into(),
        ]
        .into_iter()
        .flat_map(|setting| ["--set".to_string(), setting])
        .collect();
        let smaller: &[&str] = match algorithm {
            "peagle" => &["mask_token_id=95"],
            "dspark_v4" => &["mask_token_id=95", "num_anchors=6", SMALL_STAGES],
            _ if recipe_has_blocks(algorithm) => &["mask_token_id=95", "num_anchors=6"],
            _ => &[],
        };
        let section = if algorithm == "jetspec" { "dflash" } else { algorithm };
        for setting in smaller {
            args.extend(["--set".to_string(), format!("drafter.{section}.{setting}")]);
        }
        args.push("--json".into());
        let with =
            |more: &[&str]| [&args[..], &more.iter().map(ToString::to_string).collect::<Vec<_>>()].concat();

        let plan = parsed(&run(&path, &with(&["--plan"])), &what);
        assert!(plan["memory"]["activations"].as_u64().unwrap() > 0, "{what}: {plan}");
        let bench = parsed(&run(&path, &with(&["--bench", "2", "--peak-tflops", "0.5"])), &what);
        assert_eq!(bench["trainable_weights"], plan["trainable_weights"], "{what}");
        assert_eq!(
            (bench["steps"].as_u64(), bench["forwards_per_step"].as_u64()),
            (Some(2), Some(2)),
            "{what}"
        );
        let number = |key: &str| bench[key].as_f64().unwrap_or_else(|| panic!("{what}: no {key} in {bench}"));
        // A measurement predicts itself: a recipe like this one takes as long.
        let (told, name) = (dir.path().join("bench.json"), "bench.json");
        fs::write(&told, bench.to_string()).unwrap();
        let told = told.to_str().unwrap();
        let more = ["--plan", "--measured", told, "--validate-on", told, "--rows", "8", "--devices", "1"];
        let foretold = parsed(&run(&path, &with(&more)), &what)["pipeline"].clone();
        let held_out = foretold["held_out"].as_array().unwrap();
        assert_eq!(held_out.len(), 2, "{what}: {foretold}");
        for one in held_out {
            let of = |key: &str| one[key].as_f64().unwrap();
            assert!((of("foretold_s") / of("measured_s") - 1.0).abs() < 1e-6, "{what}: {name}: {one}");
        }
        let shares = number("data_share") + number("forward_backward_share") + number("optimizer_share");
        assert!((0.5..=1.0 + 1e-9).contains(&shares), "{what}: {shares}");
        assert!((number("samples_per_s") * number("step_s") - 2.0).abs() < 1e-6, "{what}");
        assert!((number("tokens_per_s") / number("samples_per_s") - 48.0).abs() < 1e-6, "{what}");
        assert!((number("mfu") - number("tflop_per_s") / 0.5).abs() < 1e-9, "{what}");
        assert!(number("tflop_per_step") > 0.0 && number("host_memory_peak_bytes") > 0.0, "{what}");
    }
}

/// Its sizes are in the recipe, so that nothing of the released drafter is needed for a plan.
#[test]
fn the_one_that_fine_tunes_an_assistant_of_gemma4_is_planned_and_benched() {
    let path = workspace().join("configs/gemma4_assistant/gemma4_12b.yaml");
    let cache = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-train"));
    command.arg("--config").arg(&path).args(["--plan", "--json"]).env("HF_HUB_OFFLINE", "1");
    command.env("HF_HUB_CACHE", cache.path()).env("HOME", cache.path());
    let plan = parsed(&command.output().unwrap(), "plan");
    // The head, both projections, and four layers: their queries and outputs, MLPs and norms.
    let (h, d, inner) = (1024_u64, 3840, 8192);
    let attention = |dim: u64| 2 * h * 16 * dim + dim;
    let layers = 3 * attention(256) + attention(512) + 4 * (3 * h * inner + 4 * h);
    assert_eq!(plan["trainable_weights"], json!(262_144 * h + 3 * d * h + layers + h));
    assert_eq!((&plan["frozen_weights"], &plan["cache_bytes_per_token"]), (&json!(0), &json!(3 * 2 * d)));

    small_target(cache.path(), "gemma4_12b");
    let small =
        "drafter={gemma4_assistant: {hidden_size: 16, intermediate_size: 24, num_attention_heads: 4}}";
    let target = format!("target.model={}", cache.path().display());
    let settings = [target.as_str(), small, "data.max_length=48", "train.global_batch_size=2"];
    let mut args: Vec<String> =
        settings.iter().flat_map(|setting| ["--set", setting]).map(String::from).collect();
    args.extend(["--json", "--bench", "1"].map(String::from));
    let bench = parsed(&run(&path, &args), "bench");
    assert!(bench["tflop_per_step"].as_f64().unwrap() > 0.0, "{bench}");
}

#[test]
fn renamed_flags_are_refused_with_the_new_name() {
    let renamed =
        [("--profile", "--torch-profile"), ("--held-out", "--validate-on"), ("--link", "--interconnect")];
    for (old, new) in renamed {
        let output = Command::new(env!("CARGO_BIN_EXE_deepspec-train"))
            .args(["--config", "recipe.yaml", old, "value"])
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(&format!("`{old}` is now `{new}`")), "{told}");
    }
}

#[test]
fn the_tiny_ones_are_planned_and_benched_too() {
    let tiny = workspace().join("configs/tiny");
    let mut seen = vec![];
    for entry in fs::read_dir(&tiny).unwrap() {
        let path = entry.unwrap().path();
        let output = Command::new(env!("CARGO_BIN_EXE_deepspec-train"))
            .arg("--config")
            .arg(&path)
            .args(["--bench", "1", "--set", "data.max_length=64"])
            .current_dir(workspace())
            .env("OMP_NUM_THREADS", "1")
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for line in ["drafter ", "step time ", "throughput ", "arithmetic ", "host memory "] {
            assert!(text.lines().any(|found| found.starts_with(line)), "{line} in {text}");
        }
        seen.push(path.file_stem().unwrap().to_string_lossy().into_owned());
    }
    seen.sort();
    assert!(
        [
            "dflash",
            "dflash2",
            "domino",
            "dspark",
            "dspark_sinks",
            "dspark_v4",
            "eagle3",
            "jetspec",
            "mtp",
            "peagle",
            "xpress",
            "xpress_dflash2"
        ]
        .iter()
        .all(|name| seen.iter().any(|found| found == name)),
        "{seen:?}"
    );
}

#[test]
fn mistakes_are_named_before_anything_is_allocated() {
    let recipe = workspace().join("configs/dspark/qwen3_4b.yaml");
    let fails = |args: &[&str], hints: &[&str]| {
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let output = run(&recipe, &args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(hints.iter().all(|hint| text.contains(hint)), "{hints:?} in {text}");
    };
    fails(&["--bench", "0"], &["--bench"]);
    fails(&["--bench", "1", "--plan"], &["--plan", "--bench"]);
    fails(&["--peak-tflops", "3"], &["--bench"]);
    fails(&["--bench", "1", "--peak-tflops=-3"], &["--peak-tflops"]);
    fails(
        &["--bench", "1", "--set", "target.layer_ids=[1, 36]"],
        &["target.layer_ids", "layers are 0 to 35"],
    );
    fails(&["--bench", "1", "--set", "drafter.dspark.mask_token_id=200000"], &["mask_token_id", "151935"]);
    fails(&["--bench", "1", "--set", "train.local_batch_size=3"], &["not divisible"]);
    fails(&["--hardware", "h100"], &["--plan"]);
    fails(&["--plan", "--measured", "bench.json"], &["bench.json"]);
    fails(&["--plan", "--hardware", "h100", "--rows", "500"], &["--rows 500", "global_batch_size 512"]);
    fails(&["--plan", "--hardware", "nothing"], &["--hardware nothing", "b200"]);
    fails(&["--plan", "--hardware", "h100", "--rows", "9", "--devices", "1,0"], &["--devices"]);
    fails(&["--plan", "--hardware", "h100", "--rows", "9", "--price=-1"], &["--price -1"]);
    fails(&["--plan", "--measured", "absent.json", "--rows", "9"], &["absent.json"]);
}

/// Damaged recipes: each is read, or refused with the wrong key or line.
#[test]
fn damaged_recipes_are_read_or_refused_by_name() {
    let sound = fs::read_to_string(workspace().join("configs/tiny/dspark.yaml")).unwrap();
    let whole = json!({
        "name": "t", "seed": 7, "target": {"model": "assets/tiny-target", "revision": "main", "layer_ids": [0, 2, 4]},
        "drafter": {"dspark": {"block_size": 7, "num_draft_layers": 2, "mask_token_id": 1023, "num_anchors": 24,
            "markov": {"type": "vanilla", "rank": 64}, "confidence": {"with_markov": true, "alpha": 1.0}}},
        "data": {"states": {"cache": "runs/cache"}, "input": ["a.jsonl"], "chat_template": "qwen", "max_length": 512},
        "train": {"lr": 1e-3, "precision": "fp32", "local_batch_size": 4, "global_batch_size": 8, "freeze": []},
        "logging": {"logging_steps": 1, "checkpointing_steps": 3, "output_dir": "runs"},
    });
    let words = [
        "train",
        "lr",
        "data",
        "states",
        "cache",
        "drafter",
        "dspark",
        "target",
        "layer_ids",
        "null",
        "none",
        "nosuch",
    ];
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("recipe.yaml");
    let (mut read, mut refused) = (0, 0);
    for seed in 0..3000 {
        let mut dice = Fuzzer::new(seed, &words);
        // JSON is valid YAML.
        let text = match seed % 2 {
            0 => dice.file(sound.as_bytes()),
            _ => {
                let mut recipe = whole.clone();
                (0..=dice.roll(2)).for_each(|_| dice.mutate(&mut recipe));
                recipe.to_string().into_bytes()
            }
        };
        fs::write(&path, &text).unwrap();
        match deepspec_drafters::load_recipe(&path, &[]) {
            Ok(_) => read += 1,
            Err(error) => {
                refused += 1;
                let told = error.to_string();
                assert!(told.contains("recipe.yaml") && told.len() > 20, "seed {seed}: {told}");
                assert!(
                    !told.contains("Some(") && !told.contains("usize") && !told.contains("struct "),
                    "seed {seed}: {told}"
                );
            }
        }
    }
    assert!(read > 100 && refused > 1000, "{read} read, {refused} refused");
}
