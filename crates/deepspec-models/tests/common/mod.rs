//! Golden arrays as tensors, and closeness.
#![allow(dead_code, reason = "each test binary uses its part")]

use deepspec_models::TrainSample;
use deepspec_testkit::golden::{Array, Case, Values};
use tch::{Device, Kind, Tensor};

/// Largest difference of a gradient, relative to its largest value.
const GRADIENT: f64 = 5e-4;

pub fn tensor(array: &Array) -> Tensor {
    match &array.values {
        Values::Float(values) => Tensor::from_slice(values),
        Values::Double(values) => Tensor::from_slice(values),
        Values::Int(values) => Tensor::from_slice(values),
    }
    .view(array.shape.as_slice())
}

/// Standard normal draws, float32.
pub fn noise(seed: u64, shape: &[i64]) -> Tensor {
    let count = shape.iter().product::<i64>() as usize;
    Tensor::from_slice(&deepspec_testkit::noise(seed, count)).view(shape)
}

pub fn max_abs(tensor: &Tensor) -> f64 {
    if tensor.numel() == 0 { 0.0 } else { tensor.abs().max().double_value(&[]) }
}

/// `found` within `tolerance` of `expected`, absolutely.
pub fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size(), "{what}: shapes differ");
    let error = max_abs(&(found.to_kind(Kind::Double) - expected.to_kind(Kind::Double)));
    assert!(error <= tolerance, "{what}: off by {error:.3e}, allowed {tolerance:.0e}");
}

/// The device of the golden tests: `DEEPSPEC_TEST_DEVICE`, else the CPU.
pub fn device() -> tch::Device {
    let name = std::env::var("DEEPSPEC_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    deepspec_dist::device(&name).unwrap_or_else(|error| panic!("{error}"))
}

/// One sample per row of a training case, unpadded and without anchors, with all last hidden states kept.
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

/// The parameters' gradients against the reference's, all of them and no others.
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

/// Uniform numbers that make a drafter draw these tokens from distributions `[γ, V]`.
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
