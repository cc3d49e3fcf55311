//! Additional subcommands of every program: shell completions, man pages, and its chapter of the
//! reference manual.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::exit;

use crate::VERSION;
use anyhow::Context;
use clap::error::{ContextKind, ContextValue, ErrorKind as ClapErrorKind};
use clap::{Arg, ArgMatches, Command, Parser, value_parser};
use clap_complete::Shell;

/// Renamed flags, as (old, new). An old flag is refused, and the error names the new one.
const RENAMED_FLAGS: [(&str, &str); 17] = [
    ("--slots", "--max-num-seqs"),
    ("--requests", "--max-num-seqs"),
    ("--max-context", "--max-model-len"),
    ("--context", "--context-len"),
    ("--contexts", "--context-lens"),
    ("--batch", "--batch-size"),
    ("--lanes", "--replicas"),
    ("--draft-in-turn", "--sequential-draft"),
    ("--profile", "--torch-profile"),
    ("--patience", "--server-wait"),
    ("--attempts", "--max-attempts"),
    ("--embedded", "--local-model"),
    ("--link", "--interconnect"),
    ("--held-out", "--validate-on"),
    ("--matrices", "--dtype"),
    ("--fold", "--write-folded"),
    ("--last", "--final-states"),
];

/// Renamed values of flags, as (old, new).
const RENAMED_VALUES: [(&str, &str); 3] = [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")];

/// An additional text that a program can print, with its own subcommand.
pub struct Description {
    /// Name of the subcommand.
    pub name: &'static str,
    /// Description of the subcommand.
    pub about: &'static str,
    /// Whether `--help` omits it.
    pub hidden: bool,
    /// The text to print.
    pub text: fn() -> String,
}

/// Parses the command line; `libtorch` is shown by `--version`. A subcommand of `descriptions`
/// prints its text and exits, like `--help`.
pub fn parse<T: Parser>(libtorch: &str, descriptions: &[Description]) -> T {
    let mut command = add_standard_subcommands(T::command(), libtorch, descriptions);
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let matches = command
        .try_get_matches_from_mut(&arguments)
        .unwrap_or_else(|error| renamed_argument_error(&command, &arguments, &error).unwrap_or(error).exit());
    if let Some((name, arguments)) = matches.subcommand()
        && let Some(written) = print_description(&mut command, name, arguments, descriptions)
    {
        exit(match written {
            Ok(()) => 0,
            Err(error) => {
                let _ = writeln!(io::stderr(), "ERROR {error:#}");
                1
            }
        });
    }
    T::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// Returns the error for a renamed flag or value. None if `error` has another cause, or the command
/// in `arguments` lacks the new name.
fn renamed_argument_error(
    command: &Command,
    arguments: &[OsString],
    error: &clap::Error,
) -> Option<clap::Error> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let new_name =
        |names: &[(&str, &'static str)], old: &str| Some(names.iter().find(|(name, _)| *name == old)?.1);
    let command = selected_subcommand(command, arguments);
    let (old, new) = match error.kind() {
        ClapErrorKind::UnknownArgument => {
            let old = text(ContextKind::InvalidArg)?;
            let new = new_name(&RENAMED_FLAGS, old)?;
            command.get_arguments().find(|arg| arg.get_long() == new.strip_prefix("--"))?;
            (old, new)
        }
        ClapErrorKind::InvalidValue => {
            let old = text(ContextKind::InvalidValue)?;
            let new = new_name(&RENAMED_VALUES, old)?;
            match error.get(ContextKind::ValidValue) {
                Some(ContextValue::Strings(values)) if values.iter().any(|value| value == new) => (old, new),
                _ => return None,
            }
        }
        _ => return None,
    };
    Some(command.clone().error(error.kind(), format!("`{old}` is now `{new}`")))
}

/// The innermost subcommand that the arguments select. It assumes that flags before a subcommand's
/// name take no value.
fn selected_subcommand<'a>(mut command: &'a Command, arguments: &[OsString]) -> &'a Command {
    let words = arguments.iter().skip(1).filter(|argument| !argument.to_string_lossy().starts_with('-'));
    for word in words {
        match command.find_subcommand(word) {
            Some(subcommand) => command = subcommand,
            None => break,
        }
    }
    command
}

fn add_standard_subcommands(command: Command, libtorch: &str, descriptions: &[Description]) -> Command {
    // A program without subcommands has required arguments, which its descriptions do not need.
    let alone = !command.has_subcommands();
    let shell = Arg::new("shell").value_name("SHELL").required(true).value_parser(value_parser!(Shell));
    let dir = Arg::new("dir").value_name("DIR").required(true).value_parser(value_parser!(PathBuf));
    let command = match alone {
        true => command.subcommand_negates_reqs(true).args_conflicts_with_subcommands(true),
        false => command,
    };
    command
        .version(VERSION)
        .long_version(format!("{VERSION}\nlibtorch {libtorch}"))
        .subcommand(
            Command::new("completions")
                .about("Write what a shell needs to complete this program's arguments")
                .arg(shell),
        )
        .subcommand(Command::new("man").about("Write a man page of each command into a folder").arg(dir))
        .subcommand(
            Command::new("reference").about("Write this program's chapter of the reference").hide(true),
        )
        .subcommands(descriptions.iter().map(|description| {
            Command::new(description.name).about(description.about).hide(description.hidden)
        }))
}

/// Prints the text of the subcommand `name`; None if no description has that name.
fn print_description(
    command: &mut Command,
    name: &str,
    arguments: &ArgMatches,
    descriptions: &[Description],
) -> Option<anyhow::Result<()>> {
    let program = command.get_name().to_string();
    Some(match name {
        "completions" => {
            let shell = arguments.get_one::<Shell>("shell")?;
            let mut text = vec![];
            clap_complete::generate(*shell, command, program, &mut text);
            write_to_stdout(&text)
        }
        "man" => write_man_pages(command.clone(), arguments.get_one::<PathBuf>("dir")?),
        "reference" => write_to_stdout(reference_markdown(command.clone()).as_bytes()),
        other => write_to_stdout(
            (descriptions.iter().find(|description| description.name == other)?.text)().as_bytes(),
        ),
    })
}

fn write_man_pages(command: Command, dir: &Path) -> anyhow::Result<()> {
    let unwritable = || format!("man pages cannot be written to {}", dir.display());
    fs::create_dir_all(dir).with_context(unwritable)?;
    clap_mangen::generate_to(command, dir).with_context(unwritable)
}

/// All commands with their arguments, as Markdown.
fn reference_markdown(command: Command) -> String {
    let options = clap_markdown::MarkdownOptions::new().show_footer(false).show_table_of_contents(false);
    clap_markdown::help_markdown_command_custom(&command.term_width(100), &options)
}

/// Writes `text` to standard output and ignores a closed pipe.
fn write_to_stdout(text: &[u8]) -> anyhow::Result<()> {
    match io::stdout().write_all(text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> Command {
        let needed = Arg::new("config").long("config").required(true);
        add_standard_subcommands(Command::new("program").arg(needed), "2.11.0", &[])
    }

    #[test]
    fn descriptions_are_there_without_what_the_work_needs() {
        let read = |arguments: &[&str]| program().try_get_matches_from([&["program"], arguments].concat());
        assert!(read(&[]).is_err());
        assert_eq!(read(&["--config", "a"]).unwrap().subcommand_name(), None);
        assert_eq!(read(&["completions", "bash"]).unwrap().subcommand_name(), Some("completions"));
        assert!(read(&["completions", "no-shell"]).is_err());
        assert!(read(&["--config", "a", "completions", "bash"]).is_err());
    }

    #[test]
    fn renamed_flags_and_values_are_refused_with_the_new_name() {
        let dtype = Arg::new("dtype").long("dtype").value_parser(["auto", "float32"]);
        let serve = Command::new("serve").arg(Arg::new("seqs").long("max-num-seqs")).arg(dtype);
        let mut command = Command::new("program")
            .arg(Arg::new("quiet").long("quiet").action(clap::ArgAction::SetTrue))
            .subcommand(serve)
            .subcommand(Command::new("check"));
        let mut refused = |arguments: &[&str]| {
            let arguments: Vec<OsString> =
                ["program"].iter().chain(arguments).map(|argument| argument.into()).collect();
            let error = command.try_get_matches_from_mut(&arguments).unwrap_err();
            renamed_argument_error(&command, &arguments, &error)
                .map(|error| (error.exit_code(), error.to_string()))
        };
        for arguments in [&["serve", "--slots", "4"][..], &["--quiet", "serve", "--slots=4"]] {
            let (code, text) = refused(arguments).unwrap();
            assert!(code == 2 && text.starts_with("error: `--slots` is now `--max-num-seqs`\n"), "{text}");
        }
        let (code, text) = refused(&["serve", "--dtype", "f32"]).unwrap();
        assert!(code == 2 && text.starts_with("error: `f32` is now `float32`\n"), "{text}");
        let others = [
            &["check", "--slots", "4"][..],
            &["--slots", "4", "serve"],
            &["serve", "--unknown"],
            &["serve", "--dtype", "bf16"],
        ];
        assert!(others.iter().all(|arguments| refused(arguments).is_none()));
    }

    #[test]
    fn every_argument_is_described() {
        let text = reference_markdown(program());
        assert!(text.contains("`--config <CONFIG>`") && text.contains("`program completions`"), "{text}");
        let mut completions = vec![];
        clap_complete::generate(Shell::Bash, &mut program(), "program", &mut completions);
        assert!(String::from_utf8(completions).unwrap().contains("--config"));
    }
}
