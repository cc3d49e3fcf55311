//! The Qwen3 target against the reference's numbers.

mod common;

use common::{assert_close, device, tensor};
use deepspec_decode::{Feed, Target};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_testkit::golden::Case;
use tch::{Kind, Tensor};

const FORWARD: f64 = 1e-4;

fn load(case: &Case, taps: Vec<i64>, slots: usize) -> TargetModel {
    let options = TargetOptions { device: device(), kind: Kind::Float, slots, taps };
    TargetModel::load(&case.dir, &options).unwrap_or_else(|error| panic!("{error}"))
}

fn feed(target: &mut TargetModel, chunks: &[(usize, usize)], tokens: &Tensor) -> (Tensor, Tensor, Tensor) {
    let out = target.forward(&Feed { chunks, tokens: tokens.reshape([-1]).to_device(device()) });
    let logits = target.logits(&out.hidden).to_device(tch::Device::Cpu);
    (logits, out.hidden.to_device(tch::Device::Cpu), out.taps.to_device(tch::Device::Cpu))
}

#[test]
fn golden_target_qwen3_prefill() {
    let _guard = tch::no_grad_guard();
    let case = Case::load("target_qwen3");
    let layers = case.hyper("num_layers").as_i64().unwrap();
    let mut target = load(&case, (-1..layers).collect(), 2);
    let ids = tensor(case.input("input_ids"));
    let lens: Vec<i64> = case.hyper("seq_lens").as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect();
    // Both sequences in one ragged feed.
    let rows: Vec<Tensor> = lens.iter().enumerate().map(|(b, &len)| ids.get(b as i64).narrow(0, 0, len)).collect();
    let chunks: Vec<(usize, usize)> = lens.iter().enumerate().map(|(slot, &len)| (slot, len as usize)).collect();
    let (logits, hidden, taps) = feed(&mut target, &chunks, &Tensor::cat(&rows, 0));
    let taps = taps.view([taps.size()[0], layers + 1, -1]);
    let mut start = 0;
    for (b, &len) in lens.iter().enumerate() {
        let of = |name: &str| tensor(case.expected(name)).get(b as i64).narrow(0, 0, len);
        assert_close("embed_output", &taps.narrow(0, start, len).select(1, 0), &of("embed_output"), FORWARD);
        assert_close("last_hidden_state", &hidden.narrow(0, start, len), &of("last_hidden_state"), FORWARD);
        assert_close("logits", &logits.narrow(0, start, len), &of("logits"), FORWARD);
        let expected = tensor(case.expected("layer_outputs"));
        for layer in 0..layers {
            let expected = expected.get(layer).get(b as i64).narrow(0, 0, len);
            assert_close("layer_outputs", &taps.narrow(0, start, len).select(1, layer + 1), &expected, FORWARD);
        }
        start += len;
    }
}

#[test]
fn golden_target_qwen3_cached_steps() {
    let _guard = tch::no_grad_guard();
    let case = Case::load("target_qwen3");
    // Slot 1 of 3, so that slot indexing matters.
    let mut target = load(&case, vec![], 3);
    let prompt = tensor(case.input("decode_prompt"));
    let expected = tensor(case.expected("decode_logits"));
    let tokens = case.expected("decode_tokens").ints();
    let last = tensor(case.expected("decode_last_hidden"));
    let (mut logits, mut hidden, _) = feed(&mut target, &[(1, prompt.numel())], &prompt);
    for (step, &token) in tokens.iter().enumerate() {
        let row = logits.size()[0] - 1;
        assert_close("decode_logits", &logits.get(row), &expected.get(step as i64), FORWARD);
        assert_close("decode_last_hidden", &hidden.get(row), &last.get(step as i64), FORWARD);
        assert_eq!(logits.get(row).argmax(0, false).int64_value(&[]), token);
        (logits, hidden, _) = feed(&mut target, &[(1, 1)], &Tensor::from_slice(&[token]));
    }
}

#[test]
fn golden_target_qwen3_chunks_and_rollback() {
    let _guard = tch::no_grad_guard();
    let case = Case::load("target_qwen3");
    let layers = case.hyper("num_layers").as_i64().unwrap();
    let mut target = load(&case, (0..layers - 1).collect(), 2);
    let prompt = tensor(case.input("decode_prompt"));
    let _ = feed(&mut target, &[(0, prompt.numel())], &prompt);
    let chunk = tensor(case.input("chunk1_ids"));
    let (logits, _, taps) = feed(&mut target, &[(0, chunk.numel())], &chunk);
    assert_close("chunk1_logits", &logits, &tensor(case.expected("chunk1_logits")).get(0), FORWARD);
    let taps = taps.view([taps.size()[0], layers - 1, -1]).transpose(0, 1);
    assert_close("chunk1_layer_outputs", &taps, &tensor(case.expected("chunk1_layer_outputs")), FORWARD);
    target.truncate(0, case.hyper("crop_to").as_u64().unwrap() as usize);
    let chunk = tensor(case.input("chunk2_ids"));
    let (logits, _, _) = feed(&mut target, &[(0, chunk.numel())], &chunk);
    assert_close("chunk2_logits", &logits, &tensor(case.expected("chunk2_logits")).get(0), FORWARD);
}

#[test]
fn both_spellings_of_the_config_mean_the_same_model() {
    let case = Case::load("target_qwen3");
    let flat = tempfile::tempdir().unwrap();
    std::fs::copy(case.dir.join("config.hub_v4_style.json"), flat.path().join("config.json")).unwrap();
    std::fs::copy(case.dir.join("model.safetensors"), flat.path().join("model.safetensors")).unwrap();
    let (a, b) = (deepspec_models::ModelConfig::load(&case.dir).unwrap(), deepspec_models::ModelConfig::load(flat.path()).unwrap());
    let strip = |config: deepspec_models::ModelConfig| deepspec_models::ModelConfig { raw: serde_json::Map::new(), ..config };
    assert_eq!(strip(a), strip(b));
}
