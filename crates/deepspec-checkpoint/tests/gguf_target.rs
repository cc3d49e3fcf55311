//! Targets in GGUF files that the Python package gguf wrote.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_checkpoint::Tensors;
use deepspec_checkpoint::gguf::unpack;
use deepspec_testkit::{skip, tiny};
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::Value;

fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets").join(name)
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Writes the model in `folder` as a GGUF with matrices of type `kind`, and returns the expected
/// content. None without the package.
fn write(folder: &Path, kind: &str, dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let python = skip::python("gguf")?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf_write.py");
    let (file, expected) = (dir.join(format!("{kind}.gguf")), dir.join("expected.safetensors"));
    let run =
        Command::new(python).arg(script).arg(folder).arg(kind).args([&file, &expected]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    Some((file, expected))
}

fn holds_the_same(unpacked: &Path, expected: &Path) {
    let (found, expected) = (Tensors::open(unpacked).unwrap(), Tensors::open_file(expected).unwrap());
    assert!(found.iter().map(|(name, _)| name).eq(expected.iter().map(|(name, _)| name)));
    for (name, facts) in expected.iter() {
        let here = found.get(name).unwrap();
        assert_eq!(here.shape, facts.shape, "{name}");
        let bytes = found.bytes(name).unwrap();
        let halves = bytes.as_chunks::<2>().0.iter();
        let widened: Vec<u8> = match here.dtype {
            Dtype::F16 => halves.flat_map(|&half| f16::from_le_bytes(half).to_f32().to_le_bytes()).collect(),
            Dtype::BF16 => {
                halves.flat_map(|&half| bf16::from_le_bytes(half).to_f32().to_le_bytes()).collect()
            }
            _ => bytes,
        };
        assert!(widened == expected.bytes(name).unwrap(), "{name}");
    }
}

/// A Llama with Llama 3's rotary settings and context length.
fn llama(dir: &Path, original: u64) {
    tiny::llama(dir);
    let path = dir.join("config.json");
    let mut config = json(path.clone());
    config["rope_scaling"]["original_max_position_embeddings"] = original.into();
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn a_llama_comes_out_as_it_went_in() {
    for kind in ["F32", "F16", "BF16", "Q8_0", "Q4_1"] {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        fs::create_dir(&model).unwrap();
        llama(&model, 8192);
        let Some((file, expected)) = write(&model, kind, dir.path()) else { return };
        let unpacked = unpack(&file, dir.path()).unwrap();
        holds_the_same(&unpacked, &expected);
        let (found, meant) = (json(unpacked.join("config.json")), json(model.join("config.json")));
        for key in meant.as_object().unwrap().keys() {
            match key.as_str() {
                // The factor is stored as float32 for each plane.
                "rope_scaling" => {
                    let factor = found[key]["factor"].as_f64().unwrap();
                    assert!((factor - 8.0).abs() < 1e-4, "{factor}");
                    for part in ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"] {
                        assert_eq!(found[key][part].as_f64(), meant[key][part].as_f64(), "{part}");
                    }
                }
                // And the further special tokens at which llama.cpp ends answers.
                "eos_token_id" => {
                    assert!(found[key].as_array().unwrap().starts_with(meant[key].as_array().unwrap()));
                }
                "rope_theta" => assert_eq!(found[key].as_f64(), meant[key].as_f64()),
                _ => assert_eq!(found[key], meant[key], "{key}"),
            }
        }
    }
}

#[test]
fn the_tiny_target_comes_out_as_it_went_in() {
    let dir = tempfile::tempdir().unwrap();
    let target = asset("tiny-target");
    let Some((file, expected)) = write(&target, "Q8_0", dir.path()) else { return };
    let unpacked = unpack(&file, dir.path()).unwrap();
    holds_the_same(&unpacked, &expected);
    let (found, meant) = (json(unpacked.join("tokenizer.json")), json(target.join("tokenizer.json")));
    let mut vocabulary = meant["model"]["vocab"].clone();
    for token in meant["added_tokens"].as_array().unwrap() {
        vocabulary[token["content"].as_str().unwrap()] = token["id"].clone();
    }
    assert_eq!(found["model"]["vocab"], vocabulary);
    for part in ["normalizer", "added_tokens"] {
        assert_eq!(found[part], meant[part], "{part}");
    }
    assert_eq!(found["model"]["merges"], meant["model"]["merges"]);
    let pattern = |json: &Value| json["pre_tokenizer"]["pretokenizers"][0]["pattern"].clone();
    assert_eq!(pattern(&found), pattern(&meant));
}

/// YaRN as llama.cpp's converter writes it, and the settings that llama.cpp reads otherwise than transformers.
#[test]
fn yarn_comes_out_as_it_went_in() {
    let written = |extra: &[(&str, Value)]| {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        fs::create_dir(&model).unwrap();
        llama(&model, 8192);
        let path = model.join("config.json");
        let mut config = json(path.clone());
        let settings =
            serde_json::json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        config["rope_scaling"] = settings.clone();
        extra.iter().for_each(|(key, value)| config["rope_scaling"][*key] = value.clone());
        fs::write(path, config.to_string()).unwrap();
        let (file, _) = write(&model, "F32", dir.path())?;
        let found = unpack(&file, dir.path()).map(|unpacked| json(unpacked.join("config.json")));
        Some((found.map_err(|error| error.to_string()), settings))
    };
    let Some((found, meant)) = written(&[]) else { return };
    let scaling = found.unwrap()["rope_scaling"].clone();
    assert_eq!((&scaling["rope_type"], scaling["factor"].as_f64()), (&meant["rope_type"], Some(4.0)));
    assert_eq!(scaling["original_max_position_embeddings"], meant["original_max_position_embeddings"]);
    // As llama.cpp saves what is not set.
    let unset = [("extrapolation_factor", (-1.0).into()), ("attention_factor", 1.0.into())];
    assert_eq!(written(&unset).unwrap().0.unwrap()["rope_scaling"], scaling);
    for (key, value, words) in [
        ("beta_fast", 16.0, "yarn_beta_fast`: 16 is not read; expected 32"),
        ("attention_factor", 1.5, "yarn_attn_factor`: 1.5 is not read; expected 1.138"),
        ("factor_of_all_models", 1.5, ".attn_factor`: 1.5 is not read; expected 1"),
    ] {
        let (found, _) = written(&[(key, value.into())]).unwrap();
        let told = found.unwrap_err();
        assert!(told.contains(words), "{told}");
    }
}

#[test]
fn factors_of_another_rotation_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    llama(&model, 256);
    let Some((file, _)) = write(&model, "F32", dir.path()) else { return };
    let told = unpack(&file, dir.path()).unwrap_err().to_string();
    assert!(told.contains("rope_freqs.weight") && told.contains("Llama 3"), "{told}");
}
