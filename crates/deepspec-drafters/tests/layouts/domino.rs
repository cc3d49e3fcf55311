//! Domino in the layouts of SpecForge and ModelOpt, in files of before, and refusals of others.

use std::path::Path;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Engine, GgufExport, Target, convert_for_engine, engine_compatibility,
};
use deepspec_drafters::{DrafterOptions, load_drafter, open_checkpoint};
use serde_json::{Value, json};
use tch::{Device, Kind};

use crate::common::{Folder, as_is, bytes, edited, golden, target, write};
use crate::convert::{converted, refusal};

const TO_REFERENCE: CheckpointFormat = CheckpointFormat::Reference;

fn away(to: CheckpointFormat) -> Folder {
    converted(&golden("domino"), to, Some(&target(&golden("domino"))))
}

fn loads(dir: &Path) -> usize {
    let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
    load_drafter(dir, &options).unwrap_or_else(|error| panic!("{error}")).draft_len()
}

#[test]
fn config_and_names_are_those_of_the_published_files() {
    let own = golden("domino");
    assert_eq!(loads(own.path()), 5);
    for (to, class) in
        [(CheckpointFormat::Specforge, "DominoDraftModel"), (CheckpointFormat::Modelopt, "DFlashDraftModel")]
    {
        let there = away(to);
        let config = there.config();
        assert_eq!((&config["architectures"], &config["model_type"]), (&json!([class]), &json!("qwen3")));
        assert_eq!((&config["block_size"], &config["emb_dim"]), (&json!(5), &json!(8)));
        assert_eq!(config["num_target_layers"], own.config()["num_target_layers"]);
        let inner = json!({
            "mask_token_id": own.config()["mask_token_id"], "target_layer_ids": own.config()["target_layer_ids"],
            "projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 8, "gru_hidden_dim": 12,
            "shift_label": true,
        });
        assert_eq!(config["dflash_config"], inner);
        let names = bytes(&there).into_keys().collect::<Vec<_>>();
        let is_own = |name: &String| !name.starts_with("layers.");
        assert_eq!(
            names.into_iter().filter(is_own).collect::<Vec<_>>(),
            [
                "embed_proj.0.weight",
                "embed_proj.2.weight",
                "fc.weight",
                "hidden_norm.weight",
                "norm.weight",
                "prefix_gru.weight_hh_l0",
                "prefix_gru.weight_ih_l0"
            ]
        );
        assert!(open_checkpoint(there.path()).unwrap().check().is_ok());
    }
}

/// The prefix of the head's names in files of before, the other name of the projector, and keys in
/// other places.
#[test]
fn files_of_before_are_read() {
    let own = golden("domino");
    let target = target(&own);
    for class in ["DominoDraftModel", "DFlashDraftModel"] {
        let old = edited(&away(CheckpointFormat::Specforge), |config| {
            config["architectures"] = json!([class]);
            config["dflash_config"]["projector_type"] = json!("causal_v5");
            config["dflash_config"].as_object_mut().unwrap().remove("emb_dim");
        });
        let renamed = |name: String| match name.starts_with("prefix_gru.") || name.starts_with("embed_proj.")
        {
            true => format!("logit_head.{name}"),
            false => name,
        };
        let tensors = bytes(&old).into_iter().map(|(name, tensor)| (renamed(name), tensor)).collect();
        write(&old.path().join("model.safetensors"), &tensors);
        let checkpoint = open_checkpoint(old.path()).unwrap();
        assert_eq!(checkpoint.format(), CheckpointFormat::Specforge);
        checkpoint.check().unwrap();
        let back = converted(&old, TO_REFERENCE, Some(&target));
        assert_eq!((bytes(&back), as_is(&back)), (bytes(&own), as_is(&own)), "{class}");
        let served = converted(&old, CheckpointFormat::Modelopt, Some(&target));
        assert_eq!(bytes(&served), bytes(&away(CheckpointFormat::Modelopt)), "{class}");
    }
}

#[test]
fn shift_label_says_what_the_slots_predict() {
    let own = golden("domino");
    let target = target(&own);
    let public = away(CheckpointFormat::Modelopt);
    // Without the key, slots fill in.
    for change in [json!(false), Value::Null] {
        let filling = edited(&public, |config| config["dflash_config"]["shift_label"] = change.clone());
        let kind = open_checkpoint(filling.path()).unwrap().drafter().kind.clone();
        assert!(kind.predicts_own_position() && kind.draft_len() == 4);
        let ours = converted(&filling, TO_REFERENCE, Some(&target));
        assert_eq!(ours.config()["sample_from_anchor"], false);
        assert_eq!(loads(ours.path()), 4);
        let back = converted(&ours, CheckpointFormat::Specforge, Some(&target));
        assert_eq!(back.config()["dflash_config"]["shift_label"], false);
    }
    let torn = edited(&public, |config| config["sample_from_anchor"] = json!(false));
    let told = open_checkpoint(torn.path()).err().unwrap().to_string();
    assert!(told.contains("`sample_from_anchor`: it contradicts"), "{told}");
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let public = away(CheckpointFormat::Modelopt);
    type Edit = fn(&mut Value);
    let wrong: [(Edit, &str); 8] = [
        (
            |config| config["dflash_config"]["pure_draft_prefix_len"] = json!(2),
            "2 drafts of a block are not corrected",
        ),
        (
            |config| drop(config["dflash_config"].as_object_mut().unwrap().remove("pure_draft_prefix_len")),
            "pure_draft_prefix_len: 0 drafts",
        ),
        (|config| config["dflash_config"]["gru_hidden_dim"] = json!(0), "gru_hidden_dim"),
        (|config| config["emb_dim"] = json!(9), "emb_dim: 9, and in dflash_config 8"),
        (|config| config["block_size"] = json!(1), "block_size: a block drafts 1 token"),
        (
            |config| config["dflash_config"]["causal"] = json!(true),
            "causal blocks of Domino are not supported",
        ),
        (
            |config| {
                config["architectures"] = json!(["DominoDraftModel"]);
                config["dflash_config"]["projector_type"] = json!("dspark");
            },
            "projector_type: \"dspark\", but DominoDraftModel has \"domino\"",
        ),
        (|config| config["dflash_config"]["mask_token_id"] = json!(5000), "5000 is outside the vocabulary"),
    ];
    for (edit, words) in wrong {
        let told = open_checkpoint(edited(&public, edit).path()).err().unwrap().to_string();
        assert!(told.replace('`', "").contains(words), "{words} in {told}");
    }
    let ours = edited(&golden("domino"), |config| config["pure_draft_prefix_len"] = json!(0));
    let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
    let told = load_drafter(ours.path(), &options).map(|_| ()).unwrap_err().to_string();
    assert!(told.contains("`pure_draft_prefix_len`: 0 drafts of a block are not corrected"), "{told}");
    let own = golden("domino");
    for to in [CheckpointFormat::Speculators, CheckpointFormat::Zlab] {
        let told = refusal(&own, to, Some(&target(&own)));
        assert!(told.contains("has no Domino"), "{told}");
    }
}

#[test]
fn only_sglang_gets_files() {
    let own = golden("domino");
    let (source, at) = (open_checkpoint(own.path()).unwrap(), target(&own));
    let target = Target::open(at.path(), "owner/target").unwrap();
    let out = Folder::new().within("out");
    convert_for_engine(&source, Engine::Sglang, &target).unwrap().write(out.path(), false).unwrap();
    assert_eq!(bytes(&out), bytes(&away(CheckpointFormat::Modelopt)));
    let again =
        convert_for_engine(&open_checkpoint(out.path()).unwrap(), Engine::Sglang, &target).map(|_| ());
    assert!(again.unwrap_err().to_string().contains("it loads the checkpoint as it is"));
    let sglang = |folder: &Folder| {
        let known = engine_compatibility(&open_checkpoint(folder.path()).unwrap());
        known.into_iter().find(|known| known.engine == "SGLang").unwrap()
    };
    assert!(sglang(&out).loads && sglang(&out).note.contains("--speculative-algorithm DFLASH"));
    for folder in [&own, &away(CheckpointFormat::Specforge)] {
        assert!(!sglang(folder).loads && sglang(folder).note.contains("convert to sglang"));
    }
    // SGLang does not know the old projector, and asks for the slots' convention.
    for (key, value) in [("projector_type", json!("causal_v5")), ("shift_label", json!(null))] {
        let old = edited(&out, |config| config["dflash_config"][key] = value.clone());
        assert!(!sglang(&old).loads && sglang(&old).note.contains("convert to sglang"), "{key}");
        let opened = open_checkpoint(old.path()).unwrap();
        assert!(convert_for_engine(&opened, Engine::Sglang, &target).is_ok(), "{key}");
    }
    let refused = [
        convert_for_engine(&source, Engine::Vllm, &target).map(|_| ()),
        GgufExport::plan(&source, &target, None).map(|_| ()),
    ];
    for told in refused {
        let told: CheckpointError = told.unwrap_err();
        assert!(told.to_string().contains("no correction head of Domino (prefix_gru, embed_proj)"), "{told}");
    }
    // Tools differ in who sees what within a window.
    let windowed = edited(&own, |config| {
        config["layer_types"] =
            json!(vec!["sliding_attention"; config["num_hidden_layers"].as_u64().unwrap() as usize]);
        (config["sliding_window"], config["use_sliding_window"]) = (json!(64), json!(true));
    });
    let told = refusal(&windowed, CheckpointFormat::Modelopt, Some(&at));
    assert!(told.contains("draft layers with a sliding window"), "{told}");
}
