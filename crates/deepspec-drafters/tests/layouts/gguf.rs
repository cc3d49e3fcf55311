//! GGUF files as llama.cpp's own package reads them, and drafters that llama.cpp cannot run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::slice;

use crate::common::{Folder, golden};
use deepspec_checkpoint::{ATTENTION_SINK_BIAS, CheckpointError, GgufExport, Target, TensorType};
use deepspec_drafters::open_checkpoint;
use deepspec_testkit::{noise, skip};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

/// A folder of the repository's assets.
pub fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets").join(name)
}

/// The small trained DSpark with an edited config and tensors.
fn edited(edit: impl FnOnce(&mut Value), keep: impl Fn(&str) -> bool) -> Folder {
    let (folder, from) = (Folder::new(), asset("tiny-dspark"));
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    let mut config = folder.config();
    edit(&mut config);
    folder.put(&config);
    let mut tensors = crate::common::bytes(&folder);
    tensors.retain(|name, _| keep(name));
    crate::common::write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// Writes the drafter as GGUF and returns what the gguf package reads; None without the package.
fn read(
    drafter: &Folder,
    matrices: TensorType,
    names: &[(&str, Option<&str>)],
) -> Option<(Value, &'static str)> {
    let names = names.iter().map(|(there, here)| (there.to_string(), json!(here)));
    let mut map: Map<String, Value> = [
        ("fc.weight", "fc.weight"),
        ("enc.output_norm.weight", "hidden_norm.weight"),
        ("output_norm.weight", "norm.weight"),
    ]
    .iter()
    .map(|(there, here)| (there.to_string(), json!(here)))
    .collect();
    map.extend(names);
    read_all(drafter, matrices, &["self_attn.q_norm", "self_attn.k_norm"], map)
}

/// As [`read`], with these additional layer tensors and with all other tensors by name.
fn read_all(
    drafter: &Folder,
    matrices: TensorType,
    of_layers: &[&str],
    map: Map<String, Value>,
) -> Option<(Value, &'static str)> {
    let written = write(drafter, matrices, of_layers, map);
    Some((read_back(slice::from_ref(&written))?.remove(0), written.method))
}

/// A drafter that was written as GGUF.
pub struct Written {
    /// The file, the checkpoint, and the list of names.
    paths: [PathBuf; 3],
    method: &'static str,
}

/// As [`write_named`], with the names of the layers' tensors; of norms, only those that `of_layers` lists.
fn write(drafter: &Folder, matrices: TensorType, of_layers: &[&str], mut map: Map<String, Value>) -> Written {
    for layer in 0..drafter.config()["num_hidden_layers"].as_u64().unwrap() {
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
            if !here.ends_with("_norm") || of_layers.contains(&here) {
                map.entry(format!("blk.{layer}.{there}.weight"))
                    .or_insert(json!(format!("layers.{layer}.{here}.weight")));
            }
        }
    }
    write_named(drafter, matrices, &map)
}

/// Writes the drafter as GGUF, and the list of its tensors' names, for [`read_back`].
pub fn write_named(drafter: &Folder, matrices: TensorType, map: &Map<String, Value>) -> Written {
    let (source, target) = (
        open_checkpoint(drafter.path()).unwrap(),
        Target::open(&asset("tiny-target"), "owner/target").unwrap(),
    );
    let gguf = GgufExport::plan(&source, &target, Some(matrices)).unwrap();
    let [out, list] = ["gguf", "names.json"].map(|name| drafter.path().join(name));
    gguf.write(&out, true).unwrap();
    fs::write(&list, json!(map).to_string()).unwrap();
    let weights = drafter.path().join("model.safetensors");
    Written { paths: [out.join(GgufExport::FILE), weights, list], method: source.drafter().kind.method() }
}

/// The metadata of each file, which the gguf package reads in one process; None without the package.
pub fn read_back(files: &[Written]) -> Option<Vec<Value>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/layouts/gguf_read.py");
    let mut command = Command::new(skip::python("gguf")?);
    let run = command.arg(script).args(files.iter().flat_map(|file| &file.paths)).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    Some(serde_json::from_slice(&run.stdout).unwrap())
}

/// Names of the heads' tensors in GGUF and here.
const HEADS: [(&str, Option<&str>); 4] = [
    ("markov_w1.weight", Some("markov_head.markov_w1.weight")),
    ("markov_w2.weight", Some("markov_head.markov_w2.weight")),
    ("conf_proj.weight", Some("confidence_head.proj.weight")),
    ("conf_proj.bias", Some("confidence_head.proj.bias")),
];

#[test]
fn llama_cpps_package_reads_what_was_written() {
    let whole = edited(|_| {}, |_| true);
    let Some((read_f32, method)) = read(&whole, TensorType::F32, &HEADS) else { return };
    assert_eq!(method, "dspark");
    let (fields, config) = (&read_f32["fields"], whole.config());
    let tokenizer: Value =
        serde_json::from_str(&fs::read_to_string(asset("tiny-target").join("tokenizer.json")).unwrap())
            .unwrap();
    let vocab = config["vocab_size"].as_u64().unwrap() as usize;
    assert_eq!(fields["general.architecture"], "dflash");
    assert_eq!(fields["general.description"], format!("written by deepspec {}", deepspec_core::VERSION));
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
    // Slots see their whole block.
    assert!(fields.get("dflash.attention.causal").is_none(), "{fields}");
    assert_eq!(fields["tokenizer.ggml.mask_token_id"], config["mask_token_id"]);
    assert_eq!(fields["tokenizer.ggml.tokens"].as_array().unwrap().len(), vocab);
    for (token, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
        assert_eq!(fields["tokenizer.ggml.tokens"][id.as_u64().unwrap() as usize], *token);
    }
    let merges = tokenizer["model"]["merges"].as_array().unwrap().len();
    assert_eq!(fields["tokenizer.ggml.merges"].as_array().unwrap().len(), merges);

    // The checkpoint's values are bfloat16, and so are its matrices in the Bf16 file. All other
    // tensors are float32 in both files.
    let (read_bf16, _) = read(&whole, TensorType::Bf16, &HEADS).unwrap();
    let kinds = |name: &str| (read_f32["tensors"][name].clone(), read_bf16["tensors"][name].clone());
    assert_eq!(kinds("blk.0.attn_q.weight"), ("F32".into(), "BF16".into()));
    assert_eq!(kinds("blk.0.attn_q_norm.weight"), ("F32".into(), "F32".into()));
    assert_eq!(kinds("conf_proj.weight"), ("F32".into(), "F32".into()));
}

#[test]
fn llama_cpps_package_reads_causal_blocks_and_attention_sinks() {
    let options = ["is_causal", ATTENTION_SINK_BIAS];
    let drafter = edited(|config| options.into_iter().for_each(|key| config[key] = json!(true)), |_| true);
    let config = drafter.config();
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let (layers, heads) = (size("num_hidden_layers"), size("num_attention_heads"));
    let mut tensors = crate::common::bytes(&drafter);
    let names: Vec<[String; 2]> = (0..layers)
        .map(|layer| {
            [
                format!("blk.{layer}.attn_sinks.weight"),
                format!("layers.{layer}.self_attn.{ATTENTION_SINK_BIAS}"),
            ]
        })
        .collect();
    for (layer, [_, here]) in names.iter().enumerate() {
        let data = noise(layer as u64, heads).iter().flat_map(|value| value.to_le_bytes()).collect();
        tensors.insert(here.clone(), (Dtype::F32, vec![heads], data));
    }
    crate::common::write(&drafter.path().join("model.safetensors"), &tensors);
    let sinks = names.iter().map(|[there, here]| (there.as_str(), Some(here.as_str())));
    let names: Vec<_> = HEADS.into_iter().chain(sinks).collect();
    let Some((told, method)) = read(&drafter, TensorType::Bf16, &names) else { return };
    assert_eq!((method, &told["fields"]["dflash.attention.causal"]), ("dspark", &true.into()));
    assert_eq!(told["tensors"]["blk.0.attn_sinks.weight"], "F32");
}

fn config_of(dir: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
}

/// An Eagle3 with Llama layers for the tiny target, with Llama 3's rotary scaling.
fn llama_eagle3() -> Folder {
    let (folder, mut config) = (Folder::new(), config_of(&asset("tiny-dspark")));
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let [width, inner, heads, groups, dim] =
        ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
            .map(size);
    let part = |name: &str| format!("layers.0.{name}.weight");
    let shapes = [
        ("fc.weight".to_string(), vec![width, 3 * width]),
        ("norm.weight".into(), vec![width]),
        (part("self_attn.q_proj"), vec![heads * dim, 2 * width]),
        (part("self_attn.k_proj"), vec![groups * dim, 2 * width]),
        (part("self_attn.v_proj"), vec![groups * dim, 2 * width]),
        (part("self_attn.o_proj"), vec![width, heads * dim]),
        (part("mlp.gate_proj"), vec![inner, width]),
        (part("mlp.up_proj"), vec![inner, width]),
        (part("mlp.down_proj"), vec![width, inner]),
        (part("input_layernorm"), vec![width]),
        (part("post_attention_layernorm"), vec![width]),
        (part("hidden_norm"), vec![width]),
    ];
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let values = noise(shape.iter().sum::<usize>() as u64, shape.iter().product());
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        (name, (Dtype::F32, shape, data))
    };
    let mut tensors: crate::common::Bytes = shapes.into_iter().map(tensor).collect();
    let ends = crate::common::bytes(&edited(
        |_| {},
        |name| ["embed_tokens.weight", "lm_head.weight"].contains(&name),
    ));
    tensors.extend(ends);
    crate::common::write(&folder.path().join("model.safetensors"), &tensors);
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512, "rope_theta": 10000.0,
    });
    let map = config.as_object_mut().unwrap();
    map.retain(|key, _| !["rope_scaling", "rope_theta", "layer_types"].contains(&key.as_str()));
    let own = json!({
        "architectures": ["LlamaEagle3Model"], "model_type": "llama", "num_hidden_layers": 1, "ttt_length": 4,
        "target_layer_ids": [0, 2, 4], "rope_parameters": scaling, "dtype": "float32",
    });
    map.extend(own.as_object().unwrap().clone());
    folder.put(&config);
    folder
}

/// Names of an Eagle3's tensors in GGUF, and what each holds.
fn eagle3_names(drafter: &Folder) -> Map<String, Value> {
    let config = drafter.config();
    let paired =
        |name: &str, heads: &str| json!({"pairs": config[heads], "of": format!("layers.0.{name}.weight")});
    let names = [
        ("fc.weight", json!("fc.weight")),
        ("output_norm.weight", json!("norm.weight")),
        ("blk.0.attn_norm_2.weight", json!("layers.0.hidden_norm.weight")),
        ("blk.0.attn_q.weight", paired("self_attn.q_proj", "num_attention_heads")),
        ("blk.0.attn_k.weight", paired("self_attn.k_proj", "num_key_value_heads")),
        ("rope_freqs.weight", json!({"config": drafter.path().join("config.json")})),
    ];
    names.map(|(there, here)| (there.to_string(), here)).into_iter().collect()
}

/// Divisors of the frequencies and the factor on cosines, which transformers computes from config.json. A
/// null is the ratio of the lengths.
#[test]
fn llama_cpps_package_reads_scaled_rotary_embeddings() {
    let original = ("original_max_position_embeddings", json!(512));
    let settings = [
        json!({"rope_type": "linear", "factor": 3.0}),
        json!({"rope_type": "yarn", "factor": 4.0}),
        json!({"rope_type": "yarn", "factor": null}),
        json!({"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": false}),
        json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 0}),
        json!({"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1}),
    ];
    let drafters: Vec<(Folder, Written)> = settings
        .into_iter()
        .map(|mut settings| {
            let drafter = llama_eagle3();
            let mut config = drafter.config();
            settings["rope_theta"] = json!(10000.0);
            settings[original.0] = original.1.clone();
            config["rope_parameters"] = settings;
            config["max_position_embeddings"] = json!(3000);
            drafter.put(&config);
            let written = write(&drafter, TensorType::F32, &[], eagle3_names(&drafter));
            (drafter, written)
        })
        .collect();
    let (_folders, written): (Vec<Folder>, Vec<Written>) = drafters.into_iter().unzip();
    read_back(&written);
}

#[test]
fn rotary_embeddings_that_llama_cpp_does_not_read_are_refused() {
    for (settings, words) in [
        (json!({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}), "`rope_parameters.truncate`"),
        (json!({"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}), "part of each head"),
        (json!({"rope_type": "dynamic", "factor": 4.0}), "\"dynamic\" is not supported"),
    ] {
        let drafter = llama_eagle3();
        let mut config = drafter.config();
        config["rope_parameters"] = settings;
        config["rope_parameters"]["rope_theta"] = json!(10000.0);
        drafter.put(&config);
        let told = open_checkpoint(drafter.path()).map_err(|error| error.to_string()).and_then(|source| {
            let target = Target::open(&asset("tiny-target"), "owner/target").unwrap();
            GgufExport::plan(&source, &target, None).map(|_| ()).map_err(|error| error.to_string())
        });
        let told = told.unwrap_err();
        assert!(told.contains(words), "{told}");
    }
}

#[test]
fn llama_cpps_package_reads_an_eagle3() {
    let drafter = llama_eagle3();
    let config = drafter.config();
    let names = eagle3_names(&drafter);
    let Some((told, method)) = read_all(&drafter, TensorType::F32, &[], names) else { return };
    let fields = &told["fields"];
    assert_eq!((method, &fields["general.architecture"]), ("eagle3", &json!("eagle3")));
    assert_eq!(fields["eagle3.target_layers"], json!([1, 3, 5]));
    assert_eq!(fields["eagle3.target_hidden_size"], config["hidden_size"]);
    assert_eq!(fields["eagle3.rope.freq_base"], 10000.0);
    assert_eq!(fields["eagle3.attention.head_count_kv"], config["num_key_value_heads"]);
    let wider = llama_eagle3();
    let mut config = wider.config();
    config["target_layer_ids"] = json!([0, 1, 2, 4]);
    wider.put(&config);
    let mut tensors = crate::common::bytes(&wider);
    let (_, shape, data) = tensors.get_mut("fc.weight").unwrap();
    shape[1] = shape[1] / 3 * 4;
    data.resize(data.len() / 3 * 4, 0);
    crate::common::write(&wider.path().join("model.safetensors"), &tensors);
    let (source, target) = (
        open_checkpoint(wider.path()).unwrap(),
        Target::open(&asset("tiny-target"), "owner/target").unwrap(),
    );
    let refused = GgufExport::plan(&source, &target, None).err().unwrap().to_string();
    assert!(refused.contains("1 layer and 3 taps, and not 1 and 4"), "{refused}");
}

/// llama.cpp reads the target's ids of a reduced vocabulary, and not offsets to them.
#[test]
fn llama_cpps_package_reads_an_eagle3_with_a_reduced_vocabulary_and_further_norms() {
    let drafter = llama_eagle3();
    let mut config = drafter.config();
    let (width, size) = (config["hidden_size"].as_u64().unwrap() as usize, 300);
    config["draft_vocab_size"] = json!(size);
    config["norm_before_residual"] = json!(true);
    config["norm_before_fc"] = json!(true);
    drafter.put(&config);
    let mut tensors = crate::common::bytes(&drafter);
    let floats = |shape: &[usize]| {
        let values = noise(7, shape.iter().product());
        (Dtype::F32, shape.to_vec(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
    };
    tensors.insert("lm_head.weight".into(), floats(&[size, width]));
    tensors.insert("input_norm.weight".into(), floats(&[3 * width]));
    // Draft id i stands for token 3i + 1.
    let offsets = (0..size as i64).flat_map(|id| (2 * id + 1).to_le_bytes()).collect();
    tensors.insert("d2t".into(), (Dtype::I64, vec![size], offsets));
    crate::common::write(&drafter.path().join("model.safetensors"), &tensors);

    let mut names = eagle3_names(&drafter);
    names.insert("output.weight".into(), json!("lm_head.weight"));
    names.insert("enc.output_norm.weight".into(), json!("input_norm.weight"));
    names.insert("d2t".into(), json!({"token_ids": "d2t"}));
    let Some((told, _)) = read_all(&drafter, TensorType::F32, &[], names) else { return };
    let kinds = |name: &str| told["tensors"][name].as_str().unwrap().to_string();
    assert_eq!(
        ["d2t", "output.weight", "enc.output_norm.weight"].map(kinds),
        ["I64", "F32", "F32"].map(String::from)
    );
    for key in ["norm_before_residual", "norm_before_fc"] {
        assert_eq!(told["fields"][format!("eagle3.{key}")], true, "{key}");
    }

    let unknown = crate::common::edited(&llama_eagle3(), |config| config["norm_output"] = json!(true));
    let (source, target) = (
        open_checkpoint(unknown.path()).unwrap(),
        Target::open(&asset("tiny-target"), "owner/target").unwrap(),
    );
    let refused = GgufExport::plan(&source, &target, None).err().unwrap().to_string();
    assert!(refused.contains("no further norms (norm_output)"), "{refused}");
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
    let Some((told, method)) = read(&dflash, TensorType::F32, &zeros) else { return };
    assert_eq!((method, &told["fields"]["dflash.has_confidence_head"]), ("dspark", &false.into()));
    let fills_in = edited(
        |config| {
            bare(config);
            config["sample_from_anchor"] = json!(false);
            config["is_causal"] = json!(true);
        },
        has_no_head,
    );
    let (told, method) = read(&fills_in, TensorType::F32, &[]).unwrap();
    assert_eq!((method, &told["fields"]["dflash.sample_from_anchor"]), ("dflash", &false.into()));
    assert_eq!(told["fields"]["dflash.attention.causal"], true);
}

#[test]
fn only_a_folder_of_such_a_file_is_replaced() {
    let drafter = edited(|_| {}, |_| true);
    let (source, target) = (
        open_checkpoint(drafter.path()).unwrap(),
        Target::open(&asset("tiny-target"), "owner/target").unwrap(),
    );
    let gguf = GgufExport::plan(&source, &target, None).unwrap();
    let out = drafter.path().join("out");
    gguf.write(&out, false).unwrap();
    gguf.write(&out, false).unwrap(); // a second write changes nothing
    fs::write(out.join(GgufExport::FILE), "other").unwrap();
    let told = gguf.write(&out, false).unwrap_err().to_string();
    assert!(told.contains("exists already"), "{told}");
    gguf.write(&out, true).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let told = gguf.write(&out, true).unwrap_err().to_string();
    assert!(told.contains("it holds notes.txt too"), "{told}");
    assert!(out.join(GgufExport::FILE).is_file() && !drafter.path().join("out.partial").exists());
}

#[test]
fn what_llama_cpp_cannot_run_is_refused_with_the_reason() {
    let refusal = |folder: &Folder| {
        let (target, source) = (crate::common::target(folder), open_checkpoint(folder.path()).unwrap());
        let target = Target::open(target.path(), "owner/target").unwrap();
        match GgufExport::plan(&source, &target, None).map(|_| ()).unwrap_err() {
            CheckpointError::Refused { to: "gguf", reason, .. } => reason,
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
    let cases: [(&str, Edit, &str); 8] = [
        ("dspark_gated", same, "vanilla Markov head, and not one that is gated"),
        ("dspark_rnn", same, "vanilla Markov head, and not one that is rnn"),
        ("eagle3_qwen3", same, "no norms on queries and keys, which Qwen3 layers have"),
        (
            "dspark_vanilla",
            |config| config["sample_from_anchor"] = json!(false),
            "heads beside slots that fill in are not written",
        ),
        ("dspark_vanilla", |config| config["model_type"] = json!("llama"), "its layers are Llama's"),
        ("dflash2", |config| config["selector_top_k"] = json!(8), "8 candidates are too many for 64 values"),
        ("dspark_vanilla", |config| config["hidden_act"] = json!("gelu"), "`hidden_act`: gelu"),
        ("dflash2", |config| config["hidden_act"] = json!("gelu"), "`hidden_act`: gelu"),
    ];
    for (case, edit, words) in cases {
        let told = refusal(&edited(case, edit));
        assert!(told.contains(words), "{case}: {words} in {told}");
    }
}
