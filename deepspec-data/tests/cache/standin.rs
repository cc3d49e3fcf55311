//! `cache build` on the stand-in GPU (`tests/standin`).

use std::path::Path;

use deepspec_testkit::fake_gpu::{FakeGpu, Report};
use serde_json::Value;

use crate::bench::{Bench, build_args};

/// By default, one process runs on each GPU.
#[test]
fn a_machine_of_two_gpus_uses_both() {
    let Some(gpu) = FakeGpu::for_program(Path::new(env!("CARGO_BIN_EXE_deepspec-data"))) else { return };
    let bench = Bench::new(40);
    let build = |name: &str, devices: &str| {
        let mut command = bench.command(&build_args(name, &["--device", "cuda"]));
        let output = gpu.attach(&mut command).env("DEEPSPEC_STANDIN_DEVICES", devices).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        bench.files(name)
    };
    let (one, two) = (build("one", "1"), build("two", "2"));
    assert!(one == two, "the caches differ");
}

#[test]
fn states_captured_on_a_gpu_are_those_of_the_cpu() {
    let Some(gpu) = FakeGpu::for_program(Path::new(env!("CARGO_BIN_EXE_deepspec-data"))) else { return };
    let bench = Bench::new(12);
    bench.build("cpu", &[]).succeeds_with(&["12 samples in"]);
    let report = bench.path("report.json");
    let mut command = bench.command(&build_args("gpu", &["--device", "cuda"]));
    let output = gpu.attach_with_report(&mut command, &report).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(Report::load(&report).memory(0, "peak_bytes") > 0, "nothing ran on the GPU");
    bench.run(&["verify", "gpu"]).succeeds_with(&["sound", "12 samples"]);
    for sample in ["0", "7"] {
        let shown = |cache: &str| -> Value {
            let shown = bench.run(&["inspect", "--cache-dir", cache, "--sample", sample, "--json"]);
            serde_json::from_str(&shown.stdout).unwrap()
        };
        let (cpu, gpu) = (shown("cpu"), shown("gpu"));
        assert_eq!(cpu["input_ids"], gpu["input_ids"]);
        for (a, b) in cpu["tensors"].as_array().unwrap().iter().zip(gpu["tensors"].as_array().unwrap()) {
            // On a GPU the target computes in bfloat16.
            let (a, b) = (a["mean_norm"].as_f64().unwrap(), b["mean_norm"].as_f64().unwrap());
            assert!((a - b).abs() < 1e-2 * a, "norms {a} and {b}");
        }
    }
}
