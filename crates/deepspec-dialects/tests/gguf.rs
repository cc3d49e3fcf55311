//! GGUF files as llama.cpp's own package reads them, and drafters that llama.cpp cannot run.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Folder, golden};
use deepspec_dialects::{Checkpoint, DialectError, Gguf, Target, TensorType};
use deepspec_testkit::skip;
use serde_json::{Map, Value, json};

fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets").join(name)
}

/// The small trained DSpark, its config and tensors edited.
fn edited(edit: impl FnOnce(&mut Value), keep: impl Fn(&str) -> bool) -> Folder {
    let (folder, from) = (Folder::new(), asset("tiny-dspark"));
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    let mut config = folder.config();
    edit(&mut config);
    folder.put(&config);
    let mut tensors = common::bytes(&folder);
    tensors.retain(|name, _| keep(name));
    common::write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// Writes the drafter as GGUF and gives what the gguf package says of it; None where the package is not there.
fn read(
    drafter: &Folder,
    matrices: TensorType,
    names: &[(&str, Option<&str>)],
) -> Option<(Value, &'static str)> {
    let python = skip::python("gguf")?;
    let (source, target) = (
        Checkpoint::open(drafter.path()).unwrap(),
        Target::open(&asset("tiny-target"), "owner/target").unwrap(),
    );
    let gguf = Gguf::plan(&source, &target, Some(matrices)).unwrap();
    let [out, list] = ["gguf", "names.json"].map(|name| drafter.path().join(name));
    gguf.write(&out, true).unwrap();
    let file = out.join(Gguf::FILE);
    let shared = [
        ("fc.weight", "fc.weight"),
        ("enc.output_norm.weight", "hidden_norm.weight"),
        ("output_norm.weight", "norm.weight"),
    ];
    let mut map: Map<String, Value> =
        shared.iter().map(|(there, here)| (there.to_string(), json!(here))).collect();
    for layer in 0..source.drafter().layers {
        for (there, here) in [
            ("attn_norm", "input_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("attn_q_norm", "self_attn.q_norm"),
            ("attn_k_norm", "self_attn.k_norm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ] {
            map.insert(format!("blk.{layer}.{there}.weight"), json!(format!("layers.{layer}.{here}.weight")));
        }
    }
    map.extend(names.iter().map(|(there, here)| (there.to_string(), json!(here))));
    fs::write(&list, json!(map).to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf_read.py");
    let weights = drafter.path().join("model.safetensors");
    let run = Command::new(python).arg(script).args([&file, &weights, &list]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    Some((serde_json::from_slice(&run.stdout).unwrap(), gguf.spec_type))
}

#[test]
fn llama_cpps_package_reads_what_was_written() {
    let heads = [
        ("markov_w1.weight", Some("markov_head.markov_w1.weight")),
        ("markov_w2.weight", Some("markov_head.markov_w2.weight")),
        ("conf_proj.weight", Some("confidence_head.proj.weight")),
        ("conf_proj.bias", Some("confidence_head.proj.bias")),
    ];
    let whole = edited(|_| {}, |_| true);
    let Some((read_f32, spec_type)) = read(&whole, TensorType::F32, &heads) else { return };
    assert_eq!(spec_type, "draft-dspark");
    let (fields, config) = (&read_f32["fields"], whole.config());
    let tokenizer: Value =
        serde_json::from_str(&fs::read_to_string(asset("tiny-target").join("tokenizer.json")).unwrap())
            .unwrap();
    let vocab = config["vocab_size"].as_u64().unwrap() as usize;
    assert_eq!(fields["general.architecture"], "dflash");
    for (key, ours) in [
        ("block_count", "num_hidden_layers"),
        ("embedding_length", "hidden_size"),
        ("attention.key_length", "head_dim"),
        ("block_size", "block_size"),
    ] {
        assert_eq!(fields[format!("dflash.{key}")], config[ours], "{key}");
    }
    let taps = config["target_layer_ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() + 1);
    assert_eq!(fields["dflash.target_layers"], json!(taps.collect::<Vec<_>>()));
    assert_eq!(
        (&fields["dflash.sample_from_anchor"], &fields["dflash.has_confidence_head"]),
        (&true.into(), &true.into())
    );
    assert_eq!(fields["tokenizer.ggml.mask_token_id"], config["mask_token_id"]);
    assert_eq!(fields["tokenizer.ggml.tokens"].as_array().unwrap().len(), vocab);
    for (token, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
        assert_eq!(fields["tokenizer.ggml.tokens"][id.as_u64().unwrap() as usize], *token);
    }
    let merges = tokenizer["model"]["merges"].as_array().unwrap().len();
    assert_eq!(fields["tokenizer.ggml.merges"].as_array().unwrap().len(), merges);

    // The checkpoint's values are bfloat16, which its own type keeps as well; what is no matrix is float32 all the same.
    let (read_bf16, _) = read(&whole, TensorType::Bf16, &heads).unwrap();
    let kinds = |name: &str| (read_f32["tensors"][name].clone(), read_bf16["tensors"][name].clone());
    assert_eq!(kinds("blk.0.attn_q.weight"), ("F32".into(), "BF16".into()));
    assert_eq!(kinds("blk.0.attn_q_norm.weight"), ("F32".into(), "F32".into()));
    assert_eq!(kinds("conf_proj.weight"), ("F32".into(), "F32".into()));
}

#[test]
fn a_dflash_whose_slots_all_draft_has_a_markov_head_of_zeros() {
    let bare = |config: &mut Value| {
        config["markov_rank"] = json!(0);
        config["enable_confidence_head"] = json!(false);
    };
    let has_no_head = |name: &str| !name.contains("_head.") || name == "lm_head.weight";
    let dflash = edited(bare, has_no_head);
    let zeros = [("markov_w1.weight", None), ("markov_w2.weight", None)];
    let Some((told, spec_type)) = read(&dflash, TensorType::F32, &zeros) else { return };
    assert_eq!((spec_type, &told["fields"]["dflash.has_confidence_head"]), ("draft-dspark", &false.into()));
    let fills_in = edited(
        |config| {
            bare(config);
            config["sample_from_anchor"] = json!(false);
        },
        has_no_head,
    );
    let (told, spec_type) = read(&fills_in, TensorType::F32, &[]).unwrap();
    assert_eq!((spec_type, told["fields"].get("dflash.sample_from_anchor")), ("draft-dflash", None));
}

#[test]
fn only_a_folder_of_such_a_file_is_replaced() {
    let drafter = edited(|_| {}, |_| true);
    let (source, target) = (
        Checkpoint::open(drafter.path()).unwrap(),
        Target::open(&asset("tiny-target"), "owner/target").unwrap(),
    );
    let gguf = Gguf::plan(&source, &target, None).unwrap();
    let out = drafter.path().join("out");
    gguf.write(&out, false).unwrap();
    let told = gguf.write(&out, false).unwrap_err().to_string();
    assert!(told.contains("exists already"), "{told}");
    gguf.write(&out, true).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let told = gguf.write(&out, true).unwrap_err().to_string();
    assert!(told.contains("it holds notes.txt too"), "{told}");
    assert!(out.join(Gguf::FILE).is_file() && !drafter.path().join("out.partial").exists());
}

#[test]
fn what_llama_cpp_cannot_run_is_refused_with_the_reason() {
    let refusal = |folder: &Folder| {
        let (target, source) = (common::target(folder), Checkpoint::open(folder.path()).unwrap());
        let target = Target::open(target.path(), "owner/target").unwrap();
        match Gguf::plan(&source, &target, None).map(|_| ()).unwrap_err() {
            DialectError::Refused { to: "gguf", reason, .. } => reason,
            other => panic!("no refusal: {other}"),
        }
    };
    let edited = |case: &str, edit: fn(&mut Value)| {
        let folder = golden(case);
        let mut config = folder.config();
        edit(&mut config);
        folder.put(&config);
        folder
    };
    type Edit = fn(&mut Value);
    let same: Edit = |_| {};
    let cases: [(&str, Edit, &str); 10] = [
        ("dspark_gated", same, "vanilla Markov head, and not one that is gated"),
        ("dspark_rnn", same, "vanilla Markov head, and not one that is rnn"),
        ("eagle3_qwen3", same, "three taps and no norms"),
        (
            "dspark_vanilla",
            |config| config["sample_from_anchor"] = json!(false),
            "heads beside slots that fill in are not written",
        ),
        ("dspark_vanilla", |config| config["model_type"] = json!("llama"), "its layers are Llama's"),
        ("dflash2", |config| config["selector_top_k"] = json!(8), "8 candidates are too many for 64 values"),
        ("dspark_vanilla", |config| config["rope_parameters"]["rope_type"] = json!("yarn"), "scaled (yarn)"),
        (
            "dspark_vanilla",
            |config| config["rope_scaling"] = json!({"type": "linear", "factor": 2.0}),
            "scaled (linear)",
        ),
        ("dspark_vanilla", |config| config["hidden_act"] = json!("gelu"), "`hidden_act`: gelu"),
        ("dflash2", |config| config["hidden_act"] = json!("gelu"), "`hidden_act`: gelu"),
    ];
    for (case, edit, words) in cases {
        let told = refusal(&edited(case, edit));
        assert!(told.contains(words), "{case}: {words} in {told}");
    }
}
