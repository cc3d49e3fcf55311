//! A build that is killed and resumed gives the same result as an undisturbed one.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use deepspec_testkit::{folder, signal};

use crate::bench::{Bench, build_args};

/// How long a test waits for a build to make progress.
const DEADLINE: Duration = Duration::from_secs(300);
const WORKERS: usize = 3;

fn full() -> bool {
    std::env::var_os("DEEPSPEC_TEST_FULL").is_some()
}

#[test]
fn a_killed_build_goes_on_and_ends_as_if_undisturbed() {
    let bench = Bench::new(240);
    bench.build("calm", &[]).succeeds_with(&["240 samples"]);
    let shards = bench.files("calm").iter().filter(|(name, _)| name.starts_with("shard-")).count();
    let kills = if full() { 10 } else { 2 };
    assert!(shards > 2 * kills, "only {shards} shards");
    for kill in 0..kills {
        let mut child = bench.command(&build_args("cache", &["-q"])).stdout(Stdio::null()).spawn().unwrap();
        let finished = bench.path(&format!("cache/parts/worker-000/shard-{:05}.json", 1 + 2 * kill));
        let started = Instant::now();
        while !finished.exists() {
            assert!(
                started.elapsed() < DEADLINE && child.try_wait().unwrap().is_none(),
                "no {}",
                finished.display()
            );
            thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None);
        bench.run(&["verify", "cache"]).fails_with(1, &["no finished cache", "unfinished build"]);
    }
    bench
        .build("cache", &["--set", "data.max_length=100"])
        .fails_with(2, &["an unfinished build of something else", "max_length is 512 there, 100 is wanted"]);
    let resumed = bench.build("cache", &[]);
    resumed.succeeds_with(&["240 samples"]);
    let kept = resumed
        .stderr
        .split("resuming: ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
    assert!(kept.is_some_and(|kept| kept >= 2 * kills), "{resumed:?}");
    assert_same(&bench.files("cache"), &bench.files("calm"));
}

/// Asserts that names and bytes are equal.
#[track_caller]
fn assert_same(found: &[(String, Vec<u8>)], expected: &[(String, Vec<u8>)]) {
    let names = |files: &[(String, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(found), names(expected));
    for ((name, found), (_, expected)) in found.iter().zip(expected) {
        assert!(found == expected, "{name} differs");
    }
}

#[test]
fn one_command_shares_the_work_and_goes_on_after_a_kill() {
    let bench = Bench::new(240);
    bench.build("calm", &[]).succeeds_with(&["240 samples"]);
    let together = ["--processes", "2"];
    let mut child = bench
        .command(&build_args("cache", &[&together[..], &["-q"]].concat()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let parts = [0, 1].map(|worker| bench.path(&format!("cache/parts/worker-{worker:03}")));
    let started = Instant::now();
    let has_shard = |part: &PathBuf| {
        let files = std::fs::read_dir(part).into_iter().flatten().flatten();
        let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
        names.any(|name| name.starts_with("shard-") && name.ends_with(".json"))
    };
    while !parts.iter().all(has_shard) {
        let ended = child.try_wait().unwrap();
        assert!(started.elapsed() < DEADLINE && ended.is_none(), "no shards of both: {ended:?}");
        thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None);
    // The workers end with the command, so the next command finds no worker running.
    let resumed = bench.build("cache", &together);
    resumed.succeeds_with(&["240 samples"]);
    assert!(resumed.stderr.contains("resuming: "), "{resumed:?}");
    assert_same(&bench.files("cache"), &bench.files("calm"));
    bench.build("cache", &together).succeeds_with(&["complete already"]);
}

/// Several workers of one build, each a process.
struct Crew<'b> {
    bench: &'b Bench,
    dir: String,
    running: [Option<Child>; WORKERS],
}

impl<'b> Crew<'b> {
    /// Starts all workers.
    fn start(bench: &'b Bench, dir: &str) -> Self {
        let mut crew = Self { bench, dir: dir.to_string(), running: [const { None }; WORKERS] };
        (0..WORKERS).for_each(|worker| crew.send(worker));
        crew
    }

    fn send(&mut self, worker: usize) {
        let share = format!("{worker}/{WORKERS}");
        let args = build_args(&self.dir, &["-q", "--worker", &share]);
        let child = self.bench.command(&args).stdout(Stdio::null()).spawn().unwrap();
        self.running[worker] = Some(child);
    }

    /// The number of files in the worker's folder, which never decreases.
    fn progress(&self, worker: usize) -> usize {
        let part = self.bench.path(&format!("{}/parts/worker-{worker:03}", self.dir));
        if part.exists() { folder::files(&part).len() } else { 0 }
    }

    /// Kills a worker after it has written `files` more files and `pause` has passed, and restarts
    /// it. Returns whether it was still running.
    fn kill(&mut self, worker: usize, files: usize, pause: Duration) -> bool {
        let Some(mut child) = self.running[worker].take() else { return false };
        let (started, goal) = (Instant::now(), self.progress(worker) + files);
        let mut reached = None;
        while child.try_wait().unwrap().is_none() {
            assert!(started.elapsed() < DEADLINE, "worker {worker} makes no progress");
            if self.progress(worker) >= goal {
                reached.get_or_insert_with(Instant::now);
            }
            if reached.is_some_and(|at| at.elapsed() >= pause) {
                child.kill().unwrap();
                // It may have exited between the check and the kill.
                if child.wait().unwrap().code().is_none() {
                    self.send(worker);
                    return true;
                }
                return false;
            }
            thread::sleep(Duration::from_millis(1));
        }
        assert!(child.wait().unwrap().success(), "worker {worker} failed");
        false
    }

    fn is_idle(&self) -> bool {
        self.running.iter().all(Option::is_none)
    }

    /// Lets all workers finish and merges their shares.
    fn finish(mut self) -> Vec<(String, Vec<u8>)> {
        for child in self.running.iter_mut().filter_map(Option::take) {
            assert!(child.wait_with_output().unwrap().status.success());
        }
        self.bench.run(&["merge", "--output-dir", &self.dir]).succeeds_with(&["samples in"]);
        self.bench.run(&["verify", &self.dir]).succeeds_with(&["sound"]);
        self.bench.files(&self.dir)
    }
}

#[test]
fn killed_workers_merge_to_what_undisturbed_ones_build() {
    let bench = Bench::new(150);
    let calm = Crew::start(&bench, "calm").finish();
    let kills = if full() { 20 } else { 6 };
    let (mut killed, mut builds, mut random) = (0, 0, 0x9E37_79B9_7F4A_7C15_u64);
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    while killed < kills {
        builds += 1;
        let dir = format!("torn-{builds}");
        let mut crew = Crew::start(&bench, &dir);
        while killed < kills && !crew.is_idle() {
            let (worker, files, pause) = (next(WORKERS as u64), next(5), Duration::from_millis(next(120)));
            killed += usize::from(crew.kill(worker as usize, files as usize, pause));
        }
        assert_same(&crew.finish(), &calm);
    }
}

/// The process id of the worker of a running build with this argument.
fn share_of(build: &Child, worker: &str) -> Option<u32> {
    let id = build.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
    let is_share = |child: &&str| {
        let command = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
        command.split(|&byte| byte == 0).any(|word| word == worker.as_bytes())
    };
    children.split_whitespace().find(is_share)?.parse().ok()
}

#[test]
fn a_share_that_fails_is_told_while_the_others_are_at_work() {
    let bench = Bench::new(40);
    let args = build_args("cache", &["--processes", "2"]);
    let mut build = bench.command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    let [first, second] = ["0/2", "1/2"].map(|worker| {
        loop {
            assert!(started.elapsed() < DEADLINE && build.try_wait().unwrap().is_none(), "no share {worker}");
            if let Some(share) = share_of(&build, worker) {
                return share;
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    // The stopped worker never ends.
    assert!(signal::send("STOP", first.into()) && signal::send("KILL", second.into()));
    while build.try_wait().unwrap().is_none() {
        if started.elapsed() > DEADLINE {
            let _ = signal::send("KILL", first.into());
            panic!("the build waits for a share that hangs");
        }
        thread::sleep(Duration::from_millis(1));
    }
    let output = build.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("share 1 of 2 failed"), "{stderr}");
    bench.build("cache", &["--processes", "2"]).succeeds_with(&["40 samples"]);
}
