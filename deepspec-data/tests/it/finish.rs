//! Finish reasons: interrupted answers are requested again, and after a truncated answer no end of
//! turn is supervised.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use deepspec_testkit::server::{Reply, Server};
use serde_json::{Value, json};

use crate::process::{lines, rows, run, text, tiny};
use crate::regenerate::{answers, by_id, question, regenerate};

const ANSWER: &str = "The sum reads 3 + 4 = 7. The answer is 7, and there is nothing else to say.";

/// A chat completion choice with this message and finish reason.
fn completion(message: Value, finish: Value) -> Value {
    json!({"choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
}

fn report(output: &Path) -> Value {
    let name = format!("{}.report.json", output.file_name().unwrap().to_string_lossy());
    serde_json::from_slice(&fs::read(output.with_file_name(name)).unwrap()).unwrap()
}

/// The supervised text of each row, by its id.
fn learned(input: &Path) -> BTreeMap<String, String> {
    let (input, tiny) = (text(input), tiny());
    let ended = run(&["inspect", "--input", &input, "--model", &tiny, "--json", "--all", "--quiet"]);
    let found: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    let text = |row: &Value| -> String {
        let segments = row["segments"].as_array().unwrap().iter();
        segments
            .filter(|part| part["supervised"] == true)
            .map(|part| part["text"].as_str().unwrap())
            .collect()
    };
    let rows = found["rows"].as_array().unwrap().iter();
    rows.map(|row| (row["id"].as_str().unwrap().to_owned(), text(row))).collect()
}

#[test]
fn what_a_server_broke_off_is_asked_again_and_then_failed() {
    let dir = tempfile::tempdir().unwrap();
    let words = ["abort", "error", "repetition", "cancelled", "Timeout"];
    let mut data: Vec<String> = words.iter().map(|word| question(*word, word)).collect();
    data.push(question("once", "once"));
    let input = lines(dir.path(), "in.jsonl", &data);
    let once = AtomicUsize::new(0);
    let server = Server::start(move |ask| {
        let asked = ask.body["messages"][0]["content"].as_str().unwrap().to_owned();
        let finish = match asked.as_str() {
            "once" if once.fetch_add(1, Ordering::SeqCst) == 0 => "abort",
            "once" => "stop",
            word => word,
        };
        Reply::Json(completion(json!({"role": "assistant", "content": "The answer is"}), json!(finish)))
    });
    let output = dir.path().join("out.jsonl");
    let more = ["--max-attempts", "3", "--concurrency", "1", "--server", &server.url()];
    let ended = regenerate(&input, &output, &more);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.stdout, "6 rows = 1 ok + 5 failed + 0 pending; 0 malformed lines\n");
    assert_eq!(rows(&output)[0]["id"], "once");
    let failed = by_id(&dir.path().join("out_error.jsonl"));
    for word in words {
        let row = &failed[&format!("{word:?}")];
        assert!(row["error"].as_str().unwrap().contains("broken off"), "{row:?}");
    }
    assert_eq!(server.count(), 5 * 3 + 2, "each is asked three times at most");
    let failures = &report(&output)["this_run"]["servers"][0]["failures"];
    assert_eq!(failures, &json!({"broken_off": 16}));
}

#[test]
fn cut_answers_are_kept_and_counted_and_their_end_of_turn_is_not_learned() {
    let dir = tempfile::tempdir().unwrap();
    // The finish reason of a server, and the one that is stored.
    let ends = [
        ("stop", "stop"),
        ("eos_token", "stop"),
        ("length", "length"),
        ("MAX_TOKENS", "length"),
        ("content_filter", "content_filter"),
        ("SAFETY", "content_filter"),
        ("brand new", "unknown"),
        ("null", "unknown"),
        ("own stop text", "stop_sequence"),
        ("torn call", "invalid_tool_call"),
    ];
    let row = |(word, _): &(&str, &str)| {
        let mut row: Value = serde_json::from_str(&question(*word, word)).unwrap();
        if *word == "own stop text" {
            row["sampling"] = json!({"stop": ["\n\n"]});
        }
        row.to_string()
    };
    let input = lines(dir.path(), "in.jsonl", &ends.iter().map(row).collect::<Vec<_>>());
    let server = Server::start(|ask| {
        let word = ask.body["messages"][0]["content"].as_str().unwrap().to_owned();
        let mut message = json!({"role": "assistant", "content": ANSWER});
        let finish = match word.as_str() {
            "null" => Value::Null,
            "own stop text" => json!("stop"),
            "torn call" => {
                message["tool_calls"] = json!([{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{\"a\": "}}]);
                json!("tool_calls")
            }
            word => json!(word),
        };
        Reply::Json(completion(message, finish))
    });
    let output = dir.path().join("out.jsonl");
    let ended = regenerate(&input, &output, &["--server", &server.url()]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(server.count(), ends.len(), "nothing is asked twice");
    let found = by_id(&output);
    let mut counts = BTreeMap::<&str, u64>::new();
    for (word, kept) in ends {
        let row = &found[&format!("{word:?}")];
        let told = (&row["finish_reason"], &row["conversations"][1]["finish_reason"]);
        assert_eq!(told, (&json!(kept), &json!(kept)), "{word}");
        *counts.entry(kept).or_default() += 1;
    }
    let report = report(&output);
    assert_eq!((&report["rows"]["finish_reasons"], &report["rows"]["cut"]), (&json!(counts), &json!(8)));

    let learned = learned(&output);
    for (word, kept) in ends {
        let text = &learned[word];
        assert!(text.contains(ANSWER), "{word}: {text:?}");
        assert_eq!(text.contains("<|im_end|>"), kept == "stop", "{word}: {text:?}");
    }
}

/// The embedded engine distinguishes its own stop strings from ends of turns, as a server does.
#[test]
fn a_stop_text_of_the_row_is_no_end_of_turn() {
    let dir = tempfile::tempdir().unwrap();
    let asked = "Dorothea has 11 postcards. Sebastian has 14 more than Dorothea. What is the total number of postcards?";
    let (tiny, output) = (tiny(), dir.path().join("out.jsonl"));
    let answer = |row: &str| {
        let input = lines(dir.path(), "in.jsonl", &[row.to_owned()]);
        let more = [
            "--local-model",
            &tiny,
            "--device",
            "cpu",
            "--temperature",
            "0",
            "--disable-thinking",
            "--max-tokens",
            "120",
        ];
        let ended =
            regenerate(&input, &output, &[&more[..], &["--max-num-seqs", "1", "--overwrite"]].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        rows(&output).remove(0)
    };
    let whole = answer(&question("a", asked));
    assert_eq!(whole["finish_reason"], "stop", "{whole:?}");
    assert!(learned(&output)["a"].contains("<|im_end|>"));
    let said = answers(&whole)[0];
    let stop: String = said.chars().skip(30).take(9).collect();
    let mut row: Value = serde_json::from_str(&question("a", asked)).unwrap();
    row["sampling"] = json!({"stop": [stop]});
    let cut = answer(&row.to_string());
    assert_eq!(answers(&cut), [&said[..said.find(&stop).unwrap()]]);
    assert_eq!(cut["finish_reason"], "stop_sequence");
    assert!(!learned(&output)["a"].contains("<|im_end|>"), "{:?}", learned(&output));
}

#[test]
fn thoughts_that_are_dropped_leave_no_empty_answer() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "in.jsonl", &[question("a", "Hello?")]);
    let server = Server::start(|_| {
        Reply::Json(completion(json!({"content": null, "reasoning": "hm, let me"}), json!("length")))
    });
    let output = dir.path().join("out.jsonl");
    let ended = regenerate(&input, &output, &["--reasoning", "drop", "--server", &server.url()]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let failed = rows(&dir.path().join("out_error.jsonl"));
    assert!(failed[0]["error"].as_str().unwrap().contains("nothing is left of the answer"), "{failed:?}");
}
