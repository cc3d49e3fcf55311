//! `watch`: reads the metrics page of a running engine over time, for the effect of speculation by
//! load.

mod page;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use deepspec_core::cli::Verbosity;
use deepspec_core::{atomic, usage};
use reqwest::Url;
use serde::Serialize;
use tokio::runtime::Runtime;
use tokio::time::{self, MissedTickBehavior};

use crate::plot::palette::{BLUE, GREEN, VERMILION};
use crate::plot::{
    Axis, Marker, Plot, SeriesStyle, draw_axes, draw_series, draw_title_and_legend, log2_coordinate,
};
use crate::report::{Block, Document, write_document};
use crate::statistics::Percentiles;
use crate::table::Table;
pub use page::MetricsPage;

/// Timeout of reading the metrics page.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Arguments of `watch`.
#[derive(clap::Args)]
pub struct Args {
    /// Address of vLLM, SGLang, llama.cpp (with --metrics) or `deepspec-data serve`, whose /metrics is read
    #[arg(value_name = "URL")]
    url: String,
    /// Seconds between two reads of the metrics
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    every: f64,
    /// Seconds after which to stop
    #[arg(long, value_name = "S", default_value_t = 60.0)]
    seconds: f64,
    /// Folder for watch.json, report.md, report.html and plots
    #[arg(long, value_name = "D")]
    output_dir: Option<PathBuf>,
    /// Replace what exists
    #[arg(long)]
    overwrite: bool,
    /// Print watch.json instead of a table
    #[arg(long)]
    json: bool,
}

/// Measurements between two reads of the page.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct MetricsInterval {
    /// Seconds from the first read to the end of the interval.
    at: f64,
    /// Running requests at the end of the interval.
    running: f64,
    /// Waiting requests at the end of the interval.
    waiting: f64,
    /// Tokens per second.
    tokens_per_second: Option<f64>,
    /// τ: tokens committed per verified block.
    accepted_length: Option<f64>,
    /// Share of verified drafts that were rejected.
    wasted: Option<f64>,
    /// Drafted tokens verified per block.
    budget: Option<f64>,
}

impl MetricsInterval {
    /// The differences between two pages; None if the engine was restarted between them.
    fn between(before: &MetricsPage, after: &MetricsPage, at: f64, seconds: f64) -> Option<Self> {
        let more = |of: fn(&MetricsPage) -> Option<f64>| Some(of(after)? - of(before)?);
        let counts = [more(|page| page.drafts), more(|page| page.accepted), more(|page| page.generated)];
        if counts.iter().flatten().any(|&more| more < 0.0) {
            return None;
        }
        let [drafts, accepted, generated] = counts;
        let tokens = more(|page| page.draft_tokens);
        let ratio = |a: Option<f64>, b: Option<f64>| a.zip(b).filter(|(_, b)| *b > 0.0).map(|(a, b)| a / b);
        // SGLang counts verifications when requests end. SGLang's gauges show the present value, and keep their last
        // value when no request runs.
        let of_verifications = ratio(generated, more(|page| page.verifications));
        let busy = after.running.is_none_or(|running| running > 0.0);
        let said = |of: Option<f64>| of.filter(|_| busy);
        Some(Self {
            at,
            running: after.running.unwrap_or(0.0),
            waiting: after.waiting.unwrap_or(0.0),
            tokens_per_second: generated.map(|generated| generated / seconds),
            accepted_length: ratio(accepted, drafts)
                .map(|accepted| 1.0 + accepted)
                .or(said(after.accepted_length))
                .or(of_verifications),
            wasted: ratio(accepted, tokens).or(said(after.accept_rate)).map(|share| 1.0 - share),
            budget: ratio(tokens, drafts),
        })
    }
}

/// Statistics of the intervals whose number of running requests is in one range.
#[derive(Debug, Clone, Serialize)]
struct RunningRequestsGroup {
    /// Minimum and maximum number of running requests.
    running: [u64; 2],
    intervals: usize,
    accepted_length: Option<Percentiles>,
    wasted: Option<Percentiles>,
    tokens_per_second: Option<Percentiles>,
    waiting: Option<Percentiles>,
}

#[derive(Serialize)]
struct WatchReport<'a> {
    format: &'static str,
    format_version: u64,
    tool_version: &'static str,
    url: &'a str,
    occupancy: Vec<RunningRequestsGroup>,
    intervals: Vec<MetricsInterval>,
}

/// Runs the command.
///
/// # Errors
/// Usage errors, an engine that cannot be reached or has no counters, and outputs that cannot be
/// written.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    if !((0.01..=86_400.0).contains(&args.every) && args.seconds >= args.every && args.seconds <= 1e7) {
        usage!(
            "--every must be between 0.01 and 86400 seconds, and --seconds at least as long and 10000000 at most"
        );
    }
    if !Url::parse(&args.url).is_ok_and(|url| matches!(url.scheme(), "http" | "https")) {
        usage!("{}: expected the address of an engine, such as http://127.0.0.1:8000", args.url);
    }
    if let Some(dir) = &args.output_dir {
        crate::output::check_fresh(dir, "watch.json", &["report.md", "report.html"], args.overwrite)?;
    }
    let base = args.url.trim_end_matches('/').trim_end_matches("/metrics");
    let intervals =
        Runtime::new().context("starting threads")?.block_on(poll_metrics(args, base, verbosity))?;
    let watched = WatchReport {
        format: "deepspec-watch",
        format_version: 1,
        tool_version: deepspec_core::VERSION,
        url: base,
        occupancy: group_by_running(&intervals),
        intervals,
    };
    if let Some(dir) = &args.output_dir {
        atomic::create_dir(dir)?;
        write_document(dir, &watch_document(&watched)?)?;
        atomic::replace(&dir.join("watch.json"), |file| {
            file.write_all(&serde_json::to_vec_pretty(&watched)?)
        })?;
    }
    let text = if args.json {
        serde_json::to_string_pretty(&watched)? + "\n"
    } else {
        let mut table = Table::new(COLUMNS.map(String::from).to_vec());
        table_rows(&watched.occupancy).into_iter().for_each(|row| table.row(row));
        table.render()
    };
    Ok(crate::output::print(&text)?)
}

async fn poll_metrics(args: &Args, base: &str, verbosity: Verbosity) -> anyhow::Result<Vec<MetricsInterval>> {
    deepspec_hub::prepare_tls();
    let http = reqwest::Client::builder().timeout(READ_TIMEOUT).build()?;
    let page = async || -> anyhow::Result<MetricsPage> {
        let text = http.get(format!("{base}/metrics")).send().await?.error_for_status()?.text().await?;
        MetricsPage::parse(&text).map_err(|problem| anyhow::anyhow!("no page of metrics: {problem}"))
    };
    let asking = || format!("asking {base}/metrics");
    let (begun, mut before) = (Instant::now(), page().await.with_context(asking)?);
    if before == MetricsPage::default() {
        usage!(
            "{base}/metrics says nothing of requests or drafts; is it vLLM, SGLang, llama.cpp or `deepspec-data serve`?"
        );
    }
    let (mut last, mut intervals) = (begun, vec![]);
    let mut ticks = time::interval(Duration::from_secs_f64(args.every));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    while begun.elapsed().as_secs_f64() + 0.5 * args.every < args.seconds {
        ticks.tick().await;
        // The watch continues after an engine restart.
        let after = match page().await {
            Ok(after) => after,
            Err(error) => {
                tracing::warn!("asking {base}/metrics: {error:#}");
                continue;
            }
        };
        let now = Instant::now();
        let at = (now - begun).as_secs_f64();
        let found = MetricsInterval::between(&before, &after, at, (now - last).as_secs_f64());
        if let Some(found) = found {
            if verbosity != Verbosity::Quiet {
                tracing::info!("{}", interval_line(&found));
            }
            intervals.push(found);
        }
        (before, last) = (after, now);
    }
    Ok(intervals)
}

fn interval_line(of: &MetricsInterval) -> String {
    let shown =
        |value: Option<f64>, digits: usize| value.map_or("–".into(), |value| format!("{value:.digits$}"));
    format!(
        "{:.0} running, {:.0} waiting, {} tokens/s, accepted length {}, wasted {}, verified per block {}",
        of.running,
        of.waiting,
        shown(of.tokens_per_second, 0),
        shown(of.accepted_length, 2),
        shown(of.wasted, 2),
        shown(of.budget, 1)
    )
}

/// Groups intervals by the power of two of their running requests.
fn group_by_running(intervals: &[MetricsInterval]) -> Vec<RunningRequestsGroup> {
    let mut groups = BTreeMap::<u32, Vec<&MetricsInterval>>::new();
    for interval in intervals {
        let running = interval.running.max(0.0).round() as u64;
        groups.entry(if running == 0 { 0 } else { 1 + running.ilog2() }).or_default().push(interval);
    }
    let occupancy = |(group, of): (u32, Vec<&MetricsInterval>)| {
        let spread = |value: fn(&MetricsInterval) -> Option<f64>| {
            Percentiles::from_values(of.iter().filter_map(|interval| value(interval)).collect())
        };
        RunningRequestsGroup {
            running: if group == 0 { [0, 0] } else { [1 << (group - 1), (1 << group) - 1] },
            intervals: of.len(),
            accepted_length: spread(|interval| interval.accepted_length),
            wasted: spread(|interval| interval.wasted),
            tokens_per_second: spread(|interval| interval.tokens_per_second),
            waiting: spread(|interval| Some(interval.waiting)),
        }
    };
    groups.into_iter().map(occupancy).collect()
}

const COLUMNS: [&str; 6] =
    ["running", "looks", "τ mean/p50/p95", "wasted mean/p50/p95", "tokens/s mean/p50/p95", "waiting p95"];

fn table_rows(occupancy: &[RunningRequestsGroup]) -> Vec<Vec<String>> {
    let shown = |spread: Option<Percentiles>, digits: usize| {
        spread.map_or("–".into(), |s| {
            [s.mean, s.p50, s.p95].map(|value| format!("{value:.digits$}")).join(" / ")
        })
    };
    let row = |of: &RunningRequestsGroup| {
        let [from, to] = of.running;
        vec![
            if from == to { from.to_string() } else { format!("{from}–{to}") },
            of.intervals.to_string(),
            shown(of.accepted_length, 2),
            shown(of.wasted, 2),
            shown(of.tokens_per_second, 0),
            of.waiting.map_or("–".into(), |spread| format!("{:.0}", spread.p95)),
        ]
    };
    occupancy.iter().map(row).collect()
}

/// Reads one statistic of a [`RunningRequestsGroup`]; None if no interval has it.
type GroupStatistic = fn(&RunningRequestsGroup) -> Option<Percentiles>;

fn watch_document(watched: &WatchReport) -> anyhow::Result<Document> {
    let plots: [(_, _, _, GroupStatistic); 3] = [
        ("accepted-length", "Accepted length by running requests", "tokens per block", |of| {
            of.accepted_length
        }),
        ("wasted", "Share of verified drafts that were rejected", "share", |of| of.wasted),
        ("throughput", "Tokens per second", "tokens/s", |of| of.tokens_per_second),
    ];
    let mut blocks = vec![
        Block::Paragraph(format!("{}, {} looks.", watched.url, watched.intervals.len())),
        Block::Table(COLUMNS.map(String::from).to_vec(), table_rows(&watched.occupancy)),
    ];
    for (name, title, label, of) in plots {
        blocks.push(Block::Plot(name, plot_statistic(title, label, &watched.occupancy, of)?));
    }
    Ok(Document { title: "Speculation under load".into(), blocks })
}

fn plot_statistic(
    title: &'static str,
    label: &'static str,
    occupancy: &[RunningRequestsGroup],
    of: GroupStatistic,
) -> anyhow::Result<Plot> {
    let looks = [BLUE, GREEN, VERMILION].map(|colour| SeriesStyle(colour, Marker::Disc));
    let keys = [("mean", looks[0]), ("p50", looks[1]), ("p95", looks[2])];
    let point = |occupancy: &RunningRequestsGroup| Some((occupancy.running[0] as f64, of(occupancy)?));
    let points: Vec<(f64, Percentiles)> = occupancy.iter().filter_map(point).collect();
    let most = points.iter().map(|(running, _)| *running).fold(1.0, f64::max);
    let highest = points.iter().flat_map(|(_, s)| [s.mean, s.p95]).fold(0.01, f64::max) * 1.05;
    Plot::draw(title, (560, 300), |canvas| {
        let area = draw_title_and_legend(canvas, title, &keys)?;
        let x = Axis::log2_counts_and_zero("running requests", most);
        let mut chart = draw_axes(&area, x, Axis::linear(label, 0.0..highest, 6))?;
        let values: [fn(&Percentiles) -> f64; 3] = [|s| s.mean, |s| s.p50, |s| s.p95];
        for (value, look) in values.into_iter().zip(looks) {
            draw_series(
                &mut chart,
                points.iter().map(|(running, spread)| (log2_coordinate(*running), value(spread))),
                look,
            )?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_become_rates_and_a_restart_is_left_out() {
        let page = |drafts: f64, tokens: f64, accepted: f64, generated: f64| MetricsPage {
            drafts: Some(drafts),
            draft_tokens: Some(tokens),
            accepted: Some(accepted),
            generated: Some(generated),
            running: Some(5.0),
            ..MetricsPage::default()
        };
        let found =
            MetricsInterval::between(&page(10.0, 70.0, 20.0, 30.0), &page(20.0, 140.0, 55.0, 75.0), 2.0, 0.5)
                .unwrap();
        assert_eq!((found.accepted_length, found.tokens_per_second), (Some(4.5), Some(90.0)));
        assert_eq!((found.wasted, found.budget), (Some(0.5), Some(7.0)));
        assert_eq!(
            MetricsInterval::between(&page(20.0, 0.0, 0.0, 0.0), &page(1.0, 7.0, 1.0, 2.0), 1.0, 1.0),
            None
        );
        let idle =
            MetricsInterval::between(&page(1.0, 7.0, 1.0, 2.0), &page(1.0, 7.0, 1.0, 2.0), 1.0, 1.0).unwrap();
        assert_eq!((idle.accepted_length, idle.wasted, idle.tokens_per_second), (None, None, Some(0.0)));
        let sglang = |generated: f64, verifications: f64| MetricsPage {
            generated: Some(generated),
            verifications: Some(verifications),
            ..MetricsPage::default()
        };
        let found = MetricsInterval::between(&sglang(10.0, 5.0), &sglang(40.0, 15.0), 1.0, 1.0).unwrap();
        assert_eq!(found.accepted_length, Some(3.0));
        let groups = group_by_running(&[
            MetricsInterval { running: 0.0, ..idle },
            idle,
            MetricsInterval { running: 7.0, ..idle },
        ]);
        assert_eq!(
            groups.iter().map(|of| (of.running, of.intervals)).collect::<Vec<_>>(),
            [([0, 0], 1), ([4, 7], 2)]
        );
    }
}
