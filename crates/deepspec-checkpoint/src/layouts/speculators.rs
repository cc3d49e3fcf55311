//! The speculators format: the decoder in `transformer_layer_config`, layer ids counted from the
//! embedding, and the verifier's name.

use serde_json::{Map, Value, json};

use super::common::{Decoder, read_layer_ids};
use super::dflash_config;
use super::reader::KnownDrafters;
use crate::drafter::{Drafter, Incompatibility};
use crate::fields::Fields;
use crate::kind::Speculators;
use crate::{CheckpointError, Target, Tensors};

/// Version of the format that is written.
const VERSION: &str = "0.9.0";

pub fn read(fields: &Fields, tensors: &Tensors, known: KnownDrafters) -> Result<Drafter, CheckpointError> {
    let key = "speculators_model_type";
    let model_type = fields.required(key, fields.text(key)?)?;
    let Some(kind) = known.kinds.iter().find(|kind| kind.model_types.contains(&model_type)) else {
        let known =
            known.kinds.iter().flat_map(|kind| kind.model_types).copied().collect::<Vec<_>>().join(", ");
        return Err(fields.error(key, format!("\"{model_type}\" is not known; expected one of {known}")));
    };
    let nested = fields.required_object("transformer_layer_config")?;
    let mut map = nested.map.clone();
    map.entry("model_type").or_insert("qwen3".into());
    let layers = map.get("model_type").and_then(Value::as_str).unwrap_or_default();
    // Speculators stores only keys that differ from these defaults.
    let family = known.families.iter().find(|family| family.model_types.contains(&layers));
    for (key, value) in family.map_or_else(Vec::new, |family| (family.defaults)()) {
        map.entry(key).or_insert(value);
    }
    let nested = nested.with_map(&map);
    let mut decoder = Decoder::read(&nested, &[], known.families)?;
    for map in [fields.map, nested.map] {
        decoder.incompatibilities.extend(dflash_config::attention_incompatibilities(map, false));
    }
    let kind = (kind.speculators)(fields, &mut decoder)?;
    let ids = kind.speculators_config().and_then(|config| config.taps);
    let mut stops = |key: &str, reason: String| {
        decoder.incompatibilities.push(Incompatibility { key: key.into(), reason })
    };

    let vocab = decoder.vocab_size;
    let draft_vocab_size: u64 = match ids {
        Some(_) => fields.required_size("draft_vocab_size")?,
        None => vocab,
    };
    if draft_vocab_size == vocab
        && let Some(name) = find_reduced_vocab_map(tensors)?
    {
        stops(name, format!("it reduces the vocabulary, but `draft_vocab_size` is {vocab}, the target's"));
    }
    if let Some(width) =
        fields.size::<u64>("target_hidden_size")?.filter(|&width| width != decoder.hidden_size)
    {
        stops("target_hidden_size", format!("{width} is not the drafter's {}", decoder.hidden_size));
    }
    // In speculators, id i is the input of layer i, which is the output of the layer before it. Without ids, engines capture the
    // default layers.
    let taps = match ids {
        Some(key) if kind.has_default_taps() && fields.map.get(key).is_none_or(Value::is_null) => vec![],
        Some(key) => read_layer_ids(fields, key, 0)?,
        None => vec![],
    };
    decoder.into_drafter(fields, fields.architecture()?.unwrap_or(model_type), taps, kind)
}

/// Number of drafted tokens of the first proposal method.
///
/// # Errors
/// Fails if `speculators_config` does not say it.
pub fn read_speculative_tokens(fields: &Fields) -> Result<u64, CheckpointError> {
    let outer = fields.required_object("speculators_config")?;
    let methods = outer.map.get("proposal_methods").and_then(Value::as_array);
    let first = methods.and_then(|methods| methods.first()).and_then(Value::as_object);
    let tokens = first.and_then(|method| method.get("speculative_tokens")).and_then(Value::as_u64);
    outer.required("proposal_methods", tokens.filter(|tokens| (1..1 << 31).contains(tokens)))
}

/// Name of the vocabulary map that is not the identity. A checkpoint may contain identity maps,
/// which have no effect.
fn find_reduced_vocab_map(tensors: &Tensors) -> Result<Option<&'static str>, CheckpointError> {
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

pub fn config(drafter: &Drafter, target: Option<&Target>) -> Map<String, Value> {
    let Some(Speculators { model_type, class, taps, keys }) = drafter.kind.speculators_config() else {
        return Map::new();
    };
    let mut layer = drafter.decoder.clone();
    let layers = match taps {
        Some(_) => drafter.layers,
        None => drafter.num_target_layers.unwrap_or(drafter.layers),
    };
    layer.insert("num_hidden_layers".into(), layers.into());
    layer.insert("layer_types".into(), vec!["full_attention"; layers as usize].into());
    layer.insert("tie_word_embeddings".into(), false.into());
    let verifier = target.map_or_else(
        || json!({"name_or_path": null, "architectures": []}),
        |target| json!({"name_or_path": target.name(), "architectures": target.architectures()}),
    );
    let proposal = json!({
        "proposal_type": "greedy", "speculative_tokens": drafter.kind.draft_len(), "verifier_accept_k": 1, "accept_tolerance": 0.0,
    });
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| map.insert(key.into(), value);
    put("architectures", json!([class]));
    put("speculators_model_type", model_type.into());
    put("speculators_version", VERSION.into());
    put("transformer_layer_config", layer.into());
    put("tie_word_embeddings", false.into());
    put(
        "speculators_config",
        json!({
            "algorithm": model_type, "proposal_methods": [proposal], "default_proposal_method": "greedy", "verifier": verifier,
        }),
    );
    if let Some(taps) = taps {
        put("draft_vocab_size", drafter.draft_vocab_size.into());
        put(taps, drafter.aux_layer_ids().into());
    }
    // speculators ignores these keys. With them, the conversion back needs no guesses.
    if let Some(layers) = drafter.num_target_layers {
        put("num_target_layers", layers.into());
    }
    map.extend(keys);
    map.extend(drafter.informative_keys.clone());
    map
}
