//! The answers of `serve`.

use serde_json::{Value, json};

use crate::http::{Http, ask, content};
use crate::process::Server;

const PROMPTS: [&str; 6] = [
    "Dorothea has 11 postcards. Sebastian has 14 more than Dorothea. What is the total number of postcards?",
    "Hello?",
    "Write a function that adds two numbers.",
    "Which daring destination suits Sebastian over the weekend?",
    "What is 3 + 4?",
    "I need a function that multiplies all numbers of a list.",
];

#[test]
fn streamed_pieces_join_to_the_whole_answer() {
    let (server, http) = (Server::start(&[]), Http::new());
    let mut body = ask(PROMPTS[0], 70);
    body["chat_template_kwargs"] = json!({});
    let whole = http.complete(&server.url, &body);
    let message = &whole["choices"][0]["message"];
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!("tiny")));
    assert_eq!(message["role"], "assistant");
    assert!(message["reasoning_content"].is_string(), "the tiny target thinks by default: {whole}");
    assert!(!whole.to_string().contains("think>"), "{whole}");

    body["stream_options"] = json!({"include_usage": true});
    let events = http.stream(&server.url, body);
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|data| serde_json::from_str(data).unwrap()).collect();
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"])
    );
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let joined = |field: &str| -> String {
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][field].as_str()).collect()
    };
    assert_eq!(joined("content"), message["content"]);
    assert_eq!(joined("reasoning_content"), message["reasoning_content"]);
    let [.., ended, counted] = chunks.as_slice() else { panic!("{chunks:?}") };
    assert_eq!(ended["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
    assert_eq!((&counted["choices"], &counted["usage"]), (&json!([]), &whole["usage"]));
}

#[test]
fn company_does_not_change_an_answer() {
    let (server, http) = (Server::start(&["--max-num-seqs", "4"]), Http::new());
    let requests: Vec<Value> = PROMPTS
        .iter()
        .flat_map(|prompt| {
            let mut sampled = ask(prompt, 24);
            (sampled["temperature"], sampled["seed"]) = (json!(1.0), json!(7));
            [ask(prompt, 24), sampled]
        })
        .collect();
    let alone: Vec<Value> = requests.iter().map(|body| http.complete(&server.url, body)).collect();
    let together = http.complete_together(&server.url, &requests);
    for ((alone, together), request) in alone.iter().zip(&together).zip(&requests) {
        assert_eq!(alone["choices"], together["choices"], "{request}");
        assert_eq!(alone["usage"], together["usage"], "{request}");
    }
    let mut other = requests[1].clone();
    other["seed"] = json!(8);
    assert_ne!(
        content(&http.complete(&server.url, &other)),
        content(&alone[1]),
        "another seed gives another answer"
    );
    other["seed"] = Value::Null;
    let unseeded = [http.complete(&server.url, &other), http.complete(&server.url, &other)];
    assert_ne!(content(&unseeded[0]), content(&unseeded[1]), "without a seed each answer is new");
}

#[test]
fn answers_end_where_they_are_told_to() {
    let (server, http) = (Server::start(&[]), Http::new());
    let free = http.complete(&server.url, &ask(PROMPTS[2], 40));
    let text = content(&free).to_string();
    // A stop string that starts and ends inside words, so that it does not align with tokens.
    let stop: String = text.chars().skip(10).take(9).collect();
    let expected = &text[..text.find(&stop).unwrap()];
    let mut body = ask(PROMPTS[2], 40);
    body["stop"] = json!(["never said", stop]);
    let cut = http.complete(&server.url, &body);
    assert_eq!((content(&cut), &cut["choices"][0]["finish_reason"]), (expected, &json!("stop")));
    assert!(cut["usage"]["completion_tokens"].as_u64() < free["usage"]["completion_tokens"].as_u64());
    let streamed: String = http
        .stream(&server.url, body)
        .iter()
        .filter_map(|data| {
            serde_json::from_str::<Value>(data).ok()?["choices"][0]["delta"]["content"]
                .as_str()
                .map(str::to_owned)
        })
        .collect();
    assert_eq!(streamed, expected);

    let short = http.complete(&server.url, &ask(PROMPTS[0], 5));
    assert_eq!(short["choices"][0]["finish_reason"], "length");
    assert_eq!(short["usage"]["completion_tokens"], 5);
    let (prompt, total) = (&short["usage"]["prompt_tokens"], &short["usage"]["total_tokens"]);
    assert_eq!(prompt.as_u64().unwrap() + 5, total.as_u64().unwrap());
    assert!(text.starts_with(content(&http.complete(&server.url, &ask(PROMPTS[2], 5)))));
}

#[test]
fn who_is_served_is_told() {
    let (server, http) = (Server::start(&["--max-num-seqs", "3"]), Http::new());
    let models = http.get(&format!("{}/v1/models", server.url));
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("tiny")));
    let health = http.get(&format!("{}/health", server.url));
    assert_eq!(
        (&health["status"], &health["slots"], &health["running"]),
        (&json!("ok"), &json!(3), &json!(0))
    );
}

#[test]
fn messages_may_come_in_parts() {
    let (server, http) = (Server::start(&[]), Http::new());
    let mut parts = ask("", 8);
    parts["messages"][0]["content"] =
        json!([{"type": "text", "text": "Hello?"}, {"type": "text", "text": "Again?"}]);
    let plain = http.complete(&server.url, &ask("Hello?\nAgain?", 8));
    let joined = http.complete(&server.url, &parts);
    assert_eq!((&plain["choices"], &plain["usage"]), (&joined["choices"], &joined["usage"]));
}
