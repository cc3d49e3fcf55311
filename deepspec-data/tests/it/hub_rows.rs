//! Rows of the public datasets with the hub's column names and types, and files of such rows.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_json::ReaderBuilder;
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use serde_json::{Map, Value, json};

use crate::process::Row;

/// A column's type.
#[derive(Clone, Copy)]
enum Type {
    Text,
    Int,
    Small,
    Texts,
}
use Type::{Int, Small, Text, Texts};

/// The format of a dataset on the hub.
pub struct Dataset {
    pub suite: &'static str,
    pub id: &'static str,
    /// The files on the hub that the suite is made of.
    pub files: &'static [&'static str],
    columns: &'static [(&'static str, Type)],
}

const TESTS: [&str; 6] =
    ["test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"];

pub static DATASETS: [Dataset; 12] = [
    Dataset {
        suite: "gsm8k",
        id: "openai/gsm8k",
        files: &["main/test-00000-of-00001.parquet"],
        columns: &[("question", Text), ("answer", Text)],
    },
    Dataset {
        suite: "math500",
        id: "HuggingFaceH4/MATH-500",
        files: &["test.jsonl"],
        columns: &[
            ("problem", Text),
            ("solution", Text),
            ("answer", Text),
            ("subject", Text),
            ("level", Int),
            ("unique_id", Text),
        ],
    },
    Dataset {
        suite: "aime25",
        id: "MathArena/aime_2025",
        files: &["data/train-00000-of-00001.parquet"],
        columns: &[("problem_idx", Int), ("problem", Text), ("answer", Int), ("problem_type", Texts)],
    },
    Dataset {
        suite: "aime24",
        id: "HuggingFaceH4/aime_2024",
        files: &["data/train-00000-of-00001.parquet"],
        columns: &[
            ("id", Int),
            ("problem", Text),
            ("solution", Text),
            ("answer", Text),
            ("url", Text),
            ("year", Text),
        ],
    },
    Dataset {
        suite: "mbpp",
        id: "google-research-datasets/mbpp",
        files: &["sanitized/test-00000-of-00001.parquet"],
        columns: &[
            ("source_file", Text),
            ("task_id", Small),
            ("prompt", Text),
            ("code", Text),
            ("test_imports", Texts),
            ("test_list", Texts),
        ],
    },
    Dataset {
        suite: "humaneval",
        id: "openai/openai_humaneval",
        files: &["openai_humaneval/test-00000-of-00001.parquet"],
        columns: &[
            ("task_id", Text),
            ("prompt", Text),
            ("canonical_solution", Text),
            ("test", Text),
            ("entry_point", Text),
        ],
    },
    Dataset {
        suite: "livecodebench",
        id: "livecodebench/code_generation_lite",
        files: &TESTS,
        columns: &[
            ("question_title", Text),
            ("question_content", Text),
            ("platform", Text),
            ("question_id", Text),
            ("contest_id", Text),
            ("contest_date", Text),
            ("starter_code", Text),
            ("difficulty", Text),
            ("public_test_cases", Text),
            ("private_test_cases", Text),
            ("metadata", Text),
        ],
    },
    Dataset {
        suite: "lbpp",
        id: "CohereLabs/lbpp",
        files: &["python/test.parquet"],
        columns: &[
            ("task_id", Text),
            ("language", Text),
            ("title", Text),
            ("instruction", Text),
            ("completion", Text),
            ("test_setup", Text),
            ("test_list", Texts),
            ("categories", Texts),
        ],
    },
    Dataset {
        suite: "swe-bench",
        id: "princeton-nlp/SWE-bench_Lite",
        files: &["data/test-00000-of-00001.parquet"],
        columns: &[
            ("repo", Text),
            ("instance_id", Text),
            ("base_commit", Text),
            ("patch", Text),
            ("test_patch", Text),
            ("problem_statement", Text),
            ("hints_text", Text),
            ("created_at", Text),
            ("version", Text),
            ("FAIL_TO_PASS", Text),
            ("PASS_TO_PASS", Text),
            ("environment_setup_commit", Text),
        ],
    },
    Dataset {
        suite: "mt-bench",
        id: "HuggingFaceH4/mt_bench_prompts",
        files: &["data/train-00000-of-00001-67c6c9fef07685a3.parquet"],
        columns: &[("category", Text), ("prompt", Texts), ("reference", Texts), ("prompt_id", Int)],
    },
    Dataset {
        suite: "alpaca",
        id: "tatsu-lab/alpaca",
        files: &["data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"],
        columns: &[("instruction", Text), ("input", Text), ("output", Text), ("text", Text)],
    },
    Dataset {
        suite: "arena-hard-v2",
        id: "lmarena-ai/arena-hard-auto",
        files: &["data/arena-hard-v2.0/question.jsonl"],
        columns: &[("uid", Text), ("category", Text), ("subcategory", Text), ("prompt", Text)],
    },
];

/// The dataset of a suite.
pub fn dataset(suite: &str) -> &'static Dataset {
    DATASETS.iter().find(|dataset| dataset.suite == suite).unwrap()
}

impl Dataset {
    /// The configuration, if there are several, from the folder of its files.
    pub fn config(&self) -> Option<&str> {
        let folder = self.files[0].split_once('/')?.0;
        ["main", "sanitized"].contains(&folder).then_some(folder)
    }

    /// A row with these values; the other columns have filler values.
    pub fn row(&self, values: &[(&str, Value)]) -> Row {
        let value = |&(name, kind): &(&str, Type)| {
            let given = values.iter().find(|(given, _)| *given == name).map(|(_, value)| value.clone());
            let filler = match kind {
                Text => json!(format!("the {name}")),
                Int | Small => json!(7),
                Texts => json!([format!("a {name}"), "b"]),
            };
            (name.to_string(), given.unwrap_or(filler))
        };
        assert!(values.iter().all(|(given, _)| self.columns.iter().any(|(name, _)| name == given)));
        self.columns.iter().map(value).collect()
    }

    /// Writes the rows under `dir`, split in order over the hub's file names, or over the first of
    /// them if there are few rows.
    pub fn write(&self, dir: &Path, rows: &[Row]) -> Vec<PathBuf> {
        let share = rows.len().div_ceil(self.files.len());
        let mut parts = rows.chunks(share);
        let write = |name: &&str| {
            let (path, rows) = (dir.join(name), parts.next().unwrap());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            if name.ends_with(".parquet") {
                self.parquet(&path, rows);
            } else {
                let line = |row: &Row| Value::Object(row.clone()).to_string() + "\n";
                fs::write(&path, rows.iter().map(line).collect::<String>()).unwrap();
            }
            path
        };
        let count = rows.len().div_ceil(share);
        self.files.iter().take(count).map(write).collect()
    }

    fn parquet(&self, path: &Path, rows: &[Row]) {
        let field = |&(name, kind): &(&str, Type)| {
            let kind = match kind {
                Text => DataType::Utf8,
                Int => DataType::Int64,
                Small => DataType::Int32,
                Texts => DataType::List(Arc::new(Field::new("element", DataType::Utf8, true))),
            };
            Field::new(name, kind, true)
        };
        let schema = Arc::new(Schema::new(self.columns.iter().map(field).collect::<Vec<_>>()));
        let mut decoder =
            ReaderBuilder::new(schema.clone()).with_batch_size(rows.len()).build_decoder().unwrap();
        decoder.serialize(rows).unwrap();
        let batch = decoder.flush().unwrap().unwrap();
        let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), schema, None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    }
}

/// The source row of a published line, recovered by removing the prompt's fixed texts.
pub fn invert(suite: &str, line: &Map<String, Value>) -> Row {
    let turns = line["turns"].as_array().unwrap();
    let turn = turns[0].as_str().unwrap();
    let off = |before: &str, after: &str| turn.strip_prefix(before).unwrap().strip_suffix(after).unwrap();
    let values: Vec<(&str, Value)> = match suite {
        "gsm8k" | "math500" | "aime24" | "aime25" => {
            let column = if suite == "gsm8k" { "question" } else { "problem" };
            let boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}.";
            vec![(column, json!(off("", boxed)))]
        }
        "humaneval" => {
            let before = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n";
            vec![("prompt", json!(off(before, "\n```")))]
        }
        "livecodebench" => {
            let body = off(
                "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct Python program that matches the specification and passes all tests. You will NOT return anything except for the program\n\n### Question:\n",
                "\n```\n\n### Answer: (use the provided format with backticks)",
            );
            let (free, given) = (
                "\n\n### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE",
                "\n\n### Format: Use the following code structure:\n```python\n",
            );
            let (question, starter) = body
                .strip_suffix(free)
                .map_or_else(|| body.rsplit_once(given).unwrap(), |question| (question, ""));
            vec![("question_content", json!(question)), ("starter_code", json!(starter))]
        }
        "swe-bench" => {
            let issue = off("Problem Statement:\n", "\nPlease fix the issue described above.");
            vec![("problem_statement", json!(issue))]
        }
        "mt-bench" => vec![("prompt", json!(turns))],
        "lbpp" => vec![("instruction", json!(turn))],
        "mbpp" | "arena-hard-v2" => vec![("prompt", json!(turn))],
        "alpaca" => {
            let (instruction, input) = turn.split_once("\n\nInput:\n").unwrap_or((turn, ""));
            vec![("instruction", json!(instruction)), ("input", json!(input))]
        }
        other => panic!("no suite {other}"),
    };
    dataset(suite).row(&values)
}
