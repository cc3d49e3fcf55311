//! Tests drafters in vLLM's build for CPUs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use deepspec_drafters::Eagle3Norms;
use deepspec_testkit::skip::vllm_python;
use serde_json::{Value, json};

use crate::common::{deepspec_eval, repository, target_dir};
use crate::drafters::{
    BlockOptions, RealModel, causal_windowed_with_sinks, dflash, dspark, eagle3, eagle3_variant, filling_in,
    peagle, some_tokens, stretched, windowed, yarn,
};
use crate::server::Server;
use crate::{ANSWER, ENOUGH, FEWER, LIMIT, accepted, drafting, near_tie, ours, prompts};

/// Converts the drafter with `--to vllm`; returns the printed value of `--speculative-config`.
pub fn converted(drafter: &Path, target: &Path, out: &Path) -> String {
    let [from, beside, to] = [drafter, target, out].map(|path| path.to_str().unwrap());
    let convert = ["checkpoint", "convert", "--to", "vllm", "--from", from, "--target", beside];
    let converted = deepspec_eval(&[&convert[..], &["--output-dir", to]].concat());
    let log = String::from_utf8_lossy(&converted.stderr).into_owned();
    let named = log.split_once("--speculative-config '").and_then(|(_, rest)| rest.split_once('\''));
    named.unwrap_or_else(|| panic!("{log}")).0.to_string()
}

/// Compares this program with vLLM on the tiny target and this drafter.
fn agrees_with_vllm(python: &str, drafter: &Path, near_ties: usize) {
    let target = target_dir();
    agrees_with_vllm_on(python, [&target, &target], drafter, LIMIT, near_ties);
}

/// Runs vLLM with the drafter as `--to vllm` writes it, with the printed arguments. Compares
/// answers and the accepted tokens of every cycle, except in `near_ties` requests.
fn agrees_with_vllm_on(python: &str, target: [&Path; 2], drafter: &Path, limit: usize, near_ties: usize) {
    let root = tempfile::tempdir().unwrap();
    let [out, run] = ["vllm", "run"].map(|name| root.path().join(name));
    // Started with exactly the printed arguments.
    let named: Value = serde_json::from_str(&converted(drafter, target[0], &out)).unwrap();
    let [method, model] = ["method", "model"].map(|key| named[key].as_str().unwrap());
    let count = named["num_speculative_tokens"].to_string();
    let mut arguments = vec![method, model, &count];
    if named["parallel_drafting"] == true {
        arguments.push("parallel_drafting");
    }
    let told = vllm_answers(python, target[1], &arguments, limit, ANSWER);
    let (prompts, ours) = (prompts(limit), ours(target[0], drafter, limit, &run));
    let accepted = accepted(&run.join("traces.parquet"));
    let (mut differing, mut cycles, mut tokens) = (vec![], 0, 0);
    assert_eq!(told.len(), ours.len());
    for (key, (ids, theirs)) in told {
        let (own_ids, _) = &ours[&key];
        if ids != *own_ids {
            differing.push(format!("{key:?}: {}", near_tie(target[0], &prompts[&key], own_ids, &ids)));
            continue;
        }
        let (own, theirs) = (drafting(&accepted[&key]), drafting(&theirs));
        // The last cycle ends inside a block, where the two programs count differently.
        let same = own.len() == theirs.len() && own.iter().rev().skip(1).eq(theirs.iter().rev().skip(1));
        if !same {
            differing.push(format!("{key:?}: {theirs:?} there, {own:?} here"));
        }
        (tokens, cycles) = (tokens + ids.len(), cycles + own.len());
    }
    assert!(tokens > cycles + ENOUGH, "{tokens} tokens in {cycles} cycles");
    assert!(differing.len() <= near_ties, "{}", differing.join("\n"));
}

/// vLLM's answers of up to `tokens` tokens to the prompts, and the accepted tokens of each cycle. `arguments` are those of
/// `vllm_ask.py` for the drafter.
pub fn vllm_answers(
    python: &str,
    target: &Path,
    arguments: &[&str],
    limit: usize,
    tokens: usize,
) -> BTreeMap<(String, String), (Vec<i64>, Vec<i64>)> {
    let root = tempfile::tempdir().unwrap();
    let [asked, told] = ["asked.jsonl", "told.jsonl"].map(|name| root.path().join(name));
    let row = |((suite, id), prompt): ((String, String), String)| {
        json!({"suite": suite, "id": id, "prompt": prompt}).to_string()
    };
    fs::write(&asked, prompts(limit).into_iter().map(row).collect::<Vec<_>>().join("\n")).unwrap();
    let mut command = Command::new(python);
    // This process's libtorch differs from vLLM's.
    command.env_remove("LD_LIBRARY_PATH").arg(repository("scripts/vllm_ask.py"));
    command.arg(target).args([&asked, &told]).arg(tokens.to_string()).args(arguments);
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let answer = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let text = |name: &str| row[name].as_str().unwrap().to_string();
        let list = |name: &str| -> Vec<i64> { serde_json::from_value(row[name].clone()).unwrap() };
        ((text("suite"), text("id")), (list("token_ids"), list("accepted")))
    };
    fs::read_to_string(&told).unwrap().lines().map(answer).collect()
}

#[test]
fn vllm_runs_dspark_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, &repository("assets/tiny-dspark"), 0);
}

#[test]
fn vllm_runs_dspark_with_a_stretched_rotation_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, stretched().path(), 0);
}

#[test]
fn vllm_runs_dspark_with_yarn_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, yarn().path(), 0);
}

#[test]
fn vllm_runs_dflash_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, dflash().path(), 0);
}

#[test]
fn vllm_runs_dflash_whose_slots_fill_in_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, filling_in(BlockOptions::default()).path(), 0);
}

#[test]
fn vllm_runs_causal_blocks_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    let options = BlockOptions { causal: true, sinks: false };
    agrees_with_vllm(&python, filling_in(options).path(), 0);
    agrees_with_vllm(&python, dspark(options).path(), 0);
}

#[test]
fn vllm_runs_attention_sinks_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    let options = BlockOptions { causal: false, sinks: true };
    agrees_with_vllm(&python, filling_in(options).path(), 0);
    agrees_with_vllm(&python, dspark(options).path(), 0);
}

#[test]
fn vllm_runs_windows_of_use_swa_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, windowed().path(), 0);
    agrees_with_vllm(&python, causal_windowed_with_sinks().path(), 0);
}

#[test]
fn vllm_runs_dflash_2_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, &repository("assets/tiny-dflash2"), 0);
}

#[test]
fn vllm_runs_eagle3_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, eagle3(&target_dir(), [0, 2, 4], 60).path(), 0);
}

#[test]
fn vllm_runs_eagle3_with_a_reduced_vocabulary_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    let drafter = eagle3_variant(&target_dir(), [0, 2, 4], 60, Some(some_tokens()), Eagle3Norms::default());
    agrees_with_vllm(&python, drafter.path(), 0);
}

#[test]
fn vllm_runs_eagle3_with_further_norms_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    let norms = Eagle3Norms { before_residual: true, before_fc: false, fc: true, output: true };
    agrees_with_vllm(&python, eagle3_variant(&target_dir(), [0, 2, 4], 60, None, norms).path(), 0);
}

#[test]
fn vllm_runs_p_eagle_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, peagle(None, Eagle3Norms::default()).path(), 0);
}

#[test]
fn vllm_runs_p_eagle_with_a_reduced_vocabulary_and_further_norms_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    let norms = Eagle3Norms { before_residual: true, before_fc: true, fc: false, output: false };
    agrees_with_vllm(&python, peagle(Some(some_tokens()), norms).path(), 0);
}

/// The server command of the engine's page, adapted to the build for CPUs. Other drafters need
/// Triton there.
#[test]
fn vllm_serves_eagle3_by_the_command_of_its_page() {
    let Some(python) = vllm_python() else { return };
    let (root, target) = (tempfile::tempdir().unwrap(), target_dir());
    let config = converted(eagle3(&target, [0, 2, 4], 60).path(), &target, &root.path().join("vllm"));
    let mut command = Command::new(python);
    command.env_remove("LD_LIBRARY_PATH").env("VLLM_CPU_KVCACHE_SPACE", "1").env("VLLM_NO_USAGE_STATS", "1");
    command.args(["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]);
    command.arg("--model").arg(&target).args(["--speculative-config", &config]);
    let server = Server::start(command, "Application startup complete");
    let messages = json!([{"role": "user", "content": "What is 3 + 4?"}]);
    let asked = json!({"model": target, "messages": messages, "max_tokens": 32, "temperature": 0});
    let answer: Value =
        serde_json::from_str(&server.post("/v1/chat/completions", &asked.to_string())).unwrap();
    assert!(!answer["choices"][0]["message"]["content"].as_str().unwrap().is_empty(), "{answer}");
    assert!(server.metric("vllm:spec_decode_num_drafts_total") > 0.0);
}

#[test]
fn vllm_runs_dspark_of_a_real_model_cycle_by_cycle() {
    let (Some(python), Some(real)) = (vllm_python(), RealModel::new()) else { return };
    agrees_with_vllm_on(&python, [&real.folder, &real.file], real.block(Some(32)).path(), FEWER, 0);
}

#[test]
fn vllm_runs_dflash_of_a_real_model_cycle_by_cycle() {
    let (Some(python), Some(real)) = (vllm_python(), RealModel::new()) else { return };
    agrees_with_vllm_on(&python, [&real.folder, &real.file], real.block(None).path(), FEWER, 0);
}
