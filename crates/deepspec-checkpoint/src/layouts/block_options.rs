//! Options of draft blocks that tools store at the top level of a config or in `dflash_config`.

use serde_json::{Map, Value};

use crate::CheckpointError;
use crate::export::Engine;
use crate::fields::Fields;
use crate::shapes::{ADD_SWA_ATTENTION_SINK_BIAS, ATTENTION_SINK_BIAS};

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

/// Why engines would run other blocks, or layers without sinks, for a config. None if an engine reads what the drafter has.
#[derive(Debug, Clone, Copy)]
pub struct UnreadOptions {
    vllm: Option<&'static str>,
    sglang: Option<&'static str>,
}

impl UnreadOptions {
    /// Those of the config `map` of a drafter that has sinks or not.
    pub fn new(map: &Map<String, Value>, has_sinks: bool) -> Self {
        let config =
            BlockConfig { outer: map, inner: map.get(INNER_KEY).and_then(Value::as_object), has_sinks };
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

    /// By vLLM 0.32 (`_dflash_layer_causal` of `qwen3_dflash.py`), in which layers with a window are causal unless a key says otherwise.
    fn unread_by_vllm(&self) -> Option<&'static str> {
        let has_blocks = self.inner.is_some() || self.outer.contains_key("block_size");
        let says_causal = self.outer_flag("is_causal").or(self.inner_flag("causal"));
        let windows = self.layer_types().into_iter().flatten().map(|kind| kind == "sliding_attention");
        let (has_some, lacks_some) =
            windows.fold((false, false), |(has, lacks), window| (has | window, lacks | !window));
        let reads_sinks = match self.inner.is_some_and(|inner| inner.contains_key(ATTENTION_SINK_BIAS)) {
            true => self.inner_flag(ATTENTION_SINK_BIAS),
            false => self.outer_flag(ADD_SWA_ATTENTION_SINK_BIAS),
        };
        match (self.is_causal(), says_causal) {
            (true, None) if !has_some || lacks_some => {
                Some("it reads causal blocks by is_causal and dflash_config.causal only")
            }
            (false, None) if has_blocks && has_some => {
                Some("it takes the blocks of layers that layer_types marks for causal ones")
            }
            _ if self.has_sinks && reads_sinks != Some(true) => Some(
                "it reads attention sinks by dflash_config.attention_sink_bias and add_swa_attention_sink_bias only",
            ),
            _ => None,
        }
    }

    /// By SGLang 0.5.23 (`models/dflash.py` and `dflash_utils.py`).
    fn unread_by_sglang(&self) -> Option<&'static str> {
        if self.is_causal() && !(self.outer_flag("is_causal") == Some(true) && self.layer_types().is_some()) {
            return Some("it reads causal blocks by is_causal beside layer_types only");
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
