//! Plots of a report.

use crate::plot::palette::{BLUE, GREEN, GREY, INK, ORANGE, PURPLE, VERMILION};
use crate::plot::{
    Axis, Canvas, Chart, Marker, Plot, SeriesStyle, draw_axes, draw_series, draw_title_and_legend, px, stroke,
};
use anyhow::Result;
use deepspec_cost::reliability::PositionReliability;
use deepspec_datasets::suites::Domain;
use plotters::prelude::*;

use super::published::PublishedLengths;
use crate::confidence::{ConfidenceResult, SweepPoint};
use crate::results::{Metrics, Results, SuiteResult, Timing};

const PLOT_WIDTH: u32 = 720;
/// Number of positions whose reliability is drawn.
const MAX_DIAGRAMS: usize = 8;

fn domain_style(domain: Domain) -> SeriesStyle {
    match domain {
        Domain::Math => SeriesStyle(BLUE, Marker::Disc),
        Domain::Code => SeriesStyle(VERMILION, Marker::Square),
        Domain::Chat => SeriesStyle(GREEN, Marker::Triangle),
        Domain::Own => SeriesStyle(PURPLE, Marker::Disc),
    }
}

/// Legend of the domains in the results.
fn domain_legend(results: &Results) -> Vec<(&'static str, SeriesStyle)> {
    results.domains.iter().map(|found| (found.domain.name(), domain_style(found.domain))).collect()
}

/// A plot with one row per name, wider for long names.
fn row_plot(
    title: &'static str,
    names: &[&str],
    paint: impl FnOnce(&Canvas, Axis) -> Result<()>,
) -> Result<Plot> {
    let rows = Axis::categories(names.iter().copied());
    let width = PLOT_WIDTH.max(480 + rows.max_label_width()?);
    Plot::draw(title, (width, 120 + 28 * names.len() as u32), |canvas| paint(canvas, rows))
}

/// τ by suite with intervals, next to published values.
pub fn plot_accepted_lengths(results: &Results, published: Option<PublishedLengths>) -> Result<Plot> {
    let suites = results.suites.iter().map(|suite| {
        let known = published.and_then(|published| published.tau_of_suite(&suite.name));
        (suite.name.as_str(), (&suite.metrics, domain_style(suite.domain), known))
    });
    let overall = ("overall", (&results.overall, SeriesStyle(INK, Marker::Disc), None));
    let (names, entries): (Vec<_>, Vec<_>) = suites.chain([overall]).unzip();
    let shown = entries.iter().flat_map(|(metrics, _, known)| {
        [metrics.accepted_length, metrics.accepted_length_interval.map(|interval| interval.high), *known]
    });
    let highest = shown.flatten().fold(1.5, f64::max);
    let mut keys = domain_legend(results);
    let as_published = SeriesStyle(GREY, Marker::Diamond);
    keys.extend(published.map(|_| ("published", as_published)));
    row_plot("Accepted length by suite", &names, |canvas, rows| {
        let area = draw_title_and_legend(canvas, "Accepted length by suite, with 95 % intervals", &keys)?;
        let x = Axis::linear("accepted length τ, tokens per cycle", 0.9..(highest * 2.0).ceil() / 2.0, 9);
        let mut chart = draw_axes(&area, x, rows)?;
        for (row, (metrics, look, known)) in entries.into_iter().enumerate() {
            draw_length_interval(&mut chart, row as f64, metrics, look)?;
            if let Some(tau) = known {
                as_published.draw_marker(chart.plotting_area(), (tau, row as f64), 5.0)?;
            }
        }
        Ok(())
    })
}

fn draw_length_interval(chart: &mut Chart, y: f64, metrics: &Metrics, look: SeriesStyle) -> Result<()> {
    let line = stroke(look.0, 2.0);
    if let Some(interval) = metrics.accepted_length_interval {
        let ends = [(interval.low, y), (interval.high, y)];
        let cap = || PathElement::new([(0, px(-4.0)), (0, px(4.0))], line);
        chart.draw_series([PathElement::new(ends, line)])?;
        chart.draw_series(ends.map(|end| EmptyElement::at(end) + cap()))?;
    }
    let tau = metrics.accepted_length;
    tau.map_or(Ok(()), |tau| look.draw_marker(chart.plotting_area(), (tau, y), 5.0))
}

/// Conditional acceptance by position and domain.
pub fn plot_positions(results: &Results) -> Result<Plot> {
    Plot::draw("Acceptance by position", (PLOT_WIDTH, 360), |canvas| {
        let area = draw_title_and_legend(
            canvas,
            "Acceptance by position, given all before it",
            &domain_legend(results),
        )?;
        let x = Axis::integers("position in the block", results.overall.conditional_rates.len());
        let y = Axis::linear("accepted, of blocks accepted so far", 0.0..1.0, 6);
        let mut chart = draw_axes(&area, x, y)?;
        for found in &results.domains {
            let rates = found.metrics.conditional_rates.iter().enumerate();
            let rates = rates.filter_map(|(k, rate)| Some(((k + 1) as f64, (*rate)?)));
            draw_series(&mut chart, rates, domain_style(found.domain))?;
        }
        Ok(())
    })
}

/// Reliability diagrams, one per position, before and after calibration.
pub fn plot_reliability(confidence: &ConfidenceResult) -> Result<Plot> {
    const PANEL: (u32, u32) = (172, 182);
    let count = confidence.reliability.positions.len().min(MAX_DIAGRAMS);
    let (columns, lines) = (count.clamp(2, 4), count.div_ceil(4).max(1));
    let size = (PANEL.0 * columns as u32 + 32, PANEL.1 * lines as u32 + 80);
    let (before, after) = (SeriesStyle(ORANGE, Marker::Disc), SeriesStyle(BLUE, Marker::Disc));
    let (keys, reports) = match &confidence.uncalibrated {
        Some(raw) => (
            vec![("before calibration", before), ("calibrated", after)],
            vec![(raw, before), (&confidence.reliability, after)],
        ),
        None => (vec![("confidence as the head gives it", after)], vec![(&confidence.reliability, after)]),
    };
    Plot::draw("Reliability of the confidences", size, |canvas| {
        let area = draw_title_and_legend(canvas, "Reliability of the confidences", &keys)?;
        for (k, panel) in area.split_evenly((lines, columns)).iter().take(count).enumerate() {
            let panel = panel.margin(0, px(14.0), 0, px(16.0));
            let panel = draw_title_and_legend(&panel, &format!("up to position {}", k + 1), &[])?;
            let side = |label| Axis::linear(label, 0.0..1.0, 3);
            let mut chart = draw_axes(&panel, side("predicted"), side("accepted"))?;
            let diagonal = [(0.0, 0.0), (1.0, 1.0)];
            chart.draw_series(DashedLineSeries::new(diagonal, px(5.0), px(4.0), stroke(GREY, 1.8)))?;
            for (report, look) in &reports {
                report
                    .positions
                    .get(k)
                    .map_or(Ok(()), |position| draw_reliability_bins(&chart, position, *look))?;
            }
        }
        Ok(())
    })
}

/// Draws bins as discs whose area is their share of the observations.
fn draw_reliability_bins(chart: &Chart, position: &PositionReliability, look: SeriesStyle) -> Result<()> {
    position.bins.iter().try_for_each(|bin| {
        let share = bin.count as f64 / position.count.max(1) as f64;
        let place = (bin.predicted_mean, bin.accepted_mean);
        look.draw_marker(chart.plotting_area(), place, (6.0 * share.sqrt()).max(1.5))
    })
}

/// Tokens per cycle and verification cost by confidence threshold.
pub fn plot_threshold_sweep(confidence: &ConfidenceResult) -> Result<Plot> {
    let by_threshold = |value: &dyn Fn(&SweepPoint) -> f64| -> Vec<(f64, f64)> {
        confidence.sweep.iter().map(|point| (point.threshold, value(point))).collect()
    };
    let per_cycle =
        |count: fn(&SweepPoint) -> u64| by_threshold(&|point| count(point) as f64 / point.cycles as f64);
    let tokens = [
        ("proposed", SeriesStyle(ORANGE, Marker::Square), per_cycle(|point| point.proposed)),
        ("accepted", SeriesStyle(GREEN, Marker::Triangle), per_cycle(|point| point.accepted)),
        ("τ", SeriesStyle(BLUE, Marker::Disc), per_cycle(|point| point.committed)),
    ];
    let costs = [(
        "verified tokens",
        SeriesStyle(PURPLE, Marker::Disc),
        by_threshold(&SweepPoint::verified_per_committed),
    )];
    Plot::draw("Thresholds on the confidence", (PLOT_WIDTH, 340), |canvas| {
        let halves = canvas.split_evenly((1, 2));
        let (left, right) = (halves[0].margin(0, 0, 0, px(16.0)), halves[1].margin(0, 0, px(16.0), 0));
        draw_threshold_lines(&left, "Tokens per cycle", "tokens per cycle", &tokens)?;
        draw_threshold_lines(&right, "Verification cost", "verified per committed token", &costs)
    })
}

type SweepSeries = (&'static str, SeriesStyle, Vec<(f64, f64)>);

fn draw_threshold_lines(
    area: &Canvas,
    title: &str,
    label: &'static str,
    lines: &[SweepSeries],
) -> Result<()> {
    let keys: Vec<_> = lines.iter().map(|(name, look, _)| (*name, *look)).collect();
    let area = draw_title_and_legend(area, title, &keys)?;
    let highest = lines.iter().flat_map(|(.., values)| values).map(|(_, y)| *y).fold(1.0, f64::max);
    let y = Axis::linear(label, 0.0..1.05 * highest, 8);
    let mut chart = draw_axes(&area, Axis::linear("confidence threshold", 0.0..1.0, 6), y)?;
    lines.iter().try_for_each(|(_, look, values)| draw_series(&mut chart, values.iter().copied(), *look))
}

/// Time per generated token by suite, with and without the drafter.
pub fn plot_times(results: &Results) -> Result<Plot> {
    let (names, bars): (Vec<_>, Vec<_>) = results.suites.iter().flat_map(time_bars).unzip();
    let parts = [("draft", BLUE), ("target", ORANGE), ("host", GREY)];
    let highest = bars.iter().map(|times| times.iter().sum()).fold(0.0, f64::max);
    row_plot("Time of a generated token", &names, |canvas, rows| {
        let keys = parts.map(|(name, color)| (name, SeriesStyle(color, Marker::Square)));
        let area = draw_title_and_legend(canvas, "Where the time goes", &keys)?;
        let x = Axis::linear("milliseconds per generated token", 0.0..1.05 * highest, 9);
        let mut chart = draw_axes(&area, x, rows)?;
        for (row, times) in bars.iter().enumerate() {
            let mut start = 0.0;
            for (time, (_, color)) in times.iter().zip(parts) {
                let corners = [(start, row as f64 - 0.3), (start + time, row as f64 + 0.3)];
                chart.draw_series([Rectangle::new(corners, color.filled())])?;
                start += time;
            }
        }
        Ok(())
    })
}

/// Milliseconds per token of drafting, target and host: one bar with the drafter and one without.
fn time_bars(suite: &SuiteResult) -> impl Iterator<Item = (&str, [f64; 3])> {
    let parts = |time: &Timing, tokens: u64| {
        [time.draft_s, time.verify_s, time.host_s].map(|seconds| 1e3 * seconds / tokens.max(1) as f64)
    };
    let plain = suite.baseline.as_ref();
    let plain = plain.map(|plain| ("plain decoding", parts(&plain.timing, plain.output_tokens)));
    [(suite.name.as_str(), parts(&suite.timing, suite.counts.output_tokens))].into_iter().chain(plain)
}

#[cfg(test)]
mod tests {
    use deepspec_cost::reliability::{Reliability, ReliabilityReport};

    use super::*;
    use crate::results::sample::{results, suite};

    fn observed(confidences: &[f64]) -> ReliabilityReport {
        let mut reliability = Reliability::new(confidences.len());
        reliability.update(confidences, 1.min(confidences.len())).unwrap();
        reliability.finish()
    }

    fn drawn(plot: Result<Plot>) -> String {
        let plot = plot.unwrap();
        assert!(plot.png().unwrap().starts_with(b"\x89PNG"));
        for broken in ["NaN", "inf", "href", "url("] {
            assert!(!plot.svg().contains(broken), "{}: {broken}", plot.title);
        }
        plot.svg().to_string()
    }

    #[test]
    fn plots_show_every_suite_domain_and_position() {
        let results = results();
        let published = PublishedLengths::for_drafter("deepseek-ai/dspark_qwen3_4b_block7");
        let lengths = drawn(plot_accepted_lengths(&results, published));
        for text in ["\na\n", "\nb\n", "\noverall\n", "\nmath\n", "\nchat\n", "\npublished\n", "τ"] {
            assert!(lengths.contains(text), "{text}");
        }
        assert!(drawn(plot_positions(&results)).contains("\n2\n"));
        assert_eq!(drawn(plot_times(&results)).matches("\nplain decoding\n").count(), 2);
        let confidence = ConfidenceResult {
            reliability: observed(&[0.9; 9]),
            uncalibrated: Some(observed(&[0.8; 9])),
            sweep: vec![],
        };
        let svg = drawn(plot_reliability(&confidence));
        assert!(svg.contains("up to position 8") && !svg.contains("up to position 9"));
        assert_eq!(svg.matches("#E69F00").count(), 9, "a disc in each panel, and the key");
    }

    #[test]
    fn results_without_anything_to_show_are_drawn() {
        let mut none = results();
        none.suites = vec![suite("w".repeat(120).as_str(), Domain::Chat, &[]).suite];
        none.suites[0].timing = Timing::ZERO;
        none.suites[0].baseline = None;
        none.overall = Metrics::default();
        let lengths = drawn(plot_accepted_lengths(&none, None));
        let width = lengths.split("width=\"").nth(1).and_then(|rest| rest.split('"').next());
        assert!(width.unwrap().parse::<u32>().unwrap() > PLOT_WIDTH, "a long name has its room");
        drawn(plot_positions(&none));
        drawn(plot_times(&none));
        none.suites.clear();
        drawn(plot_times(&none));
        let cycles = SweepPoint { threshold: 0.0, proposed: 0, accepted: 0, committed: 0, cycles: 0 };
        for (positions, sweep) in [(0, vec![]), (1, vec![cycles])] {
            let reliability = Reliability::new(positions).finish();
            let confidence = ConfidenceResult { reliability, uncalibrated: None, sweep };
            drawn(super::plot_reliability(&confidence));
            drawn(super::plot_threshold_sweep(&confidence));
        }
    }
}
