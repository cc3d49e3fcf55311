//! Damaged quantised weights are refused by name, with the numbers found and expected.

use std::fs;
use std::path::Path;

use deepspec_checkpoint::Tensors;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// Name, dtype and shape of a tensor, whose bytes are ones.
type Stored<'a> = (&'a str, Dtype, &'a [usize]);

fn write(dir: &Path, scheme: &Value, tensors: &[Stored]) {
    fs::write(dir.join("config.json"), json!({"quantization_config": scheme}).to_string()).unwrap();
    let bytes = vec![1; 1 << 16];
    let views = tensors.iter().map(|&(name, dtype, shape)| {
        let size = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name, TensorView::new(dtype, shape.to_vec(), &bytes[..size]).unwrap())
    });
    fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The error of opening the tensors and reading all of them.
fn refusal(scheme: &Value, tensors: &[Stored]) -> String {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), scheme, tensors);
    let read = |tensors: Tensors| {
        let names: Vec<String> = tensors.iter().map(|(name, _)| name.to_string()).collect();
        names.iter().try_for_each(|name| tensors.bytes(name).map(drop))
    };
    let told = Tensors::open_target(dir.path()).and_then(read).expect_err("it was read").to_string();
    assert!(told.contains(dir.path().to_str().unwrap()) && !told.contains('\n'), "{told}");
    told
}

/// Checks that a scheme with these tensors is refused with all words.
fn check(scheme: &Value, tensors: &[Stored], words: &[&str]) {
    let told = refusal(scheme, tensors);
    assert!(words.iter().all(|word| told.contains(word)), "{words:?} in {told}");
}

#[test]
fn float8_weights_without_the_scales_that_fit() {
    let weight: Stored = ("x.weight", Dtype::F8_E4M3, &[40, 24]);
    let blocks = json!({"quant_method": "fp8", "weight_block_size": [16, 16]});
    check(&blocks, &[weight], &["`x.weight_scale_inv`", "missing"]);
    let scale = |shape: &'static [usize]| ("x.weight_scale_inv", Dtype::F32, shape);
    check(&blocks, &[weight, scale(&[3, 1])], &["`x.weight_scale_inv`", "[3, 1]", "[3, 2]"]);
    check(&blocks, &[weight, scale(&[2, 3])], &["`x.weight_scale_inv`", "[2, 3]", "[3, 2]"]);
    check(&blocks, &[weight, scale(&[])], &["`x.weight_scale_inv`", "[]", "[3, 2]"]);
    check(&blocks, &[weight, ("x.weight_scale_inv", Dtype::I32, &[3, 2])], &["int32", "float32"]);
    check(&blocks, &[("x.weight", Dtype::F8_E4M3, &[960])], &["`x.weight`", "[960]", "two dimensions"]);
    let plain = json!({"quant_method": "fp8"});
    check(&plain, &[weight, ("x.weight_scale", Dtype::F32, &[24])], &["`x.weight_scale`", "[24]", "[40, 1]"]);
    for (key, value) in [
        ("weight_block_size", json!([128])),
        ("weight_block_size", json!([0, 128])),
        ("weight_block_size", json!([128, -1])),
        ("weight_block_size", json!("128")),
        ("fmt", json!("e5m2")),
    ] {
        let mut scheme = blocks.clone();
        scheme[key] = value;
        check(&scheme, &[weight, scale(&[3, 2])], &["config.json", &format!("`quantization_config.{key}`")]);
    }
}

/// A target that runs elsewhere may have layers that are not read.
#[test]
fn layers_of_any_format_leave_the_outer_tensors_readable() {
    let dir = tempfile::tempdir().unwrap();
    let tensors: [Stored; 4] = [
        ("model.embed_tokens.weight", Dtype::BF16, &[4, 2]),
        ("model.layers.0.up_proj.weight", Dtype::F8_E4M3, &[4, 2]),
        ("lm_head.weight", Dtype::F8_E4M3, &[4, 2]),
        ("lm_head.weight_scale", Dtype::BF16, &[]),
    ];
    write(dir.path(), &json!({"quant_method": "fp8"}), &tensors);
    let told = Tensors::open_target(dir.path()).map(drop).unwrap_err().to_string();
    assert!(told.contains("model.layers.0.up_proj.weight_scale"), "{told}");
    let opened = Tensors::open_target_present(dir.path()).unwrap();
    assert_eq!(opened.get("lm_head.weight").unwrap().dtype, Dtype::F32);
    assert_eq!(opened.get("lm_head.weight_scale"), None);
    assert_eq!(opened.bytes("lm_head.weight").unwrap().len(), 4 * 2 * 4);
    assert_eq!(opened.bytes("model.embed_tokens.weight").unwrap().len(), 4 * 2 * 2);
    write(dir.path(), &json!({"quant_method": "nvfp4"}), &tensors[..2]);
    let opened = Tensors::open_target_present(dir.path()).unwrap();
    assert_eq!(opened.bytes("model.embed_tokens.weight").unwrap().len(), 4 * 2 * 2);
}

#[test]
fn settings_that_are_malformed() {
    for (scheme, words) in [
        (json!({"quant_method": "hqq"}), ["`quantization_config.quant_method`", "\"hqq\"", "bfloat16"]),
        (json!({"bits": 4}), ["`quantization_config.quant_method`", "missing", "bfloat16"]),
        (json!("fp8"), ["`quantization_config`", "an object", "fp8"]),
        (
            json!({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}),
            ["`quantization_config.kv_cache_scheme`", "quantised caches", "bfloat16"],
        ),
    ] {
        check(&scheme, &[], &words);
    }
}
