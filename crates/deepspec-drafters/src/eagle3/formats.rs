//! Checkpoints of Eagle3 in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, Drafter, EMBEDDING_LAYER_ID, Engine, EngineSupport,
    ExternalClass, Family, Fields, GgufParts, GgufValue, Incompatibility, KindSettings, Reader, Settings,
    Speculators, TensorShapes, json_map, read_layer_ids, read_speculative_tokens,
};
use deepspec_core::Tap;
use serde_json::{Map, Value, json};

use super::model::Eagle3Settings;
use crate::draft_model::DrafterSettings as _;

/// Reads checkpoints of Eagle3 in all layouts.
pub static READER: Reader = Reader {
    class: Eagle3Settings::CLASS,
    keys: &["ttt_length", "draft_num_hidden_layers"],
    reference: |fields, _| Ok(Arc::new(Eagle3Settings::read(fields)?)),
    model_types: &["eagle3"],
    speculators: read_speculators,
    classes: &[ExternalClass {
        name: SPECFORGE_CLASS,
        tools: "SpecForge",
        read: |fields, _, families| read_specforge(fields, families),
    }],
};

/// SpecForge's class.
const SPECFORGE_CLASS: &str = "LlamaForCausalLMEagle3";

/// SpecForge's key of the target layers whose hidden states are captured.
const TAPS_KEY: &str = "eagle_aux_hidden_state_layer_ids";

/// Keys of norms that other Eagle3 implementations have and DeepSpec lacks.
const UNSUPPORTED_NORM_KEYS: [&str; 4] = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"];

/// Why a class with Llama layers cannot load layers that have norms on queries and keys.
const NO_QK_NORM: &str = "has no norms on queries and keys, and its loader would skip these weights silently";

fn settings_with_steps(steps: u64) -> Settings {
    Arc::new(Eagle3Settings { ttt_length: steps as usize, ..Eagle3Settings::default() })
}

fn read_speculators(fields: &Fields, decoder: &mut Decoder) -> Result<Settings, CheckpointError> {
    note_unsupported_norms(fields, decoder)?;
    Ok(settings_with_steps(read_speculative_tokens(fields)?))
}

/// Records each norm that DeepSpec's Eagle3 lacks as an incompatibility.
fn note_unsupported_norms(fields: &Fields, decoder: &mut Decoder) -> Result<(), CheckpointError> {
    for key in UNSUPPORTED_NORM_KEYS {
        if fields.flag(key)?.unwrap_or(false) {
            let reason = "a norm that our Eagle3 does not have".into();
            decoder.incompatibilities.push(Incompatibility { key: key.into(), reason });
        }
    }
    Ok(())
}

/// Reads SpecForge's layout, which SGLang loads too.
fn read_specforge(fields: &Fields, known: &[Family]) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let mut decoder =
        Decoder::read(fields, &["eagle_config", "draft_vocab_size", "target_hidden_size"], known)?;
    note_unsupported_norms(fields, &mut decoder)?;
    let mut incompatible = |key: &str, reason: String| {
        decoder.incompatibilities.push(Incompatibility { key: key.into(), reason })
    };
    let inner = fields.object("eagle_config")?;
    let taps = match &inner {
        // The ids name layer outputs, counted from 0.
        Some(inner) if inner.map.contains_key(TAPS_KEY) => {
            read_layer_ids(inner, TAPS_KEY, EMBEDDING_LAYER_ID)?
        }
        _ => {
            let reason = format!("`{TAPS_KEY}` is missing: which layers it taps is not said");
            incompatible("eagle_config", reason);
            vec![]
        }
    };
    // Null if the drafter has the target's vocabulary.
    let draft_vocab_size = fields.map.get("draft_vocab_size").filter(|size| !size.is_null());
    let pruned = draft_vocab_size.and_then(Value::as_u64).filter(|&size| size != decoder.vocab_size);
    if let Some(size) = pruned {
        let vocab = decoder.vocab_size;
        let reason = format!(
            "the vocabulary is pruned to {size} of {vocab} tokens (t2d, d2t); other layouts have only whole ones"
        );
        incompatible("draft_vocab_size", reason);
    }
    // SpecForge's config has no number of drafted tokens.
    let kind = settings_with_steps(fields.size("ttt_length")?.unwrap_or(7));
    let draft_vocab_size = pruned.unwrap_or(decoder.vocab_size);
    let drafter = decoder.into_drafter(fields, SPECFORGE_CLASS, taps, kind)?;
    Ok((CheckpointFormat::Specforge, Drafter { draft_vocab_size, ..drafter }))
}

impl KindSettings for Eagle3Settings {
    fn name(&self) -> &'static str {
        "eagle3"
    }

    fn title(&self) -> &'static str {
        "Eagle3"
    }

    fn draft_len(&self) -> u64 {
        self.ttt_length as u64
    }

    fn method(&self) -> &'static str {
        "eagle3"
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![("drafts", format!("{} tokens, one after the other", self.ttt_length))]
    }

    fn to_json(&self) -> Value {
        json!({"eagle3": {"steps": self.ttt_length}})
    }

    fn has_layers_of(&self, family: Family) -> bool {
        family.pre_norm
    }

    fn layer_inputs(&self) -> usize {
        2
    }

    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let norm = |layer| (format!("layers.{layer}.hidden_norm.weight"), vec![drafter.hidden_size as usize]);
        shapes.extend((0..drafter.layers).map(norm));
    }

    fn refusal(&self, drafter: &Drafter, to: CheckpointFormat) -> Option<String> {
        if drafter.layers > 1 {
            let layers = drafter.layers;
            return Some(format!(
                "it has {layers} layers, which all read [embedding; state]; in other tools' Eagle3 only the first layer does"
            ));
        }
        match to {
            CheckpointFormat::Reference | CheckpointFormat::Speculators => None,
            CheckpointFormat::Specforge if drafter.family.qk_norm => {
                Some(format!("{SPECFORGE_CLASS} {NO_QK_NORM}"))
            }
            CheckpointFormat::Specforge if drafter.taps.len() != 3 => {
                Some(format!("{SPECFORGE_CLASS} taps 3 layers, this one {}", drafter.taps.len()))
            }
            CheckpointFormat::Specforge => None,
            CheckpointFormat::Zlab | CheckpointFormat::Modelopt => {
                Some("DeepSpec cannot write Eagle3 in this format".into())
            }
        }
    }

    fn reference_config(&self, drafter: &Drafter) -> (&'static str, Map<String, Value>) {
        let layers = ("draft_num_hidden_layers", json!(drafter.layers));
        (READER.class, json_map([("ttt_length", json!(self.ttt_length)), layers]))
    }

    fn speculators_config(&self) -> Speculators {
        Speculators {
            model_type: "eagle3",
            class: "Eagle3Speculator",
            taps: Some(TAPS_KEY),
            keys: json_map(UNSUPPORTED_NORM_KEYS.map(|flag| (flag, json!(false)))),
        }
    }

    fn renames(&self, format: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        match format {
            CheckpointFormat::Specforge => &[("midlayer.", "layers.0.")],
            _ => &[],
        }
    }

    fn config_override(
        &self,
        drafter: &Drafter,
        format: CheckpointFormat,
        flat: &Map<String, Value>,
    ) -> Option<Map<String, Value>> {
        if format != CheckpointFormat::Specforge {
            return None;
        }
        let mut map = flat.clone();
        map.remove("layer_types");
        map.extend(json_map([
            ("architectures", json!([SPECFORGE_CLASS])),
            ("ttt_length", json!(self.ttt_length)),
            ("target_hidden_size", json!(drafter.hidden_size)),
            // Null: the drafter has the target's vocabulary and head.
            ("draft_vocab_size", Value::Null),
            ("eagle_config", json!({"use_aux_hidden_state": true, TAPS_KEY: Tap::layer_ids(&drafter.taps)})),
        ]));
        Some(map)
    }

    fn engine_format(&self, engine: Engine, drafter: &Drafter) -> Result<CheckpointFormat, String> {
        let format = match engine {
            Engine::Sglang => CheckpointFormat::Specforge,
            Engine::Vllm | Engine::LlamaCpp => CheckpointFormat::Speculators,
        };
        let refusal = self.refusal(drafter, format);
        refusal.map_or(Ok(format), |reason| {
            Err(format!("{engine} loads Eagle3 as {format} writes it: {reason}"))
        })
    }

    fn sglang_arguments(&self) -> String {
        // One candidate per step. The verified tokens are the drafts and the anchor.
        format!(
            " --speculative-num-steps {} --speculative-eagle-topk 1 --speculative-num-draft-tokens {}",
            self.ttt_length,
            self.ttt_length + 1
        )
    }

    fn gguf_parts(&self, drafter: &Drafter) -> Result<GgufParts, String> {
        if drafter.family.qk_norm {
            return Err(format!(
                "llama.cpp's Eagle3 has no norms on queries and keys, which {} layers have: it serves Eagle3 with Llama layers",
                drafter.family
            ));
        }
        if drafter.layers != 1 || drafter.taps.len() != 3 {
            return Err(format!(
                "llama.cpp's Eagle3 has 1 layer and 3 taps, and not {} and {}",
                drafter.layers,
                drafter.taps.len()
            ));
        }
        Ok(GgufParts {
            architecture: "eagle3",
            keys: vec![("target_hidden_size", GgufValue::U32(drafter.hidden_size as u32))],
            layer_names: vec![("hidden_norm.weight", "attn_norm_2.weight")],
            interleaved_rope: true,
            ..GgufParts::default()
        })
    }

    fn engine_support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport {
        use CheckpointFormat::{Modelopt, Reference, Specforge, Speculators, Zlab};
        use EngineSupport as S;
        match engine {
            Engine::Sglang => match format {
                Speculators => {
                    S::not_loaded("speculators_model_type was refused when read (issues 30982, 34734)")
                }
                Reference => {
                    S::not_loaded("it loads Eagle3 as SpecForge writes it, without norms on queries and keys")
                }
                Zlab | Specforge | Modelopt => S::loads_untested("--speculative-algorithm EAGLE3"),
            },
            Engine::Vllm | Engine::LlamaCpp => match format {
                Speculators => S::loads_as_tested("method eagle3"),
                Reference => S::not_loaded("the class is not registered; convert to vllm"),
                Zlab | Specforge | Modelopt => S::loads_untested("method eagle3"),
            },
        }
    }
}
