//! Eagle3 in the training-time test, with all of the target's tokens and with some.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepspec_checkpoint::DraftVocab;
use deepspec_core::recipe::LossNormalization;
use deepspec_drafters::{
    Eagle3, Eagle3Batch, Eagle3Config, Eagle3Norms, Eagle3Objective, Eagle3Settings, LossDenominator,
    Supervise, TrainSample, eagle3_metric_defs,
};
use tch::{Device, Kind, Tensor};

use crate::common::{assert_close, noise};
use crate::fixture::{self, FORWARD, TOKENS, VOCAB};

const STEPS: usize = 3;
const DECAY: f64 = 0.8;
/// Every step predicts all supervised tokens, so the package's means of all steps have one denominator.
const SUPERVISED: Range<usize> = 5..20;
const OBJECTIVE: Eagle3Objective = Eagle3Objective {
    supervise: Supervise::Labels,
    step_loss_decay: DECAY,
    normalization: LossNormalization::Global,
};

/// A drafter to compare.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    name: &'static str,
    norms: Eagle3Norms,
    reduces_vocab: bool,
}

const CASES: [Case; 3] = [
    Case {
        name: "eagle3",
        norms: Eagle3Norms { before_residual: false, before_fc: false, fc: false, output: false },
        reduces_vocab: false,
    },
    Case {
        name: "reduced eagle3",
        norms: Eagle3Norms { before_residual: false, before_fc: false, fc: false, output: false },
        reduces_vocab: true,
    },
    Case {
        name: "reduced eagle3 with norms",
        norms: Eagle3Norms { before_residual: true, before_fc: false, fc: true, output: true },
        reduces_vocab: true,
    },
];

impl Case {
    fn draft_vocab(self) -> Option<DraftVocab> {
        let counts: Vec<u64> = (0..VOCAB).map(|id| u64::from(id % 3 == 1)).collect();
        self.reduces_vocab.then(|| DraftVocab::most_frequent(&counts, VOCAB as usize / 3).unwrap())
    }

    /// Writes a random drafter whose norms are not all ones to `dir`, with its inputs.
    fn write(self, dir: &Path) -> Eagle3 {
        let vocab = self.draft_vocab();
        let config = Eagle3Config {
            decoder: fixture::decoder(1),
            settings: Eagle3Settings {
                ttt_length: STEPS,
                step_loss_decay: DECAY,
                draft_vocab_size: vocab.as_ref().map(|vocab| vocab.tokens().len() as i64),
                norms: self.norms,
            },
        };
        let [embed, head] = fixture::ends();
        let model = Eagle3::fresh_with_draft_vocab(config, (&embed, &head), vocab.as_ref(), 5, Kind::Float);
        for (seed, (_, parameter)) in
            model.parameters().iter().filter(|(_, tensor)| tensor.dim() == 1).enumerate()
        {
            let _ = parameter.shallow_clone().g_add_(&(noise(9 + seed as u64, &parameter.size()) * 0.2));
        }
        fixture::write(dir, &model.checkpoint(), model.config().to_json());
        fixture::write_inputs(&dir.join("given.safetensors"), &sample(), &[]);
        model
    }
}

/// A sample with one run of supervised tokens. Eagle3 reads no anchors.
fn sample() -> TrainSample {
    let loss_mask = (0..TOKENS).map(|at| SUPERVISED.contains(&at)).collect();
    TrainSample { loss_mask, ..fixture::sample(&[0]) }
}

/// A drafter of each case, and its folder below `root`.
pub fn drafters(root: &Path) -> [(PathBuf, Case, Eagle3); 3] {
    CASES.map(|case| {
        let dir = root.join(case.name);
        let model = case.write(&dir);
        (dir, case, model)
    })
}

/// Compares logits, losses and gradients with those of the package.
pub fn compare(case: Case, model: &Eagle3, out: &BTreeMap<String, Tensor>) {
    let (what, count) = (case.name, SUPERVISED.len());
    let samples = [fixture::normed(sample())];
    let batch = Eagle3Batch::new(&samples, &OBJECTIVE, STEPS, Device::Cpu, Kind::Float).unwrap();
    tch::no_grad(|| {
        for (step, states) in model.step_states(&batch).iter().enumerate() {
            let logits = model.draft_logits(&states.index_select(0, &batch.supervised_indices(step)));
            let of_drafts = model.draft_tokens().map(|tokens| logits.index_select(1, tokens));
            // Position i predicts token i + 2 + step.
            let first = SUPERVISED.start - 2 - step;
            let theirs = out["logits"].get(step as i64).narrow(0, first as i64, count as i64);
            let name = format!("{what}: logits of step {step}");
            assert_close(&name, &of_drafts.unwrap_or(logits), &theirs, FORWARD);
        }
    });

    // Here a sample's loss is divided by its length, and in the package by the number of supervised tokens.
    let scale = TOKENS as f64 / count as f64;
    for (_, parameter) in model.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let sums = model.accumulate(Some(&batch), LossDenominator(1.0 / scale), samples.len());
    let sums = Vec::<f64>::try_from(sums).unwrap();
    let metrics = (eagle3_metric_defs(STEPS, DECAY).compute)(&sums, 1);
    // The package's divergence lacks the entropy that is in the cross entropy.
    let entropy = out["entropy"].double_value(&[0]);
    let mut total = 0.0;
    for step in 0..STEPS {
        let cross_entropy = metrics["step_loss"][step].as_f64().unwrap() * scale;
        let loss = DECAY.powi(step as i32) * (cross_entropy - entropy);
        let name = format!("loss_{step}_sum");
        assert_close(&format!("{what}: {name}"), &Tensor::from_slice(&[loss]), &out[&name], FORWARD);
        total += loss;
    }
    assert_close(&format!("{what}: loss"), &Tensor::from_slice(&[total]), &out["loss_sum"], FORWARD);
    fixture::assert_gradients(model.parameters(), out, str::to_string);
}
