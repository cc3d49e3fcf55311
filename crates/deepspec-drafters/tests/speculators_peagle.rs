//! P-EAGLE converted to speculators' layout: that package computes the same logits, losses and gradients. Its sampler takes the same rows
//! if both draw alike.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with speculators and torch.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use common::{assert_close, noise};
use deepspec_checkpoint::{CheckpointFormat, DraftVocab, Target, convert};
use deepspec_core::Tap;
use deepspec_drafters::{
    DownSampling, DraftDecoder, DrafterPlan, Eagle3Norms, LossDenominator, PEagle, PEagleBatch, PEagleConfig,
    PEagleObjective, PEaglePlan, PEagleSettings, TrainSample, open_checkpoint,
};
use deepspec_models::{ModelConfig, save};
use deepspec_testkit::skip;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

const TOKENS: usize = 28;
const VOCAB: i64 = 96;
const WIDTH: i64 = 32;
const DEPTHS: usize = 5;
const FORWARD: f64 = 1e-4;
const GRADIENT: f64 = 5e-4;

/// A drafter to compare.
struct Case {
    name: &'static str,
    family: &'static str,
    norms: Eagle3Norms,
    reduces_vocab: bool,
}

const CASES: [Case; 3] = [
    Case {
        name: "qwen3",
        family: "qwen3",
        norms: Eagle3Norms { before_residual: false, before_fc: false, fc: false, output: false },
        reduces_vocab: false,
    },
    Case {
        name: "llama",
        family: "llama",
        norms: Eagle3Norms { before_residual: true, before_fc: true, fc: false, output: false },
        reduces_vocab: false,
    },
    Case {
        name: "reduced",
        family: "qwen3",
        norms: Eagle3Norms { before_residual: false, before_fc: false, fc: true, output: false },
        reduces_vocab: true,
    },
];

impl Case {
    fn target(&self) -> Value {
        json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": self.family, "hidden_size": WIDTH,
            "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "vocab_size": VOCAB, "initializer_range": 0.2, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": false,
            "tie_word_embeddings": false,
        })
    }

    fn draft_vocab(&self) -> Option<DraftVocab> {
        let counts: Vec<u64> = (0..VOCAB).map(|id| u64::from(id % 3 == 1)).collect();
        self.reduces_vocab.then(|| DraftVocab::most_frequent(&counts, VOCAB as usize / 3).unwrap())
    }

    /// A random drafter whose norms are not all ones, and its target, under `root`.
    fn models(&self, root: &Path) -> PEagle {
        let folder = |name: &str| {
            fs::create_dir_all(root.join(name)).unwrap();
            root.join(name)
        };
        let raw = self.target().as_object().unwrap().clone();
        let target = ModelConfig::parse(Path::new("config.json"), raw).unwrap();
        let vocab = self.draft_vocab();
        let config = PEagleConfig {
            decoder: DraftDecoder {
                model: target.draft_decoder(&[None; 3]).unwrap(),
                taps: Tap::from_layer_ids([0, 1, 3]).unwrap(),
                num_target_layers: 5,
            },
            settings: PEagleSettings {
                num_depths: DEPTHS,
                mask_token_id: VOCAB - 1,
                draft_vocab_size: vocab.as_ref().map(|vocab| vocab.tokens().len() as i64),
                norms: self.norms,
            },
        };
        config.check().unwrap();
        let [embed, head] = [1, 2].map(|seed| noise(seed, &[VOCAB, WIDTH]) * 0.3);
        let model = PEagle::fresh_with_draft_vocab(config, (&embed, &head), vocab.as_ref(), 5, Kind::Float);
        for (seed, (_, parameter)) in
            model.parameters().iter().filter(|(_, tensor)| tensor.dim() == 1).enumerate()
        {
            let _ = parameter.shallow_clone().g_add_(&(noise(9 + seed as u64, &parameter.size()) * 0.2));
        }
        let drafter = folder("drafter");
        save(&drafter.join("model.safetensors"), &model.checkpoint(), Kind::Float).unwrap();
        fs::write(drafter.join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
        let own = [
            ("model.embed_tokens.weight".to_string(), embed),
            ("lm_head.weight".into(), head),
            ("model.norm.weight".into(), noise(3, &[WIDTH])),
        ];
        save(&folder("target").join("model.safetensors"), &own, Kind::Float).unwrap();
        fs::write(root.join("target/config.json"), self.target().to_string()).unwrap();
        model
    }
}

/// Rows of a random text with a gap in its answer, sampled by the plan.
fn sample(plan: &PEaglePlan) -> TrainSample {
    let ids = (noise(5, &[TOKENS as i64]) * 1e4).abs().to_kind(Kind::Int64).remainder(VOCAB - 1);
    let loss_mask: Vec<bool> = (0..TOKENS).map(|at| at > 3 && at != 12 && at < 26).collect();
    // As the script draws: every second one, then the others.
    let fixed_draw = |candidates: &[usize], count: usize, _: usize| {
        let order = candidates.iter().skip(1).step_by(2).chain(candidates.iter().step_by(2));
        let mut chosen: Vec<usize> = order.copied().take(count).collect();
        chosen.sort_unstable();
        chosen
    };
    TrainSample {
        input_ids: Vec::try_from(ids).unwrap(),
        anchors: plan.choose_anchors(&loss_mask, &mut { fixed_draw }),
        loss_mask,
        taps: noise(6, &[TOKENS as i64, 3 * WIDTH]),
        last: noise(7, &[TOKENS as i64, WIDTH]),
        last_positions: (0..TOKENS as u32).collect(),
    }
}

/// Anchor and depth of all rows: every position, then the sampled rows.
fn rows(sample: &TrainSample) -> Vec<(i64, i64)> {
    let positions = (0..TOKENS as i64 - 1).map(|position| (position, 0));
    let chains = sample.anchors.chunk_by(|a, b| a == b);
    let sampled =
        chains.flat_map(|chain| chain.iter().enumerate().map(|(at, &anchor)| (anchor as i64, at as i64 + 1)));
    positions.chain(sampled).collect()
}

#[test]
fn speculators_trains_a_converted_p_eagle_alike() {
    let Some(python) = skip::speculators_python("speculators and torch") else { return };
    let root = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/speculators_peagle.py");
    let mut command = Command::new(python);
    command.arg(script).env("HF_HUB_OFFLINE", "1");
    let sampling = DownSampling { depths: DEPTHS, ratio: 0.7, least_ratio: 0.2 };
    let prepared = CASES.map(|case| {
        let place = root.path().join(case.name);
        let model = case.models(&place);
        let target = place.join("target");
        let target = Target::open(&target, target.to_str().unwrap()).unwrap();
        let source = open_checkpoint(&place.join("drafter")).unwrap();
        let converted = convert(&source, CheckpointFormat::Speculators, Some(&target)).unwrap();
        converted.write(&place.join("speculators"), false).unwrap();
        let plan = PEaglePlan::new(model.config().clone(), PEagleObjective { sampling, segments: 1 });
        let sample = sample(&plan);
        let (anchors, depths): (Vec<i64>, Vec<i64>) = rows(&sample).into_iter().unzip();
        assert!((1..DEPTHS as i64).all(|depth| depths.contains(&depth)));
        // Position p predicts token p + 2.
        let supervised: Vec<f32> = (0..TOKENS - 1)
            .map(|at| f32::from(sample.loss_mask.get(at + 2).copied().unwrap_or(false)))
            .collect();
        let tensors = [
            ("input_ids", Tensor::from_slice(&sample.input_ids).unsqueeze(0)),
            ("taps", sample.taps.unsqueeze(0)),
            ("last", sample.last.unsqueeze(0)),
            ("loss_mask", Tensor::from_slice(&supervised).unsqueeze(0)),
            ("anchors", Tensor::from_slice(&anchors)),
            ("depths", Tensor::from_slice(&depths)),
        ];
        Tensor::write_safetensors(&tensors, place.join("given.safetensors")).unwrap();
        command.args(["speculators", "given.safetensors", "out.safetensors"].map(|file| place.join(file)));
        (place, model, plan, sample)
    });
    let run = command.output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));

    for (case, (place, model, plan, sample)) in CASES.iter().zip(prepared) {
        let out: BTreeMap<String, Tensor> =
            Tensor::read_safetensors(place.join("out.safetensors")).unwrap().into_iter().collect();
        let mut own_rows = rows(&sample);
        let sampled = ["sampled_anchors", "sampled_depths"].map(|key| out[key].to_kind(Kind::Int64));
        let [anchors, depths] = sampled.map(|sampled| Vec::<i64>::try_from(sampled).unwrap());
        let mut their_rows: Vec<(i64, i64)> = anchors.into_iter().zip(depths).collect();
        own_rows.sort_unstable();
        their_rows.sort_unstable();
        assert_eq!(own_rows, their_rows, "{}", case.name);
        let sampled = sample.anchors.len() as i64;
        let denominator = plan.loss_denominator_part(&sample.loss_mask, &sample.anchors);
        let batch = PEagleBatch::new(&[sample], VOCAB - 1, (0, 1), Device::Cpu, Kind::Float).unwrap();
        let logits = tch::no_grad(|| model.draft_logits(&model.row_states(&batch)));
        let logits =
            model.draft_tokens().map_or(logits.shallow_clone(), |tokens| logits.index_select(1, tokens));
        // The last positions, which predict nothing supervised, are not computed here.
        let positions = logits.size()[0] - sampled;
        let expected = &out["logits"];
        let ends = [(0, positions), (expected.size()[0] - sampled, sampled)];
        let expected = Tensor::cat(&ends.map(|(start, len)| expected.narrow(0, start, len)), 0);
        assert_close(&format!("{}: logits", case.name), &logits, &expected, FORWARD);

        model.parameters().iter().for_each(|(_, parameter)| drop(parameter.set_requires_grad(true)));
        let sums = Vec::<f64>::try_from(model.accumulate(&batch, LossDenominator(denominator))).unwrap();
        let metrics = (plan.metric_defs().compute)(&sums, 1);
        let of_depths = |key: &str| -> Vec<f64> {
            metrics[key].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
        };
        let loss = metrics["loss"].as_f64().unwrap();
        assert_close(case.name, &Tensor::from_slice(&[loss]), &out["loss"], FORWARD);
        assert_close(case.name, &Tensor::from_slice(&of_depths("accuracy")), &out["accuracy"], 1e-6);
        let compared = out.keys().filter(|key| key.starts_with("grad.")).count();
        assert_eq!(compared, model.parameters().len(), "{}", case.name);
        for (name, parameter) in model.parameters() {
            let expected = &out[&format!("grad.{name}")];
            let allowed = GRADIENT * common::max_abs(expected);
            assert_close(&format!("{}: {name}", case.name), &parameter.grad(), expected, allowed);
        }
    }
}
