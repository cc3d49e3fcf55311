//! `compare`: several results side by side.

use std::path::{Path, PathBuf};

use deepspec_core::digest::short;
use deepspec_core::usage;
use serde::Serialize;
use serde_json::{Value, json};

use crate::results::{DomainResult, Metrics, Results, SuiteResult, domains};
use crate::table::{Table, factor, number};

/// Which results to compare.
#[derive(clap::Args)]
pub struct Args {
    /// Output folders of `deepspec-eval run`
    #[arg(required = true, value_name = "DIR")]
    results: Vec<PathBuf>,
    /// Name of a result in the table, once per folder in the same order; by default the folders' own names
    #[arg(long = "label", value_name = "NAME")]
    labels: Vec<String>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A result and its name.
struct Labelled {
    label: String,
    path: PathBuf,
    results: Results,
}

/// Runs the command.
///
/// # Errors
/// Usage errors: unreadable results, a wrong number of labels, no suite in common.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if !args.labels.is_empty() && args.labels.len() != args.results.len() {
        usage!(
            "{} labels for {} results; give one --label for each, or none",
            args.labels.len(),
            args.results.len()
        );
    }
    let mut compared = vec![];
    for (i, path) in args.results.iter().enumerate() {
        let label = args.labels.get(i).cloned().unwrap_or_else(|| default_label(path));
        compared.push(Labelled { label, path: path.clone(), results: Results::read(path)? });
    }
    let common = common_suites(&compared);
    if common.is_empty() {
        usage!("the results have no suite in common");
    }
    let comparison = Comparison {
        differences: differences(&compared),
        columns: compared.iter().map(|one| Column::new(one, &common)).collect(),
        suites: common,
    };
    for difference in &comparison.differences {
        tracing::warn!("{difference}");
    }
    let text =
        if args.json { serde_json::to_string_pretty(&comparison)? + "\n" } else { comparison.render() };
    Ok(crate::print(&text)?)
}

/// The folder's name; for a results file, that of its folder.
fn default_label(path: &Path) -> String {
    let dir = if path.is_file() { path.parent().unwrap_or(path) } else { path };
    let resolved = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    resolved.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// The suites that all results have, in the order of the first.
fn common_suites(compared: &[Labelled]) -> Vec<String> {
    let has = |one: &Labelled, name: &str| one.results.suites.iter().any(|suite| suite.name == name);
    let first = compared.first().map_or(&[][..], |one| &one.results.suites);
    let names = first.iter().map(|suite| suite.name.clone());
    names.filter(|name| compared.iter().all(|one| has(one, name))).collect()
}

/// What keeps the results from being comparable, a sentence each.
fn differences(compared: &[Labelled]) -> Vec<String> {
    let Some((first, others)) = compared.split_first() else { return vec![] };
    let mut sentences = vec![];
    for other in others {
        let mut compare = |what: &str, a: &Value, b: &Value, effect: &str| {
            if a != b {
                let (left, right) = (&first.label, &other.label);
                sentences.push(format!("{what} differs: {a} in {left}, {b} in {right}; {effect}"));
            }
        };
        for (what, effect, facts) in [
            ("target", LENGTHS, target_facts as fn(&Results) -> Vec<(String, Value)>),
            ("", LENGTHS, asked_facts),
            ("", SPEEDS, speed_facts),
        ] {
            for ((name, a), (_, b)) in facts(&first.results).iter().zip(&facts(&other.results)) {
                compare(format!("{what} {name}").trim_start(), a, b, effect);
            }
        }
        let names =
            |one: &Labelled| json!(one.results.suites.iter().map(|suite| &suite.name).collect::<Vec<_>>());
        compare(
            "set of suites",
            &names(first),
            &names(other),
            "only suites in all results are shown and averaged",
        );
        for suite in &first.results.suites {
            if let Some(same) = other.results.suites.iter().find(|same| same.name == suite.name) {
                let scored = |suite: &SuiteResult| json!([short(&suite.file_digest), suite.counts.samples]);
                compare(&format!("{} [file, samples]", suite.name), &scored(suite), &scored(same), LENGTHS);
            }
        }
    }
    sentences
}

const LENGTHS: &str = "accepted lengths are not comparable";
const SPEEDS: &str = "speeds are not comparable";

fn target_facts(results: &Results) -> Vec<(String, Value)> {
    let target = &results.target;
    let digests = [
        ("config", &target.config_digest),
        ("weights", &target.weights_digest),
        ("tokenizer", &target.tokenizer_digest),
        ("chat template", &target.template_digest),
    ];
    let digests = digests.into_iter().map(|(name, digest)| (name.to_string(), json!(short(digest))));
    digests.chain([("stop ids".into(), json!(target.stop_ids))]).collect()
}

fn asked_facts(results: &Results) -> Vec<(String, Value)> {
    let s = &results.settings;
    let facts = [
        ("seed", json!(s.seed)),
        ("temperature", json!(s.temperature)),
        ("max_new_tokens", json!(s.max_new_tokens)),
        ("limit", json!(s.limit)),
        ("turns", json!(s.turns)),
        ("thinking", json!(s.thinking)),
        ("system prompt", json!(s.system_prompt)),
        ("confidence_threshold", json!(s.confidence_threshold)),
        ("max_draft_tokens", json!(s.max_draft_tokens)),
        ("dtype", json!(s.dtype)),
    ];
    facts.map(|(name, value)| (name.to_string(), value)).to_vec()
}

fn speed_facts(results: &Results) -> Vec<(String, Value)> {
    let s = &results.settings;
    let facts = [("slots", json!(s.slots)), ("device", json!(s.device)), ("threads", json!(s.threads))];
    facts.map(|(name, value)| (name.to_string(), value)).to_vec()
}

/// What is shown.
#[derive(Serialize)]
struct Comparison {
    suites: Vec<String>,
    differences: Vec<String>,
    columns: Vec<Column>,
}

/// One result over the common suites.
#[derive(Serialize)]
struct Column {
    label: String,
    results: PathBuf,
    drafter: Option<String>,
    suites: Vec<SuiteResult>,
    domains: Vec<DomainResult>,
    overall: Metrics,
}

impl Column {
    fn new(one: &Labelled, common: &[String]) -> Self {
        let of = |name: &String| one.results.suites.iter().find(|suite| suite.name == *name).cloned();
        let suites: Vec<SuiteResult> = common.iter().filter_map(of).collect();
        Self {
            label: one.label.clone(),
            results: one.path.clone(),
            drafter: one.results.drafter.as_ref().map(|drafter| drafter.path.clone()),
            domains: domains(&suites),
            overall: Metrics::mean(suites.iter().map(|suite| &suite.metrics)),
            suites,
        }
    }

    /// The metrics of every row of the table.
    fn rows(&self) -> impl Iterator<Item = &Metrics> {
        let suites = self.suites.iter().map(|suite| &suite.metrics);
        suites.chain(self.domains.iter().map(|domain| &domain.metrics)).chain([&self.overall])
    }
}

impl Comparison {
    fn render(&self) -> String {
        let labels = || self.columns.iter().map(|column| column.label.clone());
        let mut table =
            Table::new(std::iter::once("suite".to_string()).chain(labels()).chain(labels()).collect());
        table.title(1, "");
        table.title(self.columns.len(), "accepted length τ");
        table.title(self.columns.len(), "speed-up");
        let domains = self.columns.iter().take(1).flat_map(|column| &column.domains);
        let names: Vec<String> = (self.suites.iter().cloned())
            .chain(domains.map(|domain| domain.domain.to_string()))
            .chain(["overall".into()])
            .collect();
        let mut rows: Vec<_> = self.columns.iter().map(Column::rows).collect();
        for (i, name) in names.into_iter().enumerate() {
            if i == self.suites.len() {
                table.rule();
            }
            let metrics: Vec<Option<&Metrics>> = rows.iter_mut().map(Iterator::next).collect();
            let lengths = metrics.iter().map(|m| number(m.and_then(|m| m.accepted_length), 2));
            let speeds = metrics.iter().map(|m| factor(m.and_then(|m| m.speed_up)));
            table.row(std::iter::once(name).chain(lengths).chain(speeds).collect());
        }
        let mut notes = vec![
            "Domains and overall are means over suites; speed-up is over plain decoding in the same run."
                .to_string(),
        ];
        notes.extend(self.differences.iter().map(|difference| format!("! {difference}")));
        format!("{}\n{}\n", table.render(), notes.join("\n"))
    }
}
