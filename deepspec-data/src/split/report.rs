//! The report of a split: one line on the terminal, and a JSON file next to the output.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use deepspec_core::atomic::FileError;
use deepspec_core::digest;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::Serialize;
use serde_json::{Value, json};

use super::args::Args;
use super::contamination::Suites;
use super::filter::{Example, SourceFindings};
use super::input::{Input, Origin};
use super::overlap::Overlap;
use super::roles::RoleTarget;
use super::sampled::SampledSource;
use crate::rejected_rows;

/// Version of the report's format.
const VERSION: u32 = 1;

/// Path of the report for `output`.
pub fn report_path(output: &Path) -> PathBuf {
    rejected_rows::with_appended_suffix(output, ".report.json")
}

/// Row counts; the parts add up to `rows`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SplitCounts {
    /// Rows read.
    pub rows: usize,
    /// Training conversations.
    pub train: usize,
    /// Held-out prompts.
    pub eval: usize,
    /// Training rows dropped because a held-out row has the same prompt.
    pub overlap: usize,
    /// Usable rows that were not sampled.
    pub not_drawn: usize,
    /// Rows with an earlier row's prompt.
    pub duplicates: usize,
    /// Rows with a prompt of an evaluation suite.
    pub contaminated: usize,
    /// Unusable rows.
    pub rejected: usize,
}

impl SplitCounts {
    /// Counts of one source, with `overlap` training rows dropped for their held-out prompts.
    pub fn of(drawn: &SampledSource<'_>, overlap: usize) -> Self {
        let SampledSource { found, quota, .. } = drawn;
        Self {
            rows: found.rows(),
            train: quota.train - overlap,
            eval: quota.eval,
            overlap,
            not_drawn: found.usable_rows - quota.train - quota.eval,
            duplicates: found.duplicates,
            contaminated: found.contaminated.iter().sum(),
            rejected: found.rejected_rows(),
        }
    }

    /// Counts of all sources together.
    pub fn total(sums: &[Self]) -> Self {
        sums.iter().fold(Self::default(), |a, b| Self {
            rows: a.rows + b.rows,
            train: a.train + b.train,
            eval: a.eval + b.eval,
            overlap: a.overlap + b.overlap,
            not_drawn: a.not_drawn + b.not_drawn,
            duplicates: a.duplicates + b.duplicates,
            contaminated: a.contaminated + b.contaminated,
            rejected: a.rejected + b.rejected,
        })
    }

    /// The counts as a line, without counts of disabled filters.
    pub fn line(&self, args: &Args) -> String {
        let Self { rows, train, eval, overlap, not_drawn, duplicates, contaminated, rejected } = self;
        let mut line = format!("{rows} rows = {train} train + {eval} eval + {not_drawn} not drawn");
        if *overlap > 0 {
            line = format!("{line} + {overlap} that ask what is held out");
        }
        if args.dedup {
            line = format!("{line} + {duplicates} duplicates");
        }
        if !args.decontaminate.is_empty() {
            line = format!("{line} + {contaminated} contaminated");
        }
        format!("{line} + {rejected} rejected")
    }
}

/// The counts of each source.
pub fn count_sources(args: &Args, sources: &[SampledSource<'_>], overlap: &Overlap) -> Vec<SplitCounts> {
    let left_out = |rows: usize| if args.allow_overlap { 0 } else { rows };
    sources.iter().zip(&overlap.rows).map(|(source, &rows)| SplitCounts::of(source, left_out(rows))).collect()
}

/// The lines on the terminal.
pub fn summary_text(
    args: &Args,
    sources: &[SampledSource<'_>],
    suites: &Suites,
    overlap: &Overlap,
) -> String {
    let sums = count_sources(args, sources, overlap);
    let mut text = SplitCounts::total(&sums).line(args) + "\n";
    for (source, sum) in sources.iter().zip(&sums) {
        if let Some(name) = &source.input.name {
            text += &format!("{name}: {}\n", sum.line(args));
        }
    }
    let hits = suites.suites().iter().enumerate().map(|(suite, found)| {
        let rows = sources.iter().map(|source| source.found.contaminated[suite]).sum::<usize>();
        (found.path.display().to_string(), rows)
    });
    let hits: BTreeMap<String, usize> = hits.filter(|(_, rows)| *rows > 0).collect();
    if !hits.is_empty() {
        text += &format!("contaminated: {}\n", counts(&hits));
    }
    if args.allow_overlap && overlap.total() > 0 {
        text += &format!("{} training rows ask what a held-out row asks\n", overlap.total());
    }
    let dropped = dropped(sources);
    if !dropped.is_empty() {
        text +=
            &format!("messages dropped, by speaker: {}; --role SPEAKER=ROLE keeps them\n", counts(&dropped));
    }
    text
}

fn counts(numbers: &BTreeMap<String, usize>) -> String {
    let parts: Vec<String> = numbers.iter().map(|(name, number)| format!("{number} {name}")).collect();
    parts.join(", ")
}

fn dropped(sources: &[SampledSource<'_>]) -> BTreeMap<String, usize> {
    let mut all = BTreeMap::new();
    for (speaker, messages) in sources.iter().flat_map(|source| &source.found.dropped) {
        *all.entry(speaker.clone()).or_default() += messages;
    }
    all
}

/// Path, size and digest of a file.
#[derive(Serialize)]
pub struct FileDigest {
    path: PathBuf,
    bytes: u64,
    sha256: String,
}

/// Digests of all files of a source.
pub fn digest_files(input: &Input) -> anyhow::Result<Vec<FileDigest>> {
    let one = |file: &deepspec_datasets::rows::DataFile| {
        let (bytes, sha256) = (file.size_bytes()?, digest::sha256_of_file(file.path())?);
        Ok(FileDigest { path: file.path().to_path_buf(), bytes, sha256 })
    };
    input.source.files().par_iter().map(one).collect()
}

/// One source in the report.
#[derive(Serialize)]
struct SourceReport<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(flatten)]
    origin: &'a Origin,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight: Option<f64>,
    roles: &'a BTreeMap<String, RoleTarget>,
    files: &'a [FileDigest],
    #[serde(flatten)]
    sum: SplitCounts,
    rejected_by_reason: BTreeMap<&'static str, usize>,
    contaminated_by_suite: BTreeMap<String, usize>,
    dropped_messages: &'a BTreeMap<String, usize>,
    renamed: usize,
}

/// Number of unusable rows.
pub struct Rejected {
    /// Unusable rows.
    pub rejected: usize,
    /// All rows.
    pub rows: usize,
}

/// The rejected rows in the existing report, if it has the same arguments, inputs and suites and
/// the outputs are unchanged. None otherwise.
///
/// # Errors
/// If a file cannot be read.
pub fn rejected_in_report(
    args: &Args,
    inputs: &[Input],
    suites: &Suites,
) -> anyhow::Result<Option<Rejected>> {
    if [&args.train_output, &args.eval_output].iter().any(|path| !path.is_file()) {
        return Ok(None);
    }
    let Ok(text) = std::fs::read_to_string(report_path(&args.train_output)) else { return Ok(None) };
    let report: Value = serde_json::from_str(&text).unwrap_or_default();
    let asked = output_arguments(args);
    let asks_the_same = asked.as_object().into_iter().flatten().all(|(key, value)| report[key] == *value);
    let list = |key: &str| report[key].as_array().cloned().unwrap_or_default();
    let (sources, filters) = (list("sources"), list("suites"));
    let is_whole = outputs(args).is_ok_and(|files| report["outputs"] == json!(files));
    if !asks_the_same || !is_whole || sources.len() != inputs.len() || filters.len() != suites.suites().len()
    {
        return Ok(None);
    }
    let same_filters =
        filters.iter().zip(suites.suites()).all(|(kept, suite)| kept["sha256"] == json!(suite.digest));
    for (kept, input) in sources.iter().zip(inputs) {
        let weight = input.name.as_ref().map(|_| input.weight);
        let same_source = kept["name"].as_str() == input.name.as_deref()
            && kept["roles"] == json!(input.given)
            && kept["weight"].as_f64() == weight
            && kept["files"] == json!(digest_files(input)?);
        if !(same_source && same_filters) {
            return Ok(None);
        }
    }
    let count = |key: &str| report["total"][key].as_u64().unwrap_or(0) as usize;
    Ok(Some(Rejected { rejected: count("rejected"), rows: count("rows") }))
}

/// Digests of both outputs.
fn outputs(args: &Args) -> Result<[FileDigest; 2], FileError> {
    let one = |path: &Path| {
        let path = std::path::absolute(path).map_err(FileError::at("finding", path))?;
        let bytes = std::fs::metadata(&path).map_err(FileError::at("reading", &path))?.len();
        Ok(FileDigest { bytes, sha256: digest::sha256_of_file(&path)?, path })
    };
    Ok([one(&args.train_output)?, one(&args.eval_output)?])
}

/// The arguments that determine the outputs.
fn output_arguments(args: &Args) -> Value {
    json!({
        "version": VERSION,
        "seed": args.seed,
        "test_size": args.test_size,
        "sample_size": args.sample_size,
        "dedup": args.dedup,
        "drop_system": args.drop_system,
        "allow_overlap": args.allow_overlap,
    })
}

/// The whole report.
///
/// # Errors
/// If an output cannot be read.
pub fn build_report(
    args: &Args,
    sources: &[SampledSource<'_>],
    digests: &[Vec<FileDigest>],
    suites: &Suites,
    examples: &[Vec<Example>],
    overlap: &Overlap,
) -> anyhow::Result<Value> {
    let sums = count_sources(args, sources, overlap);
    let reports = sources.iter().zip(&sums).zip(digests).map(|((source, sum), files)| SourceReport {
        name: source.input.name.as_deref(),
        origin: &source.input.origin,
        weight: source.input.name.as_ref().map(|_| source.input.weight),
        roles: &source.input.given,
        files,
        sum: *sum,
        rejected_by_reason: by_reason(source.found),
        contaminated_by_suite: by_suite(source.found, suites),
        dropped_messages: &source.found.dropped,
        renamed: source.found.renamed.len(),
    });
    let suites = suites.suites().iter().zip(examples).enumerate().map(|(index, (suite, examples))| {
        let rows = sources.iter().map(|source| source.found.contaminated[index]).sum::<usize>();
        json!({"file": suite.path, "sha256": suite.digest, "prompts": suite.rows, "contaminated": rows,
            "examples": examples.iter().map(example).collect::<Vec<_>>()})
    });
    let mut report = output_arguments(args);
    let found = json!({
        "tool_version": deepspec_core::VERSION,
        "outputs": outputs(args)?,
        "train_rows_that_ask_what_is_held_out": overlap.total(),
        "total": SplitCounts::total(&sums),
        "sources": reports.collect::<Vec<_>>(),
        "suites": suites.collect::<Vec<_>>(),
    });
    if let (Some(report), Value::Object(found)) = (report.as_object_mut(), found) {
        report.extend(found);
    }
    Ok(report)
}

fn by_reason(found: &SourceFindings) -> BTreeMap<&'static str, usize> {
    found.rejected.iter().map(|(kind, rows)| (kind.name(), *rows)).collect()
}

fn by_suite(found: &SourceFindings, suites: &Suites) -> BTreeMap<String, usize> {
    let names = suites.suites().iter().map(|suite| suite.path.display().to_string());
    names.zip(found.contaminated.iter().copied()).collect()
}

fn example(example: &Example) -> Value {
    let Example { file, line, hit } = example;
    json!({"file": &**file, "line": line, "suite_line": hit.line, "shared": hit.shared.name()})
}
