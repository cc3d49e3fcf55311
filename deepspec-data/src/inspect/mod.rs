//! `inspect`: shows the loss mask of each row, and finds rows that are unfit for training.

mod args;
pub mod draft_vocab;
mod html;
mod inspection;
mod render;
mod row;
mod server;
mod settings;
mod summary;
mod terminal;

use std::fs;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::Path;

use deepspec_core::atomic::FileError;
use deepspec_core::cli::{self, ExitWith, Verbosity};
use deepspec_core::{atomic, env, jsonl, usage};
use serde_json::json;

pub use args::{Args, MaskArgs};

use crate::same_file;
use inspection::Inspection;
use render::RenderedRow;
use settings::MaskSettings;

/// Problems that are printed; `--json` and `--html` have all.
const SHOWN_PROBLEMS: usize = 10;

/// Runs the command.
///
/// # Errors
/// With a usage error. Exits with code 1 if a row is unusable, its mask is empty or differs from
/// the assistant's messages, or if its served prompt differs.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    check_args(args)?;
    let settings = MaskSettings::new(&args.mask, verbosity)?;
    let mut inspection = Inspection::check_files(&args.mask.input, &settings, verbosity)?;
    if inspection.summary.rows == 0 {
        let files: Vec<String> = args.mask.input.iter().map(|input| input.display().to_string()).collect();
        usage!("--input {}: no rows", files.join(" "));
    }
    if let Some(url) = &args.server {
        server::compare(url, &args.mask.input, &settings, &mut inspection)?;
    }
    if let Some(path) = &args.html {
        write_html(path, args, &settings, &inspection)?;
        tracing::info!("page in {}", path.display());
    }
    let found = if args.json {
        print_json(args, &settings, &inspection)?
    } else {
        print_text(args, &settings, &inspection)?
    };
    if let Some(missing) = args.id.iter().find(|id| !found.contains(id)) {
        usage!("--id {missing}: no usable row has it");
    }
    report(&inspection)
}

fn check_args(args: &Args) -> anyhow::Result<()> {
    args.mask.check()?;
    if let Some(path) = args
        .html
        .as_ref()
        .filter(|path| args.mask.input.iter().any(|input| same_file::is_same_file(input, path)))
    {
        usage!("--html {} is also an input", path.display());
    }
    Ok(())
}

impl MaskArgs {
    /// Checks that the inputs are JSONL files.
    fn check(&self) -> anyhow::Result<()> {
        if let Some(missing) = self.input.iter().find(|input| !input.is_file()) {
            usage!("--input {}: no such file", missing.display());
        }
        if let Some(problem) = self.input.iter().find_map(|input| jsonl::check_is_json_lines(input).err()) {
            usage!("--input {problem}");
        }
        if self.max_length == Some(0) {
            usage!("--max-length must be at least 1");
        }
        Ok(())
    }
}

impl Args {
    /// Calls `show` with each selected row.
    fn each_shown(
        &self,
        settings: &MaskSettings,
        show: impl FnMut(RenderedRow) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let most = if self.all || !self.id.is_empty() { usize::MAX } else { self.limit };
        render::each_rendered_row(&self.mask.input, settings, &self.id, most, show)
    }
}

/// Prints the selected rows and the summary; returns the ids of the rows.
fn print_text(args: &Args, settings: &MaskSettings, inspection: &Inspection) -> anyhow::Result<Vec<String>> {
    let mut out = BufWriter::new(cli::stdout());
    let mut found = Vec::new();
    if args.html.is_none() {
        let colour = io::stdout().is_terminal() && !env::is_color_disabled();
        args.each_shown(settings, |row| {
            found.push(row.id.clone());
            Ok(terminal::write_row(&mut out, &row, colour)?)
        })?;
    } else {
        found.extend(args.id.iter().cloned());
    }
    for (name, value) in inspection.summary.lines() {
        writeln!(out, "{name:<13} {value}")?;
    }
    out.flush()?;
    Ok(found)
}

/// Prints rows, problems and summary as one JSON object, streaming the rows; returns the ids of the
/// rows.
fn print_json(args: &Args, settings: &MaskSettings, inspection: &Inspection) -> anyhow::Result<Vec<String>> {
    let mut out = BufWriter::new(cli::stdout());
    let mut found = Vec::new();
    write!(out, "{{\"rows\": [")?;
    args.each_shown(settings, |row| {
        write!(out, "{}\n  {}", if found.is_empty() { "" } else { "," }, json!(row))?;
        found.push(row.id);
        Ok(())
    })?;
    write!(out, "\n], \"problems\": [")?;
    for (index, finding) in inspection.findings.iter().enumerate() {
        write!(out, "{}\n  {}", if index == 0 { "" } else { "," }, json!(finding))?;
    }
    writeln!(out, "\n], \"summary\": {}}}", json!(inspection.summary))?;
    out.flush()?;
    Ok(found)
}

fn write_html(
    path: &Path,
    args: &Args,
    settings: &MaskSettings,
    inspection: &Inspection,
) -> anyhow::Result<()> {
    let mut missing: Vec<&String> = args.id.iter().collect();
    let mut page = vec![];
    html::write_page_start(&mut page, inspection)?;
    args.each_shown(settings, |row| {
        missing.retain(|id| **id != row.id);
        Ok(html::write_row(&mut page, &row)?)
    })?;
    html::write_page_end(&mut page)?;
    if let Some(missing) = missing.first() {
        usage!("--id {missing}: no usable row has it");
    }
    if path.exists() && !args.overwrite {
        if fs::read(path).map_err(FileError::at("reading", path))? != page {
            usage!("--html {} exists and shows something else; --overwrite replaces it", path.display());
        }
        tracing::info!("{} is complete; nothing to do (--overwrite makes it anew)", path.display());
        return Ok(());
    }
    Ok(atomic::replace(path, |out| out.write_all(&page))?)
}

/// Prints the first problems. Exits with code 1 if there are any.
fn report(inspection: &Inspection) -> anyhow::Result<()> {
    for finding in inspection.findings.iter().take(SHOWN_PROBLEMS) {
        tracing::warn!("{finding}");
    }
    let count = inspection.findings.len();
    if count > SHOWN_PROBLEMS {
        tracing::warn!("and {} more; --json and --html have all", count - SHOWN_PROBLEMS);
    }
    if inspection.findings.is_empty() {
        return Ok(());
    }
    Err(ExitWith { code: 1, reason: inspection.summary.failure_reason() }.into())
}
