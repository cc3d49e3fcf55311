//! Compares targets of both families with the reference.

mod common;

use std::path::Path;

use common::{assert_close, device, tensor};
use deepspec_core::Tap;
use deepspec_engine::{
    DraftSampling, Engine, EngineOptions, ModelInput, Proposer, Request, Sampling, Target, VerifyRule,
};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_testkit::golden::Case;
use tch::{Kind, Tensor};

const FORWARD: f64 = 1e-4;

fn load(case: &Case, taps: Vec<Tap>, slots: usize) -> TargetModel {
    let options = TargetOptions { device: device(), kind: Kind::Float, slots, taps };
    TargetModel::load(&case.dir, &options).unwrap_or_else(|error| panic!("{error}"))
}

fn feed(target: &mut TargetModel, chunks: &[(usize, usize)], tokens: &Tensor) -> (Tensor, Tensor, Tensor) {
    let out = target.forward(&ModelInput { chunks, tokens: tokens.reshape([-1]).to_device(device()) });
    let logits = target.logits(&out.hidden).to_device(tch::Device::Cpu);
    (logits, out.hidden.to_device(tch::Device::Cpu), out.captured_states.to_device(tch::Device::Cpu))
}

fn check_prefill(name: &str) {
    let _guard = tch::no_grad_guard();
    let case = Case::load(name);
    let layers = case.hyper("num_layers").as_i64().unwrap();
    let mut target = load(&case, Tap::from_layer_ids(-1..layers).unwrap(), 2);
    let ids = tensor(case.input("input_ids"));
    let lens: Vec<i64> =
        case.hyper("seq_lens").as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect();
    // Both sequences in one ragged batch.
    let rows: Vec<Tensor> =
        lens.iter().enumerate().map(|(b, &len)| ids.get(b as i64).narrow(0, 0, len)).collect();
    let chunks: Vec<(usize, usize)> =
        lens.iter().enumerate().map(|(slot, &len)| (slot, len as usize)).collect();
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
            assert_close(
                "layer_outputs",
                &taps.narrow(0, start, len).select(1, layer + 1),
                &expected,
                FORWARD,
            );
        }
        start += len;
    }
}

fn check_cached_steps(name: &str) {
    let _guard = tch::no_grad_guard();
    let case = Case::load(name);
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

fn check_chunks_and_rollback(name: &str) {
    let _guard = tch::no_grad_guard();
    let case = Case::load(name);
    let layers = case.hyper("num_layers").as_i64().unwrap();
    let mut target = load(&case, Tap::from_layer_ids(0..layers - 1).unwrap(), 2);
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
fn golden_target_qwen3() {
    check_prefill("target_qwen3");
    check_cached_steps("target_qwen3");
    check_chunks_and_rollback("target_qwen3");
}

#[test]
fn golden_target_gemma4() {
    check_prefill("target_gemma4");
    check_cached_steps("target_gemma4");
    check_chunks_and_rollback("target_gemma4");
}

/// The engine's greedy answer equals the reference's trace.
#[test]
fn golden_target_gemma4_in_the_engine() {
    let case = Case::load("target_gemma4");
    let (prompt, tokens) = (case.input("decode_prompt").ints(), case.expected("decode_tokens").ints());
    let options = EngineOptions {
        slots: 3,
        context: 256,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
        counts_overrun: true,
    };
    let mut engine = Engine::new(load(&case, vec![], 3), None::<Box<dyn Proposer>>, options);
    let request = |index: usize| Request {
        id: index.to_string(),
        // The full prompt and shorter ones.
        prompt: prompt[..prompt.len() - index % 4].to_vec(),
        sampling: Sampling::new(0.0, 0),
        max_new_tokens: tokens.len(),
        stop_ids: vec![],
    };
    let done = engine.run((0..6).map(request).collect(), |_| {}).unwrap();
    assert_eq!((&done[0].tokens, &done[4].tokens), (&tokens, &tokens));
}

/// A sequence's hidden states do not depend on the rest of the batch.
#[test]
#[cfg_attr(not(feature = "kernels"), ignore = "rows have the same bits in every batch with kernels only")]
fn golden_target_gemma4_states_have_the_same_bits_in_every_batch() {
    let case = Case::load("target_gemma4");
    let _guard = tch::no_grad_guard();
    let mut target = load(&case, Tap::from_layer_ids([0, 2, 5]).unwrap(), 2);
    let ids = tensor(case.input("decode_prompt")).reshape([-1]);
    let (len, other) = (ids.numel(), tensor(case.input("chunk1_ids")).reshape([-1]));
    let (_, alone, alone_taps) = feed(&mut target, &[(1, len)], &ids);
    target.truncate(1, 0);
    let chunks = [(0, other.numel()), (1, len)];
    let (_, beside, beside_taps) = feed(&mut target, &chunks, &Tensor::cat(&[&other, &ids], 0));
    let own = |rows: &Tensor| rows.narrow(0, other.numel() as i64, len as i64);
    assert!(own(&beside).equal(&alone) && own(&beside_taps).equal(&alone_taps));
}

#[test]
fn both_spellings_of_the_config_mean_the_same_model() {
    let case = Case::load("target_qwen3");
    let flat = tempfile::tempdir().unwrap();
    std::fs::copy(case.dir.join("config.hub_v4_style.json"), flat.path().join("config.json")).unwrap();
    std::fs::copy(case.dir.join("model.safetensors"), flat.path().join("model.safetensors")).unwrap();
    let (a, b) = (
        deepspec_models::ModelConfig::load(&case.dir).unwrap(),
        deepspec_models::ModelConfig::load(flat.path()).unwrap(),
    );
    let strip = |config: deepspec_models::ModelConfig| deepspec_models::ModelConfig {
        raw: serde_json::Map::new(),
        ..config
    };
    assert_eq!(strip(a), strip(b));
}

/// A golden model in two shards with an index. Its tied head is stored, its body and head have
/// other names, and there are tensors of other parts.
fn sharded(case: &Case, (body, head): (&str, &str), others: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(case.dir.join("model.safetensors")).unwrap();
    let model = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let embedding = model.names().into_iter().find(|name| name.ends_with("embed_tokens.weight")).unwrap();
    let old_body = embedding.strip_suffix("embed_tokens.weight").unwrap();
    let embedding = model.tensor(embedding).unwrap();
    let mut tensors: Vec<(String, safetensors::tensor::TensorView)> = model
        .tensors()
        .into_iter()
        .map(|(name, view)| match name.strip_prefix(old_body) {
            Some(rest) => (format!("{body}{rest}"), view),
            None => (head.to_string(), view),
        })
        .collect();
    for name in others.iter().copied().chain([head]) {
        if !tensors.iter().any(|(known, _)| known == name) {
            tensors.push((name.into(), embedding.clone()));
        }
    }
    let (first, second) = tensors.split_at(tensors.len() / 2);
    let mut weight_map = serde_json::Map::new();
    for (file, part) in
        [("model-00001-of-00002.safetensors", first), ("model-00002-of-00002.safetensors", second)]
    {
        let views: Vec<(&str, &safetensors::tensor::TensorView)> =
            part.iter().map(|(name, view)| (name.as_str(), view)).collect();
        std::fs::write(dir.path().join(file), safetensors::serialize(views, None).unwrap()).unwrap();
        weight_map.extend(part.iter().map(|(name, _)| (name.clone(), file.into())));
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": weight_map});
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(case.dir.join("config.json")).unwrap()).unwrap();
    config["tie_word_embeddings"] = false.into();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

/// Logits of the golden prompt, by the model in `dir`.
fn logits_of(case: &Case, dir: &Path) -> Tensor {
    let options = TargetOptions { device: device(), kind: Kind::Float, slots: 1, taps: vec![] };
    let mut target = TargetModel::load(dir, &options).unwrap_or_else(|error| panic!("{error}"));
    let prompt = tensor(case.input("decode_prompt"));
    feed(&mut target, &[(0, prompt.numel())], &prompt).0
}

#[test]
fn shards_an_untied_head_and_multimodal_names_are_the_same_model() {
    let _guard = tch::no_grad_guard();
    let others = ["model.vision_tower.encoder.layers.0.mlp.weight", "model.embed_audio.norm.weight"];
    let layouts = [
        ("target_qwen3", ("model.", "lm_head.weight"), &[][..]),
        ("target_gemma4", ("model.", "lm_head.weight"), &[][..]),
        ("target_gemma4", ("model.language_model.", "lm_head.weight"), &others[..]),
        ("target_gemma4", ("language_model.model.", "language_model.lm_head.weight"), &others[..]),
    ];
    for (name, names, others) in layouts {
        let case = Case::load(name);
        let dir = sharded(&case, names, others);
        assert!(logits_of(&case, &case.dir).equal(&logits_of(&case, dir.path())), "{name}: {names:?}");
        let config = deepspec_models::ModelConfig::load(dir.path()).unwrap();
        let (embed, head) =
            deepspec_models::load_embed_and_head(dir.path(), &config, device(), Kind::Float).unwrap();
        assert_eq!(embed.size(), [config.vocab_size, config.hidden_size]);
        assert_eq!(head.size(), embed.size());
    }
}

#[test]
fn damaged_shards_are_refused() {
    let case = Case::load("target_qwen3");
    let dir = sharded(&case, ("model.", "lm_head.weight"), &[]);
    let options = TargetOptions { device: device(), kind: Kind::Float, slots: 1, taps: vec![] };
    let refused = |hint: &str| {
        let error = TargetModel::load(dir.path(), &options).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(hint) && !error.contains('\n'), "{error}");
    };
    let shard = dir.path().join("model-00002-of-00002.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 7]).unwrap();
    refused("truncated");
    std::fs::remove_file(&shard).unwrap();
    refused("model-00002-of-00002.safetensors");
    let index = dir.path().join("model.safetensors.index.json");
    std::fs::write(&index, r#"{"weight_map": {"x": "../x.safetensors"}}"#).unwrap();
    refused("outside the folder");
}
