//! Public layouts of EAGLE-3.

use std::fs;
use std::path::Path;

use deepspec_checkpoint::DraftVocab;
use deepspec_models::save;
use deepspec_testkit::tiny;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::common::training::{Lessons, write_eagle3_drafter};
use crate::common::{answers, deepspec_eval, results, run_on};
use crate::ok;

/// Gives a Llama of four layers these layers twice.
fn double_layers(target: &Path) {
    let file = target.join("model.safetensors");
    let mut tensors = Tensor::read_safetensors(&file).unwrap();
    let copied = |(name, tensor): &(String, Tensor)| {
        let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let layer = layer.parse::<usize>().unwrap() + 4;
        Some((format!("model.layers.{layer}.{part}"), tensor.shallow_clone()))
    };
    let copies: Vec<(String, Tensor)> = tensors.iter().filter_map(copied).collect();
    tensors.extend(copies);
    save(&file, &tensors, Kind::Float).unwrap();
    edit_config(target, |config| config["num_hidden_layers"] = json!(8));
}

/// Changes a folder's config.json.
fn edit_config(dir: &Path, edit: impl Fn(&mut Value)) {
    let file = dir.join("config.json");
    let mut config = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    edit(&mut config);
    fs::write(&file, config.to_string()).unwrap();
}

/// Public EAGLE-3 checkpoints have SpecForge's layout or that of EAGLE's own repository, with a reduced vocabulary. The latter names
/// the target's class, and neither captured layers nor drafted tokens.
#[test]
fn an_eagle3_of_the_public_layouts_is_converted_and_evaluated() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let [target, own, specforge, eagle] = ["target", "own", "specforge", "eagle"].map(path);
    fs::create_dir(&target).unwrap();
    tiny::llama(&target);
    double_layers(&target);
    let counts: Vec<u64> = (0..1024).map(|id| u64::from(id % 8 != 0)).collect();
    let vocab = DraftVocab::most_frequent(&counts, 896).unwrap();
    let suites = vec!["smoke-math".to_string()];
    let lessons = Lessons { target: target.clone(), suites, rows: 0..2, tokens: 24, thinking: false };
    // The layers that tools capture by default of a target of eight layers.
    write_eagle3_drafter(&lessons, &own, [1, 3, 4], vocab, 60);
    let converted = |from: &Path, to: &str, out: &Path| {
        let [from, target, out] = [from, &target, out].map(|path| path.to_str().unwrap());
        let models = ["--from", from, "--target", target, "--output-dir", out];
        ok(deepspec_eval(&[&["checkpoint", "convert", "--to", to], &models[..]].concat()));
    };
    converted(&own, "specforge", &specforge);
    converted(&own, "specforge", &eagle);
    edit_config(&eagle, |config| {
        config["architectures"] = json!(["LlamaForCausalLM"]);
        let others =
            ["eagle_config", "num_target_layers", "step_loss_decay", "target_hidden_size", "ttt_length"];
        config.as_object_mut().unwrap().retain(|key, _| !others.contains(&key.as_str()));
    });
    let tensors = |dir: &Path| Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
    let public = tensors(&eagle);
    for name in ["midlayer.self_attn.q_proj.weight", "d2t", "t2d", "lm_head.weight"] {
        assert!(public.iter().any(|(known, _)| known == name), "{name}");
    }
    let measured = |draft: &str, name: &str, more: &[&str]| {
        let out = root.path().join(name);
        let few = ["--suite", "smoke-math", "--limit", "2", "--max-new-tokens", "24", "--temperature", "0"];
        ok(run_on(&target, draft, &out, &[&few[..], &["--no-baseline"], more].concat()));
        (answers(&out), results(&out)["suites"][0]["counts"].clone())
    };
    // An absent number of drafted tokens is 7, and this drafter was trained for 4.
    let four = ["--max-draft-tokens", "4"];
    let expected = measured(own.to_str().unwrap(), "own-run", &four);
    assert!(expected.1["accepted"].as_u64().unwrap() > 0, "{}", expected.1);
    assert_eq!(expected.0, measured("none", "plain", &[]).0);
    let here = tensors(&own);
    for (layout, folder) in [("specforge", &specforge), ("eagle", &eagle)] {
        let back = root.path().join(format!("{layout}-back"));
        converted(folder, "reference", &back);
        let there = tensors(&back);
        assert_eq!(here.len(), there.len(), "{layout}");
        for (name, tensor) in &here {
            let found = there.iter().find(|(other, _)| other == name);
            let (_, other) = found.unwrap_or_else(|| panic!("{layout}: no {name}"));
            assert!(tensor.equal(other), "{layout}: {name}: {tensor:?} and {other:?}");
        }
        let found = measured(back.to_str().unwrap(), &format!("{layout}-run"), &four);
        assert_eq!(found, expected, "{layout}");
    }
}
