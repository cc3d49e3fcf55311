//! Checkpoints of Eagle3 in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, Drafter, Engine, EngineLayout, EngineSupport, ExternalClass,
    Family, Fields, GgufParts, GgufValue, Incompatibility, KindSettings, Reader, Settings, Shapes,
    Speculators, keys, taps,
};
use deepspec_core::Tap;
use serde_json::{Map, Value, json};

use super::model::Eagle3Config;
use crate::draft_model::DrafterConfig;

/// How Eagle3 is read.
pub static READER: Reader = Reader {
    class: Eagle3Config::CLASS,
    keys: &["ttt_length", "draft_num_hidden_layers"],
    reference: read,
    model_types: &["eagle3"],
    speculators,
    classes: &[ExternalClass {
        name: SPECFORGE,
        tools: "SpecForge",
        read: |fields, _, families| specforge(fields, families),
    }],
};

/// SpecForge's class.
const SPECFORGE: &str = "LlamaForCausalLMEagle3";

/// SpecForge's key for the tapped layers.
const TAPS: &str = "eagle_aux_hidden_state_layer_ids";

/// Norms that other Eagle3 have, and this one has not.
const FOREIGN_NORMS: [&str; 4] = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"];

/// Of a class that knows Llama's layers only.
const WITHOUT_NORMS: &str =
    "has no norms on queries and keys, and its loader would skip these weights silently";

/// Eagle3's own settings as checkpoints say them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Eagle3Layout {
    /// Drafted tokens.
    steps: u64,
}

fn read(fields: &Fields, _: &Decoder) -> Result<Settings, CheckpointError> {
    Ok(Arc::new(Eagle3Layout { steps: fields.required_size("ttt_length")? }))
}

fn speculators(fields: &Fields, decoder: &mut Decoder) -> Result<Settings, CheckpointError> {
    let mut stops = |key: &str, reason: &str| {
        decoder.incompatibilities.push(Incompatibility { key: key.into(), reason: reason.into() })
    };
    for flag in FOREIGN_NORMS {
        if fields.flag(flag)?.unwrap_or(false) {
            stops(flag, "a norm that our Eagle3 does not have");
        }
    }
    // Drafted tokens of the first proposal method.
    let outer = fields.required_object("speculators_config")?;
    let methods = outer.map.get("proposal_methods").and_then(Value::as_array);
    let first = methods.and_then(|methods| methods.first()).and_then(Value::as_object);
    let tokens = first.and_then(|method| method.get("speculative_tokens")).and_then(Value::as_u64);
    let tokens = tokens.filter(|tokens| (1..1 << 31).contains(tokens));
    Ok(Arc::new(Eagle3Layout { steps: outer.required("proposal_methods", tokens)? }))
}

/// SpecForge's, which SGLang loads.
fn specforge(fields: &Fields, families: &[Family]) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let mut decoder =
        Decoder::read(fields, &["eagle_config", "draft_vocab_size", "target_hidden_size"], families)?;
    let mut stops = |key: &str, reason: String| {
        decoder.incompatibilities.push(Incompatibility { key: key.into(), reason })
    };
    for flag in FOREIGN_NORMS {
        if fields.flag(flag)?.unwrap_or(false) {
            stops(flag, "a norm that our Eagle3 does not have".into());
        }
    }
    let inner = fields.object("eagle_config")?;
    let found = match &inner {
        // Outputs of layers, counted from 0: SGLang captures the inputs of the layers behind them.
        Some(inner) if inner.map.contains_key(TAPS) => taps(inner, TAPS, -1)?,
        _ => {
            stops("eagle_config", format!("`{TAPS}` is missing: which layers it taps is not said"));
            vec![]
        }
    };
    // Null where head and vocabulary are the target's.
    let said = fields.map.get("draft_vocab_size").filter(|size| !size.is_null());
    let pruned = said.and_then(Value::as_u64).filter(|&size| size != decoder.vocab_size);
    if let Some(size) = pruned {
        let vocab = decoder.vocab_size;
        let reason = format!(
            "the vocabulary is pruned to {size} of {vocab} tokens (t2d, d2t); other layouts have only whole ones"
        );
        stops("draft_vocab_size", reason);
    }
    // The config does not tell how far it drafts.
    let kind = Arc::new(Eagle3Layout { steps: fields.size("ttt_length")?.unwrap_or(7) });
    let draft_vocab_size = pruned.unwrap_or(decoder.vocab_size);
    let drafter = decoder.drafter(fields, SPECFORGE, found, kind)?;
    Ok((CheckpointFormat::Specforge, Drafter { draft_vocab_size, ..drafter }))
}

impl KindSettings for Eagle3Layout {
    fn name(&self) -> &'static str {
        "eagle3"
    }

    fn title(&self) -> &'static str {
        "Eagle3"
    }

    fn drafted(&self) -> u64 {
        self.steps
    }

    fn method(&self) -> &'static str {
        "eagle3"
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![("drafts", format!("{} tokens, one after the other", self.steps))]
    }

    fn to_json(&self) -> Value {
        json!({"eagle3": {"steps": self.steps}})
    }

    fn has_layers_of(&self, family: Family) -> bool {
        family.pre_norm
    }

    fn layer_inputs(&self) -> usize {
        2
    }

    fn tensors(&self, drafter: &Drafter, shapes: &mut Shapes) {
        let norm = |layer| (format!("layers.{layer}.hidden_norm.weight"), vec![drafter.hidden_size as usize]);
        shapes.extend((0..drafter.layers).map(norm));
    }

    fn refusal(&self, drafter: &Drafter, to: CheckpointFormat) -> Option<String> {
        if drafter.layers > 1 {
            let layers = drafter.layers;
            return Some(format!(
                "it has {layers} layers; ours all read [embedding; state], those of other tools only the first"
            ));
        }
        match to {
            CheckpointFormat::Reference | CheckpointFormat::Speculators => None,
            CheckpointFormat::Specforge if drafter.family.qk_norm => {
                Some(format!("{SPECFORGE} {WITHOUT_NORMS}"))
            }
            CheckpointFormat::Specforge if drafter.taps.len() != 3 => {
                Some(format!("{SPECFORGE} taps 3 layers, this one {}", drafter.taps.len()))
            }
            CheckpointFormat::Specforge => None,
            CheckpointFormat::Zlab | CheckpointFormat::Modelopt => {
                Some("this dialect has no Eagle3 of ours".into())
            }
        }
    }

    fn reference(&self, drafter: &Drafter) -> (&'static str, Map<String, Value>) {
        let layers = ("draft_num_hidden_layers", json!(drafter.layers));
        (READER.class, keys([("ttt_length", json!(self.steps)), layers]))
    }

    fn speculators(&self) -> Speculators {
        Speculators {
            model_type: "eagle3",
            class: "Eagle3Speculator",
            taps: TAPS,
            keys: keys(FOREIGN_NORMS.map(|flag| (flag, json!(false)))),
        }
    }

    fn renames(&self, dialect: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        match dialect {
            CheckpointFormat::Specforge => &[("midlayer.", "layers.0.")],
            _ => &[],
        }
    }

    fn own_config(
        &self,
        drafter: &Drafter,
        dialect: CheckpointFormat,
        flat: &Map<String, Value>,
    ) -> Option<Map<String, Value>> {
        if dialect != CheckpointFormat::Specforge {
            return None;
        }
        let mut map = flat.clone();
        map.remove("layer_types");
        map.extend(keys([
            ("architectures", json!([SPECFORGE])),
            ("ttt_length", json!(self.steps)),
            ("target_hidden_size", json!(drafter.hidden_size)),
            // The whole vocabulary, and the target's head.
            ("draft_vocab_size", Value::Null),
            ("eagle_config", json!({"use_aux_hidden_state": true, TAPS: Tap::layer_ids(&drafter.taps)})),
        ]));
        Some(map)
    }

    fn engine_layout(&self, engine: Engine, drafter: &Drafter) -> Result<EngineLayout, String> {
        let dialect = match engine {
            Engine::Vllm => CheckpointFormat::Speculators,
            Engine::Sglang => CheckpointFormat::Specforge,
        };
        let stops = self.refusal(drafter, dialect);
        stops.map_or(Ok(EngineLayout::Format(dialect)), |reason| {
            Err(format!("{} loads Eagle3 as {dialect} writes it: {reason}", engine.title()))
        })
    }

    fn sglang_arguments(&self) -> String {
        // A chain: one candidate a step, and the token that is verified with them.
        format!(
            " --speculative-num-steps {} --speculative-eagle-topk 1 --speculative-num-draft-tokens {}",
            self.steps,
            self.steps + 1
        )
    }

    fn gguf(&self, drafter: &Drafter) -> Result<GgufParts, String> {
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

    fn vllm(&self, dialect: CheckpointFormat) -> EngineSupport {
        match dialect {
            CheckpointFormat::Reference => {
                EngineSupport::read(false, "the class is not registered; convert to vllm")
            }
            CheckpointFormat::Speculators => EngineSupport::tried(true, "method eagle3"),
            CheckpointFormat::Specforge | CheckpointFormat::Zlab | CheckpointFormat::Modelopt => {
                EngineSupport::read(true, "method eagle3")
            }
        }
    }

    fn sglang(&self, dialect: CheckpointFormat) -> EngineSupport {
        match dialect {
            CheckpointFormat::Speculators => EngineSupport::read(
                false,
                "speculators_model_type was refused when read (issues 30982, 34734)",
            ),
            CheckpointFormat::Reference => EngineSupport::read(
                false,
                "it loads Eagle3 as SpecForge writes it, without norms on queries and keys",
            ),
            CheckpointFormat::Specforge | CheckpointFormat::Zlab | CheckpointFormat::Modelopt => {
                EngineSupport::read(true, "--speculative-algorithm EAGLE3")
            }
        }
    }
}
