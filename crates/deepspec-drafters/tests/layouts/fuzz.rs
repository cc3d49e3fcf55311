//! Damaged configs, indexes and headers never cause a panic, and every error names a file and the
//! problem.

use std::fs;

use crate::common::{Folder, fixture, golden, target};
use deepspec_checkpoint::{CheckpointError, CheckpointFormat, Target, convert};
use deepspec_drafters::open_checkpoint;
use deepspec_testkit::mutate::Fuzzer;
use serde_json::Value;

const WORDS: [&str; 27] = [
    "architectures",
    "dflash_config",
    "transformer_layer_config",
    "speculators_model_type",
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "markov_rank",
    "rnn",
    "DFlashDraftModel",
    "LlamaForCausalLMEagle3",
    "Qwen3Eagle3Model",
    "sliding_attention",
    "dspark_block_size",
    "eagle3",
    "DFlash2DraftModel",
    "selector_rank",
    "conv_group_size",
    "domino",
    "DominoDraftModel",
    "gru_hidden_dim",
    "pure_draft_prefix_len",
    "mtp",
    "peagle",
    "num_depths",
    "num_speculative_steps",
    "xpress_rank",
    "Qwen3XPressModel",
];

fn every_format() -> Vec<Folder> {
    let reference = golden("dspark_gated");
    let (target, source) = (target(&reference), open_checkpoint(reference.path()).unwrap());
    let target = Target::open(target.path(), "owner/target").unwrap();
    let away =
        [CheckpointFormat::Speculators, CheckpointFormat::Specforge, CheckpointFormat::Modelopt].map(|to| {
            let folder = Folder::new();
            convert(&source, to, Some(&target)).unwrap().write(&folder.path().join("out"), false).unwrap();
            folder.within("out")
        });
    let domino = golden("domino");
    let public =
        crate::convert::converted(&domino, CheckpointFormat::Modelopt, Some(&crate::common::target(&domino)));
    let others = [
        golden("eagle3_qwen3"),
        golden("dspark_gated"),
        golden("dflash2"),
        golden("xpress"),
        golden("domino"),
        golden("mtp"),
        golden("peagle"),
        fixture::zlab(),
        fixture::specforge_eagle3(),
        golden("mtp_moe"),
    ];
    away.into_iter().chain(others).chain([public]).collect()
}

/// Opens the folder and converts it to every layout; every error names a path in it or in the
/// target's folder.
fn provoke(folder: &Folder, target: &Target) -> usize {
    let mut refusals = 0;
    let mut told = |error: CheckpointError| {
        refusals += 1;
        let text = error.to_string();
        let here = [folder.path(), target.dir()].iter().any(|dir| text.contains(dir.to_str().unwrap()));
        assert!(here, "no file is named: {text}");
        match error {
            CheckpointError::Key { key, problem, .. } => assert!(!key.is_empty() && !problem.is_empty()),
            CheckpointError::Tensor { name, problem, .. } => assert!(!name.is_empty() && !problem.is_empty()),
            CheckpointError::Exists { .. } => unreachable!("nothing is written"),
            CheckpointError::Refused { reason, .. } => assert!(reason.len() > 10, "{reason}"),
            CheckpointError::NotADrafter { problem, .. } => assert!(!problem.is_empty()),
            CheckpointError::File(_) => {}
        }
    };
    match open_checkpoint(folder.path()) {
        Err(error) => told(error),
        Ok(checkpoint) => {
            deepspec_checkpoint::engine_compatibility(&checkpoint);
            for to in CheckpointFormat::ALL {
                for target in [None, Some(target)] {
                    if let Err(error) = convert(&checkpoint, to, target).map(|_| ()) {
                        told(error);
                    }
                }
            }
        }
    }
    refusals
}

#[test]
fn damaged_configs_are_refused_by_name() {
    let folders = every_format();
    let target = target(&golden("dspark_gated"));
    let target = Target::open(target.path(), "owner/target").unwrap();
    let mut dice = Fuzzer::new(7, &WORDS);
    let (mut broken, mut runs) = (0, 0);
    for folder in &folders {
        let config = folder.config();
        for _ in 0..60 {
            let mut damaged = config.clone();
            for _ in 0..=dice.roll(2) {
                dice.mutate(&mut damaged);
            }
            folder.put(&damaged);
            broken += usize::from(open_checkpoint(folder.path()).is_err());
            provoke(folder, &target);
            runs += 1;
        }
        for _ in 0..15 {
            fs::write(folder.path().join("config.json"), dice.line(config.clone())).unwrap();
            provoke(folder, &target);
            runs += 1;
        }
        folder.put(&config);
    }
    assert_eq!(runs, 75 * folders.len());
    assert!(broken > runs / 10, "only {broken} of {runs} were broken");
}

#[test]
fn damaged_headers_are_refused_by_name() {
    let folder = golden("dspark_vanilla");
    let whole = fs::read(folder.path().join("model.safetensors")).unwrap();
    let target = target(&golden("dspark_vanilla"));
    let target = Target::open(target.path(), "owner/target").unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let json: Value = serde_json::from_slice(&whole[8..8 + header]).unwrap();
    let mut dice = Fuzzer::new(8, &["F32", "fc.weight", "data_offsets", "shape", "BF16"]);
    let mut refused = 0;
    for run in 0..150 {
        let mut file = whole.clone();
        match run % 3 {
            0 => {
                let at = dice.roll(8 + header);
                file[at] = dice.roll(256) as u8;
            }
            1 => file.truncate(dice.roll(whole.len())),
            _ => {
                let line = dice.line(json.clone());
                file = (line.len() as u64).to_le_bytes().to_vec();
                file.extend(line);
                file.extend(&whole[8 + header..]);
            }
        }
        fs::write(folder.path().join("model.safetensors"), &file).unwrap();
        refused += usize::from(provoke(&folder, &target) > 0);
    }
    assert!(refused > 100, "only {refused} of 150 were refused");
}

#[test]
fn damaged_indexes_are_refused_by_name() {
    let folder = crate::common::sharded(&golden("dspark_vanilla"));
    let target = target(&golden("dspark_vanilla"));
    let target = Target::open(target.path(), "owner/target").unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    let whole: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let mut dice = Fuzzer::new(9, &["weight_map", "../model.safetensors", "model-0.safetensors"]);
    for _ in 0..60 {
        let mut damaged = whole.clone();
        dice.mutate(&mut damaged);
        fs::write(&path, dice.line(damaged)).unwrap();
        provoke(&folder, &target);
    }
}
