//! Tests drafters in llama.cpp.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_drafters::Eagle3Norms;
use deepspec_testkit::conversations::tokenizers;
use deepspec_testkit::skip::{Kind as Skipped, skip};
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};
use serde_json::{Value, json};

use crate::common::gguf::{llama_gguf, target_gguf};
use crate::common::training::smoke;
use crate::common::{deepspec_eval, repository, run_ok, target_dir, traces};
use crate::drafters::{
    BlockOptions, REAL_TAPS, RealModel, dflash, dspark, dspark_v4, eagle3, eagle3_variant, edited,
    filling_in, some_tokens, stretched, yarn,
};
use crate::server::Server;
use crate::{ANSWER, ENOUGH, FEWER, LIMIT, near_tie, ours, prompts};

/// llama.cpp's server; None skips the test.
pub fn llama_server() -> Option<PathBuf> {
    let server = env::var_os("DEEPSPEC_LLAMA_SERVER").map(PathBuf::from);
    if server.is_none() {
        skip(Skipped::Long, "it needs llama.cpp: scripts/test.sh --engines");
    }
    server
}

/// An answer: its text, its tokens, and its cycles.
pub type Answer = (String, Vec<i64>, usize);

/// A running llama-server.
pub struct Llama(Server);

impl Llama {
    /// Starts it with these arguments and waits until it listens. On a CPU its flash attention computes in half precision, and is off.
    pub fn start(server: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(server);
        command.args([
            "-t", "1", "-tb", "1", "-np", "1", "-c", "2048", "-ctk", "f32", "-ctv", "f32", "-fa", "off",
        ]);
        command.args(["--metrics", "--jinja", "--offline", "--no-webui"]).args(args);
        Self(Server::start(command, "listening on"))
    }

    /// Its address.
    pub fn url(&self) -> &str {
        &self.0.url
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        serde_json::from_str(&self.0.post(path, &body.to_string())).unwrap()
    }

    /// The number of drafts so far, which is the number of cycles with a drafter.
    fn drafts(&self) -> usize {
        self.0.metric("llamacpp:spec_decode_num_drafts_total") as usize
    }

    /// The greedy answer to a prompt's token ids, its tokens, and its cycles.
    pub fn answer_ids(&self, ids: &[i64]) -> Answer {
        self.complete(&json!(ids), json!({"temperature": 0}))
    }

    /// The greedy answer to a prompt, its tokens, and its cycles.
    pub fn answer(&self, prompt: &str) -> Answer {
        self.sampled(prompt, json!({"temperature": 0}))
    }

    /// An answer with these sampling settings.
    fn sampled(&self, prompt: &str, settings: Value) -> Answer {
        let messages = json!({
            "messages": [{"role": "user", "content": prompt}], "chat_template_kwargs": {"enable_thinking": false},
        });
        self.complete(&self.post("/apply-template", &messages)["prompt"], settings)
    }

    /// An answer to a prompt, which is a text or token ids.
    fn complete(&self, prompt: &Value, settings: Value) -> Answer {
        let before = self.drafts();
        let mut asked = json!({
            "prompt": prompt, "n_predict": ANSWER, "return_tokens": true, "cache_prompt": false,
        });
        asked.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let answer = self.post("/completion", &asked);
        let tokens = answer["tokens"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
        (answer["content"].as_str().unwrap().to_string(), tokens, self.drafts() - before)
    }
}

/// Converts the drafter and starts llama.cpp with it and a target file, with the flags that the
/// conversion prints.
pub fn served(server: &Path, [target, file]: [&Path; 2], drafter: &Path, root: &Path) -> Llama {
    let out = root.join("gguf");
    let told = deepspec_eval(&[
        "checkpoint",
        "convert",
        "--to",
        "gguf",
        "--dtype",
        "float32",
        "--from",
        drafter.to_str().unwrap(),
        "--target",
        target.to_str().unwrap(),
        "--output-dir",
        out.to_str().unwrap(),
    ]);
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    // Started with exactly the printed flags.
    let flags: Vec<&str> = told.split_whitespace().skip_while(|word| *word != "--model-draft").collect();
    assert!(flags.len() >= 6, "{told}");
    Llama::start(server, &[&["--model", file.to_str().unwrap()], &flags[..6]].concat())
}

/// Compares answers and cycles on the tiny target.
fn agrees(server: &Path, drafter: &Path, near_ties: usize) {
    let root = tempfile::tempdir().unwrap();
    let (target, file) = (target_dir(), root.path().join("target.gguf"));
    target_gguf(&file);
    agrees_on(server, [&target, &file], drafter, LIMIT, near_ties);
}

/// Compares answers and cycles. Up to `near_ties` samples may differ by one cycle, because float32
/// sums of two programs may order two nearly equal candidates differently.
fn agrees_on(server: &Path, target: [&Path; 2], drafter: &Path, limit: usize, near_ties: usize) {
    let root = tempfile::tempdir().unwrap();
    let llama = served(server, target, drafter, root.path());
    agrees_with(&|prompt| llama.answer(prompt), target[0], drafter, limit, near_ties);
}

/// Compares answers of a running server with those of this program, as [`agrees_on`] does.
pub fn agrees_with(
    answer: &dyn Fn(&str) -> Answer,
    target: &Path,
    drafter: &Path,
    limit: usize,
    near_ties: usize,
) {
    let root = tempfile::tempdir().unwrap();
    let ours = ours(target, drafter, limit, &root.path().join("run"));
    let ends = deepspec_models::stop_ids(target, None).unwrap();
    let (mut differing, mut cycles, mut tokens) = (vec![], 0, 0);
    for (key, prompt) in prompts(limit) {
        let (_, ids, drafts) = answer(&prompt);
        let (own_ids, own_cycles) = &ours[&key];
        // llama.cpp's answer omits the token that ends it.
        let rest = own_ids.strip_prefix(&ids[..]);
        if !rest.is_some_and(|rest| rest.len() < 2 && rest.iter().all(|token| ends.contains(token))) {
            differing.push(format!("{key:?}: {}", near_tie(target, &prompt, own_ids, &ids)));
            continue;
        }
        cycles += own_cycles;
        tokens += own_ids.len();
        if drafts != *own_cycles {
            assert!(drafts.abs_diff(*own_cycles) == 1, "{key:?}: {drafts} cycles there, {own_cycles} here");
            differing.push(format!("{key:?}: {drafts} cycles there, {own_cycles} here"));
        }
    }
    assert!(tokens > cycles + ENOUGH, "{tokens} tokens in {cycles} cycles");
    assert!(differing.len() <= near_ties, "{}", differing.join("\n"));
}

#[test]
fn llama_cpp_runs_dspark_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    agrees(&server, &repository("assets/tiny-dspark"), 0);
}

#[test]
fn llama_cpp_runs_dspark_with_a_stretched_rotation_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    agrees(&server, stretched().path(), 0);
}

#[test]
fn llama_cpp_runs_dspark_with_yarn_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    agrees(&server, yarn().path(), 0);
}

#[test]
fn llama_cpp_runs_dspark_of_deepseek_v4_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    agrees(&server, dspark_v4().path(), 0);
}

#[test]
fn llama_cpp_answers_as_we_do_without_a_drafter() {
    let Some(server) = llama_server() else { return };
    let root = tempfile::tempdir().unwrap();
    let (target, file) = (target_dir(), root.path().join("target.gguf"));
    target_gguf(&file);
    let llama = Llama::start(&server, &["--model", file.to_str().unwrap()]);
    let ours = ours(&target, &repository("assets/tiny-dspark"), LIMIT, &root.path().join("run"));
    for (key, prompt) in prompts(LIMIT) {
        let (_, ids, drafts) = llama.answer(&prompt);
        let own = &ours[&key].0;
        assert!(
            drafts == 0 && own.starts_with(&ids) && own.len() <= ids.len() + 1,
            "{key:?}: {ids:?}, {own:?}"
        );
    }
}

#[test]
fn llama_cpp_runs_dflash_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    agrees(&server, dflash().path(), 1);
}

#[test]
fn llama_cpp_runs_dflash_whose_slots_fill_in_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    agrees(&server, filling_in(BlockOptions::default()).path(), 0);
}

#[test]
fn llama_cpp_runs_causal_blocks_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    let options = BlockOptions { causal: true, sinks: false };
    agrees(&server, filling_in(options).path(), 0);
    agrees(&server, dspark(options).path(), 0);
}

#[test]
fn llama_cpp_runs_attention_sinks_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    let options = BlockOptions { causal: false, sinks: true };
    agrees(&server, filling_in(options).path(), 0);
    agrees(&server, dspark(options).path(), 0);
}

#[test]
fn llama_cpp_runs_dflash_2_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    // llama.cpp stores k (k + 1) scores in a hidden state, which has 192 values here.
    let fewer = edited("tiny-dflash2", |config, _| config["selector_top_k"] = json!(12));
    agrees(&server, fewer.path(), 1);
}

/// llama.cpp's Eagle3 has Llama layers, so the target is a Llama too. Both programs read it from
/// the same file.
#[test]
fn llama_cpp_runs_eagle3_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    let root = tempfile::tempdir().unwrap();
    let [file, cache] = ["target.gguf", "unpacked"].map(|name| root.path().join(name));
    llama_gguf(&file);
    let target = deepspec_checkpoint::gguf::unpack(&file, &cache).unwrap();
    agrees_on(&server, [&target, &file], eagle3(&target, [0, 2, 4], 60).path(), LIMIT, 0);
}

#[test]
fn llama_cpp_runs_eagle3_with_a_reduced_vocabulary_and_further_norms_cycle_by_cycle() {
    let Some(server) = llama_server() else { return };
    let root = tempfile::tempdir().unwrap();
    let [file, cache] = ["target.gguf", "unpacked"].map(|name| root.path().join(name));
    llama_gguf(&file);
    let target = deepspec_checkpoint::gguf::unpack(&file, &cache).unwrap();
    let norms = Eagle3Norms { before_residual: true, before_fc: true, fc: false, output: false };
    let drafter = eagle3_variant(&target, [0, 2, 4], 60, Some(some_tokens()), norms);
    agrees_on(&server, [&target, &file], drafter.path(), LIMIT, 0);
}

#[test]
fn llama_cpp_runs_eagle3_of_a_real_model_cycle_by_cycle() {
    let (Some(server), Some(real)) = (llama_server(), RealModel::new()) else { return };
    let drafter = eagle3(&real.folder, REAL_TAPS, 150);
    agrees_on(&server, [&real.folder, &real.file], drafter.path(), FEWER, 0);
}

#[test]
fn llama_cpp_runs_dspark_of_a_real_model_cycle_by_cycle() {
    let (Some(server), Some(real)) = (llama_server(), RealModel::new()) else { return };
    agrees_on(&server, [&real.folder, &real.file], real.block(Some(32)).path(), FEWER, 0);
}

#[test]
fn llama_cpp_runs_dflash_of_a_real_model_cycle_by_cycle() {
    let (Some(server), Some(real)) = (llama_server(), RealModel::new()) else { return };
    agrees_on(&server, [&real.folder, &real.file], real.block(None).path(), FEWER, 0);
}

/// Tokens per cycle of samples `(tokens, cycles)`, and the standard error.
fn ratio(samples: &[(f64, f64)]) -> (f64, f64) {
    let (tokens, cycles): (f64, f64) =
        samples.iter().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let ratio = tokens / cycles;
    let spread: f64 = samples.iter().map(|(tokens, cycles)| (tokens - ratio * cycles).powi(2)).sum();
    (ratio, spread.sqrt() / cycles)
}

/// At temperature 1, llama.cpp accepts by the rule of `--draft-sampling greedy`.
#[test]
fn llama_cpp_accepts_at_temperature_1_as_greedy_drafts_are() {
    let Some(server) = llama_server() else { return };
    let (root, drafter) = (tempfile::tempdir().unwrap(), repository("assets/tiny-dspark"));
    let (target, file) = (target_dir(), root.path().join("target.gguf"));
    target_gguf(&file);
    let llama = served(&server, [&target, &file], &drafter, root.path());
    let plain = json!({"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "samplers": ["temperature"]});
    // The token that ends an answer is counted for neither program.
    let tokenizer = ChatTokenizer::load(&target_dir()).unwrap();
    let stops = deepspec_models::stop_ids(&target_dir(), tokenizer.eos_token_id()).unwrap();
    let mut theirs = vec![];
    for prompt in prompts(LIMIT).values() {
        let mut sum = (0.0, 0.0);
        for seed in 1..=3 {
            let mut settings = plain.clone();
            settings["seed"] = json!(seed);
            let (_, ids, cycles) = llama.sampled(prompt, settings);
            let ends = ids.last().is_some_and(|last| stops.contains(last));
            sum = (sum.0 + (ids.len() - usize::from(ends)) as f64, sum.1 + cycles as f64);
        }
        theirs.push(sum);
    }
    let ours = |rule: &str| {
        let (limit, most) = (LIMIT.to_string(), ANSWER.to_string());
        let mut args =
            vec!["--limit", &limit, "--max-new-tokens", &most, "--temperature", "1", "--no-baseline"];
        args.extend(["--seed", "1,2,3", "--draft-sampling", rule]);
        let suites = smoke();
        args.extend(suites.iter().flat_map(|suite| ["--suite", suite.as_str()]));
        let dir = root.path().join(rule);
        let table = run_ok(drafter.to_str().unwrap(), &dir, &args);
        assert_eq!(table.contains("Drafted tokens are the drafter's likeliest"), rule == "greedy", "{table}");
        // All answers to a prompt form one sample, because they are similar.
        let mut samples: BTreeMap<(String, String), (f64, f64)> = BTreeMap::new();
        for row in traces(&dir.join("traces.parquet")) {
            samples.entry((row.suite, row.sample)).or_default().1 += 1.0;
        }
        for line in fs::read_to_string(dir.join("outputs.jsonl")).unwrap().lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let text = |key: &str| row[key].as_str().unwrap().to_string();
            let end = f64::from(u8::from(row["finish"] == "stop"));
            samples.entry((text("suite"), text("id"))).or_default().0 +=
                row["tokens"].as_f64().unwrap() - end;
        }
        let samples: Vec<(f64, f64)> = samples.into_values().collect();
        ratio(&samples)
    };
    let (there, error) = ratio(&theirs);
    let (greedy, drawn) = (ours("greedy"), ours("probabilistic"));
    let apart = |(here, own): (f64, f64)| (here - there).abs() / error.hypot(own);
    assert!(apart(greedy) < 3.0, "{there} ± {error} there, {greedy:?} by greedy drafts");
    assert!(
        apart(greedy) < apart(drawn),
        "{there} ± {error} there, {greedy:?} by greedy drafts, {drawn:?} by drawn"
    );
    eprintln!("llama.cpp {there:.3} ± {error:.3}, greedy {greedy:.3?}, probabilistic {drawn:.3?}");
}

/// The tokenizer and the template of a real model's GGUF are read as in llama.cpp.
#[test]
fn llama_cpp_tokenises_a_real_model_as_here() {
    let Some(server) = llama_server() else { return };
    let Some(folder) = tokenizers() else { return };
    let (root, file) = (tempfile::tempdir().unwrap(), folder.join("smollm2.gguf"));
    let tokenizer =
        ChatTokenizer::load(&deepspec_checkpoint::gguf::unpack(&file, root.path()).unwrap()).unwrap();
    let llama = Llama::start(&server, &["--model", file.to_str().unwrap()]);
    let texts = [
        "What is 12345 + 678.90?",
        "def f(x):\n    return x ** 2  # squared\n\n\n",
        " it's we'LL they'd\tI'M  a   b ",
        "你好，世界。こんにちは 안녕하세요 مرحبا",
        "👩‍👩‍👧‍👦 🙂 é e\u{301} ﬁ \u{a0}\u{200b}",
        "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_end",
    ];
    for text in texts.into_iter().chain(prompts(LIMIT).values().map(String::as_str)) {
        let found =
            llama.post("/tokenize", &json!({"content": text, "add_special": false, "parse_special": true}));
        let found: Vec<i64> = serde_json::from_value(found["tokens"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), found, "{text:?}");
        let asked = json!({"messages": [{"role": "user", "content": text}]});
        let rendered = llama.post("/apply-template", &asked)["prompt"].as_str().unwrap().to_string();
        let prompt = generation_prompt(&tokenizer, &[Message::new(Role::User, text)], None, None).unwrap();
        assert_eq!(tokenizer.decode(&prompt, false).unwrap(), rendered);
    }
}
