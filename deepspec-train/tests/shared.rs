//! In an online run one process tokenises the conversations, even after crashes, and all others map
//! the file. Tests the built binary on the tiny target.

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};

use common::Bench;

const TOKENISED: &str = "tokenised 24 rows in ";
const MAPPED: &str = "tokenised rows from ";
const WAITING: &str = "waiting for another process, which tokenises";

fn online(bench: &Bench) -> Vec<String> {
    let input = format!("--set=data.input=['{}']", bench.path("rows.jsonl").display());
    ["--set=data.states=online".into(), input, "--plan".into()].to_vec()
}

/// A run that only plans.
fn planning(bench: &Bench) -> Command {
    let args = online(bench);
    bench.command(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The standard error of a run.
fn said(mut command: Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

/// Files with this extension next to the samples.
fn kept(bench: &Bench, extension: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(bench.path("kept/samples")).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|found| found == extension)).collect()
}

/// Starts a process and waits until it waits for another one. Returns its log so far and the reader
/// of the rest.
fn start_waiting(mut command: Command) -> (Child, String, BufReader<ChildStderr>) {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains(WAITING) {
        assert!(lines.read_line(&mut text).unwrap() > 0, "it ended without waiting: {text}");
    }
    (child, text, lines)
}

#[test]
fn of_two_that_wait_one_tokenises_and_the_other_maps() {
    let bench = Bench::new();
    assert!(said(planning(&bench)).contains(TOKENISED));
    assert!(said(planning(&bench)).contains(MAPPED), "a later run tokenised again");
    // As if a third process had started to write and died.
    fs::remove_file(&kept(&bench, "samples")[0]).unwrap();
    let writer = File::options().write(true).open(&kept(&bench, "lock")[0]).unwrap();
    writer.lock().unwrap();
    let waiting = [0, 1].map(|_| start_waiting(planning(&bench)));
    drop(writer);
    let mut counts = (0, 0);
    for (mut child, mut text, mut rest) in waiting {
        rest.read_to_string(&mut text).unwrap();
        assert!(child.wait().unwrap().success(), "{text}");
        counts.0 += usize::from(text.contains(TOKENISED));
        counts.1 += usize::from(text.contains(MAPPED));
    }
    assert_eq!(counts, (1, 1));
    assert_eq!(kept(&bench, "samples").len(), 1);
}

#[test]
fn a_writer_that_is_killed_leaves_nothing_that_is_taken_for_whole() {
    const SIGXFSZ: i32 = 25;
    let bench = Bench::new();
    said(planning(&bench));
    let file = kept(&bench, "samples")[0].clone();
    let whole = fs::read(&file).unwrap();
    assert!(whole.len() > 8192);
    fs::remove_file(&file).unwrap();
    // The system kills the process in the middle of a write, because no file may exceed this many
    // blocks of 1024 bytes.
    for blocks in ["1", "4", "7"] {
        let planned = planning(&bench);
        let mut limited = Command::new("bash");
        limited.args(["-c", "ulimit -c 0; ulimit -f \"$0\"; exec \"$@\"", blocks]).arg(planned.get_program());
        limited.args(planned.get_args());
        for (key, value) in planned.get_envs() {
            value.map(|value| limited.env(key, value));
        }
        let output = limited.output().unwrap();
        assert_eq!(output.status.signal(), Some(SIGXFSZ), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(!file.exists());
        // One file: the process has removed the one that its predecessor left.
        assert_eq!(kept(&bench, "partial").len(), 1);
    }
    assert!(said(planning(&bench)).contains(TOKENISED));
    assert!(kept(&bench, "partial").is_empty());
    assert!(fs::read(&file).unwrap() == whole);
}

#[test]
fn ranks_train_from_one_file() {
    let bench = Bench::new();
    let args = online(&bench);
    let args: Vec<&str> = args.iter().map(String::as_str).filter(|arg| *arg != "--plan").collect();
    let ranks = ["--processes", "2", "--device", "cpu", "--set=train.max_train_steps=2"];
    bench.succeeds(&[&args[..], &ranks].concat());
    assert_eq!(kept(&bench, "samples").len(), 1);
    let single = Bench::new();
    let input = format!("--set=data.input=['{}']", single.path("rows.jsonl").display());
    single.succeeds(&["--set=data.states=online", &input, "--set=train.max_train_steps=2"]);
    for (a, b) in bench.losses().iter().zip(single.losses()) {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "{a} and {b}");
    }
}
