//! Writes down what is built: the version, and the commit where `DEEPSPEC_COMMIT` names one, as scripts/release.sh does.

use std::env;

fn main() {
    println!("cargo::rerun-if-env-changed=DEEPSPEC_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let commit = env::var("DEEPSPEC_COMMIT").ok().filter(|commit| !commit.is_empty());
    let build = commit.map_or(String::new(), |commit| format!("+g{}", commit.get(..12).unwrap_or(&commit)));
    println!("cargo::rustc-env=DEEPSPEC_VERSION={version}{build}");
}
