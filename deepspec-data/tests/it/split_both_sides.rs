//! Only one writer at a time, and no prompt in both outputs.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::process::{command, ended, lines, rows, text};
use crate::split::{report, split};

fn asks(prompt: &str) -> String {
    json!({"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "a"}]})
        .to_string()
}

fn prompts(dir: &Path) -> [Vec<String>; 2] {
    let words = |value: &Value| value.as_str().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    let train = rows(&dir.join("train.jsonl"));
    let eval = rows(&dir.join("eval.jsonl"));
    [
        train.iter().map(|row| words(&row["conversations"][0]["content"])).collect(),
        eval.iter().map(|row| words(&row["turns"][0])).collect(),
    ]
}

/// This process holds the lock in place of another one.
#[test]
fn two_splits_do_not_write_one_output() {
    let dir = tempfile::tempdir().unwrap();
    let data =
        lines(dir.path(), "data.jsonl", &(0..20).map(|at| asks(&format!("q{at}"))).collect::<Vec<_>>());
    for output in ["train.jsonl", "eval.jsonl"] {
        let partial = dir.path().join(format!("{output}.partial"));
        let other = File::create(&partial).unwrap();
        other.lock().unwrap();
        split(&data, &[]).fails_with(1, &[output, "is being written by another split"]);
        assert!(partial.exists(), "what the other one writes is left alone");
        assert!(!dir.path().join("train.jsonl").exists() && !dir.path().join("eval.jsonl").exists());
        drop(other);
        // The leftovers of a killed run do not block a new one.
        assert_eq!(split(&data, &["--overwrite"]).code, Some(0));
        fs::remove_file(dir.path().join("train.jsonl")).unwrap();
        fs::remove_file(dir.path().join("eval.jsonl")).unwrap();
    }
    let left =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(left.into_iter().all(|name| !name.ends_with(".partial")));
}

#[test]
fn prompts_that_are_held_out_are_not_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    // Every prompt three times, with different whitespace and another system message.
    let data: Vec<String> = (0..60)
        .map(|at| {
            let prompt = format!("question {}", at / 3);
            match at % 3 {
                0 => asks(&prompt),
                1 => asks(&format!("  {}\n", prompt.replace(' ', "  "))),
                _ => json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": prompt}]}).to_string(),
            }
        })
        .collect();
    let data = lines(dir.path(), "data.jsonl", &data);
    let told = split(&data, &["--test-size", "0.1"]);
    assert_eq!(told.code, Some(0), "{told:?}");
    let [train, eval] = prompts(dir.path());
    assert!(eval.iter().all(|prompt| !train.contains(prompt)), "{train:?} {eval:?}");
    let report = report(dir.path());
    let overlap = report["total"]["overlap"].as_u64().unwrap() as usize;
    assert_eq!((eval.len(), train.len()), (6, 54 - overlap));
    assert!((6..=12).contains(&overlap), "{overlap}");
    assert_eq!(report["train_rows_that_ask_what_is_held_out"], overlap);
    let sums = format!(
        "60 rows = {} train + 6 eval + 0 not drawn + {overlap} that ask what is held out + 0 rejected\n",
        54 - overlap
    );
    assert_eq!(told.stdout, sums);

    // The reference's behaviour, but overlaps are counted.
    let told = split(&data, &["--test-size", "0.1", "--allow-overlap", "--overwrite"]);
    assert_eq!(
        told.stdout,
        format!(
            "60 rows = 54 train + 6 eval + 0 not drawn + 0 rejected\n{overlap} training rows ask what a held-out row asks\n"
        )
    );
    let found = self::report(dir.path());
    assert_eq!(
        (&found["total"]["overlap"], &found["train_rows_that_ask_what_is_held_out"]),
        (&json!(0), &json!(overlap))
    );
    assert_eq!(prompts(dir.path())[0].len(), 54);
}

/// Limits the size of files to 8 blocks. The program sees what a full disk would show, except for
/// the error number.
#[test]
fn a_failure_of_writing_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let data =
        lines(dir.path(), "data.jsonl", &(0..2000).map(|at| asks(&format!("q{at}"))).collect::<Vec<_>>());
    let [data, train, eval] =
        [data, dir.path().join("train.jsonl"), dir.path().join("eval.jsonl")].map(|path| text(&path));
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_deepspec-data")]);
    limited.args(["split", "--dataset", &data, "--train-output", &train, "--eval-output", &eval]);
    let told = ended(limited);
    told.fails_with(1, &["train.jsonl", "File too large"]);
    let left = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["data.jsonl"], "nothing half written stays");
}

#[test]
fn a_failure_of_printing_names_where_to() {
    let dir = tempfile::tempdir().unwrap();
    let data =
        lines(dir.path(), "data.jsonl", &(0..20).map(|at| asks(&format!("q{at}"))).collect::<Vec<_>>());
    let [data, train, eval] =
        [data, dir.path().join("train.jsonl"), dir.path().join("eval.jsonl")].map(|path| text(&path));
    let mut printing =
        command(&["split", "--dataset", &data, "--train-output", &train, "--eval-output", &eval]);
    let output = printing.stdout(File::options().write(true).open("/dev/full").unwrap()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("standard output"), "{stderr}");
}
