//! `--worker I/N`: one of several processes that share the work.

use deepspec_capture::cache::Worker;

/// Parses `I/N`.
///
/// # Errors
/// If there is no such worker; the error names the expected form.
pub fn parse_worker(text: &str) -> Result<Worker, String> {
    let numbers = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
    let worker = numbers.and_then(|(i, n)| Worker::new(i, n));
    worker.ok_or_else(|| "expected I/N with I from 0 to N-1, as in 0/4".to_string())
}
