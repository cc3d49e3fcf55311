//! How the program uses the machine that it runs on: unusable GPUs, missing memory, and cores that
//! are busy.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use common::{Bench, workspace};
use deepspec_testkit::device_detection::{assert_misses_gpus, assert_waits_asleep, with_unusable_gpu};

/// Runs two tasks, one after the other; a failing task ends the step.
const SRUN: &str = r#"#!/bin/sh
[ "$1 $2" = "--kill-on-bad-exit=1 --cpus-per-task=3" ] || exit 99
shift 2
for rank in 0 1; do
    SLURM_PROCID=$rank "$@" || exit
done
"#;
const SCONTROL: &str = r#"#!/bin/sh
echo "$*" >>requeued
"#;
/// Exits with its task's code from `CODES`. With code 75, the task's shell has received the signal
/// too.
const TRAIN: &str = r#"#!/bin/sh
echo "$SLURM_PROCID $*" >>started
set -- $CODES
shift "$SLURM_PROCID"
[ "$1" -ne 75 ] || kill -USR1 "$PPID"
exit "$1"
"#;

#[test]
fn a_gpu_that_libtorch_cannot_use_is_missed() {
    let bench = Bench::new();
    assert_misses_gpus(|| bench.command(&["--plan"]), &bench.path("."));
    // The launcher itself refuses before it starts a process.
    let mut launcher = bench.command(&["--processes=2"]);
    with_unusable_gpu(&mut launcher, &bench.path("."));
    let output = launcher.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && !said.contains("rank 0"), "{said}");
    assert!(said.contains("nvidia-smi lists a GPU") && said.lines().count() == 1, "{said}");
}

#[test]
fn threads_wait_asleep() {
    assert_waits_asleep(env!("CARGO_BIN_EXE_deepspec-train"));
}

#[test]
fn a_rank_without_memory_says_so_in_the_launchers_last_line() {
    let bench = Bench::new();
    // A table of 4 GiB, for processes limited to 3.3 GiB of address space.
    let huge = "--set=drafter.dspark.markov.rank=1048576";
    let train = bench.command(&["--processes=2", "--set=train.local_batch_size=1", huge]);
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "ulimit -v 3500000; exec \"$0\" \"$@\""])
        .arg(train.get_program())
        .args(train.get_args());
    let output = limited.env("OMP_NUM_THREADS", "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    assert_eq!(output.status.code(), Some(1), "{said}");
    for part in ["ERROR rank ", " of 2 was killed by signal 6 (SIGABRT)", "its last error", "no memory for "]
    {
        assert!(last.contains(part), "{part} is not in: {last}");
    }
}

#[test]
fn what_carries_tensors_is_checked_before_anything_runs() {
    let bench = Bench::new();
    let processes = "--processes=2";
    bench.fails(&[processes, "--set=train.backend=mpi"], 2, &["train.backend", "mpi", "gloo"]);
    bench.fails(&[processes, "--set=train.backend=nccl", "--device=cpu"], 2, &["train.backend", "GPUs only"]);
    bench.fails(&[processes, "--device=cuda:0"], 2, &["one device for 2 processes", "train.backend=gloo"]);
    bench.fails(&["--device=cuda:{rank}"], 2, &["cuda:{rank}", "cuda:{local_rank+N}"]);
}

#[test]
fn the_batch_script_keeps_75() {
    // Exit codes of the tasks, the number of tasks that start, and the job's exit code.
    for (codes, tasks, expected) in [("75 75", 2, 75), ("75 1", 2, 1), ("1 0", 1, 1), ("0 0", 2, 0)] {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for folder in ["bin", "target/release"] {
            fs::create_dir_all(path(folder)).unwrap();
        }
        for (name, text) in
            [("bin/srun", SRUN), ("bin/scontrol", SCONTROL), ("target/release/deepspec-train", TRAIN)]
        {
            fs::write(path(name), text).unwrap();
            fs::set_permissions(path(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let common = "scripts/slurm/common.sh";
        fs::create_dir_all(path("scripts/slurm")).unwrap();
        fs::copy(workspace().join(common), path(common)).unwrap();
        // A leftover file of a killed job with the same number is ignored.
        let mark = path(".deepspec-stopped-47");
        fs::write(&mark, "").unwrap();
        let programs = format!("{}:{}", path("bin").display(), std::env::var("PATH").unwrap_or_default());
        let mut job = Command::new("bash");
        job.arg(workspace().join("scripts/slurm/train.sbatch")).args(["--config", "a recipe.yaml"]);
        job.env("SLURM_SUBMIT_DIR", dir.path()).env("SLURM_JOB_ID", "47");
        job.env("SLURM_CPUS_PER_TASK", "3");
        let output = job.env("PATH", programs).env("CODES", codes).output().unwrap();
        assert_eq!(output.status.code(), Some(expected), "{codes}: {output:?}");
        let written = |name: &str| fs::read_to_string(path(name)).unwrap_or_default();
        let started: String = (0..tasks).map(|rank| format!("{rank} --config a recipe.yaml\n")).collect();
        assert_eq!(written("started"), started, "{codes}");
        assert_eq!(written("requeued"), if expected == 75 { "requeue 47\n" } else { "" }, "{codes}");
        assert!(!mark.exists(), "{codes}: the mark is left behind");
    }
}
