//! What the program makes of the machine that it runs on: GPUs that it cannot use, memory that is not there, cores that others use.

mod common;

use std::process::Command;

use common::Bench;
use deepspec_testkit::machine::{assert_misses_gpus, assert_waits_asleep, with_unusable_gpu};

#[test]
fn a_gpu_that_libtorch_cannot_use_is_missed() {
    let bench = Bench::new();
    assert_misses_gpus(|| bench.command(&["--plan"]), &bench.path("."));
    // The launcher itself refuses, before it starts anything.
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
    // A table of 4 GiB, for processes that may have 3.3 GiB of addresses.
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
    for part in ["ERROR rank ", " of 2 was killed by signal 6 (SIGABRT)", "its last words", "no memory for "]
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
