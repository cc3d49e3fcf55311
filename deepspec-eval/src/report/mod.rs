//! Reports of a run: tables on the terminal, `report.md`, `report.html` and plots.

mod charts;
mod content;
mod document;
mod published;
mod terminal;

use std::io::Write;
use std::path::Path;

use deepspec_core::atomic::{self, FileError};

use crate::plot::Plot;
use crate::results::Results;
use document::PLOTS_DIR;
pub use document::{Block, Document};
pub use terminal::render as terminal;

/// Writes `report.md`, `report.html` and the plots, as SVG and PNG, into `dir`.
///
/// # Errors
/// Fails on I/O errors, with the path, or if a plot cannot be drawn.
pub fn write(dir: &Path, results: &Results) -> anyhow::Result<()> {
    write_document(dir, &content::run_report(results)?)
}

/// Writes a document as `report.md` and `report.html`, and its plots.
///
/// # Errors
/// As [`write()`].
pub fn write_document(dir: &Path, document: &Document) -> anyhow::Result<()> {
    let plots = dir.join(PLOTS_DIR);
    atomic::create_dir(&plots)?;
    for block in &document.blocks {
        if let Block::Plot(name, plot) = block {
            write_plot(&plots, name, plot)?;
        }
    }
    write_file(&dir.join("report.md"), document.to_markdown().as_bytes())?;
    let page = dir.join("report.html");
    write_file(&page, document.to_html().as_bytes())?;
    tracing::info!("report in {}", page.display());
    Ok(())
}

/// Writes a plot as SVG and PNG into `dir`.
///
/// # Errors
/// As [`write()`].
pub fn write_plot(dir: &Path, name: &str, plot: &Plot) -> anyhow::Result<()> {
    write_file(&dir.join(format!("{name}.svg")), plot.svg().as_bytes())?;
    Ok(write_file(&dir.join(format!("{name}.png")), &plot.png()?)?)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    atomic::replace(path, |file| file.write_all(bytes))
}
