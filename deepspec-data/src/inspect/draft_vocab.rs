//! `draft-vocab`: chooses the tokens of a reduced vocabulary by their frequency in the training data.

use std::io::Write;
use std::path::PathBuf;

use deepspec_checkpoint::DraftVocab;
use deepspec_core::cli::{self, Verbosity};
use deepspec_core::progress::Progress;
use deepspec_core::{jsonl, usage};
use rayon::prelude::*;

use super::MaskArgs;
use super::row::{RowOutcome, inspect_line};
use super::settings::MaskSettings;
use crate::same_file;

/// Rows per batch.
const LINES_PER_BATCH: usize = 128;

/// Arguments of `draft-vocab`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    mask: MaskArgs,
    /// Number of tokens that the drafter can draft
    #[arg(long, default_value_t = 32_000, value_name = "N")]
    size: usize,
    /// The safetensors file to write, with the maps d2t and t2d
    #[arg(long, value_name = "F")]
    output: PathBuf,
    /// Replace a file that is there
    #[arg(long)]
    overwrite: bool,
}

/// Supervised tokens of the rows.
struct TokenCounts {
    /// Occurrences of each of the target's tokens.
    counts: Vec<u64>,
    rows: usize,
    /// Rows without a usable conversation or answer.
    skipped: usize,
}

/// Runs the command.
///
/// # Errors
/// With a usage error, if the size is not below the target's vocabulary, or if the file exists and differs.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    args.mask.check()?;
    if args.mask.input.iter().any(|input| same_file::is_same_file(input, &args.output)) {
        usage!("--output {} is also an input", args.output.display());
    }
    if let Some(folder) =
        args.output.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir())
    {
        usage!("--output {}: there is no folder {}", args.output.display(), folder.display());
    }
    let settings = MaskSettings::new(&args.mask, verbosity)?;
    let Some(vocab_size) = settings.vocab_size else {
        usage!("--model: its config.json gives no vocab_size");
    };
    if args.size == 0 || args.size >= vocab_size {
        usage!("--size {}: expected a size from 1 to {}, below the target's", args.size, vocab_size - 1);
    }
    let TokenCounts { counts, rows, skipped } = count_tokens(&args.mask, &settings, vocab_size, verbosity)?;
    let total: u64 = counts.iter().sum();
    if total == 0 {
        usage!("--input: no row has a supervised token");
    }
    let Some(vocab) = DraftVocab::most_frequent(&counts, args.size) else {
        usage!("--size {}: the target has {vocab_size} tokens", args.size);
    };
    if args.output.exists() && !args.overwrite {
        if !DraftVocab::read(&args.output).is_ok_and(|there| there == vocab) {
            usage!("--output {} exists and is another file; --overwrite replaces it", args.output.display());
        }
        tracing::info!("{} is complete; nothing to do", args.output.display());
    } else {
        vocab.write(&args.output)?;
    }
    let covered: u64 = vocab.tokens().iter().map(|&token| counts[token as usize]).sum();
    let seen = counts.iter().filter(|&&count| count > 0).count();
    let mut out = cli::stdout();
    writeln!(out, "tokens    {} of {vocab_size}; {seen} occur", args.size)?;
    writeln!(out, "covered   {:.2} % of {total} supervised tokens", 100.0 * covered as f64 / total as f64)?;
    writeln!(out, "rows      {rows} counted, {skipped} skipped")?;
    writeln!(out, "file      {}", args.output.display())?;
    Ok(out.flush()?)
}

fn count_tokens(
    args: &MaskArgs,
    settings: &MaskSettings,
    vocab_size: usize,
    verbosity: Verbosity,
) -> anyhow::Result<TokenCounts> {
    let mut found = TokenCounts { counts: vec![0; vocab_size], rows: 0, skipped: 0 };
    let mut progress = Progress::new(verbosity, "rows", jsonl::count_lines(&args.input)?, 0);
    for batch in jsonl::line_batches_of_files(&args.input, LINES_PER_BATCH) {
        let (file, batch) = batch?;
        let outcomes: Vec<RowOutcome> =
            batch.into_par_iter().map(|line| inspect_line(settings, line.parse(file))).collect();
        progress.add(outcomes.len() as u64, String::new);
        for outcome in outcomes {
            let RowOutcome::Row(row) = outcome else {
                found.skipped += 1;
                continue;
            };
            found.rows += 1;
            let tokens = row.supervised.input_ids.iter().zip(&row.supervised.loss_mask);
            for (&id, _) in tokens.filter(|(_, is_supervised)| **is_supervised) {
                if let Some(count) = found.counts.get_mut(id as usize) {
                    *count += 1;
                }
            }
        }
    }
    progress.finish();
    Ok(found)
}
