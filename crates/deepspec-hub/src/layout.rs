//! Assigns data files of a dataset to configurations and splits, by the dataset card, or by file
//! names if the card lists none.

use serde_json::Value;

use crate::glob::Glob;

/// Name of the default configuration.
const DEFAULT_CONFIG: &str = "default";

/// One configuration of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Name of the configuration.
    pub name: String,
    /// Whether the dataset card or the name makes it the default.
    pub is_default: bool,
    /// The splits in order, each with its data files in order.
    pub splits: Vec<(String, Vec<String>)>,
    /// Pairs of a split and a pattern of the dataset card that matches no file.
    pub unmatched: Vec<(String, String)>,
}

/// The configurations of a dataset with these files; `card` is its README. If the list of files is
/// `partial`, splits of the card stay even if no listed file belongs to them.
///
/// # Errors
/// If the card is malformed, as a message.
pub fn configs_from_files(
    card: Option<&str>,
    files: &[String],
    partial: bool,
) -> Result<Vec<Config>, String> {
    let listed = card.map(parse_card_configs).transpose()?.flatten();
    let mut configs = match listed {
        Some(entries) => {
            entries.iter().map(|entry| parse_card_config(entry, files)).collect::<Result<_, _>>()?
        }
        None => infer_configs(files),
    };
    for config in &mut configs {
        for (_, files) in &mut config.splits {
            keep_best_format(files);
        }
        config.splits.retain(|(_, files)| !files.is_empty());
        for (split, _) in config.unmatched.iter().filter(|_| partial) {
            if !config.splits.iter().any(|(known, _)| known == split) {
                config.splits.push((split.clone(), vec![]));
            }
        }
    }
    configs.retain(|config| partial || !config.splits.is_empty());
    Ok(configs)
}

/// The `configs` of the card's YAML front matter.
fn parse_card_configs(card: &str) -> Result<Option<Vec<Value>>, String> {
    let card = card.trim_start_matches('\u{feff}').replace("\r\n", "\n");
    let Some((front, _)) = card.strip_prefix("---\n").and_then(|rest| rest.split_once("\n---")) else {
        return Ok(None);
    };
    let front: Value = serde_yaml::from_str(front).map_err(|error| format!("its front matter: {error}"))?;
    Ok(front.get("configs").and_then(Value::as_array).filter(|list| !list.is_empty()).cloned())
}

fn parse_card_config(entry: &Value, files: &[String]) -> Result<Config, String> {
    let name = entry.get("config_name").map_or(Some(DEFAULT_CONFIG.to_string()), yaml_scalar_text);
    let name = name.ok_or_else(|| format!("config_name is {}; expected text", entry["config_name"]))?;
    let is_default = entry.get("default").and_then(Value::as_bool).unwrap_or(name == DEFAULT_CONFIG);
    let dir = entry.get("data_dir").and_then(yaml_scalar_text).unwrap_or_default();
    let dir = dir.trim_start_matches("./").trim_matches('/').to_string();
    let under = |pattern: &str| if dir.is_empty() { pattern.to_string() } else { format!("{dir}/{pattern}") };
    let mut unmatched = vec![];
    let splits = match entry.get("data_files") {
        None | Some(Value::Null) => {
            let inside: Vec<&String> =
                files.iter().filter(|file| dir.is_empty() || file.starts_with(&under(""))).collect();
            let mut splits = vec![];
            for file in inside.into_iter().filter(|file| is_data_file(file)) {
                let rest = file.strip_prefix(&under("")).unwrap_or(file);
                add_file_to_split(&mut splits, infer_split(rest), file);
            }
            splits
        }
        Some(given) => {
            let mut splits: Vec<(String, Vec<String>)> = vec![];
            for (split, patterns) in
                parse_data_files(given).ok_or_else(|| format!("data_files of {name} is {given}"))?
            {
                for pattern in patterns.iter().map(|pattern| under(pattern)) {
                    let glob = Glob::new(&pattern);
                    if !files.iter().any(|file| glob.matches(file)) {
                        unmatched.push((split.clone(), pattern));
                    }
                    for file in files.iter().filter(|file| is_data_file(file) && glob.matches(file)) {
                        add_file_to_split(&mut splits, split.clone(), file);
                    }
                }
            }
            splits
        }
    };
    Ok(Config { name, is_default, splits, unmatched })
}

/// Splits and their patterns, from a pattern, a list of patterns, a list of `{split, path}` or a
/// map from splits.
fn parse_data_files(given: &Value) -> Option<Vec<(String, Vec<String>)>> {
    let several = |value: &Value| match value {
        Value::Array(list) => list.iter().map(yaml_scalar_text).collect::<Option<Vec<_>>>(),
        one => yaml_scalar_text(one).map(|one| vec![one]),
    };
    match given {
        Value::Array(list) if list.iter().any(Value::is_object) => list
            .iter()
            .map(|entry| {
                let split = entry.get("split").map_or(Some("train".into()), yaml_scalar_text)?;
                Some((split, several(entry.get("path")?)?))
            })
            .collect(),
        Value::Object(map) => {
            map.iter().map(|(split, value)| Some((split.clone(), several(value)?))).collect()
        }
        value => Some(vec![("train".into(), several(value)?)]),
    }
}

/// A string, or a number or boolean that YAML parsed from unquoted text.
fn yaml_scalar_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

/// Infers configurations from folder names, and splits from file or folder names:
/// `config/split-00000-of-00001.parquet`, `data/train.jsonl`, `config/split/0.parquet`.
fn infer_configs(files: &[String]) -> Vec<Config> {
    let mut configs: Vec<Config> = vec![];
    for file in files.iter().filter(|file| is_data_file(file)) {
        let inside = file.strip_prefix("data/").unwrap_or(file);
        let (name, rest) = match inside.split_once('/') {
            Some((folder, rest)) if split_from_words(folder).is_none() => (folder, rest),
            _ => (DEFAULT_CONFIG, inside),
        };
        let place = configs.iter().position(|config| config.name == name).unwrap_or_else(|| {
            let is_default = name == DEFAULT_CONFIG;
            configs.push(Config { name: name.into(), is_default, splits: vec![], unmatched: vec![] });
            configs.len() - 1
        });
        add_file_to_split(&mut configs[place].splits, infer_split(rest), file);
    }
    configs
}

fn add_file_to_split(splits: &mut Vec<(String, Vec<String>)>, split: String, file: &str) {
    let place = splits.iter().position(|(name, _)| *name == split).unwrap_or_else(|| {
        splits.push((split, vec![]));
        splits.len() - 1
    });
    if !splits[place].1.iter().any(|known| known == file) {
        splits[place].1.push(file.into());
    }
}

/// The split of a path within its configuration.
fn infer_split(path: &str) -> String {
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    let stem = name.split('.').next().unwrap_or(name);
    if let Some((split, _, _)) = parse_shard_name(name) {
        return split.to_string();
    }
    let folder = folders.rsplit('/').next().unwrap_or_default();
    let is_number = !stem.is_empty() && stem.bytes().all(|byte| byte.is_ascii_digit());
    if is_number && !folder.is_empty() {
        // `dev/0000.parquet` is in the validation split, `train_sft/0000.parquet` in `train_sft`.
        let is_word = folder.bytes().all(|byte| byte.is_ascii_alphabetic());
        return split_from_words(folder).filter(|_| is_word).unwrap_or(folder).to_string();
    }
    split_from_words(stem)
        .or_else(|| folders.split('/').find_map(split_from_words))
        .unwrap_or("train")
        .to_string()
}

/// Split, index and number of shards in `split-00000-of-00002…`.
pub fn parse_shard_name(name: &str) -> Option<(&str, usize, usize)> {
    let name = name.rsplit('/').next().unwrap_or(name);
    let (before, after) = name.split_once("-of-")?;
    let (split, number) = before.rsplit_once('-')?;
    let count = &after[..after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len())];
    let digits = |text: &str| (text.len() == 5).then(|| text.parse().ok()).flatten();
    Some((split, digits(number)?, digits(count)?))
}

/// The split (`train`, `validation` or `test`) that the first matching word in `name` stands for.
fn split_from_words(name: &str) -> Option<&'static str> {
    name.split(|c: char| !c.is_ascii_alphabetic()).find_map(|word| match word.to_ascii_lowercase().as_str() {
        "train" | "training" => Some("train"),
        "validation" | "valid" | "val" | "dev" => Some("validation"),
        "test" | "testing" | "eval" | "evaluation" => Some("test"),
        _ => None,
    })
}

/// Rank of a file's format, 0 for the best; None for other files.
fn format_rank(file: &str) -> Option<usize> {
    let name = file.rsplit('/').next().unwrap_or(file);
    let plain = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(name);
    match (plain.rsplit_once('.')?.1, plain == name) {
        ("parquet", true) => Some(0),
        ("jsonl" | "ndjson", _) => Some(1),
        ("json", _) => Some(2),
        _ => None,
    }
}

/// Whether a file holds rows rather than metadata.
fn is_data_file(file: &str) -> bool {
    let hidden = file.split('/').any(|part| part.starts_with(['.', '_']));
    let name = file.rsplit('/').next().unwrap_or(file);
    let about = ["dataset_info.json", "dataset_infos.json", "config.json", "dataset_dict.json", "state.json"];
    !hidden && !about.contains(&name) && format_rank(file).is_some()
}

/// Keeps only the files of the preferred format, because repositories often store the rows in
/// several formats.
fn keep_best_format(files: &mut Vec<String>) {
    let best = files.iter().filter_map(|file| format_rank(file)).min();
    files.retain(|file| format_rank(file) == best);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(files: &[&str]) -> Vec<String> {
        let mut files: Vec<String> = files.iter().map(ToString::to_string).collect();
        files.sort();
        files
    }

    fn said(card: Option<&str>, files: &[&str]) -> String {
        let configs = configs_from_files(card, &names(files), false).unwrap();
        let split = |(name, files): &(String, Vec<String>)| format!("{name}={}", files.join("+"));
        let config = |config: &Config| {
            let splits: Vec<String> = config.splits.iter().map(split).collect();
            format!("{}{}: {}", config.name, if config.is_default { "*" } else { "" }, splits.join(" "))
        };
        configs.iter().map(config).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn file_names_tell_configuration_and_split() {
        let cases: [(&[&str], &str); 10] = [
            (
                &[
                    "main/test-00000-of-00001.parquet",
                    "main/train-00000-of-00001.parquet",
                    "socratic/test-00000-of-00001.parquet",
                ],
                "main: test=main/test-00000-of-00001.parquet train=main/train-00000-of-00001.parquet; socratic: test=socratic/test-00000-of-00001.parquet",
            ),
            (
                &["data/train_sft-00001-of-00002.parquet", "data/train_sft-00000-of-00002-ab12.parquet"],
                "default*: train_sft=data/train_sft-00000-of-00002-ab12.parquet+data/train_sft-00001-of-00002.parquet",
            ),
            (
                &["python/test.parquet", "go/test.parquet"],
                "go: test=go/test.parquet; python: test=python/test.parquet",
            ),
            (&["test.jsonl", "test2.jsonl", "README.md", "x.py"], "default*: test=test.jsonl+test2.jsonl"),
            (&["test.jsonl", "test.parquet", "test.jsonl.gz"], "default*: test=test.parquet"),
            (&["default/train_sft/0000.parquet"], "default*: train_sft=default/train_sft/0000.parquet"),
            (
                &["train/0.jsonl.zst", "dev/0.jsonl.zst"],
                "default*: validation=dev/0.jsonl.zst train=train/0.jsonl.zst",
            ),
            (&["data/hard-v2.0/question.jsonl"], "hard-v2.0: train=data/hard-v2.0/question.jsonl"),
            (&["rows.json", ".cache/rows.json", "dataset_infos.json"], "default*: train=rows.json"),
            (&["latest.jsonl"], "default*: train=latest.jsonl"),
        ];
        for (files, expected) in cases {
            assert_eq!(said(None, files), expected, "{files:?}");
        }
    }

    #[test]
    fn a_card_decides_where_it_says_something() {
        let files = ["data/a-1.jsonl", "data/a-2.jsonl", "data/b.jsonl", "x/train.parquet", "x/test.parquet"];
        let card = "---\nlicense: mit\nconfigs:\n- config_name: one\n  default: true\n  data_files:\n  - split: train\n    path: data/a-*\n  \
                    - split: held_out\n    path: [data/b.jsonl, 'data/a-1.*']\n- config_name: 2\n  data_files: data/*.jsonl\n- config_name: x\n  \
                    data_dir: x\n- config_name: map\n  data_files:\n    test: '**/test.parquet'\n---\n# Rows\n";
        assert_eq!(
            said(Some(card), &files),
            "one*: train=data/a-1.jsonl+data/a-2.jsonl held_out=data/b.jsonl+data/a-1.jsonl; 2: train=data/a-1.jsonl+data/a-2.jsonl+data/b.jsonl; \
             x: test=x/test.parquet train=x/train.parquet; map: test=x/test.parquet"
        );
        for silent in ["# Rows", "---\nlicense: mit\n---\n", "---\nconfigs: []\n---\n", "---\nnever closed"] {
            assert_eq!(said(Some(silent), &["test.jsonl"]), "default*: test=test.jsonl", "{silent}");
        }
        for broken in [
            "---\na: [\n---\n",
            "---\nconfigs:\n- config_name: [1]\n---\n",
            "---\nconfigs:\n- data_files: [[1]]\n---\n",
        ] {
            assert!(configs_from_files(Some(broken), &names(&files), false).is_err(), "{broken}");
        }
    }

    #[test]
    fn shard_numbers_are_read() {
        assert_eq!(parse_shard_name("a/train-00001-of-00012.parquet"), Some(("train", 1, 12)));
        assert_eq!(parse_shard_name("model-00002-of-00003.safetensors"), Some(("model", 2, 3)));
        for other in ["train.parquet", "train-1-of-2.parquet", "train-of-00002", "-of-"] {
            assert_eq!(parse_shard_name(other), None, "{other}");
        }
    }
}
