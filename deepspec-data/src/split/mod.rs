//! `split`: a dataset becomes training conversations and held-out prompts.

mod sharegpt;
mod source;

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use deepspec_core::cli::ExitWith;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_core::{atomic, row, usage};
use serde_json::{Map, Value, json};

use crate::rejects::{self, Reject};
use source::Source;

/// What to split, how and where to.
#[derive(clap::Args)]
pub struct Args {
    /// Local .parquet or .jsonl file of ShareGPT (`from`/`value`) or OpenAI (`role`/`content`) conversations
    #[arg(long, value_name = "FILE")]
    dataset: String,
    /// Where the training conversations go; rejected rows go beside it, to F.rejected.jsonl
    #[arg(long, value_name = "F")]
    train_output: PathBuf,
    /// Where the held-out prompts go, as lists of the user's turns
    #[arg(long, value_name = "F")]
    eval_output: PathBuf,
    /// Fraction of the rows that is held out
    #[arg(long, value_name = "FRACTION", default_value_t = 0.05)]
    test_size: f64,
    /// Decides which rows are drawn and which are held out
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Draw this many rows first and leave the others out
    #[arg(long, value_name = "N")]
    sample_size: Option<usize>,
    /// Replace outputs that exist
    #[arg(long)]
    overwrite: bool,
}

/// Which side of the split a usable row is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Train,
    Eval,
    Out,
}

/// Runs the command.
///
/// # Errors
/// Usage errors, unreadable or unwritable files, and, after the work is done, exit code 1 if rows were rejected.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let source = Source::find(&args.dataset)?;
    check(args, &source)?;
    let survey = survey(&source)?;
    rejects::report(&survey.rejected, &args.train_output)?;
    let rejects = rejects::path(&args.train_output);
    match (survey.usable.len(), survey.rejected.len()) {
        (0, 0) => anyhow::bail!("{}: the file has no rows", args.dataset),
        (0, rejected) => anyhow::bail!(
            "{}: none of the {rejected} rows is usable; see {}",
            args.dataset,
            rejects.display()
        ),
        _ => {}
    }
    let sides = assign(survey.usable.len(), args);
    write(&source, &survey.usable, &sides, args)?;
    let count = |side: Side| sides.iter().filter(|&&found| found == side).count();
    let (rows, rejected) = (survey.usable.len() + survey.rejected.len(), survey.rejected.len());
    let (train, eval, out) = (count(Side::Train), count(Side::Eval), count(Side::Out));
    writeln!(
        io::stdout(),
        "{rows} rows = {train} train + {eval} eval + {out} not drawn + {rejected} rejected"
    )?;
    if rejected > 0 {
        let reason =
            format!("{rejected} of {rows} rows of {} were rejected; see {}", args.dataset, rejects.display());
        return Err(ExitWith { code: 1, reason }.into());
    }
    Ok(())
}

fn check(args: &Args, source: &Source) -> anyhow::Result<()> {
    if !(0.0..1.0).contains(&args.test_size) {
        usage!("--test-size {}: expected a fraction, at least 0 and below 1", args.test_size);
    }
    if args.sample_size == Some(0) {
        usage!("--sample-size 0 leaves nothing to split");
    }
    let outputs = [("--train-output", &args.train_output), ("--eval-output", &args.eval_output)];
    if args.train_output == args.eval_output {
        usage!("--train-output and --eval-output are the same file");
    }
    for (flag, path) in outputs {
        if path.exists() && fs::canonicalize(path).ok() == fs::canonicalize(source.path()).ok() {
            usage!("{flag} {} is the dataset itself", path.display());
        }
        if path.exists() && !args.overwrite {
            usage!("{flag} {} exists; give another name or --overwrite", path.display());
        }
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            atomic::create_dir(parent)?;
        }
    }
    Ok(())
}

/// What a first pass over the dataset found.
#[derive(Default)]
struct Survey {
    /// Indices of the usable rows, ascending.
    usable: Vec<usize>,
    /// The others.
    rejected: Vec<Reject>,
}

fn survey(source: &Source) -> anyhow::Result<Survey> {
    let (mut survey, mut seen) = (Survey::default(), HashSet::new());
    for (index, item) in source.rows()?.enumerate() {
        let item = item?;
        let id = item.row.and_then(|row| sharegpt::conversation(row, index)).and_then(|row| row::id_of(&row));
        let reason = match id {
            Ok(id) if seen.contains(&id) => format!("id `{id}` was used by an earlier row"),
            Ok(id) => {
                seen.insert(id);
                survey.usable.push(index);
                continue;
            }
            Err(reason) => reason,
        };
        survey.rejected.push(Reject { file: source.path().into(), line: item.line, reason });
    }
    Ok(survey)
}

/// Draws the sample and, of it, the held-out rows; both depend on the seed and the number of rows alone.
fn assign(rows: usize, args: &Args) -> Vec<Side> {
    let sampled = args.sample_size.unwrap_or(rows).min(rows);
    let held_out = (sampled as f64 * args.test_size).ceil() as usize;
    let mut sides = vec![Side::Out; rows];
    for (rank, row) in Stream::new(args.seed, "split")
        .permutation(rows, Purpose::Split)
        .into_iter()
        .take(sampled)
        .enumerate()
    {
        sides[row] = if rank < held_out { Side::Eval } else { Side::Train };
    }
    sides
}

/// Writes both outputs in the order of the dataset; they appear when both are whole.
fn write(source: &Source, usable: &[usize], sides: &[Side], args: &Args) -> anyhow::Result<()> {
    let mut sides = usable.iter().zip(sides).peekable();
    let mut rows = source.rows()?.enumerate();
    atomic::replace(&args.train_output, |train| {
        let eval_written = atomic::replace(&args.eval_output, |eval| {
            rows.try_for_each(|(index, item)| match (sides.next_if(|&(&usable, _)| usable == index), item) {
                (_, Err(error)) => Err(io::Error::other(error)),
                (Some((_, &side)), Ok(source::Item { row: Ok(row), .. })) => {
                    write_row(train, eval, side, row, index)
                }
                _ => Ok(()),
            })
        });
        eval_written.map_err(io::Error::other)
    })?;
    Ok(())
}

fn write_row(
    train: &mut BufWriter<File>,
    eval: &mut BufWriter<File>,
    side: Side,
    row: Map<String, Value>,
    index: usize,
) -> io::Result<()> {
    if side == Side::Out {
        return Ok(());
    }
    let row = sharegpt::conversation(row, index).map_err(io::Error::other)?;
    match side {
        Side::Eval => write_line(eval, &json!({"id": row["id"], "turns": sharegpt::user_turns(&row)})),
        _ => write_line(train, &Value::Object(row)),
    }
}

fn write_line(file: &mut BufWriter<File>, value: &Value) -> io::Result<()> {
    serde_json::to_writer(&mut *file, value)?;
    file.write_all(b"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_follow_the_seed_and_the_fractions() {
        let args = |seed, sample_size| Args {
            dataset: String::new(),
            train_output: PathBuf::new(),
            eval_output: PathBuf::new(),
            test_size: 0.05,
            seed,
            sample_size,
            overwrite: false,
        };
        let count = |sides: &[Side], side| sides.iter().filter(|&&found| found == side).count();
        let all = assign(101, &args(42, None));
        assert_eq!((count(&all, Side::Train), count(&all, Side::Eval)), (95, 6));
        assert_eq!(all, assign(101, &args(42, None)));
        assert_ne!(all, assign(101, &args(43, None)));
        let some = assign(101, &args(42, Some(20)));
        assert_eq!(
            (count(&some, Side::Train), count(&some, Side::Eval), count(&some, Side::Out)),
            (19, 1, 81)
        );
    }
}
