//! A sequence's hidden states have the same bits in every batch, in float32 on the CPU with one
//! thread and with two. This holds for models of any shape whose MLP width is a multiple of
//! [`UNIT`]. With soft-capped logits the vocabulary must be a multiple, too.
//!
//! libtorch's element-wise functions process all rows at once with vector instructions. The last
//! values of a thread's share that fill no vector take another path and may differ in the last bit.
//! Multiples of [`UNIT`] leave no such values.

use std::path::Path;

use deepspec_core::Tap;
use deepspec_engine::{ModelInput, ModelOutput, Target};
use deepspec_models::{ModelConfig, TargetModel, TargetOptions, save};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::json;
use tch::{Device, Kind, Tensor};

/// A multiple of the vector length of the widest processors.
const UNIT: i64 = 64;
/// Number of experts of layers that have them.
const EXPERTS: i64 = 10;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Family {
    Qwen3,
    Qwen3Moe,
    GptOss,
    Qwen35,
    Qwen35Moe,
    Llama,
    Gemma4,
}

impl Family {
    fn is_hybrid(self) -> bool {
        [Self::Qwen35, Self::Qwen35Moe].contains(&self)
    }
}

/// A model of any shape.
#[derive(Debug, Clone)]
struct Shape {
    family: Family,
    hidden: i64,
    inner: i64,
    vocab: i64,
    /// KV heads, query heads per KV head, and head size of sliding layers; the head size of full
    /// layers.
    local: (i64, i64, i64),
    global_dim: i64,
    layers: usize,
    tied: bool,
}

/// A sequence of the batch: tokens in its KV cache and tokens to append.
#[derive(Debug, Clone)]
struct Rider {
    history: usize,
    width: usize,
}

fn shape() -> impl Strategy<Value = Shape> {
    let sizes = (1..=8i64, 1..=6i64, 64..=600i64);
    let heads = (1..=4i64, 1..=4i64, 1..=16i64, 1..=8i64);
    let family = prop_oneof![
        Just(Family::Qwen3),
        Just(Family::Qwen3Moe),
        Just(Family::GptOss),
        Just(Family::Qwen35),
        Just(Family::Qwen35Moe),
        Just(Family::Llama),
        Just(Family::Gemma4)
    ];
    (family, sizes, heads, 1..=3usize, any::<bool>()).prop_map(
        |(family, (hidden, inner, vocab), (key_value, repeats, dim, global), layers, tied)| Shape {
            family,
            hidden: hidden * 32,
            inner: inner * UNIT,
            vocab: if family == Family::Gemma4 { (vocab / UNIT).max(1) * UNIT } else { vocab },
            // A gate is as wide as all query heads.
            local: (key_value, repeats, if family.is_hybrid() { UNIT } else { dim * 8 }),
            global_dim: global * 16,
            layers,
            tied,
        },
    )
}

fn rider() -> impl Strategy<Value = Rider> {
    (prop_oneof![0..40usize, 0..600usize], 1..12usize).prop_map(|(history, width)| Rider { history, width })
}

impl Shape {
    fn config(&self) -> serde_json::Value {
        let (key_value, repeats, dim) = self.local;
        let mut config = json!({
            "hidden_size": self.hidden, "intermediate_size": self.inner, "vocab_size": self.vocab,
            "num_hidden_layers": self.layers, "num_attention_heads": key_value * repeats,
            "num_key_value_heads": key_value, "head_dim": dim, "max_position_embeddings": 4096,
            "tie_word_embeddings": self.tied, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
        });
        if self.family == Family::Llama {
            let own = json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"]});
            config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        }
        if self.family == Family::Qwen3Moe {
            let own = json!({
                "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": EXPERTS,
                "num_experts_per_tok": 3, "moe_intermediate_size": self.inner / 2, "norm_topk_prob": self.tied,
                "mlp_only_layers": (1..self.layers).take(1).collect::<Vec<_>>(),
            });
            config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        }
        if self.family == Family::GptOss {
            let own = json!({
                "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": EXPERTS,
                "num_experts_per_tok": 3, "sliding_window": 30, "rope_theta": 150_000.0,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            });
            config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        }
        if self.family.is_hybrid() {
            let kinds = ["linear_attention", "full_attention"].iter().cycle().take(self.layers);
            let own = json!({
                "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"],
                "layer_types": kinds.collect::<Vec<_>>(), "linear_num_key_heads": key_value,
                "linear_num_value_heads": key_value * repeats, "linear_key_head_dim": 32,
                "linear_value_head_dim": UNIT,
            });
            config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        }
        if self.family == Family::Qwen35Moe {
            let own = json!({
                "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": EXPERTS,
                "num_experts_per_tok": 3, "moe_intermediate_size": self.inner / 2,
                "shared_expert_intermediate_size": self.inner,
            });
            config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        }
        if self.family == Family::Gemma4 {
            let kinds = ["full_attention", "sliding_attention"].iter().cycle();
            // The last layer uses full attention.
            let kinds: Vec<_> = kinds.skip((self.layers + 1) % 2).take(self.layers).collect();
            let own = json!({
                "model_type": "gemma4_unified_text", "architectures": ["Gemma4ForCausalLM"], "layer_types": kinds,
                "sliding_window": 300, "global_head_dim": self.global_dim, "num_global_key_value_heads": 1,
                "attention_k_eq_v": true, "final_logit_softcapping": 30.0,
            });
            config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        }
        config
    }

    /// Writes a random model to `dir`.
    fn write(&self, dir: &Path) {
        let raw = self.config();
        std::fs::write(dir.join("config.json"), raw.to_string()).unwrap();
        let config = ModelConfig::parse(Path::new("config.json"), raw.as_object().cloned().unwrap()).unwrap();
        let (d, inner) = (self.hidden, self.inner);
        let mut tensors = vec![];
        let mut add = |name: String, shape: &[i64]| {
            let noise = deepspec_testkit::noise(
                name.len() as u64 + 31 * tensors.len() as u64,
                shape.iter().product::<i64>() as usize,
            );
            let noise = Tensor::from_slice(&noise).view(shape);
            tensors.push((
                name,
                match shape {
                    [_] => noise * 0.2 + 1.0,
                    [_, inputs, ..] => noise / (*inputs as f64).sqrt(),
                    [] => noise,
                },
            ));
        };
        add("model.embed_tokens.weight".into(), &[self.vocab, d]);
        add("model.norm.weight".into(), &[d]);
        if !self.tied {
            add("lm_head.weight".into(), &[self.vocab, d]);
        }
        for (i, layer) in config.layers.iter().enumerate() {
            let (heads, window) = (layer.attention.heads, layer.attention.window);
            let (queries, keys) = (heads.query * heads.dim, heads.key_value * heads.dim);
            if let Some(spec) = layer.gated_delta {
                for (name, shape) in [
                    ("in_proj_qkv.weight", vec![spec.channels(), d]),
                    ("in_proj_z.weight", vec![spec.value_width(), d]),
                    ("in_proj_a.weight", vec![spec.value_heads, d]),
                    ("in_proj_b.weight", vec![spec.value_heads, d]),
                    ("conv1d.weight", vec![spec.channels(), 1, spec.kernel]),
                    ("A_log", vec![spec.value_heads]),
                    ("dt_bias", vec![spec.value_heads]),
                    ("norm.weight", vec![spec.value_dim]),
                    ("out_proj.weight", vec![d, spec.value_width()]),
                ] {
                    add(format!("model.layers.{i}.linear_attn.{name}"), &shape);
                }
            }
            let mut own = |name: &str, shape: &[i64]| add(format!("model.layers.{i}.{name}.weight"), shape);
            if layer.gated_delta.is_none() {
                own("self_attn.q_proj", &[if layer.output_gate { 2 * queries } else { queries }, d]);
                own("self_attn.k_proj", &[keys, d]);
                if self.family != Family::Gemma4 || window.is_some() {
                    own("self_attn.v_proj", &[keys, d]);
                }
                own("self_attn.o_proj", &[d, queries]);
                if ![Family::Llama, Family::GptOss].contains(&self.family) {
                    own("self_attn.q_norm", &[heads.dim]);
                    own("self_attn.k_norm", &[heads.dim]);
                }
            }
            match &layer.experts {
                Some(_) if self.family == Family::GptOss => own("mlp.router", &[EXPERTS, d]),
                Some(experts) => {
                    own("mlp.gate", &[EXPERTS, d]);
                    for expert in 0..EXPERTS {
                        own(&format!("mlp.experts.{expert}.gate_proj"), &[experts.width, d]);
                        own(&format!("mlp.experts.{expert}.up_proj"), &[experts.width, d]);
                        own(&format!("mlp.experts.{expert}.down_proj"), &[d, experts.width]);
                    }
                    if let Some(width) = experts.shared_width {
                        own("mlp.shared_expert.gate_proj", &[width, d]);
                        own("mlp.shared_expert.up_proj", &[width, d]);
                        own("mlp.shared_expert.down_proj", &[d, width]);
                        own("mlp.shared_expert_gate", &[1, d]);
                    }
                }
                None => {
                    own("mlp.gate_proj", &[inner, d]);
                    own("mlp.up_proj", &[inner, d]);
                    own("mlp.down_proj", &[d, inner]);
                }
            }
            own("input_layernorm", &[d]);
            own("post_attention_layernorm", &[d]);
            if self.family == Family::Gemma4 {
                own("pre_feedforward_layernorm", &[d]);
                own("post_feedforward_layernorm", &[d]);
                add(format!("model.layers.{i}.layer_scalar"), &[1]);
            }
            if self.family == Family::GptOss {
                let mut own = |name: &str, shape: &[i64]| add(format!("model.layers.{i}.{name}"), shape);
                for (part, rows) in [("q", queries), ("k", keys), ("v", keys), ("o", d)] {
                    own(&format!("self_attn.{part}_proj.bias"), &[rows]);
                }
                own("self_attn.sinks", &[heads.query]);
                own("mlp.router.bias", &[EXPERTS]);
                own("mlp.experts.gate_up_proj", &[EXPERTS, d, 2 * inner]);
                own("mlp.experts.gate_up_proj_bias", &[EXPERTS, 2 * inner]);
                own("mlp.experts.down_proj", &[EXPERTS, inner, d]);
                own("mlp.experts.down_proj_bias", &[EXPERTS, d]);
            }
        }
        save(&dir.join("model.safetensors"), &tensors, Kind::Float).unwrap();
    }
}

/// Runs `tokens` ids of each slot after its cached tokens; the ids follow from the slot's owner and
/// the position.
fn feed(target: &mut TargetModel, vocab: i64, parts: &[(usize, usize, usize)]) -> ModelOutput {
    let ids: Vec<i64> = parts
        .iter()
        .flat_map(|&(slot, first, count)| {
            (first..first + count).map(move |p| ((p * p + 7 * p) as i64 + 13 * slot as i64) % vocab)
        })
        .collect();
    let chunks: Vec<(usize, usize)> = parts.iter().map(|&(slot, _, count)| (slot, count)).collect();
    target.forward(&ModelInput { chunks: &chunks, tokens: Tensor::from_slice(&ids) })
}

/// States, taps and logits of rows `[first, first + count)`.
fn rows(target: &TargetModel, out: &ModelOutput, first: usize, count: usize) -> [Tensor; 3] {
    let all = [out.hidden.shallow_clone(), out.captured_states.shallow_clone(), target.logits(&out.hidden)];
    all.map(|rows| rows.narrow(0, first as i64, count as i64).copy())
}

/// Describes the difference between a sequence alone and the same sequence at index `own` of the
/// batch `riders`, if any.
fn difference(shape: &Shape, riders: &[Rider], own: usize) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    shape.write(dir.path());
    let taps = Tap::from_layer_ids(-1..shape.layers as i64).unwrap();
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: riders.len(), taps };
    let mut target = TargetModel::load(dir.path(), &options).unwrap_or_else(|error| panic!("{error}"));
    let (history, width) = (riders[own].history, riders[own].width);
    let mut alone = vec![];
    for (first, count) in [(0, history), (history, width)].into_iter().filter(|part| part.1 > 0) {
        let out = feed(&mut target, shape.vocab, &[(own, first, count)]);
        alone.push(rows(&target, &out, 0, count));
    }
    target.truncate(own, 0);
    let parts = |of: &dyn Fn(&Rider) -> (usize, usize)| -> Vec<(usize, usize, usize)> {
        let part = |(slot, rider): (usize, &Rider)| (slot, of(rider).0, of(rider).1);
        riders.iter().enumerate().map(part).filter(|part| part.2 > 0).collect()
    };
    let turns = [parts(&|rider| (0, rider.history)), parts(&|rider| (rider.history, rider.width))];
    let mut alone = alone.into_iter();
    for (what, turn) in ["the prompt", "the block"].into_iter().zip(turns) {
        if turn.is_empty() {
            continue;
        }
        let out = feed(&mut target, shape.vocab, &turn);
        let Some(at) = turn.iter().position(|part| part.0 == own) else { continue };
        let first = turn[..at].iter().map(|part| part.2).sum();
        let beside = rows(&target, &out, first, turn[at].2);
        let names = ["states", "taps", "logits"];
        for (name, (alone, beside)) in names.iter().zip(alone.next().unwrap().iter().zip(&beside)) {
            if !alone.equal(beside) {
                let off = (alone - beside).abs().max().double_value(&[]);
                return Some(format!("{name} of {what} are off by {off:.1e}"));
            }
        }
    }
    None
}

#[test]
#[cfg_attr(not(feature = "kernels"), ignore = "rows have the same bits in every batch with kernels only")]
fn a_sequence_has_the_same_bits_whatever_it_rides_with() {
    let _no_grad = tch::no_grad_guard();
    let cases = if std::env::var_os("DEEPSPEC_TEST_FULL").is_some() { 1000 } else { 60 };
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let riders = prop::collection::vec(rider(), 2..6);
    let strategy = (shape(), riders, any::<prop::sample::Index>(), 1..=2i32);
    let outcome = runner.run(&strategy, |(shape, riders, own, threads)| {
        tch::set_num_threads(threads);
        let found = difference(&shape, &riders, own.index(riders.len()));
        prop_assert_eq!(found, None);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
