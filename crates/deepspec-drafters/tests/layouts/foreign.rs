//! Drafters of other tools. If they compute something that ours do not, reading, converting and
//! running all refuse them by name.

use std::fs;
use std::path::Path;

use crate::common::{Bytes, Folder, bytes, edited, fixture, golden, target, write};
use deepspec_checkpoint::{
    ADD_SWA_ATTENTION_SINK_BIAS, ATTENTION_SINK_BIAS, CAUSAL_KEYS, CheckpointFormat, Target, USE_SWA, convert,
};
use deepspec_drafters::{DrafterOptions, check_layout, load_drafter, open_checkpoint};
use deepspec_engine::DraftSampling;
use deepspec_testkit::mutate::Fuzzer;
use deepspec_testkit::tiny;
use safetensors::Dtype;
use serde_json::{Value, json};
use tch::{Device, Kind};

const OPTIONS: DrafterOptions =
    DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };

/// Runs the checks of a folder that come before its weights are read; returns the error message.
fn run(folder: &Folder) -> Result<(), String> {
    check_layout(folder.path()).map_err(|error| error.to_string())
}

/// Converts the folder to the reference's layout; returns the error message.
fn to_reference(folder: &Folder, target: &Folder) -> Result<(), String> {
    let source = open_checkpoint(folder.path()).map_err(|error| error.to_string())?;
    let target = Target::open(target.path(), "owner/target").unwrap();
    convert(&source, CheckpointFormat::Reference, Some(&target))
        .map(|_| ())
        .map_err(|error| error.to_string())
}

fn with(folder: &Folder, key: &str, value: &Value, inner: bool) -> Folder {
    edited(folder, |config| {
        let place = if inner { &mut config["dflash_config"] } else { config };
        place[key] = value.clone();
    })
}

const SWITCHES: [&str; 4] = ["semi_causal", "attention_sinks", "use_sinks", "sinks"];

#[test]
fn another_attention_is_refused_by_name_wherever_it_is_said() {
    let target = target(&golden("dspark_vanilla"));
    for key in SWITCHES {
        for inner in [false, true] {
            let zlab = with(&fixture::zlab(), key, &json!(true), inner);
            let told = [run(&zlab).unwrap_err(), to_reference(&zlab, &target).unwrap_err()];
            assert!(told.iter().all(|told| told.contains(key)), "{told:?}");
            assert!(!told[0].contains("make one that is read here"), "{}", told[0]);
            for case in ["dspark_vanilla", "dflash", "eagle3_qwen3"] {
                let ours = with(&golden(case), key, &json!(true), inner);
                let told = run(&ours).unwrap_err();
                assert!(told.contains(key) && told.contains("config.json"), "{case}: {told}");
                let options = load_drafter(ours.path(), &OPTIONS).map(|_| ()).unwrap_err().to_string();
                assert!(options.contains(key), "{case}: {options}");
            }
        }
    }
    // vLLM reads `use_swa` within `dflash_config` only, and DSpark and DFlash alone have such windows.
    for (case, inner) in
        [("dspark_vanilla", false), ("dflash", false), ("eagle3_qwen3", true), ("dflash2", true)]
    {
        let told = run(&with(&golden(case), USE_SWA, &json!(true), inner)).unwrap_err();
        assert!(told.contains("use_swa`") && told.contains("DSpark and DFlash only"), "{case}: {told}");
        run(&with(&golden(case), USE_SWA, &json!(false), inner)).unwrap();
    }
    // Drafters without blocks have no causal ones, and DFlash 2, Domino and xPress have none.
    for (key, case) in CAUSAL_KEYS.into_iter().flat_map(|key| {
        ["eagle3_qwen3", "mtp", "peagle", "dflash2", "domino", "xpress"].map(|case| (key, case))
    }) {
        let told = run(&with(&golden(case), key, &json!(true), false)).unwrap_err();
        assert!(told.contains(key) && told.contains("no causal blocks"), "{case}: {told}");
        run(&with(&golden(case), key, &json!(false), false)).unwrap();
    }
    for (key, case) in [ATTENTION_SINK_BIAS, ADD_SWA_ATTENTION_SINK_BIAS]
        .into_iter()
        .flat_map(|key| ["eagle3_qwen3", "mtp", "dflash2", "domino", "xpress"].map(|case| (key, case)))
    {
        let told = run(&with(&golden(case), key, &json!(true), false)).unwrap_err();
        assert!(told.contains(key) && told.contains("or layout have no attention sinks"), "{case}: {told}");
    }
    let causal = with(&fixture::zlab(), "attention_mode", &json!("causal"), true);
    assert!(run(&causal).unwrap_err().contains("attention_mode"));
}

#[test]
fn switches_that_are_off_change_nothing() {
    let (zlab, ours) = (fixture::zlab(), golden("dspark_vanilla"));
    let target = target(&ours);
    for key in SWITCHES {
        for off in [json!(false), json!(null), json!(0)] {
            to_reference(&with(&zlab, key, &off, true), &target).unwrap();
            run(&with(&ours, key, &off, false)).unwrap();
        }
    }
    for full in ["full", "bidirectional"] {
        to_reference(&with(&zlab, "attention_mode", &json!(full), true), &target).unwrap();
    }
}

#[test]
fn unknown_keys_of_a_container_are_refused_by_name() {
    let target = target(&golden("dspark_vanilla"));
    for (key, value) in [
        ("gated_residual", json!(true)),
        ("window", json!(0)),
        ("new_head", json!({"a": 1})),
        ("mode", json!("x")),
    ] {
        let folder = with(&fixture::zlab(), key, &value, true);
        for told in [run(&folder).unwrap_err(), to_reference(&folder, &target).unwrap_err()] {
            assert!(told.contains(&format!("dflash_config.{key}")), "{told}");
        }
    }
    to_reference(&with(&fixture::zlab(), "new_head", &json!(null), true), &target).unwrap();
}

/// A folder with zero tensors of these names.
fn of_names(config: &Value, names: &[&str]) -> Folder {
    let folder = Folder::new();
    folder.put(config);
    let tensors: Bytes =
        names.iter().map(|name| (name.to_string(), (Dtype::F32, vec![2], vec![0; 8]))).collect();
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

#[test]
fn drafters_of_other_methods_are_known_by_sight() {
    let llama = |class: &str| json!({"architectures": [class], "model_type": "llama", "hidden_size": 32, "vocab_size": 128});
    // Another class than SpecForge's, and a reduced vocabulary.
    let mut eagle = llama("MistralForCausalLMEagle3");
    eagle["draft_vocab_size"] = json!(64);
    let eagle = of_names(
        &eagle,
        &[
            "midlayer.self_attn.q_proj.weight",
            "midlayer.hidden_norm.weight",
            "fc.weight",
            "norm.weight",
            "lm_head.weight",
            "d2t",
            "t2d",
        ],
    );
    let eagle1 = of_names(&llama("LlamaForCausalLM"), &["layers.0.self_attn.q_proj.weight", "fc.weight"]);
    let eagle2 =
        of_names(&llama("EagleLlamaForCausalLM"), &["layers.0.self_attn.q_proj.weight", "fc.weight"]);
    let medusa = of_names(&llama("MedusaModel"), &["medusa_head.0.0.linear.weight"]);
    for (folder, words) in [
        (&eagle, &["EAGLE-3", "d2t", "config.json"][..]),
        (&eagle1, &["EAGLE", "`fc.weight`"]),
        (&eagle2, &["EAGLE", "EagleLlamaForCausalLM"]),
        (&medusa, &["Medusa", "MedusaModel"]),
    ] {
        let looked = open_checkpoint(folder.path()).map(|_| ()).unwrap_err().to_string();
        for told in [run(folder).unwrap_err(), looked] {
            assert!(words.iter().all(|word| told.contains(word)), "{words:?} in {told}");
            assert!(!told.contains("Some("), "{told}");
        }
    }
}

/// No command calls a folder unreadable that another command reads.
#[test]
fn what_can_be_converted_is_told_so_when_it_is_run() {
    let (eagle3, dflash) = (golden("eagle3_qwen3"), golden("dflash"));
    for (from, to) in [
        (&eagle3, CheckpointFormat::Speculators),
        (&dflash, CheckpointFormat::Speculators),
        (&dflash, CheckpointFormat::Specforge),
    ] {
        let (verifier, out) = (target(from), Folder::new());
        let (source, whole) =
            (open_checkpoint(from.path()).unwrap(), Target::open(verifier.path(), "owner/target").unwrap());
        convert(&source, to, Some(&whole)).unwrap().write(&out.path().join("out"), false).unwrap();
        let out = out.within("out");
        to_reference(&out, &verifier).unwrap();
        let told = run(&out).unwrap_err();
        assert!(told.contains("checkpoint convert"), "{to}: {told}");
    }
}

/// A copy with one changed float in a tensor.
fn poisoned(from: &Folder, name: &str, value: f32) -> Folder {
    let folder = edited(from, |_| ());
    let mut tensors = bytes(from);
    let (dtype, _, data) = tensors.get_mut(name).unwrap();
    assert_eq!(*dtype, Dtype::F32);
    let last = data.len() - 4;
    data[last..].copy_from_slice(&value.to_le_bytes());
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

#[test]
fn weights_that_are_not_finite_are_found_at_load() {
    for (case, name) in [
        ("dspark_vanilla", "fc.weight"),
        ("dflash", "norm.weight"),
        ("eagle3_qwen3", "fc.weight"),
        ("dspark_gated", "lm_head.weight"),
    ] {
        let sound = golden(case);
        load_drafter(sound.path(), &OPTIONS).map(|_| ()).unwrap();
        open_checkpoint(sound.path()).unwrap().check().unwrap();
        for value in [f32::NAN, f32::NEG_INFINITY] {
            let folder = poisoned(&sound, name, value);
            let run = load_drafter(folder.path(), &OPTIONS).map(|_| ()).unwrap_err().to_string();
            let looked = open_checkpoint(folder.path()).unwrap().check().unwrap_err().to_string();
            for told in [run, looked] {
                assert!(told.contains(name) && told.contains("NaN or infinite"), "{case}: {told}");
                assert!(told.contains(folder.path().to_str().unwrap()), "{case}: {told}");
            }
        }
    }
}

#[test]
fn drafters_behind_the_prefix_of_a_wrapper_are_the_same() {
    let from = golden("dspark_vanilla");
    for prefix in ["module.", "_orig_mod."] {
        let folder = edited(&from, |_| ());
        let wrapped =
            bytes(&from).into_iter().map(|(name, tensor)| (format!("{prefix}{name}"), tensor)).collect();
        write(&folder.path().join("model.safetensors"), &wrapped);
        open_checkpoint(folder.path()).unwrap().check().unwrap();
        load_drafter(folder.path(), &OPTIONS).map(|_| ()).unwrap();
    }
}

#[test]
fn quantised_drafters_are_refused_by_name() {
    let from = golden("dspark_vanilla");
    let said = with(&from, "quantization_config", &json!({"quant_method": "fp8"}), false);
    for told in [
        open_checkpoint(said.path()).map(|_| ()).unwrap_err().to_string(),
        load_drafter(said.path(), &OPTIONS).map(|_| ()).unwrap_err().to_string(),
    ] {
        assert!(told.contains("`quantization_config`") && told.contains("fp8"), "{told}");
    }
    let folder = edited(&from, |_| ());
    let mut tensors = bytes(&from);
    let (dtype, shape, data) = tensors.get_mut("fc.weight").unwrap();
    (*dtype, *data) = (Dtype::F8_E4M3, vec![0; shape.iter().product()]);
    write(&folder.path().join("model.safetensors"), &tensors);
    for told in [
        open_checkpoint(folder.path()).unwrap().check().unwrap_err().to_string(),
        load_drafter(folder.path(), &OPTIONS).map(|_| ()).unwrap_err().to_string(),
    ] {
        assert!(
            told.contains("fc.weight") && told.contains("F8_E4M3") && told.contains("quantised"),
            "{told}"
        );
    }
}

/// Drafters whose sampled tokens depend on earlier sampled tokens sample; the others take the most
/// likely token.
#[test]
fn each_kind_knows_by_which_rule_more_of_it_is_accepted() {
    use DraftSampling::{Greedy, Probabilistic};
    let rule = |dir: &Path| load_drafter(dir, &OPTIONS).unwrap().draft_sampling();
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets");
    for (case, expected) in [
        ("dspark_vanilla", Probabilistic),
        ("dspark_gated", Probabilistic),
        ("dspark_rnn", Probabilistic),
        ("dflash", Greedy),
        ("xpress", Greedy),
        ("domino", Probabilistic),
        ("eagle3_qwen3", Probabilistic),
    ] {
        assert_eq!(rule(golden(case).path()), expected, "{case}");
    }
    assert_eq!(rule(&assets.join("tiny-dspark")), Probabilistic);
    assert_eq!(rule(&assets.join("tiny-dflash2")), Greedy);
    let model = tempfile::tempdir().unwrap();
    tiny::qwen3(model.path(), 40);
    assert_eq!(rule(model.path()), Probabilistic);
    // Without its Markov head, a DSpark predicts all slots independently.
    let mut headless = load_drafter(golden("dspark_vanilla").path(), &OPTIONS).unwrap();
    assert!(headless.disable_markov_bias());
    assert_eq!(headless.draft_sampling(), Greedy);
}

/// Nulls, other types and unknown keys in the configs of every layout. The folder is read and run,
/// or refused with its name and the key.
#[test]
fn nulls_and_unknown_keys_are_used_or_refused_by_name() {
    let words = [
        "causal_head",
        "sinks",
        "dflash_config",
        "quantization_config",
        "gated",
        "markov_rank",
        "attention_mode",
        "target_layer_ids",
        "eagle_config",
        "draft_vocab_size",
        "rope_scaling",
        "architectures",
    ];
    let mut dice = Fuzzer::new(46, &words);
    let speculators = {
        let (from, out) = (golden("dspark_gated"), Folder::new());
        let (target, source) = (target(&from), open_checkpoint(from.path()).unwrap());
        let target = Target::open(target.path(), "owner/target").unwrap();
        convert(&source, CheckpointFormat::Speculators, Some(&target))
            .unwrap()
            .write(&out.path().join("out"), false)
            .unwrap();
        out.within("out")
    };
    let (mut used, mut refused) = (0, 0);
    for folder in [
        golden("dspark_gated"),
        golden("eagle3_qwen3"),
        golden("dflash2"),
        golden("xpress"),
        golden("domino"),
        golden("mtp"),
        golden("peagle"),
        fixture::zlab(),
        speculators,
    ] {
        let sound = folder.config();
        for run_number in 0..120 {
            let mut damaged = sound.clone();
            let place = match run_number % 2 {
                0 if damaged["dflash_config"].is_object() => &mut damaged["dflash_config"],
                _ => &mut damaged,
            };
            match run_number % 4 {
                0 | 1 => place[words[dice.roll(words.len())]] = dice.value(),
                2 => {
                    let at = dice.roll(place.as_object().unwrap().len());
                    let key = place.as_object().unwrap().keys().nth(at).unwrap().clone();
                    place[&key] = Value::Null;
                }
                _ => dice.mutate(place),
            }
            fs::write(folder.path().join("config.json"), damaged.to_string()).unwrap();
            let looked = open_checkpoint(folder.path())
                .and_then(|found| found.check())
                .map_err(|error| error.to_string());
            for found in [looked, run(&folder)] {
                match found {
                    Ok(()) => used += 1,
                    Err(told) => {
                        refused += 1;
                        assert!(told.contains(folder.path().to_str().unwrap()), "no file is named: {told}");
                        assert!(
                            told.contains('`') || told.contains("tensor") || !damaged.is_object(),
                            "no key is named: {told}: {damaged}"
                        );
                        assert!(!told.contains("Some(") && !told.contains("usize"), "{told}");
                    }
                }
            }
        }
        folder.put(&sound);
    }
    assert!(used > 100 && refused > 100, "{used} used, {refused} refused");
}
