//! Reads and writes a drafter's config.json in each format.

mod block_options;
mod common;
mod dflash_config;
mod reader;
mod reference;
mod speculators;
mod windows;

pub use block_options::{CAUSAL_KEYS, UnreadOptions, read_attention_sinks, read_causal};
pub use common::{Decoder, EMBEDDING_LAYER_ID, read_draft_vocab_size, read_layer_ids};
pub use dflash_config::{DflashConfig, find_unsupported_setting};
pub use reader::{ExternalClass, KnownDrafters, Reader};
pub use speculators::read_speculative_tokens;
pub use windows::{SWA_WINDOW_SIZE, USE_SWA, has_windows, mark_windows, resolve_windows, shared_window};

use std::path::Path;

use block_options::INNER_KEY;
use serde_json::{Map, Value};

use crate::drafter::Drafter;
use crate::fields::Fields;
use crate::rope::RopeParameters;
use crate::shapes::ATTENTION_SINK_BIAS;
use crate::{CheckpointError, CheckpointFormat, Target, Tensors};

/// Detects the format of a config and its tensors, and reads the drafter if its kind is known.
///
/// # Errors
/// Fails if the format or kind is unknown, or if a key is missing or wrong.
pub fn read(
    path: &Path,
    map: &Map<String, Value>,
    tensors: &Tensors,
    known: KnownDrafters,
) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let KnownDrafters { kinds, families } = known;
    let fields = Fields::new(path, map);
    if map.contains_key("speculators_model_type") || map.contains_key("speculators_config") {
        return Ok((CheckpointFormat::Speculators, speculators::read(&fields, tensors, known)?));
    }
    let architecture = fields.architecture()?;
    if let Some(found) = architecture {
        let mut foreign = kinds.iter().flat_map(|kind| kind.classes);
        // The authors of xPress named their class as the reference would, and took the config of z-lab.
        if map.get(INNER_KEY).is_some_and(Value::is_object)
            && let Some(class) = foreign.clone().find(|class| class.name == found)
        {
            return (class.read)(&fields, tensors, families);
        }
        let of_family = |kind: &&&Reader| {
            let prefix = found.strip_suffix(kind.class);
            prefix.is_some_and(|prefix| families.iter().any(|family| family.prefix == prefix))
        };
        if let Some(kind) = kinds.iter().find(of_family) {
            return Ok((CheckpointFormat::Reference, reference::read(&fields, found, kind, known)?));
        }
        let is_language_model = found.ends_with("ForCausalLM");
        let has_tensors_of = |class: &ExternalClass| {
            let prefix = class.tensor_prefix.filter(|_| is_language_model);
            prefix.is_some_and(|prefix| tensors.iter().any(|(name, _)| name.starts_with(prefix)))
        };
        if let Some(class) = foreign.find(|class| class.name == found || has_tensors_of(class)) {
            return (class.read)(&fields, tensors, families);
        }
    }
    if let Some(problem) = unsupported_layout_message(map, tensors) {
        return Err(fields.error("architectures", problem));
    }
    let found = fields.required("architectures", architecture)?;
    let listed = |names: Vec<String>| names.join(", ");
    let prefixes = listed(families.iter().map(|family| family.prefix.into()).collect());
    let own = listed(kinds.iter().map(|kind| kind.class.into()).collect());
    let foreign = kinds.iter().flat_map(|kind| kind.classes);
    let foreign = listed(foreign.map(|class| format!("{} ({})", class.name, class.tools)).collect());
    let problem = format!(
        "\"{found}\" is no drafter of a known format; expected one of {own} behind one of {prefixes}, as in Qwen3DSparkModel \
         (reference), one of {foreign}, or a speculators_model_type"
    );
    Err(fields.error("architectures", problem))
}

/// Class of DeepSeek-V4.
pub const DEEPSEEK_V4: &str = "DeepseekV4ForCausalLM";
/// Config key that a target has if its checkpoint holds a DSpark drafter.
const BUNDLED_BLOCK_SIZE: &str = "dspark_block_size";

fn class(map: &Map<String, Value>) -> Option<&str> {
    map.get("architectures")?.get(0)?.as_str()
}

/// Whether a config is that of a DeepSeek-V4 whose checkpoint holds its drafter. Folders of other drafters may have `dspark_*` keys
/// for engines.
pub fn is_target_with_drafter(map: &Map<String, Value>) -> bool {
    class(map) == Some(DEEPSEEK_V4) && map.contains_key(BUNDLED_BLOCK_SIZE)
}

/// Whether the config is that of a language model with keys of a DSpark drafter, as in DeepSeek-V4 and its successors.
pub fn names_bundled_drafter(map: &Map<String, Value>) -> bool {
    let nested = map.get("text_config").and_then(Value::as_object);
    class(map).is_some_and(is_language_model) && (has_dspark_keys(map) || nested.is_some_and(has_dspark_keys))
}

fn has_dspark_keys(map: &Map<String, Value>) -> bool {
    map.keys().any(|key| key.starts_with("dspark_"))
}

fn is_language_model(class: &str) -> bool {
    ["ForCausalLM", "ForConditionalGeneration"].iter().any(|end| class.ends_with(end))
}

/// Refuses language models that hold a DSpark drafter of a layout that is not read, among them DeepSeek-V4.1.
///
/// # Errors
/// If the config is that of such a model.
pub fn refuse_unread_target(fields: &Fields) -> Result<(), CheckpointError> {
    let map = fields.map;
    let found = class(map).unwrap_or_default();
    let model_type = map.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let nested = map.get("text_config").and_then(Value::as_object);
    let is_nested = nested.is_some_and(has_dspark_keys);
    let v4_1 = [
        ("architectures", found.starts_with("DeepseekV41")),
        ("model_type", model_type.starts_with("deepseek_v41")),
        ("text_config", found.starts_with("DeepseekV4") && is_nested),
    ];
    if let Some((key, _)) = v4_1.into_iter().find(|(_, is_sign)| *is_sign) {
        let problem = "DeepSeek-V4.1's drafter is not read: its hyper-connections sum streams later";
        return Err(fields.error(key, problem));
    }
    let bundles = is_nested || map.contains_key(BUNDLED_BLOCK_SIZE) && found != DEEPSEEK_V4;
    if bundles && is_language_model(found) {
        let problem = format!("the drafter lies within {found}; it is read within DeepSeek-V4 only");
        return Err(fields.error(BUNDLED_BLOCK_SIZE, problem));
    }
    Ok(())
}

/// A message about a drafter format that is recognised but not supported; None for other
/// checkpoints.
pub fn unsupported_layout_message(map: &Map<String, Value>, tensors: &Tensors) -> Option<String> {
    let class =
        map.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str).unwrap_or("no class");
    let has = |part: &str| tensors.iter().any(|(name, _)| name.contains(part));
    if class == "PEagleDraftModel" {
        return Some(format!(
            "{class}: a P-EAGLE as SpecForge writes it, whose config.json has neither mask token nor captured layers; \
             `deepspec-train` with `drafter: {{peagle: …}}` trains one that is read here"
        ));
    }
    let is_own = ["Eagle3Model", "PEagleModel"].iter().any(|own| class.ends_with(own));
    let of_eagle = class.to_ascii_lowercase().contains("eagle") && !is_own;
    // EAGLE-1 and EAGLE-2 name the class of a language model, which has no `fc`; their drafters
    // have no final norm.
    let lacks_norm = tensors.get("norm.weight").is_none();
    if class.ends_with("ForCausalLM") && tensors.get("fc.weight").is_some() && lacks_norm && !has("midlayer.")
    {
        return Some(format!(
            "{class} with `fc.weight`: an EAGLE-1 or EAGLE-2 drafter, which is not read; an engine runs it, and \
             `deepspec-train` with `drafter: {{eagle3: …}}` trains one that is read here"
        ));
    }
    if has("midlayer.") || of_eagle {
        let pruned = map.get("draft_vocab_size").is_some() || has("d2t");
        let vocabulary = if pruned { " with a reduced vocabulary (d2t)" } else { "" };
        return Some(format!(
            "{class}: an EAGLE drafter{vocabulary} of a class that is not read (EAGLE-3 has LlamaForCausalLM or \
             LlamaForCausalLMEagle3); an engine runs it, and \
             `deepspec-train` with `drafter: {{eagle3: …}}` trains one that is read here"
        ));
    }
    if class.contains("Medusa") || tensors.iter().any(|(name, _)| name.starts_with("medusa_head.")) {
        return Some(format!("{class}: Medusa heads, which are no drafter that is read"));
    }
    None
}

/// The config.json of a drafter in a format that can express it.
pub fn config(
    drafter: &Drafter,
    format: CheckpointFormat,
    target: Option<&Target>,
    dtype: &str,
) -> Map<String, Value> {
    let mut map = match format {
        CheckpointFormat::Reference | CheckpointFormat::DeepseekV4 => reference::config_json(drafter),
        CheckpointFormat::Speculators => speculators::config(drafter, target),
        CheckpointFormat::Specforge | CheckpointFormat::Zlab | CheckpointFormat::Modelopt => {
            let flat = common::flat_config(drafter);
            let own = drafter.kind.config_override(drafter, format, &flat);
            own.unwrap_or_else(|| dflash_config::config(drafter, format, flat))
        }
    };
    map.insert("dtype".into(), dtype.into());
    map
}

/// Extends a config in the reference's format so that vLLM, SGLang and llama.cpp's converter read
/// the same settings. Some engines read a key at the top level and others in `dflash_config`, so
/// both have it. Every value is explicit, because the engines' defaults differ. Older versions read
/// the RoPE base at the top level and the scaling in `rope_scaling`.
pub fn add_engine_keys(map: &mut Map<String, Value>, rope: RopeParameters) {
    map.insert("sample_from_anchor".into(), true.into());
    // Without this key, llama.cpp's converter would use a drafter's embedding as its LM head.
    map.insert("has_embed_tokens".into(), false.into());
    map.insert("rope_theta".into(), rope.theta.into());
    map.remove("rope_scaling");
    if rope.scaling.is_some() {
        map.insert("rope_scaling".into(), rope.map.clone().into());
    }
    map.insert("rope_parameters".into(), rope.map.into());
    // Without sample_from_anchor: vLLM 0.32 refuses it in `dflash_config` for DFlash, whatever the
    // class.
    let both = [
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        ATTENTION_SINK_BIAS,
    ];
    let inner: Map<String, Value> =
        both.iter().filter_map(|&key| Some((key.to_string(), map.get(key)?.clone()))).collect();
    map.insert("dflash_config".into(), inner.into());
}
