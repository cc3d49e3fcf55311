//! Targets of every family: their hidden states on disk, and the answers of some.

use std::fs;
use std::path::Path;

use deepspec_testkit::tiny;
use serde_json::json;

use crate::http::{Http, ask};
use crate::process::{Server, lines, run, text};

#[test]
fn a_gemma4_target_is_captured_and_served() {
    let dir = tempfile::tempdir().unwrap();
    tiny::gemma4(dir.path(), 512);
    is_captured(dir.path(), "gemma4", 4);
    is_served(dir.path());
}

#[test]
fn targets_of_other_families_are_captured() {
    for family in tiny::OTHER_FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        tiny::target(dir.path(), family);
        is_captured(dir.path(), "qwen", 1023);
    }
}

#[test]
fn mixtures_of_experts_and_hybrids_are_served() {
    for family in ["qwen3_moe", "qwen3_5", "qwen3_5_moe"] {
        let dir = tempfile::tempdir().unwrap();
        tiny::target(dir.path(), family);
        is_served(dir.path());
    }
}

/// Caches the states of some rows. `chat` are the mask rules, and `mask` is the mask token.
fn is_captured(model: &Path, chat: &str, mask: usize) {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("cache");
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
}

/// Asks a server of this target the same questions one by one and together.
fn is_served(model: &Path) {
    let (server, http) = (Server::of(&text(model), &[]), Http::new());
    let bodies = ["Hello?", "And then?"].map(|prompt| ask(prompt, 12));
    let alone: Vec<_> = bodies.iter().map(|body| http.complete(&server.url, body)).collect();
    assert!(alone.iter().all(|answer| answer["usage"]["completion_tokens"].as_u64() > Some(0)), "{alone:?}");
    let together = http.complete_together(&server.url, &bodies);
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(alone["choices"], together["choices"]);
    }
}
