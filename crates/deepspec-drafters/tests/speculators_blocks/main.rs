//! Block drafters converted to speculators' layout: that package's trainer computes the same logits, losses and gradients.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with speculators and torch.

mod block_options;
#[path = "../common/mod.rs"]
mod common;
mod fixture;
mod xpress;

use deepspec_testkit::skip;

/// All drafters in one process of Python, which takes long to start.
#[test]
fn speculators_trains_converted_block_drafters_alike() {
    let Some(python) = skip::speculators_python("speculators and torch") else { return };
    let root = tempfile::tempdir().unwrap();
    let refined = xpress::drafters(root.path());
    let optional = block_options::drafters(root.path());
    let folders = refined.iter().map(|(dir, _)| dir).chain(optional.iter().map(|(dir, ..)| dir));
    let outputs = fixture::train(&python, folders);
    let (of_refined, of_optional) = outputs.split_at(refined.len());
    for ((dir, model), out) in refined.iter().zip(of_refined) {
        xpress::compare(dir, model, out);
    }
    for ((dir, case, model), out) in optional.iter().zip(of_optional) {
        block_options::compare(dir, *case, model, out);
    }
}
