//! Configs of drafters for known targets.

use std::path::Path;

use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, DSparkConfig, DSparkSettings, DraftDecoder, Eagle3Config, Eagle3Settings, MarkovKind,
    MarkovSettings,
};
use deepspec_models::ModelConfig;
use deepspec_testkit::golden;
use serde_json::{Value, json};

fn golden_config(case: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden::dir(case).join("config.json")).unwrap()).unwrap()
}

fn parse(raw: &Value) -> Result<ModelConfig, String> {
    let raw = raw.as_object().cloned().unwrap();
    ModelConfig::parse(Path::new("model/config.json"), raw).map_err(|error| error.to_string())
}

#[test]
fn a_drafter_keeps_the_targets_rope_settings() {
    for scaling in [
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.9, "mscale_all_dim": 0.4}),
        json!({"rope_type": "linear", "factor": 2.0}),
    ] {
        let mut raw = golden_config("target_qwen3");
        raw.as_object_mut().unwrap().remove("rope_parameters");
        (raw["rope_theta"], raw["rope_scaling"]) = (json!(12345.0), scaling);
        let target = parse(&raw).unwrap();
        let config = DSparkConfig {
            decoder: DraftDecoder {
                model: target.draft_decoder(&[None; 2]).unwrap(),
                taps: Tap::from_layer_ids([0, 1]).unwrap(),
                num_target_layers: target.layers.len(),
            },
            settings: DSparkSettings {
                blocks: BlockSpec {
                    block_size: 3,
                    slots: SlotTarget::AnchorPredicts,
                    mask_token_id: 1,
                    causal: false,
                    num_anchors: 8,
                },
                markov: Some(MarkovSettings { kind: MarkovKind::Vanilla, rank: 4 }),
                confidence: None,
            },
        };
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), Value::Object(config.to_json()).to_string()).unwrap();
        let loaded = DSparkConfig::load(dir.path()).unwrap();
        assert_eq!(loaded.decoder.model.layers, vec![target.layers[0].clone(); 2]);
        assert_eq!(loaded.decoder.model.max_position_embeddings, target.max_position_embeddings);
        loaded.decoder.check_fits(&target).unwrap();

        let config = Eagle3Config {
            decoder: DraftDecoder {
                model: target.draft_decoder(&[None]).unwrap(),
                taps: Tap::from_layer_ids([1]).unwrap(),
                num_target_layers: target.layers.len(),
            },
            settings: Eagle3Settings { ttt_length: 3, step_loss_decay: 0.8, ..Eagle3Settings::default() },
        };
        std::fs::write(dir.path().join("config.json"), Value::Object(config.to_json()).to_string()).unwrap();
        assert_eq!(Eagle3Config::load(dir.path()).unwrap().decoder.model.layers, [target.layers[0].clone()]);
    }
}

/// A drafter config repeats the target's settings as the reference writes them. Keys that only the
/// reference's own classes need may be missing.
#[test]
fn a_gemma4_drafters_config_is_spelled_like_the_references() {
    let mut expected = golden_config("dspark_gemma4");
    let target = parse(&golden_config("target_gemma4")).unwrap();
    let mut config = DSparkConfig::load(&golden::dir("dspark_gemma4")).unwrap();
    config.decoder.model = target.draft_decoder(&[None; 2]).unwrap();
    let found = Value::Object(config.to_json());
    let left_out = ["transformers_version", "dtype", "vocab_size_per_layer_input"];
    let expected = expected.as_object_mut().unwrap();
    expected.retain(|key, value| !value.is_null() && !left_out.contains(&key.as_str()));
    let rope = expected["rope_parameters"].as_object_mut().unwrap();
    rope.retain(|key, _| key.ends_with("_attention"));
    for (key, value) in expected {
        assert_eq!(found[key], *value, "{key}");
    }
    assert_eq!(parse(&found).unwrap().layers, config.decoder.model.layers);
}
