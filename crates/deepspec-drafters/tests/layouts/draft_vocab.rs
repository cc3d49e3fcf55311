//! Eagle3 with a reduced vocabulary in the layouts of SpecForge, EAGLE's own repository and speculators.

use deepspec_checkpoint::{CheckpointFormat, engine_compatibility};
use deepspec_drafters::{DrafterOptions, load_drafter, open_checkpoint};
use safetensors::tensor::Dtype;
use serde_json::json;
use tch::{Device, Kind};

use crate::common::{Bytes, Folder, bytes, edited, fixture, golden, target, write};
use crate::convert::{converted, refusal};

fn edited_tensors(from: &Folder, edit: impl Fn(&mut Bytes)) -> Folder {
    let folder = edited(from, |_| {});
    let mut tensors = bytes(from);
    edit(&mut tensors);
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

#[test]
fn a_reduced_vocabulary_goes_through_all_layouts_and_back() {
    let (specforge, target) = (fixture::specforge_eagle3(), target(&golden("eagle3_qwen3")));
    let reference = converted(&specforge, CheckpointFormat::Reference, Some(&target));
    let config = reference.config();
    assert_eq!((&config["draft_vocab_size"], &config["vocab_size"]), (&json!(64), &json!(128)));
    let (own, theirs) = (bytes(&reference), bytes(&specforge));
    for name in ["lm_head.weight", "d2t"] {
        assert_eq!(own[name], theirs[name], "{name}");
    }
    assert!(own.contains_key("embed_tokens.weight") && !own.contains_key("t2d"));

    let speculators = converted(&reference, CheckpointFormat::Speculators, Some(&target));
    assert_eq!(speculators.config()["draft_vocab_size"], json!(64));
    let back = converted(&speculators, CheckpointFormat::Reference, Some(&target));
    assert_eq!(bytes(&back), own);
    let back = converted(&reference, CheckpointFormat::Specforge, Some(&target));
    assert_eq!(back.config()["draft_vocab_size"], json!(64));
    assert_eq!(bytes(&back), theirs);
}

/// The authors' repository names the class of the target, and no captured layers.
#[test]
fn the_layout_of_eagles_own_repository_is_read() {
    let target = edited(&target(&golden("eagle3_qwen3")), |config| config["num_hidden_layers"] = json!(12));
    let eagle = edited(&fixture::specforge_eagle3(), |config| {
        config["architectures"] = json!(["LlamaForCausalLM"]);
        config.as_object_mut().unwrap().remove("eagle_config");
    });
    let opened = open_checkpoint(eagle.path()).unwrap();
    assert!(opened.check().is_ok() && opened.drafter().taps.is_empty());
    let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
    let told = load_drafter(eagle.path(), &options).err().unwrap().to_string();
    assert!(told.contains("deepspec-eval checkpoint convert --from"), "{told}");
    let reference = converted(&eagle, CheckpointFormat::Reference, Some(&target));
    assert!(load_drafter(reference.path(), &options).is_ok());
    assert_eq!(reference.config()["target_layer_ids"], json!([1, 5, 8]), "layers 1, N/2 - 1 and N - 4");
    let small = crate::common::target(&golden("eagle3_qwen3"));
    assert!(
        refusal(&eagle, CheckpointFormat::Reference, Some(&small)).contains("6 layers has no default ones")
    );
}

#[test]
fn a_damaged_vocabulary_is_named() {
    let (specforge, target) = (fixture::specforge_eagle3(), target(&golden("eagle3_qwen3")));
    let far: Vec<u8> = (0..64).flat_map(|_| 100_i64.to_le_bytes()).collect();
    let twice: Vec<u8> = (0..64_i64).flat_map(|id| (-id).to_le_bytes()).collect();
    let map = |data: &[u8], length| (Dtype::I64, vec![length], data.to_vec());
    type Edit<'a> = &'a dyn Fn(&mut Bytes);
    let cases: [(&str, Edit, &str); 5] = [
        ("missing", &|tensors| drop(tensors.remove("d2t")), "missing"),
        (
            "far",
            &|tensors| drop(tensors.insert("d2t".into(), map(&far, 64))),
            "draft id 28 stands for token 128",
        ),
        (
            "twice",
            &|tensors| drop(tensors.insert("d2t".into(), map(&twice, 64))),
            "draft id 1 stands for token 0",
        ),
        ("short", &|tensors| drop(tensors.insert("d2t".into(), map(&far[..80], 10))), "it has 10 entries"),
        ("head", &|tensors| drop(tensors.remove("lm_head.weight")), "lm_head.weight"),
    ];
    for (what, edit, words) in cases {
        let folder = edited_tensors(&specforge, edit);
        let opened = open_checkpoint(folder.path()).unwrap();
        let told = opened.check().unwrap_err().to_string();
        assert!(told.contains(words), "{what}: {told}");
        let target = deepspec_checkpoint::Target::open(target.path(), "owner/target").unwrap();
        let converted = deepspec_checkpoint::convert(&opened, CheckpointFormat::Reference, Some(&target));
        assert!(converted.is_err(), "{what}");
    }
}

#[test]
fn further_norms_are_kept_where_a_layout_can_say_them() {
    let target = target(&golden("eagle3_qwen3"));
    let normed = edited(&golden("eagle3_qwen3"), |config| {
        (config["norm_before_residual"], config["norm_output"]) = (json!(true), json!(true));
    });
    let speculators = converted(&normed, CheckpointFormat::Speculators, Some(&target));
    let flag = |folder: &Folder, key: &str| folder.config()[key].clone();
    assert_eq!(flag(&speculators, "norm_before_residual"), json!(true));
    assert_eq!(
        (flag(&speculators, "norm_output"), flag(&speculators, "fc_norm")),
        (json!(true), json!(false))
    );
    let back = converted(&speculators, CheckpointFormat::Reference, Some(&target));
    assert_eq!(flag(&back, "norm_before_residual"), json!(true));
    assert_eq!((flag(&back, "norm_output"), flag(&back, "fc_norm")), (json!(true), json!(null)));
    assert_eq!(bytes(&back), bytes(&normed));
    let plain = converted(&golden("eagle3_qwen3"), CheckpointFormat::Speculators, Some(&target));
    assert_eq!(flag(&plain, "norm_before_residual"), json!(false), "vLLM takes an absent flag for true");
    let specforge = fixture::specforge_eagle3();
    let llama = edited(&specforge, |config| config["norm_before_residual"] = json!(true));
    let engines = engine_compatibility(&open_checkpoint(llama.path()).unwrap());
    let sglang = engines.into_iter().find(|found| found.engine == "SGLang").unwrap();
    assert!(!sglang.loads && sglang.note == "it does not read norm_before_residual", "{}", sglang.note);
    let reference = converted(&llama, CheckpointFormat::Reference, Some(&target));
    let told = refusal(&reference, CheckpointFormat::Specforge, Some(&target));
    assert!(told.contains("no further norms but fc_norm (norm_before_residual)"), "{told}");

    let with_tensors = edited_tensors(&specforge, |tensors| {
        let norm = tensors["norm.weight"].clone();
        tensors.extend((0..3).map(|i| (format!("fc_norm.{i}.weight"), norm.clone())));
    });
    let with_fc_norm = edited(&with_tensors, |config| config["fc_norm"] = json!(true));
    let reference = converted(&with_fc_norm, CheckpointFormat::Reference, Some(&target));
    let back = converted(&reference, CheckpointFormat::Specforge, Some(&target));
    assert_eq!((flag(&back, "fc_norm"), bytes(&back)), (json!(true), bytes(&with_fc_norm)));
}

/// Norms before `fc` have tensors, and only one kind of them may be set.
#[test]
fn a_norm_without_its_tensor_is_named() {
    for (keys, words) in [
        (&["norm_before_fc"][..], "input_norm.weight"),
        (&["fc_norm"], "fc_norm.0.weight"),
        (&["fc_norm", "norm_before_fc"], "only one of them"),
    ] {
        let folder = edited(&golden("eagle3_qwen3"), |config| {
            keys.iter().for_each(|key| config[*key] = json!(true));
        });
        let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
        let told = load_drafter(folder.path(), &options).err().unwrap().to_string();
        assert!(told.contains(words), "{told}");
        let opened = open_checkpoint(folder.path()).unwrap();
        assert!(opened.check().unwrap_err().to_string().contains(words));
    }
}
