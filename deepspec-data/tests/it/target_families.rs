//! Targets of a Gemma 4, of a mixture of experts and of a hybrid: their hidden states on disk, and their answers.

use std::fs;
use std::path::Path;

use deepspec_testkit::tiny;
use serde_json::json;

use crate::http::{Http, ask};
use crate::process::{Server, lines, run, text};

#[test]
fn a_gemma4_target_is_captured_and_served() {
    is_captured_and_served(&|dir| tiny::gemma4(dir, 512), "gemma4", 4);
}

#[test]
fn a_mixture_of_experts_is_captured_and_served() {
    is_captured_and_served(&|dir| tiny::target(dir, "qwen3_moe"), "qwen", 1023);
}

#[test]
fn a_hybrid_is_captured_and_served() {
    is_captured_and_served(&|dir| tiny::target(dir, "qwen3_5"), "qwen", 1023);
}

#[test]
fn a_hybrid_with_experts_is_captured_and_served() {
    is_captured_and_served(&|dir| tiny::target(dir, "qwen3_5_moe"), "qwen", 1023);
}

/// `write` makes the target. `chat` are the mask rules, and `mask` is the mask token.
fn is_captured_and_served(write: &dyn Fn(&Path), chat: &str, mask: usize) {
    let dir = tempfile::tempdir().unwrap();
    let (model, cache) = (dir.path().join("model"), dir.path().join("cache"));
    fs::create_dir(&model).unwrap();
    write(&model);
    let recipe = dir.path().join("recipe.yaml");
    let written = format!(
        "name: t\ntarget: {{model: '{}', layer_ids: [embedding, 1, 3]}}\n\
         drafter: {{dspark: {{block_size: 3, num_draft_layers: 1, mask_token_id: {mask}}}}}\n\
         data: {{states: {{cache: unused}}, chat_template: {chat}, max_length: 512}}\n",
        model.display()
    );
    fs::write(&recipe, written).unwrap();
    let row = |id: usize| {
        let answer = "The answer follows from what was said before. ".repeat(id + 1);
        let turns =
            [json!({"role": "user", "content": "Hello?"}), json!({"role": "assistant", "content": answer})];
        json!({"id": id.to_string(), "conversations": turns}).to_string()
    };
    let input = lines(dir.path(), "rows.jsonl", &(0..5).map(row).collect::<Vec<_>>());
    let args = [
        "cache",
        "build",
        "--config",
        &text(&recipe),
        "--input",
        &text(&input),
        "--output-dir",
        &text(&cache),
    ];
    let built = run(&args);
    assert_eq!(built.code, Some(0), "{built:?}");
    assert!(built.stdout.contains("5 rows = 5 kept"), "{built:?}");
    let verified = run(&["cache", "verify", &text(&cache)]);
    assert_eq!(verified.code, Some(0), "{verified:?}");

    let (server, http) = (Server::of(&text(&model), &[]), Http::new());
    let bodies = ["Hello?", "And then?"].map(|prompt| ask(prompt, 12));
    let alone: Vec<_> = bodies.iter().map(|body| http.complete(&server.url, body)).collect();
    assert!(alone.iter().all(|answer| answer["usage"]["completion_tokens"].as_u64() > Some(0)), "{alone:?}");
    let together = http.complete_together(&server.url, &bodies);
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(alone["choices"], together["choices"]);
    }
}
