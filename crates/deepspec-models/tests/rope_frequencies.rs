//! Frequencies of scaled rotary embeddings.

use std::path::Path;

use deepspec_models::ModelConfig;
use deepspec_ops::Rope;
use serde_json::Value;
use tch::Kind;

/// Expected frequencies from transformers with the same settings, written by `tests/rope/make.py`.
#[test]
fn scaled_frequencies_are_those_of_transformers() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("rope/scaled.json")).unwrap();
    assert!(cases.len() > 10);
    for case in cases {
        let raw = case["config"].as_object().cloned().unwrap();
        let config = ModelConfig::parse(Path::new("config.json"), raw).unwrap();
        let expected = case["layers"].as_array().unwrap();
        assert_eq!(config.layers.len(), expected.len());
        for (layer, expected) in config.layers.iter().zip(expected) {
            let rope = Rope::new(&layer.rope, tch::Device::Cpu);
            let found: Vec<f64> = Vec::try_from(rope.inverse_frequencies().to_kind(Kind::Double)).unwrap();
            let wanted: Vec<f64> =
                expected["inv_freq"].as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect();
            let close = |(found, wanted): (&f64, &f64)| (found - wanted).abs() <= 3e-7 * wanted;
            assert!(
                found.len() == wanted.len() && found.iter().zip(&wanted).all(close),
                "{}: {found:?}, expected {wanted:?}",
                case["name"]
            );
            let factor = expected["attention_factor"].as_f64().unwrap();
            assert!((rope.attention_factor() - factor).abs() <= 1e-12 * factor, "{}", case["name"]);
        }
    }
}
