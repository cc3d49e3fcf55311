//! Checkpoints in every layout, made from the golden ones.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod fixture;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder that is deleted when it is dropped.
pub struct Folder {
    path: PathBuf,
    _root: TempDir,
}

impl Folder {
    pub fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        Self { path: root.path().to_path_buf(), _root: root }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn within(self, name: &str) -> Self {
        Self { path: self.path.join(name), ..self }
    }

    pub fn config(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.path.join("config.json")).unwrap()).unwrap()
    }

    pub fn put(&self, config: &Value) {
        fs::write(self.path.join("config.json"), config.to_string()).unwrap();
    }
}

/// Type, shape and bytes of every tensor of a folder with one file.
pub type Bytes = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub fn bytes(folder: &Folder) -> Bytes {
    let file = fs::read(folder.path().join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let facts = |view: TensorView| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    tensors.iter().map(|(name, view)| (name.to_string(), facts(view))).collect()
}

pub fn write(path: &Path, tensors: &Bytes) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A copy of a golden checkpoint. If it taps the embedding, which some layouts cannot, another
/// layer is tapped instead.
pub fn golden(case: &str) -> Folder {
    match case {
        "dflash2" => return fixture::dflash2(),
        "xpress" => return fixture::xpress(),
        "xpress_dflash2" => return fixture::xpress_dflash2(),
        "domino" => return fixture::domino(),
        "mtp" => return fixture::mtp(),
        "mtp_moe" => return fixture::mtp_moe(),
        "peagle" => return fixture::peagle(),
        _ => {}
    }
    let (folder, from) = (Folder::new(), deepspec_testkit::golden::dir(case));
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    let mut config = folder.config();
    if config["target_layer_ids"][0] == -1 {
        config["target_layer_ids"][0] = json!(0);
        folder.put(&config);
    }
    folder
}

fn copy(from: &Folder) -> Folder {
    let folder = Folder::new();
    for entry in fs::read_dir(from.path()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

/// A copy with another config.
pub fn edited(from: &Folder, edit: impl Fn(&mut Value)) -> Folder {
    let folder = copy(from);
    let mut config = from.config();
    edit(&mut config);
    folder.put(&config);
    folder
}

/// A copy with one changed value in a row of a tensor.
pub fn changed(from: &Folder, name: &str, row: usize) -> Folder {
    let folder = copy(from);
    let mut tensors = bytes(from);
    let (_, shape, data) = tensors.get_mut(name).unwrap();
    let width = data.len() / shape[0];
    data[row * width + 1] ^= 0x40;
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// A copy with all floats rounded to bfloat16.
pub fn as_bf16(from: &Folder) -> Folder {
    let folder = edited(from, |config| config["dtype"] = json!("bfloat16"));
    let mut tensors = bytes(from);
    for (dtype, _, data) in tensors.values_mut() {
        assert_eq!(*dtype, Dtype::F32);
        let round = |&word: &[u8; 4]| bf16::from_f32(f32::from_le_bytes(word)).to_le_bytes();
        *data = data.as_chunks::<4>().0.iter().flat_map(round).collect();
        *dtype = Dtype::BF16;
    }
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// A copy with a vocabulary map that is not the identity.
pub fn with_vocab_map(from: &Folder) -> Folder {
    let folder = copy(from);
    let mut tensors = bytes(from);
    let mut map = vec![1; 512];
    map[7] = 0;
    tensors.insert("t2d".into(), (Dtype::BOOL, vec![512], map));
    write(&folder.path().join("model.safetensors"), &tensors);
    folder
}

/// A copy split into three files with an index.
pub fn sharded(from: &Folder) -> Folder {
    let folder = Folder::new();
    folder.put(&from.config());
    let mut parts = [Bytes::new(), Bytes::new(), Bytes::new()];
    let mut map = serde_json::Map::new();
    for (at, (name, tensor)) in bytes(from).into_iter().enumerate() {
        map.insert(name.clone(), json!(format!("model-{}.safetensors", at % 3)));
        parts[at % 3].insert(name, tensor);
    }
    for (at, part) in parts.iter().enumerate() {
        write(&folder.path().join(format!("model-{at}.safetensors")), part);
    }
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    folder
}

/// A target with the embedding and the head of a reference checkpoint, and whatever else
/// conversions read.
pub fn target(drafter: &Folder) -> Folder {
    let folder = Folder::new();
    let config = drafter.config();
    folder.put(&json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": false,
        "hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"],
        "num_hidden_layers": config["num_target_layers"],
    }));
    let mut tensors = bytes(drafter);
    let take = |tensors: &mut Bytes, name: &str| tensors.remove(name).unwrap();
    let own = Bytes::from([
        ("model.embed_tokens.weight".to_string(), take(&mut tensors, "embed_tokens.weight")),
        ("lm_head.weight".into(), take(&mut tensors, "lm_head.weight")),
        ("model.norm.weight".into(), take(&mut tensors, "norm.weight")),
    ]);
    write(&folder.path().join("model.safetensors"), &own);
    folder
}

/// The config without the keys that only name its writer.
pub fn as_is(folder: &Folder) -> Value {
    let mut config = folder.config();
    let map = config.as_object_mut().unwrap();
    for key in ["transformers_version", "target_model_name_or_path", "dtype"] {
        map.remove(key);
    }
    map.sort_keys();
    config
}
