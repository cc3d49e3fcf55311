//! Nulls as Python tools write them, `name` fields, and empty answers.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::http::{Http, ask};
use crate::process::{Server, lines, rows, run, text, tiny, tiny_for};
use crate::split::split;

const ANSWER: &str = "The sum reads 3 + 4 = 7. The answer is 7, and there is nothing else to say.";

/// The rows that `inspect` shows, and its summary.
fn inspected(input: &Path, model: &str) -> (Vec<Value>, Value) {
    let ended = run(&["inspect", "--input", &text(input), "--model", model, "--json", "--all", "--quiet"]);
    let found: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    (found["rows"].as_array().unwrap().clone(), found["summary"].clone())
}

#[test]
fn a_null_is_an_absent_field() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    tiny_for(&model, 2048);
    // Public templates test whether a field is defined.
    let path = model.join("chat_template.jinja");
    let template = fs::read_to_string(&path).unwrap();
    let asks = "{%- for message in messages %}{%- if message.name is defined %}{{- message.name + ': ' }}{%- endif %}\
                {%- if message.tool_calls is defined %}{{- message.tool_calls | length }}{%- endif %}{%- endfor %}";
    fs::write(&path, format!("{asks}{template}")).unwrap();
    let nothing = [
        "name",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "reasoning_content",
        "refusal",
        "audio",
        "weight",
    ];
    let nulls = || nothing.iter().map(|name| ((*name).to_owned(), Value::Null)).collect::<Map<_, _>>();
    let said = |role: &str, content: &str, more: Map<String, Value>| {
        let mut message = json!({"role": role, "content": content});
        message.as_object_mut().unwrap().extend(more);
        message
    };
    let plain = json!({"id": "a", "conversations": [said("user", "3 + 4?", Map::new()), said("assistant", ANSWER, Map::new())]});
    let full = json!({"id": "a", "tools": null, "sampling": null, "status": null, "messages": null,
        "conversations": [said("user", "3 + 4?", nulls()), said("assistant", ANSWER, nulls())]});
    let shown = [plain.clone(), full.clone()].map(|row| {
        let input = lines(dir.path(), "rows.jsonl", &[row.to_string()]);
        inspected(&input, &text(&model)).0
    });
    assert_eq!((shown[0].len(), &shown[0]), (1, &shown[1]));

    // Every optional field of a request as null.
    let (server, http) = (Server::of(&text(&model), &[]), Http::new());
    let mut request = ask("3 + 4?", 8);
    let expected = http.complete(&server.url, &request);
    request["messages"][0].as_object_mut().unwrap().extend(nulls());
    for field in [
        "tools",
        "stop",
        "seed",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "logprobs",
        "response_format",
        "tool_choice",
        "stream_options",
        "user",
    ] {
        request[field] = Value::Null;
    }
    assert_eq!(http.complete(&server.url, &request)["choices"], expected["choices"]);
}

#[test]
fn an_answer_of_nothing_teaches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let row = |id: &str, first: Value| {
        json!({"id": id, "conversations": [
            {"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": first},
            {"role": "user", "content": "And then?"}, {"role": "assistant", "content": ANSWER}]})
        .to_string()
    };
    let input = lines(
        dir.path(),
        "rows.jsonl",
        &[
            row("empty", json!("")),
            row("null", Value::Null),
            row("blank", json!(" \n")),
            row("said", json!("7")),
        ],
    );
    let (rows, _) = inspected(&input, &tiny());
    let spans =
        |id: &str| rows.iter().find(|row| row["id"] == id).unwrap()["spans"].as_array().unwrap().len();
    assert_eq!(["empty", "null", "blank", "said"].map(spans), [1, 1, 1, 2]);
}

#[test]
fn thoughts_are_one_field_under_all_names() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["reasoning_content", "reasoning", "thinking"];
    let shown = names.map(|name| {
        let answer = json!({"role": "assistant", "content": ANSWER, name: "Let me add them."});
        let row = json!({"id": "a", "conversations": [{"role": "user", "content": "3 + 4?"}, answer]});
        inspected(&lines(dir.path(), "rows.jsonl", &[row.to_string()]), &tiny())
    });
    assert!(shown.iter().all(|one| one == &shown[0]), "{shown:?}");
    let (rows, summary) = &shown[0];
    let learned = rows[0]["segments"].to_string().contains("Let me add them.");
    assert!(learned || summary["thoughts_left_out"] == 1, "{summary}");
}

#[test]
fn numbers_that_json_has_no_form_for_cost_no_row() {
    let dir = tempfile::tempdir().unwrap();
    let row = |score: &str| {
        let says = json!([{"role": "user", "content": format!("is {score} a number?")}, {"role": "assistant", "content": ANSWER}]);
        format!("{{\"id\": {score:?}, \"score\": {score}, \"messages\": {says}}}")
    };
    let data = lines(dir.path(), "data.jsonl", &["NaN", "Infinity", "-Infinity", "1.5"].map(row));
    let ended = split(&data, &["--test-size", "0"]);
    assert_eq!(ended.stdout, "4 rows = 4 train + 0 eval + 0 not drawn + 0 rejected\n", "{ended:?}");
    let kept = rows(&dir.path().join("train.jsonl"));
    assert_eq!(kept[0]["conversations"][0]["content"], "is NaN a number?");
    assert_eq!(inspected(&data, &tiny()).1["good"], 4);
}
