//! Vocabularies as they are written to GGUF, and tokenizers that GGUF cannot represent.

use std::fs;

use deepspec_checkpoint::gguf::{Tokenizer, Value};
use serde_json::{Value as Json, json};

fn tokenizer() -> Json {
    json!({
        "pre_tokenizer": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
        "added_tokens": [
            {"id": 4, "content": "<|end|>", "special": false},
            {"id": 5, "content": "<tool>", "special": false},
            {"id": 6, "content": "<pad>", "special": true},
        ],
    })
}

fn read(text: &str) -> Result<Tokenizer, String> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), text).unwrap();
    Tokenizer::read(dir.path(), 8).map_err(|error| error.to_string())
}

#[test]
fn every_place_of_the_vocabulary_is_filled() {
    for merges in [json!(["a b"]), json!([["a", "b"]])] {
        let mut json = tokenizer();
        json["model"]["merges"] = merges;
        let read = read(&json.to_string()).unwrap();
        assert!(read.has_known_pre_tokenizer());
        let entries = read.into_entries();
        let entry = |key: &str| {
            entries.iter().find(|(name, _)| name == &format!("tokenizer.ggml.{key}")).unwrap().1.clone()
        };
        let tokens =
            ["a", "b", "ab", "[PAD3]", "<|end|>", "<tool>", "<pad>", "[PAD7]"].map(String::from).to_vec();
        assert_eq!(entry("tokens"), Value::Texts(tokens));
        // Normal, unused, control, user-defined.
        assert_eq!(entry("token_type"), Value::Integers(vec![1, 1, 1, 5, 3, 4, 3, 5]));
        assert_eq!(entry("merges"), Value::Texts(vec!["a b".into()]));
        assert_eq!(entry("pre"), Value::Text("gpt-2".into()));
    }
    let mut json = tokenizer();
    json["pre_tokenizer"] = json!({"pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "x"}}, {"type": "ByteLevel", "use_regex": false},
    ]});
    assert!(!read(&json.to_string()).unwrap().has_known_pre_tokenizer());
}

#[test]
fn other_tokenizers_are_refused_by_what_is_wrong() {
    type Edit = fn(&mut Json);
    let cases: [(Edit, &str); 9] = [
        (|json| json["model"]["type"] = json!("Unigram"), "byte-level BPE only"),
        (|json| json["pre_tokenizer"] = json!({"type": "Metaspace"}), "no byte-level step"),
        (|json| json["model"]["vocab"]["c"] = json!(8), "\"c\" has id 8 of a vocabulary of 8"),
        (|json| json["model"]["vocab"]["c"] = json!(-1), "\"c\" has id -1"),
        (|json| json["added_tokens"][0]["id"] = json!(1_u64 << 40), "of a vocabulary of 8"),
        (|json| json["added_tokens"][0]["content"] = json!("ab"), "\"ab\" stands for two ids"),
        (|json| json["added_tokens"][0]["content"] = json!(7), "no content"),
        (|json| json["model"]["merges"] = json!([["a"]]), "a merge is no pair"),
        (|json| drop(json["model"].as_object_mut().unwrap().remove("merges")), "no vocab and merges"),
    ];
    for (edit, words) in cases {
        let mut json = tokenizer();
        edit(&mut json);
        let told = read(&json.to_string()).err().unwrap();
        assert!(told.contains(words) && told.contains("tokenizer.json"), "{words} in {told}");
    }
    assert!(read("{").err().unwrap().contains("not valid JSON"));
}
