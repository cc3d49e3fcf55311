//! What the program makes of the machine that it runs on.

use std::process::Command;

use deepspec_testkit::machine::{assert_misses_gpus, assert_waits_asleep};

const PROGRAM: &str = env!("CARGO_BIN_EXE_deepspec-data");

#[test]
fn a_gpu_that_libtorch_cannot_use_is_missed() {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
    let build = || {
        let mut command = Command::new(PROGRAM);
        command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        command.args(["cache", "build", "--config", "configs/tiny/dspark.yaml", "--input", "nowhere.jsonl"]);
        command.arg("--output-dir").arg(&cache);
        command
    };
    assert_misses_gpus(build, dir.path());
}

#[test]
fn threads_wait_asleep() {
    assert_waits_asleep(PROGRAM);
}
