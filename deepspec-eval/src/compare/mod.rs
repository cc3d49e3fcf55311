//! `compare`: shows several results side by side.

mod deltas;
mod differences;
#[cfg(test)]
mod fuzz;
mod labelled;

use std::path::{Path, PathBuf};

use deepspec_core::usage;
use serde::Serialize;

use crate::results::{DomainResult, Metrics, Results, ScoredSuite, SuiteResult, averages};
use crate::table::{Table, factor, number};
use crate::traces;
use deltas::Deltas;
use labelled::CountsBySuite;
pub use labelled::LabelledResult;

/// Arguments of `compare`.
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

/// Runs the command.
///
/// # Errors
/// Usage errors: unreadable results, a wrong number of labels, or no suite in common.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let comparison = Comparison::read(args)?;
    for difference in &comparison.differences {
        tracing::warn!("{difference}");
    }
    let text =
        if args.json { serde_json::to_string_pretty(&comparison)? + "\n" } else { comparison.render() };
    Ok(crate::output::print(&text)?)
}

impl Comparison {
    fn read(args: &Args) -> anyhow::Result<Self> {
        if !args.labels.is_empty() && args.labels.len() != args.results.len() {
            usage!(
                "{} labels for {} results; give one --label for each, or none",
                args.labels.len(),
                args.results.len()
            );
        }
        let mut compared = vec![];
        let defaults = default_labels(&args.results);
        for (i, path) in args.results.iter().enumerate() {
            let label = args.labels.get(i).cloned().unwrap_or_else(|| defaults[i].clone());
            let results = Results::read(path)?;
            compared.push(LabelledResult::new(label, path.clone(), results));
        }
        let common = common_suites(&compared);
        if common.is_empty() {
            let suites = compared.iter().map(LabelledResult::describe_suites).collect::<Vec<_>>().join("; ");
            usage!("the results have no suite in common: {suites}");
        }
        let differences = differences::list_differences(&compared);
        unify_domains(&mut compared);
        let (first, others) = compared.split_at(1);
        Ok(Self {
            differences,
            columns: compared.iter().map(|one| Column::new(one, &common)).collect(),
            deltas: others.iter().map(|other| Deltas::new(other, &first[0], &common)).collect(),
            suites: common,
        })
    }
}

/// Default labels: the folders' names, with as many parent folders as needed to distinguish them.
fn default_labels(paths: &[PathBuf]) -> Vec<String> {
    let parts = |path: &PathBuf| {
        let dir = if path.is_file() { path.parent().unwrap_or(path) } else { path };
        let resolved = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
        let parts = resolved.components().map(|part| part.as_os_str().to_string_lossy().into_owned());
        parts.collect::<Vec<_>>()
    };
    let all: Vec<Vec<String>> = paths.iter().map(parts).collect();
    // Depths count from the end. A part that all folders share is left out unless it is the only
    // one.
    let part = |parts: &[String], depth: usize| parts.iter().rev().nth(depth).cloned();
    let deepest = all.iter().map(Vec::len).max().unwrap_or(0);
    let differs = |depth: &usize| all.iter().any(|parts| part(parts, *depth) != part(&all[0], *depth));
    let depths: Vec<usize> = (0..deepest).filter(differs).collect();
    let labels = |depths: &[usize]| -> Vec<String> {
        let label = |parts: &Vec<String>| {
            let named: Vec<String> = depths.iter().rev().filter_map(|&depth| part(parts, depth)).collect();
            if named.is_empty() { parts.last().cloned().unwrap_or_default() } else { named.join("/") }
        };
        all.iter().map(label).collect()
    };
    let are_distinct = |labels: &Vec<String>| (1..labels.len()).all(|i| !labels[..i].contains(&labels[i]));
    let mut tried = (1..=depths.len()).map(|count| labels(&depths[..count]));
    tried.find(are_distinct).unwrap_or_else(|| labels(&depths))
}

/// Counts of every prompt from the results of a server, or else from the traces beside the results.
/// Empty, with a warning, if the traces are of another run.
fn read_prompt_counts(path: &Path, results: &Results) -> CountsBySuite {
    if results.served.is_some() {
        let told = results.suites.iter().filter(|suite| !suite.prompts.is_empty());
        return told.map(|suite| (suite.name.clone(), suite.prompts.clone())).collect();
    }
    let mut prompts = CountsBySuite::new();
    let read = traces::read(path, |trace| {
        let suite = prompts.entry(trace.suite.to_string()).or_default();
        let prompt = suite.entry(trace.sample.to_string()).or_default();
        prompt.cycles += 1;
        prompt.committed += u64::from(trace.committed);
    });
    let cycles = |suite: &SuiteResult| {
        prompts
            .get(&suite.name)
            .map_or(0, |prompts| prompts.values().map(|prompt| prompt.cycles).sum::<u64>())
    };
    let problem = match read {
        Err(error) => error.to_string(),
        Ok(()) if results.suites.iter().all(|suite| cycles(suite) == suite.counts.cycles) => return prompts,
        Ok(()) => format!("the traces beside {} are of another run", path.display()),
    };
    tracing::warn!("{problem}; its accepted lengths have no intervals here");
    CountsBySuite::new()
}

/// The suites that all results have, in the order of the first result.
fn common_suites(compared: &[LabelledResult]) -> Vec<String> {
    let has = |one: &LabelledResult, name: &str| one.results.suites.iter().any(|suite| suite.name == name);
    let first = compared.first().map_or(&[][..], |one| &one.results.suites);
    let names = first.iter().map(|suite| suite.name.clone());
    names.filter(|name| compared.iter().all(|one| has(one, name))).collect()
}

/// Gives every suite the domain it has in the first result, so that all columns have the same rows.
fn unify_domains(compared: &mut [LabelledResult]) {
    let Some((first, others)) = compared.split_first_mut() else { return };
    for suite in others.iter_mut().flat_map(|other| &mut other.results.suites) {
        let same = first.results.suites.iter().find(|same| same.name == suite.name);
        suite.domain = same.map_or(suite.domain, |same| same.domain);
    }
}

/// The comparison in the form that is printed.
#[derive(Serialize)]
struct Comparison {
    suites: Vec<String>,
    differences: Vec<String>,
    columns: Vec<Column>,
    /// Differences of every other result from the first.
    deltas: Vec<Deltas>,
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
    fn new(one: &LabelledResult, common: &[String]) -> Self {
        let of = |name: &String| one.results.suites.iter().find(|suite| suite.name == *name).cloned();
        let scored = |suite: SuiteResult| ScoredSuite { length: one.accepted_length(&suite), suite };
        let scored: Vec<ScoredSuite> = common.iter().filter_map(of).map(scored).collect();
        let (domains, overall) = averages(&scored);
        Self {
            label: one.label.clone(),
            results: one.path.clone(),
            drafter: one.results.drafter.as_ref().map(|drafter| drafter.path.clone()),
            domains,
            overall,
            suites: scored.into_iter().map(|one| one.suite).collect(),
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
        let mut parts = vec![self.table().render()];
        parts.extend(self.deltas.iter().map(Deltas::render));
        parts.push(
            "Domains and overall are means over suites; speed-up is over plain decoding in the same run.\n\
             Intervals hold 95 % of 2000 bootstrap resamples of prompts.\n"
                .to_string(),
        );
        parts.extend(self.differences.iter().map(|difference| format!("! {difference}\n")));
        parts.join("\n")
    }

    fn table(&self) -> Table {
        let labels = || self.columns.iter().map(|column| column.label.clone());
        let mut table =
            Table::new(std::iter::once("suite".to_string()).chain(labels()).chain(labels()).collect());
        table.add_title(1, "");
        table.add_title(self.columns.len(), "accepted length τ");
        table.add_title(self.columns.len(), "speed-up");
        let mut rows: Vec<_> = self.columns.iter().map(Column::rows).collect();
        for (i, name) in self.names().into_iter().enumerate() {
            if i == self.suites.len() {
                table.add_rule();
            }
            let metrics: Vec<Option<&Metrics>> = rows.iter_mut().map(Iterator::next).collect();
            let lengths = metrics.iter().map(|m| number(m.and_then(|m| m.accepted_length), 2));
            let speeds = metrics.iter().map(|m| factor(m.and_then(|m| m.speed_up)));
            table.row(std::iter::once(name).chain(lengths).chain(speeds).collect());
        }
        table
    }

    /// Names of the rows.
    fn names(&self) -> Vec<String> {
        let domains = self.columns.iter().take(1).flat_map(|column| &column.domains);
        let names = self.suites.iter().cloned().chain(domains.map(|domain| domain.domain.to_string()));
        names.chain(["overall".into()]).collect()
    }
}
