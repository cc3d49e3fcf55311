//! Compares targets with transformers in float32: taps, final-normed states and logits of whole
//! sequences, and logits of decoding token by token with a KV cache.
//!
//! Runs only if `DEEPSPEC_TEST_PYTHON` names a Python with torch and transformers.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::slice;

use common::{assert_close, device, max_abs, tensor};
use deepspec_core::Tap;
use deepspec_engine::{ModelInput, Target};
use deepspec_models::{ModelConfig, TargetHead, TargetModel, TargetOptions};
use deepspec_testkit::golden::{self, Array};
use deepspec_testkit::skip;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const FORWARD: f64 = 1e-4;
/// Last tokens of a sequence that are decoded one by one.
const DECODED: usize = 12;

const SCRIPT: &str = r#"
import json, sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

conversations = [
    [("user", "Hi"), ("assistant", "Hello.")],
    [("system", "You are a helpful assistant."), ("user", "Leopold has 4 envelopes with 8 candles in each. How many candles are there?"),
     ("assistant", "Leopold has 4 x 8 = 32 candles. The answer is 32."), ("user", "And with 9 more?"), ("assistant", "The sum reads 32 + 9 = 41.")],
    [("user", "Write a function that adds up the small values in a list. " * 12), ("assistant", "```python\ndef total(xs):\n    return sum(xs)\n```\n" * 8)],
]

def compute(model_dir, output, made):
    if made:
        # A random model of the given config, and random ids of the given lengths.
        kind, settings, lengths = made
        stacked, is_mxfp4 = settings.pop("stacked_experts", False), settings.pop("mxfp4", False)
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="eager").float().eval()
        with torch.no_grad():
            for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
                if "sinks" in name:
                    tensor.normal_(std=1.5)
                elif kind == "gpt_oss" and "gate_up_proj" in name:
                    # One in ten gates is beyond the limit of 7.
                    tensor.normal_(std=0.8)
                elif "conv1d" in name:
                    tensor.normal_(std=0.7)
                elif "norm" in name or "layer_scalar" in name:
                    tensor.uniform_(0.6, 1.4)
                elif name in model.state_dict():
                    tensor.normal_(std=1.0 if "embed" in name else 0.25)
        # Experts are stored one by one, as in published checkpoints, or stacked as in memory.
        model.save_pretrained(model_dir, save_original_format=not stacked)
        if is_mxfp4:
            # Random float4 experts take their place; transformers de-quantises them.
            path = f"{model_dir}/model.safetensors"
            tensors = load_file(path)
            for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
                experts, inputs, outputs = tensors.pop(name).shape
                tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
                tensors[f"{name}_scales"] = torch.randint(123, 127, (experts, outputs, inputs // 32), dtype=torch.uint8)
            save_file(tensors, path, metadata={"format": "pt"})
            config = json.load(open(f"{model_dir}/config.json"))
            config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
            json.dump(config, open(f"{model_dir}/config.json", "w"))
            # It leaves the experts in bfloat16, whatever the dtype.
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").float().eval()
        sequences = [torch.randint(settings["vocab_size"], (1, length)) for length in lengths]
    else:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        sequences = []
        for conversation in conversations:
            messages = [{"role": role, "content": content} for role, content in conversation]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            sequences.append(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids]))
    tensors = {}
    for index, ids in enumerate(sequences):
        raw = []
        # Hooks, because hidden_states ends with the normed state in place of the last layer's raw output.
        hooks = [layer.register_forward_hook(lambda _, __, out: raw.append((out[0] if isinstance(out, tuple) else out)[0])) for layer in model.model.layers]
        with torch.no_grad():
            body = model.model(ids, output_hidden_states=True)
            [hook.remove() for hook in hooks]
            logits = model(ids).logits
            # The last tokens one by one, behind the others in a KV cache.
            keep = max(1, ids.shape[1] - decoded)
            out = model(ids[:, :keep], use_cache=True)
            steps = [out.logits[0, -1:]]
            for at in range(keep, ids.shape[1]):
                out = model(ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
                steps.append(out.logits[0])
        taps = torch.cat([body.hidden_states[0][0]] + raw, dim=-1)
        values = {"ids": ids[0].int(), "taps": taps, "logits": logits[0], "steps": torch.cat(steps)}
        values["hidden"] = body.last_hidden_state[0] / getattr(model.config, "logits_scaling", 1)
        tensors |= {f"{name}{index}": value.contiguous().clone() for name, value in values.items()}
    save_file(tensors, output)

decoded = int(sys.argv[1])
for job in json.loads(sys.argv[2]):
    compute(*job)
"#;

/// A model for the script.
struct Job {
    dir: PathBuf,
    output: PathBuf,
    /// Its `model_type`, config and lengths of sequences, if the script is to make it.
    made: Option<Value>,
}

/// Runs the script for these models, in one process, and returns its arrays of each. None without a Python that can run it;
/// the test is then skipped.
fn references(jobs: &[Job]) -> Option<Vec<BTreeMap<String, Array>>> {
    let python = skip::python("torch and transformers")?;
    let listed: Vec<Value> = jobs.iter().map(|job| json!([job.dir, job.output, job.made])).collect();
    let run = Command::new(python)
        .args(["-c", SCRIPT, &DECODED.to_string(), &json!(listed).to_string()])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    Some(jobs.iter().map(|job| golden::arrays(&job.output)).collect())
}

/// Compares the target in `dir` with the reference, for each batch of sequences.
fn check(dir: &Path, arrays: &BTreeMap<String, Array>, batches: &[&[usize]]) {
    let _no_grad = tch::no_grad_guard();
    let layers = ModelConfig::load(dir).unwrap().layers.len() as i64;
    let options = TargetOptions {
        device: device(),
        kind: Kind::Float,
        slots: 3,
        taps: Tap::from_layer_ids(-1..layers).unwrap(),
    };
    let mut target = TargetModel::load(dir, &options).unwrap();
    let of = |name: &str, index: usize| tensor(&arrays[&format!("{name}{index}")]);
    for batch in batches {
        let ids: Vec<Tensor> = batch.iter().map(|&index| of("ids", index)).collect();
        let chunks: Vec<(usize, usize)> =
            ids.iter().enumerate().map(|(slot, ids)| (slot, ids.numel())).collect();
        let tokens = Tensor::cat(&ids, 0).to_device(device());
        let out = target.forward(&ModelInput { chunks: &chunks, tokens });
        let found =
            [("logits", target.logits(&out.hidden)), ("hidden", out.hidden), ("taps", out.captured_states)];
        for (name, found) in found {
            let expected = Tensor::cat(&batch.iter().map(|&index| of(name, index)).collect::<Vec<_>>(), 0);
            let off = max_abs(&(found.to_device(Device::Cpu) - &expected));
            eprintln!("{name} of {batch:?}: up to {:.1}, off by {off:.1e}", max_abs(&expected));
            assert_close(
                name,
                &found.to_device(Device::Cpu),
                &expected,
                FORWARD * max_abs(&expected).max(1.0),
            );
        }
        for &(slot, _) in &chunks {
            target.truncate(slot, 0);
        }
    }
    let head = TargetHead::load(dir, target.config(), device()).unwrap();
    for index in batches.iter().flat_map(|batch| batch.iter().copied()) {
        let ids = of("ids", index).to_device(device());
        let length = ids.numel();
        let keep = length.saturating_sub(DECODED).max(1);
        let mut run = |first: usize, count: usize| {
            let tokens = ids.narrow(0, first as i64, count as i64);
            let out = target.forward(&ModelInput { chunks: &[(0, count)], tokens });
            (target.logits(&out.hidden.narrow(0, count as i64 - 1, 1)), out)
        };
        let mut steps = vec![run(0, keep).0];
        steps.extend((keep..length).map(|at| run(at, 1).0));
        target.truncate(0, 0);
        let (found, expected) = (Tensor::cat(&steps, 0).to_device(Device::Cpu), of("steps", index));
        let off = max_abs(&(&found - &expected));
        eprintln!("steps of {index}: up to {:.1}, off by {off:.1e}", max_abs(&expected));
        assert_close("steps", &found, &expected, FORWARD * max_abs(&expected).max(1.0));
        // The final norm of a target whose layers run elsewhere gives the same states.
        let (taps, hidden) = (of("taps", index), of("hidden", index));
        let last = taps.narrow(1, taps.size()[1] - hidden.size()[1], hidden.size()[1]);
        let normed = head.normalize(&last.to_device(device())).to_device(Device::Cpu);
        assert_close("normed", &normed, &hidden, FORWARD * max_abs(&hidden).max(1.0));
    }
}

#[test]
fn the_tiny_target_computes_what_transformers_computes() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
    let scratch = tempfile::tempdir().unwrap();
    let job = Job { dir, output: scratch.path().join("reference.safetensors"), made: None };
    if let Some(arrays) = references(slice::from_ref(&job)) {
        // Each conversation alone, then all in one ragged batch.
        check(&job.dir, &arrays[0], &[&[0], &[1], &[2], &[2, 0, 1]]);
    }
}

/// Random models: Llama with and without Llama 3's rotary settings, with tied and untied head.
/// Gemma 4 with windows shorter than its sequences, and a Qwen3 with scaled rotary settings over a
/// sequence of several passes.
#[test]
fn random_targets_compute_what_transformers_computes() {
    let yarn = json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 512});
    let sizes = json!({
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 8192,
    });
    let gemma = json!({
        "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": true, "sliding_window": 6,
        "final_logit_softcapping": 20.0, "tie_word_embeddings": false,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    });
    let normed = json!({"global_head_dim": 24, "sliding_window": 300, "attention_k_eq_v": false});
    let qwen3 = json!({"rope_parameters": yarn, "tie_word_embeddings": true, "num_hidden_layers": 2});
    let llama3 = json!({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 256});
    let llama = json!({"rope_parameters": llama3, "tie_word_embeddings": false, "rms_norm_eps": 1e-5});
    let tied = json!({"tie_word_embeddings": true, "num_key_value_heads": 4});
    let cases = [
        ("llama", llama, [700, 3, 90]),
        ("llama", tied, [40, 7, 300]),
        ("gemma4_unified_text", gemma, [40, 7, 300]),
        ("gemma4_unified_text", normed, [310, 700, 1]),
        ("qwen3", qwen3, [4500, 3, 90]),
    ];
    check_random(&sizes, &cases);
}

/// Compares random models of these `model_type`s, keys beside `sizes`, and lengths of sequences.
fn check_random(sizes: &Value, cases: &[(&str, Value, [usize; 3])]) {
    let scratch = tempfile::tempdir().unwrap();
    let job = |(index, (kind, own, lengths)): (usize, &(&str, Value, [usize; 3]))| {
        let mut settings = sizes.as_object().cloned().unwrap();
        settings.extend(own.as_object().cloned().unwrap());
        let dir = scratch.path().join(index.to_string());
        let output = scratch.path().join(format!("{index}.safetensors"));
        Job { dir, output, made: Some(json!([kind, settings, lengths])) }
    };
    let jobs: Vec<Job> = cases.iter().enumerate().map(job).collect();
    let Some(arrays) = references(&jobs) else { return };
    for ((job, arrays), (kind, own, _)) in jobs.iter().zip(&arrays).zip(cases) {
        eprintln!("{kind} {own}");
        check(&job.dir, arrays, &[&[0], &[1, 2, 0]]);
    }
}

/// Random models of the families whose drafters have other layers. Windows are shorter than the sequences.
#[test]
fn more_random_targets_compute_what_transformers_computes() {
    let sizes = json!({
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "pad_token_id": 0,
    });
    let windows = json!({"use_sliding_window": true, "sliding_window": 6, "max_window_layers": 2});
    let yarn = json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 256}, "tie_word_embeddings": true});
    let multipliers = json!({"embedding_multiplier": 12.0, "attention_multiplier": 0.07, "residual_multiplier": 0.22,
        "logits_scaling": 8.0, "tie_word_embeddings": true});
    let odd = json!({"logits_scaling": 3.7, "attention_multiplier": 0.3, "rms_norm_eps": 1e-5});
    let local = json!({"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }});
    let untied = json!({"head_dim": 8, "sliding_window": 300, "tie_word_embeddings": false,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]});
    let part = |part: f64| {
        json!({"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
            "partial_rotary_factor": part}, "sliding_window": 9})
    };
    let cases = [
        ("qwen2", json!({"rms_norm_eps": 1e-5}), [700, 3, 90]),
        ("qwen2", windows, [40, 7, 300]),
        ("qwen2", yarn, [700, 3, 90]),
        ("mistral", json!({"head_dim": 16, "sliding_window": 6}), [40, 7, 300]),
        ("mistral", json!({"sliding_window": null}), [40, 3, 90]),
        ("granite", multipliers, [700, 3, 90]),
        ("granite", odd, [40, 7, 300]),
        ("gemma3_text", local, [40, 7, 300]),
        ("gemma3_text", untied, [310, 700, 1]),
        ("phi3", json!({"rms_norm_eps": 1e-5}), [700, 3, 90]),
        ("phi3", part(0.75), [40, 7, 300]),
        ("phi3", part(0.5), [40, 7, 300]),
    ];
    check_random(&sizes, &cases);
}

/// Random hybrids of linear attention and attention. Sequences are shorter than a chunk of 64, cross several, and end
/// at one. Value heads share keys or have their own.
///
/// Keys of 32 channels and convolutions of this size keep both programs accurate. With keys of 8 and smaller
/// convolutions, transformers in float32 is 10 times further from float64.
#[test]
fn random_hybrids_compute_what_transformers_computes() {
    let sizes = json!({
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
    });
    let rope = |part: f64| {
        json!({"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": part,
        "mrope_section": [1, 1, 0], "mrope_interleaved": true})
    };
    let equal_heads = json!({"linear_num_key_heads": 3, "linear_num_value_heads": 3, "rope_parameters": rope(0.5),
        "tie_word_embeddings": true});
    let mixed = json!({"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention",
        "linear_attention"], "linear_conv_kernel_dim": 3, "rope_parameters": rope(1.0), "rms_norm_eps": 1e-5});
    let last = json!({"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention",
        "full_attention"], "rope_parameters": rope(0.25)});
    let cases = [
        ("qwen3_5_text", json!({"rope_parameters": rope(0.25)}), [150, 7, 64]),
        ("qwen3_5_text", equal_heads, [1, 201, 65]),
        ("qwen3_5_text", mixed, [40, 3, 333]),
        ("qwen3_5_text", last, [128, 2, 75]),
    ];
    check_random(&sizes, &cases);
    let experts = |own: Value| {
        let mut settings = json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24, "intermediate_size": null, "rope_parameters": rope(0.25)});
        settings.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        settings
    };
    let stacked = json!({"stacked_experts": true, "num_experts_per_tok": 8, "tie_word_embeddings": true,
        "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]});
    let cases = [
        ("qwen3_5_moe_text", experts(json!({})), [150, 7, 64]),
        ("qwen3_5_moe_text", experts(stacked), [1, 201, 65]),
    ];
    check_random(&sizes, &cases);
}

/// Random models with experts: in all layers, in every second one, and with dense layers in between.
#[test]
fn random_mixtures_of_experts_compute_what_transformers_computes() {
    let sizes = json!({
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 8192,
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    });
    let renormalised = json!({"norm_topk_prob": true, "num_experts": 12, "decoder_sparse_step": 2});
    let dense_between = json!({"norm_topk_prob": true, "mlp_only_layers": [0, 2], "stacked_experts": true,
        "tie_word_embeddings": true});
    let windows = json!({"use_sliding_window": true, "sliding_window": 6, "num_experts_per_tok": 1});
    let yarn = json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": 256}, "num_experts_per_tok": 8});
    let cases = [
        ("qwen3_moe", json!({}), [700, 3, 90]),
        ("qwen3_moe", renormalised, [40, 7, 300]),
        ("qwen3_moe", dense_between, [4500, 1, 90]),
        ("qwen3_moe", windows, [40, 7, 300]),
        ("qwen3_moe", yarn, [700, 3, 90]),
    ];
    check_random(&sizes, &cases);
}

/// Random models with sinks, windows, biases, and experts whose gates are clamped. The last one's experts are float4.
#[test]
fn random_gpt_oss_targets_compute_what_transformers_computes() {
    let sizes = json!({
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 8192,
        "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6,
    });
    let yarn = json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 256}});
    let wide = json!({"intermediate_size": 16, "num_experts_per_tok": 6, "sliding_window": 300, "attention_bias": false,
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]});
    let mxfp4 = json!({"mxfp4": true, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2});
    let cases = [
        ("gpt_oss", json!({}), [40, 7, 300]),
        ("gpt_oss", yarn, [700, 3, 90]),
        ("gpt_oss", wide, [310, 700, 1]),
        ("gpt_oss", mxfp4, [40, 7, 90]),
    ];
    check_random(&sizes, &cases);
}
