//! The recipe settings that identify the states, and the settings that are refused.

mod common;

use std::fs;

use common::Bench;
use deepspec_capture::cache::{Encoding, FinalStates};
use deepspec_capture::identity;
use deepspec_core::Tap;
use deepspec_models::chat_formats;
use deepspec_text::ChatTemplate;

#[test]
fn the_identity_is_that_of_target_text_and_taps() {
    let bench = Bench::new();
    let source = bench.source(&[]).unwrap();
    let found = &source.identity;
    assert_eq!(
        (found.model_type.as_str(), found.chat_template.as_str(), found.max_length),
        ("qwen3", "qwen", 300)
    );
    assert_eq!((found.hidden_size, found.vocab_size), (192, 1024));
    assert_eq!(found.taps, [Tap::Embedding, Tap::Layer(1), Tap::Layer(4)]);
    assert_eq!(found.system_prompt.as_deref(), Some("You are a helpful assistant."));
    assert_eq!(source.template.default_system, found.system_prompt);
    let layout = source.layout(FinalStates::All, Encoding::Bf16);
    assert_eq!((layout.taps.len(), layout.hidden_size, layout.last), (3, 192, FinalStates::All));
    // Opened once more, and with a template that does not come from the recipe.
    assert_eq!(bench.source(&[]).unwrap().identity, *found);
    let own = ChatTemplate::from_name("qwen", &chat_formats()).unwrap();
    assert_eq!(
        identity(&bench.recipe(&[]), &source.dir, &source.tokenizer, &own, &source.config).unwrap(),
        *found
    );
    let empty = "data.system_prompt=''";
    let unprompted = bench.source(&[empty]).unwrap();
    assert_eq!((&unprompted.identity.system_prompt, &unprompted.template.default_system), (&None, &None));
    assert_eq!(
        identity(&bench.recipe(&[empty]), &source.dir, &source.tokenizer, &own, &source.config).unwrap(),
        unprompted.identity
    );
}

/// The fields of the identity that differ after a change.
fn changed(bench: &Bench, overrides: &[&str]) -> Vec<String> {
    let before = Bench::new().source(&[]).unwrap().identity;
    let differences = before.differences(&bench.source(overrides).unwrap().identity);
    differences.into_iter().map(|line| line.split(' ').next().unwrap().to_string()).collect()
}

#[test]
fn whatever_changes_the_states_changes_the_identity() {
    let bench = Bench::new();
    assert!(changed(&bench, &["name=other", "seed=1", "data.states.cache=elsewhere"]).is_empty());
    assert_eq!(changed(&bench, &["target.layer_ids=[1, 4]"]), ["taps"]);
    assert_eq!(changed(&bench, &["data.max_length=301"]), ["max_length"]);
    assert_eq!(changed(&bench, &["data.system_prompt=Be brief."]), ["system_prompt"]);
    assert_eq!(changed(&bench, &["data.system_prompt=''"]), ["system_prompt"]);
    // Another template also brings another default system prompt: none.
    assert_eq!(changed(&bench, &["data.chat_template=gemma4"]), ["chat_template", "system_prompt"]);

    // Custom templates are distinguished by their content, not by their name.
    let mine = |end: &str| {
        let marks = "assistant_header: \"<|im_start|>assistant\\n\"";
        let system = "default_system: You are a helpful assistant.";
        format!("data.chat_template={{name: qwen, {marks}, {system}, end_of_turn: \"{end}\"}}")
    };
    assert!(changed(&bench, &[&mine("<|im_end|>\\n")]).is_empty());
    assert_eq!(changed(&bench, &[&mine("<|im_end|>")]), ["template"]);

    bench.edit("chat_template.jinja", "<|im_start|>", "<|im_start|> ");
    assert_eq!(changed(&bench, &[]), ["template"]);
    let bench = Bench::new();
    let answer = "{{- ns.answer.lstrip('\\n') -}}";
    bench.edit(
        "chat_template.jinja",
        answer,
        &format!("{{%- generation -%}}{answer}{{%- endgeneration -%}}"),
    );
    assert!(changed(&bench, &[]).is_empty(), "tags do not change what is written");
    let tagged = bench.source(&["data.chat_template=generation"]).unwrap().identity;
    assert_eq!((tagged.chat_template.as_str(), &tagged.system_prompt), ("generation", &None));
    bench.edit("chat_template.jinja", "{%- endgeneration -%}", "{%- endgeneration -%}{{ '' }}");
    assert_eq!(bench.source(&["data.chat_template=generation"]).unwrap().identity, tagged);
    bench.edit("chat_template.jinja", "{%- generation -%}", "{{- ns.answer[:1] -}}{%- generation -%}");
    bench.edit("chat_template.jinja", answer, "{{- ns.answer[1:] -}}");
    let moved = bench.source(&["data.chat_template=generation"]).unwrap().identity;
    assert_ne!(moved.template, tagged.template);
    let bench = Bench::new();
    bench.edit("config.json", "\"rope_theta\": 10000.0", "\"rope_theta\": 20000.0");
    assert_eq!(changed(&bench, &[]), ["target_config"]);
    let bench = Bench::new();
    bench.edit("tokenizer.json", "\"version\"", "\"version\" ");
    assert_eq!(changed(&bench, &[]), ["tokenizer"]);
    let bench = Bench::new();
    let weights = bench.path("target/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let half = bytes.len() / 2;
    bytes[half..].iter_mut().for_each(|byte| *byte ^= 1);
    fs::write(&weights, bytes).unwrap();
    assert_eq!(changed(&bench, &[]), ["target_weights"]);
}

#[test]
fn what_does_not_fit_is_named() {
    let bench = Bench::new();
    let refused = |bench: &Bench, overrides: &[&str], words: &[&str]| {
        let error =
            bench.source(overrides).err().unwrap_or_else(|| panic!("{overrides:?} was accepted")).to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
        assert!(!error.contains('\n'), "{error}");
    };
    refused(&bench, &["data.chat_template=llama"], &["data.chat_template", "llama", "qwen, gemma4, llama3"]);
    refused(
        &bench,
        &["data.chat_template=generation"],
        &["data.chat_template", "no {% generation %} tags", "qwen, gemma4, llama3"],
    );
    refused(&bench, &["data.max_length=2049"], &["data.max_length", "2049", "max_position_embeddings 2048"]);
    refused(&bench, &["target.layer_ids=[1, 6]"], &["target.layer_ids", "no layer 6", "0 to 5"]);
    refused(&bench, &["drafter.dspark.mask_token_id=1024"], &["mask_token_id", "1024", "1023"]);
    refused(&bench, &["drafter.dspark.mask_token_id=-1"], &["mask_token_id", "-1"]);
    refused(&bench, &["target.model=/nowhere"], &["/nowhere", "no such folder", "hub id"]);
    refused(&bench, &["target.revision=v1"], &["has no revision v1", "leave the revision out"]);
    fs::remove_file(bench.path("target/model.safetensors")).unwrap();
    refused(&bench, &[], &["neither model.safetensors", "no GGUF"]);
    fs::remove_file(bench.path("target/tokenizer.json")).unwrap();
    refused(&bench, &[], &["tokenizer.json"]);
}
