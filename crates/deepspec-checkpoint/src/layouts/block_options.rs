//! Options of draft blocks that tools store at the top level of a config or in `dflash_config`.

use serde_json::{Map, Value};

use super::windows::USE_SWA;
use crate::export::Engine;
use crate::fields::Fields;
use crate::shapes::{ADD_SWA_ATTENTION_SINK_BIAS, ATTENTION_SINK_BIAS};
use crate::{CheckpointError, Drafter};

/// Keys by which tools mark causal blocks, at the top level or in `dflash_config`: SpecForge and vLLM, NeMo AutoModel and
/// ModelOpt, JetSpec.
pub const CAUSAL_KEYS: [&str; 3] = ["is_causal", "causal", "causal_head"];

/// Keys by which tools mark attention sinks, at the top level or in `dflash_config`: ModelOpt and vLLM, MiMo's config.
pub const SINK_KEYS: [&str; 2] = [ATTENTION_SINK_BIAS, ADD_SWA_ATTENTION_SINK_BIAS];

/// Key of the object that holds the settings of the drafter.
pub const INNER_KEY: &str = "dflash_config";

/// Whether the blocks of a drafter are causal, by any of [`CAUSAL_KEYS`] at the top level or in `dflash_config`. A config without
/// these keys has blocks whose slots see each other.
///
/// # Errors
/// Fails if a key is neither a flag nor null, or if two keys contradict each other.
pub fn read_causal(fields: &Fields) -> Result<bool, CheckpointError> {
    read_shared_flag(fields, &CAUSAL_KEYS)
}

/// Whether the draft layers have attention sinks. `dflash_config.attention_sink_bias` decides if it is present, as in vLLM, and
/// else any of [`SINK_KEYS`].
///
/// # Errors
/// Fails if a key is neither a flag nor null, or if two keys contradict each other.
pub fn read_attention_sinks(fields: &Fields) -> Result<bool, CheckpointError> {
    if let Some(Value::Object(_)) = fields.map.get(INNER_KEY) {
        let inner = fields.required_object(INNER_KEY)?;
        if inner.map.contains_key(ATTENTION_SINK_BIAS) {
            return Ok(inner.flag(ATTENTION_SINK_BIAS)?.unwrap_or(false));
        }
    }
    read_shared_flag(fields, &SINK_KEYS)
}

/// The reason if an engine takes whole blocks for causal ones, because `layer_types` marks windows.
const MARKED: &str = "it takes the blocks of layers that layer_types marks for causal ones";

/// Why engines would run other blocks, or layers without sinks, for a config. None if an engine reads what the drafter has.
#[derive(Debug, Clone, Copy)]
pub struct UnreadOptions {
    vllm: Option<&'static str>,
    sglang: Option<&'static str>,
}

impl UnreadOptions {
    /// Compares the config `map` of `drafter` with the keys that engines read.
    pub fn new(map: &Map<String, Value>, drafter: &Drafter) -> Self {
        let config = BlockConfig {
            outer: map,
            inner: map.get(INNER_KEY).and_then(Value::as_object),
            has_sinks: drafter.has_attention_sinks(),
            has_own_windows: drafter.has_windows()
                && drafter.incompatibilities.iter().all(|found| found.key != "layer_types"),
        };
        Self { vllm: config.unread_by_vllm(), sglang: config.unread_by_sglang() }
    }

    /// The reason of this engine.
    pub fn of(self, engine: Engine) -> Option<&'static str> {
        match engine {
            Engine::Vllm => self.vllm,
            Engine::Sglang => self.sglang,
            Engine::LlamaCpp => None,
        }
    }
}

/// The keys of a drafter's config, as engines read them.
struct BlockConfig<'a> {
    outer: &'a Map<String, Value>,
    inner: Option<&'a Map<String, Value>>,
    has_sinks: bool,
    /// Whether marked layers mean here what the drafter was trained with. Other tools may have trained causal blocks in them.
    has_own_windows: bool,
}

impl BlockConfig<'_> {
    fn outer_flag(&self, key: &str) -> Option<bool> {
        self.outer.get(key)?.as_bool()
    }

    fn inner_flag(&self, key: &str) -> Option<bool> {
        self.inner?.get(key)?.as_bool()
    }

    fn is_causal(&self) -> bool {
        CAUSAL_KEYS.into_iter().any(|key| [self.outer_flag(key), self.inner_flag(key)].contains(&Some(true)))
    }

    fn layer_types(&self) -> Option<&Vec<Value>> {
        self.outer.get("layer_types")?.as_array()
    }

    /// Whether engines take some blocks for causal ones, because `layer_types` marks windows and no key says otherwise.
    fn marks_whole_blocks(&self, says_causal: Option<bool>) -> bool {
        self.has_own_windows && !self.is_causal() && says_causal.is_none() && self.marks().contains(&true)
    }

    /// Whether `layer_types` marks each layer.
    fn marks(&self) -> Vec<bool> {
        self.layer_types().into_iter().flatten().map(|kind| kind == "sliding_attention").collect()
    }

    /// By vLLM 0.32 (`_dflash_layer_causal` of `qwen3_dflash.py`), in which layers with a window are causal unless a key says otherwise.
    fn unread_by_vllm(&self) -> Option<&'static str> {
        let says_causal = self.outer_flag("is_causal").or(self.inner_flag("causal"));
        let marks = self.marks();
        let marks_all = !marks.is_empty() && !marks.contains(&false);
        if self.is_causal() && says_causal.is_none() && !marks_all {
            return Some("it reads causal blocks by is_causal and dflash_config.causal only");
        }
        if self.marks_whole_blocks(says_causal) {
            return Some(MARKED);
        }
        let reads_sinks = match self.inner.is_some_and(|inner| inner.contains_key(ATTENTION_SINK_BIAS)) {
            true => self.inner_flag(ATTENTION_SINK_BIAS),
            false => self.outer_flag(ADD_SWA_ATTENTION_SINK_BIAS),
        };
        (self.has_sinks && reads_sinks != Some(true)).then_some(
            "it reads attention sinks by dflash_config.attention_sink_bias and add_swa_attention_sink_bias only",
        )
    }

    /// By SGLang 0.5.23 (`models/dflash.py` and `dflash_utils.py`).
    fn unread_by_sglang(&self) -> Option<&'static str> {
        let says_causal = self.outer_flag("is_causal");
        if self.inner_flag(USE_SWA) == Some(true) {
            return Some("it does not read use_swa");
        }
        if self.is_causal() && !(says_causal == Some(true) && self.layer_types().is_some()) {
            return Some("it reads causal blocks by is_causal beside layer_types only");
        }
        if self.marks_whole_blocks(says_causal) {
            return Some(MARKED);
        }
        (self.has_sinks && self.inner_flag(ATTENTION_SINK_BIAS) != Some(true))
            .then_some("it reads attention sinks by dflash_config.attention_sink_bias only")
    }
}

/// The flag that any of `keys` sets, at the top level or in `dflash_config`; false without these keys.
fn read_shared_flag(fields: &Fields, keys: &[&'static str]) -> Result<bool, CheckpointError> {
    let inner = match fields.map.get(INNER_KEY) {
        Some(Value::Object(_)) => Some(fields.required_object(INNER_KEY)?),
        _ => None,
    };
    let mut found: Option<(&str, bool)> = None;
    for place in [Some(fields), inner.as_ref()].into_iter().flatten() {
        for &key in keys {
            let Some(value) = place.flag(key)? else { continue };
            match found {
                Some((other, before)) if before != value => {
                    return Err(place.error(key, format!("{value}, but {other} is {before}")));
                }
                _ => found = Some((key, value)),
            }
        }
    }
    Ok(found.is_some_and(|(_, value)| value))
}
