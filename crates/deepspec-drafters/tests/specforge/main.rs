//! Drafters in SpecForge's layout: that package computes the same.
//!
//! Runs only if `DEEPSPEC_SPECULATORS_PYTHON` names a Python with specforge and torch.

#[path = "../common/mod.rs"]
mod common;
mod domino;
mod eagle3;
mod fixture;

use deepspec_testkit::skip;

/// All drafters in one process of Python, which takes long to start.
#[test]
fn specforge_computes_the_same_with_drafters_in_its_layout() {
    let Some(python) = skip::speculators_python("specforge and torch") else { return };
    let root = tempfile::tempdir().unwrap();
    let dominos = domino::drafters(root.path());
    let eagle3s = eagle3::folders(root.path());
    let folders = dominos.iter().map(|(dir, _)| ("domino", dir));
    let folders: Vec<_> = folders.chain(eagle3s.iter().map(|dir| ("eagle3", dir))).collect();
    let mut outputs = fixture::compute(&python, &folders).into_iter();
    for ((_, model), out) in dominos.into_iter().zip(outputs.by_ref()) {
        domino::compare(model, &out);
    }
    for (dir, out) in eagle3s.iter().zip(outputs) {
        eagle3::compare(dir, &out);
    }
}
