//! Round trips keep every byte of the weights; a checkpoint that must not be converted is refused
//! with the reason.

use std::fs;

use crate::common::{Folder, as_is, bytes, edited, fixture, golden, target};
use deepspec_checkpoint::{CheckpointError, CheckpointFormat, Engine, Target, convert};
use deepspec_core::VERSION;
use deepspec_drafters::open_checkpoint;
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// Converts a checkpoint and reads it back.
pub fn converted(from: &Folder, to: CheckpointFormat, target: Option<&Folder>) -> Folder {
    try_convert(from, to, target).unwrap_or_else(|error| panic!("{to}: {error}"))
}

fn try_convert(
    from: &Folder,
    to: CheckpointFormat,
    target: Option<&Folder>,
) -> Result<Folder, CheckpointError> {
    let source = open_checkpoint(from.path())?;
    let target = target.map(|target| Target::open(target.path(), "owner/target")).transpose()?;
    let folder = Folder::new();
    convert(&source, to, target.as_ref())?.write(&folder.path().join("out"), false)?;
    Ok(folder.within("out"))
}

/// The error message of a refused conversion.
pub fn refusal(from: &Folder, to: CheckpointFormat, target: Option<&Folder>) -> String {
    match try_convert(from, to, target).map(|_| ()).expect_err("a refusal") {
        error @ CheckpointError::Refused { .. } => error.to_string(),
        other => panic!("no refusal: {other}"),
    }
}

const DRAFTERS: [&str; 12] = [
    "dspark_vanilla",
    "dspark_gated",
    "dspark_rnn",
    "dflash",
    "dflash2",
    "domino",
    "xpress",
    "xpress_dflash2",
    "eagle3_qwen3",
    "mtp",
    "mtp_moe",
    "peagle",
];

fn allowed(case: &str) -> &'static [CheckpointFormat] {
    match case {
        "eagle3_qwen3" | "mtp" | "mtp_moe" | "peagle" => &[CheckpointFormat::Speculators],
        "dflash2" | "xpress" | "xpress_dflash2" => &[CheckpointFormat::Speculators, CheckpointFormat::Zlab],
        "domino" => &[CheckpointFormat::Specforge, CheckpointFormat::Modelopt],
        // Its confidence head reads only the state, which ModelOpt's cannot.
        "dspark_rnn" | "dflash" => &[CheckpointFormat::Speculators, CheckpointFormat::Specforge],
        _ => &[CheckpointFormat::Speculators, CheckpointFormat::Specforge, CheckpointFormat::Modelopt],
    }
}

#[test]
fn round_trips_keep_every_byte() {
    for case in DRAFTERS {
        let reference = golden(case);
        let target = target(&reference);
        let original = bytes(&reference);
        for &there in allowed(case) {
            let away = converted(&reference, there, Some(&target));
            assert_eq!(open_checkpoint(away.path()).unwrap().format(), there, "{case}");
            let file = fs::read(away.path().join("model.safetensors")).unwrap();
            let notes = SafeTensors::read_metadata(&file).unwrap().1.metadata().clone().unwrap();
            assert_eq!((notes["format"].as_str(), &notes["tool"]), ("pt", &format!("deepspec {VERSION}")));
            let back = converted(&away, CheckpointFormat::Reference, Some(&target));
            assert_eq!(bytes(&back), original, "{case} by {there}");
            assert_eq!(as_is(&back), as_is(&reference), "{case} by {there}");
            // Not only back and forth, but from every layout to every other.
            for &next in allowed(case).iter().filter(|&&next| next != there) {
                let direct = converted(&reference, next, Some(&target));
                let by = converted(&away, next, Some(&target));
                assert_eq!(bytes(&by), bytes(&direct), "{case} by {there} to {next}");
                assert_eq!(as_is(&by), as_is(&direct), "{case} by {there} to {next}");
            }
        }
    }
}

#[test]
fn a_container_of_dflash_2_is_read_whole_or_refused() {
    let (reference, target) = (golden("dflash2"), target(&golden("dflash2")));
    let edited = |edit: fn(&mut Value)| {
        let folder = converted(&reference, CheckpointFormat::Zlab, Some(&target));
        let mut config = folder.config();
        edit(&mut config);
        folder.put(&config);
        folder
    };
    let outside = edited(|config| {
        config["block_size"] = config["dflash_config"]["block_size"].take();
        config["dflash_config"].as_object_mut().unwrap().remove("block_size");
        config["dflash_config"]["projector_type"] = json!("dflash2");
        config["dflash_config"]["final_logit_softcapping"] = json!(null);
        config["dflash_config"]["output_multiplier"] = json!(1.0);
    });
    assert_eq!(as_is(&converted(&outside, CheckpointFormat::Reference, Some(&target))), as_is(&reference));
    let scaled = edited(|config| config["dflash_config"]["input_embedding_scale"] = json!(2.0));
    let told = refusal(&scaled, CheckpointFormat::Reference, Some(&target));
    assert!(told.contains("`dflash_config.input_embedding_scale`: a scale"), "{told}");
    type Edit = fn(&mut Value);
    let broken: [(Edit, &str); 5] = [
        (|config| config["block_size"] = json!(16), "block_size: 16, and in dflash_config 5"),
        (|config| config["dflash_config"]["sample_from_anchor"] = json!(true), "sample_from_anchor: true"),
        (
            |config| config["dflash_config"]["conv_group_size"] = json!(60),
            "60 does not divide the hidden size",
        ),
        (|config| config["dflash_config"]["conv_kernel_size"] = json!(6), "6 is not between 1 and 5"),
        (|config| config["dflash_config"]["selector_top_k"] = json!(513), "513 is not between 1 and 512"),
    ];
    for (edit, words) in broken {
        let told = open_checkpoint(edited(edit).path()).err().unwrap().to_string();
        assert!(told.replace('`', "").contains(words), "{words} in {told}");
    }
}

#[test]
fn layer_ids_are_counted_as_each_format_does() {
    let (reference, target) = (golden("dspark_vanilla"), target(&golden("dspark_vanilla")));
    let config = |to| converted(&reference, to, Some(&target)).config();
    assert_eq!(reference.config()["target_layer_ids"], json!([1, 3, 4]));
    assert_eq!(config(CheckpointFormat::Speculators)["aux_hidden_state_layer_ids"], json!([2, 4, 5]));
    assert_eq!(config(CheckpointFormat::Specforge)["dflash_config"]["target_layer_ids"], json!([1, 3, 4]));
    assert_eq!(config(CheckpointFormat::Modelopt)["dflash_config"]["target_layer_ids"], json!([1, 3, 4]));
    let eagle3 = golden("eagle3_qwen3");
    let there = converted(&eagle3, CheckpointFormat::Speculators, Some(&crate::common::target(&eagle3)));
    assert_eq!(there.config()["eagle_aux_hidden_state_layer_ids"], json!([1, 2, 3, 4, 5]));
    assert_eq!(open_checkpoint(there.path()).unwrap().drafter().aux_layer_ids(), [1, 2, 3, 4, 5]);
}

/// Llama's layers have no norms on queries and keys, and some Eagle3 checkpoints use such layers.
#[test]
fn an_eagle3_with_llama_layers_goes_to_speculators_and_back() {
    let llama = fixture::llama_eagle3();
    let target = target(&golden("eagle3_qwen3"));
    let there = converted(&llama, CheckpointFormat::Speculators, Some(&target));
    let layer = &there.config()["transformer_layer_config"];
    assert_eq!(layer["model_type"], "llama");
    assert!(open_checkpoint(there.path()).unwrap().check().is_ok());
    let back = converted(&there, CheckpointFormat::Reference, Some(&target));
    assert_eq!(back.config()["architectures"], json!(["LlamaEagle3Model"]));
    assert_eq!(bytes(&back), bytes(&llama));
}

/// SGLang's class calls the layer `midlayer` and ignores unknown names. It captures the inputs of
/// the layers after the ids.
#[test]
fn an_eagle3_with_llama_layers_goes_to_specforge_and_back() {
    let llama = edited(&fixture::llama_eagle3(), |config| config["target_layer_ids"] = json!([0, 1, 2]));
    // Three taps instead of the golden checkpoint's.
    let mut tensors = bytes(&fixture::llama_eagle3());
    let (kind, shape, _) = tensors["fc.weight"].clone();
    let shape = vec![shape[0], 3 * shape[0]];
    let data = vec![7; 4 * shape[0] * shape[1]];
    tensors.insert("fc.weight".into(), (kind, shape, data));
    crate::common::write(&llama.path().join("model.safetensors"), &tensors);
    let target = target(&golden("eagle3_qwen3"));
    let there = converted(&llama, CheckpointFormat::Specforge, Some(&target));
    let config = there.config();
    assert_eq!(config["architectures"], json!(["LlamaForCausalLMEagle3"]));
    assert_eq!((&config["draft_vocab_size"], &config["model_type"]), (&json!(null), &json!("llama")));
    assert_eq!(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], json!([0, 1, 2]));
    let names: Vec<String> = bytes(&there).into_keys().collect();
    let mut expected: Vec<String> = ["fc.weight", "norm.weight"].map(String::from).to_vec();
    expected.extend(
        ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
            .map(|name| format!("midlayer.{name}.weight")),
    );
    expected.extend(["q", "k", "v", "o"].map(|name| format!("midlayer.self_attn.{name}_proj.weight")));
    expected.extend(["gate", "up", "down"].map(|name| format!("midlayer.mlp.{name}_proj.weight")));
    expected.sort();
    assert_eq!(names, expected);
    let opened = open_checkpoint(there.path()).unwrap();
    assert!(opened.check().is_ok());
    let arguments = Engine::Sglang.serve_arguments(opened.drafter(), "DIR");
    assert!(arguments.contains("EAGLE3") && arguments.contains("--speculative-eagle-topk 1"), "{arguments}");
    let back = converted(&there, CheckpointFormat::Reference, Some(&target));
    assert_eq!(back.config()["target_layer_ids"], json!([0, 1, 2]));
    assert_eq!(bytes(&back), bytes(&llama));
}

#[test]
fn tensor_names_are_each_formats_own() {
    let (reference, target) = (golden("dspark_gated"), target(&golden("dspark_gated")));
    let names = |to| -> Vec<String> {
        let folder = converted(&reference, to, Some(&target));
        open_checkpoint(folder.path()).unwrap().tensors().iter().map(|(name, _)| name.to_string()).collect()
    };
    let modelopt = names(CheckpointFormat::Modelopt);
    for name in
        ["markov_w1.weight", "markov_w2.weight", "gate_proj.weight", "gate_proj.bias", "confidence_proj.bias"]
    {
        assert!(modelopt.iter().any(|known| known == name), "{name} not in {modelopt:?}");
    }
    for to in [CheckpointFormat::Modelopt, CheckpointFormat::Specforge] {
        assert!(
            !names(to).iter().any(|name| name.contains("embed_tokens") || name.contains("lm_head")),
            "{to}"
        );
    }
    let speculators = names(CheckpointFormat::Speculators);
    for name in ["embed_tokens.weight", "lm_head.weight"] {
        assert!(speculators.iter().any(|known| known == name), "{name} not in {speculators:?}");
    }
    // speculators saves no other tensors of its verifier, and vLLM refuses unknown tensors.
    assert!(!speculators.iter().any(|name| name.starts_with("verifier")), "{speculators:?}");
}

#[test]
fn a_sharded_checkpoint_is_read_as_one() {
    let reference = golden("dspark_rnn");
    let sharded = crate::common::sharded(&reference);
    let target = target(&reference);
    let whole = converted(&reference, CheckpointFormat::Specforge, Some(&target));
    assert_eq!(bytes(&converted(&sharded, CheckpointFormat::Specforge, Some(&target))), bytes(&whole));
}

/// Above the maximum file size, weights are written in shards with an index. Neither form leaves
/// files of the other behind.
#[test]
fn what_is_too_large_for_one_file_is_written_in_shards() {
    let reference = golden("dspark_vanilla");
    let source = open_checkpoint(reference.path()).unwrap();
    let (folder, single) =
        (Folder::new(), converted(&reference, CheckpointFormat::Speculators, Some(&target(&reference))));
    let target = target(&reference);
    let target = Target::open(target.path(), "owner/target").unwrap();
    let out = folder.path().join("out");
    let write = |most: Option<usize>| {
        let mut converted = convert(&source, CheckpointFormat::Speculators, Some(&target)).unwrap();
        converted.max_shard_bytes = most.unwrap_or(converted.max_shard_bytes);
        converted.write(&out, true).unwrap();
        let mut files: Vec<String> = std::fs::read_dir(&out)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        files
    };
    let most = 20_000;
    let files = write(Some(most));
    let shards: Vec<&String> = files.iter().filter(|name| name.starts_with("model-")).collect();
    assert!(shards.len() > 2 && files.len() == shards.len() + 2, "{files:?}");
    assert_eq!(*shards[0], format!("model-00001-of-{:05}.safetensors", shards.len()));
    let index = std::fs::read_to_string(out.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    let (there, whole) = (open_checkpoint(&out).unwrap(), open_checkpoint(single.path()).unwrap());
    there.check().unwrap();
    let mut total = 0;
    for (name, facts) in whole.tensors().iter() {
        assert_eq!(there.tensors().get(name), Some(facts));
        assert_eq!(there.tensors().bytes(name).unwrap(), whole.tensors().bytes(name).unwrap(), "{name}");
        let file = out.join(index["weight_map"][name].as_str().unwrap());
        let own = deepspec_checkpoint::Tensors::open_file(&file).unwrap();
        let held: usize = own.iter().map(|(_, facts)| facts.bytes).sum();
        assert!(own.get(name).is_some() && (held <= most || own.iter().count() == 1), "{name} in {file:?}");
        total += facts.bytes;
    }
    assert_eq!(index["metadata"]["total_size"], total);
    assert_eq!(write(None), ["config.json", "model.safetensors"]);
    assert_eq!(write(Some(most)), files);
}

#[test]
fn ends_of_another_type_are_compared_and_restored_as_the_drafter_has_them() {
    // The target in float32, and the drafter with its embedding and head rounded to bfloat16, as
    // our trainer writes it.
    let reference = crate::common::as_bf16(&golden("dspark_vanilla"));
    let target = target(&golden("dspark_vanilla"));
    let away = converted(&reference, CheckpointFormat::Specforge, Some(&target));
    assert_eq!(bytes(&converted(&away, CheckpointFormat::Reference, Some(&target))), bytes(&reference));
    assert_eq!(away.config()["dtype"], "bfloat16");
}

#[test]
fn fill_in_slots_go_where_they_are_known_and_back() {
    let zlab = fixture::zlab();
    let target = target(&golden("dflash"));
    let there = converted(&zlab, CheckpointFormat::Speculators, Some(&target));
    let config = there.config();
    assert_eq!(config["speculators_model_type"], "dflash");
    assert_eq!(config["sample_from_anchor"], false);
    assert_eq!(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"], 4);
    let ours = converted(&zlab, CheckpointFormat::Reference, Some(&target));
    let config = ours.config();
    assert_eq!((&config["sample_from_anchor"], &config["block_size"]), (&json!(false), &json!(5)));
    assert_eq!(config["architectures"], json!(["Qwen3DSparkModel"]));
    for folder in [&there, &ours] {
        assert_eq!(open_checkpoint(folder.path()).unwrap().drafter().kind.draft_len(), 4);
        assert_eq!(bytes(&converted(folder, CheckpointFormat::Zlab, Some(&target))), bytes(&zlab));
    }
    assert_eq!(bytes(&converted(&there, CheckpointFormat::Reference, Some(&target))), bytes(&ours));
    assert_eq!(as_is(&converted(&there, CheckpointFormat::Reference, Some(&target))), as_is(&ours));
    for from in [&zlab, &there, &ours] {
        for to in [CheckpointFormat::Specforge, CheckpointFormat::Modelopt] {
            let told = refusal(from, to, Some(&target));
            assert!(told.contains("the weights are not interchangeable, only the container is"), "{told}");
        }
    }
    let told = refusal(&golden("dflash"), CheckpointFormat::Zlab, Some(&target));
    assert!(told.contains("not interchangeable") && told.contains("slot k predicts anchor+k"), "{told}");
}

#[test]
fn speculators_without_sample_from_anchor_have_z_labs_slots() {
    let (reference, target) = (golden("dspark_vanilla"), target(&golden("dspark_vanilla")));
    let there = converted(&reference, CheckpointFormat::Speculators, Some(&target));
    for change in [json!(false), Value::Null] {
        let changed = edited(&there, |config| config["sample_from_anchor"] = change.clone());
        let ours = converted(&changed, CheckpointFormat::Reference, Some(&target));
        assert_eq!(ours.config()["sample_from_anchor"], false);
        let told = refusal(&changed, CheckpointFormat::Specforge, Some(&target));
        assert!(told.contains("not interchangeable"), "{told}");
    }
}

#[test]
fn nulls_and_informative_keys_within_dflash_config_change_nothing() {
    let zlab = fixture::zlab();
    let drafted = |folder: &Folder| open_checkpoint(folder.path()).unwrap().drafter().kind.draft_len();
    let expected = drafted(&zlab);
    for value in [json!(0), json!("many"), json!(0.5)] {
        let informed = edited(&zlab, |config| config["dflash_config"]["num_anchors"] = value.clone());
        assert_eq!(drafted(&informed), expected, "num_anchors {value}");
    }
    let null = edited(&zlab, |config| config["dflash_config"]["block_size"] = Value::Null);
    assert_eq!(drafted(&null), expected);
}

#[test]
fn what_a_container_says_of_its_slots_counts() {
    let (vanilla, zlab) = (golden("dspark_vanilla"), fixture::zlab());
    let target = target(&vanilla);
    let specforge = converted(&vanilla, CheckpointFormat::Specforge, Some(&target));
    let flagged = |from: &Folder, flag: bool, inner: bool| {
        edited(from, |config| {
            let place = if inner { &mut config["dflash_config"] } else { config };
            place["sample_from_anchor"] = json!(flag);
        })
    };
    for inner in [false, true] {
        for (from, flag, drafted) in [(&specforge, false, 4), (&zlab, true, 5)] {
            let from = flagged(from, flag, inner);
            assert_eq!(open_checkpoint(from.path()).unwrap().drafter().kind.draft_len(), drafted);
            let ours = converted(&from, CheckpointFormat::Reference, Some(&target));
            assert_eq!(ours.config()["sample_from_anchor"] == json!(false), !flag);
            assert_eq!(open_checkpoint(ours.path()).unwrap().drafter().kind.draft_len(), drafted);
        }
    }
    let torn = flagged(&flagged(&zlab, true, true), false, false);
    let told = open_checkpoint(torn.path()).err().unwrap().to_string();
    assert!(told.contains("sample_from_anchor") && told.contains("contradicts"), "{told}");
    for size in [1, 2000] {
        let sized = edited(&zlab, |config| config["block_size"] = json!(size));
        let told = open_checkpoint(sized.path()).err().unwrap().to_string();
        assert!(told.contains("block_size") && told.contains("is not between 2 and 1024"), "{told}");
    }
}

/// A checkpoint, the layout to convert to, and words of the error.
type Refused = (Folder, CheckpointFormat, &'static [&'static str]);

#[test]
fn each_refusal_names_its_reason() {
    let (vanilla, dflash, eagle3) = (golden("dspark_vanilla"), golden("dflash"), golden("eagle3_qwen3"));
    let target = target(&vanilla);
    let speculators = converted(&vanilla, CheckpointFormat::Speculators, Some(&target));
    let specforge = converted(&vanilla, CheckpointFormat::Specforge, Some(&target));
    let spec_eagle3 =
        converted(&eagle3, CheckpointFormat::Speculators, Some(&crate::common::target(&eagle3)));
    let set = |folder: &Folder, key: &str, value: Value| edited(folder, |config| config[key] = value.clone());
    let inner =
        |key: &str, value: Value| edited(&specforge, |config| config["dflash_config"][key] = value.clone());
    let cases: Vec<Refused> = vec![
        (golden("dspark_gemma4"), CheckpointFormat::Speculators, &["only Qwen3 draft layers"]),
        (
            set(&vanilla, "target_layer_ids", json!([1, 3, 5])),
            CheckpointFormat::Speculators,
            &["layer id 5", "outside of 0 to 4"],
        ),
        (set(&vanilla, "target_layer_ids", json!([-1, 3, 4])), CheckpointFormat::Specforge, &["layer id -1"]),
        (
            set(&speculators, "aux_hidden_state_layer_ids", json!([0, 4, 5])),
            CheckpointFormat::Reference,
            &["layer id -1", "before or after the final norm"],
        ),
        (
            set(&speculators, "draft_vocab_size", json!(256)),
            CheckpointFormat::Reference,
            &["draft_vocab_size", "256 of 512"],
        ),
        (
            crate::common::with_vocab_map(&speculators),
            CheckpointFormat::Reference,
            &["t2d", "reduces the vocabulary"],
        ),
        (
            edited(&spec_eagle3, |config| config["transformer_layer_config"]["model_type"] = json!("gemma4")),
            CheckpointFormat::Reference,
            &["Gemma 4", "only Qwen3, Llama draft layers"],
        ),
        (eagle3, CheckpointFormat::Specforge, &["LlamaForCausalLMEagle3", "norms on queries and keys"]),
        (golden("eagle3_qwen3"), CheckpointFormat::Zlab, &["cannot write Eagle3"]),
        (
            edited(&golden("eagle3_qwen3"), |config| {
                config["num_hidden_layers"] = json!(2);
                config["draft_num_hidden_layers"] = json!(2);
            }),
            CheckpointFormat::Speculators,
            &["2 layers"],
        ),
        (dflash, CheckpointFormat::Modelopt, &["needs a Markov head"]),
        (
            set(&vanilla, "confidence_head_with_markov", json!(false)),
            CheckpointFormat::Modelopt,
            &["confidence head"],
        ),
        (golden("dspark_vanilla"), CheckpointFormat::Reference, &["already"]),
        (
            set(&vanilla, "use_sliding_window", json!(true)),
            CheckpointFormat::Specforge,
            &["layer_types", "sliding window"],
        ),
        (
            inner("projector_type", json!("domino")),
            CheckpointFormat::Reference,
            &["projector_type", "the projector \"domino\" has no counterpart"],
        ),
        (
            inner("projector_type", json!("lilicorr")),
            CheckpointFormat::Reference,
            &["projector_type", "lilicorr"],
        ),
        (inner("causal", json!(true)), CheckpointFormat::Speculators, &["causal blocks"]),
        (set(&specforge, "is_causal", json!(true)), CheckpointFormat::Speculators, &["causal blocks"]),
        (set(&specforge, "use_swa", json!(true)), CheckpointFormat::Reference, &["`use_swa`"]),
        (inner("attention_mode", json!("causal")), CheckpointFormat::Reference, &["attention_mode"]),
    ];
    for (from, to, words) in cases {
        let told = refusal(&from, to, Some(&target));
        assert!(words.iter().all(|word| told.contains(word)), "{words:?} not in: {told}");
    }
}

#[test]
fn what_needs_the_target_says_so() {
    let vanilla = golden("dspark_vanilla");
    let target = target(&vanilla);
    for to in [CheckpointFormat::Speculators, CheckpointFormat::Specforge, CheckpointFormat::Modelopt] {
        assert!(refusal(&vanilla, to, None).contains("give it with --target"));
    }
    let specforge = converted(&vanilla, CheckpointFormat::Specforge, Some(&target));
    assert!(refusal(&specforge, CheckpointFormat::Reference, None).contains("holds embedding and head"));
    // speculators' own files do not state the target's layers; ours do.
    let speculators = converted(&vanilla, CheckpointFormat::Speculators, Some(&target));
    converted(&speculators, CheckpointFormat::Reference, None);
    let theirs =
        edited(&speculators, |config| drop(config.as_object_mut().unwrap().remove("num_target_layers")));
    assert!(refusal(&theirs, CheckpointFormat::Reference, None).contains("num_target_layers"));
    assert_eq!(as_is(&converted(&theirs, CheckpointFormat::Reference, Some(&target))), as_is(&vanilla));
}

#[test]
fn ends_that_are_not_the_targets_are_not_dropped() {
    let vanilla = golden("dspark_vanilla");
    let other = crate::common::target(&crate::common::changed(&vanilla, "embed_tokens.weight", 3));
    for to in [CheckpointFormat::Speculators, CheckpointFormat::Specforge, CheckpointFormat::Modelopt] {
        let told = refusal(&vanilla, to, Some(&other));
        assert!(told.contains("`embed_tokens.weight` is not the target's: 1 of 512 rows differ"), "{told}");
    }
}

#[test]
fn a_target_of_another_size_is_named() {
    let vanilla = golden("dspark_vanilla");
    let target = edited(&target(&vanilla), |config| config["num_hidden_layers"] = json!(7));
    let error = try_convert(&vanilla, CheckpointFormat::Specforge, Some(&target)).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("`num_hidden_layers`: 7"), "{error}");
}

#[test]
fn only_a_converted_checkpoint_is_replaced() {
    let vanilla = golden("dspark_vanilla");
    let target = target(&vanilla);
    let target = Target::open(target.path(), "owner/target").unwrap();
    let source = open_checkpoint(vanilla.path()).unwrap();
    let folder = Folder::new();
    let out = folder.path().join("deeper/out");
    let write = |overwrite| {
        convert(&source, CheckpointFormat::Specforge, Some(&target)).unwrap().write(&out, overwrite)
    };
    write(false).unwrap();
    write(false).unwrap(); // a second write changes nothing
    std::fs::write(out.join("config.json"), "{}").unwrap();
    assert!(write(false).unwrap_err().to_string().contains("--overwrite"));
    write(true).unwrap();
    std::fs::write(out.join("notes.txt"), "mine").unwrap();
    assert!(write(true).unwrap_err().to_string().contains("notes.txt"));
    assert_eq!(std::fs::read_dir(out.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn missing_defaults_of_speculators_are_those_of_transformers() {
    let vanilla = golden("dspark_vanilla");
    let there = converted(&vanilla, CheckpointFormat::Speculators, Some(&target(&vanilla)));
    // A Qwen3Config without head_dim uses 128, not hidden_size / heads.
    let theirs = edited(&there, |config| {
        drop(config["transformer_layer_config"].as_object_mut().unwrap().remove("head_dim"));
    });
    let drafter = open_checkpoint(theirs.path()).unwrap();
    assert_eq!(drafter.drafter().decoder["head_dim"], 128);
    let told = drafter.check().unwrap_err().to_string();
    assert!(told.contains("layers.0.self_attn.q_proj.weight") && told.contains("512"), "{told}");
}

/// Engines read such keys of a drafter's own folder, too.
#[test]
fn keys_for_engines_leave_a_drafter_as_it_is() {
    let vanilla = golden("dspark_vanilla");
    let with_keys = edited(&vanilla, |config| {
        config["dspark_bonus_anchor"] = json!(true);
        config["dspark_noise_token_id"] = config["mask_token_id"].clone();
    });
    let [plain, found] = [&vanilla, &with_keys].map(|folder| open_checkpoint(folder.path()).unwrap());
    found.check().unwrap();
    assert_eq!(
        (found.format(), found.tensors().iter().count()),
        (plain.format(), plain.tensors().iter().count())
    );
}

#[test]
fn foreign_bundles_and_models_are_named() {
    let vanilla = golden("dspark_vanilla");
    let told = |change: &dyn Fn(&mut Value)| {
        open_checkpoint(edited(&vanilla, change).path()).map(|_| ()).unwrap_err().to_string()
    };
    let v4 = told(&|config| {
        config["architectures"] = json!(["KimiForCausalLM"]);
        config["dspark_block_size"] = json!(5);
    });
    assert!(v4.contains("dspark_block_size") && v4.contains("within DeepSeek-V4 only"), "{v4}");
    let model = told(&|config| config["architectures"] = json!(["Qwen3ForCausalLM"]));
    assert!(model.contains("`architectures`") && model.contains("no drafter of a known format"), "{model}");
}
