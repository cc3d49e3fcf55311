//! Drafters in external inference engines: the same answers, token for token, in the same cycles.
//!
//! `scripts/test.sh --engines` builds the engines and sets the variables with their paths.

#[path = "../common/mod.rs"]
mod common;
mod drafters;
mod families;
mod llama_cpp;
mod mtp;
mod served;
mod server;
mod states;
mod verification;
mod vllm;
mod walk_through;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::training::smoke;
use common::{repository, run_on, traces};
use deepspec_engine::{ModelInput, Target as _};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// Prompts of each suite; fewer for a real model, whose answers take long.
const LIMIT: usize = 12;
const FEWER: usize = 4;
/// Logits that differ by at most this count as nearly equal.
const NEAR: f64 = 0.005;
/// The minimum number of accepted drafted tokens over all answers: with few of them, equal cycles
/// prove little.
const ENOUGH: usize = 60;
/// Maximum number of tokens of an answer.
const ANSWER: usize = 128;

/// Prompts of the smoke suites, by suite and id.
fn prompts(limit: usize) -> BTreeMap<(String, String), String> {
    let mut prompts = BTreeMap::new();
    for suite in smoke() {
        let text = fs::read_to_string(repository("eval_datasets").join(format!("{suite}.jsonl"))).unwrap();
        for line in text.lines().take(limit) {
            let row: Value = serde_json::from_str(line).unwrap();
            let id = row["id"].as_str().unwrap().to_string();
            prompts.insert((suite.clone(), id), row["turns"][0].as_str().unwrap().to_string());
        }
    }
    prompts
}

/// The accepted tokens of every cycle of each answer.
fn accepted(file: &Path) -> BTreeMap<(String, String), Vec<i64>> {
    let mut accepted: BTreeMap<(String, String), Vec<i64>> = BTreeMap::new();
    for row in traces(file) {
        accepted.entry((row.suite, row.sample)).or_default().push(row.accepted.into());
    }
    accepted
}

/// The cycles that begin with at least two tokens to go. After them programs differ: this one
/// drafts until the limit, and llama.cpp does not draft for a single token.
fn drafting(accepted: &[i64]) -> &[i64] {
    // The first token comes from the prompt's forward.
    let mut tokens = 1;
    let begins = |accepted: &i64| {
        let drafts = tokens + 2 <= ANSWER as i64;
        tokens += accepted + 1;
        drafts
    };
    &accepted[..accepted.iter().map(begins).take_while(|drafts| *drafts).count()]
}

/// This project's results for the prompts: answers and cycles.
fn ours(
    target: &Path,
    drafter: &Path,
    limit: usize,
    dir: &Path,
) -> BTreeMap<(String, String), (Vec<i64>, usize)> {
    let (limit, most) = (limit.to_string(), ANSWER.to_string());
    let mut args = vec!["--limit", &limit, "--max-new-tokens", &most, "--temperature", "0", "--no-baseline"];
    let suites = smoke();
    args.extend(suites.iter().flat_map(|suite| ["--suite", suite.as_str()]));
    let run = run_on(target, drafter.to_str().unwrap(), dir, &args);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let cycles = accepted(&dir.join("traces.parquet"));
    let outputs = fs::read_to_string(dir.join("outputs.jsonl")).unwrap();
    let of = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let key = (row["suite"].as_str().unwrap().to_string(), row["id"].as_str().unwrap().to_string());
        let ids = row["token_ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
        let count = cycles.get(&key).map_or(0, |accepted| drafting(accepted).len());
        (key, (ids, count))
    };
    outputs.lines().map(of).collect()
}

/// Describes where two answers diverge. It must be at two candidates with nearly equal target
/// logits, between which float32 sums of two programs may choose either.
fn near_tie(target: &Path, prompt: &str, own: &[i64], other: &[i64]) -> String {
    let _no_grad = tch::no_grad_guard();
    let at = own.iter().zip(other).take_while(|(own, other)| own == other).count();
    let tokenizer = ChatTokenizer::load(target).unwrap();
    let prompt = [Message::new(Role::User, prompt)];
    let mut ids = generation_prompt(&tokenizer, &prompt, None, Some(false)).unwrap();
    ids.extend(&own[..at]);
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, taps: vec![] };
    let mut model = TargetModel::load(target, &options).unwrap();
    let out = model.forward(&ModelInput { chunks: &[(0, ids.len())], tokens: Tensor::from_slice(&ids) });
    let logits = model.logits(&out.hidden.slice(0, -1, None, 1));
    let (best, candidates) = logits.topk(2, -1, true, true);
    let gap = best.double_value(&[0, 0]) - best.double_value(&[0, 1]);
    assert!(gap < NEAR, "token {at}: {own:?} here, {other:?} there, {gap} apart");
    let candidates: Vec<i64> = candidates.squeeze().try_into().unwrap();
    for answer in [own, other] {
        assert!(
            answer.get(at).is_none_or(|token| candidates.contains(token)),
            "{answer:?} at {at}: {candidates:?}"
        );
    }
    format!("near tie of {candidates:?} at token {at}: {gap} apart")
}
