//! Causal blocks, as in JetSpec with its forward KL, and attention sinks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use deepspec_checkpoint::ATTENTION_SINK_BIAS;
use deepspec_core::SlotTarget;
use deepspec_drafters::{
    BlockBatch, BlockSpec, ConfidenceSettings, DSPARK_SUMS, DSpark, DSparkConfig, DSparkObjective,
    DSparkSettings, LossDenominator, LossRecipe, LossSum, MarkovKind, MarkovSettings,
};
use tch::{Device, Kind, Tensor};

use crate::common::{assert_close, max_abs, noise};
use crate::fixture::{self, FORWARD};

const BLOCK: usize = 5;
const LOSS: LossRecipe = LossRecipe { kl_alpha: 1.0, ..LossRecipe::NONE };

/// A drafter with options beside the blocks of DFlash.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    name: &'static str,
    slots: SlotTarget,
    /// The first block has no token before it. With slots that fill in, the last one ends behind the supervised tokens. Slots that
    /// predict count by other tokens in the package, so their blocks are whole.
    anchors: &'static [usize],
    causal: bool,
    sinks: bool,
    /// A Markov head and a confidence head.
    heads: bool,
}

const JETSPEC: Case = Case {
    name: "jetspec",
    slots: SlotTarget::FillIn,
    anchors: &[0, 3, 4, 11, 17],
    causal: true,
    sinks: false,
    heads: false,
};

const CASES: [Case; 3] = [
    JETSPEC,
    Case {
        name: "dspark with sinks",
        slots: SlotTarget::AnchorPredicts,
        anchors: &[0, 3, 4, 11],
        causal: false,
        sinks: true,
        heads: true,
    },
    Case { name: "jetspec with sinks", sinks: true, ..JETSPEC },
];

impl Case {
    fn config(self) -> DSparkConfig {
        let mut decoder = fixture::decoder(2);
        if self.sinks {
            decoder.model = decoder.model.with_attention_sinks().unwrap();
        }
        let markov = MarkovSettings { kind: MarkovKind::Vanilla, rank: 8 };
        DSparkConfig {
            decoder,
            settings: DSparkSettings {
                blocks: BlockSpec {
                    block_size: BLOCK,
                    slots: self.slots,
                    mask_token_id: 7,
                    causal: self.causal,
                    num_anchors: 8,
                },
                markov: self.heads.then_some(markov),
                confidence: self.heads.then_some(ConfidenceSettings { with_markov: true }),
            },
        }
    }

    /// A random drafter, all of whose parameters matter. Writes it to `dir` without what the package's layout cannot say, which is in
    /// the inputs.
    fn write(self, dir: &Path) -> DSpark {
        let [embed, head] = fixture::ends();
        let model = DSpark::fresh(self.config(), &embed, &head, 5, Kind::Float);
        for (seed, (name, parameter)) in model.parameters().iter().enumerate() {
            let scale = match name.as_str() {
                name if name.ends_with(ATTENTION_SINK_BIAS) => 1.0,
                name if name.contains("_head.") || parameter.dim() == 1 => 0.2,
                _ => continue,
            };
            let _ = parameter.shallow_clone().g_add_(&(noise(9 + seed as u64, &parameter.size()) * scale));
        }
        let is_sinks = |(name, _): &(String, Tensor)| name.ends_with(ATTENTION_SINK_BIAS);
        let (sinks, plain): (Vec<_>, Vec<_>) = model.checkpoint().into_iter().partition(is_sinks);
        let config = Case { causal: false, sinks: false, ..self }.config();
        fixture::write(dir, &plain, config.to_json());
        let mut options = vec![];
        if self.causal {
            options.push(("causal", Tensor::from(1_i64)));
        }
        if self.sinks {
            let sinks: Vec<Tensor> = sinks.into_iter().map(|(_, sinks)| sinks).collect();
            options.push(("sinks", Tensor::stack(&sinks, 0)));
        }
        let sample = fixture::sample(self.anchors);
        fixture::write_inputs(&dir.join("given.safetensors"), &sample, &options);
        model
    }

    fn batch(self, model: &DSpark) -> BlockBatch {
        let sample = fixture::normed(fixture::sample(self.anchors));
        model.config().batch(&[sample], LOSS.decay_gamma, Device::Cpu, Kind::Float).unwrap()
    }

    /// Logits `[A, γ, V]` after the true tokens.
    fn logits(self, model: &DSpark) -> Tensor {
        let batch = self.batch(model);
        tch::no_grad(|| {
            let hidden = model.hidden_states(&batch);
            let features = model.teacher_forced_features(&hidden, &batch.previous);
            model.teacher_forced_logits(&hidden, features.as_ref().map(|(_, features)| features))
        })
    }
}

/// A drafter of each case, and its folder below `root`.
pub fn drafters(root: &Path) -> [(PathBuf, Case, DSpark); 3] {
    CASES.map(|case| {
        let dir = root.join(case.name);
        let model = case.write(&dir);
        (dir, case, model)
    })
}

/// Compares logits, losses and gradients with those of the package.
pub fn compare(dir: &Path, case: Case, model: &DSpark, out: &BTreeMap<String, Tensor>) {
    let (Case { name: what, slots, anchors, heads, .. }, gamma) = (case, case.slots.draft_len(BLOCK));
    let own = case.logits(model);
    let theirs = out["biased"].get(0).narrow(1, slots.first_drafting_position() as i64, gamma as i64);
    assert_close(&format!("{what}: logits"), &own, &theirs, FORWARD);
    let plain = DSpark::load(&dir.join("drafter"), Device::Cpu, Kind::Float).unwrap();
    assert!(max_abs(&(&case.logits(&plain) - &own)) > 0.01, "{what}: the options change nothing");

    // The package divides by the number of supervised drafts.
    let batch = case.batch(model);
    let count = batch.labels.size()[0] as f64;
    assert_eq!(count < (anchors.len() * gamma) as f64, slots == SlotTarget::FillIn, "{what}: {count} drafts");
    for (_, parameter) in model.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let objective = DSparkObjective { loss: LOSS, confidence_alpha: if heads { 1.0 } else { 0.0 } };
    let sums = model.accumulate(&batch, &objective, LossDenominator(count), None);
    let sums = Vec::<f64>::try_from(sums).unwrap();
    let sum =
        |wanted: LossSum| sums[LossSum::all(gamma, &DSPARK_SUMS).position(|sum| sum == wanted).unwrap()];
    let mut found = vec![("loss_sum", sum(LossSum::Loss) / count)];
    if heads {
        found.push(("confidence_loss_sum", sum(LossSum::Own("confidence")) / count));
        found.push(("accept_rate_sum", (0..gamma).map(|place| sum(LossSum::Accept(place))).sum()));
    }
    for (name, found) in found {
        assert_close(&format!("{what}: {name}"), &Tensor::from_slice(&[found]), &out[name], FORWARD);
    }
    fixture::assert_gradients(model.parameters(), out, str::to_string);
}
