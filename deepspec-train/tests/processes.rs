//! The built binary as several processes over Gloo. Training equals that of one process, resumes on
//! any number of processes, and ends in all processes with the cause named.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{Bench, STEPS};
use deepspec_testkit::signal;
use deepspec_testkit::skip::{self, Kind, skip};
use tch::Tensor;

/// Arguments for this number of processes. With one sample per forward, four processes fit into a
/// step.
fn on(processes: usize) -> [String; 2] {
    [format!("--processes={processes}"), "--set=train.local_batch_size=1".into()]
}

fn with<'a>(own: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    own.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

fn whole(processes: usize) -> Bench {
    let bench = Bench::new();
    bench.succeeds(&with(&on(processes), &[]));
    bench
}

/// A run whose standard error is read line by line.
struct Run {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
    said: Vec<String>,
}

impl Run {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, lines, said: vec![] }
    }

    /// Waits until `step` is logged.
    fn until(mut self, step: usize) -> Self {
        let mark = format!("step {step}/");
        while !self.said.last().is_some_and(|line| line.contains(&mark)) {
            let Some(line) = self.lines.next() else { panic!("it ended before: {:#?}", self.said) };
            self.said.push(line.unwrap());
        }
        self
    }

    /// The process id of one rank of a launcher.
    fn rank(&self, rank: usize) -> u32 {
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
        let variable = format!("RANK={rank}");
        let is_rank = |child: &u32| {
            let environment = fs::read(format!("/proc/{child}/environ")).unwrap();
            environment.split(|&byte| byte == 0).any(|entry| entry == variable.as_bytes())
        };
        children.split_whitespace().map(|child| child.parse().unwrap()).find(is_rank).unwrap()
    }

    /// Waits for the end; returns the exit code and the last line.
    fn end(mut self) -> (Option<i32>, String) {
        self.said.extend(self.lines.map_while(Result::ok));
        let status = self.child.wait().unwrap();
        assert!(!self.said.iter().any(|line| line.contains("panicked")), "{:#?}", self.said);
        (status.code(), self.said.pop().unwrap_or_default())
    }
}

fn send(name: &str, id: u32) {
    assert!(signal::send(name, id.into()));
}

/// Kills the launcher, and its ranks with it.
fn kill(mut run: Run) {
    run.child.kill().unwrap();
    // The pipe closes when the last process that writes to it has ended.
    run.lines.by_ref().for_each(drop);
    assert_eq!(run.child.wait().unwrap().signal(), Some(9), "it ended before it was killed");
}

#[track_caller]
fn assert_same_curve(bench: &Bench, single: &Bench, tolerance: f64) {
    let (a, b) = (bench.losses(), single.losses());
    assert_eq!(a.len(), b.len());
    let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f64::max);
    assert!(worst <= tolerance, "losses are apart by {worst:e}: {a:?} and {b:?}");
}

fn masters(bench: &Bench, steps: usize) -> BTreeMap<String, Tensor> {
    let file = bench.path(&format!("out/t/step_{steps}/train_state/optimizer.safetensors"));
    let tensors = Tensor::read_safetensors(file).unwrap();
    tensors.into_iter().filter(|(name, _)| name.starts_with("master.")).collect()
}

#[track_caller]
fn assert_same_weights(bench: &Bench, single: &Bench, steps: usize, tolerance: f64) {
    let (a, b) = (masters(bench, steps), masters(single, steps));
    assert!(a.keys().eq(b.keys()) && !a.is_empty());
    for (name, b) in &b {
        let apart = (&a[name] - b).norm().double_value(&[]) / b.norm().double_value(&[]).max(1e-6);
        assert!(apart <= tolerance, "{name}: apart by {apart:e} of its norm");
    }
}

#[test]
fn two_and_four_processes_train_as_one() {
    let steps = ["--set=train.max_train_steps=100", "--set=logging.checkpointing_steps=100"];
    let single = Bench::new();
    single.succeeds(&steps);
    for processes in [2, 4] {
        let bench = Bench::new();
        bench.succeeds(&with(&on(processes), &steps));
        assert_same_curve(&bench, &single, 1e-4);
        assert_same_weights(&bench, &single, 100, 1e-3);
    }
}

/// The numbers of forwards differ: each process needs as many as its own samples require.
#[test]
fn processes_with_limited_tokens_train_as_one() {
    let limits = ["--set=train.local_batch_size=4", "--set=train.max_tokens_per_batch=60"];
    let (single, two) = (whole(1), Bench::new());
    two.succeeds(&[&["--processes=2"][..], &limits].concat());
    for (a, b) in single.losses().iter().zip(two.losses()) {
        assert!((a - b).abs() < 1e-5 * a.abs().max(1.0), "{:?} and {:?}", single.losses(), two.losses());
    }
}

#[test]
fn the_reference_normalisation_is_that_of_the_samples_that_run_at_once() {
    // The micro-batches of two processes with one sample each equal those of one process with two.
    let normalization = "--set=train.loss_normalization=micro_batch";
    let (single, bench) = (Bench::new(), Bench::new());
    single.succeeds(&[normalization]);
    bench.succeeds(&with(&on(2), &[normalization]));
    assert_same_curve(&bench, &single, 1e-4);
    assert!(single.losses() != whole(1).losses());
}

#[test]
fn any_number_of_processes_resumes_what_any_number_began() {
    let single = whole(1);
    for first in [1, 2, 4] {
        let begun = Bench::new();
        kill(Run::start(begun.command(&with(&on(first), &[]))).until(10));
        assert_eq!(fs::read_link(begun.path("out/t/step_latest")).unwrap(), Path::new("step_9"));
        for then in [1, 2, 4] {
            let bench = Bench::new();
            copy(&begun.path("out/t"), &bench.path("out/t"));
            bench.succeeds(&with(&on(then), &[]));
            assert_same_curve(&bench, &single, 1e-4);
            assert_same_weights(&bench, &single, STEPS, 1e-3);
            if (first, then) == (1, 1) {
                assert!(bench.result() == single.result(), "one process, and other bits");
            }
        }
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    let copied = Command::new("cp").args(["-a", "--"]).arg(from.join(".")).arg(to).status().unwrap();
    assert!(copied.success());
}

#[test]
fn sharded_optimiser_state_is_saved_and_resumed_as_if_it_were_not() {
    let shards = "--set=train.sharding_strategy=shard_optimizer";
    let plain = whole(2);
    let sharded = Bench::new();
    sharded.succeeds(&with(&on(2), &[shards]));
    assert!(sharded.result() == plain.result());
    let bench = Bench::new();
    kill(Run::start(bench.command(&with(&on(4), &[shards, "--set=train.precision=bf16"]))).until(4));
    bench.succeeds(&with(&on(2), &[shards, "--set=train.precision=bf16"]));
    let other = Bench::new();
    other.succeeds(&["--set=train.precision=bf16"]);
    assert_same_curve(&bench, &other, 1e-2);
}

#[test]
fn a_killed_rank_ends_the_job_and_is_named() {
    let bench = Bench::new();
    let run = Run::start(bench.command(&with(&on(2), &[]))).until(5);
    let killed = Instant::now();
    send("KILL", run.rank(1));
    let (code, last) = run.end();
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
    assert_eq!(code, Some(1), "{last}");
    assert!(last.contains("rank 1 of 2 was killed by signal 9 (SIGKILL)"), "{last}");
    // Only the steps since the last checkpoint are lost, and the result does not change.
    let kept = fs::read_link(bench.path("out/t/step_latest")).unwrap();
    assert!(kept == Path::new("step_3") || kept == Path::new("step_6"), "{kept:?}");
    bench.succeeds(&with(&on(2), &[]));
    assert!(bench.result() == whole(2).result());
}

#[test]
fn a_signal_to_the_launcher_or_to_any_rank_saves_and_stops_all() {
    let single = whole(1);
    let bench = Bench::new();
    let run = Run::start(bench.command(&with(&on(2), &[]))).until(2);
    send("TERM", run.child.id());
    let (code, last) = run.end();
    assert!(code == Some(75) && last.contains("run the same command"), "{code:?}: {last}");
    let run = Run::start(bench.command(&with(&on(2), &[]))).until(8);
    send("USR1", run.rank(1));
    let (code, last) = run.end();
    assert!(code == Some(75) && last.contains("run the same command"), "{code:?}: {last}");
    bench.succeeds(&with(&on(1), &[]));
    assert_same_curve(&bench, &single, 1e-4);
}

/// A rank that is not started by our launcher: it has torchrun's variables, and rank 0 hosts the
/// rendezvous.
fn by_hand(bench: &Bench, rank: usize, ranks: usize, port: u16, args: &[&str]) -> Command {
    let mut command = bench.command(args);
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("MASTER_ADDR", "localhost")
        .env("MASTER_PORT", port.to_string());
    command
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Runs two ranks without the launcher, rank 1 with additional arguments, and returns their
/// outputs.
fn two_by_hand(bench: &Bench, args: &[&str], second: &[&str]) -> [Output; 2] {
    let port = free_port();
    let start = |rank, args: &[&str]| {
        let mut command = by_hand(bench, rank, 2, port, args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks = [start(0, args), start(1, &[args, second].concat())];
    ranks.map(|rank| rank.wait_with_output().unwrap())
}

#[track_caller]
fn assert_ended(output: &Output, code: i32, hints: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    let last = text.lines().last().unwrap_or_default();
    assert!(hints.iter().all(|hint| last.contains(hint)), "expected {hints:?} in: {last}");
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn ranks_may_be_started_by_torchrun() {
    let bench = Bench::new();
    let [leader, other] = two_by_hand(&bench, &["--set=train.local_batch_size=1"], &[]);
    assert_ended(&leader, 0, &["measure it", "step_24"]);
    // Only the leader logs.
    assert!(other.status.success() && other.stderr.is_empty(), "{other:?}");
    assert!(bench.result() == whole(2).result());
}

#[test]
fn torchrun_itself_starts_them() {
    let Some(python) = skip::python("torch") else { return };
    let bench = Bench::new();
    let train = bench.command(&["--set=train.local_batch_size=1"]);
    let mut command = Command::new(python);
    command
        .args(["-m", "torch.distributed.run", "--no-python", "--nproc-per-node=2", "--master-port"])
        .arg(free_port().to_string())
        .arg(train.get_program())
        .args(train.get_args())
        .env("OMP_NUM_THREADS", "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(bench.result() == whole(2).result());
}

#[test]
fn ranks_that_disagree_end_with_the_difference_named() {
    let bench = Bench::new();
    for output in two_by_hand(&bench, &[], &["--set=train.lr=2e-3"]) {
        assert_ended(&output, 2, &["cannot train together", "train.lr (rank 0 has 0.001, rank 1 has 0.002)"]);
    }
    let rows = fs::read_to_string(bench.path("rows.jsonl")).unwrap();
    let fewer: Vec<&str> = rows.lines().skip(1).collect();
    fs::write(bench.path("fewer.jsonl"), fewer.join("\n")).unwrap();
    let input = format!("--set=data.input=['{}']", bench.path("fewer.jsonl").display());
    for output in two_by_hand(&bench, &[], &["--set=data.states=online", &input]) {
        assert_ended(&output, 2, &["cannot train together", "rank 1 has other samples"]);
    }
    let elsewhere = format!("--set=logging.output_dir={}", bench.path("elsewhere").display());
    bench.succeeds(&["--init-only"]);
    for output in two_by_hand(&bench, &[], &[&elsewhere]) {
        assert_ended(&output, 2, &["cannot train together", "logging.output_dir"]);
    }
}

#[test]
fn the_error_of_one_rank_is_told_by_all() {
    let (bench, damaged) = (Bench::new(), Bench::new());
    let shard = damaged.path("cache/shard-00000.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&shard, bytes).unwrap();
    let cache = format!("--set=data.states.cache={}", damaged.path("cache").display());
    let [leader, other] = two_by_hand(&bench, &[], &[&cache]);
    assert_ended(&other, 1, &["shard-00000.safetensors"]);
    assert_ended(&leader, 1, &["because rank 1 failed", "shard-00000.safetensors"]);
}

#[test]
fn a_rank_that_is_killed_by_hand_is_missed_by_the_others() {
    let bench = Bench::new();
    let port = free_port();
    let mut silent = by_hand(&bench, 1, 2, port, &[]);
    let mut victim = silent.stderr(Stdio::null()).spawn().unwrap();
    let leader = Run::start(by_hand(&bench, 0, 2, port, &[])).until(3);
    victim.kill().unwrap();
    victim.wait().unwrap();
    let (code, last) = leader.end();
    assert!(code == Some(1) && last.contains("no word from rank 1"), "{code:?}: {last}");
}

/// Several all-reduces are in flight at once, and each rank communicates only with its neighbours.
#[test]
fn of_four_ranks_the_one_that_is_killed_is_missed_by_all_others() {
    let bench = Bench::new();
    let port = free_port();
    let command = |rank| by_hand(&bench, rank, 4, port, &["--set=train.local_batch_size=1"]);
    let start = |rank| command(rank).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let [one, mut victim, three] = [1, 2, 3].map(start);
    let leader = Run::start(command(0)).until(3);
    victim.kill().unwrap();
    victim.wait().unwrap();
    // On a busy machine another rank may be slow to report its own end and be named as well.
    let missed = |said: &str| {
        let named = said.split_once("no word from rank").and_then(|(_, rest)| rest.split_once(", which"));
        assert!(named.is_some_and(|(ranks, _)| ranks.contains('2')), "{said}");
    };
    let (code, last) = leader.end();
    assert_eq!(code, Some(1), "{last}");
    missed(&last);
    for rank in [one, three] {
        let output = rank.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        missed(&String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_rank_that_hangs_is_given_up() {
    if !skip::full() {
        return skip(Kind::Long, "it waits for a timeout");
    }
    let bench = Bench::new();
    let run = Run::start(bench.command(&with(&on(2), &["--set=train.timeout_s=60"]))).until(5);
    send("STOP", run.rank(1));
    let (code, last) = run.end();
    assert!(code == Some(1) && last.contains("no word from rank 1, which died or hangs"), "{code:?}: {last}");
}

#[test]
fn mistakes_are_named() {
    let bench = Bench::new();
    bench.fails(&["--processes=3"], 2, &["rank", "global_batch_size 4", "3 processes"]);
    bench.fails(&["--processes=2", "--device=cuda:0"], 2, &["cuda:0", "2 processes"]);
    let rows = format!("--set=data.input=['{}']", bench.path("rows.jsonl").display());
    let hybrid = format!("--set=data.states={{hybrid: '{}'}}", bench.path("written").display());
    bench.fails(&["--processes=2", &rows, &hybrid], 2, &["data.states", "--processes 1"]);
    let mut command = bench.command(&[]);
    let output = command.env("RANK", "0").output().unwrap();
    assert_ended(&output, 2, &["RANK is set", "WORLD_SIZE is not"]);
    let output = by_hand(&bench, 0, 4, free_port(), &["--processes=2"]).output().unwrap();
    assert_ended(&output, 2, &["--processes 2", "4 processes already"]);
    let output = by_hand(&bench, 1, 2, free_port(), &["--plan"]).output().unwrap();
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty());
}

#[test]
fn many_processes_may_read_states_of_the_target_itself() {
    let (single, bench) = (whole(1), Bench::new());
    let rows = format!("--set=data.input=['{}']", bench.path("rows.jsonl").display());
    bench.succeeds(&with(&on(2), &["--set=data.states=online", &rows]));
    assert_same_curve(&bench, &single, 1e-3);
}

#[test]
fn only_the_newest_checkpoints_are_kept() {
    let bench = Bench::new();
    bench.succeeds(&["--set=logging.keep_checkpoints=2"]);
    let mut kept: Vec<String> = fs::read_dir(bench.path("out/t"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("step_"))
        .collect();
    kept.sort();
    assert_eq!(kept, ["step_21", "step_24", "step_latest"]);
}

#[test]
fn ranks_with_other_first_weights_do_not_train_together() {
    let bench = Bench::new();
    // Equal relative paths on two machines, with different checkpoints.
    let machines = ["7", "8"].map(|seed| {
        let (source, machine) = (Bench::new(), bench.path(seed));
        source.succeeds(&["--init-only", &format!("--set=seed={seed}")]);
        copy(&source.path("out/t/step_0"), &machine.join("init"));
        machine
    });
    for strategy in ["no_shard", "shard_optimizer"] {
        let port = free_port();
        let args = ["--set=train.init_from=init", &format!("--set=train.sharding_strategy={strategy}")];
        let start = |rank: usize| {
            let mut command = by_hand(&bench, rank, 2, port, &args);
            command
                .current_dir(&machines[rank])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        for rank in [0, 1].map(start) {
            let output = rank.wait_with_output().unwrap();
            assert_ended(
                &output,
                2,
                &["cannot train together", "the first weights of rank 1 are not those of rank 0"],
            );
        }
        assert!(!bench.path("out/t/step_3").exists());
    }
    // With equal weights the ranks agree.
    let port = free_port();
    let start = |rank: usize| {
        let mut command = by_hand(&bench, rank, 2, port, &["--set=train.init_from=init"]);
        command.current_dir(&machines[0]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for rank in [0, 1].map(start) {
        assert!(rank.wait_with_output().unwrap().status.success());
    }
}

#[test]
fn the_reference_normalisation_keeps_its_number_of_processes() {
    let normalization = "--set=train.loss_normalization=micro_batch";
    let bench = Bench::new();
    kill(Run::start(bench.command(&[normalization])).until(4));
    bench.fails(
        &["--processes=2", normalization],
        2,
        &["was trained by 1 processes, and now there are 2", "--processes 1"],
    );
    bench.succeeds(&[normalization]);
    let single = Bench::new();
    single.succeeds(&[normalization]);
    assert!(bench.result() == single.result());
}

#[test]
fn all_ranks_have_read_what_they_start_from_before_it_is_overwritten() {
    let bench = Bench::new();
    bench.succeeds(&["--set=train.max_train_steps=3"]);
    let from = format!("--set=train.init_from={}", bench.path("out/t/step_latest").display());
    bench.succeeds(&with(&on(2), &["--overwrite", &from]));
    assert_eq!(bench.losses().len(), STEPS);
}
