//! The plots of a report.

use deepspec_core::suite::Domain;
use deepspec_plot::palette::{BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION};
use deepspec_plot::{Axis, Color, Marker, Panel, Picture};
use deepspec_schedule::reliability::PositionReliability;

use super::published::Published;
use crate::confidence::{ConfidenceResult, SweepPoint};
use crate::results::{Metrics, Results, SuiteResult, Timing};

const WIDTH: u32 = 720;
/// Distance between rows of a chart with one row per suite.
const ROW: f64 = 28.0;
/// Positions whose reliability is drawn.
const DIAGRAMS: usize = 8;

fn look(domain: Domain) -> (Color, Marker) {
    match domain {
        Domain::Math => (BLUE, Marker::Disc),
        Domain::Code => (VERMILION, Marker::Square),
        Domain::Chat => (GREEN, Marker::Triangle),
    }
}

/// Keys of the domains that the results have.
fn domains(results: &Results) -> Vec<(&'static str, Color, Marker)> {
    let keys = results.domains.iter().map(|found| {
        let (color, marker) = look(found.domain);
        (found.domain.name(), color, marker)
    });
    keys.collect()
}

/// An axis with a name per row, from above.
fn rows<'n>(names: impl Iterator<Item = &'n str>) -> Axis {
    let ticks: Vec<_> = names.enumerate().map(|(row, name)| (-(row as f64), name.to_string())).collect();
    Axis { label: String::new(), low: 0.5 - ticks.len() as f64, high: 0.5, ticks }
}

/// Room left of the rows' names.
fn margin<'n>(names: impl Iterator<Item = &'n str>) -> f64 {
    24.0 + names.map(|name| deepspec_plot::width(name, 11.0)).fold(40.0, f64::max)
}

/// τ by suite with intervals, and the published ones beside them.
pub fn lengths(results: &Results, published: Option<Published>) -> Picture {
    let suites = results.suites.iter().map(|suite| (suite.name.as_str(), &suite.metrics, look(suite.domain)));
    let entries: Vec<_> = suites.chain([("overall", &results.overall, (INK, Marker::Disc))]).collect();
    let bottom = 60.0 + ROW * entries.len() as f64;
    let mut picture = Picture::new(WIDTH, bottom as u32 + 48, "Accepted length by suite");
    let shown = entries.iter().filter_map(|(name, metrics, _)| {
        let ours = [metrics.accepted_length, metrics.accepted_length_interval.map(|i| i.high)];
        ours.into_iter().chain([published.and_then(|p| p.suite(name))]).flatten().reduce(f64::max)
    });
    let highest = shown.fold(1.5, f64::max);
    let x = Axis::new("accepted length τ, tokens per cycle", 1.0, (highest * 2.0).ceil() / 2.0, 8);
    let x = Axis { low: 0.9, ..x };
    let names = || entries.iter().map(|(name, _, _)| *name);
    let edges = [margin(names()), 60.0, f64::from(WIDTH) - 24.0, bottom];
    let title = "Accepted length by suite, with 95 % intervals";
    let mut panel = Panel::new(&mut picture, edges, title, x, rows(names()));
    for (row, (name, metrics, (color, marker))) in entries.iter().enumerate() {
        length(&mut panel, -(row as f64), metrics, (*color, *marker));
        if let Some(tau) = published.and_then(|published| published.suite(name)) {
            let place = panel.place(tau, -(row as f64));
            panel.picture.marker(Marker::Diamond, place, 5.0, GREY);
        }
    }
    let mut keys = domains(results);
    keys.extend(published.map(|_| ("published", GREY, Marker::Diamond)));
    picture.legend((edges[0], 26.0), &keys);
    picture
}

fn length(panel: &mut Panel, y: f64, metrics: &Metrics, (color, marker): (Color, Marker)) {
    if let Some(interval) = metrics.accepted_length_interval {
        let (from, to) = (panel.place(interval.low, y), panel.place(interval.high, y));
        panel.picture.line(&[from, to], color, 2.0, false);
        for (x, y) in [from, to] {
            panel.picture.line(&[(x, y - 4.0), (x, y + 4.0)], color, 2.0, false);
        }
    }
    if let Some(tau) = metrics.accepted_length {
        let place = panel.place(tau, y);
        panel.picture.marker(marker, place, 5.0, color);
    }
}

/// Conditional acceptance by position and domain.
pub fn positions(results: &Results) -> Picture {
    let mut picture = Picture::new(WIDTH, 360, "Acceptance by position");
    let count = results.overall.conditional_rates.len();
    let x = Axis::steps("position in the block", 1, count);
    let y = Axis::new("accepted, of blocks accepted so far", 0.0, 1.0, 5);
    let edges = [64.0, 60.0, f64::from(WIDTH) - 24.0, 310.0];
    let mut panel = Panel::new(&mut picture, edges, "Acceptance by position, given all before it", x, y);
    for found in &results.domains {
        let rates = found.metrics.conditional_rates.iter().enumerate();
        let values: Vec<_> = rates.filter_map(|(k, rate)| Some(((k + 1) as f64, (*rate)?))).collect();
        let (color, marker) = look(found.domain);
        panel.series(&values, color, marker);
    }
    picture.legend((edges[0], 26.0), &domains(results));
    picture
}

/// Reliability diagrams, one per position, before and after calibration.
pub fn reliability(confidence: &ConfidenceResult) -> Picture {
    const SIDE: f64 = 118.0;
    const STEP: (f64, f64) = (172.0, 196.0);
    let count = confidence.reliability.positions.len().min(DIAGRAMS);
    let (columns, lines) = (count.clamp(1, 4), count.div_ceil(4).max(1));
    let (width, height) = (20.0 + STEP.0 * columns as f64, 44.0 + STEP.1 * lines as f64);
    let mut picture = Picture::new(width.max(400.0) as u32, height as u32, "Reliability of the confidences");
    let both = confidence.uncalibrated.is_some();
    let (before, after) = ((ORANGE, Marker::Disc), (BLUE, Marker::Disc));
    for k in 0..count {
        let (left, top) = (58.0 + STEP.0 * (k % 4) as f64, 68.0 + STEP.1 * (k / 4) as f64);
        let x = Axis::new(if k / 4 + 1 == lines { "predicted" } else { "" }, 0.0, 1.0, 2);
        let y = Axis::new(if k % 4 == 0 { "accepted" } else { "" }, 0.0, 1.0, 2);
        let title = format!("up to position {}", k + 1);
        let mut panel = Panel::new(&mut picture, [left, top, left + SIDE, top + SIDE], &title, x, y);
        panel.curve(&[(0.0, 0.0), (1.0, 1.0)], GREY, true);
        if let Some(report) = &confidence.uncalibrated {
            diagram(&mut panel, &report.positions[k], before.0);
        }
        diagram(&mut panel, &confidence.reliability.positions[k], after.0);
    }
    let mut keys = vec![];
    if both {
        keys.push(("before calibration", before.0, before.1));
        keys.push(("calibrated", after.0, after.1));
    } else {
        keys.push(("confidence as the head gives it", after.0, after.1));
    }
    picture.legend((58.0, 26.0), &keys);
    picture
}

/// Bins as discs whose area is their share of the observations.
fn diagram(panel: &mut Panel, position: &PositionReliability, color: Color) {
    for bin in &position.bins {
        let share = bin.count as f64 / position.count.max(1) as f64;
        let place = panel.place(bin.predicted_mean, bin.accepted_mean);
        panel.picture.marker(Marker::Disc, place, (1.5f64).max(6.0 * share.sqrt()), color);
    }
}

/// What thresholds on the confidence would give.
pub fn sweep(confidence: &ConfidenceResult) -> Picture {
    let points = &confidence.sweep;
    let mut picture = Picture::new(WIDTH, 330, "Thresholds on the confidence");
    let per_cycle = |count: fn(&SweepPoint) -> u64| -> Vec<(f64, f64)> {
        points.iter().map(|point| (point.threshold, count(point) as f64 / point.cycles as f64)).collect()
    };
    let series = [
        ("proposed", ORANGE, Marker::Square, per_cycle(|point| point.proposed)),
        ("accepted", GREEN, Marker::Triangle, per_cycle(|point| point.accepted)),
        ("τ", BLUE, Marker::Disc, per_cycle(|point| point.committed)),
    ];
    let highest = series.iter().flat_map(|(.., values)| values).map(|(_, y)| *y).fold(1.0, f64::max);
    let threshold = || Axis::new("confidence threshold", 0.0, 1.0, 5);
    let y = Axis::from_zero("tokens per cycle", highest, 5);
    let mut panel = Panel::new(&mut picture, [56.0, 60.0, 346.0, 280.0], "Tokens per cycle", threshold(), y);
    series.iter().for_each(|(_, color, marker, values)| panel.series(values, *color, *marker));
    let costs: Vec<_> =
        points.iter().map(|point| (point.threshold, point.verified_per_committed())).collect();
    let highest = costs.iter().map(|(_, y)| *y).fold(1.0, f64::max);
    let y = Axis::from_zero("verified tokens per committed token", highest, 5);
    let edges = [420.0, 60.0, f64::from(WIDTH) - 14.0, 280.0];
    let mut panel = Panel::new(&mut picture, edges, "Verification cost", threshold(), y);
    panel.series(&costs, PURPLE, Marker::Disc);
    let keys = series.map(|(name, color, marker, _)| (name, color, marker));
    picture.legend((56.0, 26.0), &keys);
    picture
}

/// Where the time of a generated token goes, by suite, with and without the drafter.
pub fn times(results: &Results) -> Picture {
    let bars: Vec<(String, [f64; 3])> = results.suites.iter().flat_map(bars).collect();
    let bottom = 60.0 + ROW * bars.len() as f64;
    let mut picture = Picture::new(WIDTH, bottom as u32 + 48, "Time of a generated token");
    let highest = bars.iter().map(|(_, parts)| parts.iter().sum()).fold(0.0, f64::max);
    let names = || bars.iter().map(|(name, _)| name.as_str());
    let x = Axis::from_zero("milliseconds per generated token", highest, 8);
    let edges = [margin(names()), 60.0, f64::from(WIDTH) - 24.0, bottom];
    let panel = Panel::new(&mut picture, edges, "Where the time goes", x, rows(names()));
    let parts = [("draft", BLUE), ("target", ORANGE), ("host", GREY)];
    for (row, (_, times)) in bars.iter().enumerate() {
        let mut start = 0.0;
        for (time, (_, color)) in times.iter().zip(parts) {
            let (from, to) =
                (panel.place(start, 0.3 - row as f64), panel.place(start + time, -0.3 - row as f64));
            panel.picture.rectangle(from, to, color);
            start += time;
        }
    }
    picture.legend((edges[0], 26.0), &parts.map(|(name, color)| (name, color, Marker::Square)));
    picture
}

/// Milliseconds per token of drafting, target and host; a bar with the drafter and one without.
fn bars(suite: &SuiteResult) -> Vec<(String, [f64; 3])> {
    let parts = |time: &Timing, tokens: u64| {
        [time.draft_s, time.verify_s, time.host_s].map(|seconds| 1e3 * seconds / tokens.max(1) as f64)
    };
    let mut bars = vec![(suite.name.clone(), parts(&suite.timing, suite.counts.output_tokens))];
    bars.extend(
        (suite.baseline.iter())
            .map(|plain| ("plain decoding".to_string(), parts(&plain.timing, plain.output_tokens))),
    );
    bars
}
