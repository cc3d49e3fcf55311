//! Eagle3 as SpecForge's class saves it, converted to our layout: logits of all steps, and drafts.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use deepspec_checkpoint::{CheckpointFormat, Target, convert};
use deepspec_core::recipe::LossNormalization;
use deepspec_drafters::{
    Eagle3, Eagle3Batch, Eagle3Objective, Eagle3Proposer, Supervise, TrainSample, open_checkpoint,
};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::{assert_close, noise};
use crate::fixture::{self, FORWARD, VOCAB, WIDTH};

const TOKENS: usize = 30;
/// Steps of the package, and of a drafter here whose config names none.
const STEPS: usize = 7;

/// Every position predicts. The drafts begin after the anchors.
fn sample() -> TrainSample {
    let ids = (noise(5, &[TOKENS as i64]) * 1e4).abs().to_kind(Kind::Int64).remainder(VOCAB);
    TrainSample {
        input_ids: Vec::try_from(ids).unwrap(),
        loss_mask: vec![true; TOKENS],
        taps: noise(6, &[TOKENS as i64, 3 * WIDTH]),
        last: noise(7, &[TOKENS as i64, WIDTH]),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: vec![1, 5, 12, 22],
    }
}

/// Writes target, inputs, and config of a drafter with `kept` tokens and these keys to `dir`.
fn write(dir: &Path, kept: &[i64], keys: Value) {
    fixture::write_target(dir);
    let mut config = fixture::target().as_object().unwrap().clone();
    let own = json!({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": kept.len(),
        "eagle_config": {"use_aux_hidden_state": true, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
    });
    for keys in [own, keys] {
        config.extend(keys.as_object().unwrap().clone());
    }
    fs::write(dir.join("draft.json"), Value::Object(config).to_string()).unwrap();
    let (given, [embed, _]) = (sample(), fixture::ends());
    let tensors = [
        ("input_ids", Tensor::from_slice(&given.input_ids).unsqueeze(0)),
        ("taps", given.taps.unsqueeze(0)),
        ("embed", embed),
        ("kept", Tensor::from_slice(kept)),
    ];
    Tensor::write_safetensors(&tensors, dir.join("given.safetensors")).unwrap();
}

/// A folder below `root` for each drafter that the package is to make.
pub fn folders(root: &Path) -> [PathBuf; 3] {
    let (all, some): (Vec<i64>, Vec<i64>) = ((0..VOCAB).collect(), (1..VOCAB).step_by(3).collect());
    let normed = json!({
        "fc_norm": true,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64},
    });
    [
        ("reduced vocabulary", &some, json!({})),
        ("reduced vocabulary, norms and scaled positions", &some, normed),
        ("all tokens", &all, json!({})),
    ]
    .map(|(name, kept, keys)| {
        let dir = root.join(name);
        write(&dir, kept, keys);
        dir
    })
}

/// Writes our checkpoint in SpecForge's layout, and compares its tensors with those that the package saved.
fn compare_way_back(dir: &Path, target: &Target) {
    let reference = open_checkpoint(&dir.join("reference")).unwrap();
    let back = convert(&reference, CheckpointFormat::Specforge, Some(target)).unwrap();
    back.write(&dir.join("back"), false).unwrap();
    let tensors = |folder| Tensor::read_safetensors(dir.join(folder).join("model.safetensors")).unwrap();
    let theirs: BTreeMap<String, Tensor> = tensors("specforge").into_iter().collect();
    let own: BTreeMap<String, Tensor> = tensors("back").into_iter().collect();
    // The package also saves the embedding, which it loads from the target.
    let kept: Vec<&String> = theirs.keys().filter(|name| !name.starts_with("embed_tokens")).collect();
    let written: Vec<&String> = own.keys().filter(|name| !name.starts_with("embed_tokens")).collect();
    assert_eq!(written, kept, "{}", dir.display());
    for (name, own) in &own {
        assert!(*own == theirs[name], "{}: {name} changed on the way back", dir.display());
    }
    let has_fc_norm = |folder| {
        let config: Value =
            serde_json::from_slice(&fs::read(dir.join(folder).join("config.json")).unwrap()).unwrap();
        config["fc_norm"] == json!(true)
    };
    assert_eq!(has_fc_norm("back"), has_fc_norm("specforge"), "{}", dir.display());
}

/// Converts the package's checkpoint, and compares logits and drafts with those of the package.
pub fn compare(dir: &Path, out: &BTreeMap<String, Tensor>) {
    let what = dir.file_name().unwrap().to_str().unwrap();
    let source = open_checkpoint(&dir.join("specforge")).unwrap();
    assert_eq!(source.format(), CheckpointFormat::Specforge, "{what}");
    let target = Target::open(&dir.join("target"), "target").unwrap();
    let converted = convert(&source, CheckpointFormat::Reference, Some(&target)).unwrap();
    converted.write(&dir.join("reference"), false).unwrap();
    let model = Eagle3::load(&dir.join("reference"), Device::Cpu, Kind::Float).unwrap();
    assert_eq!(model.config().settings.ttt_length, STEPS, "{what}");
    // A drafter of all tokens is written without its head, which here is not the target's.
    if model.draft_tokens().is_some() {
        compare_way_back(dir, &target);
    }

    let objective = Eagle3Objective {
        supervise: Supervise::Labels,
        step_loss_decay: 1.0,
        normalization: LossNormalization::Global,
    };
    let batch = Eagle3Batch::new(&[sample()], &objective, STEPS, Device::Cpu, Kind::Float).unwrap();
    let states = tch::no_grad(|| model.step_states(&batch));
    assert_eq!(states.len(), STEPS, "{what}");
    for (step, states) in states.iter().enumerate() {
        let logits = tch::no_grad(|| model.draft_logits(states));
        let of_drafts = model.draft_tokens().map(|tokens| logits.index_select(1, tokens));
        let own = of_drafts.unwrap_or(logits);
        // Positions that predict no token of the sample are not computed here.
        let theirs = out["logits"].get(step as i64).narrow(0, 0, own.size()[0]);
        assert_close(&format!("{what}: logits of step {step}"), &own, &theirs, FORWARD);
    }

    let own = fixture::drafts(Eagle3Proposer::new(model, 1), &sample());
    for (anchor, own) in sample().anchors.iter().zip(own) {
        // The state before the anchor drafts the tokens after it.
        let theirs = Vec::<i64>::try_from(out["drafts"].select(1, *anchor as i64 - 1)).unwrap();
        assert_eq!(own, theirs, "{what}: drafts after token {anchor}");
    }
}
