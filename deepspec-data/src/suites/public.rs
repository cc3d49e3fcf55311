//! The public suites: where their rows are on the hub, and the prompts that published scores were measured on.
//!
//! The fixed texts around the rows are part of the measurement: a changed blank makes another prompt.

use super::form::{Odd, Row};

/// Version of the conversions below; recorded with what they wrote.
pub const VERSION: &str = "1";

/// Where a dataset keeps the rows.
#[derive(Debug, Clone, Copy)]
pub enum Place {
    /// A split, of the only configuration or of the one named.
    Split(Option<&'static str>, &'static str),
    /// These files, in this order.
    Files(&'static [&'static str]),
}

/// A public suite.
pub struct Public {
    /// Its name.
    pub name: &'static str,
    /// The dataset's id on the hub.
    pub dataset: &'static str,
    /// Where in the dataset its rows are.
    pub place: Place,
    /// The columns that `turns` reads.
    pub columns: &'static [&'static str],
    /// The turns of a row.
    pub turns: fn(Row) -> Result<Vec<String>, Odd>,
}

/// All of them.
pub static PUBLIC: [Public; 12] = [
    Public {
        name: "gsm8k",
        dataset: "openai/gsm8k",
        place: Place::Split(Some("main"), "test"),
        columns: &["question"],
        turns: |row| reasoned(row.text("question")?),
    },
    Public {
        name: "math500",
        dataset: "HuggingFaceH4/MATH-500",
        place: Place::Split(None, "test"),
        columns: &["problem"],
        turns: |row| reasoned(row.text("problem")?),
    },
    Public {
        name: "aime25",
        dataset: "MathArena/aime_2025",
        place: Place::Split(None, "train"),
        columns: &["problem"],
        turns: |row| reasoned(row.text("problem")?),
    },
    Public {
        name: "aime24",
        dataset: "HuggingFaceH4/aime_2024",
        place: Place::Split(None, "train"),
        columns: &["problem"],
        turns: |row| reasoned(row.text("problem")?),
    },
    Public {
        name: "mbpp",
        dataset: "google-research-datasets/mbpp",
        place: Place::Split(Some("sanitized"), "test"),
        columns: &["prompt"],
        turns: |row| one(row.text("prompt")?),
    },
    Public {
        name: "humaneval",
        dataset: "openai/openai_humaneval",
        place: Place::Split(None, "test"),
        columns: &["prompt"],
        turns: |row| {
            let task = "Write a solution to the following problem and make sure that it passes the tests:";
            one(format!("{task}\n```python\n{}\n```", row.text("prompt")?))
        },
    },
    Public {
        name: "livecodebench",
        dataset: "livecodebench/code_generation_lite",
        // All six releases; a later one would make another suite.
        place: Place::Files(&[
            "test.jsonl",
            "test2.jsonl",
            "test3.jsonl",
            "test4.jsonl",
            "test5.jsonl",
            "test6.jsonl",
        ]),
        columns: &["question_content", "starter_code"],
        turns: |row| one(competition(row.text("question_content")?, row.any_text("starter_code")?)),
    },
    Public {
        name: "lbpp",
        dataset: "CohereLabs/lbpp",
        place: Place::Files(&["python/test.parquet"]),
        columns: &["instruction"],
        turns: |row| one(row.text("instruction")?),
    },
    Public {
        name: "swe-bench",
        dataset: "princeton-nlp/SWE-bench_Lite",
        place: Place::Split(None, "test"),
        columns: &["problem_statement"],
        turns: |row| {
            let issue = row.text("problem_statement")?;
            one(format!("Problem Statement:\n{issue}\nPlease fix the issue described above."))
        },
    },
    Public {
        name: "mt-bench",
        dataset: "HuggingFaceH4/mt_bench_prompts",
        place: Place::Split(None, "train"),
        columns: &["prompt"],
        turns: |row| row.texts("prompt"),
    },
    Public {
        name: "alpaca",
        dataset: "tatsu-lab/alpaca",
        place: Place::Split(None, "train"),
        columns: &["instruction", "input"],
        turns: |row| match (row.text("instruction")?, row.any_text("input")?) {
            (instruction, "") => one(instruction),
            (instruction, input) => one(format!("{instruction}\n\nInput:\n{input}")),
        },
    },
    Public {
        name: "arena-hard-v2",
        dataset: "lmarena-ai/arena-hard-auto",
        place: Place::Files(&["data/arena-hard-v2.0/question.jsonl"]),
        columns: &["prompt"],
        turns: |row| one(row.text("prompt")?),
    },
];

impl Public {
    /// The public suite of this name.
    pub fn find(name: &str) -> Option<&'static Self> {
        PUBLIC.iter().find(|suite| suite.name == name)
    }
}

fn one(turn: impl Into<String>) -> Result<Vec<String>, Odd> {
    Ok(vec![turn.into()])
}

/// A mathematical problem whose answer must be found in the text.
fn reasoned(problem: &str) -> Result<Vec<String>, Odd> {
    one(format!("{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."))
}

/// A competition's question, to be answered by a program that reads standard input or by one that completes the starter.
fn competition(question: &str, starter: &str) -> String {
    let task = "You are an expert Python programmer. You will be given a question (problem specification) and will generate \
                a correct Python program that matches the specification and passes all tests. You will NOT return anything \
                except for the program";
    let (format, code) = if starter.is_empty() {
        ("Write your code in the following format:", "# YOUR CODE HERE")
    } else {
        ("Use the following code structure:", starter)
    };
    format!(
        "{task}\n\n### Question:\n{question}\n\n### Format: {format}\n```python\n{code}\n```\n\n\
         ### Answer: (use the provided format with backticks)"
    )
}
