//! Fuzzes suites and records: accepted files give valid requests, and errors name the file.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::suites::record::{self, Origin, Record, SuiteRecord};
use crate::suites::suite::Domain;
use deepspec_core::cli::one_line;
use deepspec_engine::Sampling;
use deepspec_testkit::mutate::Fuzzer;
use deepspec_text::ChatTokenizer;
use tempfile::TempDir;

use crate::suites::{RequestTemplate, SuiteDir, TokenizedSuite};

const NAME: &str = "mine";
const WORDS: [&str; 6] = ["id", "turns", "cap", "mine", "math", "<|im_end|>"];
const ROWS: &str = "{\"id\": 1, \"turns\": [\"What is 2 + 3?\"]}\n\
{\"id\": \"b\", \"turns\": [\"Say it.\", \"Again, in \\u00fc.\"], \"note\": null}\n\
{\"id\": -7, \"turns\": [\"fn main() {\\n}\"]}\n\
{\"id\": \"2024-I-4\", \"turns\": [\"Why?\", \"And then?\", \"So?\"]}\n";

/// A folder with a suite and its record.
fn write_suite_folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(rows_path(dir.path()), ROWS).unwrap();
    let mut record = Record::default();
    let (source, sha256) = (Origin::Files(vec![]), deepspec_core::digest::sha256_of_bytes(ROWS.as_bytes()));
    let entry =
        SuiteRecord { domain: Domain::Math, rows: 4, cap: Some(3), source, sha256, converter: "1".into() };
    record.suites.insert(NAME.into(), entry);
    record.write(dir.path()).unwrap();
    dir
}

fn rows_path(dir: &Path) -> PathBuf {
    dir.join(format!("{NAME}.jsonl"))
}

/// Makes requests from the folder as an evaluation run does; errors are as the run prints them.
fn prepare(dir: &Path, tokenizer: &ChatTokenizer) -> Result<Vec<TokenizedSuite>, String> {
    let (sampling, stop_ids) = (Sampling::new(1.0, 1), [0]);
    let asking = RequestTemplate {
        tokenizer,
        sampling,
        max_new_tokens: 64,
        thinking: false,
        system_prompt: None,
        stop_ids: &stop_ids,
        context: 4096,
        vocab_size: 1024,
    };
    let prepare = || -> anyhow::Result<Vec<TokenizedSuite>> {
        let folder = SuiteDir::open(dir)?;
        let suites = folder.select(&[NAME.to_string()], &[])?;
        suites.into_iter().map(|suite| asking.prepare(folder.load(suite, 1, None)?)).collect()
    };
    prepare().map_err(|error| one_line(&error))
}

/// Damages a file `times` times and prepares the suite each time. Checks that each error is one
/// line with one of `names`. Returns the number of errors.
fn fuzz_file(dir: &Path, file: &Path, seed: u64, times: usize, names: &[&str]) -> usize {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
    let tokenizer = ChatTokenizer::load(&tiny).unwrap();
    let (sound, mut dice, mut refused) = (fs::read(file).unwrap(), Fuzzer::new(seed, &WORDS), 0);
    assert_eq!(prepare(dir, &tokenizer).unwrap()[0].requests.len(), 3);
    for _ in 0..times {
        fs::write(file, dice.file(&sound)).unwrap();
        match prepare(dir, &tokenizer) {
            Ok(suites) => suites.iter().for_each(check_requests),
            Err(told) => {
                assert!(names.iter().any(|name| told.contains(name)), "no file is named: {told}");
                assert!(!told.contains(char::is_control), "{told:?}");
                refused += 1;
            }
        }
    }
    fs::write(file, sound).unwrap();
    refused
}

/// Checks that the engine accepts every request.
fn check_requests(suite: &TokenizedSuite) {
    assert!(!suite.requests.is_empty());
    assert_eq!(suite.ids.iter().collect::<HashSet<_>>().len(), suite.requests.len());
    for (request, turns) in suite.requests.iter().zip(&suite.turns) {
        assert!(!request.prompt.is_empty() && request.max_new_tokens > 0);
        assert!(!turns.is_empty() && turns.iter().all(|turn| !turn.trim().is_empty()));
    }
}

#[test]
fn damaged_rows_are_refused_by_line() {
    let dir = write_suite_folder();
    let refused = fuzz_file(dir.path(), &rows_path(dir.path()), 11, 400, &["mine.jsonl:"]);
    assert!(refused > 150, "only {refused} of 400 were refused");
}

#[test]
fn damaged_records_are_refused_by_name() {
    let dir = write_suite_folder();
    // If damage removes the suite from the record, the error names the missing suite.
    let names = [record::RECORD_FILE, "`mine` is no suite"];
    let refused = fuzz_file(dir.path(), &dir.path().join(record::RECORD_FILE), 12, 300, &names);
    assert!(refused > 100, "only {refused} of 300 were refused");
}
