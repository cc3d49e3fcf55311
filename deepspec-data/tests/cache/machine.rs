//! How the program uses the machine that it runs on.

use std::process::Command;

use deepspec_testkit::device_detection::{assert_misses_gpus, assert_waits_asleep};

const PROGRAM: &str = env!("CARGO_BIN_EXE_deepspec-data");

#[test]
fn a_gpu_that_libtorch_cannot_use_is_missed() {
    let dir = tempfile::tempdir().unwrap();
    // The device is chosen before the model is loaded, so no model is needed.
    let serve = || {
        let mut command = Command::new(PROGRAM);
        command.args(["serve", "--port", "0", "--model"]).arg(dir.path());
        command
    };
    assert_misses_gpus(serve, dir.path());
}

#[test]
fn threads_wait_asleep() {
    assert_waits_asleep(PROGRAM);
}
