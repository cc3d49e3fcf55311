//! What a run found, for people: tables on the terminal, `report.md`, `report.html` and plots.

mod charts;
mod content;
mod document;
mod published;
mod terminal;

use std::io::Write;
use std::path::Path;

use deepspec_core::atomic;

use crate::results::Results;
use document::{Block, PLOTS};
pub use terminal::render as terminal;

/// Pixels of a PNG plot per pixel of its SVG.
const SCALE: f32 = 2.0;

/// Writes `report.md`, `report.html` and the plots, as SVG and PNG, into `dir`.
///
/// # Errors
/// Any I/O failure, with the path; a plot cannot be drawn.
pub fn write(dir: &Path, results: &Results) -> anyhow::Result<()> {
    let document = content::document(results)?;
    let plots = dir.join(PLOTS);
    atomic::create_dir(&plots)?;
    let put = |path: &Path, bytes: &[u8]| atomic::replace(path, |file| file.write_all(bytes));
    for block in &document.blocks {
        if let Block::Plot(name, plot) = block {
            put(&plots.join(format!("{name}.svg")), plot.svg().as_bytes())?;
            put(&plots.join(format!("{name}.png")), &plot.png(SCALE)?)?;
        }
    }
    put(&dir.join("report.md"), document.markdown().as_bytes())?;
    put(&dir.join("report.html"), document.html().as_bytes())?;
    Ok(())
}
