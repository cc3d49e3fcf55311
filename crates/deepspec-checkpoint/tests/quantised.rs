//! Damaged quantised weights are refused by name, with the numbers found and expected.

use std::fs;
use std::path::Path;

use deepspec_checkpoint::{CheckpointError, Tensors};
use deepspec_testkit::mutate::Fuzzer;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// Name, dtype and shape of a tensor, whose bytes are ones. A `weight_shape` holds 40 and 24.
type Stored<'a> = (&'a str, Dtype, &'a [usize]);

fn write(dir: &Path, scheme: &Value, tensors: &[Stored]) {
    fs::write(dir.join("config.json"), json!({"quantization_config": scheme}).to_string()).unwrap();
    let (ones, shape_bytes) = (vec![1; 1 << 16], [40_i64, 24].map(i64::to_le_bytes).concat());
    let views = tensors.iter().map(|&(name, dtype, shape)| {
        let size = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let is_shape = name.ends_with("weight_shape") && size == shape_bytes.len();
        let bytes = if is_shape { &shape_bytes } else { &ones };
        (name, TensorView::new(dtype, shape.to_vec(), &bytes[..size]).unwrap())
    });
    fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

fn read_all(tensors: Tensors) -> Result<(), CheckpointError> {
    let names: Vec<String> = tensors.iter().map(|(name, _)| name.to_string()).collect();
    names.iter().try_for_each(|name| tensors.bytes(name).map(drop))
}

/// The error of opening the tensors and reading all of them.
fn refusal(scheme: &Value, tensors: &[Stored]) -> String {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), scheme, tensors);
    let told = Tensors::open_target(dir.path()).and_then(read_all).expect_err("it was read").to_string();
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

fn compressed(format: &str, weights: &Value) -> Value {
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups})
}

#[test]
fn packed_weights_without_the_tensors_that_fit() {
    let scheme = compressed(
        "pack-quantized",
        &json!({"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": false}),
    );
    let all: [Stored; 4] = [
        ("x.weight_packed", Dtype::I32, &[40, 3]),
        ("x.weight_shape", Dtype::I64, &[2]),
        ("x.weight_scale", Dtype::BF16, &[40, 3]),
        ("x.weight_zero_point", Dtype::I32, &[5, 3]),
    ];
    let with = |place: usize, tensor: Stored<'static>| {
        let mut changed = all.to_vec();
        changed[place] = tensor;
        changed
    };
    for place in 1..4 {
        let others: Vec<Stored> = all.into_iter().filter(|tensor| tensor.0 != all[place].0).collect();
        check(&scheme, &others, &[&format!("`{}`", all[place].0), "missing"]);
    }
    check(&scheme, &with(0, ("x.weight_packed", Dtype::I32, &[40, 4])), &["[40, 4]", "[40, 3]"]);
    check(&scheme, &with(0, ("x.weight_packed", Dtype::U8, &[40, 3])), &["`x.weight_packed`", "U8", "int32"]);
    check(&scheme, &with(1, ("x.weight_shape", Dtype::I64, &[3])), &["`x.weight_shape`", "rows and columns"]);
    check(&scheme, &with(1, ("x.weight_shape", Dtype::F32, &[2])), &["`x.weight_shape`", "float32", "int64"]);
    check(
        &scheme,
        &with(2, ("x.weight_scale", Dtype::BF16, &[40])),
        &["`x.weight_scale`", "[40]", "[40, 3]"],
    );
    check(&scheme, &with(3, ("x.weight_zero_point", Dtype::I32, &[40, 3])), &["[40, 3]", "[5, 3]"]);
    let twice = [&all[..], &[("x.weight", Dtype::BF16, &[40, 24])]].concat();
    check(&scheme, &twice, &["`x.weight`", "`x.weight_packed` is the same weight"]);
    // The group of each column is 0x01010101.
    let ordered = [&all[..], &[("x.weight_g_idx", Dtype::I32, &[24])]].concat();
    check(&scheme, &ordered, &["`x.weight_g_idx`", "the group 16843009", "3 groups"]);
    let mut dividing = scheme;
    dividing["config_groups"]["group_0"]["weights"]["group_size"] = json!(7);
    check(&dividing, &all, &["`x.weight_packed`", "`group_size` 7 does not divide its 24 columns"]);
    let plain = compressed("int-quantized", &json!({"num_bits": 8, "strategy": "channel"}));
    check(&plain, &all, &["`x.weight_packed`", "`config_groups.group_0` are not packed"]);
}

#[test]
fn settings_of_compressed_tensors_that_are_not_read() {
    let weights = json!({"num_bits": 4, "strategy": "channel"});
    let group = "config_groups.group_0";
    for (key, value) in [
        ("format", json!("nvfp4-pack-quantized")),
        ("format", json!("marlin-24")),
        ("format", json!(null)),
        ("sparsity_config.format", json!("sparse-24-bitmask")),
        ("quantization_status", json!("frozen")),
        ("kv_cache_scheme", json!({"num_bits": 8})),
        ("transform_config", json!({"config_groups": {"R1": {}}})),
        ("config_groups", json!(null)),
        (&format!("{group}.format"), json!("mxfp4-pack-quantized")),
        (&format!("{group}.output_activations"), json!({"num_bits": 8})),
        (&format!("{group}.weights.num_bits"), json!(3)),
        (&format!("{group}.weights.type"), json!("float")),
        (&format!("{group}.weights.strategy"), json!("tensor_group")),
        (&format!("{group}.weights.strategy"), json!("group")),
        (&format!("{group}.weights.dynamic"), json!(true)),
    ] {
        let mut scheme = compressed("pack-quantized", &weights);
        let pointer = format!("/{}", key.replace('.', "/"));
        match scheme.pointer_mut(&pointer) {
            Some(place) => *place = value,
            None => {
                let (parent, last) = pointer.rsplit_once('/').unwrap();
                if scheme.pointer(parent).is_none() {
                    scheme[&parent[1..]] = json!({});
                }
                scheme.pointer_mut(parent).unwrap()[last] = value;
            }
        }
        let named = if key.ends_with("strategy") && scheme.pointer(&pointer) == Some(&json!("group")) {
            key.replace("strategy", "group_size")
        } else {
            key.into()
        };
        check(&scheme, &[], &["config.json", &format!("`quantization_config.{named}`")]);
    }
    // A module that no one of several groups targets.
    let mut scheme = compressed("pack-quantized", &weights);
    scheme["config_groups"]["group_0"]["targets"] = json!(["re:.*mlp.*", "re:x$"]);
    scheme["config_groups"]["group_1"] = json!({"targets": ["y"], "weights": weights});
    check(&scheme, &[("a.x.weight_packed", Dtype::I32, &[40, 3])], &["`a.x.weight_packed`", "targets"]);
    scheme["config_groups"]["group_1"]["targets"] = json!(["re:(?!x)"]);
    check(&scheme, &[], &["`quantization_config.config_groups.group_1.targets`", "(?!x)"]);
}

#[test]
fn gptq_and_awq_weights_without_the_tensors_that_fit() {
    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": false});
    let all: [Stored; 3] = [
        ("x.qweight", Dtype::I32, &[3, 40]),
        ("x.qzeros", Dtype::I32, &[3, 5]),
        ("x.scales", Dtype::F16, &[3, 40]),
    ];
    let with = |place: usize, tensor: Stored<'static>| {
        let mut changed = all.to_vec();
        changed[place] = tensor;
        changed
    };
    check(&gptq, &[all[0], all[1]], &["`x.scales`", "missing"]);
    check(&gptq, &[all[0], all[2]], &["`x.qzeros`", "missing"]);
    check(&gptq, &with(0, ("x.qweight", Dtype::I32, &[4, 40])), &["`x.scales`", "[3, 40]", "[4, 40]"]);
    check(&gptq, &with(0, ("x.qweight", Dtype::I16, &[3, 40])), &["`x.qweight`", "I16", "int32"]);
    check(&gptq, &with(0, ("x.qweight", Dtype::I32, &[0, 40])), &["`x.qweight`", "[0, 40]"]);
    check(&gptq, &with(1, ("x.qzeros", Dtype::I32, &[3, 40])), &["`x.qzeros`", "[3, 40]", "[3, 5]"]);
    check(&gptq, &with(2, ("x.scales", Dtype::F16, &[40, 3])), &["`x.scales`", "[40, 3]", "[3, 40]"]);
    let ordered = [&all[..], &[("x.g_idx", Dtype::I32, &[24])]].concat();
    check(&gptq, &ordered, &["`x.g_idx`", "the group 16843009", "3 groups"]);
    let edited = |scheme: &Value, key: &str, value: Value| {
        let mut scheme = scheme.clone();
        scheme[key] = value;
        scheme
    };
    check(&edited(&gptq, "desc_act", json!(true)), &all, &["`x.g_idx`", "missing"]);
    check(&edited(&gptq, "group_size", json!(16)), &all, &["`x.qweight`", "`group_size` 16", "24 inputs"]);
    let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "GEMM"});
    check(&awq, &all, &["`x.qweight`", "`group_size` 8", "3 inputs"]);
    for (scheme, key, value) in [
        (&gptq, "bits", json!(3)),
        (&gptq, "group_size", json!(0)),
        (&gptq, "checkpoint_format", json!("marlin")),
        (&gptq, "pack_dtype", json!("int16")),
        (&gptq, "is_marlin_format", json!(true)),
        (&gptq, "dynamic", json!({"+:.*down.*": {"bits": 8}})),
        (&gptq, "adapter", json!({"name": "lora"})),
        (&awq, "bits", json!(8)),
        (&awq, "version", json!("gemv_fast")),
        (&awq, "backend", json!("llm-awq")),
    ] {
        let named = format!("`quantization_config.{key}`");
        check(&edited(scheme, key, value), &all, &["config.json", &named]);
    }
    // AutoGPTQ's own file, which says no method.
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &Value::Null, &all);
    fs::write(dir.path().join("quantize_config.json"), r#"{"bits": 4, "group_size": 8}"#).unwrap();
    assert_eq!(Tensors::open_target(dir.path()).unwrap().get("x.weight").unwrap().shape, [40, 24]);
    fs::write(dir.path().join("quantize_config.json"), r#"{"bits": 3, "group_size": 8}"#).unwrap();
    let told = Tensors::open_target(dir.path()).map(drop).unwrap_err().to_string();
    assert!(told.contains("quantize_config.json: `bits`"), "{told}");
}

/// Damaged schemes of every method are read, or refused with the name of a file.
#[test]
fn damaged_schemes_never_panic() {
    let fp8: &[Stored] =
        &[("x.weight", Dtype::F8_E4M3, &[40, 24]), ("x.weight_scale_inv", Dtype::F32, &[3, 2])];
    let packed: &[Stored] = &[
        ("x.weight_packed", Dtype::I32, &[40, 3]),
        ("x.weight_shape", Dtype::I64, &[2]),
        ("x.weight_scale", Dtype::BF16, &[40, 3]),
        ("x.weight_zero_point", Dtype::I32, &[5, 3]),
    ];
    let transposed: &[Stored] = &[
        ("x.qweight", Dtype::I32, &[24, 5]),
        ("x.qzeros", Dtype::I32, &[3, 5]),
        ("x.scales", Dtype::F16, &[3, 40]),
    ];
    let weights =
        json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": false});
    let sound = [
        (json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}), fp8),
        (compressed("pack-quantized", &weights), packed),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}), transposed),
    ];
    let words = [
        "fp8",
        "gptq",
        "awq",
        "compressed-tensors",
        "int-quantized",
        "channel",
        "block",
        "group_size",
        "re:(",
    ];
    let mut dice = Fuzzer::new(31, &words);
    let (mut used, mut refused) = (0, 0);
    let dir = tempfile::tempdir().unwrap();
    for run in 0..900 {
        let (scheme, tensors) = &sound[run % sound.len()];
        let mut damaged = scheme.clone();
        (0..=dice.roll(2)).for_each(|_| dice.mutate(&mut damaged));
        write(dir.path(), &damaged, tensors);
        match Tensors::open_target(dir.path()).and_then(read_all) {
            Ok(()) => used += 1,
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains(dir.path().to_str().unwrap()), "{error}: {damaged}");
            }
        }
        drop(Tensors::open_target_present(dir.path()));
    }
    assert!(used > 50 && refused > 200, "{used} used, {refused} refused");
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
