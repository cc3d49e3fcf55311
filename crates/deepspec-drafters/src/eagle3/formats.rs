//! Checkpoints of Eagle3 in the layouts of other tools.

use std::sync::Arc;

use deepspec_checkpoint::{
    CheckpointError, CheckpointFormat, Decoder, Drafter, EMBEDDING_LAYER_ID, Engine, EngineSupport,
    ExternalClass, Family, Fields, GgufParts, GgufValue, Incompatibility, KindSettings, Reader, Settings,
    Speculators, TensorShapes, json_map, read_draft_vocab_size, read_layer_ids, read_speculative_tokens,
};
use deepspec_core::Tap;
use serde_json::{Map, Value, json};

use super::model::Eagle3Settings;
use crate::draft_model::DrafterSettings as _;
use crate::token_common::{
    Eagle3Norms, TAPS_KEY, add_fusion_norm_shapes, captured_layers, default_taps, write_vocab_and_norms,
};

/// Reads checkpoints of Eagle3 in all layouts.
pub static READER: Reader = Reader {
    class: Eagle3Settings::CLASS,
    keys: KEYS,
    reference: |fields, _| Ok(Arc::new(Eagle3Settings::read(fields)?)),
    model_types: &["eagle3"],
    speculators: read_speculators,
    classes: &[ExternalClass {
        name: SPECFORGE_CLASS,
        tools: "SpecForge",
        read: |fields, _, families| read_specforge(fields, families),
        // EAGLE's own repository names the target's class in config.json.
        tensor_prefix: Some(MIDLAYER),
    }],
};

/// Keys of config.json that only Eagle3 has.
const KEYS: &[&str] = &[
    "ttt_length",
    "draft_num_hidden_layers",
    "draft_vocab_size",
    NORM_BEFORE_RESIDUAL,
    "norm_before_fc",
    FC_NORM,
    "norm_output",
];

/// SpecForge's class.
const SPECFORGE_CLASS: &str = "LlamaForCausalLMEagle3";

/// SpecForge's prefix of the draft layer's tensors.
const MIDLAYER: &str = "midlayer.";

/// Key of the flag whether the first residual is the normed state, in all formats.
const NORM_BEFORE_RESIDUAL: &str = "norm_before_residual";

/// Key of the flag whether each captured hidden state has a norm, in all formats.
const FC_NORM: &str = "fc_norm";

/// Why a class with Llama layers cannot load layers that have norms on queries and keys.
const NO_QK_NORM: &str = "has no norms on queries and keys, and its loader would skip these weights silently";

/// Settings of another tool's checkpoint that drafts `steps` tokens.
fn settings(fields: &Fields, decoder: &Decoder, steps: u64) -> Result<Settings, CheckpointError> {
    let draft_vocab_size = read_draft_vocab_size(fields, decoder.vocab_size)?.map(|size| size as i64);
    let own =
        Eagle3Settings { draft_vocab_size, norms: Eagle3Norms::read(fields)?, ..Eagle3Settings::default() };
    Ok(Arc::new(Eagle3Settings { ttt_length: steps as usize, ..own }))
}

fn read_speculators(fields: &Fields, decoder: &mut Decoder) -> Result<Settings, CheckpointError> {
    settings(fields, decoder, read_speculative_tokens(fields)?)
}

/// Reads SpecForge's layout, which SGLang loads too.
fn read_specforge(fields: &Fields, known: &[Family]) -> Result<(CheckpointFormat, Drafter), CheckpointError> {
    let foreign: Vec<&str> = ["eagle_config", "target_hidden_size"].iter().chain(KEYS).copied().collect();
    let mut decoder = Decoder::read(fields, &foreign, known)?;
    let inner = fields.object("eagle_config")?;
    for (key, value) in inner.iter().flat_map(|inner| inner.map.iter()) {
        let reason = match key.as_str() {
            TAPS_KEY => continue,
            "use_aux_hidden_state" if *value == json!(true) => continue,
            "use_aux_hidden_state" => {
                "the drafter reads the target's final states only, as no Eagle3 here does"
            }
            _ => "this key is unknown",
        };
        decoder.incompatibilities.push(Incompatibility { key: key.clone(), reason: reason.into() });
    }
    let taps = match &inner {
        // The ids name layer outputs, counted from 0.
        Some(inner) if inner.map.contains_key(TAPS_KEY) => {
            read_layer_ids(inner, TAPS_KEY, EMBEDDING_LAYER_ID)?
        }
        // Without ids, engines take the defaults for the target's number of layers.
        _ => vec![],
    };
    // SpecForge's config has no number of drafted tokens.
    let kind = settings(fields, &decoder, fields.size("ttt_length")?.unwrap_or(7))?;
    Ok((CheckpointFormat::Specforge, decoder.into_drafter(fields, SPECFORGE_CLASS, taps, kind)?))
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
        let mut lines = vec![("drafts", format!("{} tokens, one after the other", self.ttt_length))];
        if !self.norms.is_original() {
            lines.push(("norms", self.norms.set_keys()));
        }
        lines
    }

    fn to_json(&self) -> Value {
        json!({"eagle3": {"steps": self.ttt_length, "norms": self.norms}})
    }

    fn has_layers_of(&self, family: Family) -> bool {
        family.pre_norm && !family.may_have_output_gate()
    }

    fn layer_inputs(&self, _layer: u64) -> usize {
        2
    }

    fn default_taps(&self, layers: u64) -> Vec<Tap> {
        default_taps(layers)
    }

    fn fc_inputs(&self, drafter: &Drafter) -> usize {
        captured_layers(drafter)
    }

    fn may_reduce_vocab(&self) -> bool {
        true
    }

    fn add_tensor_shapes(&self, drafter: &Drafter, shapes: &mut TensorShapes) {
        let norm = |layer| (format!("layers.{layer}.hidden_norm.weight"), vec![drafter.hidden_size as usize]);
        shapes.extend((0..drafter.layers).map(norm));
        add_fusion_norm_shapes(self.norms, drafter, shapes);
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
            // SpecForge's class reads fc_norm, too. SGLang's reads also the others but norm_before_residual.
            CheckpointFormat::Specforge if !(Eagle3Norms { fc: false, ..self.norms }).is_original() => Some(
                format!("{SPECFORGE_CLASS} has no further norms but fc_norm ({})", self.norms.set_keys()),
            ),
            CheckpointFormat::Specforge if drafter.taps.len() != 3 => {
                Some(format!("{SPECFORGE_CLASS} taps 3 layers, this one {}", drafter.taps.len()))
            }
            CheckpointFormat::Specforge => None,
            CheckpointFormat::Zlab | CheckpointFormat::Modelopt | CheckpointFormat::DeepseekV4 => {
                Some("DeepSpec cannot write Eagle3 in this format".into())
            }
        }
    }

    fn reference_config(&self, drafter: &Drafter) -> (&'static str, Map<String, Value>) {
        let layers = ("draft_num_hidden_layers", json!(drafter.layers));
        let mut map = json_map([("ttt_length", json!(self.ttt_length)), layers]);
        write_vocab_and_norms(&mut map, self.draft_vocab_size, self.norms);
        (READER.class, map)
    }

    fn speculators_config(&self) -> Option<Speculators> {
        Some(Speculators {
            model_type: "eagle3",
            class: "Eagle3Speculator",
            taps: Some(TAPS_KEY),
            // vLLM takes an absent norm_before_residual for true.
            keys: json_map(self.norms.flags().map(|(key, is_set)| (key, json!(is_set)))),
        })
    }

    fn renames(&self, format: CheckpointFormat) -> &'static [(&'static str, &'static str)] {
        match format {
            CheckpointFormat::Specforge => &[(MIDLAYER, "layers.0.")],
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
        if self.norms.fc {
            map.insert(FC_NORM.into(), json!(true));
        }
        map.extend(json_map([
            ("architectures", json!([SPECFORGE_CLASS])),
            ("ttt_length", json!(self.ttt_length)),
            ("target_hidden_size", json!(drafter.hidden_size)),
            // Null: the drafter has the target's vocabulary and head.
            ("draft_vocab_size", json!(self.draft_vocab_size)),
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
        let Eagle3Norms { before_residual, before_fc, .. } = self.norms;
        let unknown = Eagle3Norms { before_residual: false, before_fc: false, ..self.norms };
        if !unknown.is_original() {
            return Err(format!(
                "llama.cpp's Eagle3 has norm_before_residual and norm_before_fc, and no further norms ({})",
                unknown.set_keys()
            ));
        }
        let known = Eagle3Norms { before_residual, before_fc, ..Eagle3Norms::default() };
        Ok(GgufParts {
            architecture: "eagle3",
            keys: {
                let mut keys = vec![("target_hidden_size", GgufValue::U32(drafter.hidden_size as u32))];
                let norms = known.flags().into_iter().filter(|(_, is_set)| *is_set);
                keys.extend(norms.map(|(key, _)| (key, GgufValue::Bool(true))));
                keys
            },
            names: vec![("input_norm.weight", "enc.output_norm.weight")],
            layer_names: vec![("hidden_norm.weight", "attn_norm_2.weight")],
            interleaved_rope: true,
            ..GgufParts::default()
        })
    }

    fn engine_support(&self, engine: Engine, format: CheckpointFormat) -> EngineSupport {
        use CheckpointFormat::{DeepseekV4, Modelopt, Reference, Specforge, Speculators, Zlab};
        use EngineSupport as S;
        match engine {
            Engine::Sglang => match format {
                Speculators => {
                    S::not_loaded("speculators_model_type was refused when read (issues 30982, 34734)")
                }
                Reference | DeepseekV4 => {
                    S::not_loaded("it loads Eagle3 as SpecForge writes it, without norms on queries and keys")
                }
                Zlab | Specforge | Modelopt if self.norms.before_residual => {
                    S::not_loaded("it does not read norm_before_residual")
                }
                Zlab | Specforge | Modelopt => S::loads_untested("--speculative-algorithm EAGLE3"),
            },
            Engine::Vllm | Engine::LlamaCpp => match format {
                Speculators => S::loads_as_tested("method eagle3"),
                Reference | DeepseekV4 => S::not_loaded("the class is not registered"),
                Specforge => {
                    S::not_loaded("it would capture the layers before those that eagle_config names")
                }
                Zlab | Modelopt => S::loads_untested("method eagle3"),
            },
        }
    }
}
