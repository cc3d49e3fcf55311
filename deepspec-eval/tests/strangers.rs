//! Models and drafters of other tools: every command runs what it supports, and all commands refuse
//! the rest by name.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use common::{
    answers, assert_refused, deepspec_eval, drafter_config, repository, run, run_ok, run_on, target_dir,
    write_drafter,
};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::DSparkConfig;
use deepspec_models::{ModelConfig, load_embed_and_head, save};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const FEW: [&str; 8] =
    ["--suite", "smoke-math", "--limit", "1", "--max-new-tokens", "8", "--temperature", "0"];

fn edit(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    change(&mut value);
    fs::write(file, value.to_string()).unwrap();
}

/// A copy of a folder.
fn copy(from: &Path, to: PathBuf) -> PathBuf {
    fs::create_dir(&to).unwrap();
    for (name, bytes) in deepspec_testkit::folder::files(from) {
        fs::write(to.join(name), bytes).unwrap();
    }
    to
}

fn tensors(dir: &Path) -> Vec<(String, Tensor)> {
    Tensor::read_safetensors(dir.join("model.safetensors")).unwrap()
}

fn rewrite(dir: &Path, tensors: &[(String, Tensor)]) {
    save(&dir.join("model.safetensors"), tensors, Kind::BFloat16).unwrap();
}

/// An untrained DFlash drafter in our own layout.
fn dflash() -> DSparkConfig {
    let mut config = drafter_config();
    (config.settings.markov, config.settings.confidence) = (None, None);
    config.decoder.taps = Tap::from_layer_ids([0, 2, 4]).unwrap();
    // As z-lab trains them, so that the drafter fits z-lab's layout.
    config.settings.blocks.slots = SlotTarget::FillIn;
    config
}

fn convert(from: &Path, to: &str, output: &Path) -> Output {
    let target = target_dir();
    let args = ["checkpoint", "convert", "--to", to, "--target", target.to_str().unwrap()];
    deepspec_eval(
        &[
            &args[..],
            &["--from", from.to_str().unwrap(), "--output-dir", output.to_str().unwrap(), "--overwrite"],
        ]
        .concat(),
    )
}

fn doctor(draft: &Path) -> Output {
    let (target, suites) = (target_dir(), repository("eval_datasets"));
    let args = [
        "checkpoint",
        "doctor",
        "--device",
        "cpu",
        "--quiet",
        "--target",
        target.to_str().unwrap(),
        "--suites-dir",
        suites.to_str().unwrap(),
    ];
    deepspec_eval(
        &[&args[..], &["--draft", draft.to_str().unwrap(), "--limit", "1", "--max-new-tokens", "8"]].concat(),
    )
}

fn trace(draft: &Path) -> Output {
    let target = target_dir();
    let args = ["trace", "Hello?", "--device", "cpu", "--quiet", "--max-new-tokens", "8"];
    deepspec_eval(
        &[&args[..], &["--target", target.to_str().unwrap(), "--draft", draft.to_str().unwrap()]].concat(),
    )
}

fn inspect(draft: &Path) -> Output {
    deepspec_eval(&["checkpoint", "inspect", draft.to_str().unwrap()])
}

/// The whole output of a command.
fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8(text).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// Every command that reads drafters reports these words. Commands that would run or write the
/// drafter fail and write nothing.
#[track_caller]
fn assert_all_refuse(draft: &Path, out: &Path, words: &[&str]) {
    let outputs = [
        ("run", run(draft.to_str().unwrap(), out, &FEW)),
        ("trace", trace(draft)),
        ("convert", convert(draft, "specforge", out)),
        ("doctor", doctor(draft)),
        ("inspect", inspect(draft)),
    ];
    for (command, output) in outputs {
        let text = said(&output);
        assert!(words.iter().all(|word| text.contains(word)), "{command}: {words:?} not in: {text}");
        if ["run", "trace", "convert"].contains(&command) {
            assert!(!output.status.success(), "{command} goes on: {text}");
        }
    }
    assert!(!out.exists() || fs::read_dir(out).unwrap().next().is_none(), "{}", out.display());
}

#[test]
fn an_attention_that_is_not_ours_is_refused_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let (own, out) = (dir.path().join("own"), dir.path().join("out"));
    let model = ModelConfig::load(&target_dir()).unwrap();
    let (embed, head) = load_embed_and_head(&target_dir(), &model, Device::Cpu, Kind::Float).unwrap();
    write_drafter(&own, dflash(), |name, tensor| match name {
        "embed_tokens.weight" => embed.shallow_clone(),
        "lm_head.weight" => head.shallow_clone(),
        _ => tensor,
    });
    // In the layout that supports it: in its own object, and at the top level.
    let container = dir.path().join("container");
    let converted = convert(&own, "z-lab", &container);
    assert!(converted.status.success(), "{}", said(&converted));
    for (key, value) in [
        ("is_semi_causal", json!(true)),
        ("attention_sinks", json!(4)),
        ("attention_mode", json!("causal")),
        ("nosuch", json!(3)),
    ] {
        let odd = copy(&container, dir.path().join(format!("within-{key}")));
        edit(&odd.join("config.json"), |config| config["dflash_config"][key] = value.clone());
        let told = convert(&odd, "reference", &out);
        assert!(!told.status.success() && said(&told).contains(key), "{key}: {}", said(&told));
        assert!(said(&inspect(&odd)).contains(key), "{key}: {}", said(&inspect(&odd)));
        let told = run(odd.to_str().unwrap(), &out, &FEW);
        assert!(!told.status.success(), "{key}: {}", said(&told));
    }
    for key in ["attention_sinks", "use_sinks"] {
        let odd = copy(&own, dir.path().join(format!("top-{key}")));
        edit(&odd.join("config.json"), |config| config[key] = json!(true));
        assert_all_refuse(&odd, &out, &[key]);
    }
    // Causal blocks are run, and are shown.
    let causal = copy(&own, dir.path().join("causal"));
    edit(&causal.join("config.json"), |config| config["is_causal"] = json!(true));
    let told = said(&inspect(&causal));
    assert!(told.contains("tokens in causal blocks of"), "{told}");
    run_ok(causal.to_str().unwrap(), &dir.path().join("causal-run"), &FEW);
    edit(&causal.join("config.json"), |config| config["causal"] = json!(false));
    assert_all_refuse(&causal, &out, &["causal", "is_causal is true"]);
    // Features that are switched off are accepted.
    let idle = copy(&own, dir.path().join("idle"));
    edit(&idle.join("config.json"), |config| {
        (config["causal"], config["attention_sinks"]) = (json!(false), Value::Null)
    });
    run_ok(idle.to_str().unwrap(), &out, &FEW);
}

#[test]
fn weights_that_are_not_finite_are_found_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    for (value, part) in [(f64::NAN, "fc.weight"), (f64::INFINITY, "layers.0.mlp.up_proj.weight")] {
        let odd = dir.path().join(part);
        write_drafter(&odd, drafter_config(), |name, tensor| {
            let tensor = tensor.detach().copy();
            if name == part {
                let _ = tensor.view(-1).narrow(0, 7, 1).fill_(value);
            }
            tensor
        });
        assert_all_refuse(&odd, &dir.path().join("out"), &[part]);
        let told = said(&doctor(&odd));
        assert!(!told.contains("learned too little") && !told.contains("NaN -> NaN"), "{told}");
    }
}

#[test]
fn layouts_of_other_projects_are_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let eagle = dir.path().join("eagle");
    write_drafter(&eagle, dflash(), |_, tensor| tensor);
    edit(&eagle.join("config.json"), |config| {
        config["architectures"] = json!(["MistralForCausalLMEagle3"]);
        config["draft_vocab_size"] = json!(512);
    });
    let named: Vec<_> = tensors(&eagle)
        .into_iter()
        .map(|(name, tensor)| (name.replace("layers.0.", "midlayer."), tensor))
        .collect();
    rewrite(&eagle, &named);
    for output in [inspect(&eagle), convert(&eagle, "reference", &dir.path().join("out"))] {
        let text = said(&output);
        let known = "EAGLE drafter with a reduced vocabulary (d2t) of a class that is not read";
        assert!(text.contains(known) && text.contains("LlamaForCausalLMEagle3"), "{text}");
    }
}

#[test]
fn fewer_positions_than_the_targets_are_said() {
    let dir = tempfile::tempdir().unwrap();
    let short = dir.path().join("short");
    write_drafter(&short, drafter_config(), |_, tensor| tensor);
    edit(&short.join("config.json"), |config| config["max_position_embeddings"] = json!(512));
    let output = run(short.to_str().unwrap(), &dir.path().join("out"), &FEW);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("made for 512 positions, the target for 2048"), "{}", said(&output));
}

#[test]
fn targets_are_read_under_the_names_that_wrappers_give() {
    let dir = tempfile::tempdir().unwrap();
    let out = |name: &str| dir.path().join(format!("out-{name}"));
    run_ok("none", &out("own"), &FEW);
    let expected = answers(&out("own"));
    type Renames<'a> = &'a dyn Fn(&str) -> String;
    let prefixes: [(&str, Renames); 4] = [
        ("module", &|name| format!("module.{name}")),
        ("compiled", &|name| format!("_orig_mod.{name}")),
        ("both", &|name| format!("module._orig_mod.{name}")),
        ("bare", &|name| name.trim_start_matches("model.").to_owned()),
    ];
    for (name, rename) in prefixes {
        let target = copy(&target_dir(), dir.path().join(name));
        let renamed: Vec<_> =
            tensors(&target).into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect();
        rewrite(&target, &renamed);
        let output = run_on(&target, "none", &out(name), &FEW);
        assert!(output.status.success(), "{name}: {}", said(&output));
        assert_eq!(answers(&out(name)), expected, "{name}");
    }
}

#[test]
fn tensors_without_a_use_stop_a_target() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |name: &str, change: &dyn Fn(&Path), words: &[&str]| {
        let target = copy(&target_dir(), dir.path().join(name));
        change(&target);
        let output = run_on(&target, "none", &dir.path().join("out"), &FEW);
        assert_refused(&output, output.status.code().unwrap(), words);
        assert!(!said(&output).contains("Some("), "{}", said(&output));
    };
    refused(
        "llama",
        &|target| {
            edit(&target.join("config.json"), |config| {
                config["model_type"] = json!("llama");
                config["architectures"] = json!(["LlamaForCausalLM"]);
            });
        },
        &["q_norm"],
    );
    let with = |target: &Path, name: &str| {
        let mut all = tensors(target);
        all.push((name.into(), Tensor::full([288], 5.0, (Kind::Float, Device::Cpu))));
        rewrite(target, &all);
    };
    refused(
        "bias",
        &|target| with(target, "model.layers.0.self_attn.q_proj.bias"),
        &["model.layers.0.self_attn.q_proj.bias"],
    );
    refused(
        "layer",
        &|target| with(target, "model.layers.6.input_layernorm.weight"),
        &["model.layers.6.input_layernorm.weight"],
    );
    // Tensors that are recomputed or that draft beyond the next token are ignored.
    let rebuilt = copy(&target_dir(), dir.path().join("rebuilt"));
    with(&rebuilt, "model.layers.0.self_attn.rotary_emb.inv_freq");
    let output = run_on(&rebuilt, "none", &dir.path().join("rebuilt-out"), &FEW);
    assert!(output.status.success(), "{}", said(&output));
}

/// Copies the target with int8 weights of compressed-tensors, and with the float32 weights that they stand for.
fn write_int8_and_plain(int8: &Path, plain: &Path) {
    let (mut stored, mut values) = (vec![], vec![]);
    for (name, tensor) in tensors(&target_dir()) {
        let Some(module) = name.strip_suffix("_proj.weight") else {
            stored.push((name.clone(), tensor.shallow_clone()));
            values.push((name, tensor));
            continue;
        };
        let weight = tensor.to_kind(Kind::Float);
        let scales = weight.abs().amax([1], true) / 127.0;
        let numbers = (weight / &scales).round();
        values.push((name.clone(), &numbers * &scales));
        stored.push((name.clone(), numbers.to_kind(Kind::Int8)));
        stored.push((format!("{module}_proj.weight_scale"), scales));
    }
    Tensor::write_safetensors(&stored, int8.join("model.safetensors")).unwrap();
    save(&plain.join("model.safetensors"), &values, Kind::Float).unwrap();
    edit(&int8.join("config.json"), |config| {
        config["quantization_config"] = json!({
            "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": true},
                "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true},
            }},
        });
    });
}

#[test]
fn quantised_targets_answer_as_the_plain_weights_that_they_stand_for() {
    let dir = tempfile::tempdir().unwrap();
    let [int8, plain] = ["int8", "plain"].map(|name| copy(&target_dir(), dir.path().join(name)));
    write_int8_and_plain(&int8, &plain);
    let size = |folder: &Path| fs::metadata(folder.join("model.safetensors")).unwrap().len();
    assert!(2 * size(&int8) < size(&plain));
    let [found, expected] = [&int8, &plain].map(|target| {
        let out = target.join("run");
        let output = run_on(target, "none", &out, &FEW);
        assert!(output.status.success(), "{}", said(&output));
        answers(&out)
    });
    assert_eq!(found, expected);
}

/// A quantised language model drafts as its plain weights do. Other quantised drafters are refused.
#[test]
fn quantised_language_models_draft_and_quantised_drafters_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let [int8, plain] = ["int8", "plain"].map(|name| copy(&target_dir(), dir.path().join(name)));
    write_int8_and_plain(&int8, &plain);
    let [found, expected] = [&int8, &plain].map(|draft| {
        let out = draft.join("run");
        let output = run_on(&target_dir(), draft.to_str().unwrap(), &out, &FEW);
        assert!(output.status.success(), "{}", said(&output));
        answers(&out)
    });
    assert_eq!(found, expected);
    let draft = dir.path().join("draft");
    write_drafter(&draft, dflash(), |_, tensor| tensor);
    edit(&draft.join("config.json"), |config| config["quantization_config"] = json!({"quant_method": "fp8"}));
    let output = run_on(&target_dir(), draft.to_str().unwrap(), &dir.path().join("run"), &FEW);
    assert!(!output.status.success());
    let told = said(&output);
    assert!(told.contains("(fp8)") && told.contains("use the drafter in bfloat16"), "{told}");
}

#[test]
fn weights_that_are_not_read_are_named_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let told = |name: &str, change: &dyn Fn(&Path)| {
        let target = copy(&target_dir(), dir.path().join(name));
        change(&target);
        let output = run_on(&target, "none", &dir.path().join("out"), &FEW);
        assert!(!output.status.success());
        said(&output)
    };
    let four = told("bitsandbytes", &|target| {
        edit(&target.join("config.json"), |config| {
            config["quantization_config"] = json!({"quant_method": "bitsandbytes", "load_in_4bit": true})
        });
    });
    assert!(four.contains("\"bitsandbytes\" is not read") && four.contains("bfloat16"), "{four}");
    let bin = told("bin", &|target| {
        fs::rename(target.join("model.safetensors"), target.join("pytorch_model.bin")).unwrap()
    });
    assert!(
        bin.contains("pytorch_model.bin, a pickle file") && bin.contains("safe_serialization=True"),
        "{bin}"
    );
    let adapter = told("adapter", &|target| {
        fs::rename(target.join("model.safetensors"), target.join("adapter_model.safetensors")).unwrap()
    });
    assert!(adapter.contains("an adapter (LoRA), not a model"), "{adapter}");
    let unknown = told("unknown", &|target| {
        edit(&target.join("config.json"), |config| config["architectures"] = json!(["FooBarForCausalLM"]));
        edit(&target.join("config.json"), |config| config["model_type"] = json!("foobar"));
    });
    assert!(unknown.to_lowercase().contains("foobar") && !unknown.contains("Some("), "{unknown}");
}

#[test]
fn paths_that_are_not_there_are_told_as_paths() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = |target: &str| {
        let out = dir.path().join("out");
        let output = deepspec_eval(&[
            "run",
            "--target",
            target,
            "--draft",
            "none",
            "--suite",
            "smoke-math",
            "--output-dir",
            out.to_str().unwrap(),
        ]);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        said(&output)
    };
    let here = std::env::current_dir().unwrap().display().to_string();
    for target in ["./assets/tiny-targt", "models/tiny.gguf"] {
        let told = nowhere(target);
        assert!(told.contains(target) && told.contains(&here) && !told.contains("huggingface"), "{told}");
    }
    let variables = [("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_CACHE", dir.path().to_str().unwrap())];
    let out = dir.path().join("out");
    let args =
        ["run", "--target", "assets/tiny-targt", "--draft", "none", "--output-dir", out.to_str().unwrap()];
    let told = said(&common::deepspec_eval_in(&args, &variables));
    assert!(told.contains("no folder assets/tiny-targt in") && told.contains("taken as a hub id"), "{told}");
}
