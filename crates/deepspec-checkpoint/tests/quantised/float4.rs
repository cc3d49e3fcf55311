//! Weights in MXFP4, of gpt-oss and of compressed-tensors.

use safetensors::Dtype;
use serde_json::json;

use super::{Stored, check, compressed, values};

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
