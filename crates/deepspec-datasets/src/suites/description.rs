//! YAML descriptions of suites: the built-in public suites and the user's suites.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::LazyLock;

use deepspec_core::{config, digest, env, usage};
use serde::{Deserialize, Serialize};

use crate::suites::plan::{DatasetPart, RowSource, SuitePlan};
use crate::suites::prompt_conversion::{PromptConversion, Templates};
use crate::suites::suite::{self, Domain};

/// A key of a description with its problem.
type KeyProblem = (&'static str, String);

/// The description of a suite.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteDescription {
    /// The suite's name.
    pub name: String,
    /// Domain of the suite.
    pub domain: Domain,
    /// A dataset id on the hub, or a file.
    pub dataset: String,
    /// Branch, tag or commit on the hub.
    pub revision: Option<String>,
    /// Configuration name of the dataset.
    pub config_name: Option<String>,
    /// Split of the dataset.
    pub split: Option<String>,
    /// Files of the dataset instead of configuration and split; `*` matches any part of a name.
    pub files: Option<Vec<String>>,
    /// User messages.
    pub turns: SuitePrompt,
    /// Maximum number of rows to score.
    pub limit: Option<NonZeroUsize>,
}

/// Templates, or the column with the turns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a list of templates such as [\"{{ question }}\"], or the name of a column that holds the turns"
)]
pub enum SuitePrompt {
    /// One template per turn.
    Templates(Vec<String>),
    /// Name of a column with a list of turns.
    Column(String),
}

/// The public suites, in the order of tables.
///
/// # Panics
/// Never panics, because the built-in descriptions are tested.
pub fn public_suites() -> &'static [SuiteDescription] {
    static PUBLIC: LazyLock<Vec<SuiteDescription>> = LazyLock::new(|| {
        serde_yaml::from_str(include_str!("public.yaml")).expect("the descriptions that are built in")
    });
    &PUBLIC
}

/// Version of the conversion of public suites, which the record stores.
const CONVERSION_VERSION: &str = "1";

/// Reads the description of a suite.
///
/// # Errors
/// Fails with a usage error that names the file and the key.
pub fn read_plan(path: &Path) -> anyhow::Result<SuitePlan> {
    let description: SuiteDescription = config::load(path, &[])?;
    let said = serde_json::to_string(&description)?;
    // Prefixes the language, because an older template language gave other prompts for the same
    // text.
    let language = if matches!(description.turns, SuitePrompt::Templates(_)) { "jinja " } else { "" };
    let digest = digest::sha256_of_bytes(format!("{language}{said}").as_bytes());
    match description.into_plan(format!("description {}", &digest[..16])) {
        Ok(plan) => Ok(plan),
        Err((key, problem)) => usage!("{}: `{key}`: {problem}", path.display()),
    }
}

impl SuiteDescription {
    /// The plan of a public suite.
    ///
    /// # Errors
    /// Returns the invalid key and its problem. The built-in descriptions are valid.
    pub fn public_plan(&self) -> Result<SuitePlan, KeyProblem> {
        self.clone().into_plan(CONVERSION_VERSION.into())
    }

    /// The plan of this description, or the invalid key with its problem.
    fn into_plan(self, converter: String) -> Result<SuitePlan, KeyProblem> {
        suite::check_name(&self.name).map_err(|problem| ("name", problem))?;
        let conversion = self.turns.conversion().map_err(|problem| ("turns", problem))?;
        let source = self.row_source()?;
        let cap = self.limit.map(NonZeroUsize::get);
        Ok(SuitePlan { name: self.name, domain: self.domain, cap, converter, conversion, source })
    }

    fn row_source(&self) -> Result<RowSource, KeyProblem> {
        let hub_keys = [
            ("revision", self.revision.is_some()),
            ("config_name", self.config_name.is_some()),
            ("split", self.split.is_some()),
            ("files", self.files.is_some()),
        ];
        if !is_hub_id(&self.dataset) {
            let path = env::expand_home(&self.dataset);
            if let Some((key, _)) = hub_keys.iter().find(|(_, given)| *given) {
                return Err((
                    key,
                    format!("only a dataset of the hub has it, and {} is a file", self.dataset),
                ));
            }
            if !path.is_file() {
                return Err((
                    "dataset",
                    format!("{} is neither a file nor a hub id (`owner/name`)", self.dataset),
                ));
            }
            return Ok(RowSource::Files(vec![path]));
        }
        let part = match (&self.files, &self.split) {
            (Some(_), Some(_)) => return Err(("split", "give either `split` or `files`".into())),
            (Some(_), None) if self.config_name.is_some() => {
                return Err(("config_name", "it goes with `split`, not with `files`".into()));
            }
            (Some(files), None) if files.is_empty() => return Err(("files", "the list is empty".into())),
            (Some(files), None) => DatasetPart::Files(files.clone()),
            (None, Some(split)) => DatasetPart::Split(self.config_name.clone(), split.clone()),
            (None, None) => return Err(("split", "give the name of a split, or `files`".into())),
        };
        Ok(RowSource::Hub { dataset: self.dataset.clone(), revision: self.revision.clone(), part })
    }
}

impl SuitePrompt {
    /// The conversion from rows to prompts, or the problem with it.
    pub(crate) fn conversion(&self) -> Result<PromptConversion, String> {
        match self {
            Self::Column(column) if column.trim().is_empty() => Err("the column's name is empty".into()),
            Self::Column(text) if text.contains(['{', '}']) => {
                Err("a template must stand in a list, such as [\"{{ question }}\"]".into())
            }
            Self::Column(column) => Ok(PromptConversion::Column(column.clone())),
            Self::Templates(templates) => {
                Ok(PromptConversion::Templates(Box::new(Templates::new(templates)?)))
            }
        }
    }
}

/// Whether a dataset name is a hub id rather than the path of a missing file.
fn is_hub_id(dataset: &str) -> bool {
    let data = [".parquet", ".jsonl", ".ndjson", ".gz", ".zst", ".json"];
    deepspec_hub::is_hub_id(dataset) && !data.iter().any(|end| dataset.to_lowercase().ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<SuitePlan, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.yaml");
        std::fs::write(&path, text).unwrap();
        read_plan(&path).map_err(|error| deepspec_core::cli::one_line(&error))
    }

    const HUB: &str = "name: mine\ndomain: code\ndataset: owner/name\n";

    #[test]
    fn a_description_says_what_to_fetch() {
        let text = format!(
            "{HUB}revision: v1\nconfig_name: small\nsplit: test\nlimit: 5\nturns: [\"{{{{ q }}}}\", \"Sure?\"]\n"
        );
        let described = plan(&text).unwrap();
        assert_eq!(
            (described.name.as_str(), described.domain, described.cap),
            ("mine", Domain::Code, Some(5))
        );
        let RowSource::Hub { dataset, revision, part: DatasetPart::Split(config, split) } = described.source
        else {
            panic!()
        };
        assert_eq!((dataset.as_str(), revision.as_deref()), ("owner/name", Some("v1")));
        assert_eq!((config.as_deref(), split.as_str()), (Some("small"), "test"));
        // Comments and the order of keys do not change the version; other values do.
        let same = plan(&format!("# mine\nlimit: 5\n{}", text.replace("limit: 5\n", ""))).unwrap();
        assert_eq!(same.converter, described.converter);
        assert_ne!(plan(&text.replace("Sure", "Really")).unwrap().converter, described.converter);

        let files = plan(&format!("{HUB}files: [\"data/*.jsonl\"]\nturns: prompt\n")).unwrap();
        assert!(matches!(files.conversion, PromptConversion::Column(column) if column == "prompt"));
        assert!(
            matches!(files.source, RowSource::Hub { part: DatasetPart::Files(files), .. } if files == ["data/*.jsonl"])
        );
    }

    #[test]
    fn the_public_suites_are_well_described() {
        let plans: Vec<SuitePlan> =
            public_suites().iter().map(|suite| suite.public_plan().unwrap()).collect();
        assert_eq!(plans.len(), 12);
        assert!(plans.iter().all(|plan| plan.domain != Domain::Own && plan.converter == CONVERSION_VERSION));
    }

    #[test]
    fn mistakes_name_file_and_key() {
        let says = |text: &str, words: &[&str]| {
            let Err(error) = plan(text) else { panic!("{text} was accepted") };
            assert!(words.iter().all(|word| error.contains(word)), "{words:?} not in: {error}");
        };
        let split = format!("{HUB}split: test\n");
        let both = format!("{split}turns: [\"{{{{ q }}}}\"]\n");
        says(
            &format!("{split}turn: [a]\n"),
            &["mine.yaml:5", "unknown field `turn`", "did you mean `turns`?"],
        );
        says(&both.replace("code", "cod"), &["mine.yaml:2: `domain", "did you mean `code`?"]);
        says(&format!("{split}turns: \"{{{{ q }}}}\"\n"), &["mine.yaml: `turns`", "must stand in a list"]);
        says(&format!("{split}turns: 3\n"), &["mine.yaml:5: `turns`", "expected a list of templates"]);
        says(&format!("{split}turns: []\n"), &["`turns`: no template names a column"]);
        says(&format!("{split}turns: [\"{{{{ q\"]\n"), &["`turns`: \"{{ q\" is no Jinja template"]);
        says(&format!("{HUB}turns: q\n"), &["`split`: give the name of a split, or `files`"]);
        says(&format!("{both}files: [a]\n"), &["`split`: give either"]);
        says(
            &format!("{HUB}config_name: a\nfiles: [a]\nturns: q\n"),
            &["`config_name`: it goes with `split`"],
        );
        says(&format!("{HUB}files: []\nturns: q\n"), &["`files`: the list is empty"]);
        says(&format!("{both}limit: 0\n"), &["mine.yaml:6: `limit`", "nonzero"]);
        says(&both.replace("mine", "my suite"), &["`name`: `my suite` is no name"]);
        says(&both.replace("owner/name", "absent.jsonl"), &["`split`: only a dataset of the hub has it"]);
        let file = "name: mine\ndomain: chat\ndataset: absent.jsonl\nturns: q\n";
        says(file, &["`dataset`: absent.jsonl is neither a file nor a hub id"]);
        says("name: [", &["mine.yaml: not valid YAML"]);
    }
}
