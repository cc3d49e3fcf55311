//! Several workers that are killed at any point build the same cache as one undisturbed worker.

#[path = "common_cache/mod.rs"]
mod common;

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::*;
use deepspec_capture::cache::{Builder, Encoding, FinalStates, Layout, Plan, Worker, merge};

const SAMPLES: usize = 60;
const WORKERS: usize = 3;
const CHILD: &str = "TEST_WORKER_DIR";

fn the_plan() -> Plan {
    let layout = Layout { encoding: Encoding::Bf16z, ..layout(FinalStates::Supervised) };
    Plan::new(samples(SAMPLES), layout, 500).unwrap()
}

fn worker(index: usize) -> Worker {
    Worker::new(index, WORKERS).unwrap()
}

/// Reports this process's position to the parent.
fn say(word: &str) {
    let mut out = io::stdout();
    writeln!(out, "at {word}").unwrap();
}

/// Builds a worker's share, with a line on standard output before and after each operation that
/// touches the disk.
fn work(dir: &Path, worker: Worker) {
    let plan = the_plan();
    say("open");
    let mut builder = Builder::open_worker(dir, &plan, &identity(), worker).unwrap();
    while let Some(mut writer) = builder.next_shard().unwrap() {
        for sample in writer.samples() {
            say("push");
            writer.push(&taps_of(sample), &last_of(sample, plan.layout().last)).unwrap();
        }
        say("finish");
        writer.finish().unwrap();
        say("finished");
    }
}

/// Not a test itself: the process that the tests below kill.
#[test]
#[ignore = "runs as a child of the other tests"]
fn child() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let (what, dir) = order.split_once(':').unwrap();
    match what.parse() {
        Ok(index) => work(Path::new(dir), worker(index)),
        Err(_) => drop(merge(Path::new(dir), |_| say("merge")).unwrap()),
    }
}

fn start(what: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "child", "--nocapture"])
        .env(CHILD, format!("{what}:{}", dir.display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Kills the child after `lines` of its lines; returns whether it was still alive.
fn kill_after(mut child: Child, lines: usize) -> bool {
    let output = BufReader::new(child.stdout.take().unwrap());
    let seen = output.lines().map_while(Result::ok).filter(|line| line.contains("at ")).take(lines).count();
    child.kill().unwrap();
    !child.wait().unwrap().success() && seen == lines
}

fn undisturbed() -> Vec<(String, Vec<u8>)> {
    let dir = tempfile::tempdir().unwrap();
    (0..WORKERS).for_each(|index| work(dir.path(), worker(index)));
    merge(dir.path(), |_| ()).unwrap();
    files(dir.path())
}

#[test]
fn killed_workers_and_merges_end_as_if_undisturbed() {
    let expected = undisturbed();
    // A single worker produces the same cache, too.
    let alone = tempfile::tempdir().unwrap();
    let plan = the_plan();
    build(alone.path(), &plan, &identity()).unwrap();
    assert_eq!(files(alone.path()), expected);

    let kills = if std::env::var_os("DEEPSPEC_TEST_FULL").is_some() { 20 } else { 5 };
    let (mut random, mut killed) = (0x9E37_79B9_7F4A_7C15_u64, 0);
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let mut dir = tempfile::tempdir().unwrap();
    while killed < kills {
        let (index, lines) = (next(WORKERS as u64) as usize, 1 + next(40) as usize);
        if kill_after(start(&index.to_string(), dir.path()), lines) {
            killed += 1;
        } else {
            // That worker was finished: the next build gets the remaining kills.
            finish(dir.path(), &expected);
            dir = tempfile::tempdir().unwrap();
        }
    }
    finish(dir.path(), &expected);
}

/// Lets all workers finish, disturbs the merge, and compares the result.
fn finish(dir: &Path, expected: &[(String, Vec<u8>)]) {
    for index in 0..WORKERS {
        assert!(start(&index.to_string(), dir).wait_with_output().unwrap().status.success());
    }
    for lines in [1, 9] {
        kill_after(start("merge", dir), lines);
    }
    merge(dir, |_| ()).unwrap();
    assert_eq!(files(dir), expected);
    merge(dir, |_| ()).unwrap();
    read_all(dir).unwrap();
}

#[test]
fn a_merge_names_what_is_missing_or_foreign() {
    let dir = tempfile::tempdir().unwrap();
    assert!(message(merge(dir.path(), |_| ())).contains("nothing was built here"));
    work(dir.path(), worker(1));
    let text = message(merge(dir.path(), |_| ()));
    assert!(text.contains("with --worker 0/3, with --worker 2/3, then merge again"), "{text}");
    assert!(!dir.path().join("manifest.json").exists());
    work(dir.path(), worker(0));
    work(dir.path(), worker(2));

    // A finished shard that was changed.
    let shard = dir.path().join("parts/worker-002/shard-00002.safetensors");
    let bytes = fs::read(&shard).unwrap();
    let mut flipped = bytes.clone();
    flipped[bytes.len() / 2] ^= 4;
    fs::write(&shard, flipped).unwrap();
    assert!(message(merge(dir.path(), |_| ())).contains("worker-002/shard-00002.safetensors: sha256"));
    fs::write(&shard, bytes).unwrap();

    // A list of samples that lost a line.
    let list = dir.path().join("parts/worker-001/shard-00001.samples.jsonl");
    let text = fs::read_to_string(&list).unwrap();
    fs::write(&list, text.split_once('\n').unwrap().1).unwrap();
    assert!(message(merge(dir.path(), |_| ())).contains("samples is 59 there, 60 is wanted"));
    fs::write(&list, text).unwrap();

    // A worker of another build.
    let claim = dir.path().join("parts/worker-001/build.json");
    let text = fs::read_to_string(&claim).unwrap();
    fs::write(&claim, text.replace("qwen3", "gemma4")).unwrap();
    assert!(message(merge(dir.path(), |_| ())).contains("model_type is gemma4 there, qwen3 is wanted"));
    fs::write(&claim, text).unwrap();
    merge(dir.path(), |_| ()).unwrap();
}
