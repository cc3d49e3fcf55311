//! Tests `cache` with the built binary on the tiny target.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use bench::{Bench, flip, row};

mod bench;
#[path = "../../../crates/deepspec-capture/tests/common/fake_vllm.rs"]
mod fake_vllm;
mod kills;
mod machine;
mod peers;
mod plan;
mod served;
mod standin;

#[test]
fn a_cache_is_built_checked_and_shown() {
    let bench = Bench::new(40);
    bench.build("cache", &[]).succeeds_with(&["40 rows = 40 kept", "40 samples in", "tokens/s"]);
    assert!(!bench.path("cache/parts").exists() && !bench.path("cache.rejected.jsonl").exists());
    bench.run(&["verify", "cache"]).succeeds_with(&["sound", "40 samples"]);
    bench.run(&["verify", "--cache-dir", "cache"]).succeeds_with(&["sound"]);
    bench.run(&["inspect", "cache"]).succeeds_with(&[
        "qwen3",
        "taps [1, 3, 5]",
        "last hidden states of supervised",
    ]);
    bench.run(&["inspect", "cache", "--sample", "row-3"]).succeeds_with(&[
        "\"row-3\", index 3",
        "tap 5",
        "last",
    ]);

    let shown = bench.run(&["inspect", "cache", "--json"]);
    let manifest: Value =
        serde_json::from_slice(&fs::read(bench.path("cache/manifest.json")).unwrap()).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&shown.stdout).unwrap(), manifest);
    assert!(manifest["shards"].as_array().unwrap().len() > 1);
    let shown = bench.run(&["inspect", "--cache-dir", "cache", "--sample", "12", "--json"]);
    let sample: Value = serde_json::from_str(&shown.stdout).unwrap();
    assert_eq!((&sample["id"], &sample["index"]), (&json!("row-12"), &json!(12)));
    assert_eq!(sample["input_ids"].as_array().unwrap().len() as u64, sample["length"].as_u64().unwrap());
    assert_eq!(sample["spans"].as_array().unwrap().len(), 2);
    let tensors = sample["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 4);
    assert!(
        tensors.iter().all(|t| t["non_finite"] == 0 && t["mean_norm"].as_f64().unwrap() > 0.0),
        "{sample}"
    );
    bench.run(&["inspect", "cache", "--sample", "row-40"]).fails_with(2, &["row-40", "0 to 39"]);

    // Repeating the command does nothing; any other command is refused unless it may discard the
    // existing cache.
    let before = bench.files("cache");
    bench.build("cache", &[]).succeeds_with(&["complete already", "40 samples"]);
    let other = ["--set", "data.max_length=64", "--set", "target.layer_ids=[1, 3]"];
    bench
        .build("cache", &other)
        .fails_with(2, &["max_length is 512 there, 64 is wanted", "taps is", "--overwrite"]);
    bench
        .build("cache", &["--final-states", "all"])
        .fails_with(2, &["last is supervised there, all is wanted"]);
    flip(&bench.path("target/model.safetensors"), |len| len / 15);
    bench.build("cache", &[]).fails_with(2, &["target_weights"]);
    assert!(bench.files("cache") == before, "a refused build changed the cache");
    bench.build("cache", &["--final-states", "all", "--overwrite"]).succeeds_with(&["40 samples"]);
    bench.run(&["inspect", "cache"]).succeeds_with(&["last hidden states of all"]);
    bench.run(&["verify", "cache"]).succeeds_with(&["sound"]);
}

#[test]
fn damage_is_named() {
    let bench = Bench::new(40);
    bench.build("cache", &[]).succeeds_with(&[]);
    let manifest: Value =
        serde_json::from_slice(&fs::read(bench.path("cache/manifest.json")).unwrap()).unwrap();
    let restore = bench.files("cache");
    let verify = |file: &str, damage: &dyn Fn(&Path), words: &[&str]| {
        damage(&bench.path("cache").join(file));
        let ended = bench.run(&["verify", "cache"]);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let said = ended.stdout + &ended.stderr;
        assert!(words.iter().all(|word| said.contains(word)), "{words:?} in {said}");
        for (name, bytes) in &restore {
            fs::write(bench.path("cache").join(name), bytes).unwrap();
        }
    };
    verify(
        "shard-00001.safetensors",
        &|path| fs::write(path, &fs::read(path).unwrap()[..5000]).unwrap(),
        &["shard-00001.safetensors", "5000 bytes instead of", "1 problems"],
    );
    // One bit of the first sample, whose taps come first.
    let flipped = |path: &Path| flip(path, |_| 3000);
    verify(
        "shard-00000.safetensors",
        &flipped,
        &["shard-00000.safetensors: sha256", "sample \"row-0\" has checksum"],
    );
    verify("shard-00000.safetensors", &|path| fs::remove_file(path).unwrap(), &["shard-00000.safetensors"]);
    verify("samples.parquet", &|path| flip(path, |len| len / 2), &["samples.parquet"]);
    verify("manifest.json", &|path| flip(path, |len| len / 2), &["manifest.json"]);
    verify("manifest.json", &|path| fs::remove_file(path).unwrap(), &["no manifest.json"]);
    assert!(manifest["shards"].as_array().unwrap().len() > 2);

    flipped(&bench.path("cache/shard-00000.safetensors"));
    bench.run(&["inspect", "cache", "--sample", "row-0"]).fails_with(1, &["row-0", "checksum"]);
    bench.run(&["verify", "elsewhere"]).fails_with(2, &["elsewhere: no such folder"]);
    bench.run(&["verify", "target"]).fails_with(1, &["is no finished cache"]);
}

#[test]
fn bad_rows_are_recorded_and_the_others_cached() {
    let bench = Bench::new(3);
    let assistant_first = r#"{"id": "x", "conversations": [{"role": "assistant", "content": "hi"}]}"#;
    let failed = r#"{"id": "y", "status": "error", "conversations": []}"#;
    let short = row(7).replace("Leopold has", "").replace(" envelopes", "");
    let short = &short[..short.find("{\"role\":\"assistant\"").unwrap()];
    let short = format!("{short}{{\"role\":\"assistant\",\"content\":\"8\"}}]}}");
    bench.write("more.jsonl", &[&row(9), "{\"id\": \"torn", assistant_first, failed, &short].join("\n"));
    let ended = bench.build("cache", &["--input", "more.jsonl"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let sum = "8 rows = 4 kept + 1 with status error + 1 with fewer than 14 supervised tokens + 2 rejected";
    assert!(ended.stdout.contains(sum) && ended.stdout.contains("4 samples in"), "{ended:?}");
    assert!(ended.stderr.contains("more.jsonl:2: not valid JSON"), "{ended:?}");
    assert!(ended.stderr.contains("more.jsonl:3: Conversation must start with user"), "{ended:?}");
    let rejects = fs::read_to_string(bench.path("cache.rejected.jsonl")).unwrap();
    let rejects: Vec<Value> = rejects.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rejects.len(), 2);
    assert_eq!((&rejects[0]["file"], &rejects[0]["line"]), (&json!("more.jsonl"), &json!(2)));
    bench.run(&["verify", "cache"]).succeeds_with(&["sound; 4 samples"]);

    bench.write("rows.jsonl", "\n\n");
    bench.build("none", &[]).fails_with(2, &["--input rows.jsonl: no rows"]);
    bench.write("rows.jsonl", &short);
    bench.build("none", &[]).fails_with(1, &["no row can be used", "1 with fewer than 14"]);
    assert!(!bench.path("none").exists());
}

#[test]
fn wrong_inputs_are_refused() {
    let bench = Bench::new(3);
    let refused = |more: &[&str], words: &[&str]| bench.build("cache", more).fails_with(2, words);
    refused(&["--input", "missing.jsonl"], &["missing.jsonl", "no such file"]);
    refused(&["--set", "target.layer_ids=[1, 6]"], &["target.layer_ids", "no layer 6"]);
    refused(&["--set", "target.layer_ids=[3, 1]"], &["target.layer_ids", "increasing"]);
    refused(&["--set", "target.model=/nowhere"], &["/nowhere"]);
    refused(&["--set", "data.chat_template=llama"], &["llama", "qwen"]);
    refused(&["--set", "drafter.dspark.mask_token_id=5000"], &["mask_token_id", "5000"]);
    refused(&["--set", "data.max_len=3"], &["data.max_len", "did you mean `max_length`?"]);
    refused(&["--device", "gpu"], &["gpu"]);
    refused(&["--shard-size", "0"], &["--shard-size"]);
    bench.write("file", "");
    bench.build("file", &[]).fails_with(2, &["file is a file"]);
    let recipe = fs::read_to_string(bench.path("recipe.yaml")).unwrap();
    bench.write("recipe.yaml", &recipe.replace("max_length: 512", "max_lenght: 512"));
    refused(&[], &["recipe.yaml:4: `data.max_lenght`", "did you mean `max_length`?"]);
    fs::remove_file(bench.path("recipe.yaml")).unwrap();
    refused(&[], &["recipe.yaml"]);
    assert!(!bench.path("cache").exists());
}

#[test]
fn format_2_goes_out_and_comes_back() {
    let bench = Bench::new(12);
    let ended = bench.build("own", &["--final-states", "all"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let export = |from: &str, to: &str| bench.run(&["export", "--cache-dir", from, "--to", to]);
    assert_eq!(export("own", "out").code, Some(0));
    let import = ["import", "--from", "out", "--model", "target", "--output-dir", "again"];
    let ended = bench.run(&import);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(bench.run(&["verify", "again"]).code, Some(0));
    assert_eq!(export("again", "back").code, Some(0));
    let [out, back] = ["out", "back"].map(|dir| bench.files(dir));
    assert_eq!(out, back);
    bench.build("few", &[]);
    let ended = export("few", "nowhere");
    assert!(
        ended.code == Some(1) && ended.stderr.contains("--encoding bf16 --final-states all"),
        "{}",
        ended.stderr
    );
}
