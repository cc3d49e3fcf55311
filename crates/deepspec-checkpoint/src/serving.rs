//! Detects settings of a checkpoint folder that a serving engine would misread.
//!
//! Based on the engines' sources of September 2026 and on trials with the versions in
//! [`crate::engine_compatibility`]. Nearly all of these mistakes are silent: the drafter runs, but the engine
//! accepts few drafts.

use std::fs;

use crate::gguf::Tokenizer;
use serde::Serialize;
use serde_json::Value;

use crate::export::Engine;
use crate::fields::read_object;
use crate::shapes::EMBED;
use crate::shards::is_weights_file;
use crate::{Checkpoint, EngineCompatibility, Target, engine_compatibility, rope};

/// A problem to fix or check before serving.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Risk {
    /// Subject of the problem, such as `layout` or `mask token`.
    #[serde(rename = "about")]
    pub subject: &'static str,
    /// Problem and consequence.
    #[serde(rename = "told")]
    pub problem: String,
    /// Remedy.
    #[serde(rename = "cure")]
    pub remedy: String,
}

/// Lists settings of `checkpoint` that `engine` would misread with `target`, and arguments that the
/// engine needs.
pub fn risks(checkpoint: &Checkpoint, engine: Engine, target: &Target) -> Vec<Risk> {
    let found = ServingCheck { checkpoint, engine, target };
    let drafter = found.drafter_risk();
    if drafter.is_some() && !found.loads_as_it_is() {
        return drafter.into_iter().collect();
    }
    let all = [
        drafter,
        found.layout_risk(),
        found.files_risk(),
        found.verifier_norm_risk(),
        found.target_risk(),
        found.rope_risk(),
        found.target_tokenizer_risk(),
        found.head_risk(),
        found.slots_risk(),
        found.parallel_risk(),
        found.layers_risk(),
        found.mask_risk(),
        found.length_risk(),
    ];
    all.into_iter().flatten().collect()
}

struct ServingCheck<'a> {
    checkpoint: &'a Checkpoint,
    engine: Engine,
    target: &'a Target,
}

impl ServingCheck<'_> {
    fn convert_command(&self) -> String {
        format!("deepspec-eval checkpoint convert --to {}", self.engine.export_name())
    }

    /// Warns of layers, sliding windows and layer ids that tools interpret differently.
    fn drafter_risk(&self) -> Option<Risk> {
        let problem = self.checkpoint.drafter().reason_not_convertible()?;
        let remedy = if self.loads_as_it_is() {
            format!(
                "by its sources {} loads this folder; that was not tried: compare its answers and cycles with those here",
                self.engine
            )
        } else {
            "no conversion mends that: train it without".into()
        };
        Some(Risk { subject: "drafter", problem, remedy })
    }

    /// The engine's entry of [`engine_compatibility`]. llama.cpp's entry never loads, because llama.cpp
    /// reads GGUF files.
    fn compatibility(&self) -> Option<EngineCompatibility> {
        let name = self.engine.to_string();
        engine_compatibility(self.checkpoint).into_iter().find(|compatibility| compatibility.engine == name)
    }

    fn loads_as_it_is(&self) -> bool {
        self.compatibility().is_some_and(|compatibility| compatibility.loads)
    }

    /// Warns if the engine cannot load the folder.
    fn layout_risk(&self) -> Option<Risk> {
        if self.engine == Engine::LlamaCpp {
            let drafter = self.checkpoint.drafter();
            return Some(match drafter.kind.gguf_parts(drafter) {
                Ok(_) => Risk {
                    subject: "layout",
                    problem:
                        "it loads GGUF files; its converter tells drafters apart by what their folders hold"
                            .into(),
                    remedy: format!("{} says in the file what they are", self.convert_command()),
                },
                Err(problem) => Risk {
                    subject: "layout",
                    problem,
                    remedy: "it cannot run this drafter: take another engine, or train it without".into(),
                },
            });
        }
        let compatibility = self.compatibility()?;
        let drafter = self.checkpoint.drafter();
        (!compatibility.loads).then(|| Risk {
            subject: "layout",
            problem: format!("it does not load: {}", compatibility.note),
            remedy: match drafter.kind.engine_format(self.engine, drafter) {
                Ok(_) => self.convert_command(),
                Err(reason) => format!("no conversion mends that: {reason}"),
            },
        })
    }

    /// vLLM reads every safetensors file of a folder without an index.
    fn files_risk(&self) -> Option<Risk> {
        let dir = self.checkpoint.dir();
        if self.engine != Engine::Vllm || dir.join("model.safetensors.index.json").is_file() {
            return None;
        }
        let entries = fs::read_dir(dir).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut strange: Vec<String> =
            entries.filter(|name| name.ends_with(".safetensors") && !is_weights_file(name)).collect();
        strange.sort();
        (!strange.is_empty()).then(|| Risk {
            subject: "files",
            problem: format!("{} is read as weights too and stops the load", strange.join(", ")),
            remedy: format!("move it away, or {}", self.convert_command()),
        })
    }

    fn verifier_norm_risk(&self) -> Option<Risk> {
        let name = "verifier_norm.weight";
        let there = self.engine == Engine::Vllm && self.checkpoint.tensors().get(name).is_some();
        there.then(|| Risk {
            subject: "tensors",
            problem: format!("`{name}` is unknown there and stops the load"),
            remedy: self.convert_command(),
        })
    }

    fn target_risk(&self) -> Option<Risk> {
        let error = self.target.check_fits(self.checkpoint.drafter()).err()?;
        let remedy = "name the target that it was trained for; the engine does not compare them".into();
        Some(Risk { subject: "vocabulary and sizes", problem: error.to_string(), remedy })
    }

    /// Whether a test compares drafters with this RoPE scaling with the engine's.
    fn compares_rope(&self, kind: &str) -> bool {
        kind == "llama3" || kind == "yarn" && self.engine == Engine::Vllm
    }

    /// Scaled RoPE, or a RoPE base that differs between newer and older keys.
    fn rope_risk(&self) -> Option<Risk> {
        let config = self.checkpoint.drafter();
        let rope = match self.engine {
            Engine::LlamaCpp => {
                rope::llama_cpp_rope(self.checkpoint, self.engine.export_name()).map(|_| None)
            }
            _ => rope::engine_rope_parameters(self.checkpoint, self.engine.export_name())
                .map(|rope| rope.scaling),
        };
        let problem = match rope {
            Err(error) => Some(error.to_string()),
            Ok(scaling) => scaling.filter(|kind| !self.compares_rope(kind)).map(|kind| {
                format!(
                    "rotary embeddings are scaled by `{kind}`, which no test here compares with the engine's"
                )
            }),
        };
        if let Some(problem) = problem {
            let remedy = "compare the accepted length there with the one measured here".into();
            return Some(Risk { subject: "RoPE", problem, remedy });
        }
        let base = |value: Option<&Value>| value.and_then(Value::as_f64);
        let (older, newer) = (
            base(config.decoder.get("rope_theta")),
            base(config.decoder.get("rope_parameters")?.get("rope_theta")),
        );
        let (older, newer) = (older?, newer?);
        (older != newer).then(|| Risk {
            subject: "RoPE",
            problem: format!(
                "rope_theta is {older}, within rope_parameters {newer}; versions differ in which they read"
            ),
            remedy: self.convert_command(),
        })
    }

    /// Whether llama.cpp's converter knows the target's tokenizer.
    fn target_tokenizer_risk(&self) -> Option<Risk> {
        if self.engine != Engine::LlamaCpp {
            return None;
        }
        let known = Tokenizer::read(self.target.dir(), self.target.vocab_size() as usize);
        let own = "take the GGUF that the target's own makers or llama.cpp's converter wrote";
        let (problem, remedy) = match known {
            Err(error) => (error.to_string(), own),
            Ok(tokenizer) if !tokenizer.has_known_pre_tokenizer() => {
                ("it has no name for how the target's tokenizer splits texts".into(), own)
            }
            Ok(_) => {
                let config = read_object(&self.target.dir().join("tokenizer_config.json")).ok()?;
                let class = config.get("tokenizer_class").and_then(Value::as_str)?;
                let problem =
                    format!("its converter does not know the tokenizer_class {class} of the target");
                let remedy = "write PreTrainedTokenizerFast in the target's tokenizer_config.json";
                (class == "TokenizersBackend").then_some((problem, remedy))?
            }
        };
        Some(Risk { subject: "target's tokenizer", problem, remedy: remedy.into() })
    }

    /// Warns of a folder with an embedding: llama.cpp's converter drops the folder's LM head and uses the
    /// embedding as head.
    fn head_risk(&self) -> Option<Risk> {
        let own = self.checkpoint.find(EMBED).is_some();
        let untied = self.target.head() != self.target.embed();
        (self.engine == Engine::LlamaCpp && own && untied).then(|| Risk {
            subject: "head",
            problem: "its converter keeps the folder's embedding and drops its head; the embedding is then taken as head".into(),
            remedy: format!("{}, which leaves both to the target", self.convert_command()),
        })
    }

    /// Which token a block position predicts: engines rely on an argument and do not check it.
    fn slots_risk(&self) -> Option<Risk> {
        let kind = &self.checkpoint.drafter().kind;
        kind.has_slots().then_some(())?;
        let method = kind.method();
        let flag = match self.engine {
            Engine::LlamaCpp => {
                kind.gguf_parts(self.checkpoint.drafter()).ok()?;
                format!("--spec-type draft-{method}")
            }
            Engine::Vllm => format!("\"method\": \"{method}\""),
            Engine::Sglang => format!("--speculative-algorithm {}", method.to_uppercase()),
        };
        let problem = match kind.predicts_own_position() {
            true => "slot k says what stands in it (1 + N slots for N tokens)",
            false => "every slot drafts, the anchor's too (N slots for N tokens)",
        };
        Some(Risk {
            subject: "slots",
            problem: format!("{problem}; read the other way the accepted length is 1.0, without a word"),
            remedy: format!("serve it with {flag}"),
        })
    }

    /// vLLM drafts one token after the other unless it is told otherwise, and leaves the learnt states of masked positions out.
    fn parallel_risk(&self) -> Option<Risk> {
        let drafter = self.checkpoint.drafter();
        (self.engine == Engine::Vllm && drafter.kind.drafts_in_parallel()).then(|| Risk {
            subject: "parallel drafting",
            problem: "without parallel_drafting it drafts one token after the other, and the accepted length falls; it only warns of mask_hidden"
                .into(),
            remedy: self.engine.serve_arguments(drafter, "DRAFTER"),
        })
    }

    /// Warns of layer ids that tools count differently: from 0 or 1, with or without the embedding.
    fn layers_risk(&self) -> Option<Risk> {
        let taps = &self.checkpoint.drafter().taps;
        let ids: Vec<String> = taps.iter().map(|tap| tap.layer_id().to_string()).collect();
        (!ids.is_empty()).then(|| Risk {
            subject: "layer ids",
            problem: format!(
                "it reads what layers {} give, the first of the target's {} being 0; one off, the accepted length falls without a word",
                ids.join(", "),
                self.target.layers()
            ),
            remedy: "compare with target.layer_ids of the recipe that it was trained by".into(),
        })
    }

    /// Whether the mask token also occurs in texts, which it should not.
    fn mask_risk(&self) -> Option<Risk> {
        let id = self.checkpoint.drafter().kind.mask_token_id()?;
        let tokenizer = Tokenizer::read(self.target.dir(), self.target.vocab_size() as usize).ok()?;
        let token = tokenizer.normal_token(usize::try_from(id).ok()?)?;
        Some(Risk {
            subject: "mask token",
            problem: format!("mask_token_id is {id}, which is {token:?} in texts"),
            remedy: "where it was trained with another one, put that into config.json".into(),
        })
    }

    /// Engines do not read the number of draft tokens from the drafter.
    fn length_risk(&self) -> Option<Risk> {
        let drafter = self.checkpoint.drafter();
        let drafted = drafter.kind.draft_len();
        let problem = match self.engine {
            Engine::LlamaCpp => "3 unless it is told",
            Engine::Vllm => "any number is taken, unchecked",
            Engine::Sglang => return None,
        };
        let remedy = self.engine.serve_arguments(drafter, "DRAFTER");
        Some(Risk {
            subject: "drafted tokens",
            problem: format!("{problem}; this drafter drafts {drafted}"),
            remedy,
        })
    }
}
