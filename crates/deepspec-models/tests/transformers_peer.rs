//! Compares targets with transformers in float32: taps, final-normed states and logits of whole
//! sequences.
//!
//! Runs only if `DEEPSPEC_TEST_PYTHON` names a Python with torch and transformers.

mod common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use common::{assert_close, device, max_abs, tensor};
use deepspec_core::Tap;
use deepspec_engine::{ModelInput, Target};
use deepspec_models::{ModelConfig, TargetModel, TargetOptions};
use deepspec_testkit::golden::{self, Array};
use deepspec_testkit::skip;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const FORWARD: f64 = 1e-4;

const SCRIPT: &str = r#"
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

model_dir, output = sys.argv[1:3]
if len(sys.argv) > 3:
    # A random model of the given config, and random ids of the given lengths.
    kind, settings, lengths = sys.argv[3], json.loads(sys.argv[4]), json.loads(sys.argv[5])
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
            if "norm" in name or "layer_scalar" in name:
                tensor.uniform_(0.6, 1.4)
            elif name in model.state_dict():
                tensor.normal_(std=1.0 if "embed" in name else 0.25)
    model.save_pretrained(model_dir)
    sequences = [torch.randint(settings["vocab_size"], (1, length)) for length in lengths]
else:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    sequences = None
conversations = [
    [("user", "Hi"), ("assistant", "Hello.")],
    [("system", "You are a helpful assistant."), ("user", "Leopold has 4 envelopes with 8 candles in each. How many candles are there?"),
     ("assistant", "Leopold has 4 x 8 = 32 candles. The answer is 32."), ("user", "And with 9 more?"), ("assistant", "The sum reads 32 + 9 = 41.")],
    [("user", "Write a function that adds up the small values in a list. " * 12), ("assistant", "```python\ndef total(xs):\n    return sum(xs)\n```\n" * 8)],
]
if sequences is None:
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
    taps = torch.cat([body.hidden_states[0][0]] + raw, dim=-1)
    values = {"ids": ids[0].int(), "taps": taps, "hidden": body.last_hidden_state[0], "logits": logits[0]}
    tensors |= {f"{name}{index}": value.contiguous().clone() for name, value in values.items()}
save_file(tensors, output)
"#;

/// Runs the script with these arguments. None without a Python that can run it; the test is then
/// skipped.
fn reference(arguments: &[&OsStr], output: &Path) -> Option<BTreeMap<String, Array>> {
    let python = skip::python("torch and transformers")?;
    let run = Command::new(python)
        .args(["-c", SCRIPT])
        .args(arguments)
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    Some(golden::arrays(output))
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
}

#[test]
fn the_tiny_target_computes_what_transformers_computes() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
    let scratch = tempfile::tempdir().unwrap();
    let output = scratch.path().join("reference.safetensors");
    if let Some(arrays) = reference(&[dir.as_os_str(), output.as_os_str()], &output) {
        // Each conversation alone, then all in one ragged batch.
        check(&dir, &arrays, &[&[0], &[1], &[2], &[2, 0, 1]]);
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
    for (kind, own, lengths) in cases {
        let mut settings = sizes.as_object().cloned().unwrap();
        settings.extend(own.as_object().cloned().unwrap());
        let scratch = tempfile::tempdir().unwrap();
        let (dir, output) = (scratch.path().join("model"), scratch.path().join("reference.safetensors"));
        let (settings, lengths) = (Value::Object(settings).to_string(), json!(lengths).to_string());
        let own = [kind, &settings, &lengths].map(OsStr::new);
        let Some(arrays) = reference(&[&[dir.as_os_str(), output.as_os_str()], &own[..]].concat(), &output)
        else {
            return;
        };
        check(&dir, &arrays, &[&[0], &[1, 2, 0]]);
    }
}
