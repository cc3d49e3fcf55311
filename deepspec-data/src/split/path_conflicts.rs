//! Checks the output paths, and that no output replaces an input or another output.

use std::path::{Path, PathBuf};

use deepspec_core::{atomic, env, usage};

use super::args::Args;
use super::input::Input;
use super::report;
use crate::rejected_rows;
use crate::same_file::{candidate_paths, resolve_path};

/// Checks the output paths alone, before any file is read.
///
/// # Errors
/// With a usage error if an output is not a separate file.
pub fn check(args: &Args) -> anyhow::Result<()> {
    for (flag, path) in outputs(args) {
        let text = path.as_os_str().as_encoded_bytes();
        if path.is_dir() || path.file_name().is_none() || text.ends_with(b"/") {
            usage!("{flag} {} is a folder; give the name of a file", path.display());
        }
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        if ["gz", "zst"].iter().any(|packed| extension.eq_ignore_ascii_case(packed)) {
            usage!(
                "{flag} {}: the output is plain text; give a name without .{extension} and compress it afterwards",
                path.display()
            );
        }
    }
    let (train, eval) = (&args.train_output, &args.eval_output);
    if resolve_path(train) == resolve_path(eval) {
        usage!("--train-output and --eval-output are the same file");
    }
    let aside = atomic::partial_path;
    for own in [train.clone(), rejected_rows::rejects_path(train), report::report_path(train)] {
        let clash = |a: &Path, b: &Path| resolve_path(a) == resolve_path(b);
        if clash(eval, &own) || clash(eval, &aside(&own)) || clash(&aside(eval), &own) {
            usage!("--eval-output {} is where {} is written", eval.display(), own.display());
        }
    }
    let suites = args.decontaminate.iter().map(|suite| ("a file of --decontaminate", suite.as_path()));
    refuse_to_replace(args, suites)
}

/// Checks that the outputs would not replace the inputs.
pub fn check_inputs(args: &Args, inputs: &[Input]) -> anyhow::Result<()> {
    let given = env::expand_home(&args.dataset);
    let files = inputs.iter().flat_map(|input| input.source.files()).map(|file| file.path());
    let files = files.chain([given.as_path()]).map(|file| ("the dataset itself", file));
    refuse_to_replace(args, files)
}

/// The first output that exists, with its flag.
pub fn first_existing_output(args: &Args) -> Option<(&'static str, &PathBuf)> {
    outputs(args).into_iter().find(|(_, path)| path.exists())
}

fn outputs(args: &Args) -> [(&'static str, &PathBuf); 2] {
    [("--train-output", &args.train_output), ("--eval-output", &args.eval_output)]
}

/// Refuses outputs, and files beside them, that would replace input files.
fn refuse_to_replace<'a>(
    args: &Args,
    read: impl Iterator<Item = (&'static str, &'a Path)>,
) -> anyhow::Result<()> {
    let train = &args.train_output;
    let mut written: Vec<(String, Vec<PathBuf>)> = outputs(args)
        .iter()
        .map(|(flag, path)| (format!("{flag} {}", path.display()), candidate_paths(path)))
        .collect();
    for beside in [rejected_rows::rejects_path(train), report::report_path(train)] {
        written.push((
            format!("--train-output {}: {}", train.display(), beside.display()),
            candidate_paths(&beside),
        ));
    }
    for (what, file) in read {
        let file = candidate_paths(file);
        if let Some((name, _)) = written.iter().find(|(_, own)| own.iter().any(|own| file.contains(own))) {
            usage!("{name} is {what}");
        }
    }
    Ok(())
}
