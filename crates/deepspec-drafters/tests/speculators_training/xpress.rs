//! xPress on the backbones of DFlash and of DFlash 2.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use deepspec_core::SlotTarget;
use deepspec_drafters::{
    BlockSpec, Consistency, Convolution, LossDenominator, LossRecipe, LossSum, TrainSample, XPRESS_SUMS,
    XPress, XPressConfig, XPressObjective, XPressProposer, XPressSettings,
};
use deepspec_engine::Context;
use tch::{Device, Kind, Tensor};

use crate::common::{assert_close, noise};
use crate::fixture::{self, FORWARD, TOKENS};

const BLOCK: usize = 5;
const GAMMA: usize = BLOCK - 1;
const PASSES: i64 = 3;
/// The first block has no token before it, and the last one ends behind the supervised tokens.
const ANCHORS: [usize; 5] = [0, 3, 4, 11, 17];

/// Names of our tensors, and speculators' names of them.
const NAMES: [(&str, &str); 9] = [
    ("xpress_head.w1.weight", "token_embed.weight"),
    ("xpress_head.w2.weight", "readout.weight"),
    ("xpress_head.down_h.weight", "down_h.weight"),
    ("xpress_head.down_g.weight", "down_g.weight"),
    ("xpress_head.in_proj.weight", "in_proj.weight"),
    ("xpress_head.mix.L", "mix_l"),
    ("xpress_head.mlp.gate_proj.weight", "mlp_gate.weight"),
    ("xpress_head.mlp.up_proj.weight", "mlp_up.weight"),
    ("xpress_head.mlp.down_proj.weight", "mlp_down.weight"),
];

fn theirs(name: &str) -> String {
    let head = NAMES.iter().find(|(ours, _)| *ours == name);
    head.map_or_else(|| name.to_string(), |(_, theirs)| format!("refiner_head.{theirs}"))
}

/// A random drafter, all of whose parameters matter, and its target, under `root`.
fn drafter(root: &Path, convolution: Option<Convolution>) -> XPress {
    let config = XPressConfig {
        decoder: fixture::decoder(2),
        settings: XPressSettings {
            blocks: BlockSpec {
                block_size: BLOCK,
                slots: SlotTarget::FillIn,
                mask_token_id: 7,
                causal: false,
                num_anchors: 8,
            },
            rank: 8,
            mlp_ratio: 2,
            num_passes: PASSES,
            convolution,
        },
    };
    let [embed, head] = fixture::ends();
    let model = XPress::fresh(config, &embed, &head, 5, Kind::Float);
    // Norms are not all ones, slots are mixed, and the refiner changes which tokens are likeliest.
    for (seed, (name, parameter)) in model.parameters().iter().enumerate() {
        let scale = match name.as_str() {
            name if name.starts_with("xpress_head.") => 0.25,
            name if name.contains("_conv.") => 0.2,
            _ if parameter.dim() == 1 => 0.2,
            _ => continue,
        };
        let _ = parameter.shallow_clone().g_add_(&(noise(9 + seed as u64, &parameter.size()) * scale));
    }
    fixture::write(root, &model.checkpoint(), model.config().to_json());
    model
}

fn objective() -> XPressObjective {
    XPressObjective {
        // Total variation is half of the L1 norm.
        loss: LossRecipe { ce_alpha: 0.1, l1_alpha: 0.45, ..LossRecipe::NONE },
        consistency: Consistency { alpha: 0.3, passes: PASSES as usize },
        base_alpha: 0.6,
    }
}

/// The last pass's logits after each of these anchors, `[S, γ, V]`, as the engine drafts.
fn drafted_logits(dir: &Path, sample: &TrainSample, anchors: &[usize]) -> Tensor {
    let _no_grad = tch::no_grad_guard();
    let model = XPress::load_packed(dir, Device::Cpu, Kind::Float).unwrap_or_else(|error| panic!("{error}"));
    let mut proposer = XPressProposer::new(model, anchors.len());
    let ids = Tensor::from_slice(&sample.input_ids);
    let before = |rows: &Tensor| {
        let parts: Vec<Tensor> = anchors.iter().map(|&anchor| rows.narrow(0, 0, anchor as i64)).collect();
        Tensor::cat(&parts, 0)
    };
    let context = Context {
        captured_states: before(&sample.taps),
        hidden: None,
        tokens: before(&ids),
        next: before(&ids.narrow(0, 1, TOKENS as i64 - 1)),
        chunks: anchors.iter().copied().enumerate().collect(),
    };
    let slots: Vec<usize> = (0..anchors.len()).collect();
    let tokens: Vec<i64> = anchors.iter().map(|&anchor| sample.input_ids[anchor]).collect();
    let mut logits = vec![];
    proposer.forward(&context, &slots, &Tensor::from_slice(&tokens), |_, row| {
        logits.push(row.copy());
        row.argmax(-1, false)
    });
    Tensor::stack(&logits, 1)
}

/// The backbones of DFlash and of DFlash 2, by folder.
const BACKBONES: [(&str, Option<Convolution>); 2] =
    [("dflash", None), ("dflash2", Some(Convolution { kernel_size: 3, group_size: 8 }))];

/// Drafters with both backbones, and their folders below `root`.
pub fn drafters(root: &Path) -> [(PathBuf, XPress); 2] {
    BACKBONES.map(|(name, convolution)| {
        let dir = root.join(name);
        let model = drafter(&dir, convolution);
        fixture::write_inputs(&dir.join("given.safetensors"), &fixture::sample(&ANCHORS), &[]);
        (dir, model)
    })
}

/// Compares logits, losses and gradients with those of the package.
pub fn compare(dir: &Path, model: &XPress, out: &BTreeMap<String, Tensor>) {
    let given = fixture::normed(fixture::sample(&ANCHORS));
    // Logits of the LM head, after the true tokens, and of the last Jacobi pass. Their slot 0 drafts nothing.
    let drafts = |name: &str| out[name].narrow(-2, 1, GAMMA as i64);
    let batch = model.config().batch(std::slice::from_ref(&given), 4.0, Device::Cpu, Kind::Float).unwrap();
    tch::no_grad(|| {
        let hidden = model.hidden_states(&batch);
        let (_, features) = model.teacher_forced_features(&hidden, &batch.previous).unwrap();
        let hidden = hidden.narrow(1, 1, GAMMA as i64);
        assert_close("base", &model.teacher_forced_logits(&hidden, None), &drafts("base"), FORWARD);
        let forced = model.teacher_forced_logits(&hidden, Some(&features));
        assert_close("forced", &forced, &drafts("biased").get(0), FORWARD);
    });
    let passes = drafts("biased").narrow(0, 1, PASSES); // [K, A, γ, V]
    // The passes read different tokens.
    let read = Tensor::cat(&[drafts("base").unsqueeze(0), passes.shallow_clone()], 0).argmax(-1, false);
    for pass in 1..PASSES {
        let changed = read.get(pass).ne_tensor(&read.get(pass - 1)).any();
        assert!(changed.int64_value(&[]) == 1, "pass {pass} reads the tokens of the pass before");
    }
    let own = drafted_logits(&dir.join("drafter"), &given, &ANCHORS[1..]);
    assert_close("last pass", &own, &passes.get(PASSES - 1).narrow(0, 1, 4), FORWARD);

    // Losses. The package divides by the number of supervised drafts.
    let count = batch.labels.size()[0] as f64;
    assert!(count < (ANCHORS.len() * GAMMA) as f64, "no block is cut");
    for (_, parameter) in model.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let sums = model.accumulate(&batch, &objective(), LossDenominator(count), None);
    let sums = Vec::<f64>::try_from(sums).unwrap();
    let sum = |wanted: LossSum| {
        let place = LossSum::all(GAMMA, &XPRESS_SUMS).position(|sum| sum == wanted);
        sums[place.unwrap_or_else(|| panic!("no sum {}", wanted.name()))]
    };
    let accepted = (0..GAMMA).map(|position| sum(LossSum::Accept(position))).sum::<f64>();
    let (rounds, base) = (sum(LossSum::Own("consistency")), sum(LossSum::Own("base")));
    for (name, found) in [
        ("loss_sum", sum(LossSum::Loss) / count),
        ("tf_loss_sum", (sum(LossSum::Loss) - 0.3 * rounds - 0.6 * base) / count),
        ("ce_loss_sum", sum(LossSum::CE) / count),
        ("tv_loss_sum", sum(LossSum::L1) / 2.0 / count),
        ("consistency_loss_sum", rounds / count),
        ("base_anchor_loss_sum", base / count),
        ("accept_rate_sum", accepted),
        ("accept_rate_total", sum(LossSum::Drafts)),
        ("base_accept_rate_sum", sum(LossSum::Own("base_accept"))),
    ] {
        assert_close(name, &Tensor::from_slice(&[found]), &out[name], FORWARD);
    }

    fixture::assert_gradients(model.parameters(), out, theirs);
}
