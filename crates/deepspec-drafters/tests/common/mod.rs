//! Samples and gradients of golden cases.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

#[path = "../../../deepspec-models/tests/common/mod.rs"]
mod arrays;
pub mod laws;

use deepspec_drafters::TrainSample;
use deepspec_testkit::golden::Case;
use tch::{Device, Kind, Tensor};

pub use arrays::*;

/// Largest difference of a gradient, relative to its largest value.
const GRADIENT: f64 = 5e-4;

/// One sample per row of a training case, unpadded and without anchors, with all last hidden
/// states.
pub fn samples(case: &Case) -> Vec<TrainSample> {
    let lens = case.hyper("seq_lens").as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize);
    lens.enumerate()
        .map(|(b, len)| {
            let states = |name: &str| tensor(case.input(name)).get(b as i64).narrow(0, 0, len as i64);
            TrainSample {
                input_ids: case.input("input_ids").row(b).ints()[..len].to_vec(),
                loss_mask: case.input("loss_mask").row(b).ints()[..len]
                    .iter()
                    .map(|&flag| flag != 0)
                    .collect(),
                taps: states("target_hidden_states"),
                last: states("target_last_hidden_states"),
                last_positions: (0..len as u32).collect(),
                anchors: vec![],
            }
        })
        .collect()
}

/// Compares the gradients of all parameters, and of no others, with the reference's.
pub fn assert_gradients(case: &Case, parameters: &[(String, Tensor)]) {
    let name = case.dir.display();
    let mut norm = 0.0;
    for (parameter_name, parameter) in parameters {
        let expected = tensor(case.expected(&format!("grad.{parameter_name}")));
        let gradient = parameter.grad();
        let gradient =
            if gradient.defined() { gradient.to_device(Device::Cpu) } else { expected.zeros_like() };
        let allowed = GRADIENT * max_abs(&expected).max(1e-12);
        assert_close(&format!("{name}: grad.{parameter_name}"), &gradient, &expected, allowed);
        norm += gradient.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]);
    }
    let compared = case.all_expected().keys().filter(|key| key.starts_with("grad.")).count();
    assert_eq!(compared, parameters.len(), "{name}: the reference trains other parameters");
    let (found, expected) = (norm.sqrt(), case.scalar("global_grad_norm").as_f64().unwrap());
    assert!((found - expected).abs() <= GRADIENT * expected.max(1.0), "{name}: norm {found} for {expected}");
}

/// Uniform numbers with which a drafter samples `tokens` from distributions `[γ, V]`.
pub fn forcing(probs: &Tensor, tokens: &[i64]) -> Tensor {
    let (probs, cdf) = (probs.to_kind(Kind::Double), probs.cumsum(-1, Kind::Double));
    let uniforms: Vec<f64> = tokens
        .iter()
        .enumerate()
        .map(|(k, &token)| {
            let at = [k as i64, token];
            cdf.double_value(&at) - probs.double_value(&at) / 2.0
        })
        .collect();
    Tensor::from_slice(&uniforms).unsqueeze(0)
}
