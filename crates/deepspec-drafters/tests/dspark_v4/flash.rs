//! The drafter within DeepSeek-V4-Flash, as it is released, at full size: names, dtypes and shapes without values.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use deepspec_checkpoint::CheckpointFormat;
use deepspec_drafters::{
    DSparkV4, DSparkV4Config, DraftDecoder, DrafterSpec, load_recipe, open_checkpoint, plan_drafter,
};
use deepspec_models::ModelConfig;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

/// A tensor of a file: name, dtype and shape.
type Stored = (String, Dtype, Vec<usize>);

/// A matrix in float8, and a scale for every block of 128 rows and columns.
fn float8(name: &str, [rows, columns]: [usize; 2]) -> [Stored; 2] {
    [
        (format!("{name}.weight"), Dtype::F8_E4M3, vec![rows, columns]),
        (format!("{name}.scale"), Dtype::F8_E8M0, vec![rows / 128, columns / 128]),
    ]
}

/// A matrix in float4, two numbers to a byte, and a scale for every 32 columns.
fn float4(name: &str, [rows, columns]: [usize; 2]) -> [Stored; 2] {
    [
        (format!("{name}.weight"), Dtype::I8, vec![rows, columns / 2]),
        (format!("{name}.scale"), Dtype::F8_E8M0, vec![rows, columns / 32]),
    ]
}

fn plain(dtype: Dtype, tensors: &[(&str, &[usize])]) -> Vec<Stored> {
    tensors.iter().map(|&(name, shape)| (name.to_string(), dtype, shape.to_vec())).collect()
}

/// The tensors that every stage has, without their prefix.
fn stage() -> Vec<Stored> {
    let mlp = [("w1", [2048, 4096]), ("w3", [2048, 4096]), ("w2", [4096, 2048])];
    let attention = [
        ("wq_a", [1024, 4096]),
        ("wq_b", [64 * 512, 1024]),
        ("wkv", [512, 4096]),
        ("wo_a", [8 * 1024, 64 * 512 / 8]),
        ("wo_b", [4096, 8 * 1024]),
    ];
    let in_bfloat16: [(&str, &[usize]); 5] = [
        ("attn.q_norm.weight", &[1024]),
        ("attn.kv_norm.weight", &[512]),
        ("attn_norm.weight", &[4096]),
        ("ffn_norm.weight", &[4096]),
        ("ffn.gate.weight", &[256, 4096]),
    ];
    let in_float32: [(&str, &[usize]); 8] = [
        ("attn.attn_sink", &[64]),
        ("ffn.gate.bias", &[256]),
        ("hc_attn_fn", &[24, 4 * 4096]),
        ("hc_attn_base", &[24]),
        ("hc_attn_scale", &[3]),
        ("hc_ffn_fn", &[24, 4 * 4096]),
        ("hc_ffn_base", &[24]),
        ("hc_ffn_scale", &[3]),
    ];
    let mut found = [plain(Dtype::BF16, &in_bfloat16), plain(Dtype::F32, &in_float32)].concat();
    for (part, shape) in attention {
        found.extend(float8(&format!("attn.{part}"), shape));
    }
    for (part, shape) in mlp {
        found.extend(float8(&format!("ffn.shared_experts.{part}"), shape));
        found.extend((0..256).flat_map(|index| float4(&format!("ffn.experts.{index}.{part}"), shape)));
    }
    found
}

/// The tensors of three stages. The first one reads the target's states, and the last one has the heads.
fn inventory() -> Vec<Stored> {
    let mut input = vec![("main_norm.weight".to_string(), Dtype::BF16, vec![4096])];
    input.extend(float8("main_proj", [4096, 3 * 4096]));
    let in_bfloat16: [(&str, &[usize]); 4] = [
        ("norm.weight", &[4096]),
        ("markov_head.markov_w1.weight", &[129_280, 256]),
        ("markov_head.markov_w2.weight", &[129_280, 256]),
        ("confidence_head.proj.weight", &[1, 4096 + 256]),
    ];
    let in_float32: [(&str, &[usize]); 3] =
        [("hc_head_fn", &[4, 4 * 4096]), ("hc_head_base", &[4]), ("hc_head_scale", &[1])];
    let heads = [plain(Dtype::BF16, &in_bfloat16), plain(Dtype::F32, &in_float32)].concat();
    let mut found = vec![];
    for (index, own) in [input, vec![], heads].into_iter().enumerate() {
        let tensors = [stage(), own].concat().into_iter();
        found.extend(tensors.map(|(name, dtype, shape)| (format!("mtp.{index}.{name}"), dtype, shape)));
    }
    found
}

/// Writes a safetensors file whose values take no space on the disk.
fn write_without_values(path: &Path, tensors: &[Stored]) {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, dtype, shape) in tensors {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let facts = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        assert!(header.insert(name.clone(), facts).is_none(), "{name} twice");
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

#[test]
fn the_released_drafter_has_the_tensors_of_its_recipe() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let dir = tempfile::tempdir().unwrap();
    let stored = inventory();
    // 1,565 of each stage, 3 of the first one and 7 of the last one.
    assert_eq!(stored.len(), 4705);
    write_without_values(&dir.path().join("model.safetensors"), &stored);
    let shapes = configs.join("shapes/deepseek_v4_flash.json");
    let raw: Map<String, Value> = serde_json::from_slice(&fs::read(&shapes).unwrap()).unwrap();
    let own = json!({
        "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "sliding_window": 128,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "dspark_block_size": 5,
        "dspark_noise_token_id": 128_799, "dspark_target_layer_ids": [40, 41, 42], "dspark_markov_rank": 256,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        },
    });
    let mut config = raw.clone();
    config.extend(own.as_object().unwrap().clone());
    fs::write(dir.path().join("config.json"), Value::Object(config).to_string()).unwrap();

    let recipe = load_recipe(&configs.join("dspark_v4/deepseek_v4_flash.yaml"), &[]).unwrap();
    let DrafterSpec::DSparkV4(of_recipe) = &recipe.drafter else { panic!("another kind") };
    let released = open_checkpoint(dir.path()).unwrap();
    let drafter = released.drafter();
    assert_eq!(released.format(), CheckpointFormat::DeepseekV4);
    assert_eq!(drafter.kind.to_json()["block"]["stages"], json!(of_recipe.stage_config));
    assert_eq!((&drafter.taps, drafter.num_target_layers), (&recipe.target.layer_ids, Some(43)));

    // The recipe's model has the same names and shapes.
    let target = ModelConfig::parse_any(&shapes, raw).unwrap();
    let decoder = DraftDecoder {
        model: target.anchored_decoder(&[None; 3]).unwrap(),
        taps: drafter.taps.clone(),
        num_target_layers: target.layers.len(),
    };
    let model =
        DSparkV4::meta_parameters(DSparkV4Config { decoder, settings: of_recipe.settings() }).all_tensors();
    let expected: BTreeMap<String, Vec<i64>> = model
        .into_iter()
        .filter(|(name, _)| name != "embed_tokens.weight" && name != "lm_head.weight")
        .map(|(name, tensor)| (name, tensor.size()))
        .collect();
    let renames = drafter.kind.renames(CheckpointFormat::DeepseekV4);
    let own_name = |name: &str| {
        let renamed =
            |(theirs, ours): &(&str, &str)| name.strip_prefix(theirs).map(|rest| format!("{ours}{rest}"));
        renames.iter().find_map(renamed).unwrap_or_else(|| panic!("{name}"))
    };
    let found: BTreeMap<String, Vec<i64>> = released
        .tensors()
        .iter()
        .map(|(name, facts)| (own_name(name), facts.shape.iter().map(|&size| size as i64).collect()))
        .collect();
    for (name, shape) in &expected {
        assert_eq!(found.get(name), Some(shape), "{name}");
    }
    assert_eq!(found.len(), expected.len());
    let weights: i64 = found.values().map(|shape| shape.iter().product::<i64>()).sum();
    let counts = plan_drafter(&recipe, &target).unwrap().num_parameters();
    // Biases by which experts are chosen are not trained.
    assert_eq!(counts.trainable as i64 + 3 * 256, weights);
}
