//! Starts and stops the binary and reads its output.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use deepspec_core::jsonl::{Line, Reader};
use deepspec_testkit::signal;
use serde_json::{Map, Value};

/// The longest that anything may take before the test fails.
pub const DEADLINE: Duration = Duration::from_secs(120);

pub type Row = Map<String, Value>;

/// The embedded target.
pub fn tiny() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-target").to_string_lossy().into_owned()
}

/// Copies the embedded target into `dir` as a model with a context of `tokens`.
pub fn tiny_for(dir: &Path, tokens: usize) {
    for (name, bytes) in deepspec_testkit::folder::files(tiny().as_ref()) {
        fs::write(dir.join(name), bytes).unwrap();
    }
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = tokens.into();
    fs::write(path, config.to_string()).unwrap();
}

/// The binary as a command with arguments.
pub fn command<A: AsRef<str>>(args: &[A]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-data"));
    command
        .args(args.iter().map(AsRef::as_ref))
        .env_remove("RUST_LOG")
        .env_remove("OPENAI_API_KEY")
        .stdin(Stdio::null());
    command
}

/// The result of a run of the binary.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Checks the exit code and that standard error is one line with `words` in it.
    #[track_caller]
    pub fn fails_with(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stderr.trim_end().lines().count(), 1, "{self:?}");
        assert!(words.iter().all(|word| self.stderr.contains(word)), "{words:?} in {self:?}");
    }
}

/// Runs the binary to its end.
pub fn run<A: AsRef<str>>(args: &[A]) -> Ended {
    ended(command(args))
}

/// Runs a prepared command to its end.
pub fn ended(mut command: Command) -> Ended {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Polls `look` until it returns something.
#[track_caller]
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < DEADLINE, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A process that is killed when this is dropped.
pub struct Running {
    pub child: Child,
    stderr: Option<JoinHandle<String>>,
    lines: mpsc::Receiver<String>,
}

impl Running {
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let stderr = thread::spawn(move || {
            let mut all = String::new();
            for line in stderr.lines().map_while(Result::ok) {
                all = all + &line + "\n";
                let _ = sender.send(line);
            }
            all
        });
        Self { child, stderr: Some(stderr), lines }
    }

    /// Waits for the first line on standard error that contains `words`.
    pub fn line_with(&self, words: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(DEADLINE).unwrap_or_else(|_| panic!("no line with `{words}`"));
            if line.contains(words) {
                return line;
            }
        }
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        assert!(signal::send(name, self.child.id().into()));
    }

    /// Waits for the end.
    pub fn end(mut self) -> Ended {
        let status = wait_for("the end of a process", || self.child.try_wait().unwrap());
        let mut stdout = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        let stderr = self.stderr.take().unwrap().join().unwrap();
        Ended { code: status.code(), stdout, stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running `serve` of the tiny target, named `tiny`, on its own port.
pub struct Server {
    pub process: Running,
    pub url: String,
}

impl Server {
    pub fn start(more: &[&str]) -> Self {
        Self::of(&tiny(), more)
    }

    /// As [`Server::start`], with another model.
    pub fn of(model: &str, more: &[&str]) -> Self {
        let args = ["serve", "--model", model, "--served-name", "tiny", "--device", "cpu", "--port", "0"];
        let process = Running::start(command(&[&args, more].concat()));
        let line = process.line_with("listening on ");
        let url = line.trim_start_matches("listening on ").to_string();
        Self { process, url }
    }
}

/// The rows of a JSONL file in order.
pub fn rows(path: &Path) -> Vec<Row> {
    let row = |line| match line {
        Line::Row(_, row) => row,
        Line::Bad(bad) => panic!("{bad}"),
    };
    Reader::open(path).unwrap().map(|line| row(line.unwrap())).collect()
}

/// Writes a file of lines into `dir`.
pub fn lines(dir: &Path, name: &str, lines: &[String]) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    path
}

/// A path as an argument.
pub fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Whether the long tests run at full length.
pub fn full() -> bool {
    std::env::var_os("DEEPSPEC_TEST_FULL").is_some_and(|value| value == "1")
}
