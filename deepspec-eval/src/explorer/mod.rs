//! explorer.html: speculation under load, with sliders for load, block length, acceptance and the cost of drafting.

use std::io::Write as _;
use std::path::Path;

use deepspec_core::atomic;
use deepspec_core::page::{escape_html, render_page};
use serde::Serialize;

/// File of the page in an output folder.
pub const EXPLORER_FILE: &str = "explorer.html";

/// Measured or estimated times that the page interpolates.
#[derive(Debug, Serialize)]
pub struct Explorer {
    /// Numbers of requests decoded at once, increasing.
    pub requests: Vec<f64>,
    /// Drafted tokens per block, from 0.
    pub draft_lengths: Vec<usize>,
    /// Seconds of a step of the target, by requests and drafted tokens.
    pub step_seconds: Vec<Vec<f64>>,
    /// Seconds of drafting, by requests and drafted tokens.
    pub draft_seconds: Vec<Vec<f64>>,
    /// Acceptance of each drafted token, given that all tokens before it were accepted. The last value also applies to
    /// all later tokens.
    pub acceptance: Vec<f64>,
    /// Points to draw next to the curves: throughput by number of requests.
    pub points: Vec<ExplorerPoints>,
}

/// Named throughputs, in tokens per second over all requests.
#[derive(Debug, Serialize)]
pub struct ExplorerPoints {
    /// Name in the legend.
    pub name: String,
    /// Requests and throughput.
    pub points: Vec<(f64, f64)>,
}

impl Explorer {
    /// Tables of seconds by requests and draft lengths up to `longest`.
    pub fn new(
        requests: Vec<f64>,
        longest: usize,
        acceptance: Vec<f64>,
        step_seconds: impl Fn(f64, usize) -> f64,
        draft_seconds: impl Fn(f64, usize) -> f64,
    ) -> Self {
        let draft_lengths: Vec<usize> = (0..=longest).collect();
        let table = |seconds: &dyn Fn(f64, usize) -> f64| -> Vec<Vec<f64>> {
            let row =
                |&requests: &f64| draft_lengths.iter().map(|&length| seconds(requests, length)).collect();
            requests.iter().map(row).collect()
        };
        let (step_seconds, draft_seconds) = (table(&step_seconds), table(&draft_seconds));
        Self { requests, draft_lengths, step_seconds, draft_seconds, acceptance, points: vec![] }
    }

    /// Writes explorer.html into `dir`; `intro` is one paragraph about the numbers, as text.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn write(&self, dir: &Path, intro: &str) -> anyhow::Result<()> {
        let body = include_str!("page.html").replace("{intro}", &escape_html(intro));
        let page = render_page("Speculation under load", &body, include_str!("page.js"), self)?;
        Ok(atomic::replace(&dir.join(EXPLORER_FILE), |file| file.write_all(page.as_bytes()))?)
    }
}
