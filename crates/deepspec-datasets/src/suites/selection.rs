//! Selects suites from command-line arguments.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::anyhow;
use deepspec_core::{env, usage};

use crate::suites::description::{self, public_suites};
use crate::suites::plan::{RowSource, SuitePlan};
use crate::suites::suite::Suite;

/// Command-line arguments that select suites.
pub struct SuiteSelection<'a> {
    /// Suite names.
    pub suites: &'a [String],
    /// Description files.
    pub descriptions: &'a [PathBuf],
    /// `NAME=FILE`: files with the rows of suite NAME, instead of the hub.
    pub sources: &'a [String],
}

/// Plans of the suites named by any argument, or of all public suites.
///
/// # Errors
/// Fails with a usage error if a name is unknown or occurs twice, a description is unusable, or a
/// file does not exist.
pub fn select_plans(args: &SuiteSelection) -> anyhow::Result<Vec<SuitePlan>> {
    let mut plans: Vec<SuitePlan> = vec![];
    for path in args.descriptions {
        let plan = description::read_plan(path)?;
        if Suite::find_builtin(&plan.name).is_some() {
            let (path, name) = (path.display(), &plan.name);
            usage!("{path}: `name`: {name} is a suite that needs no description; choose another name");
        }
        if plans.iter().any(|other| other.name == plan.name) {
            usage!("--description {}: `{}` is described twice", path.display(), plan.name);
        }
        plans.push(plan);
    }
    let sources = parse_sources(args.sources)?;
    let everything = args.suites.is_empty() && args.descriptions.is_empty() && sources.is_empty();
    let named = args.suites.iter().chain(sources.keys());
    for name in named {
        if public_suites().iter().all(|suite| suite.name != *name)
            && plans.iter().all(|plan| plan.name != *name)
        {
            let known: Vec<&str> = public_suites().iter().map(|suite| suite.name.as_str()).collect();
            usage!(
                "`{name}` is no public suite; those are {}; one of your own needs its --description",
                known.join(", ")
            );
        }
    }
    let asked = |name: &str| {
        everything || args.suites.iter().any(|suite| suite == name) || sources.contains_key(name)
    };
    let public = public_suites().iter().filter(|suite| asked(&suite.name));
    let public =
        public.map(|suite| suite.public_plan().map_err(|(key, problem)| anyhow!("`{key}`: {problem}")));
    let mut plans: Vec<SuitePlan> = public.chain(plans.into_iter().map(Ok)).collect::<anyhow::Result<_>>()?;
    for plan in &mut plans {
        if let Some(files) = sources.get(&plan.name) {
            plan.source = RowSource::Files(files.clone());
        }
    }
    Ok(plans)
}

/// The source files of each suite, by its name.
fn parse_sources(given: &[String]) -> anyhow::Result<BTreeMap<String, Vec<PathBuf>>> {
    let mut sources = BTreeMap::<String, Vec<PathBuf>>::new();
    for text in given {
        let Some((name, file)) =
            text.split_once('=').filter(|(name, file)| !name.is_empty() && !file.is_empty())
        else {
            usage!("--source {text}: expected NAME=FILE");
        };
        let path = env::expand_home(file);
        if !path.is_file() {
            usage!("--source {text}: {file} is no file");
        }
        sources.entry(name.into()).or_default().push(path);
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_names_that_everybody_has_are_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.yaml");
        let text = |name: &str| format!("name: {name}\ndomain: code\ndataset: a/b\nsplit: test\nturns: q\n");
        let asked = || {
            select_plans(&SuiteSelection {
                suites: &[],
                descriptions: std::slice::from_ref(&path),
                sources: &[],
            })
        };
        fs::write(&path, text("mine")).unwrap();
        assert_eq!(asked().unwrap().len(), 1);
        for name in ["gsm8k", "smoke-math"] {
            fs::write(&path, text(name)).unwrap();
            let problem = asked().err().unwrap().to_string();
            assert!(
                problem.contains(&format!("`name`: {name} is a suite that needs no description")),
                "{problem}"
            );
        }
    }
}
