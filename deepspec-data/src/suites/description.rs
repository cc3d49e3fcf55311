//! Suites of the user's own, each described by a small YAML file.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::Path;

use deepspec_core::suite::{self, Domain, Suite};
use deepspec_core::{config, digest, env, usage};
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::form::Form;
use super::plan::{Place, Plan, Wanted};
use super::template::Template;

/// What the file says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    /// The suite's name.
    name: String,
    /// Its domain.
    domain: Domain,
    /// A dataset's id on the hub, or a file.
    dataset: String,
    /// Branch, tag or commit on the hub.
    revision: Option<String>,
    /// Configuration of the dataset.
    config_name: Option<String>,
    /// Split of the dataset.
    split: Option<String>,
    /// Files of the dataset, in place of configuration and split; `*` stands for any part of a name.
    files: Option<Vec<String>>,
    /// What the user says.
    turns: Turns,
    /// Rows that are scored, if there are more.
    limit: Option<NonZeroUsize>,
}

/// Templates, or the column that holds the turns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
enum Turns {
    Templates(Vec<String>),
    Column(String),
}

impl<'de> Deserialize<'de> for Turns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TurnsVisitor)
    }
}

struct TurnsVisitor;

impl<'de> Visitor<'de> for TurnsVisitor {
    type Value = Turns;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(
            "a list of templates such as [\"{question}\"], or the name of a column that holds the turns",
        )
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Turns, E> {
        if text.contains(['{', '}']) {
            return Err(E::custom("a template must stand in a list, such as [\"{question}\"]"));
        }
        Ok(Turns::Column(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Turns, A::Error> {
        let mut templates = vec![];
        while let Some(template) = list.next_element()? {
            templates.push(template);
        }
        Ok(Turns::Templates(templates))
    }
}

/// Reads the description of a suite.
///
/// # Errors
/// Usage errors that name the file and the key.
pub fn read(path: &Path) -> anyhow::Result<Plan> {
    let description: Description = config::load(path, &[])?;
    let said = serde_json::to_string(&description)?;
    match description.plan(&digest::bytes(said.as_bytes())) {
        Ok(plan) => Ok(plan),
        Err((key, problem)) => usage!("{}: `{key}`: {problem}", path.display()),
    }
}

impl Description {
    /// What it asks for, or the key that is wrong and why.
    fn plan(self, digest: &str) -> Result<Plan, (&'static str, String)> {
        suite::check_name(&self.name).map_err(|problem| ("name", problem))?;
        if Suite::known(&self.name).is_some() {
            return Err((
                "name",
                format!("{} is a suite that needs no description; choose another name", self.name),
            ));
        }
        let form = self.turns.form().map_err(|problem| ("turns", problem))?;
        let wanted = self.wanted()?;
        Ok(Plan {
            name: self.name,
            domain: self.domain,
            cap: self.limit.map(NonZeroUsize::get),
            converter: format!("description {}", &digest[..16]),
            form,
            wanted,
        })
    }

    fn wanted(&self) -> Result<Wanted, (&'static str, String)> {
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
            return Ok(Wanted::Files(vec![path]));
        }
        let place = match (&self.files, &self.split) {
            (Some(_), Some(_)) => return Err(("split", "give either `split` or `files`".into())),
            (Some(_), None) if self.config_name.is_some() => {
                return Err(("config_name", "it goes with `split`, not with `files`".into()));
            }
            (Some(files), None) if files.is_empty() => return Err(("files", "the list is empty".into())),
            (Some(files), None) => Place::Files(files.clone()),
            (None, Some(split)) => Place::Split(self.config_name.clone(), split.clone()),
            (None, None) => return Err(("split", "give the name of a split, or `files`".into())),
        };
        Ok(Wanted::Hub { dataset: self.dataset.clone(), revision: self.revision.clone(), place })
    }
}

impl Turns {
    fn form(&self) -> Result<Form, String> {
        match self {
            Self::Column(column) if column.trim().is_empty() => Err("the column's name is empty".into()),
            Self::Column(column) => Ok(Form::List(column.clone())),
            Self::Templates(templates) => {
                let templates: Vec<Template> =
                    templates.iter().map(|text| Template::parse(text)).collect::<Result<_, _>>()?;
                if templates.iter().all(|one| one.columns(false).chain(one.columns(true)).next().is_none()) {
                    return Err(
                        "no template names a column, so that all rows would be the same prompt".into()
                    );
                }
                Ok(Form::Templates(templates))
            }
        }
    }
}

/// Whether a dataset is named as on the hub, and not by a file that happens to be missing.
fn is_hub_id(dataset: &str) -> bool {
    let data = [".parquet", ".jsonl", ".ndjson", ".gz", ".zst", ".json"];
    deepspec_hub::is_id(dataset) && !data.iter().any(|end| dataset.to_lowercase().ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(text: &str) -> Result<Plan, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.yaml");
        std::fs::write(&path, text).unwrap();
        read(&path).map_err(|error| deepspec_core::cli::one_line(&error))
    }

    const HUB: &str = "name: mine\ndomain: code\ndataset: owner/name\n";

    #[test]
    fn a_description_says_what_to_fetch() {
        let text = format!(
            "{HUB}revision: v1\nconfig_name: small\nsplit: test\nlimit: 5\nturns: [\"{{q}}\", \"Sure?\"]\n"
        );
        let described = plan(&text).unwrap();
        assert_eq!(
            (described.name.as_str(), described.domain, described.cap),
            ("mine", Domain::Code, Some(5))
        );
        let Wanted::Hub { dataset, revision, place: Place::Split(config, split) } = described.wanted else {
            panic!()
        };
        assert_eq!((dataset.as_str(), revision.as_deref()), ("owner/name", Some("v1")));
        assert_eq!((config.as_deref(), split.as_str()), (Some("small"), "test"));
        // Comments and order do not matter; what is asked does.
        let same = plan(&format!("# mine\nlimit: 5\n{}", text.replace("limit: 5\n", ""))).unwrap();
        assert_eq!(same.converter, described.converter);
        assert_ne!(plan(&text.replace("Sure", "Really")).unwrap().converter, described.converter);

        let files = plan(&format!("{HUB}files: [\"data/*.jsonl\"]\nturns: prompt\n")).unwrap();
        assert!(matches!(files.form, Form::List(column) if column == "prompt"));
        assert!(
            matches!(files.wanted, Wanted::Hub { place: Place::Files(files), .. } if files == ["data/*.jsonl"])
        );
    }

    #[test]
    fn mistakes_name_file_and_key() {
        let says = |text: &str, words: &[&str]| {
            let Err(error) = plan(text) else { panic!("{text} was accepted") };
            assert!(words.iter().all(|word| error.contains(word)), "{words:?} not in: {error}");
        };
        let split = format!("{HUB}split: test\n");
        let both = format!("{split}turns: [\"{{q}}\"]\n");
        says(
            &format!("{split}turn: [a]\n"),
            &["mine.yaml:5", "unknown field `turn`", "did you mean `turns`?"],
        );
        says(&both.replace("code", "cod"), &["mine.yaml:2: `domain", "did you mean `code`?"]);
        says(&format!("{split}turns: \"{{q}}\"\n"), &["mine.yaml:5: `turns`", "must stand in a list"]);
        says(&format!("{split}turns: 3\n"), &["mine.yaml:5: `turns`", "expected a list of templates"]);
        says(&format!("{split}turns: []\n"), &["`turns`: no template names a column"]);
        says(&format!("{split}turns: [\"{{q\"]\n"), &["`turns`: a `{` without its partner"]);
        says(&format!("{HUB}turns: q\n"), &["`split`: give the name of a split, or `files`"]);
        says(&format!("{both}files: [a]\n"), &["`split`: give either"]);
        says(
            &format!("{HUB}config_name: a\nfiles: [a]\nturns: q\n"),
            &["`config_name`: it goes with `split`"],
        );
        says(&format!("{HUB}files: []\nturns: q\n"), &["`files`: the list is empty"]);
        says(&format!("{both}limit: 0\n"), &["mine.yaml:6: `limit`", "nonzero"]);
        says(&both.replace("mine", "gsm8k"), &["`name`: gsm8k is a suite that needs no description"]);
        says(&both.replace("mine", "my suite"), &["`name`: `my suite` is no name"]);
        says(&both.replace("owner/name", "absent.jsonl"), &["`split`: only a dataset of the hub has it"]);
        let file = "name: mine\ndomain: chat\ndataset: absent.jsonl\nturns: q\n";
        says(file, &["`dataset`: absent.jsonl is neither a file nor a hub id"]);
        says("name: [", &["mine.yaml: not valid YAML"]);
    }
}
