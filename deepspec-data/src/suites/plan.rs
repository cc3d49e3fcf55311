//! Which suites are to be written, and from what.

use std::collections::BTreeMap;
use std::path::PathBuf;

use deepspec_core::suite::{Domain, Suite};
use deepspec_core::{env, usage};

use super::Args;
use super::description;
use super::form::Form;
use super::public::{self, PUBLIC, Public};

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

/// What the arguments ask for: the suites that they name in any way, or all public ones.
///
/// # Errors
/// Usage errors: unknown names, names that occur twice, descriptions that cannot be used, files that are not there.
pub fn plans(args: &Args) -> anyhow::Result<Vec<Plan>> {
    let mut plans: Vec<Plan> = vec![];
    for path in &args.descriptions {
        let plan = description::read(path)?;
        if plans.iter().any(|other| other.name == plan.name) {
            usage!("--description {}: `{}` is described twice", path.display(), plan.name);
        }
        plans.push(plan);
    }
    let sources = sources(&args.sources)?;
    let everything = args.suites.is_empty() && args.descriptions.is_empty() && sources.is_empty();
    let named = args.suites.iter().chain(sources.keys());
    for name in named {
        if Public::find(name).is_none() && plans.iter().all(|plan| plan.name != *name) {
            let known: Vec<&str> = PUBLIC.iter().map(|suite| suite.name).collect();
            usage!(
                "`{name}` is no public suite; those are {}; one of your own needs its --description",
                known.join(", ")
            );
        }
    }
    let asked = |name: &str| {
        everything || args.suites.iter().any(|suite| suite == name) || sources.contains_key(name)
    };
    let public = PUBLIC.iter().filter(|suite| asked(suite.name)).filter_map(public_plan);
    let mut plans: Vec<Plan> = public.chain(plans).collect();
    for plan in &mut plans {
        if let Some(files) = sources.get(&plan.name) {
            plan.wanted = Wanted::Files(files.clone());
        }
    }
    Ok(plans)
}

/// A public suite's plan; all of them are in the table of known suites.
fn public_plan(public: &Public) -> Option<Plan> {
    let suite = Suite::known(public.name)?;
    let place = match public.place {
        public::Place::Split(config, split) => Place::Split(config.map(String::from), split.into()),
        public::Place::Files(files) => Place::Files(files.iter().map(ToString::to_string).collect()),
    };
    Some(Plan {
        name: public.name.into(),
        domain: suite.domain,
        cap: suite.cap(),
        converter: public::VERSION.into(),
        form: Form::Code(public.columns, public.turns),
        wanted: Wanted::Hub { dataset: public.dataset.into(), revision: None, place },
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_public_suite_is_known_and_the_other_way_round() {
        assert_eq!(PUBLIC.iter().filter_map(public_plan).count(), 12);
        let smoke = |suite: &&Suite| suite.name.starts_with("smoke-");
        let known = deepspec_core::suite::SUITES.iter().filter(|suite| !smoke(suite));
        assert!(known.clone().all(|suite| Public::find(&suite.name).is_some()));
        assert!(
            known.map(|suite| suite.name.as_ref()).eq(PUBLIC.iter().map(|suite| suite.name)),
            "one order"
        );
    }
}
