//! Additional subcommands of every program: shell completions, man pages, and its chapter of the
//! reference manual.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::exit;

use crate::VERSION;
use anyhow::Context;
use clap::{Arg, ArgMatches, Command, Parser, value_parser};
use clap_complete::Shell;

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

/// Parses the command line of a program built with this `libtorch`. If it requests a description,
/// the function prints it and exits, like for `--help`, `--version` and errors.
pub fn parse<T: Parser>(libtorch: &str, descriptions: &[Description]) -> T {
    let mut command = described(T::command(), libtorch, descriptions);
    let matches = command.get_matches_mut();
    if let Some((name, arguments)) = matches.subcommand()
        && let Some(written) = describe(&mut command, name, arguments, descriptions)
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

fn described(command: Command, libtorch: &str, descriptions: &[Description]) -> Command {
    // A program without subcommands has required arguments, which its descriptions do not need.
    let alone = !command.has_subcommands();
    let shell = Arg::new("shell").value_name("SHELL").required(true).value_parser(value_parser!(Shell));
    let dir = Arg::new("dir").value_name("DIR").required(true).value_parser(value_parser!(PathBuf));
    command
        .version(VERSION)
        .long_version(format!("{VERSION}\nlibtorch {libtorch}"))
        .subcommand_negates_reqs(alone)
        .args_conflicts_with_subcommands(alone)
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

/// Prints the description with this name; None if there is none.
fn describe(
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
            print(&text)
        }
        "man" => man(command.clone(), arguments.get_one::<PathBuf>("dir")?),
        "reference" => print(reference(command.clone()).as_bytes()),
        other => {
            print((descriptions.iter().find(|description| description.name == other)?.text)().as_bytes())
        }
    })
}

fn man(command: Command, dir: &Path) -> anyhow::Result<()> {
    let unwritable = || format!("man pages cannot be written to {}", dir.display());
    fs::create_dir_all(dir).with_context(unwritable)?;
    clap_mangen::generate_to(command, dir).with_context(unwritable)
}

/// All commands with their arguments, as Markdown.
fn reference(command: Command) -> String {
    let options = clap_markdown::MarkdownOptions::new().show_footer(false).show_table_of_contents(false);
    clap_markdown::help_markdown_command_custom(&command.term_width(100), &options)
}

/// Ignores a closed pipe.
fn print(text: &[u8]) -> anyhow::Result<()> {
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
        described(Command::new("program").arg(needed), "2.11.0", &[])
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
    fn every_argument_is_described() {
        let text = reference(program());
        assert!(text.contains("`--config <CONFIG>`") && text.contains("`program completions`"), "{text}");
        let mut completions = vec![];
        clap_complete::generate(Shell::Bash, &mut program(), "program", &mut completions);
        assert!(String::from_utf8(completions).unwrap().contains("--config"));
    }
}
