//! Weights in MXFP4, of gpt-oss and of compressed-tensors, and in NVFP4.

use deepspec_checkpoint::Tensors;
use safetensors::Dtype;
use serde_json::json;

use super::{Stored, check, compressed, ones, read_all, values, write_bytes};

/// Experts of gpt-oss: two of 64 inputs and 5 outputs.
pub(super) const MXFP4: [Stored; 2] =
    [("x.weight_blocks", Dtype::U8, &[2, 5, 2, 16]), ("x.weight_scales", Dtype::U8, &[2, 5, 2])];

#[test]
fn float4_weights_without_the_tensors_that_fit() {
    let scheme = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]});
    let [blocks, scales] = MXFP4;
    // Every byte is 0x01: 0.5 in each first place, and zero in each second one, times 2^-126.
    let found = values(&scheme, &MXFP4);
    assert_eq!(found.len(), 2 * 64 * 5);
    assert!((0..found.len()).all(|place| found[place] == [2.0_f32.powi(-127), 0.0][place / 5 % 2]));
    check(&scheme, &[blocks], &["`x.weight_scales`", "missing"]);
    for shape in [&[2, 2, 5][..], &[2, 5, 3], &[20], &[2, 5]] {
        let told = ["`x.weight_scales`", &format!("{shape:?}"), "[2, 5, 2]"];
        check(&scheme, &[blocks, ("x.weight_scales", Dtype::U8, shape)], &told);
    }
    for shape in [&[2, 5, 2, 8][..], &[2, 5, 32], &[10, 2, 16], &[2, 5, 0, 16]] {
        let told = ["`x.weight_blocks`", &format!("{shape:?}"), "expected"];
        check(&scheme, &[("x.weight_blocks", Dtype::U8, shape), scales], &told);
    }
    check(&scheme, &[("x.weight_blocks", Dtype::BF16, blocks.2), scales], &["bfloat16", "expected U8"]);
    check(
        &scheme,
        &[blocks, ("x.weight_scales", Dtype::BF16, scales.2)],
        &["bfloat16", "expected U8 or F8_E8M0"],
    );
    let twice = [&MXFP4[..], &[("x.weight", Dtype::BF16, &[2, 64, 5])]].concat();
    check(&scheme, &twice, &["`x.weight`", "`x.weight_blocks` is the same weight"]);

    let weights = json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32});
    let scheme = compressed("mxfp4-pack-quantized", &weights);
    let packed: Stored = ("x.weight_packed", Dtype::U8, &[5, 32]);
    let scale = |dtype, shape: &'static [usize]| ("x.weight_scale", dtype, shape);
    assert_eq!(values(&scheme, &[packed, scale(Dtype::F8_E8M0, &[5, 2])]).len(), 5 * 64);
    check(&scheme, &[packed], &["`x.weight_scale`", "missing"]);
    check(&scheme, &[packed, scale(Dtype::U8, &[5, 4])], &["`x.weight_scale`", "[5, 4]", "[5, 2]"]);
    check(&scheme, &[packed, scale(Dtype::F32, &[5, 2])], &["`x.weight_scale`", "float32"]);
    check(&scheme, &[("x.weight_packed", Dtype::U8, &[5, 20])], &["`x.weight_packed`", "40 columns"]);
    check(&scheme, &[("x.weight_packed", Dtype::I32, &[5, 32]), scale(Dtype::U8, &[5, 2])], &["int32", "U8"]);
    for (key, value, named) in [
        ("type", json!("int"), "type"),
        ("num_bits", json!(8), "num_bits"),
        ("group_size", json!(16), "group_size"),
        ("strategy", json!("channel"), "group_size"),
        ("symmetric", json!(false), "symmetric"),
    ] {
        let mut other = weights.clone();
        other[key] = value;
        let named = format!("`quantization_config.config_groups.group_0.weights.{named}`");
        check(&compressed("mxfp4-pack-quantized", &other), &[], &["config.json", &named]);
    }
}

#[test]
fn nvfp4_weights_without_the_tensors_that_fit() {
    let weights = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16});
    let scheme = compressed("nvfp4-pack-quantized", &weights);
    let packed: Stored = ("x.weight_packed", Dtype::U8, &[5, 16]);
    let scale = |dtype, shape: &'static [usize]| ("x.weight_scale", dtype, shape);
    let scales = scale(Dtype::F8_E4M3, &[5, 2]);
    let global: Stored = ("x.weight_global_scale", Dtype::F32, &[1]);
    // Every byte is 0x01: 0.5 and zero. The scales are 2^-9 and 0x01010101.
    let found = values(&scheme, &[packed, scales, global]);
    let expected = 0.5 * (2.0_f32.powi(-9) / f32::from_bits(0x0101_0101));
    assert_eq!(found.len(), 5 * 32);
    assert!((0..found.len()).all(|place| found[place] == [expected, 0.0][place % 2]));
    let input: Stored = ("x.input_global_scale", Dtype::F32, &[1]);
    assert_eq!(values(&scheme, &[packed, scales, global, input]), found);
    check(&scheme, &[packed, global], &["`x.weight_scale`", "missing"]);
    check(&scheme, &[packed, scales], &["`x.weight_global_scale`", "missing"]);
    check(
        &scheme,
        &[packed, scale(Dtype::F8_E4M3, &[5, 1]), global],
        &["`x.weight_scale`", "[5, 1]", "[5, 2]"],
    );
    check(&scheme, &[packed, scale(Dtype::U8, &[5, 2]), global], &["`x.weight_scale`", "U8"]);
    check(
        &scheme,
        &[packed, scales, ("x.weight_global_scale", Dtype::F32, &[5, 1])],
        &["`x.weight_global_scale`", "[5, 1]"],
    );
    check(
        &scheme,
        &[("x.weight_packed", Dtype::U8, &[5, 20]), scales, global],
        &["`x.weight_packed`", "40 columns"],
    );
    check(&scheme, &[("x.weight_packed", Dtype::I32, &[5, 16]), scales, global], &["int32", "U8"]);
    for (key, value, named) in [
        ("type", json!("int"), "type"),
        ("num_bits", json!(8), "num_bits"),
        ("group_size", json!(32), "group_size"),
        ("group_size", json!(null), "group_size"),
        ("strategy", json!("channel"), "group_size"),
        ("symmetric", json!(false), "symmetric"),
    ] {
        let mut other = weights.clone();
        other[key] = value;
        let named = format!("`quantization_config.config_groups.group_0.weights.{named}`");
        check(&compressed("nvfp4-pack-quantized", &other), &[], &["config.json", &named]);
    }
    // A scale of zero for the whole weight.
    let dir = tempfile::tempdir().unwrap();
    let stored = [packed, scales, global].map(|tensor| (tensor, ones(tensor)));
    let mut damaged = stored.to_vec();
    damaged[2].1.fill(0);
    write_bytes(dir.path(), &scheme, &damaged);
    let told = Tensors::open_target(dir.path()).and_then(read_all).unwrap_err().to_string();
    assert!(told.contains("`x.weight_global_scale`") && told.contains("above 0"), "{told}");
}
