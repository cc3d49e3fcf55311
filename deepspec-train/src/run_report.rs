//! report.html of a run: loss, accepted length and acceptance by position, drawn from metrics.jsonl.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use deepspec_core::cli::Verbosity;
use deepspec_core::jsonl::{Line, Reader};
use deepspec_core::page::{escape_html, render_page};
use deepspec_core::{atomic, cli, usage};
use serde_json::{Value, json};

use crate::reporters::METRICS_FILE;

/// File of the report in a run's folder.
const REPORT_FILE: &str = "report.html";

/// Most rows that are drawn; longer runs draw every n-th row and the last one.
const MAX_ROWS: usize = 4000;

/// Draw a run's metrics as report.html
#[derive(Debug, clap::Parser)]
pub struct ReportArgs {
    /// Folder of the run, which holds metrics.jsonl
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Only warnings and errors
    #[arg(long, short)]
    quiet: bool,
    /// Log more: also reasons and details
    #[arg(long, short)]
    verbose: bool,
}

impl ReportArgs {
    /// How much is logged.
    pub fn verbosity(&self) -> Verbosity {
        Verbosity::from_flags(self.quiet, self.verbose)
    }

    /// Writes report.html.
    ///
    /// # Errors
    /// A usage error if the folder holds no metrics; any I/O failure, with the path.
    pub fn run(&self) -> anyhow::Result<()> {
        if !self.dir.join(METRICS_FILE).is_file() {
            usage!("{} holds no {METRICS_FILE}; name the folder of a training run", self.dir.display());
        }
        write_run_report(&self.dir)?;
        tracing::info!("report in {}", self.dir.join(REPORT_FILE).display());
        Ok(())
    }
}

/// Writes report.html beside the metrics in `dir`.
///
/// # Errors
/// Any I/O failure, with the path.
pub fn write_run_report(dir: &Path) -> anyhow::Result<()> {
    let mut rows = vec![];
    for line in Reader::open(&dir.join(METRICS_FILE))? {
        if let Line::Row(_, row) = line? {
            rows.push(Value::Object(row));
        }
    }
    let steps = rows.last().and_then(|row| row["step"].as_u64()).unwrap_or(0);
    let is_step = |row: &Value| row.get("eval").is_none();
    let count = rows.iter().filter(|row| is_step(row)).count();
    let (stride, mut place) = (count.div_ceil(MAX_ROWS).max(1), 0);
    rows.retain(|row| {
        let drawn = !is_step(row) || place % stride == 0 || place + 1 == count;
        place += usize::from(is_step(row));
        drawn
    });
    let dir_name = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    let name = dir_name.file_name().map_or_else(String::new, |name| escape_html(&name.to_string_lossy()));
    let body = include_str!("run_report.html")
        .replace("{steps}", &cli::count(steps as usize, "step"))
        .replace("{name}", &name);
    let page = render_page(
        &format!("Training of {name}"),
        &body,
        include_str!("run_report.js"),
        &json!({"rows": rows}),
    )?;
    Ok(atomic::replace(&dir.join(REPORT_FILE), |file| file.write_all(page.as_bytes()))?)
}
