//! speculators: the decoder in `transformer_layer_config`, layer ids counted from the embedding, the verifier named.

use deepspec_core::Slots;
use serde_json::{Map, Value, json};

use super::{block_size, confidence, decoder, markov, mask_token, notes};
use crate::drafter::{Algorithm, Block, Design, Drafter, Obstacle};
use crate::fields::Fields;
use crate::{DialectError, Target, Tensors};

/// The version whose layout is written.
const VERSION: &str = "0.9.0";

/// What `Qwen3Config` of transformers stands in for a missing key: speculators stores only what differs from it.
fn defaults() -> [(&'static str, Value); 9] {
    [
        ("vocab_size", json!(151_936)),
        ("hidden_size", json!(4096)),
        ("intermediate_size", json!(22_016)),
        ("num_hidden_layers", json!(32)),
        ("num_attention_heads", json!(32)),
        ("num_key_value_heads", json!(32)),
        ("head_dim", json!(128)),
        ("max_position_embeddings", json!(32_768)),
        ("rms_norm_eps", json!(1e-6)),
    ]
}

pub fn read(fields: &Fields, tensors: &Tensors) -> Result<Drafter, DialectError> {
    let key = "speculators_model_type";
    let model_type = fields.required(key, fields.text(key)?)?;
    let nested = fields.required_object("transformer_layer_config")?;
    let mut map = nested.map.clone();
    map.entry("model_type").or_insert("qwen3".into());
    if map.get("model_type").and_then(Value::as_str) == Some("qwen3") {
        for (key, value) in defaults() {
            map.entry(key).or_insert(value);
        }
    }
    let nested = nested.with(&map);
    let decoder = decoder(&nested, &[])?;
    let mut obstacles = decoder.obstacles;
    let mut stops = |key: &str, reason: String| obstacles.push(Obstacle { key: key.into(), reason });

    let draft_vocab_size = fields.required_size("draft_vocab_size")?;
    if draft_vocab_size != decoder.vocab_size {
        let vocab = decoder.vocab_size;
        stops(
            "draft_vocab_size",
            format!(
                "the vocabulary is pruned to {draft_vocab_size} of {vocab} tokens (t2d, d2t); other layouts have only whole ones"
            ),
        );
    } else if let Some(name) = pruning(tensors)? {
        stops(name, "it maps a pruned vocabulary, which other layouts cannot say".into());
    }
    if let Some(width) = fields.size("target_hidden_size")?.filter(|&width| width != decoder.hidden_size) {
        stops("target_hidden_size", format!("{width} is not the drafter's {}", decoder.hidden_size));
    }
    let design = match model_type {
        "eagle3" => {
            for flag in ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"] {
                if fields.flag(flag)?.unwrap_or(false) {
                    stops(flag, "a norm that our Eagle3 does not have".into());
                }
            }
            if decoder.family == &crate::LLAMA {
                stops(
                    "transformer_layer_config.model_type",
                    "Llama layers have no norms on queries and keys".into(),
                );
            }
            Design::Eagle3 { steps: speculative_tokens(fields)? }
        }
        "dspark" | "dflash" => {
            let from_anchor = fields.flag("sample_from_anchor")?;
            let markov = if model_type == "dspark" { markov(fields)? } else { None };
            let confidence_with_markov =
                if model_type == "dspark" { confidence(fields, markov)? } else { None };
            // Checkpoints without the key are older than it and have z-lab's slots.
            let slots = if from_anchor.unwrap_or(false) { Slots::AnchorPredicts } else { Slots::FillIn };
            Design::Block(Block {
                block_size: block_size(fields, slots)?,
                mask_token_id: mask_token(fields, decoder.vocab_size)?,
                slots,
                markov,
                confidence_with_markov,
            })
        }
        other => {
            let problem = format!("\"{other}\" is not known; expected dspark, dflash or eagle3");
            return Err(fields.error(key, problem));
        }
    };
    let ids = match design {
        Design::Eagle3 { .. } => "eagle_aux_hidden_state_layer_ids",
        Design::Block(_) => "aux_hidden_state_layer_ids",
    };
    Ok(Drafter {
        architecture: fields.architecture()?.unwrap_or(model_type).into(),
        family: decoder.family,
        hidden_size: decoder.hidden_size,
        vocab_size: decoder.vocab_size,
        draft_vocab_size,
        layers: decoder.layers,
        // Their id i is the input of layer i, the output of the layer before it.
        taps: super::taps(fields, ids, 0)?,
        num_target_layers: fields.size("num_target_layers")?,
        design,
        notes: notes(fields),
        obstacles,
        decoder: decoder.map,
    })
}

/// The vocabulary map that is not the identity, if any. Maps of whole vocabularies may lie in a checkpoint to no effect.
fn pruning(tensors: &Tensors) -> Result<Option<&'static str>, DialectError> {
    for (name, identity) in [("t2d", 1), ("d2t", 0)] {
        if tensors.get(name).is_some() {
            let bytes = tensors.bytes(name)?;
            if bytes.iter().any(|&byte| byte != identity) {
                return Ok(Some(name));
            }
        }
    }
    Ok(None)
}

/// Drafted tokens of the first proposal method.
fn speculative_tokens(fields: &Fields) -> Result<u64, DialectError> {
    let outer = fields.required_object("speculators_config")?;
    let methods = outer.map.get("proposal_methods").and_then(Value::as_array);
    let first = methods.and_then(|methods| methods.first()).and_then(Value::as_object);
    let tokens = first.and_then(|method| method.get("speculative_tokens")).and_then(Value::as_u64);
    let tokens = tokens.filter(|tokens| (1..1 << 31).contains(tokens));
    outer.required("proposal_methods", tokens)
}

pub fn config(drafter: &Drafter, target: Option<&Target>) -> Map<String, Value> {
    let algorithm = drafter.algorithm();
    let fills_in = drafter.block().is_some_and(|block| block.slots == Slots::FillIn);
    // A DFlash with our slots goes as a DSpark without heads: that type's default is our convention, so that even a reader
    // that overlooks `sample_from_anchor` is right.
    let (model_type, class) = match algorithm {
        Algorithm::Eagle3 => ("eagle3", "Eagle3Speculator"),
        Algorithm::Dflash if fills_in => ("dflash", "DFlashSpeculator"),
        Algorithm::Dflash | Algorithm::Dspark => ("dspark", "DSparkSpeculator"),
    };
    let mut layer = drafter.decoder.clone();
    layer.insert("layer_types".into(), vec!["full_attention"; drafter.layers as usize].into());
    layer.insert("tie_word_embeddings".into(), false.into());
    let verifier = target.map_or_else(
        || json!({"name_or_path": null, "architectures": []}),
        |target| json!({"name_or_path": target.name(), "architectures": target.architectures()}),
    );
    let proposal = json!({
        "proposal_type": "greedy", "speculative_tokens": drafter.drafted(), "verifier_accept_k": 1, "accept_tolerance": 0.0,
    });
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| map.insert(key.into(), value);
    put("architectures", json!([class]));
    put("speculators_model_type", model_type.into());
    put("speculators_version", VERSION.into());
    put("transformer_layer_config", layer.into());
    put("draft_vocab_size", drafter.draft_vocab_size.into());
    put("tie_word_embeddings", false.into());
    put(
        "speculators_config",
        json!({
            "algorithm": model_type, "proposal_methods": [proposal], "default_proposal_method": "greedy", "verifier": verifier,
        }),
    );
    let ids = drafter.aux_layer_ids().into();
    match drafter.design {
        Design::Eagle3 { .. } => {
            put("eagle_aux_hidden_state_layer_ids", ids);
            for flag in ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"] {
                put(flag, false.into());
            }
        }
        Design::Block(block) => {
            put("aux_hidden_state_layer_ids", ids);
            put("block_size", block.block_size.into());
            put("mask_token_id", block.mask_token_id.into());
            put("sample_from_anchor", (!fills_in).into());
            if model_type == "dspark" {
                put("markov_rank", block.markov.map_or(0, |markov| markov.rank).into());
                put("markov_head_type", block.markov.map_or("vanilla", |markov| markov.kind.name()).into());
                put("enable_confidence_head", block.confidence_with_markov.is_some().into());
                put("confidence_head_with_markov", block.confidence_with_markov.unwrap_or(false).into());
            }
        }
    }
    // Not theirs, but let alone by them: with these the way back needs no guesses.
    if let Some(layers) = drafter.num_target_layers {
        put("num_target_layers", layers.into());
    }
    map.extend(drafter.notes.clone());
    map
}
