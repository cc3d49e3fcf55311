//! Training on the stand-in GPU (`tests/standin`): the whole CUDA path except CUDA itself.

mod common;

use std::fs;

use common::{Bench, DFLASH2, DSPARK_V4, gpu, start_until};
use deepspec_capture::cache::verify;
use deepspec_testkit::fake_gpu::{FakeGpu, Report};
use deepspec_testkit::tiny;

const DSPARK: &str = "name=t";
const SINKS: &str = "drafter.dspark.attention_sinks=true";
const DFLASH: &str =
    "drafter={dflash: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6}}";
const DOMINO: &str = "drafter={domino: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, gru: {hidden_size: 16, rank: 8}}}";
const EAGLE3: &str = "drafter={eagle3: {ttt_length: 3}}";
/// Drafters of the first two tests. xPress, P-EAGLE, MTP-1 and assistants have tests of their own.
const DRAFTERS: [&str; 7] = [DSPARK, SINKS, DSPARK_V4, DFLASH, DFLASH2, DOMINO, EAGLE3];
const FEW: &str = "train.max_train_steps=5";

fn set<'a>(changes: &[&'a str]) -> Vec<&'a str> {
    changes.iter().flat_map(|change| ["--set", change]).collect()
}

#[track_caller]
fn assert_near(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f64::max);
    assert!(worst <= tolerance, "losses are apart by {worst:e}: {a:?} and {b:?}");
}

/// The GPUs on which each process allocated memory, from the reports `report-%p.json`. The launcher
/// allocates none and is left out.
fn used<const N: usize>(bench: &Bench) -> Vec<[bool; N]> {
    let reports = fs::read_dir(bench.path(""))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("report-")));
    let mut used: Vec<[bool; N]> = reports
        .map(|path| Report::load(&path))
        .map(|report| std::array::from_fn(|gpu| report.memory(gpu, "allocations") > 0))
        .filter(|used: &[bool; N]| used.contains(&true))
        .collect();
    used.sort_unstable();
    used
}

/// Runs on the GPU and on the CPU, and compares the losses within `tolerance`. Returns the report
/// of the GPU run.
#[track_caller]
fn as_on_the_cpu(gpu: FakeGpu, changes: &[&str], tolerance: f64) -> Report {
    let (cpu, bench) = (Bench::new(), Bench::new().on(gpu));
    cpu.succeeds(&[&set(changes)[..], &["--device", "cpu"]].concat());
    bench.succeeds(&set(changes));
    assert_near(&bench.losses(), &cpu.losses(), tolerance);
    let report = bench.report();
    assert!(
        report.operation_count("calls") > 0 && report.memory(0, "peak_bytes") > 0,
        "nothing ran on the GPU"
    );
    report
}

#[test]
fn drafters_learn_as_on_the_cpu() {
    for drafter in DRAFTERS {
        let Some(gpu) = gpu() else { return };
        as_on_the_cpu(gpu, &[drafter, FEW], 1e-4);
    }
}

#[test]
fn drafters_learn_in_bfloat16_too() {
    for drafter in DRAFTERS {
        let Some(gpu) = gpu() else { return };
        as_on_the_cpu(gpu, &[drafter, FEW, "train.precision=bf16"], 2e-2);
    }
}

#[test]
fn xpress_learns_as_on_the_cpu() {
    let drafter = "drafter={xpress: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, refiner: {rank: 16}}}";
    for (precision, tolerance) in [("fp32", 1e-4), ("bf16", 2e-2)] {
        let Some(gpu) = gpu() else { return };
        as_on_the_cpu(gpu, &[drafter, FEW, &format!("train.precision={precision}")], tolerance);
    }
}

#[test]
fn p_eagle_learns_as_on_the_cpu() {
    let drafter = "drafter={peagle: {num_draft_layers: 2, num_depths: 3, mask_token_id: 1023, segments: 2}}";
    for (precision, tolerance) in [("fp32", 1e-4), ("bf16", 2e-2)] {
        let Some(gpu) = gpu() else { return };
        as_on_the_cpu(gpu, &[drafter, FEW, &format!("train.precision={precision}")], tolerance);
    }
}

#[test]
fn mtp_1_learns_as_on_the_cpu() {
    for (precision, tolerance) in [("fp32", 1e-4), ("bf16", 2e-2)] {
        let Some(gpu) = gpu() else { return };
        let (cpu, bench) = (Bench::with_all_final_states(), Bench::with_all_final_states().on(gpu));
        let precision = format!("train.precision={precision}");
        let changes = set(&["drafter={mtp: {}}", "target.layer_ids=[]", FEW, &precision]);
        cpu.succeeds(&[&changes[..], &["--device", "cpu"]].concat());
        bench.succeeds(&changes);
        assert_near(&bench.losses(), &cpu.losses(), tolerance);
    }
}

/// Its states come from a target beside it, which runs in bfloat16 on a GPU.
#[test]
fn an_assistant_learns_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let rows = Bench::new();
    let target = rows.path("gemma4");
    fs::create_dir(&target).unwrap();
    tiny::gemma4(&target, 512);
    let model = format!("target={{model: '{}', layer_ids: [1, 2]}}", target.display());
    let input = format!("data.input=['{}']", rows.path("rows.jsonl").display());
    let drafter = "drafter={gemma4_assistant: {hidden_size: 16, intermediate_size: 32, num_attention_heads: 16, \
        layer_types: [sliding_attention, sliding_attention, full_attention]}}";
    let (states, format, length) = ("data.states=online", "data.chat_template=gemma4", "data.max_length=512");
    as_on_the_cpu(gpu, &[&model, drafter, FEW, &input, states, format, length], 3e-2);
}

#[test]
fn a_killed_run_resumes_to_the_same_bytes() {
    let (Some(one), Some(other)) = (gpu(), gpu()) else { return };
    let length = set(&["train.max_train_steps=7"]);
    let (whole, bench) = (Bench::new().on(one), Bench::new().on(other));
    whole.succeeds(&length);
    let mut child = start_until(&bench, 4, &length);
    child.kill().unwrap();
    child.wait().unwrap();
    bench.succeeds(&length);
    assert!(bench.result_of(7) == whole.result_of(7), "other weights");
    assert_eq!(bench.losses(), whole.losses());
}

#[test]
fn the_target_computes_states_beside_the_drafter() {
    for source in ["online", "hybrid"] {
        let Some(gpu) = gpu() else { return };
        let (cache, bench) = (Bench::new(), Bench::new().on(gpu));
        let written = bench.path("written");
        let states =
            if source == "online" { source.into() } else { format!("{{hybrid: '{}'}}", written.display()) };
        let (states, input) = (
            format!("data.states={states}"),
            format!("data.input=['{}']", bench.path("rows.jsonl").display()),
        );
        // Two epochs; a hybrid reads the second one from its folder.
        let length = "train.max_train_steps=8";
        cache.succeeds(&[&set(&[length])[..], &["--device", "cpu"]].concat());
        bench.succeeds(&set(&[length, &states, &input]));
        // On a GPU the target runs in bfloat16.
        assert_near(&bench.losses(), &cache.losses(), 3e-2);
        assert_eq!(written.exists(), source == "hybrid");
        if written.exists() {
            assert!(verify(&written, |_| ()).unwrap().is_empty());
        }
    }
}

#[test]
fn two_processes_share_two_gpus_out() {
    let (Some(one), Some(two)) = (gpu(), gpu()) else { return };
    let (single, bench) = (Bench::new().on(one), Bench::new().on(two));
    let length = set(&[FEW]);
    single.succeeds(&length);
    let processes = set(&[FEW, "train.local_batch_size=1", "train.backend=gloo"]);
    let mut command = bench.command(&[&processes[..], &["--processes", "2"]].concat());
    command.env("DEEPSPEC_STANDIN_DEVICES", "2").env("DEEPSPEC_STANDIN_REPORT", bench.path("report-%p.json"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_near(&bench.losses(), &single.losses(), 1e-4);

    // Each rank used only its own GPU.
    assert_eq!(used::<2>(&bench), [[false, true], [true, false]]);
}

#[test]
fn each_rank_has_its_target_on_a_gpu_of_its_own() {
    let (Some(one), Some(four)) = (gpu(), gpu()) else { return };
    let (single, bench) = (Bench::new().on(one), Bench::new().on(four));
    let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
    let online: [&str; 3] = [FEW, "data.states=online", &input];
    single.succeeds(&set(&online));
    let apart = ["data.target_device=cuda:{local_rank+2}", "train.local_batch_size=1", "train.backend=gloo"];
    let mut command = bench.command(&[&set(&online)[..], &set(&apart)[..], &["--processes", "2"]].concat());
    command.env("DEEPSPEC_STANDIN_DEVICES", "4").env("DEEPSPEC_STANDIN_REPORT", bench.path("report-%p.json"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_near(&bench.losses(), &single.losses(), 1e-4);
    assert_eq!(used::<4>(&bench), [[false, true, false, true], [true, false, true, false]]);
}
