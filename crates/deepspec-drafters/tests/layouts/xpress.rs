//! xPress in the layouts of speculators and of its authors, on both backbones, keys that are not supported, and refusals of other layouts and engines.

use deepspec_checkpoint::{CheckpointFormat, Engine, GgufExport, Target, convert_for_engine};
use deepspec_drafters::open_checkpoint;
use serde_json::{Value, json};

use crate::common::{Folder, as_is, bytes, edited, golden, target, write};
use crate::convert::{converted, refusal};

fn away() -> Folder {
    away_of("xpress")
}

fn away_of(case: &str) -> Folder {
    let own = golden(case);
    converted(&own, CheckpointFormat::Speculators, Some(&target(&own)))
}

#[test]
fn speculators_names_and_keys_are_its_own() {
    let there = away();
    let config = there.config();
    for (key, value) in [
        ("speculators_model_type", json!("xpress")),
        ("architectures", json!(["XPressSpeculator"])),
        ("xpress_rank", json!(8)),
        ("xpress_mlp_ratio", json!(2)),
        ("num_jacobi_passes", json!(6)),
        ("sample_from_anchor", json!(false)),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    for absent in ["xpress_num_passes", "xpress_candidate_topc", "xpress_backbone", "conv_kernel_size"] {
        assert_eq!(config.get(absent), None, "{absent}");
    }
    let names = bytes(&there).into_keys().filter(|name| name.starts_with("refiner_head."));
    let mut expected: Vec<String> =
        ["token_embed", "readout", "down_h", "down_g", "in_proj", "mlp_gate", "mlp_up", "mlp_down"]
            .map(|name| format!("refiner_head.{name}.weight"))
            .to_vec();
    expected.push("refiner_head.mix_l".into());
    expected.sort();
    assert_eq!(names.collect::<Vec<_>>(), expected);
    assert!(bytes(&there).keys().all(|name| !name.starts_with("xpress_head.")));
    assert!(open_checkpoint(there.path()).unwrap().check().is_ok());
}

/// speculators leaves out keys that have its defaults.
#[test]
fn a_checkpoint_of_speculators_has_its_defaults() {
    let written = edited(&away(), |config| {
        let map = config.as_object_mut().unwrap();
        map.retain(|key, _| {
            !["num_jacobi_passes", "xpress_mlp_ratio", "sample_from_anchor"].contains(&key.as_str())
        });
        map.insert("xpress_backbone".into(), json!("dflash"));
    });
    let own = golden("xpress");
    let back = converted(&written, CheckpointFormat::Reference, Some(&target(&own)));
    assert_eq!(bytes(&back), bytes(&own));
    let config = back.config();
    assert_eq!((&config["xpress_num_passes"], &config["xpress_mlp_ratio"]), (&json!(6), &json!(2)));
    assert_eq!((&config["sample_from_anchor"], &config["xpress_candidate_topc"]), (&json!(false), &json!(0)));
}

/// The keys are those of speculators' DFlash 2, behind the one that names the backbone.
#[test]
fn the_backbone_of_dflash_2_keeps_its_names() {
    let (own, there) = (golden("xpress_dflash2"), away_of("xpress_dflash2"));
    let config = there.config();
    for (key, value) in [
        ("speculators_model_type", json!("xpress")),
        ("xpress_backbone", json!("dflash2")),
        ("conv_kernel_size", json!(2)),
        ("conv_group_size", json!(16)),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    let convolutions = |folder: &Folder| -> Vec<String> {
        bytes(folder).into_keys().filter(|name| name.contains("_conv.")).collect()
    };
    assert!(!convolutions(&own).is_empty());
    assert_eq!(convolutions(&there), convolutions(&own));
    // speculators' defaults, and keys that it writes without a selector.
    let written = edited(&there, |config| {
        let map = config.as_object_mut().unwrap();
        map.retain(|key, _| !key.starts_with("conv_"));
        map.insert("xpress_selector".into(), json!(false));
        map.insert("selector_rank".into(), json!(256));
    });
    let back = converted(&written, CheckpointFormat::Reference, Some(&target(&own)));
    assert_eq!((bytes(&back), as_is(&back)), (bytes(&own), as_is(&own)));
    assert!(open_checkpoint(own.path()).unwrap().check().is_ok());
}

/// A change of config.json.
type Edit = fn(&mut Value);

#[test]
fn other_forms_are_refused_by_name() {
    let own: [(Edit, &str); 6] = [
        (|config| config["xpress_candidate_topc"] = json!(8), "`xpress_candidate_topc`: 8, but only 0"),
        (
            |config| config["sample_from_anchor"] = json!(true),
            "`sample_from_anchor`: true; the slots of xPress",
        ),
        (|config| config["xpress_num_passes"] = json!(65), "`xpress_num_passes`: 65 is not between 1 and 64"),
        (|config| config["xpress_rank"] = Value::Null, "`xpress_rank`: missing"),
        (|config| config["xpress_backbone"] = json!("dflash2"), "`conv_kernel_size`: missing"),
        (|config| config["xpress_selector"] = json!(true), "`xpress_selector`: a selector is not supported"),
    ];
    let theirs: [(Edit, &str); 4] = [
        (
            |config| config["xpress_backbone"] = json!("dspark"),
            "`xpress_backbone`: \"dspark\" is not supported; expected dflash or dflash2",
        ),
        (|config| config["xpress_selector"] = json!(true), "`xpress_selector`: a selector is not supported"),
        // The tensors are those of DFlash's backbone.
        (|config| config["xpress_backbone"] = json!("dflash2"), "attention_conv.base_kernel"),
        (
            |config| config["sample_from_anchor"] = json!(true),
            "`sample_from_anchor`: true; the slots of xPress",
        ),
    ];
    let told = |folder: &Folder| {
        let checkpoint = open_checkpoint(folder.path());
        checkpoint.and_then(|found| found.check()).err().map(|error| error.to_string()).unwrap_or_default()
    };
    for (edit, hint) in own {
        let found = told(&edited(&golden("xpress"), edit));
        assert!(found.contains(hint), "{hint} not in: {found}");
    }
    for (edit, hint) in theirs {
        let found = told(&edited(&away(), edit));
        assert!(found.contains(hint), "{hint} not in: {found}");
    }
    // Whoever drops the key leaves convolutions that DFlash's layers do not have.
    let found = told(&edited(&golden("xpress_dflash2"), |config| {
        config.as_object_mut().unwrap().retain(|key, _| key != "xpress_backbone");
    }));
    assert!(found.contains("_conv.") && found.contains("no use for it"), "{found}");
}

/// A checkpoint as the authors write it for vLLM: the config of z-lab's DFlash or DFlash 2, and the refiner's keys.
fn authors(case: &str, class: &str) -> Folder {
    let own = golden(case);
    let folder = edited(&own, |config| {
        let mut inner = json!({});
        let size = config["block_size"].clone();
        let map = config.as_object_mut().unwrap();
        for key in ["mask_token_id", "target_layer_ids", "conv_kernel_size", "conv_group_size"] {
            if let Some(value) = map.remove(key) {
                inner[key] = value;
            }
        }
        for key in ["num_anchors", "xpress_mlp_ratio", "xpress_backbone"] {
            map.remove(key);
        }
        let theirs = json!({
            "architectures": [class], "dflash_config": inner, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "xpress_mlp_hidden": 16, "xpress_block_size": size, "xpress_fused_kernel": false,
            "sample_from_anchor": false,
        });
        map.extend(theirs.as_object().unwrap().clone());
    });
    let mut tensors = bytes(&folder);
    tensors.retain(|name, _| !name.starts_with("embed_tokens") && !name.starts_with("lm_head"));
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

#[test]
fn the_authors_layouts_are_read_and_written() {
    for (case, class) in [("xpress", "Qwen3XPressModel"), ("xpress_dflash2", "Qwen3XPressDFlash2Model")] {
        let (own, theirs) = (golden(case), authors(case, class));
        assert_eq!(open_checkpoint(theirs.path()).unwrap().format(), CheckpointFormat::Zlab);
        let back = converted(&theirs, CheckpointFormat::Reference, Some(&target(&own)));
        assert_eq!(bytes(&back), bytes(&own));
        let keys =
            ["xpress_rank", "xpress_mlp_ratio", "xpress_num_passes", "mask_token_id", "target_layer_ids"];
        for key in [&keys[..], &["xpress_backbone", "conv_kernel_size", "conv_group_size"]].concat() {
            assert_eq!(back.config().get(key), own.config().get(key), "{key}");
        }
        let written = converted(&own, CheckpointFormat::Zlab, Some(&target(&own)));
        assert_eq!(bytes(&written), bytes(&theirs));
        let keys = ["architectures", "dflash_config", "block_size", "sample_from_anchor", "xpress_rank"];
        for key in [&keys[..], &["xpress_mlp_hidden", "xpress_block_size", "xpress_num_passes"]].concat() {
            assert_eq!(written.config()[key], theirs.config()[key], "{key}");
        }
        assert_eq!(written.config().get("xpress_backbone"), None);
    }
    let told = |theirs: &Folder, edit: Edit| {
        open_checkpoint(edited(theirs, edit).path()).map(drop).unwrap_err().to_string()
    };
    let theirs = authors("xpress", "Qwen3XPressModel");
    let wrong: [(Edit, &str); 7] = [
        (
            |config| config["xpress_mlp_hidden"] = json!(20),
            "`xpress_mlp_hidden`: 20 is no multiple of the rank 8",
        ),
        (|config| config["xpress_mlp_hidden"] = Value::Null, "`xpress_mlp_hidden`: missing"),
        (|config| config["xpress_block_size"] = json!(3), "`xpress_block_size`: 3, and the blocks have"),
        (|config| config["sample_from_anchor"] = json!(true), "the slots of xPress fill in"),
        (|config| config["xpress_candidate_topc"] = json!(8), "`xpress_candidate_topc`: 8, but only 0"),
        (|config| config["xpress_selector"] = json!(true), "`xpress_selector`: a selector is not supported"),
        (
            |config| config["xpress_backbone"] = json!("dflash2"),
            "`xpress_backbone`: \"dflash2\", but Qwen3XPressModel has the layers of dflash",
        ),
    ];
    for (edit, hint) in wrong {
        let told = told(&theirs, edit);
        assert!(told.contains(hint), "{hint} not in: {told}");
    }
    let theirs = authors("xpress_dflash2", "Qwen3XPressDFlash2Model");
    let wrong: [(Edit, &str); 3] = [
        (|config| config["dflash_config"]["conv_kernel_size"] = Value::Null, "`conv_kernel_size`: missing"),
        (
            |config| config["xpress_backbone"] = json!("dflash"),
            "`xpress_backbone`: \"dflash\", but Qwen3XPressDFlash2Model has the layers of dflash2",
        ),
        (|config| config["xpress_selector"] = json!(true), "`xpress_selector`: a selector is not supported"),
    ];
    for (edit, hint) in wrong {
        let told = told(&theirs, edit);
        assert!(told.contains(hint), "{hint} not in: {told}");
    }
    // Sizes of a selector that is off, as speculators writes them.
    let without_selector = edited(&theirs, |config| {
        for (key, value) in
            [("xpress_selector", json!(false)), ("selector_rank", json!(256)), ("selector_top_k", json!(16))]
        {
            config[key] = value;
        }
    });
    let own = golden("xpress_dflash2");
    assert_eq!(
        bytes(&converted(&without_selector, CheckpointFormat::Reference, Some(&target(&own)))),
        bytes(&own)
    );
}

#[test]
fn other_layouts_and_engines_are_refused() {
    let own = golden("xpress");
    for to in [CheckpointFormat::Specforge, CheckpointFormat::Modelopt] {
        let told = refusal(&own, to, Some(&target(&own)));
        assert!(told.contains("has no layout for xPress"), "{told}");
    }
    let (source, target) = (open_checkpoint(own.path()).unwrap(), target(&own));
    let target = Target::open(target.path(), "owner/target").unwrap();
    for (engine, reason) in
        [(Engine::Vllm, "vLLM 0.32 has no xPress"), (Engine::Sglang, "SGLang has no xPress")]
    {
        let told = convert_for_engine(&source, engine, &target).err().unwrap().to_string();
        assert!(told.contains(reason), "{told}");
    }
    let told = GgufExport::plan(&source, &target, None).err().unwrap().to_string();
    assert!(told.contains("llama.cpp has no xPress"), "{told}");
}
