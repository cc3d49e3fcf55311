//! The accept step against 200 reference cases with explicit uniforms.

use deepspec_ops::verify;
use deepspec_testkit::golden::{Array, Case, Values};
use tch::{Device, Kind, Tensor};

/// The device of verification: `DEEPSPEC_TEST_DEVICE`, else the CPU.
fn device() -> Device {
    let name = std::env::var("DEEPSPEC_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    deepspec_ops::parse_device(&name).unwrap_or_else(|error| panic!("{error}"))
}

fn tensor(array: &Array) -> Tensor {
    match &array.values {
        Values::Float(values) => Tensor::from_slice(values),
        Values::Double(values) => Tensor::from_slice(values),
        Values::Int(values) => Tensor::from_slice(values),
    }
    .view(array.shape.as_slice())
    .to_device(device())
}

#[test]
fn golden_verify() {
    let case = Case::load("verify");
    let tokens = tensor(case.input("draft_tokens")).clamp_min(0);
    let lens = tensor(case.input("draft_len"));
    let uniform = |name: &str| tensor(case.input(name)).to_kind(Kind::Double);
    // All cases in one batch.
    let verdict = verify(
        &tensor(case.input("target_probs")),
        &tensor(case.input("draft_probs")),
        &tokens,
        &lens,
        &uniform("accept_uniforms"),
        &uniform("next_uniform"),
    );
    let accepted: Vec<i64> = Vec::try_from(verdict.accepted).unwrap();
    let next: Vec<i64> = Vec::try_from(verdict.next).unwrap();
    let drafts = case.input("draft_tokens");
    let (mut compared_next, expected_next) = (0, case.expected("next_token").ints());
    for i in 0..accepted.len() {
        let prefix = case.expected("accept_prefix_mask").ragged_row(i);
        assert_eq!(accepted[i], prefix.iter().sum::<i64>(), "case {i}");
        // Counts stop tokens as the engine does.
        let stops = case.input("stop_token_ids").ragged_row(i);
        let stop =
            drafts.row(i).ints()[..accepted[i] as usize].iter().position(|token| stops.contains(token));
        assert_eq!(
            stop.map_or(accepted[i], |at| at as i64 + 1),
            case.expected("accepted").ints()[i],
            "case {i}"
        );
        assert_eq!(
            i64::from(stop.is_some()),
            case.expected("terminated_by_stop_token").ints()[i],
            "case {i}"
        );
        // After a stop token the reference draws a token that is never used.
        if stop.is_none() {
            assert_eq!(next[i], expected_next[i], "case {i}");
            compared_next += 1;
        }
    }
    assert!(compared_next > accepted.len() / 2);
}
