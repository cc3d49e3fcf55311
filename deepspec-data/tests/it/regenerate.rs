//! `regenerate` against `serve` and against the model itself.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use deepspec_text::ChatTokenizer;
use serde_json::{Value, json};

use crate::broken_model::broken;
use crate::process::{Ended, Row, Server, lines, rows, run, text, tiny};

/// Arguments of a short run, for any kind of server.
pub fn arguments(input: &Path, output: &Path, more: &[&str]) -> Vec<String> {
    let (input, output) = (text(input), text(output));
    let fixed = ["regenerate", "--input", &input, "--output", &output, "--model", "tiny", "--quiet"];
    fixed.iter().chain(more).map(ToString::to_string).collect()
}

pub fn regenerate(input: &Path, output: &Path, more: &[&str]) -> Ended {
    run(&arguments(input, output, more))
}

/// A row with a question and a placeholder answer.
pub fn question(id: impl Into<Value>, text: &str) -> String {
    let answer = json!({"role": "assistant", "content": "to be replaced"});
    json!({"id": id.into(), "conversations": [{"role": "user", "content": text}, answer], "source": "test"})
        .to_string()
}

/// Rows by id.
pub fn by_id(path: &Path) -> BTreeMap<String, Row> {
    let rows = rows(path);
    let count = rows.len();
    let map: BTreeMap<String, Row> = rows.into_iter().map(|row| (row["id"].to_string(), row)).collect();
    assert_eq!(map.len(), count, "an id stands twice in {}", path.display());
    map
}

/// The assistant's texts of a row.
pub fn answers(row: &Row) -> Vec<&str> {
    let messages = row["conversations"].as_array().unwrap();
    messages.iter().filter(|m| m["role"] == "assistant").map(|m| m["content"].as_str().unwrap()).collect()
}

#[test]
fn prompts_and_unknown_fields_stay_and_answers_are_new() {
    let dir = tempfile::tempdir().unwrap();
    let conversation = json!({"id": "several turns", "lang": "en", "error": "old", "conversations": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?", "time": 1},
        {"role": "assistant", "content": "to be replaced"}, {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "to be replaced"}, {"role": "assistant", "content": "and dropped"}]});
    let input = lines(dir.path(), "in.jsonl", &[conversation.to_string(), question(1, "Write a function.")]);
    let (served, direct) = (dir.path().join("served.jsonl"), dir.path().join("direct.jsonl"));
    let sampling =
        ["--temperature", "1", "--top-k", "20", "--max-tokens", "16", "--seed", "5", "--disable-thinking"];

    let server = Server::start(&[]);
    let ended =
        regenerate(&input, &served, &[&sampling[..], &["--server", &format!("{}/v1/", server.url)]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.stdout, "2 rows = 2 ok + 0 failed + 0 pending; 0 malformed lines\n");
    let rows = by_id(&served);
    let row = &rows["\"several turns\""];
    let roles: Vec<&str> =
        row["conversations"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!((&row["status"], &row["lang"], row.get("error")), (&json!("success"), &json!("en"), None));
    assert_eq!(row["conversations"][1], json!({"role": "user", "content": "Hello?", "time": 1}));
    assert!(answers(row).iter().all(|answer| !answer.is_empty() && *answer != "to be replaced"), "{row:?}");
    // The served token ids are stored; prompt ids are stored for the last answer only.
    let tokenizer = ChatTokenizer::load(Path::new(&tiny())).unwrap();
    for (place, has_prompt) in [(2, false), (4, true)] {
        let message = &row["conversations"][place];
        assert_eq!(message.get("prompt_token_ids").is_some(), has_prompt, "{message}");
        let ids: Vec<i64> = serde_json::from_value(message["token_ids"].clone()).unwrap();
        assert_eq!(tokenizer.decode(&ids, true).unwrap().trim_start(), message["content"], "{message}");
    }
    assert!(!dir.path().join("served_error.jsonl").exists());
    let record: Value =
        serde_json::from_slice(&fs::read(dir.path().join("served.jsonl.run.json")).unwrap()).unwrap();
    assert_eq!((&record["settings"]["top_k"], &record["settings"]["seed"]), (&json!(20), &json!(5)));

    let tiny = tiny();
    let embedded = ["--local-model", &tiny, "--device", "cpu", "--max-num-seqs", "1"];
    let ended = regenerate(&input, &direct, &[&sampling[..], &embedded].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(by_id(&direct), rows, "with and without a server the answers are the same");

    // All rows are done, so no server is contacted and none is needed.
    let before = fs::read(&served).unwrap();
    let again = regenerate(&input, &served, &[&sampling[..], &["--server", "http://127.0.0.1:9"]].concat());
    assert_eq!(
        (again.code, again.stdout.as_str()),
        (Some(0), "2 rows = 2 ok + 0 failed + 0 pending; 0 malformed lines\n")
    );
    assert_eq!(fs::read(&served).unwrap(), before);
}

#[test]
fn thoughts_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "in.jsonl", &[question(1, "What is 3 + 4?")]);
    let (tiny, output) = (tiny(), dir.path().join("out.jsonl"));
    let embedded = [
        "--local-model",
        &tiny,
        "--device",
        "cpu",
        "--temperature",
        "0",
        "--max-tokens",
        "24",
        "--enable-thinking",
    ];
    assert_eq!(regenerate(&input, &output, &embedded).code, Some(0));
    let message = &rows(&output)[0]["conversations"][1];
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty(), "{message}");
}

#[test]
fn failed_and_malformed_rows_are_accounted_for() {
    let dir = tempfile::tempdir().unwrap();
    let long = question("long", &"postcards ".repeat(60));
    let data = [
        question(1, "Hello?"),
        long,
        "{broken".into(),
        question(1, "Hello again?"),
        question(2, "What is 3 + 4?"),
    ];
    let input = lines(dir.path(), "in.jsonl", &data);
    let (output, errors) = (dir.path().join("out.jsonl"), dir.path().join("out_error.jsonl"));
    let (tiny, sampling) = (tiny(), ["--temperature", "0", "--max-tokens", "8", "--disable-thinking"]);
    let short =
        [&sampling[..], &["--local-model", &tiny, "--device", "cpu", "--max-model-len", "64"]].concat();
    let ended = regenerate(&input, &output, &short);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.stdout, "4 rows = 3 ok + 1 failed + 0 pending; 1 malformed lines\n");
    assert!(ended.stderr.contains(&format!("{}:3: not valid JSON", input.display())), "{ended:?}");
    let failed = &rows(&errors)[0];
    assert_eq!(
        (&failed["id"], &failed["status"], &failed["source"]),
        (&json!("long"), &json!("error"), &json!("test"))
    );
    assert!(failed["error"].as_str().unwrap().contains("the context holds 64"), "{failed:?}");
    assert_eq!(answers(failed), ["to be replaced"], "a failed row is the input row");
    let rejected = rows(&dir.path().join("out.jsonl.rejected.jsonl"));
    assert_eq!(rejected.iter().map(|row| row["line"].as_u64().unwrap()).collect::<Vec<_>>(), [3]);
    assert!(by_id(&output).contains_key("\"1~2\""), "a repeated id is made unique");

    let before = (fs::read(&output).unwrap(), fs::read(&errors).unwrap());
    let again = regenerate(&input, &output, &short);
    assert_eq!((again.code, again.stdout), (Some(1), ended.stdout), "failed rows are left alone");
    assert_eq!((fs::read(&output).unwrap(), fs::read(&errors).unwrap()), before);

    let roomy = [&sampling[..], &["--local-model", &tiny, "--device", "cpu", "--retry-failed"]].concat();
    let ended = regenerate(&input, &output, &roomy);
    assert_eq!(ended.stdout, "4 rows = 4 ok + 0 failed + 0 pending; 1 malformed lines\n");
    assert!(!errors.exists());
    assert_eq!(by_id(&output).len(), 4);
}

#[test]
fn another_run_s_output_is_not_continued() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "in.jsonl", &[question(1, "Hello?")]);
    let output = dir.path().join("out.jsonl");
    let tiny = tiny();
    let embedded = ["--local-model", &tiny, "--device", "cpu", "--disable-thinking", "--max-tokens"];
    assert_eq!(regenerate(&input, &output, &[&embedded[..], &["4"]].concat()).code, Some(0));
    // Two models of the same name are distinguished by their weights.
    let other = broken(dir.path());
    let same = ["--local-model", &other, "--device", "cpu", "--disable-thinking", "--max-tokens", "4"];
    regenerate(&input, &output, &same)
        .fails_with(2, &["out.jsonl", "weights of --local-model", "--overwrite"]);
    let hot = [&embedded[..], &["5", "--temperature", "0.5"]].concat();
    regenerate(&input, &output, &hot)
        .fails_with(2, &["out.jsonl", "(max_tokens, temperature)", "--overwrite"]);
    assert_eq!(regenerate(&input, &output, &[&hot[..], &["--overwrite"]].concat()).code, Some(0));

    let other = lines(dir.path(), "other.jsonl", &[question(2, "Hello?")]);
    regenerate(&other, &output, &hot).fails_with(2, &["out.jsonl:1: id `1` is in none of the inputs"]);
    fs::remove_file(dir.path().join("out.jsonl.run.json")).unwrap();
    regenerate(&input, &output, &hot).fails_with(2, &["out.jsonl.run.json is missing"]);
    regenerate(&input, &input, &hot).fails_with(2, &["it would replace"]);
    regenerate(&dir.path().join("absent.jsonl"), &output, &hot).fails_with(2, &["absent.jsonl"]);
    regenerate(&input, &output, &["--local-model", &tiny, "--temperature", "9"])
        .fails_with(2, &["`temperature`: 9"]);
    regenerate(&input, &output, &["--server", "localhost:1"]).fails_with(2, &["localhost:1"]);
}

#[test]
fn renamed_flags_are_refused_with_the_new_name() {
    let renamed: [(&[&str], &str, &str); 6] = [
        (&["serve", "--slots", "4"], "--slots", "--max-num-seqs"),
        (&["serve", "--max-context", "64"], "--max-context", "--max-model-len"),
        (&["regenerate", "--embedded", "model"], "--embedded", "--local-model"),
        (&["regenerate", "--attempts", "3"], "--attempts", "--max-attempts"),
        (&["--quiet", "regenerate", "--patience=5"], "--patience", "--server-wait"),
        (&["cache", "build", "--last", "all"], "--last", "--final-states"),
    ];
    for (arguments, old, new) in renamed {
        let ended = run(arguments);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(&format!("`{old}` is now `{new}`")), "{ended:?}");
    }
}
