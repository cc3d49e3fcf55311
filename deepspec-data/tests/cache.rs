//! `cache` from the outside: the built binary on the tiny target.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// How long a test waits for a build to get somewhere.
const DEADLINE: Duration = Duration::from_secs(120);

/// A folder with a copy of the tiny target, a recipe and some rows.
struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new(rows: usize) -> Self {
        let bench = Self { dir: tempfile::tempdir().unwrap() };
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-target");
        fs::create_dir(bench.path("target")).unwrap();
        for file in fs::read_dir(tiny).unwrap().map(|entry| entry.unwrap().path()) {
            fs::copy(&file, bench.path("target").join(file.file_name().unwrap())).unwrap();
        }
        let recipe = format!(
            "name: t\ntarget: {{model: '{}', layer_ids: [1, 3, 5]}}\n\
             drafter: {{dspark: {{block_size: 3, num_draft_layers: 1, mask_token_id: 1023}}}}\n\
             data: {{states: {{cache: unused}}, chat_template: qwen, max_length: 512}}\n",
            bench.path("target").display()
        );
        bench.write("recipe.yaml", &recipe);
        bench.write("rows.jsonl", &(0..rows).map(|i| row(i) + "\n").collect::<String>());
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// `cache …` with the bench as working directory.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-data"));
        command
            .arg("cache")
            .args(args)
            .current_dir(self.dir.path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Ended {
        let Output { status, stdout, stderr } = self.command(args).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ended { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }

    fn build(&self, dir: &str, more: &[&str]) -> Ended {
        self.run(&build_args(dir, more))
    }

    /// All files of a folder with their bytes.
    fn files(&self, dir: &str) -> Vec<(String, Vec<u8>)> {
        let entries = fs::read_dir(self.path(dir)).unwrap().map(|entry| entry.unwrap().path());
        let named = |path: PathBuf| {
            (path.file_name().unwrap().to_str().unwrap().to_string(), fs::read(path).unwrap())
        };
        let mut files: Vec<_> = entries.map(named).collect();
        files.sort();
        files
    }
}

/// `build` into `dir` in shards of 1 MiB on the CPU, unless `more` says otherwise.
fn build_args<'a>(dir: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["build", "--config", "recipe.yaml", "--input", "rows.jsonl", "--output-dir", dir];
    for default in [["--device", "cpu"], ["--shard-size", "1"]] {
        if !more.contains(&default[0]) {
            args.extend(default);
        }
    }
    args.extend(more);
    args
}

/// A conversation of one or two rounds.
fn row(index: usize) -> String {
    let story = "Leopold has 4 envelopes with 8 candles in each and donates 6 candles during the holidays, so he keeps 26. ";
    let mut messages = vec![
        json!({"role": "user", "content": format!("How many candles are there in the end, if {index} are lit?")}),
        json!({"role": "assistant", "content": story.repeat(1 + index % 4)}),
    ];
    if index.is_multiple_of(3) {
        messages.push(json!({"role": "user", "content": "And what if he brings 9 more?"}));
        messages.push(
            json!({"role": "assistant", "content": "Then the sum reads 26 + 9 = 35. The answer is 35."}),
        );
    }
    json!({"id": format!("row-{index}"), "conversations": messages}).to_string()
}

#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ended {
    #[track_caller]
    fn succeeds_with(&self, words: &[&str]) {
        assert_eq!(self.code, Some(0), "{self:?}");
        assert!(words.iter().all(|word| self.stdout.contains(word)), "{words:?} in {self:?}");
    }

    /// One line on standard error, the exit code, and these words in it.
    #[track_caller]
    fn fails_with(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(words.iter().all(|word| self.stderr.contains(word)), "{words:?} in {self:?}");
    }
}

fn flip(path: &Path, at: impl FnOnce(usize) -> usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = at(bytes.len());
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

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

    // The same again is done already; anything else is refused, unless it may discard what is there.
    let before = bench.files("cache");
    bench.build("cache", &[]).succeeds_with(&["complete already", "40 samples"]);
    let other = ["--set", "data.max_length=64", "--set", "target.layer_ids=[1, 3]"];
    bench
        .build("cache", &other)
        .fails_with(2, &["max_length is 512 there, 64 is wanted", "taps is", "--overwrite"]);
    bench.build("cache", &["--last", "all"]).fails_with(2, &["last is supervised there, all is wanted"]);
    flip(&bench.path("target/model.safetensors"), |len| len / 15);
    bench.build("cache", &[]).fails_with(2, &["target_weights"]);
    assert!(bench.files("cache") == before, "a refused build changed the cache");
    bench.build("cache", &["--last", "all", "--overwrite"]).succeeds_with(&["40 samples"]);
    bench.run(&["inspect", "cache"]).succeeds_with(&["last hidden states of all"]);
    bench.run(&["verify", "cache"]).succeeds_with(&["sound"]);
}

#[test]
fn a_killed_build_goes_on_and_ends_as_if_undisturbed() {
    let bench = Bench::new(240);
    bench.build("calm", &[]).succeeds_with(&["240 samples"]);
    let shards = bench.files("calm").iter().filter(|(name, _)| name.starts_with("shard-")).count();
    let kills = if std::env::var_os("DEEPSPEC_TEST_FULL").is_some() { 10 } else { 2 };
    assert!(shards > 2 * kills, "only {shards} shards");
    for kill in 0..kills {
        let mut child = bench.command(&build_args("cache", &["-q"])).stdout(Stdio::null()).spawn().unwrap();
        let finished = bench.path(&format!("cache/parts/worker-000/shard-{:05}.json", 1 + 2 * kill));
        let started = Instant::now();
        while !finished.exists() {
            assert!(
                started.elapsed() < DEADLINE && child.try_wait().unwrap().is_none(),
                "no {}",
                finished.display()
            );
            thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None);
        bench.run(&["verify", "cache"]).fails_with(1, &["no finished cache", "unfinished build"]);
    }
    bench
        .build("cache", &["--set", "data.max_length=100"])
        .fails_with(2, &["an unfinished build of something else", "max_length is 512 there, 100 is wanted"]);
    let resumed = bench.build("cache", &[]);
    resumed.succeeds_with(&["240 samples"]);
    let kept = resumed
        .stderr
        .split("resuming: ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
    assert!(kept.is_some_and(|kept| kept >= 2 * kills), "{resumed:?}");
    let (calm, cache) = (bench.files("calm"), bench.files("cache"));
    let names = |files: &[(String, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&calm), names(&cache));
    for ((name, calm), (_, cache)) in calm.iter().zip(&cache) {
        assert!(calm == cache, "{name} differs");
    }
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
    // A bit of the first sample, whose taps come first.
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

const PEERS: &str = r#"
import json, pathlib, sys, zlib
import duckdb, pyarrow.parquet, torch
from safetensors import safe_open

cache = pathlib.Path(sys.argv[1])
manifest = json.loads((cache / "manifest.json").read_text())
table = pyarrow.parquet.read_table(cache / "samples.parquet").to_pylist()
[(tokens,)] = duckdb.sql(f"select sum(len(input_ids)) from '{cache}/samples.parquet'").fetchall()
assert len(table) == manifest["counts"]["samples"] and tokens == manifest["counts"]["tokens"]
shards = []
for entry in manifest["shards"]:
    with safe_open(cache / entry["file"], framework="pt") as file:
        shards.append((file.get_tensor("taps"), file.get_tensor("last")))
d = manifest["identity"]["hidden_size"]
raw = lambda tensor: tensor.contiguous().view(torch.uint8).numpy().tobytes()
for row in table:
    taps, last = shards[row["shard"]]
    mask = [any(s["start"] <= p < s["end"] for s in row["loss_spans"]) for p in range(-1, row["length"] + 1)]
    kept = sum(mask[p] or mask[p + 2] for p in range(row["length"]))
    taps, last = taps[row["first_row"]:][:row["length"]], last[row["first_last_row"]:][:kept]
    assert taps.dtype == last.dtype == torch.bfloat16 and taps.shape == (row["length"], 3 * d) and last.shape == (kept, d)
    assert taps.isfinite().all() and last.isfinite().all() and len(row["input_ids"]) == row["length"]
    assert zlib.crc32(raw(last), zlib.crc32(raw(taps))) == row["checksum"], row["id"]
print(json.dumps([row["id"] for row in table]))
"#;

#[test]
fn python_tools_read_a_built_cache() {
    let Some(python) = std::env::var("DEEPSPEC_TEST_PYTHON").ok().filter(|python| !python.is_empty()) else {
        eprintln!(
            "skipped: DEEPSPEC_TEST_PYTHON names no Python with pyarrow, duckdb, torch and safetensors"
        );
        return;
    };
    let bench = Bench::new(30);
    bench.build("cache", &[]).succeeds_with(&[]);
    let output = Command::new(python).args(["-c", PEERS]).arg(bench.path("cache")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let ids: Vec<String> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(ids, (0..30).map(|i| format!("row-{i}")).collect::<Vec<_>>());
}

#[test]
fn workers_build_what_one_builds_and_the_plan_foretells_it() {
    let bench = Bench::new(40);
    for encoding in ["bf16", "fp8"] {
        let whole = format!("whole-{encoding}");
        let ended = bench.build(&whole, &["--encoding", encoding]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let parts = format!("parts-{encoding}");
        for worker in ["2/3", "0/3"] {
            let ended = bench.build(&parts, &["--encoding", encoding, "--worker", worker]);
            assert_eq!(ended.code, Some(0), "{}", ended.stderr);
            assert!(ended.stdout.contains(&format!("worker {worker} has finished")), "{}", ended.stdout);
        }
        let ended = bench.run(&["merge", "--output-dir", &parts]);
        assert_eq!(ended.code, Some(1));
        assert!(ended.stderr.contains("--worker 1/3"), "{}", ended.stderr);
        bench.build(&parts, &["--encoding", encoding, "--worker", "1/3"]);
        let ended = bench.run(&["merge", "--output-dir", &parts]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert_eq!(bench.files(&parts), bench.files(&whole));
    }
    let args = ["plan", "--config", "recipe.yaml", "--input", "rows.jsonl", "--shard-size", "1"];
    let ended = bench.run(&[&args[..], &["--rate", "1000", "--json"]].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let plan: Value = serde_json::from_str(&ended.stdout).unwrap();
    for encoding in ["bf16", "fp8"] {
        let built: usize =
            bench.files(&format!("whole-{encoding}")).iter().map(|(_, bytes)| bytes.len()).sum();
        let choices = plan["choices"].as_array().unwrap();
        let chosen = choices.iter().find(|c| c["encoding"] == encoding && c["last"] == "supervised").unwrap();
        let planned = chosen["bytes"].as_f64().unwrap();
        assert!((planned - built as f64).abs() < 0.01 * built as f64, "planned {planned}, built {built}");
    }
    assert_eq!(plan["seconds"].as_f64().unwrap(), plan["tokens"].as_f64().unwrap() / 1000.0);
    let ended = bench.run(&args);
    assert!(ended.stdout.contains("give --rate TOKENS_PER_S, or --measure"), "{}", ended.stdout);
    let ended = bench.build("x", &["--worker", "3/3"]);
    assert!(ended.code == Some(2) && ended.stderr.contains("I/N"), "{}", ended.stderr);
}

#[test]
fn format_2_goes_out_and_comes_back() {
    let bench = Bench::new(12);
    let ended = bench.build("own", &["--last", "all"]);
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
    assert!(ended.code == Some(1) && ended.stderr.contains("--encoding bf16 --last all"), "{}", ended.stderr);
}
