//! `split`: turns datasets into training conversations and held-out prompts.
//!
//! Files are read at most twice and never loaded whole (see [`passes`]). Memory holds a few batches
//! of rows and one bit per row. About 20 bytes are added for each prompt to compare, and for each
//! id in a row.

mod args;
mod assign;
mod columns;
mod contamination;
mod conversation;
mod dedup;
mod fields;
mod filter;
mod input;
mod json_rows;
mod output;
mod overlap;
mod passes;
mod path_conflicts;
mod pipeline;
mod report;
mod roles;
mod sampled;
mod shape;
mod unit;

use std::io::Write;

use deepspec_core::cli::{self, ExitWith, Verbosity};
use deepspec_core::progress::Progress;
use deepspec_core::{atomic, usage};

pub use args::Args;

use crate::rejected_rows::{self, Recorder};
use assign::{Quota, Share};
use contamination::Suites;
use deepspec_datasets::rows::{Format, Table};
use filter::{Example, RowFilter, RowMatcher, SourceFindings};
use input::Input;
use output::Outputs;
use overlap::Overlap;
use passes::FirstPass;
use report::{Rejected, SplitCounts};
use sampled::SampledSource;

/// Runs the command.
///
/// # Errors
/// With a usage error, or if a file cannot be read or written. After all outputs are written, exits
/// with code 1 if rows were rejected.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    check(args)?;
    let inputs = input::open_inputs(args, verbosity)?;
    check_files(args, &inputs)?;
    let suites = Suites::load(&args.decontaminate)?;
    if let Some((flag, path)) = path_conflicts::first_existing_output(args).filter(|_| !args.overwrite) {
        return match report::rejected_in_report(args, &inputs, &suites)? {
            Some(rejected) => {
                tracing::info!("{} is complete; nothing to do (--overwrite splits anew)", path.display());
                conclude(args, &rejected)
            }
            None => usage!(
                "{flag} {} exists and is not of this split; give another name or --overwrite",
                path.display()
            ),
        };
    }
    let outputs = Outputs::lock(&args.train_output, &args.eval_output)?;
    let (digests, split) = rayon::join(
        || inputs.iter().map(report::digest_files).collect::<anyhow::Result<Vec<_>>>(),
        || split(args, &inputs, &suites, &outputs, verbosity),
    );
    let (digests, Split { found, quotas, examples }) = (digests?, split?);
    let sources = sampled_sources(&inputs, &found, &quotas);
    let overlap = Overlap::of(&sources, args.seed);
    let report = report::build_report(args, &sources, &digests, &suites, &examples, &overlap)?;
    let path = report::report_path(&args.train_output);
    atomic::write_json(&path, &report)?;
    warn_about_changes(&inputs, &found);
    write!(cli::stdout(), "{}", report::summary_text(args, &sources, &suites, &overlap))?;
    tracing::info!("report in {}", path.display());
    let sum =
        SplitCounts::total(&sources.iter().map(|source| SplitCounts::of(source, 0)).collect::<Vec<_>>());
    conclude(args, &Rejected { rejected: sum.rejected, rows: sum.rows })
}

/// Result of reading and writing.
struct Split {
    found: Vec<SourceFindings>,
    quotas: Vec<Quota>,
    examples: Vec<Vec<Example>>,
}

fn split(
    args: &Args,
    inputs: &[Input],
    suites: &Suites,
    outputs: &Outputs<'_>,
    verbosity: Verbosity,
) -> anyhow::Result<Split> {
    let rows =
        inputs.iter().map(|input| input.source.count_rows()).collect::<anyhow::Result<Vec<usize>>>()?;
    if let Some((input, _)) = inputs.iter().zip(&rows).find(|(_, rows)| **rows == 0) {
        anyhow::bail!("{}: the dataset has no rows", input.origin.dataset);
    }
    let total = rows.iter().sum::<usize>() as u64;
    // A quota that is impossible with all rows is impossible with fewer.
    let hoped_for = quotas(args, inputs, &rows)?;
    let hoped: Vec<(usize, Quota)> = rows.into_iter().zip(hoped_for.iter().copied()).collect();
    let matcher = RowMatcher { suites, dedup: args.dedup };

    let mut recorder = Recorder::new(&args.train_output);
    let mut row_filter = RowFilter::new(&matcher, &mut recorder);
    let mut progress = Progress::new(verbosity, "reading", total, 0);
    let optimistic =
        FirstPass { outputs, seed: args.seed, quotas: &hoped, allows_overlap: args.allow_overlap };
    let (found, written) = passes::first_pass(inputs, &optimistic, matcher, &mut row_filter, &mut progress)?;
    progress.finish();
    let examples = row_filter.examples;
    recorder.finish()?;
    if written {
        return Ok(Split { found, quotas: hoped_for, examples });
    }

    check_found(args, inputs, &found)?;
    let usable: Vec<usize> = found.iter().map(|found| found.usable_rows).collect();
    let quotas = quotas(args, inputs, &usable)?;
    let mut progress = Progress::new(verbosity, "writing", total, 0);
    let sources = sampled_sources(inputs, &found, &quotas);
    let overlap = (!args.allow_overlap).then(|| Overlap::of(&sources, args.seed));
    let train: usize = quotas.iter().map(|quota| quota.train).sum();
    if train > 0 && overlap.as_ref().is_some_and(|overlap| overlap.total() == train) {
        anyhow::bail!(
            "{}: all {train} training rows ask what a held-out row asks, so that none is left to train on; --test-size 0 holds out \
             nothing, --allow-overlap keeps them",
            args.dataset
        );
    }
    passes::second_pass(&sources, outputs, args.seed, overlap.as_ref(), &mut progress)?;
    progress.finish();
    Ok(Split { found, quotas, examples })
}

/// Warns about renamed ids, dropped messages and `--role` speakers that never occur, which are
/// easily overlooked.
fn warn_about_changes(inputs: &[Input], found: &[SourceFindings]) {
    let renamed: usize = found.iter().map(|found| found.renamed.len()).sum();
    if renamed > 0 {
        tracing::warn!("{renamed} rows repeat the id of an earlier row; they are called ID~2, ID~3, …");
    }
    for (input, found) in inputs.iter().zip(found) {
        let dataset = &input.origin.dataset;
        let dropped: usize = found.dropped.values().sum();
        if dropped > 0 {
            let speakers = found.dropped.keys().take(5).map(|name| format!("`{name}`")).collect::<Vec<_>>();
            tracing::warn!(
                "{dataset}: {dropped} messages of speakers without a role were dropped ({}), and their conversations go on without \
                 them; give --role SPEAKER=ROLE, or --role SPEAKER=drop",
                speakers.join(", ")
            );
        }
        for speaker in input.roles.unused_speakers() {
            tracing::warn!("{dataset}: --role {speaker}=…: no message has this speaker");
        }
    }
}

fn check(args: &Args) -> anyhow::Result<()> {
    if !(0.0..1.0).contains(&args.test_size) {
        usage!("--test-size {}: expected a fraction, at least 0 and below 1", args.test_size);
    }
    if args.sample_size == Some(0) {
        usage!("--sample-size 0 leaves nothing to split");
    }
    if let Some(missing) = args.decontaminate.iter().find(|suite| !suite.is_file()) {
        usage!("--decontaminate {}: no such file", missing.display());
    }
    path_conflicts::check(args)
}

/// Checks that inputs can be read and outputs written, before any work.
fn check_files(args: &Args, inputs: &[Input]) -> anyhow::Result<()> {
    for file in inputs.iter().flat_map(|input| input.source.files()) {
        match file.format() {
            Format::Parquet => columns::check(&Table::open(file.shared_path())?)?,
            Format::Lines if file.is_array()? => {
                let path = file.path().display();
                anyhow::bail!(
                    "{path}: a JSON array where one object per line is expected; name the file .json"
                );
            }
            _ if !file.is_array()? => shape::check_one_row_per_line(file)?,
            _ => file.check_readable()?,
        }
    }
    path_conflicts::check_inputs(args, inputs)?;
    for path in [&args.train_output, &args.eval_output] {
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            atomic::create_dir(parent)?;
        }
    }
    Ok(())
}

/// Refuses sources without usable rows.
fn check_found(args: &Args, inputs: &[Input], found: &[SourceFindings]) -> anyhow::Result<()> {
    let mut barren = inputs.iter().zip(found).filter(|(_, found)| found.usable_rows == 0);
    let Some((input, found)) = barren.next() else { return Ok(()) };
    let (rejects, contaminated) =
        (rejected_rows::rejects_path(&args.train_output), found.contaminated.iter().sum::<usize>());
    anyhow::bail!(
        "{}: none of the {} rows is usable: {} rejected (see {}), {contaminated} contaminated, {} duplicates",
        input.origin.dataset,
        found.rows(),
        found.rejected_rows(),
        rejects.display(),
        found.duplicates
    );
}

/// Number of each source's rows on each side.
fn quotas(args: &Args, inputs: &[Input], rows: &[usize]) -> anyhow::Result<Vec<Quota>> {
    let shares = inputs.iter().zip(rows).map(|(input, &usable)| Share {
        name: input.name.as_deref(),
        weight: input.weight,
        usable,
    });
    let quotas = assign::quotas(&shares.collect::<Vec<_>>(), args.test_size, args.sample_size)?;
    let sum = |side: fn(&Quota) -> usize| quotas.iter().map(side).sum::<usize>();
    let (train, eval) = (sum(|quota| quota.train), sum(|quota| quota.eval));
    if train == 0 && eval > 0 {
        let (test_size, dataset) = (args.test_size, &args.dataset);
        usage!(
            "{dataset}: too small for --test-size {test_size}: of {eval} rows, {eval} would be held out and none left \
             to train on; give more rows or a smaller --test-size"
        );
    }
    Ok(quotas)
}

fn sampled_sources<'a>(
    inputs: &'a [Input],
    found: &'a [SourceFindings],
    quotas: &[Quota],
) -> Vec<SampledSource<'a>> {
    let sources = inputs.iter().zip(found).zip(quotas);
    sources.map(|((input, found), &quota)| SampledSource { input, found, quota }).collect()
}

/// Exits with code 1 if rows were rejected.
fn conclude(args: &Args, found: &Rejected) -> anyhow::Result<()> {
    let Rejected { rejected, rows } = found;
    if *rejected == 0 {
        return Ok(());
    }
    let (rejects, dataset) = (rejected_rows::rejects_path(&args.train_output), &args.dataset);
    let reason = format!("{rejected} of {rows} rows of {dataset} were rejected; see {}", rejects.display());
    Err(ExitWith { code: 1, reason }.into())
}
