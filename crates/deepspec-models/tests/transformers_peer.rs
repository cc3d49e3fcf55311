//! The tiny target against transformers, in float32: taps, final-normed states and logits of whole conversations.
//!
//! Runs where `DEEPSPEC_TEST_PYTHON` names a Python that has torch and transformers; says so where it does not.

mod common;

use std::path::Path;
use std::process::Command;

use common::{assert_close, device, max_abs, tensor};
use deepspec_decode::{Feed, Target};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_testkit::golden;
use tch::{Device, Kind, Tensor};

const FORWARD: f64 = 1e-4;

const SCRIPT: &str = r#"
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

model_dir, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model_dir)
model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
conversations = [
    [("user", "Hi"), ("assistant", "Hello.")],
    [("system", "You are a helpful assistant."), ("user", "Leopold has 4 envelopes with 8 candles in each. How many candles are there?"),
     ("assistant", "Leopold has 4 x 8 = 32 candles. The answer is 32."), ("user", "And with 9 more?"), ("assistant", "The sum reads 32 + 9 = 41.")],
    [("user", "Write a function that adds up the small values in a list. " * 12), ("assistant", "```python\ndef total(xs):\n    return sum(xs)\n```\n" * 8)],
]
tensors = {}
for index, conversation in enumerate(conversations):
    messages = [{"role": role, "content": content} for role, content in conversation]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    raw = []
    # Hooks, because hidden_states ends with the normed state in place of the last layer's raw output.
    hooks = [layer.register_forward_hook(lambda _, __, out: raw.append((out[0] if isinstance(out, tuple) else out)[0])) for layer in model.model.layers]
    with torch.no_grad():
        body = model.model(ids, output_hidden_states=True)
        logits = model.lm_head(body.last_hidden_state)
    [hook.remove() for hook in hooks]
    taps = torch.cat([body.hidden_states[0][0]] + raw, dim=-1)
    values = {"ids": ids[0].int(), "taps": taps, "hidden": body.last_hidden_state[0], "logits": logits[0]}
    tensors |= {f"{name}{index}": value.contiguous().clone() for name, value in values.items()}
save_file(tensors, output)
"#;

#[test]
fn the_tiny_target_computes_what_transformers_computes() {
    let Some(python) = std::env::var("DEEPSPEC_TEST_PYTHON").ok().filter(|python| !python.is_empty()) else {
        eprintln!("skipped: DEEPSPEC_TEST_PYTHON names no Python with torch and transformers");
        return;
    };
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
    let scratch = tempfile::tempdir().unwrap();
    let reference = scratch.path().join("reference.safetensors");
    let output = Command::new(python)
        .args(["-c", SCRIPT])
        .args([&dir, &reference])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let arrays = golden::arrays(&reference);

    let _no_grad = tch::no_grad_guard();
    let options = TargetOptions { device: device(), kind: Kind::Float, slots: 3, taps: (-1..6).collect() };
    let mut target = TargetModel::load(&dir, &options).unwrap();
    let of = |name: &str, index: usize| tensor(&arrays[&format!("{name}{index}")]);
    // Each conversation alone, then all in one ragged feed.
    for batch in [&[0][..], &[1], &[2], &[2, 0, 1]] {
        let ids: Vec<Tensor> = batch.iter().map(|&index| of("ids", index)).collect();
        let chunks: Vec<(usize, usize)> =
            ids.iter().enumerate().map(|(slot, ids)| (slot, ids.numel())).collect();
        let tokens = Tensor::cat(&ids, 0).to_device(device());
        let out = target.forward(&Feed { chunks: &chunks, tokens });
        let found = [("logits", target.logits(&out.hidden)), ("hidden", out.hidden), ("taps", out.taps)];
        for (name, found) in found {
            let expected = Tensor::cat(&batch.iter().map(|&index| of(name, index)).collect::<Vec<_>>(), 0);
            let off = max_abs(&(found.to_device(Device::Cpu) - &expected));
            eprintln!("{name} of {batch:?}: up to {:.1}, off by {off:.1e}", max_abs(&expected));
            assert_close(name, &found.to_device(Device::Cpu), &expected, FORWARD);
        }
        for &(slot, _) in &chunks {
            target.truncate(slot, 0);
        }
    }
}
