//! Quantised weights are read as the tools that write them define them. Damaged ones are refused by name.

mod float4;

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
    let tensors: Vec<_> = tensors.iter().map(|&tensor| (tensor, ones(tensor))).collect();
    write_bytes(dir, scheme, &tensors);
}

/// The usual bytes of a tensor.
fn ones((name, dtype, shape): Stored) -> Vec<u8> {
    let shape_bytes = [40_i64, 24].map(i64::to_le_bytes).concat();
    let size = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    if name.ends_with("weight_shape") && size == shape_bytes.len() { shape_bytes } else { vec![1; size] }
}

fn write_bytes(dir: &Path, scheme: &Value, tensors: &[(Stored, Vec<u8>)]) {
    fs::write(dir.join("config.json"), json!({"quantization_config": scheme}).to_string()).unwrap();
    let views = tensors.iter().map(|((name, dtype, shape), bytes)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
    });
    fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The float32 values of `x.weight`.
fn values(scheme: &Value, tensors: &[Stored]) -> Vec<f32> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), scheme, tensors);
    values_in(dir.path())
}

fn values_in(dir: &Path) -> Vec<f32> {
    let tensors = Tensors::open_target(dir).unwrap_or_else(|error| panic!("{error}"));
    let bytes = tensors.bytes("x.weight").unwrap_or_else(|error| panic!("{error}"));
    bytes.as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
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
    let mut symmetric = packed_scheme(&json!({"num_bits": 4, "strategy": "group", "group_size": 8}));
    check(&symmetric, &all, &["`x.weight_zero_point`", "`symmetric` is true"]);
    // Status of models that were saved before they were compressed; engines do not read it.
    symmetric["quantization_status"] = json!("frozen");
    assert_eq!(values(&symmetric, &all[..3]).len(), 40 * 24);
}

fn packed_scheme(weights: &Value) -> Value {
    compressed("pack-quantized", weights)
}

/// Symmetric int4 weights in groups of 8.
const PACKED: [Stored; 3] = [
    ("x.weight_packed", Dtype::I32, &[40, 3]),
    ("x.weight_shape", Dtype::I64, &[2]),
    ("x.weight_scale", Dtype::F32, &[40, 3]),
];

#[test]
fn older_spellings_of_compressed_tensors_are_read() {
    let weights = json!({"num_bits": 4, "strategy": "group", "group_size": 8});
    let dir = tempfile::tempdir().unwrap();
    let with_index = |first: i32| {
        let scale: Vec<u8> = (0..120).flat_map(|place| (place as f32).to_le_bytes()).collect();
        let mut index = [-1_i32; 24].map(i32::to_le_bytes);
        index[0] = first.to_le_bytes();
        let mut tensors = PACKED.map(|tensor| (tensor, ones(tensor))).to_vec();
        tensors[2].1 = scale;
        let unset: Stored = ("x.weight_g_idx", Dtype::I32, &[24]);
        write_bytes(dir.path(), &packed_scheme(&weights), &tensors);
        let in_order = Tensors::open_target(dir.path()).unwrap().bytes("x.weight").unwrap();
        tensors.push((unset, index.concat()));
        write_bytes(dir.path(), &packed_scheme(&weights), &tensors);
        let found = Tensors::open_target(dir.path()).unwrap();
        assert_eq!(found.get("x.weight_g_idx"), None);
        (found.bytes("x.weight"), in_order)
    };
    let (found, in_order) = with_index(-1);
    assert_eq!(found.unwrap(), in_order);
    let told = with_index(0).0.unwrap_err().to_string();
    assert!(told.contains("`x.weight_g_idx`") && told.contains("the group -1"), "{told}");

    let blocks: [Stored; 2] =
        [("x.weight", Dtype::F8_E4M3, &[40, 24]), ("x.weight_scale", Dtype::F32, &[3, 2])];
    let scheme = |block: &str| {
        let weights = json!({"type": "float", "strategy": "block", "block_structure": block});
        compressed("float-quantized", &weights)
    };
    assert_eq!(values(&scheme("16x16"), &blocks).len(), 40 * 24);
    check(&scheme("16x8"), &blocks, &["`x.weight_scale`", "[3, 2]", "[3, 3]"]);
    for wrong in ["16", "16x0", "x16"] {
        check(&scheme(wrong), &blocks, &["weights.block_structure`", wrong]);
    }
}

/// compressed-tensors prefers the exact name, vLLM the first group.
#[test]
fn modules_of_two_groups_are_refused_unless_the_settings_agree() {
    let weights = json!({"num_bits": 4, "strategy": "group", "group_size": 8});
    let mut scheme = packed_scheme(&weights);
    scheme["config_groups"]["group_0"]["targets"] = json!(["re:x"]);
    scheme["config_groups"]["group_1"] = json!({"targets": ["x"], "weights": weights});
    assert_eq!(values(&scheme, &PACKED).len(), 40 * 24);
    scheme["config_groups"]["group_1"]["weights"]["num_bits"] = json!(8);
    let words = ["`x.weight_packed`", "`config_groups.group_0`", "`config_groups.group_1`"];
    check(&scheme, &PACKED, &words);
    // Every engine prefers names to classes.
    scheme["config_groups"]["group_1"]["targets"] = json!(["Linear"]);
    assert_eq!(values(&scheme, &PACKED).len(), 40 * 24);
    scheme["config_groups"]["group_0"]["targets"] = json!(["Linear"]);
    check(&scheme, &PACKED, &words);
}

#[test]
fn settings_of_compressed_tensors_that_are_not_read() {
    let weights = json!({"num_bits": 4, "strategy": "channel"});
    let group = "config_groups.group_0";
    for (key, value) in [
        ("format", json!("mxfp6-pack-quantized")),
        ("format", json!("marlin-24")),
        ("format", json!(null)),
        ("sparsity_config.format", json!("sparse-24-bitmask")),
        ("kv_cache_scheme", json!({"num_bits": 8})),
        ("transform_config", json!({"config_groups": {"R1": {}}})),
        ("config_groups", json!(null)),
        (&format!("{group}.format"), json!("mxfp6-pack-quantized")),
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

/// int4 in groups of 8.
const GPTQ: [Stored; 3] = [
    ("x.qweight", Dtype::I32, &[3, 40]),
    ("x.qzeros", Dtype::I32, &[3, 5]),
    ("x.scales", Dtype::F16, &[3, 40]),
];
/// As [`GPTQ`], packed along the other dimension.
const AWQ: [Stored; 3] = [("x.qweight", Dtype::I32, &[24, 5]), GPTQ[1], GPTQ[2]];

#[test]
fn gptq_and_awq_weights_without_the_tensors_that_fit() {
    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": false});
    let all = GPTQ;
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
}

/// GPTQModel packs zero points, and then subtracts one from each of them, in whole words.
#[test]
fn zero_points_of_zero_borrow_from_their_neighbours() {
    for (bits, ones, zero_points) in [
        (4, 0x1111_1111, &[0, 1, 0, 15, 3, 0, 0, 8][..]),
        (4, 0x1111_1111, &[5, 0, 15, 15, 0, 0, 0, 0]),
        (8, 0x0101_0101, &[0, 255, 0, 7]),
    ] {
        let outputs = zero_points.len();
        let packed = (0..).zip(zero_points).fold(0, |word, (place, zero)| word | zero << (bits * place));
        let lowered = u32::wrapping_sub(packed, ones).to_le_bytes();
        let dir = tempfile::tempdir().unwrap();
        let (shapes, scales) = ([[16 / (32 / bits), outputs], [1, 1]], [1, outputs]);
        let tensors = [
            (("x.qweight", Dtype::I32, &shapes[0][..]), vec![0; shapes[0][0] * outputs * 4]),
            (("x.qzeros", Dtype::I32, &shapes[1][..]), lowered.to_vec()),
            (("x.scales", Dtype::F32, &scales[..]), vec![1_f32.to_le_bytes(); outputs].concat()),
        ];
        write_bytes(dir.path(), &json!({"quant_method": "gptq", "bits": bits, "group_size": 16}), &tensors);
        let expected: Vec<f32> = zero_points.iter().flat_map(|&zero| [0.0 - zero as f32; 16]).collect();
        assert_eq!(values_in(dir.path()), expected);
    }
}

/// A file beside config.json may state the scheme. It is read by its method, else by its tool's.
#[test]
fn files_beside_the_config_are_read() {
    let own = json!({"w_bit": 4, "q_group_size": 8, "zero_point": true, "version": "GEMM"});
    let named = json!({"quant_method": "awq", "bits": 4, "group_size": 8});
    let of_gptq = json!({"bits": 4, "group_size": 8});
    for (file, scheme, tensors) in [
        ("quant_config.json", &own, AWQ),
        ("quantize_config.json", &own, AWQ),
        ("quantize_config.json", &named, AWQ),
        ("quantize_config.json", &of_gptq, GPTQ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &Value::Null, &tensors);
        fs::write(dir.path().join(file), scheme.to_string()).unwrap();
        assert_eq!(values_in(dir.path()).len(), 40 * 24, "{file}: {scheme}");
        for (key, value, expected) in [
            ("quant_method", json!("hqq"), "`quant_method`: \"hqq\""),
            (if scheme == &own { "w_bit" } else { "bits" }, json!(3), "bit"),
        ] {
            let mut other = scheme.clone();
            other[key] = value;
            fs::write(dir.path().join(file), other.to_string()).unwrap();
            let told = Tensors::open_target(dir.path()).map(drop).unwrap_err().to_string();
            assert!(told.contains(file) && told.contains(expected), "{told}");
        }
    }
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
    let weights =
        json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": false});
    let sound = [
        (json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}), fp8),
        (compressed("pack-quantized", &weights), packed),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}), &AWQ),
        (json!({"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}), &float4::MXFP4),
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
    write(dir.path(), &json!({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}), &tensors);
    let opened = Tensors::open_target_present(dir.path()).unwrap();
    assert_eq!(opened.bytes("lm_head.weight").unwrap().len(), 4 * 2 * 4);
    // A scheme that is not read is an error of the tensors that need it.
    for (scheme, words) in
        [(json!({"quant_method": "nvfp4"}), "\"nvfp4\" is not read"), (json!("fp8"), "expected an object")]
    {
        write(dir.path(), &scheme, &tensors);
        let opened = Tensors::open_target_present(dir.path()).unwrap();
        opened.check_readable("model.embed_tokens.weight").unwrap();
        assert_eq!(opened.bytes("model.embed_tokens.weight").unwrap().len(), 4 * 2 * 2);
        for name in ["lm_head.weight", "absent.weight"] {
            let told = opened.check_readable(name).unwrap_err().to_string();
            assert!(
                told.contains(name) && told.contains("`quantization_config") && told.contains(words),
                "{told}"
            );
        }
    }
}

/// A head of one group is read beside layers of another, which is not.
#[test]
fn a_group_that_is_not_read_concerns_its_modules_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut scheme = compressed("mixed-precision", &json!({"num_bits": 4, "type": "float"}));
    scheme["config_groups"]["group_0"]["format"] = json!("mxfp6-pack-quantized");
    scheme["config_groups"]["group_1"] = json!({
        "targets": ["lm_head"], "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    });
    let tensors: [Stored; 4] = [
        ("model.layers.0.up_proj.weight_packed", Dtype::U8, &[4, 1]),
        ("model.embed_tokens.weight", Dtype::BF16, &[4, 2]),
        ("lm_head.weight", Dtype::F8_E4M3, &[4, 2]),
        ("lm_head.weight_scale", Dtype::BF16, &[4, 1]),
    ];
    write(dir.path(), &scheme, &tensors);
    let told = Tensors::open_target(dir.path()).map(drop).unwrap_err().to_string();
    assert!(told.contains("`quantization_config.config_groups.group_0.format`"), "{told}");
    let opened = Tensors::open_target_present(dir.path()).unwrap();
    assert_eq!(opened.get("lm_head.weight").unwrap().dtype, Dtype::F32);
    assert_eq!(opened.bytes("lm_head.weight").unwrap().len(), 4 * 2 * 4);
    scheme["config_groups"]["group_0"]["targets"] = json!(["lm_head"]);
    scheme["config_groups"]["group_1"]["targets"] = json!(["Linear"]);
    write(dir.path(), &scheme, &tensors);
    let told = Tensors::open_target_present(dir.path()).map(drop).unwrap_err().to_string();
    assert!(told.contains("`lm_head.weight`") && told.contains("config_groups.group_0.format"), "{told}");
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
