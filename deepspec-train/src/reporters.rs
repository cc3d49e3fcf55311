//! Writes metrics to the console, metrics.jsonl and a TensorBoard event file.

use std::io::Write;
use std::path::Path;

use deepspec_core::atomic::{self, FileError};
use deepspec_core::cli::count;
use deepspec_core::jsonl::{Appender, Line, Reader};
use deepspec_drafters::Metrics;
use serde_json::{Map, Value, json};

use crate::evaluation::EvalScores;
use crate::schedule::Schedule;
use crate::tensorboard::{TensorBoard, unix_time};

/// File of the metrics: one JSON object per logging window, and one with `eval` per evaluation.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Settings of the reporter.
pub struct ReporterOptions<'a> {
    /// Length of the run.
    pub schedule: Schedule,
    /// Names of the metrics.
    pub metrics: &'a Metrics,
    /// The resolved recipe as text; None without a TensorBoard event file.
    pub tensorboard: Option<&'a str>,
}

/// All outputs of a run's metrics, and the totals of the run.
pub struct TrainReporter {
    metrics: Appender,
    tensorboard: Option<TensorBoard>,
    total_steps: usize,
    /// Metrics printed after the loss, as (short name, key).
    headline: &'static [(&'static str, &'static str)],
    totals: Totals,
}

/// Sums over all metrics lines, including those before a resume.
#[derive(Default)]
struct Totals {
    samples: u64,
    tokens: u64,
    seconds: f64,
    /// Step and accepted length of each evaluation.
    taus: Vec<(u64, f64)>,
}

impl Totals {
    fn add_step(&mut self, row: &Map<String, Value>) {
        let count = |key: &str| row.get(key).and_then(Value::as_u64).unwrap_or(0);
        self.samples += count("samples");
        self.tokens += count("tokens");
        self.seconds += row.get("seconds").and_then(Value::as_f64).unwrap_or(0.0);
        let tau = row.get("eval").and_then(|eval| eval.get("tau")).and_then(Value::as_f64);
        self.taus.extend(tau.map(|tau| (count("step"), tau)));
    }
}

impl TrainReporter {
    /// Continues the metrics in `dir` after step `step`; lines of later steps are dropped, because
    /// those steps run again.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn open(dir: &Path, step: usize, shown: &ReporterOptions) -> Result<Self, FileError> {
        atomic::create_dir(dir)?;
        let path = dir.join(METRICS_FILE);
        let mut kept = vec![];
        if path.is_file() {
            for line in Reader::open(&path)? {
                if let Line::Row(_, row) = line?
                    && row.get("step").and_then(Value::as_u64).is_some_and(|done| done <= step as u64)
                {
                    kept.push(row);
                }
            }
            atomic::replace(&path, |file| {
                for row in &kept {
                    serde_json::to_writer(&mut *file, row)?;
                    file.write_all(b"\n")?;
                }
                Ok(())
            })?;
        }
        let mut totals = Totals::default();
        kept.iter().for_each(|row| totals.add_step(row));
        let open = |recipe| TensorBoard::open(dir, recipe, kept.iter());
        Ok(Self {
            metrics: Appender::open(&path)?,
            tensorboard: shown.tensorboard.map(open).transpose()?,
            total_steps: shown.schedule.max_train_steps,
            headline: shown.metrics.headline,
            totals,
        })
    }

    /// Writes the metrics of one window.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn log_metrics(&mut self, metrics: Map<String, Value>) -> Result<(), FileError> {
        let number = |key: &str| metrics.get(key).and_then(Value::as_f64).unwrap_or(0.0);
        let left = (self.total_steps as f64 - number("step")) * number("step_s");
        let terms = self.headline.iter().map(|(name, key)| format!("  {name} {:.3}", number(key)));
        tracing::info!(
            "step {}/{}  loss {:.4}{}  lr {:.2e}  grad {:.2}  {:.1} samples/s  wait {:.1} s  {} left",
            number("step"),
            self.total_steps,
            number("loss"),
            terms.collect::<String>(),
            number("lr"),
            number("grad_norm"),
            number("samples_per_s"),
            number("data_wait_s"),
            format_duration(left),
        );
        self.write_row(metrics)
    }

    /// Writes the scores of an evaluation after `step` steps.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn log_evaluation(&mut self, step: usize, scores: &EvalScores) -> Result<(), FileError> {
        let suites = scores.suites.iter().map(|suite| match suite.tally.accepted_length() {
            Some(tau) => format!("{} {tau:.2}", suite.name),
            None => format!("{} has no cycle", suite.name),
        });
        let suites = suites.collect::<Vec<_>>().join(", ");
        let (total, seconds) = (self.total_steps, scores.seconds);
        match scores.tau() {
            Some(tau) => {
                tracing::info!("step {step}/{total}  accepted length {tau:.3} ({suites}) in {seconds:.1} s");
            }
            None => tracing::warn!("step {step}/{total}  no accepted length: {suites}"),
        }
        self.write_row(Map::from_iter([("step".into(), json!(step)), ("eval".into(), scores.to_json())]))
    }

    fn write_row(&mut self, mut row: Map<String, Value>) -> Result<(), FileError> {
        row.insert("time".into(), json!(unix_time().as_secs_f64()));
        self.metrics.append(&row)?;
        self.totals.add_step(&row);
        self.tensorboard.as_mut().map_or(Ok(()), |tensorboard| tensorboard.append_row(&row))
    }

    /// Summary of the whole run, one line per topic. `thinking` says whether the samples were
    /// generated with thinking on.
    pub fn summary(&self, checkpoint: &Path, target: &str, thinking: Option<bool>) -> String {
        let Totals { samples, tokens, seconds, taus } = &self.totals;
        let path = checkpoint.display();
        let mut lines = vec![format!(
            "trained {}: {}, {}, {}",
            count(self.total_steps, "step"),
            count(*samples as usize, "sample"),
            count(*tokens as usize, "token"),
            format_duration(*seconds)
        )];
        if let (Some((_, last)), Some((step, best))) =
            (taus.last(), taus.iter().max_by(|a, b| a.1.total_cmp(&b.1)))
        {
            lines.push(format!("accepted length {last:.3} at the end, {best:.3} at its best (step {step})"));
        }
        lines.push(format!("the drafter is in {path}"));
        lines.push(format!("report in {}", checkpoint.with_file_name("report.html").display()));
        lines.push(format!(
            "measure it: deepspec-eval run --target {} --draft {} --output-dir {}{}",
            shell_quote(target),
            shell_quote(&path.to_string()),
            shell_quote(&format!("{path}-results")),
            if thinking == Some(true) { " --thinking on" } else { "" }
        ));
        lines.join("\n")
    }
}

/// Quotes a word for the shell.
fn shell_quote(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+:@=,~".contains(c);
    match word.chars().all(is_plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

/// A duration such as 11 s, 2 min 5 s or 3 h 20 min.
fn format_duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}
