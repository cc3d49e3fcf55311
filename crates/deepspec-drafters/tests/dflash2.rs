//! Tests DFlash 2 against its formulas, against autograd and against the speculators package, and
//! its decoding against its training.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{assert_close, noise};
use deepspec_checkpoint::{CheckpointFormat, Target, convert};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockBatch, BlockSpec, Convolution, DFLASH2_SUMS, DFlash2, DFlash2Config, DFlash2Proposer,
    DFlash2Settings, DSpark, DSparkConfig, DSparkSettings, DraftDecoder, LossDenominator, LossRecipe,
    LossSum, TrainSample, open_checkpoint,
};
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_models::{ModelConfig, Weights, save};
use deepspec_testkit::{golden, skip};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const VOCAB: i64 = 96;
const WIDTH: i64 = 32;
const BLOCK: usize = 6;
const TOP_K: i64 = 24;
const TOKENS: usize = 40;
const ALPHA: f64 = 0.7;

fn decoder() -> DraftDecoder {
    let model = json!({
        "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB,
        "initializer_range": 0.2,
    });
    let model = ModelConfig::parse(Path::new("config.json"), model.as_object().cloned().unwrap()).unwrap();
    DraftDecoder { model, taps: Tap::from_layer_ids([1, 2]).unwrap(), num_target_layers: 4 }
}

fn blocks() -> BlockSpec {
    BlockSpec {
        block_size: BLOCK,
        slots: SlotTarget::FillIn,
        mask_token_id: 3,
        causal: false,
        num_anchors: 8,
    }
}

fn fresh(kernel_size: i64) -> DFlash2 {
    let config = DFlash2Config {
        decoder: decoder(),
        settings: DFlash2Settings {
            blocks: blocks(),
            convolution: Convolution { kernel_size, group_size: 16 },
            selector_rank: 8,
            selector_top_k: TOP_K,
        },
    };
    config.check().unwrap();
    DFlash2::fresh(config, &noise(7, &[VOCAB, WIDTH]), &noise(8, &[VOCAB, WIDTH]), 11, Kind::Float)
}

/// A model whose convolutions and selector are not trivial, saved and loaded.
fn trained(kernel_size: i64) -> DFlash2 {
    let model = fresh(kernel_size);
    let _guard = tch::no_grad_guard();
    for (i, (name, parameter)) in model.parameters().iter().enumerate() {
        if name.contains("_conv.") || name.starts_with("candidate_selector.") {
            let _ = parameter.shallow_clone().g_add_(&(noise(30 + i as u64, &parameter.size()) * 0.2));
        }
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
    save(&dir.path().join("model.safetensors"), &model.checkpoint(), Kind::Float).unwrap();
    let loaded = DFlash2::load(dir.path(), Device::Cpu, Kind::Float).unwrap();
    assert_eq!(loaded.config().settings.blocks, blocks());
    assert_eq!(loaded.config().settings.convolution, model.config().settings.convolution);
    loaded
}

/// Random states for a random text; the last anchors have few supervised tokens after them.
fn sample() -> TrainSample {
    TrainSample {
        input_ids: (0..TOKENS as i64).map(|i| (i * 37 + 5) % VOCAB).collect(),
        loss_mask: (0..TOKENS).map(|i| i % 13 > 2).collect(),
        taps: noise(5, &[TOKENS as i64, 2 * WIDTH]),
        last: noise(6, &[TOKENS as i64, WIDTH]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![3, 6, 9, 11, 17, 32],
    }
}

fn batch(model: &DFlash2) -> BlockBatch {
    model.config().batch(&[sample()], 4.0, Device::Cpu, Kind::Float).unwrap()
}

#[test]
fn a_fresh_one_is_dflash() {
    let _guard = tch::no_grad_guard();
    let dflash = DSparkConfig {
        decoder: decoder(),
        settings: DSparkSettings { blocks: blocks(), markov: None, confidence: None },
    };
    let (embed, head) = (noise(7, &[VOCAB, WIDTH]), noise(8, &[VOCAB, WIDTH]));
    let dflash = DSpark::fresh(dflash, &embed, &head, 11, Kind::Float);
    let model = fresh(2);
    let expected =
        dflash.hidden_states(&dflash.config().batch(&[sample()], 4.0, Device::Cpu, Kind::Float).unwrap());
    let hidden = model.hidden_states(&batch(&model));
    // DFlash projects the shared input of its masked slots once in the first layer, so the matmuls
    // have other shapes.
    assert_close("states", &hidden, &expected, 5e-6);
    let (_, features) = model.teacher_forced_features(&hidden, &batch(&model).previous).unwrap();
    let logits = model.teacher_forced_logits(&hidden.flatten(0, 1), Some(&features.flatten(0, 1)));
    let (best, all) = (logits.isfinite(), dflash.base_logits(&hidden.flatten(0, 1)));
    assert_eq!(best.sum(Kind::Int64).int64_value(&[]), TOP_K * best.size()[0]);
    assert!(logits.argmax(-1, false).equal(&all.argmax(-1, false)));
    assert_close("candidates", &logits.masked_select(&best), &all.masked_select(&best), 1e-6);
}

/// The parameter `name` as a flat list of numbers.
fn numbers(model: &DFlash2, name: &str) -> Vec<f64> {
    let (_, parameter) = model.parameters().iter().find(|(other, _)| other == name).unwrap();
    Vec::try_from(parameter.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

/// Scores of all drafts `[A·γ, V]`, −∞ except for the candidates, computed element by element:
/// `S(a, b) = U(b) + Σ_r A[a, r]·(P h)[r]·B[b, r]`.
#[test]
fn the_selector_scores_as_its_formula_says() {
    let _guard = tch::no_grad_guard();
    let model = trained(2);
    let batch = batch(&model);
    let hidden = model.hidden_states(&batch);
    let base = model.base_logits(&hidden).flatten(0, 1);
    let (_, features) = model.teacher_forced_features(&hidden, &batch.previous).unwrap();
    let found = model.teacher_forced_logits(&hidden.flatten(0, 1), Some(&features.flatten(0, 1)));
    let part = |name: &str| numbers(&model, &format!("candidate_selector.{name}"));
    let (a, b, p) =
        (part("predecessor_codebook"), part("successor_codebook"), part("hidden_projection.weight"));
    let states: Vec<f64> = Vec::try_from(hidden.to_kind(Kind::Double).flatten(0, -1)).unwrap();
    let previous: Vec<i64> = Vec::try_from(batch.previous.flatten(0, -1)).unwrap();
    let width = WIDTH as usize;
    for (row, &before) in previous.iter().enumerate() {
        let unary: Vec<f64> = Vec::try_from(base.get(row as i64).to_kind(Kind::Double)).unwrap();
        let mut order: Vec<usize> = (0..unary.len()).collect();
        order.sort_by(|&x, &y| unary[y].total_cmp(&unary[x]));
        let score = |token: usize| {
            let pair = |r: usize| {
                let state = &states[row * width..(row + 1) * width];
                let projected: f64 = (0..width).map(|c| p[r * width + c] * state[c]).sum();
                a[before as usize * 8 + r] * projected * b[token * 8 + r]
            };
            unary[token] + (0..8).map(pair).sum::<f64>()
        };
        for (place, &token) in order.iter().enumerate() {
            let found = found.double_value(&[row as i64, token as i64]);
            if place < TOP_K as usize {
                let expected = score(token);
                assert!((found - expected).abs() < 1e-4 * expected.abs().max(1.0), "{found}, {expected}");
            } else {
                assert_eq!(found, f64::NEG_INFINITY);
            }
        }
    }
}

/// The closed-form gradients of all losses match autograd on the same formulas.
#[test]
fn gradients_are_autograds() {
    for kernel_size in [1, 2, 3] {
        let model = trained(kernel_size);
        for (_, parameter) in model.parameters() {
            let _ = parameter.set_requires_grad(true);
        }
        let (batch, recipe) =
            (batch(&model), LossRecipe { ce_alpha: 1.0, l1_alpha: 0.3, ..LossRecipe::NONE });
        let (loss, named) = slow(&model, &batch, &recipe);
        loss.backward();
        let taken = || -> Vec<(String, Tensor)> {
            let gradient = |(name, parameter): &(String, Tensor)| {
                let gradient = parameter.grad().copy();
                parameter.shallow_clone().zero_grad();
                (name.clone(), gradient)
            };
            model.parameters().iter().map(gradient).collect()
        };
        let expected = taken();
        let sums = model.accumulate(&batch, &recipe, ALPHA, LossDenominator(50.0), None);
        for ((name, found), (_, expected)) in taken().into_iter().zip(&expected) {
            let size = expected.abs().max().double_value(&[]);
            assert!(size > 0.0, "{name} has gradients of {size}");
            assert_close(&format!("K {kernel_size}: {name}"), &found, expected, 2e-5 * size.max(1e-3));
        }
        let sums: Vec<f64> = Vec::try_from(sums).unwrap();
        for (place, sum) in LossSum::all(BLOCK - 1, &DFLASH2_SUMS).enumerate() {
            let name = sum.name();
            if let Some((_, expected)) = named.iter().find(|(other, _)| *other == name) {
                let found = sums[place];
                assert!((found - expected).abs() < 1e-4 * expected.max(1.0), "{name}: {found}, {expected}");
            }
        }
        // Some labels are candidates, some are not.
        let recalled = named.iter().find(|(name, _)| *name == "recalled").unwrap().1;
        assert!(recalled > 0.0 && recalled < batch.supervised_indices.numel() as f64, "{recalled}");
    }
}

/// The loss with its autograd graph, and sums by name.
fn slow(model: &DFlash2, batch: &BlockBatch, recipe: &LossRecipe) -> (Tensor, Vec<(&'static str, f64)>) {
    let hidden = model.hidden_states(batch);
    let rows = |t: &Tensor| t.flatten(0, 1).index_select(0, &batch.supervised_indices);
    let (_, features) = model.teacher_forced_features(&hidden, &batch.previous).unwrap();
    let logits = model.base_logits(&rows(&hidden));
    let teacher = model.base_logits(&batch.teacher_states()).detach().softmax(-1, Kind::Float);
    let labels = batch.labels.unsqueeze(1);
    let ce = -logits.log_softmax(-1, Kind::Float).gather(1, &labels, false).squeeze_dim(1);
    let l1 = (logits.softmax(-1, Kind::Float) - &teacher).abs().sum_dim_intlist(-1, false, Kind::Float);
    let restricted = model.teacher_forced_logits(&rows(&hidden), Some(&rows(&features)));
    let q = restricted.softmax(-1, Kind::Float);
    let of_label = q.gather(1, &labels, false).squeeze_dim(1);
    let recalled = of_label.gt(0.0);
    let selector = -of_label.masked_select(&recalled).log();
    let accept = q.minimum(&teacher).sum_dim_intlist(-1, false, Kind::Float);
    let weighted = |values: &Tensor, weights: &Tensor| (values * weights).sum(Kind::Float);
    let (ce, l1) = (weighted(&ce, &batch.weights), weighted(&l1, &batch.weights));
    let selector = weighted(&selector, &batch.weights.masked_select(&recalled));
    let loss = &ce * recipe.ce_alpha + &l1 * recipe.l1_alpha + &selector * ALPHA;
    let first = batch.supervised_indices.remainder(BLOCK as i64 - 1).eq(0);
    let sums = [
        ("ce", &ce),
        ("l1", &l1),
        ("selector", &selector),
        ("loss", &loss),
        ("recalled", &recalled.sum(Kind::Float)),
        ("accept@0", &accept.masked_select(&first).sum(Kind::Float)),
    ];
    let sums = sums.map(|(name, sum)| (name, sum.double_value(&[])));
    (loss / (50.0 + 1e-6), sums.to_vec())
}

/// Drafting matches training: with the drafted tokens as previous tokens, training gives the same
/// distributions.
#[test]
fn it_decodes_as_it_was_trained() {
    let _guard = tch::no_grad_guard();
    let gamma = BLOCK as i64 - 1;
    for temperature in [0.0, 0.8] {
        let mut proposer = DFlash2Proposer::new(trained(2), 3);
        let (sample, mut seen) = (sample(), 0);
        for &anchor in &sample.anchors {
            let rows = (anchor - seen) as i64;
            let tokens = Tensor::from_slice(&sample.input_ids[seen..anchor]);
            let next = Tensor::from_slice(&sample.input_ids[seen + 1..=anchor]);
            let taps = sample.taps.narrow(0, seen as i64, rows);
            let context = Context {
                captured_states: taps,
                hidden: None,
                tokens,
                next,
                chunks: vec![(2, rows as usize)],
            };
            let uniforms = noise(anchor as u64, &[1, gamma]).to_kind(Kind::Double).sigmoid();
            let proposal = proposer.propose(&DraftRequest {
                context: &context,
                slots: &[2],
                anchors: &Tensor::from_slice(&sample.input_ids[anchor..=anchor]),
                uniforms: &uniforms,
                sampling: &SamplingBatch::new(vec![Sampling::new(temperature, 0)], Device::Cpu),
            });
            let drafted: Vec<i64> = Vec::try_from(proposal.tokens.get(0)).unwrap();
            assert_eq!(drafted.len(), gamma as usize);
            // A training block with the drafted tokens as its text.
            let mut ids = sample.input_ids.clone();
            ids.splice(anchor + 1..anchor + 1 + drafted.len(), drafted);
            let forced = TrainSample { input_ids: ids, anchors: vec![anchor], ..self::sample() };
            let model = proposer.model();
            let batch = model.config().batch(&[forced], 4.0, Device::Cpu, Kind::Float).unwrap();
            let hidden = model.hidden_states(&batch);
            let (_, features) = model.teacher_forced_features(&hidden, &batch.previous).unwrap();
            let logits = model.teacher_forced_logits(&hidden.flatten(0, 1), Some(&features.flatten(0, 1)));
            if temperature > 0.0 {
                let expected = (logits / temperature).softmax(-1, Kind::Float);
                assert_close("q", &proposal.probs.expect("drawn at temperature 1").get(0), &expected, 1e-5);
            } else {
                assert!(logits.argmax(-1, false).equal(&proposal.tokens.get(0)));
            }
            seen = anchor;
        }
    }
}

/// The speculators package reads the same weights and computes the same values.
#[test]
fn speculators_computes_the_same() {
    let Some(python) = skip::speculators_python("speculators and torch") else { return };
    let _guard = tch::no_grad_guard();
    let root = tempfile::tempdir().unwrap();
    let [own, target] = ["own", "target"].map(|name| root.path().join(name));
    let case = golden::dir("dflash");
    fs::create_dir(&own).unwrap();
    fs::create_dir(&target).unwrap();
    let mut config: Value =
        serde_json::from_str(&fs::read_to_string(case.join("config.json")).unwrap()).unwrap();
    config["sample_from_anchor"] = json!(false);
    config["target_layer_ids"] = json!([0, 2, 4]);
    fs::write(own.join("config.json"), config.to_string()).unwrap();
    fs::copy(case.join("model.safetensors"), own.join("model.safetensors")).unwrap();

    // The package's config of the DFlash, and the additional tensors of DFlash 2.
    let model = ModelConfig::load(&own).unwrap();
    let (width, vocab, layers) = (model.hidden_size, model.vocab_size, model.layers.len());
    let ends = |weights: &Weights, name: &str| weights.get(name, &[vocab, width]).unwrap();
    let weights = Weights::open(&own, "drafter", Device::Cpu, Kind::Float).unwrap();
    let of_target = [
        ("model.embed_tokens.weight".to_string(), ends(&weights, "embed_tokens.weight")),
        ("lm_head.weight".into(), ends(&weights, "lm_head.weight")),
        ("model.norm.weight".into(), noise(3, &[width])),
    ];
    save(&target.join("model.safetensors"), &of_target, Kind::Float).unwrap();
    let mut target_config = config.clone();
    target_config["architectures"] = json!(["Qwen3ForCausalLM"]);
    target_config["num_hidden_layers"] = config["num_target_layers"].clone();
    target_config.as_object_mut().unwrap().remove("layer_types");
    fs::write(target.join("config.json"), target_config.to_string()).unwrap();

    let (groups, rank) = (width / 16, 8);
    let mut more = vec![
        ("candidate_selector.predecessor_codebook".to_string(), noise(41, &[vocab, rank])),
        ("candidate_selector.successor_codebook".into(), noise(42, &[vocab, rank])),
        ("candidate_selector.hidden_projection.weight".into(), noise(43, &[rank, width]) * 0.3),
    ];
    for (layer, half) in (0..layers).flat_map(|layer| ["attention", "mlp"].map(|half| (layer, half))) {
        let (name, seed) =
            (format!("layers.{layer}.{half}_conv"), 50 + 10 * layer as u64 + half.len() as u64);
        more.push((format!("{name}.base_kernel"), noise(seed, &[2, 2, width])));
        let projection = noise(seed + 1, &[2 * 2 * groups, width]) * 0.2;
        more.push((format!("{name}.kernel_projection.weight"), projection));
    }
    let keys =
        json!({"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": rank, "selector_top_k": TOP_K});
    let file = own.join("model.safetensors");
    let mut tensors: Vec<(String, Tensor)> = Tensor::read_safetensors(&file).unwrap();
    tensors.extend(more);
    save(&file, &tensors, Kind::Float).unwrap();
    config["architectures"] = json!(["Qwen3DFlash2Model"]);
    let map = config.as_object_mut().unwrap();
    map.retain(|key, _| !["markov_rank", "enable_confidence_head"].contains(&key.as_str()));
    map.extend(keys.as_object().unwrap().clone());
    fs::write(own.join("config.json"), config.to_string()).unwrap();

    // Converts to their layout and to z-lab's, and back without loss.
    let opened = Target::open(&target, target.to_str().unwrap()).unwrap();
    let written = |from: &Path, to: CheckpointFormat, name: &str| {
        let (source, dir) = (open_checkpoint(from).unwrap(), root.path().join(name));
        convert(&source, to, Some(&opened)).unwrap().write(&dir, false).unwrap();
        dir
    };
    let bytes = |dir: &Path| {
        let checkpoint = open_checkpoint(dir).unwrap();
        let names = checkpoint.tensors().iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>();
        names.into_iter().map(|name| (checkpoint.tensors().bytes(&name).unwrap(), name)).collect::<Vec<_>>()
    };
    let theirs = written(&own, CheckpointFormat::Speculators, "theirs");
    for (to, name) in [(CheckpointFormat::Speculators, "by_speculators"), (CheckpointFormat::Zlab, "by_zlab")]
    {
        let back = written(&written(&own, to, name), CheckpointFormat::Reference, &format!("{name}_back"));
        assert_eq!(bytes(&back), bytes(&own), "{name}");
        let [one, other] = [&back, &own].map(|dir| DFlash2Config::load(dir).unwrap());
        assert_eq!(one, other, "{name}");
    }

    let given = TrainSample {
        input_ids: (0..TOKENS as i64).map(|i| (i * 37 + 5) % vocab).collect(),
        loss_mask: vec![true; TOKENS],
        taps: noise(5, &[TOKENS as i64, 3 * width]),
        last: noise(6, &[TOKENS as i64, width]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![0, 3, 4, 11],
    };
    let files = ["given", "out"].map(|name| root.path().join(format!("{name}.safetensors")));
    let tensors = [
        ("input_ids", Tensor::from_slice(&given.input_ids).unsqueeze(0)),
        ("taps", given.taps.unsqueeze(0)),
        ("last", given.last.unsqueeze(0)),
        ("anchors", Tensor::from_slice(&given.anchors.iter().map(|&a| a as i64).collect::<Vec<_>>())),
    ];
    Tensor::write_safetensors(&tensors, &files[0]).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/speculators_forward.py");
    let mut command = Command::new(python);
    let run = command.arg(script).arg(&theirs).args(&files).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));

    let found = Tensor::read_safetensors(&files[1]).unwrap();
    let (_, [hidden, tokens, scores]) = (
        (),
        ["hidden", "candidates", "scores"].map(|name| {
            let (_, tensor) = found.iter().find(|(other, _)| other == name).unwrap();
            // Their slot 0 exists but drafts nothing.
            tensor.narrow(1, 1, tensor.size()[1] - 1)
        }),
    );
    let drafter = DFlash2::load(&own, Device::Cpu, Kind::Float).unwrap();
    let batch = drafter.config().batch(&[given], 4.0, Device::Cpu, Kind::Float).unwrap();
    let own = drafter.hidden_states(&batch);
    assert_close("hidden", &own, &hidden, 1e-4);
    let (_, features) = drafter.teacher_forced_features(&own, &batch.previous).unwrap();
    let logits = drafter.teacher_forced_logits(&own.flatten(0, 1), Some(&features.flatten(0, 1)));
    let theirs = tokens.to_kind(Kind::Int64).flatten(0, 1);
    assert_close("scores", &logits.gather(1, &theirs, false), &scores.flatten(0, 1), 1e-3);
}
