//! The drafter within a DeepSeek-V4: read from its target's folder, and written back.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_checkpoint::gguf::{Entry, GgufFile};
use deepspec_checkpoint::{
    CheckpointFormat, GgufExport, Target, TensorMetadata, TensorType, Tensors, convert,
};
use deepspec_drafters::{DSparkV4, TrainSample, merge_mtp, open_checkpoint};
use deepspec_models::save;
use deepspec_testkit::skip;
use safetensors::Dtype;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::{assert_close, max_abs, noise};
use crate::{FORWARD, SMALL, VOCAB, WIDTH, model};

/// Writes the drafter in `drafter` into a copy `out` of `target`.
fn merge(drafter: &Path, target: &Path, out: &Path) -> Result<(), String> {
    let source = open_checkpoint(drafter).unwrap();
    let target = Target::open(target, "target").map_err(|error| error.to_string())?;
    let merged = merge_mtp(&source, &target).map_err(|error| error.to_string())?;
    merged.write(out, false).map_err(|error| error.to_string())
}

/// Writes the drafter within `target` as a folder of its own.
fn extract(target: &Path, out: &Path) {
    let released = open_checkpoint(target).unwrap();
    released.check().unwrap();
    convert(&released, CheckpointFormat::Reference, None).unwrap().write(out, false).unwrap();
}

/// Metadata and tensors of the GGUF file of a drafter for this target.
fn gguf(drafter: &Path, target: &Path, out: &Path) -> (BTreeMap<String, Entry>, BTreeMap<String, Vec<u8>>) {
    let (source, target) = (open_checkpoint(drafter).unwrap(), Target::open(target, "target").unwrap());
    GgufExport::plan(&source, &target, Some(TensorType::F32)).unwrap().write(out, false).unwrap();
    let file = GgufFile::open(&out.join(GgufExport::FILE)).unwrap();
    let values = file.tensors().keys().map(|name| (name.clone(), file.values(name).unwrap())).collect();
    (file.entries().clone(), values)
}

/// Bytes of the only weights file of a folder.
fn weights(dir: &Path) -> Vec<u8> {
    fs::read(dir.join("model.safetensors")).unwrap()
}

/// Names, dtypes and shapes of all tensors of a folder, as they are stored.
fn stored(dir: &Path) -> Vec<(String, Dtype, Vec<usize>)> {
    let of_tensor =
        |(name, facts): (&str, &TensorMetadata)| (name.to_string(), facts.dtype, facts.shape.clone());
    Tensors::open(dir).unwrap().iter().map(of_tensor).collect()
}

/// Converted from the released layout, a drafter computes what its formulas give with the weights that its bytes stand for. Mistakes
/// are named.
#[test]
fn the_released_layout_is_read() {
    let Some(python) = skip::python("torch and safetensors") else { return };
    let root = tempfile::tempdir().unwrap();
    let [folder, out, own] = ["target", "out.safetensors", "own"].map(|name| root.path().join(name));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dspark_v4_release.py");
    let run = Command::new(python).arg(script).args([&folder, &out]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let out: BTreeMap<String, Tensor> = Tensor::read_safetensors(out).unwrap().into_iter().collect();

    let released = open_checkpoint(&folder).unwrap();
    assert_eq!(released.format(), CheckpointFormat::DeepseekV4);
    extract(&folder, &own);
    open_checkpoint(&own).unwrap().check().unwrap();
    let model = DSparkV4::load(&own, Device::Cpu, Kind::Float).unwrap();
    assert_eq!(model.config().decoder.num_target_layers, 4);
    let ids: Vec<i64> = Vec::try_from(&out["input_ids"]).unwrap();
    let anchors: Vec<i64> = Vec::try_from(&out["anchors"]).unwrap();
    let sample = TrainSample {
        loss_mask: vec![true; ids.len()],
        taps: out["taps"].to_kind(Kind::Float),
        last: Tensor::zeros(
            [ids.len() as i64, model.config().model().hidden_size],
            (Kind::Float, Device::Cpu),
        ),
        last_positions: (0..ids.len() as u32).collect(),
        input_ids: ids,
        anchors: anchors.iter().map(|&anchor| anchor as usize).collect(),
    };
    let batch = model.config().batch(&[sample], 4.0, Device::Cpu, Kind::Float).unwrap();
    tch::no_grad(|| {
        let states = model.block_states(&batch);
        let (e, features) = model.teacher_forced_features(&states, &batch.previous).unwrap();
        let logits = model.teacher_forced_logits(&states, Some(&features));
        let confidence = model.confidence_logits(&states, Some(&e)).unwrap();
        for (name, found) in [("states", states), ("logits", logits), ("confidence", confidence)] {
            assert_close(name, &found, &out[name], FORWARD * max_abs(&out[name]));
        }
    });

    // Written back, the drafter has the release's tensors, and their values stay equal. Bytes of two float4 are int8 in all stages.
    let [merged, again] = ["merged", "again"].map(|name| root.path().join(name));
    merge(&own, &folder, &merged).unwrap();
    let mut expected = stored(&folder);
    let unsigned = expected.iter_mut().filter(|(_, dtype, _)| *dtype == Dtype::U8);
    unsigned.for_each(|(_, dtype, _)| *dtype = Dtype::I8);
    assert_eq!(stored(&merged), expected);
    extract(&merged, &again);
    assert!(weights(&again) == weights(&own), "values change that were quantised before");

    // Both forms give llama.cpp the same file. It may read the state behind the target's last layer.
    let tokenizer = json!({"model": {"vocab": {}, "merges": []}, "decoder": {"type": "ByteLevel"}});
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let [of_target, of_drafter] = [&folder, &own].map(|from| {
        let name = from.file_name().unwrap().to_string_lossy();
        gguf(from, &folder, &root.path().join(format!("{name}-gguf")))
    });
    assert!(of_target == of_drafter, "the files differ");
    assert_eq!(of_target.0["dflash.target_layers"], Entry::List([2, 4].map(Entry::Integer).to_vec()));

    // The folder itself is no drafter to load.
    let told = |result: Result<(), String>, hints: &[&str]| {
        let error = result.unwrap_err();
        assert!(hints.iter().all(|hint| error.contains(hint)), "{hints:?} in {error}");
    };
    let advice = deepspec_drafters::check_layout(&folder).map_err(|error| error.to_string());
    told(advice, &["deepseek-v4", "checkpoint convert", "--to reference"]);
    assert!("deepseek-v4".parse::<CheckpointFormat>().is_err());
    let (file, original) = (folder.join("model.safetensors"), weights(&folder));
    let read = || {
        let checked = open_checkpoint(&folder).and_then(|checkpoint| checkpoint.check());
        checked.map_err(|error| error.to_string())
    };
    // `deepspec-eval run` names the same problem.
    let load = || deepspec_drafters::check_layout(&folder).map_err(|error| error.to_string());
    // Another name of the same length in the header.
    for (name, other, hints) in [
        ("mtp.1.attn.wkv.scale", "mtp.1.attn.wkv.xcale", &["mtp.1.attn.wkv.scale", "missing"][..]),
        ("mtp.1.attn.attn_sink", "mtp.1.attn.attn_sinx", &["mtp.1.attn.attn_sink", "missing"]),
        ("mtp.2.attn_norm.weight", "mtp.2.attn_norm.weighx", &["mtp.2.attn_norm.weight", "2 stages"]),
        ("layers.0.ffn.gate.bias", "mtp.1.ffn.gate.bias_vl", &["mtp.1.ffn.gate.bias_vl", "no use"]),
    ] {
        let mut bytes = original.clone();
        let at = bytes.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
        bytes[at..at + name.len()].copy_from_slice(other.as_bytes());
        fs::write(&file, bytes).unwrap();
        told(read(), hints);
    }
    fs::write(&file, original).unwrap();
    let config = folder.join("config.json");
    let original: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    for (key, value, hint) in [
        ("dspark_n_routed_experts", json!(4), "DeepSeek-V4.1"),
        ("norm_topk_prob", json!(false), "`norm_topk_prob`: false is not supported"),
        ("enable_confidence_head", json!(false), "`enable_confidence_head`: false is not supported"),
        (
            "quantization_config",
            json!({"quant_method": "fp8", "weight_block_size": [64, 64]}),
            "[64, 64] is not",
        ),
        ("scoring_func", json!("sigmoid"), "sqrtsoftplus"),
        ("o_groups", json!(3), "3 does not divide"),
        ("dspark_markov_rank", Value::Null, "dspark_markov_rank"),
        ("architectures", json!(["KimiForCausalLM"]), "within DeepSeek-V4 only"),
    ] {
        let mut changed = original.clone();
        changed[key] = value;
        fs::write(&config, changed.to_string()).unwrap();
        told(read(), &[hint]);
        told(load(), &[hint]);
    }
    let mut unlimited = original.clone();
    unlimited["swiglu_limit"] = Value::Null;
    fs::write(&config, unlimited.to_string()).unwrap();
    let settings = open_checkpoint(&folder).unwrap().drafter().kind.to_json();
    assert_eq!(settings["block"]["stages"]["swiglu_limit"], 0.0);

    // DeepSeek-V4.1 has its keys one level deeper.
    let (mut outer, mut inner) = (json!({}), original);
    for key in ["architectures", "model_type", "quantization_config"] {
        outer[key] = inner.as_object_mut().unwrap().remove(key).unwrap();
    }
    outer["text_config"] = inner;
    fs::write(&config, outer.to_string()).unwrap();
    told(read(), &["text_config", "DeepSeek-V4.1's drafter is not read"]);
    told(load(), &["text_config", "DeepSeek-V4.1's drafter is not read"]);
    outer["architectures"] = json!(["DeepseekV41ForCausalLM"]);
    outer["model_type"] = json!("deepseek_v41");
    fs::write(&config, outer.to_string()).unwrap();
    told(read(), &["architectures", "DeepSeek-V4.1's drafter is not read"]);
    told(load(), &["architectures", "DeepSeek-V4.1's drafter is not read"]);
}

/// A trained drafter, and a target of two shards whose second one holds a drafter of another kind.
fn unmerged(root: &Path) -> [PathBuf; 2] {
    let [own, target] = ["own", "target"].map(|name| root.join(name));
    let model = model(SMALL);
    for dir in [&own, &target] {
        fs::create_dir(dir).unwrap();
    }
    save(&own.join("model.safetensors"), &model.checkpoint(), Kind::BFloat16).unwrap();
    fs::write(own.join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();

    let (embed, head) = model.embed_and_head();
    let names = ["embed.weight", "layers.0.attn.wq_a.weight", "head.weight", "mtp.0.e_proj.weight"];
    let tensors = [embed, noise(1, &[8, WIDTH]), head, noise(2, &[WIDTH, WIDTH])];
    let tensors: Vec<(String, Tensor)> = names.map(String::from).into_iter().zip(tensors).collect();
    let mut files = serde_json::Map::new();
    for (number, shard) in tensors.chunks(2).enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", number + 1);
        save(&target.join(&file), shard, Kind::BFloat16).unwrap();
        files.extend(shard.iter().map(|(name, _)| (name.clone(), json!(file))));
    }
    fs::write(target.join("model.safetensors.index.json"), json!({"weight_map": files}).to_string()).unwrap();
    fs::write(target.join("tokenizer.json"), "{}").unwrap();
    let mut config = json!({
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": WIDTH,
        "vocab_size": VOCAB, "num_hidden_layers": 4, "compress_ratios": [0, 0, 4, 128, 0],
        "scoring_func": "sqrtsoftplus", "num_nextn_predict_layers": 1,
    });
    config.as_object_mut().unwrap().extend(json!(SMALL).as_object().unwrap().clone());
    fs::write(target.join("config.json"), config.to_string()).unwrap();
    [own, target]
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap()
}

/// A target in bfloat16 gets a drafter in bfloat16, but for the tensors that the release has in float32. Only files with tensors of a
/// drafter change.
#[test]
fn a_trained_drafter_becomes_a_part_of_its_target() {
    let root = tempfile::tempdir().unwrap();
    let [own, target] = unmerged(root.path());
    let [merged, first, again, second] =
        ["merged", "first", "again", "second"].map(|name| root.path().join(name));
    merge(&own, &target, &merged).unwrap();
    let mut files: Vec<_> = fs::read_dir(&merged)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let kept = "model-00001-of-00002.safetensors";
    let index = "model.safetensors.index.json";
    assert_eq!(files, ["config.json", kept, "model-mtp.safetensors", index, "tokenizer.json"]);
    let inode = |dir: &Path| fs::metadata(dir.join(kept)).unwrap().ino();
    assert_eq!(inode(&merged), inode(&target));
    let listed: Value = serde_json::from_slice(&fs::read(merged.join(index)).unwrap()).unwrap();
    for (name, file) in [("embed.weight", kept), ("head.weight", files[2].as_str())] {
        assert_eq!(listed["weight_map"][name], file);
    }

    let mut expected = config(&target);
    expected["dspark_block_size"] = json!(5);
    expected["dspark_noise_token_id"] = json!(3);
    expected["dspark_target_layer_ids"] = json!([1, 2]);
    expected["dspark_markov_rank"] = json!(10);
    expected["compress_ratios"] = json!([0, 0, 4, 128, 0, 0, 0]);
    assert_eq!(config(&merged), expected);
    let found = stored(&merged);
    let in_float32 = [".attn_sink", ".gate.bias", ".hc_"];
    for (name, dtype, _) in &found {
        let expected =
            if in_float32.iter().any(|part| name.contains(part)) { Dtype::F32 } else { Dtype::BF16 };
        assert_eq!(*dtype, expected, "{name}");
    }
    assert_eq!(listed["weight_map"].as_object().unwrap().len(), found.len());
    assert!(found.iter().all(|(name, ..)| name != "mtp.0.e_proj.weight"));
    assert_eq!(
        found.iter().filter(|(name, ..)| name.starts_with("mtp.")).count(),
        model(SMALL).checkpoint().len() - 2
    );

    extract(&merged, &first);
    let tensors = |dir: &Path| -> BTreeMap<String, Tensor> {
        Tensor::read_safetensors(dir.join("model.safetensors")).unwrap().into_iter().collect()
    };
    let (before, after) = (tensors(&own), tensors(&first));
    assert!(before.keys().eq(after.keys()));
    for (name, tensor) in &before {
        assert!(after[name].to_kind(Kind::Float).equal(&tensor.to_kind(Kind::Float)), "{name}");
    }
    // A second time, over the target that holds a drafter already.
    merge(&first, &merged, &again).unwrap();
    assert_eq!((stored(&again), config(&again)), (found, config(&merged)));
    assert_eq!(inode(&again), inode(&target));
    extract(&again, &second);
    assert!(weights(&second) == weights(&first));
}

#[test]
fn targets_in_which_engines_would_misread_the_drafter_are_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    let [own, target] = unmerged(root.path());
    let original = config(&target);
    let scheme = |edit: &[(&str, Value)]| {
        let mut scheme = json!({
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        });
        edit.iter().for_each(|(key, value)| scheme[*key] = value.clone());
        scheme
    };
    let quantised = "quantization_config";
    for (edits, hint) in [
        (&[("q_lora_rank", json!(99))][..], "`q_lora_rank`: 99, but the drafter has 12"),
        (&[("swiglu_limit", Value::Null)], "`swiglu_limit`: 0.0, but the drafter has 0.8"),
        (&[("n_mtp_layers", json!(1))], "`n_mtp_layers`: 1; the drafter has 3 stages"),
        (&[("compress_ratios", json!([0, 0]))], "`compress_ratios`: 2 entries for 4 layers"),
        (
            &[(quantised, scheme(&[("moe_quant_algo", json!("NVFP4"))]))],
            "moe_quant_algo`: \"NVFP4\" is not supported; expected \"MXFP4\"",
        ),
        (&[("n_shared_experts", json!(2))], "`n_shared_experts`: 2 is not supported"),
        (
            &[("num_hidden_layers", json!(5))],
            "`num_hidden_layers`: 5, but the drafter was made for a target of 4",
        ),
        (
            &[("architectures", json!(["DeepseekV41ForCausalLM"]))],
            "expected a target of the class DeepseekV4ForCausalLM",
        ),
        (&[("compression_config", json!({"quant_method": "gptq"}))], "the target's weights are quantised"),
        (
            &[(quantised, scheme(&[("quant_method", json!("gptq"))]))],
            "quant_method`: \"gptq\" is not supported; expected \"fp8\"",
        ),
        (&[(quantised, scheme(&[("scale_fmt", json!("float"))]))], "scale_fmt`: \"float\" is not supported"),
        (
            &[(quantised, scheme(&[("weight_block_size", json!([64, 64]))]))],
            "weight_block_size`: [64, 64] is not supported",
        ),
        (&[(quantised, scheme(&[("weight_block_size", Value::Null)]))], "weight_block_size`: missing"),
        (
            &[(quantised, scheme(&[("modules_to_not_convert", json!(["head"]))]))],
            "modules_to_not_convert`: expected none",
        ),
        (
            &[(quantised, scheme(&[])), ("expert_dtype", json!("fp8"))],
            "`expert_dtype`: \"fp8\" is not supported; expected \"fp4\"",
        ),
        // The experts of the small drafter have no whole blocks of float4.
        (
            &[(quantised, scheme(&[]))],
            "w2.weight`: its rows have 24 columns, which blocks of 32 do not divide",
        ),
    ] {
        let mut changed = original.clone();
        edits.iter().for_each(|(key, value)| changed[*key] = value.clone());
        fs::write(target.join("config.json"), changed.to_string()).unwrap();
        let told = merge(&own, &target, &root.path().join("merged")).unwrap_err();
        assert!(told.contains(hint), "{hint} not in: {told}");
    }
}
