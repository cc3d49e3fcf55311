//! Thinking between special tokens, as some model families mark it, stays separate from the answer.

use serde_json::{Value, json};

use crate::http::{Http, ask, content};
use crate::process::{Server, lines, text, tiny};
use crate::regenerate::{by_id, question, regenerate};

const QUESTION: &str =
    "Dorothea has 11 postcards. Sebastian has 14 more than Dorothea. What is the total number of postcards?";

/// The concatenated text of a streamed answer.
fn joined(events: &[String], field: &str) -> String {
    let chunks = events.iter().filter_map(|data| serde_json::from_str::<Value>(data).ok());
    chunks.filter_map(|chunk| Some(chunk["choices"][0]["delta"][field].as_str()?.to_owned())).collect()
}

#[test]
fn thoughts_between_special_tokens_are_none_of_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (http, mut body) = (Http::new(), ask(QUESTION, 70));
    body["chat_template_kwargs"] = json!({});
    let plain = http.complete(&Server::start(&[]).url, &body);
    let message = &plain["choices"][0]["message"];
    assert!(message["reasoning_content"].is_string() && !content(&plain).is_empty(), "{plain}");

    deepspec_testkit::tiny::with_special_think_tags(tiny().as_ref(), dir.path());
    let special = text(dir.path());
    let server = Server::of(&special, &[]);
    let whole = http.complete(&server.url, &body);
    assert_eq!((&whole["choices"], &whole["usage"]), (&plain["choices"], &plain["usage"]));
    let events = http.stream(&server.url, body);
    assert_eq!(joined(&events, "content"), message["content"]);
    assert_eq!(joined(&events, "reasoning_content"), message["reasoning_content"]);

    // They are not supervised as such either.
    let input = lines(dir.path(), "in.jsonl", &[question(1, QUESTION)]);
    let sampling = [
        "--temperature",
        "0",
        "--max-tokens",
        "70",
        "--device",
        "cpu",
        "--max-num-seqs",
        "1",
        "--enable-thinking",
    ];
    let usual = tiny();
    let whose = [(special.as_str(), "keep"), (special.as_str(), "drop"), (usual.as_str(), "keep")];
    let rows = whose.map(|(model, reasoning)| {
        let output = dir.path().join("out.jsonl");
        let more = ["--local-model", model, "--reasoning", reasoning, "--overwrite"];
        let ended = regenerate(&input, &output, &[&sampling[..], &more].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        by_id(&output)["1"]["conversations"][1].clone()
    });
    let [kept, dropped, plain] = rows;
    assert_eq!(kept, plain);
    assert_eq!(kept["reasoning_content"], message["reasoning_content"]);
    assert_eq!((&dropped["content"], dropped.get("reasoning_content")), (&message["content"], None));
}
