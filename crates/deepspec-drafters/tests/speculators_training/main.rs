//! Drafters converted to speculators' layout: that package's trainer computes the same logits, losses and gradients.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with speculators and torch.

mod block_options;
#[path = "../common/mod.rs"]
mod common;
mod eagle3;
mod fixture;
mod xpress;

use deepspec_testkit::skip;

/// All drafters in one process of Python, which takes long to start.
#[test]
fn speculators_trains_converted_drafters_alike() {
    let Some(python) = skip::speculators_python("speculators and torch") else { return };
    let root = tempfile::tempdir().unwrap();
    let refined = xpress::drafters(root.path());
    let optional = block_options::drafters(root.path());
    let stepped = eagle3::drafters(root.path());
    let folders = refined.iter().map(|(dir, _)| dir);
    let folders = folders.chain(optional.iter().map(|(dir, ..)| dir));
    let folders = folders.chain(stepped.iter().map(|(dir, ..)| dir));
    let mut outputs = fixture::train(&python, folders).into_iter();
    for ((dir, model), out) in refined.iter().zip(outputs.by_ref()) {
        xpress::compare(dir, model, &out);
    }
    for ((dir, case, model), out) in optional.iter().zip(outputs.by_ref()) {
        block_options::compare(dir, *case, model, &out);
    }
    for ((_, case, model), out) in stepped.iter().zip(outputs) {
        eagle3::compare(*case, model, &out);
    }
}
