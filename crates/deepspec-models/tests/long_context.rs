//! Long sequences run in several passes, and a long pass attends in pieces. The hidden states equal
//! those of any other split.

mod common;

use std::path::Path;

use common::{assert_close, device};
use deepspec_core::Tap;
use deepspec_engine::{ModelInput, ModelOutput, Target};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_testkit::tiny;
use tch::{Device, Kind, Tensor};

const TOLERANCE: f64 = 1e-4;

fn target(dir: &Path) -> TargetModel {
    let options = TargetOptions {
        device: device(),
        kind: Kind::Float,
        slots: 3,
        taps: Tap::from_layer_ids([-1, 0, 1, 3]).unwrap(),
    };
    TargetModel::load(dir, &options).unwrap_or_else(|error| panic!("{error}"))
}

fn ids(length: usize) -> Tensor {
    let ids: Vec<i64> = (0..length as i64).map(|p| (p * p * 7 + p * 31) % 630).collect();
    Tensor::from_slice(&ids)
}

fn feed(target: &mut TargetModel, chunks: &[(usize, usize)], tokens: &Tensor) -> ModelOutput {
    let out = target.forward(&ModelInput { chunks, tokens: tokens.to_device(device()) });
    ModelOutput {
        hidden: out.hidden.to_device(Device::Cpu),
        captured_states: out.captured_states.to_device(Device::Cpu),
    }
}

#[test]
fn passes_and_pieces_do_not_change_the_states() {
    let _no_grad = tch::no_grad_guard();
    let dir = tempfile::tempdir().unwrap();
    tiny::gemma4(dir.path(), 16384);
    let mut target = target(dir.path());
    // Two passes. In the first one, full attention layers have 16 x 4096 x 4096 scores, which are
    // cut into pieces. Windowed layers are cut in both passes.
    let length = 4150;
    let tokens = ids(length);
    let whole = feed(&mut target, &[(1, length)], &tokens);
    assert_eq!(
        (whole.hidden.size()[0], whole.captured_states.size()),
        (length as i64, vec![length as i64, 4 * 32])
    );

    // In small chunks, which attend in one call per layer.
    for start in (0..length).step_by(190) {
        let len = (length - start).min(190);
        let out = feed(&mut target, &[(2, len)], &tokens.narrow(0, start as i64, len as i64));
        let same = |what: &str, found: &Tensor, whole: &Tensor| {
            assert_close(what, found, &whole.narrow(0, start as i64, len as i64), TOLERANCE);
        };
        same("hidden", &out.hidden, &whole.hidden);
        same("taps", &out.captured_states, &whole.captured_states);
    }

    // Batching does not change a single bit, and rows are returned in the order of the feed. (All
    // lengths are even: in such a small model, an odd number of rows ends inside one of the
    // processor's vectors.)
    for slot in 0..3 {
        target.truncate(slot, 0);
    }
    let chunks = [(0, 4100), (1, length), (2, 4)];
    let beside = Tensor::cat(&[&tokens.narrow(0, 0, 4100), &tokens, &tokens.narrow(0, 0, 4)], 0);
    let out = feed(&mut target, &chunks, &beside);
    let own = |rows: &Tensor| rows.narrow(0, 4100, length as i64);
    assert!(own(&out.hidden).equal(&whole.hidden) && own(&out.captured_states).equal(&whole.captured_states));
    assert_close("first", &out.hidden.narrow(0, 0, 4100), &whole.hidden.narrow(0, 0, 4100), TOLERANCE);
    let last = out.hidden.narrow(0, 4100 + length as i64, 4);
    assert_close("last", &last, &whole.hidden.narrow(0, 0, 4), TOLERANCE);

    // A rollback beyond the window: the KV cache still has all tokens.
    target.truncate(1, 3000);
    let again = feed(&mut target, &[(1, 700)], &tokens.narrow(0, 3000, 700));
    assert_close("again", &again.hidden, &whole.hidden.narrow(0, 3000, 700), TOLERANCE);
}
