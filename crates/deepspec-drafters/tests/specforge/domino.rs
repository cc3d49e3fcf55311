//! Domino converted to SpecForge's layout: that package computes the same logits, losses, gradients and drafts.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use deepspec_checkpoint::{CheckpointFormat, convert};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, Domino, DominoConfig, DominoObjective, DominoPlan, DominoProposer, DominoSettings,
    DraftDecoder, DrafterPlan, GruSettings, LambdaBase, LossDenominator, LossRecipe, TrainSample,
    open_checkpoint,
};
use deepspec_models::{ModelConfig, save};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::common::{self, assert_close, noise};
use crate::fixture::{self, FORWARD, VOCAB, WIDTH};

const TOKENS: usize = 40;
const BLOCK: usize = 6;
const LAMBDAS: [f64; 3] = [0.0, 0.25, 1.0];
const LOSS: LossRecipe = LossRecipe { ce_alpha: 1.0, decay_gamma: 7.0, ..LossRecipe::NONE };
const GRADIENT: f64 = 5e-4;

/// A random drafter whose norms are not all ones.
fn model(slots: SlotTarget) -> Domino {
    let raw = fixture::target().as_object().unwrap().clone();
    let target = ModelConfig::parse(Path::new("config.json"), raw).unwrap();
    let config = DominoConfig {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None, None]).unwrap(),
            taps: Tap::from_layer_ids([0, 2]).unwrap(),
            num_target_layers: 5,
        },
        settings: DominoSettings {
            blocks: BlockSpec {
                block_size: BLOCK,
                slots,
                mask_token_id: VOCAB - 1,
                causal: false,
                num_anchors: 8,
            },
            gru: GruSettings { hidden_size: 12, rank: 10 },
        },
    };
    config.check().unwrap();
    let [embed, head] = fixture::ends();
    let model = Domino::fresh(config, &embed, &head, 5, Kind::Float);
    for (seed, (_, parameter)) in
        model.parameters().iter().filter(|(_, tensor)| tensor.dim() == 1).enumerate()
    {
        let _ = parameter.shallow_clone().g_add_(&(noise(9 + seed as u64, &parameter.size()) * 0.2));
    }
    model
}

/// Whoever is supervised has supervised tokens up to the end of the answer, as SpecForge weighs every supervised slot, and this
/// project those before the first gap. The last blocks reach beyond the answer.
fn sample() -> TrainSample {
    let ids = (noise(5, &[TOKENS as i64]) * 1e4).abs().to_kind(Kind::Int64).remainder(VOCAB - 1);
    TrainSample {
        input_ids: Vec::try_from(ids).unwrap(),
        loss_mask: (0..TOKENS).map(|at| (4..37).contains(&at)).collect(),
        taps: noise(6, &[TOKENS as i64, 2 * WIDTH]),
        last: noise(7, &[TOKENS as i64, WIDTH]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![4, 5, 17, 30, 33, 35],
    }
}

/// Writes target, drafter and inputs under `root`, and converts the drafter to SpecForge's layout.
fn write(root: &Path, model: &Domino) {
    let (drafter, [embed, head]) = (root.join("drafter"), fixture::ends());
    fs::create_dir_all(&drafter).unwrap();
    save(&drafter.join("model.safetensors"), &model.checkpoint(), Kind::Float).unwrap();
    fs::write(drafter.join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
    let target = fixture::write_target(root);
    let source = open_checkpoint(&drafter).unwrap();
    let converted = convert(&source, CheckpointFormat::Specforge, Some(&target)).unwrap();
    converted.write(&root.join("specforge"), false).unwrap();

    let given = sample();
    let anchors: Vec<i64> = given.anchors.iter().map(|&anchor| anchor as i64).collect();
    let tensors = [
        ("input_ids", Tensor::from_slice(&given.input_ids).unsqueeze(0)),
        ("taps", given.taps.unsqueeze(0)),
        ("loss_mask", Tensor::from_slice(&given.loss_mask).to_kind(Kind::Float).unsqueeze(0)),
        ("anchors", Tensor::from_slice(&anchors)),
        ("embed", embed),
        ("lm_head", head),
        ("lambdas", Tensor::from_slice(&LAMBDAS)),
    ];
    Tensor::write_safetensors(&tensors, root.join("given.safetensors")).unwrap();
}

/// A drafter of each meaning of slots, and its folder below `root`.
pub fn drafters(root: &Path) -> [(PathBuf, Domino); 2] {
    [SlotTarget::AnchorPredicts, SlotTarget::FillIn].map(|slots| {
        let (dir, model) = (root.join(slots.name()), model(slots));
        write(&dir, &model);
        (dir, model)
    })
}

/// Compares logits, losses, gradients and drafts with those of the package.
pub fn compare(model: Domino, out: &BTreeMap<String, Tensor>) {
    let slots = model.config().settings.blocks.slots;
    let batch = model.config().batch(&[sample()], LOSS.decay_gamma, Device::Cpu, Kind::Float).unwrap();
    let supervised = |all: &Tensor| all.flatten(0, 1).index_select(0, &batch.supervised_indices);
    tch::no_grad(|| {
        let hidden = model.hidden_states(&batch);
        let (_, features) = model.teacher_forced_features(&hidden, &batch.previous).unwrap();
        let logits = model.teacher_forced_logits(&supervised(&hidden), Some(&supervised(&features)));
        let first = slots.first_drafting_position() as i64;
        let theirs = supervised(&out["logits"].narrow(1, first, BLOCK as i64 - first));
        assert_close("logits", &logits, &theirs, FORWARD);
        let base = model.base_logits(&supervised(&hidden));
        assert!(common::max_abs(&(&logits - base)) > 0.1, "the head corrects nothing");
    });
    let objective = DominoObjective { loss: LOSS, lambda_base: LambdaBase::default() };
    let plan = DominoPlan::new(model.config().clone(), objective);
    let denominator = LossDenominator(plan.loss_denominator_part(&sample().loss_mask, &sample().anchors));
    for lambda in LAMBDAS {
        for (_, parameter) in model.parameters() {
            parameter.set_requires_grad(true).zero_grad();
        }
        let sums = Vec::<f64>::try_from(model.accumulate(&batch, &LOSS, lambda, denominator, None)).unwrap();
        let metrics = (plan.metric_defs().compute)(&sums, 1);
        let losses = ["loss", "ce_loss", "base_loss"].map(|name| metrics[name].as_f64().unwrap());
        let of = |name: &str| format!("{name}_{lambda:?}");
        assert_close(&of("losses"), &Tensor::from_slice(&losses), &out[&of("losses")], FORWARD);
        assert!((metrics["lambda_base"].as_f64().unwrap() - lambda).abs() < 1e-6);
        let prefix = format!("{}.", of("grad"));
        let compared = out.keys().filter(|key| key.starts_with(&prefix)).count();
        assert_eq!(compared, model.parameters().len());
        for (name, parameter) in model.parameters() {
            let expected = &out[&format!("{prefix}{name}")];
            let size = common::max_abs(expected);
            let is_head = name.starts_with("prefix_gru.") || name.starts_with("embed_proj.");
            assert_eq!(size > 0.0, !is_head || lambda < 1.0, "{name} with λ = {lambda}");
            assert_close(&of(name), &parameter.grad(), expected, GRADIENT * size);
        }
    }
    // SpecForge drafts one token less than a block has slots, wherever the anchor's slot drafts.
    let own = fixture::drafts(DominoProposer::new(model, 1), &sample());
    for (block, own) in own.iter().enumerate() {
        let theirs: Vec<i64> = Vec::try_from(out["drafts"].get(block as i64)).unwrap();
        assert_eq!(own[..BLOCK - 1], theirs, "{slots}");
    }
}
