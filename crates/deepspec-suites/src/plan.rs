//! Which suites are to be written, and from what.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::anyhow;
use deepspec_core::{env, usage};

use crate::description::{self, public};
use crate::suite::Domain;
use crate::turns::Form;

/// A suite to be written.
pub struct Plan {
    /// Its name.
    pub name: String,
    /// Its domain.
    pub domain: Domain,
    /// Rows that are scored, if there are more.
    pub cap: Option<usize>,
    /// What the record says of the conversion.
    pub converter: String,
    /// How rows become prompts.
    pub form: Form,
    /// Where the rows come from.
    pub wanted: Wanted,
}

/// Where rows are wanted from.
pub enum Wanted {
    /// A dataset on the hub.
    Hub {
        /// `owner/name`.
        dataset: String,
        /// Branch, tag or commit; the main branch without one.
        revision: Option<String>,
        /// Where in the dataset.
        place: Place,
    },
    /// Files on disk, in this order.
    Files(Vec<PathBuf>),
}

/// Where a dataset of the hub keeps the rows.
pub enum Place {
    /// A split, of the only configuration or of the one named.
    Split(Option<String>, String),
    /// Files whose paths match these patterns, pattern by pattern.
    Files(Vec<String>),
}

/// What is asked for on a command line.
pub struct Asked<'a> {
    /// Names.
    pub suites: &'a [String],
    /// Files that describe suites.
    pub descriptions: &'a [PathBuf],
    /// `NAME=FILE`: files to read rows from, in place of the hub.
    pub sources: &'a [String],
}

/// The suites that are named in any way, or all public ones.
///
/// # Errors
/// Usage errors: unknown names, names that occur twice, descriptions that cannot be used, files that are not there.
pub fn plans(args: &Asked) -> anyhow::Result<Vec<Plan>> {
    let mut plans: Vec<Plan> = vec![];
    for path in args.descriptions {
        let plan = description::read(path)?;
        if plans.iter().any(|other| other.name == plan.name) {
            usage!("--description {}: `{}` is described twice", path.display(), plan.name);
        }
        plans.push(plan);
    }
    let sources = sources(args.sources)?;
    let everything = args.suites.is_empty() && args.descriptions.is_empty() && sources.is_empty();
    let named = args.suites.iter().chain(sources.keys());
    for name in named {
        if public().iter().all(|suite| suite.name != *name) && plans.iter().all(|plan| plan.name != *name) {
            let known: Vec<&str> = public().iter().map(|suite| suite.name.as_str()).collect();
            usage!(
                "`{name}` is no public suite; those are {}; one of your own needs its --description",
                known.join(", ")
            );
        }
    }
    let asked = |name: &str| {
        everything || args.suites.iter().any(|suite| suite == name) || sources.contains_key(name)
    };
    let public = public().iter().filter(|suite| asked(&suite.name));
    let public =
        public.map(|suite| suite.public_plan().map_err(|(key, problem)| anyhow!("`{key}`: {problem}")));
    let mut plans: Vec<Plan> = public.chain(plans.into_iter().map(Ok)).collect::<anyhow::Result<_>>()?;
    for plan in &mut plans {
        if let Some(files) = sources.get(&plan.name) {
            plan.wanted = Wanted::Files(files.clone());
        }
    }
    Ok(plans)
}

/// The files given for suites, by name.
fn sources(given: &[String]) -> anyhow::Result<BTreeMap<String, Vec<PathBuf>>> {
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
