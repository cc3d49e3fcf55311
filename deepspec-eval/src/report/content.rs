//! Builds the report of a run, section by section.

use anyhow::Result;
use deepspec_core::cli::count;
use deepspec_core::digest::short_digest;
use deepspec_cost::reliability::{Metrics as Reliability, ReliabilityReport};

use super::charts;
use super::document::{Block, Document};
use super::published::PublishedLengths;
use super::terminal::{lengths_by_context, lengths_by_draft_rule, notes};
use crate::confidence::ConfidenceResult;
use crate::results::{Metrics, Results, Served, Settings, Turns};
use crate::table::{factor, number, range, rate};

/// The report of a run.
///
/// # Errors
/// Fails if a plot cannot be drawn.
pub fn run_report(results: &Results) -> Result<Document> {
    let drafter =
        results.drafter.as_ref().map(|drafter| display_name(&drafter.path, drafter.hub_id.as_ref()));
    let target = display_name(&results.target.path, results.target.hub_id.as_ref());
    let title = match drafter {
        Some(drafter) => format!("{drafter} drafting for {target}"),
        None => format!("{target} without a drafter"),
    };
    let mut blocks =
        vec![Block::Paragraph(summary_paragraph(results)), Block::Heading("Accepted length and speed")];
    blocks.extend([
        scores_table(results),
        Block::Plot("accepted_length", charts::plot_accepted_lengths(results, published_lengths(results))?),
    ]);
    if let Some((names, rows)) = lengths_by_draft_rule(results) {
        blocks.push(Block::Heading("Accepted length by draft rule"));
        blocks.push(Block::Table(header(&names), rows));
    }
    if let Some((names, rows)) = lengths_by_context(results) {
        blocks.push(Block::Heading("Accepted length by length of the context"));
        blocks.push(Block::Table(header(&names), rows));
    }
    if !results.overall.conditional_rates.is_empty() {
        blocks.extend([Block::Heading("Acceptance by position"), positions_table(results)]);
        blocks.push(Block::Plot("positions", charts::plot_positions(results)?));
    }
    if let Some(confidence) = &results.confidence {
        blocks.push(Block::Heading("Confidence"));
        blocks.extend(reliability_section(confidence)?);
        blocks.extend(threshold_sweep_section(confidence)?);
    }
    if results.served.is_none() {
        blocks.extend([
            Block::Heading("Time"),
            times_table(results),
            Block::Plot("time", charts::plot_times(results)?),
        ]);
    }
    blocks.extend([Block::Heading("Notes"), Block::List(notes(results))]);
    blocks.extend([Block::Heading("What was run"), run_details(results)]);
    Ok(Document { title, blocks })
}

/// The hub id or the folder's name, with the parent folder's name for a training step.
fn display_name(path: &str, hub_id: Option<&String>) -> String {
    let mut folders = path.trim_end_matches('/').rsplit('/');
    let (folder, parent) = (folders.next().unwrap_or(path), folders.next());
    hub_id.cloned().unwrap_or_else(|| match parent {
        Some(parent) if folder.starts_with("step_") => format!("{parent}/{folder}"),
        _ => folder.to_string(),
    })
}

/// Published τ, which is that of blocks; None if trees were verified.
fn published_lengths(results: &Results) -> Option<PublishedLengths> {
    if results.settings.verify.tree_budget().is_some() {
        return None;
    }
    PublishedLengths::for_drafter(results.drafter.as_ref()?.hub_id.as_ref()?)
}

fn summary_paragraph(results: &Results) -> String {
    let Metrics { accepted_length, accepted_length_interval, speed_up, .. } = &results.overall;
    let samples: u64 = results.suites.iter().map(|suite| suite.counts.samples).sum();
    let mut words = format!(
        "Accepted length τ {} ({}), the mean over {} and {} at temperature {}.",
        number(*accepted_length, 2),
        range(*accepted_length_interval),
        count(results.suites.len(), "suite"),
        count(samples as usize, "answer"),
        results.settings.temperature
    );
    if speed_up.is_some() {
        words += &format!(" Speed-up over plain decoding in the same run {}.", factor(*speed_up));
    }
    if let Some(served) = &results.served {
        words += &format!(" {} decoded, and its own figures are shown.", served.name());
    }
    words
}

/// One row for each suite, one for each domain, and one overall.
fn metric_rows(results: &Results, cells: impl Fn(&str, &Metrics) -> Vec<String>) -> Vec<Vec<String>> {
    let suites = results.suites.iter().map(|suite| (suite.name.as_str(), &suite.metrics));
    let domains = results.domains.iter().map(|domain| (domain.domain.name(), &domain.metrics));
    let all = suites.chain(domains).chain([("overall", &results.overall)]);
    all.map(|(name, metrics)| std::iter::once(name.to_string()).chain(cells(name, metrics)).collect())
        .collect()
}

fn header(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

fn scores_table(results: &Results) -> Block {
    let published = published_lengths(results);
    let mut names = vec!["suite", "τ", "95 % interval", "verify rate", "tokens/s", "speed-up"];
    names.extend(published.map(|_| "published τ"));
    let rows = metric_rows(results, |name, metrics| {
        let mut cells = vec![
            number(metrics.accepted_length, 2),
            range(metrics.accepted_length_interval),
            number(metrics.verify_rate, 2),
            rate(metrics.tokens_per_s),
            factor(metrics.speed_up),
        ];
        cells.extend(published.map(|published| number(published.tau_of_suite(name), 2)));
        cells
    });
    Block::Table(header(&names), rows)
}

fn positions_table(results: &Results) -> Block {
    let count = results.overall.conditional_rates.len();
    let names = (1..=count).map(|k| format!("@{k}"));
    let rows = metric_rows(results, |_, metrics| {
        (0..count).map(|k| number(metrics.conditional_rates.get(k).copied().flatten(), 2)).collect()
    });
    Block::Table(std::iter::once("suite".to_string()).chain(names).collect(), rows)
}

fn reliability_section(confidence: &ConfidenceResult) -> Result<Vec<Block>> {
    let after = &confidence.reliability;
    let cells = |metrics: Option<&Reliability>| {
        let of = |value: fn(&Reliability) -> Option<f64>| number(metrics.and_then(value), 3);
        vec![
            of(|m| Some(m.ece)),
            of(|m| m.auroc),
            of(|m| Some(m.brier)),
            of(|m| Some(m.predicted_mean)),
            of(|m| Some(m.accepted_mean)),
        ]
    };
    let mut names = vec!["position", "blocks", "ECE", "AUROC", "Brier", "mean predicted", "mean accepted"];
    names.extend(confidence.uncalibrated.as_ref().map(|_| "ECE before calibration"));
    let ece = |report: &ReliabilityReport, k: usize| report.positions.get(k)?.metrics.map(|m| m.ece);
    let rows = after.positions.iter().enumerate().map(|(k, position)| {
        let mut row = vec![format!("@{}", k + 1), position.count.to_string()];
        row.extend(cells(position.metrics.as_ref()));
        row.extend(confidence.uncalibrated.as_ref().map(|before| number(ece(before, k), 3)));
        row
    });
    let mut rows: Vec<_> = rows.collect();
    let blocks: u64 = after.positions.iter().map(|position| position.count).sum();
    let mut mean = vec!["mean".to_string(), blocks.to_string()];
    mean.extend(cells(after.summary.as_ref()));
    mean.extend(confidence.uncalibrated.as_ref().map(|before| number(before.summary.map(|m| m.ece), 3)));
    rows.push(mean);
    Ok(vec![
        Block::Paragraph(
            "An observation is the product of the confidences up to a position, and whether the block was accepted \
             that far; nothing counts behind the first stop token of a block. Disks on the diagonal mean that confidences \
             say what happens; their area is the number of blocks."
                .into(),
        ),
        Block::Table(header(&names), rows),
        Block::Plot("reliability", charts::plot_reliability(confidence)?),
    ])
}

fn threshold_sweep_section(confidence: &ConfidenceResult) -> Result<Vec<Block>> {
    if confidence.sweep.is_empty() {
        return Ok(vec![]);
    }
    let names =
        ["threshold", "proposed per cycle", "accepted per cycle", "τ", "verified per committed token"];
    let rows = confidence.sweep.iter().map(|point| {
        let per_cycle = |count: u64| number(Some(count as f64 / point.cycles as f64), 2);
        vec![
            format!("{:.2}", point.threshold),
            per_cycle(point.proposed),
            per_cycle(point.accepted),
            number(Some(point.accepted_length()), 2),
            number(Some(point.verified_per_committed()), 2),
        ]
    });
    Ok(vec![
        Block::Paragraph(
            "Had every block been cut before the first token of a confidence below the threshold. An estimate: each \
             cycle is cut where it stands, while in a real run the cycles after it would start elsewhere."
                .into(),
        ),
        Block::Table(header(&names), rows.collect()),
        Block::Plot("thresholds", charts::plot_threshold_sweep(confidence)?),
    ])
}

fn times_table(results: &Results) -> Block {
    let names = ["suite", "wall s", "draft s", "target s", "host s", "target forwards", "plain decoding s"];
    let rows = results.suites.iter().map(|suite| {
        let time = &suite.timing;
        let plain = suite.baseline.as_ref().map(|plain| plain.timing.wall_s);
        let mut row = vec![suite.name.clone()];
        let seconds = [time.wall_s, time.draft_s, time.verify_s, time.host_s];
        row.extend(seconds.map(|seconds| number(Some(seconds), 2)));
        row.extend([time.steps.to_string(), number(plain, 2)]);
        row
    });
    Block::Table(header(&names), rows.collect())
}

fn run_details(results: &Results) -> Block {
    let (s, target) = (&results.settings, &results.target);
    let mut rows = vec![
        ("target", target.path.clone()),
        ("chat template", short_digest(&target.template_digest).to_string()),
    ];
    if results.served.is_none() {
        rows.push(("target weights", short_digest(&target.weights_digest).to_string()));
    }
    if let Some(drafter) = &results.drafter {
        rows.push(("drafter", format!("{}, drafts {} tokens", drafter.path, drafter.block_size)));
        if results.served.is_none() {
            rows.push(("drafter weights", short_digest(&drafter.weights_digest).to_string()));
        }
    }
    let turns = if s.turns == Turns::All { "all" } else { "first" };
    rows.extend([
        ("temperature", s.temperature.to_string()),
        ("seeds", s.seed_list()),
        ("new tokens", format!("at most {}", s.max_new_tokens)),
        ("turns", turns.to_string()),
        ("thinking", if s.thinking { "on" } else { "off" }.to_string()),
    ]);
    match &results.served {
        Some(served) => rows.extend(engine_details(served, s.slots)),
        None => rows.extend(decoding_details(s)),
    }
    rows.push(("deepspec-eval", results.tool_version.clone()));
    for suite in &results.suites {
        rows.push((
            "suite",
            format!("{} ({}, {})", suite.name, count(suite.rows, "row"), short_digest(&suite.file_digest)),
        ));
    }
    let rows = rows.into_iter().map(|(name, value)| vec![name.to_string(), value]).collect();
    Block::Table(header(&["setting", "value"]), rows)
}

/// Details of an engine that decoded.
fn engine_details(served: &Served, slots: usize) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("engine", format!("{} at {}", served.name(), served.url)),
        ("verification", served.verification.clone()),
        ("figures", served.figures.phrase().to_string()),
        ("requests at once", slots.to_string()),
    ];
    rows.extend(served.model.clone().map(|model| ("target there", model)));
    rows.extend(served.baseline.clone().map(|baseline| ("without a drafter", baseline)));
    rows
}

/// Details of decoding by this program.
fn decoding_details(s: &Settings) -> Vec<(&'static str, String)> {
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "none".into());
    vec![
        ("schedule", s.policy().to_string()),
        ("calibration", or_none(s.calibration.as_ref().map(|t| format!("{t:.2?}")))),
        ("Markov head", if s.no_markov { "left out" } else { "as trained" }.to_string()),
        ("limit of drafted tokens", or_none(s.max_draft_tokens.map(|n| n.to_string()))),
        ("drafted tokens", s.draft_sampling.to_string()),
        ("verification", s.verify.phrase()),
        (
            "sequences at once",
            if s.lanes > 1 { format!("{} in {} replicas", s.slots, s.lanes) } else { s.slots.to_string() },
        ),
        ("device", format!("{}, {}, {} threads", s.device, s.dtype, s.threads)),
    ]
}
