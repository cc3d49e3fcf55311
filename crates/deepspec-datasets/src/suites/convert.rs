//! Converts a dataset's files to the text of a suite. One invalid row fails the conversion, because
//! results on a suite with missing rows would not be comparable.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::rows::{DatasetFiles, Table};
use anyhow::{Context, bail};
use serde_json::Value;

use crate::suites::prompt_conversion::PromptConversion;

/// A converted suite.
#[derive(Debug)]
pub struct ConvertedSuite {
    /// The text of its JSONL file.
    pub text: String,
    /// Number of rows.
    pub rows: usize,
}

/// Converts all rows of these files, in order. Memory use is that of the prompts, not of the files.
///
/// # Errors
/// Fails if a file is unreadable, lacks columns or has no rows. Fails if a row gives no prompt,
/// naming file, row and column.
pub fn convert(conversion: &PromptConversion, files: &[PathBuf]) -> anyhow::Result<ConvertedSuite> {
    let mut converted = ConvertedSuite { text: String::new(), rows: 0 };
    for path in files {
        let rows = convert_file(conversion, path, &mut converted.text)?;
        if rows == 0 {
            bail!("{}: the file has no rows", path.display());
        }
        converted.rows += rows;
    }
    Ok(converted)
}

fn convert_file(conversion: &PromptConversion, path: &Path, text: &mut String) -> anyhow::Result<usize> {
    let source = open_rows(path)?;
    let columns = |table: Table| table.schema().fields().iter().map(|field| field.name().clone()).collect();
    let schema: Option<BTreeSet<String>> = lowercase_stem(path)
        .ends_with(".parquet")
        .then(|| Table::open(path.into()).map(columns))
        .transpose()?;
    if let Some(columns) = &schema {
        check_columns(conversion, columns).with_context(|| path.display().to_string())?;
    }
    let (mut seen, mut rows) = (schema.clone().unwrap_or_default(), 0);
    for item in source.rows()? {
        let item = item?;
        let place = || format!("{}:{}", path.display(), item.line);
        let row = match &item.row {
            Ok(row) => row,
            Err(problem) => bail!("{}: {problem}", place()),
        };
        if schema.is_none() {
            if rows == 0 {
                check_columns(conversion, &row.keys().cloned().collect()).with_context(place)?;
            }
            seen.extend(conversion.optional_columns().iter().filter(|&name| row.contains_key(name)).cloned());
        }
        match conversion.turns(row) {
            Ok(turns) => push_turns_line(text, &turns),
            Err(odd) => bail!("{}: {odd}", place()),
        }
        rows += 1;
    }
    if let Some(absent) = conversion.optional_columns().iter().find(|&name| rows > 0 && !seen.contains(name))
    {
        bail!("{}: no row has the column `{absent}`", path.display());
    }
    Ok(rows)
}

/// A file's name in lower case, without a compression ending.
fn lowercase_stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    [".gz", ".zst"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name).to_string()
}

/// Opens a file whose name tells its format.
fn open_rows(path: &Path) -> anyhow::Result<DatasetFiles> {
    match path.to_str() {
        Some(text)
            if [".parquet", ".jsonl", ".ndjson"].iter().any(|end| lowercase_stem(path).ends_with(end)) =>
        {
            DatasetFiles::open(text)
        }
        _ => bail!("{}: expected a .parquet or .jsonl file", path.display()),
    }
}

/// Checks the columns of the dataset, so that a wrong dataset does not appear as a bad first row.
fn check_columns(conversion: &PromptConversion, found: &BTreeSet<String>) -> anyhow::Result<()> {
    let expected = conversion.required_columns();
    match expected.iter().find(|&name| !found.contains(name)) {
        None => Ok(()),
        Some(absent) => bail!(
            "there is no column `{absent}`; expected {}, found {}",
            quote_names(expected.iter().map(String::as_str)),
            if found.is_empty() {
                "no columns".into()
            } else {
                quote_names(found.iter().map(String::as_str))
            }
        ),
    }
}

fn quote_names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let mut names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    names.dedup();
    names.join(", ")
}

/// Appends a row with spaces after `:` and `,`. Files thus equal the files of published runs byte
/// for byte.
fn push_turns_line(text: &mut String, turns: &[String]) {
    let turns: Vec<String> = turns.iter().map(|turn| Value::from(turn.as_str()).to_string()).collect();
    text.push_str("{\"turns\": [");
    text.push_str(&turns.join(", "));
    text.push_str("]}\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::description::public_suites;
    use crate::suites::prompt_conversion::Templates;

    fn conversion(suite: &str) -> PromptConversion {
        let suite = public_suites().iter().find(|public| public.name == suite).unwrap();
        suite.turns.conversion().unwrap()
    }

    fn converted(conversion: &PromptConversion, text: &str) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, text).unwrap();
        let converted = convert(conversion, &[path]).map_err(|error| deepspec_core::cli::one_line(&error))?;
        assert_eq!(converted.rows, converted.text.lines().count());
        Ok(converted.text)
    }

    #[test]
    fn lines_have_the_published_form() {
        let text = converted(
            &conversion("arena-hard-v2"),
            "{\"uid\": 1, \"prompt\": \"a/\\u00e9\\n\\u0001\\u007f\\\"\"}\n",
        );
        assert_eq!(text.unwrap(), "{\"turns\": [\"a/é\\n\\u0001\u{7f}\\\"\"]}\n");
        let text = converted(
            &conversion("mt-bench"),
            "{\"prompt\": [\"one\", \"two\"]}\n\n{\"prompt\": [\"three\"]}",
        );
        assert_eq!(text.unwrap(), "{\"turns\": [\"one\", \"two\"]}\n{\"turns\": [\"three\"]}\n");
    }

    #[test]
    fn another_shape_shows_the_columns() {
        let error = converted(&conversion("alpaca"), "{\"question\": \"?\", \"answer\": 1}\n").unwrap_err();
        let words = [
            "rows.jsonl:1",
            "no column `input`",
            "expected `input`, `instruction`, found `answer`, `question`",
        ];
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert!(converted(&conversion("alpaca"), "{}").unwrap_err().contains("found no columns"));
        assert!(
            converted(&conversion("alpaca"), "").unwrap_err().contains("rows.jsonl: the file has no rows")
        );
        let optional = PromptConversion::Templates(Box::new(
            Templates::new(&["{{ a }}{{ b|optional }}".into()]).unwrap(),
        ));
        assert!(
            converted(&optional, "{\"a\": 1}\n{\"a\": 2}\n")
                .unwrap_err()
                .contains("no row has the column `b`")
        );
        assert!(converted(&optional, "{\"a\": 1}\n{\"a\": 2, \"b\": null}\n").is_ok());
    }

    #[test]
    fn an_odd_row_is_named() {
        let says = |suite: &str, text: &str, words: &str| {
            let error = converted(&conversion(suite), text).unwrap_err();
            assert!(error.contains(words), "{words} not in: {error}");
        };
        let good = "{\"instruction\": \"a\", \"input\": \"\"}\n";
        says(
            "alpaca",
            &format!("{good}{{\"input\": \"\"}}"),
            "rows.jsonl:2: column `instruction`: expected a text, found nothing",
        );
        says(
            "alpaca",
            &format!("{good}\n{{\"instruction\": \"a\", \"input\": 3}}"),
            "rows.jsonl:3: column `input`: expected a text, found a number",
        );
        says(
            "alpaca",
            "{\"instruction\": \" \", \"input\": \"\"}",
            "rows.jsonl:1: column `instruction`: the text is blank",
        );
        says("mt-bench", "{\"prompt\": \"a\"}", "column `prompt`: expected a list of texts, found a string");
        says("mt-bench", "{\"prompt\": []}", "column `prompt`: the list is empty");
        says(
            "mt-bench",
            "{\"prompt\": [\"a\", 1]}",
            "column `prompt`: expected a list of texts, item 2 is a number",
        );
        says("alpaca", &format!("{good}{{oops"), "rows.jsonl:2: not valid JSON");
    }
}
