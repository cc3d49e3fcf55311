//! Functions that the three binaries share: verbosity, logging and exit codes.

use std::any::Any;
use std::cell::Cell;
use std::io::{self, IsTerminal, Write, stderr};
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

use crate::env;

/// A user error: a wrong flag, an invalid config, or inputs that do not match. Exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Returns early with a [`UsageError`] made by `format!`.
#[macro_export]
macro_rules! usage {
    ($($arg:tt)*) => { return Err($crate::cli::UsageError(format!($($arg)*)).into()) };
}

/// Amount of output on standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verbosity {
    /// Warnings and errors only, and no progress.
    Quiet,
    /// Progress and the result of each stage.
    Normal,
    /// Also reasons and details.
    Verbose,
}

impl Verbosity {
    /// Combines the `--quiet` and `-v` flags; quiet wins.
    pub fn from_flags(quiet: bool, verbose: bool) -> Self {
        match (quiet, verbose) {
            (true, _) => Self::Quiet,
            (false, true) => Self::Verbose,
            (false, false) => Self::Normal,
        }
    }
}

/// Sends log lines to standard error; `RUST_LOG` overrides the verbosity.
pub fn start_logging(verbosity: Verbosity) {
    let default = match verbosity {
        Verbosity::Quiet => "warn",
        Verbosity::Normal => "info",
        Verbosity::Verbose => "debug,hyper_util=info,reqwest=info,h2=info",
    };
    let filter = env::rust_log().and_then(|text| EnvFilter::try_new(text).ok());
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|| EnvFilter::new(default)))
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .with_target(false)
        // A closed pipe (`2>&1 | head`) must not end the work.
        .log_internal_errors(false)
        .without_time();
    // If tests in one process call this twice, the first subscriber stays.
    let _ = subscriber.try_init();
}

/// Formats a number with its noun in singular or plural: `1 row`, `2 rows`.
pub fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Formats `topic` at the start of the line and `text` from column `indent` on, wrapped to 80
/// columns. Words are never broken.
pub fn wrap_paragraph(topic: &str, indent: usize, text: &str) -> String {
    let width = 80 - indent;
    let mut lines = vec![];
    for paragraph in text.lines() {
        let mut line = String::new();
        for word in paragraph.split(' ') {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
                lines.push(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        lines.push(line);
    }
    format!("{topic:<indent$}{}", lines.join(&format!("\n{}", " ".repeat(indent))))
}

/// A writer to standard output that ignores a closed pipe (`| head`). Any other error names
/// standard output.
pub fn stdout() -> impl Write {
    Stdout(std::io::stdout())
}

struct Stdout(std::io::Stdout);

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            written => written.map_err(name_stdout_in_error),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0.flush() {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            flushed => flushed.map_err(name_stdout_in_error),
        }
    }
}

fn name_stdout_in_error(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::Interrupted => error,
        kind => io::Error::new(kind, format!("writing to standard output: {error}")),
    }
}

/// A result that is neither success nor error and has its own exit code. For example, 75 means that
/// the state is saved and the program should be run again.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct ExitWith {
    /// The process exit code.
    pub code: u8,
    /// One line for the user.
    pub reason: String,
}

/// Runs a program's body and converts its result to an exit code. The code is 0 for success, 2 for
/// a [`UsageError`] anywhere in the chain, the code of an [`ExitWith`], otherwise 1. Errors are
/// printed as one line.
///
/// A panic on any thread ends the process, because waiting for a dead worker would hang.
pub fn run(body: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !EXPECTED_PANIC.get().is_some_and(|expected| expected(&panic_message(info.payload()))) {
            report(info);
            // Logged last and in one line, so that the cause is at the end of the log for launchers
            // and users.
            tracing::error!("{}", panic_log_line(&panic_message(info.payload())));
            std::process::abort();
        }
    }));
    match body() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", one_line(&error));
            exit_code(&error)
        }
    }
}

/// Formats the message of a panic in one line. A libtorch error is shortened to its message without
/// the stack trace.
fn panic_log_line(said: &str) -> String {
    let torch = said.split_once("value: Torch(\"").and_then(|(_, words)| {
        words.split("\\nException raised from").next().map(|words| words.trim_end_matches("\")"))
    });
    format!(
        "ended by an error in the middle of its work: {}",
        escape_to_one_line(torch.unwrap_or(said)).trim()
    )
}

thread_local! {
    /// Predicate for the panics that [`catch_panic`] or [`catch_panic_if`] expects on this thread.
    /// None while neither of them runs.
    static EXPECTED_PANIC: Cell<Option<IsExpectedPanic>> = const { Cell::new(None) };
}

/// Predicate on a panic's message: true if the caller can continue after it.
type IsExpectedPanic = fn(&str) -> bool;

/// Runs library code that panics on malformed input, and returns the panic's message as an error.
///
/// Values that `work` used are in an unknown state after a panic and must be dropped.
///
/// # Errors
/// Returns the panic's message.
pub fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_panic_if(|_| true, work)
}

/// Like [`catch_panic`], but only for panics whose message `expected` accepts, such as a library's
/// out-of-memory message. Any other panic propagates.
///
/// # Errors
/// Returns the panic's message.
pub fn catch_panic_if<T>(expected: IsExpectedPanic, work: impl FnOnce() -> T) -> Result<T, String> {
    let outer = EXPECTED_PANIC.replace(Some(expected));
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    EXPECTED_PANIC.set(outer);
    done.map_err(|cause| {
        let words = panic_message(&*cause);
        if !expected(&words) {
            panic::resume_unwind(cause);
        }
        words
    })
}

fn panic_message(panic: &dyn Any) -> String {
    match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(text), _) => text.clone(),
        (_, Some(text)) => (*text).to_owned(),
        _ => "it panicked".to_owned(),
    }
}

/// The error and its causes in one line. A cause is omitted if the error above it already contains
/// its text. Line ends become spaces. Other control characters, which may come from an input file,
/// are escaped.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = escape_to_one_line(&cause.to_string());
        if !line.contains(&text) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&text);
        }
    }
    line
}

fn escape_to_one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' => line.push(' '),
            control if control.is_control() => line.extend(control.escape_default()),
            other => line.push(other),
        }
    }
    line
}

fn exit_code(error: &anyhow::Error) -> ExitCode {
    for cause in error.chain() {
        if cause.is::<UsageError>() || cause.is::<crate::config::ConfigError>() {
            return ExitCode::from(2);
        }
        if let Some(exit) = cause.downcast_ref::<ExitWith>() {
            return ExitCode::from(exit.code);
        }
    }
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_told_by_its_cause() {
        let error = Err::<(), _>(
            "CUDA out of memory. Tried to allocate 2 GiB.\nException raised from malloc\nframe #0",
        );
        let said = catch_panic(|| error.map_err(Torch).unwrap()).unwrap_err();
        let told =
            "ended by an error in the middle of its work: CUDA out of memory. Tried to allocate 2 GiB.";
        assert_eq!(panic_log_line(&said), told);
        assert_eq!(
            panic_log_line("index out\nof bounds"),
            told.replace("CUDA out of memory. Tried to allocate 2 GiB.", "index out of bounds")
        );
    }

    /// Has the debug format of tch's error.
    #[derive(Debug)]
    struct Torch(#[expect(dead_code, reason = "shown by Debug")] &'static str);

    #[test]
    fn a_contained_panic_is_an_error() {
        assert_eq!(catch_panic(|| 7), Ok(7));
        let nothing: &[u8] = &[];
        assert!(catch_panic(|| nothing[0]).unwrap_err().contains("out of bounds"));
        assert_eq!(catch_panic(|| catch_panic(|| panic!("inner"))), Ok(Err::<(), _>("inner".into())));
    }

    #[test]
    fn only_the_expected_panic_is_contained() {
        let memory = |words: &str| words.contains("memory");
        assert_eq!(catch_panic_if(memory, || panic!("no memory")), Err::<(), _>("no memory".into()));
        let other = catch_panic(|| catch_panic_if(memory, || panic!("a bug")));
        assert_eq!(other, Err::<Result<(), _>, _>("a bug".into()));
    }
}
