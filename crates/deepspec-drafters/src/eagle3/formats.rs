//! Checkpoints of Eagle3 in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, Drafter, Engine, EngineSupport, ExternalClass, Family,
    Fields, GgufParts, GgufValue, Incompatibility, KindSettings, Reader, Settings, Shapes, Speculators, keys,
    taps,
};
use deepspec_core::Tap;
use serde_json::{Map, Value, json};

use super::model::Eagle3Settings;
use crate::draft_model::DrafterSettings as _;

/// How Eagle3 is read.
pub static READER: Reader = Reader {
    class: Eagle3Settings::CLASS,
    keys: &["ttt_length", "draft_num_hidden_layers"],
    reference: |fields, _| Ok(Arc::new(Eagle3Settings::read(fields)?)),
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

/// Defect of a class that knows Llama's layers only.
const WITHOUT_NORMS: &str =
    "has no norms on queries and keys, and its loader would skip these weights silently";

fn settings(steps: u64) -> Settings {
    Arc::new(Eagle3Settings { ttt_length: steps as usize, ..Eagle3Settings::default() })
}

fn speculators(fields: &Fields, decoder: &mut Decoder) -> Result<Settings, CheckpointError> {
    refuse_norms(fields, decoder)?;
    // Drafted tokens of the first proposal method.
    let outer = fields.required_object("speculators_config")?;
    let methods = outer.map.get("proposal_methods").and_then(Value::as_array);
    let first = methods.and_then(|methods| methods.first()).and_then(Value::as_object);
    let tokens = first.and_then(|method| method.get("speculative_tokens")).and_then(Value::as_u64);
    let tokens = tokens.filter(|tokens| (1..1 << 31).contains(tokens));
    Ok(settings(outer.required("proposal_methods", tokens)?))
}

/// Notes norms that this Eagle3 has not.
fn refuse_norms(fields: &Fields, decoder: &mut Decoder) -> Result<(), CheckpointError> {
    for key in FOREIGN_NORMS {
        if fields.flag(key)?.unwrap_or(false) {
            let reason = "a norm that our Eagle3 does not have".into();
            decoder.incompatibilities.push(Incompatibility { key: key.into(), reason });
        }
    }
    Ok(())
}

/// SpecForge's, which SGLang loads.
fn specforge(fields: &Fields, families: &[Family]) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let mut decoder =
        Decoder::read(fields, &["eagle_config", "draft_vocab_size", "target_hidden_size"], families)?;
    refuse_norms(fields, &mut decoder)?;
    let mut stops = |key: &str, reason: String| {
        decoder.incompatibilities.push(Incompatibility { key: key.into(), reason })
    };
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
    let kind = settings(fields.size("ttt_length")?.unwrap_or(7));
    let draft_vocab_size = pruned.unwrap_or(decoder.vocab_size);
    let drafter = decoder.drafter(fields, SPECFORGE, found, kind)?;
    Ok((CheckpointFormat::Specforge, Drafter { draft_vocab_size, ..drafter }))
}

impl KindSettings for Eagle3Settings {
    fn name(&self) -> &'static str {
        "eagle3"
    }

    fn title(&self) -> &'static str {
        "Eagle3"
    }

    fn drafted(&self) -> u64 {
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
        (READER.class, keys([("ttt_length", json!(self.ttt_length)), layers]))
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
            ("ttt_length", json!(self.ttt_length)),
            ("target_hidden_size", json!(drafter.hidden_size)),
            // The whole vocabulary, and the target's head.
            ("draft_vocab_size", Value::Null),
            ("eagle_config", json!({"use_aux_hidden_state": true, TAPS: Tap::layer_ids(&drafter.taps)})),
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
        // A chain: one candidate a step, and the token that is verified with them.
        format!(
            " --speculative-num-steps {} --speculative-eagle-topk 1 --speculative-num-draft-tokens {}",
            self.ttt_length,
            self.ttt_length + 1
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

    fn support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport {
        use CheckpointFormat::{Reference, Speculators};
        use EngineSupport as S;
        match (format, engine) {
            (Speculators, Engine::Sglang) => {
                S::no("speculators_model_type was refused when read (issues 30982, 34734)")
            }
            (Reference, Engine::Sglang) => {
                S::no("it loads Eagle3 as SpecForge writes it, without norms on queries and keys")
            }
            (_, Engine::Sglang) => S::yes("--speculative-algorithm EAGLE3"),
            (Reference, _) => S::no("the class is not registered; convert to vllm"),
            (Speculators, _) => S::tried("method eagle3"),
            (_, _) => S::yes("method eagle3"),
        }
    }
}
