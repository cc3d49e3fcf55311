//! Folders as other tools write them. The model in them is loaded, or the error says what the
//! folder is and what to do.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

use deepspec_engine::{ModelInput, Target};
use deepspec_models::{
    ModelError, TargetModel, TargetOptions, Weights, probed_weights_digest, stop_ids, weights_digest,
};
use deepspec_testkit::mutate::Fuzzer;
use deepspec_testkit::tiny;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

type Bytes = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A random Qwen3 of 40 tokens.
fn model() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    tiny::qwen3(dir.path(), 40);
    dir
}

fn tensors(dir: &Path) -> Bytes {
    let file = fs::read(dir.join("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&file).unwrap();
    let facts = |view: TensorView| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    all.iter().map(|(name, view)| (name.to_string(), facts(view))).collect()
}

fn put(dir: &Path, tensors: &Bytes) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Renames the tensors of the folder.
fn renamed(dir: &Path, name: impl Fn(&str) -> String) {
    let renamed = tensors(dir).into_iter().map(|(old, tensor)| (name(&old), tensor)).collect();
    put(dir, &renamed);
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap()
}

fn set(dir: &Path, key: &str, value: Value) {
    let mut config = config(dir);
    config[key] = value;
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn load(dir: &Path) -> Result<TargetModel, ModelError> {
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, taps: vec![] };
    TargetModel::load(dir, &options)
}

/// The logits after three tokens.
fn computed(dir: &Path) -> Vec<f32> {
    let _guard = tch::no_grad_guard();
    let mut model = load(dir).unwrap_or_else(|error| panic!("{error}"));
    let found = model.forward(&ModelInput { chunks: &[(0, 3)], tokens: Tensor::from_slice(&[3i64, 17, 39]) });
    Vec::try_from(model.logits(&found.hidden).flatten(0, -1)).unwrap()
}

fn problem(dir: &Path) -> String {
    let told = load(dir).map(|_| ()).expect_err("it should not load").to_string();
    assert!(told.contains(dir.to_str().unwrap()) && !told.contains('\n'), "{told}");
    for rust in ["Some(", "None", "usize", "Cpu in Float"] {
        assert!(!told.contains(rust), "{told}");
    }
    told
}

#[test]
fn names_behind_the_prefixes_of_wrappers_are_the_same_model() {
    let plain = model();
    let expected = computed(plain.path());
    for prefix in ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."] {
        let wrapped = model();
        renamed(wrapped.path(), |name| format!("{prefix}{name}"));
        assert_eq!(computed(wrapped.path()), expected, "{prefix}");
    }
    // Saved from the inner model, without the class that adds the head.
    let bare = model();
    renamed(bare.path(), |name| name.trim_start_matches("model.").to_string());
    assert_eq!(computed(bare.path()), expected);
    // Wrappers around single layers, around the whole model under its own name, and around
    // adapters.
    type Rename = fn(&str) -> String;
    let mixed: [(&str, Rename); 4] = [
        ("one layer", |name| match name.contains("layers.1.") {
            true => format!("module.{name}"),
            false => name.to_string(),
        }),
        ("layers compiled one by one", |name| name.replace("layers.1.", "layers.1._orig_mod.")),
        ("Lightning", |name| format!("model.{name}")),
        ("PEFT", |name| format!("base_model.model.{name}")),
    ];
    for (what, rename) in mixed {
        let wrapped = model();
        renamed(wrapped.path(), rename);
        assert_eq!(computed(wrapped.path()), expected, "{what}");
    }
    // If no wrapper explains the names, the error lists the names that exist.
    let other = model();
    renamed(other.path(), |name| name.replace("model.", "transformer."));
    assert!(problem(other.path()).contains("it has `transformer."), "{}", problem(other.path()));
}

#[test]
fn tensors_without_a_place_in_the_model_are_an_error_that_names_them() {
    // Weights of a Qwen3 with a Llama config.
    let other = model();
    set(other.path(), "model_type", json!("llama"));
    set(other.path(), "architectures", json!(["LlamaForCausalLM"]));
    let told = problem(other.path());
    assert!(told.contains("q_norm") && told.contains("k_norm") && told.contains("Llama"), "{told}");
    for extra in [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.up_proj.bias",
        "model.layers.2.foo.weight",
    ] {
        let dir = model();
        let mut all = tensors(dir.path());
        all.insert(extra.into(), (Dtype::F32, vec![4], vec![0; 16]));
        put(dir.path(), &all);
        assert!(problem(dir.path()).contains(extra), "{}", problem(dir.path()));
    }
    // A long list of names is shortened.
    let dir = model();
    let mut all = tensors(dir.path());
    all.extend((0..9).map(|at| (format!("model.extra.{at}"), (Dtype::F32, vec![1], vec![0; 4]))));
    put(dir.path(), &all);
    let told = problem(dir.path());
    assert!(
        told.contains("9 tensors") && told.contains("model.extra.4") && !told.contains("model.extra.5"),
        "{told}"
    );
}

#[test]
fn parts_that_are_not_the_language_model_do_not_matter() {
    let plain = model();
    let expected = computed(plain.path());
    let dir = model();
    let mut all = tensors(dir.path());
    for name in ["mtp.layers.0.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"] {
        all.insert(name.into(), (Dtype::F32, vec![4], vec![0; 16]));
    }
    put(dir.path(), &all);
    assert_eq!(computed(dir.path()), expected);
    // The stored copy of a tied head.
    let tied = model();
    set(tied.path(), "tie_word_embeddings", json!(true));
    load(tied.path()).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn quantised_weights_are_named_with_the_remedy() {
    for (key, said) in
        [("quant_method", "bitsandbytes"), ("quant_method", "modelopt"), ("quant_algo", "NVFP4")]
    {
        let dir = model();
        set(dir.path(), "quantization_config", json!({key: said, "bits": 4}));
        let told = problem(dir.path());
        let words = [&format!("`quantization_config.{key}`"), said, "bfloat16", "data.states"];
        assert!(words.iter().all(|word| told.contains(word)), "{told}");
    }
    let modelopt = model();
    fs::write(modelopt.path().join("hf_quant_config.json"), "{}").unwrap();
    let told = problem(modelopt.path());
    assert!(told.contains("hf_quant_config.json") && told.contains("bfloat16"), "{told}");
    let null = model();
    set(null.path(), "quantization_config", Value::Null);
    load(null.path()).unwrap_or_else(|error| panic!("{error}"));
    // Without the key, the tensors' dtype reveals it.
    for (dtype, said) in [(Dtype::F8_E4M3, "F8_E4M3"), (Dtype::I8, "I8"), (Dtype::U8, "U8")] {
        let dir = model();
        let mut all = tensors(dir.path());
        let (kind, shape, data) = all.get_mut("model.layers.0.mlp.up_proj.weight").unwrap();
        (*kind, *data) = (dtype, vec![0; shape.iter().product()]);
        put(dir.path(), &all);
        let told = problem(dir.path());
        let words = ["model.layers.0.mlp.up_proj.weight", said, "quantised", "bfloat16"];
        assert!(words.iter().all(|word| told.contains(word)), "{told}");
    }
}

#[test]
fn weights_that_are_no_safetensors_are_named_with_the_remedy() {
    for (file, words) in [
        ("pytorch_model.bin", ["pytorch_model.bin", "safe_serialization=True"]),
        ("consolidated.00.pth", ["consolidated.00.pth", "safe_serialization=True"]),
        ("adapter_model.safetensors", ["adapter", "merge"]),
        ("weights.safetensors", ["weights.safetensors", "rename"]),
    ] {
        let dir = model();
        fs::rename(dir.path().join("model.safetensors"), dir.path().join(file)).unwrap();
        let told = problem(dir.path());
        assert!(words.iter().all(|word| told.contains(word)), "{words:?} in {told}");
    }
}

#[test]
fn values_that_are_not_finite_are_found_by_the_tensors_name() {
    let dir = model();
    let look = |dir: &Path| Weights::open(dir, "x", Device::Cpu, Kind::Float).unwrap().check_finite();
    look(dir.path()).unwrap();
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut all = tensors(dir.path());
        let (_, shape, data) = all.get_mut("model.layers.1.mlp.down_proj.weight").unwrap();
        let count = shape.iter().product::<usize>();
        data[4 * (count - 1)..].copy_from_slice(&value.to_le_bytes());
        put(dir.path(), &all);
        let told = look(dir.path()).unwrap_err().to_string();
        let place = format!("value {} of {count}", count - 1);
        assert!(told.contains("model.layers.1.mlp.down_proj.weight") && told.contains(&place), "{told}");
    }
}

#[test]
fn all_that_names_an_end_of_answers_counts() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| fs::write(dir.path().join(name), value.to_string()).unwrap();
    write("config.json", json!({"eos_token_id": 7, "text_config": {"eos_token_id": [8, 7]}}));
    write("generation_config.json", json!({"eos_token_id": [3, "x"]}));
    let told = stop_ids(dir.path(), Some(5)).unwrap_err().to_string();
    assert!(told.contains("generation_config.json: `eos_token_id`") && told.contains("\"x\""), "{told}");
    write("generation_config.json", json!({"eos_token_id": [3, null, -1]}));
    assert_eq!(stop_ids(dir.path(), Some(5)).unwrap(), [3, 5, 7, 8]);
    write("generation_config.json", json!({"eos_token_id": null}));
    assert_eq!(stop_ids(dir.path(), None).unwrap(), [7, 8]);
    write("config.json", json!({"eos_token_id": null}));
    assert_eq!(stop_ids(dir.path(), Some(5)).unwrap(), [5]);
    let told = stop_ids(dir.path(), None).unwrap_err().to_string();
    assert!(told.contains("no eos_token_id"), "{told}");
}

/// Runs itself again with its own cache folder for digests.
#[test]
fn every_byte_of_large_weights_counts() {
    const SIZE: usize = (64 << 20) + 4096;
    const INSIDE: &str = "DEEPSPEC_TEST_DIGEST_INSIDE";
    if env::var_os(INSIDE).is_none() {
        let cache = tempfile::tempdir().unwrap();
        let mut child = Command::new(env::current_exe().unwrap());
        child
            .args(["--exact", "every_byte_of_large_weights_counts"])
            .env(INSIDE, "1")
            .env("DEEPSPEC_CACHE", cache.path());
        let ended = child.output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
        let kept = fs::read_dir(cache.path().join("digests")).unwrap().count();
        assert_eq!(kept, 3, "a digest of each content is remembered");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let mut bytes = vec![7; SIZE];
    fs::write(&path, &bytes).unwrap();
    let first = weights_digest(dir.path()).unwrap();
    let probed = probed_weights_digest(dir.path()).unwrap();
    assert_eq!(weights_digest(dir.path()).unwrap(), first, "what is remembered is the same");
    // One byte between the positions that older versions sampled, and one more.
    let mut seen = vec![first];
    for at in [1 << 20, SIZE / 2 + 1] {
        bytes[at] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(probed_weights_digest(dir.path()).unwrap(), probed);
        let digest = weights_digest(dir.path()).unwrap();
        assert!(!seen.contains(&digest), "byte {at} is not seen");
        seen.push(digest);
    }
}

/// Nulls, other types and unknown keys in config.json. The model is loaded, or refused with the
/// file and the key; nothing panics.
#[test]
fn damaged_configs_are_used_or_refused_by_name() {
    let words = [
        "rope_scaling",
        "quantization_config",
        "text_config",
        "layer_types",
        "llama",
        "gemma3",
        "yarn",
        "eos_token_id",
    ];
    let mut dice = Fuzzer::new(46, &words);
    let (dir, mut used, mut refused) = (model(), 0, 0);
    let sound = config(dir.path());
    for run in 0..400 {
        let mut damaged = sound.clone();
        match run % 4 {
            0 => {
                let place = dice.roll(sound.as_object().unwrap().len());
                let key = sound.as_object().unwrap().keys().nth(place).unwrap();
                damaged[key] = Value::Null;
            }
            1 => damaged[words[dice.roll(words.len())]] = dice.value(),
            _ => (0..=dice.roll(2)).for_each(|_| dice.mutate(&mut damaged)),
        }
        fs::write(dir.path().join("config.json"), damaged.to_string()).unwrap();
        match load(dir.path()) {
            Ok(_) => used += 1,
            Err(error) => {
                let told = error.to_string();
                assert!(told.contains(dir.path().to_str().unwrap()), "no file is named: {told}: {damaged}");
                assert!(
                    told.contains('`') || told.contains("tensor") || told.contains("expected"),
                    "{told}: {damaged}"
                );
                refused += 1;
            }
        }
        if let Err(error) = stop_ids(dir.path(), Some(1)) {
            assert!(error.to_string().contains("config.json"), "{error}: {damaged}");
        }
    }
    assert!(used > 50 && refused > 50, "{used} used, {refused} refused");
}
