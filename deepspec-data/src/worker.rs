//! `--worker I/N`: one of several processes that share a stage's work.

use deepspec_capture::cache::Worker;

/// Reads `I/N`.
///
/// # Errors
/// What was expected, if there is no such worker.
pub fn parse_worker(text: &str) -> Result<Worker, String> {
    let numbers = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
    let worker = numbers.and_then(|(i, n)| Worker::new(i, n));
    worker.ok_or_else(|| "expected I/N with I from 0 to N-1, as in 0/4".to_string())
}
