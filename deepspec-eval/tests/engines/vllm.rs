//! In vLLM's build for CPUs.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use deepspec_testkit::skip::vllm_python;
use serde_json::{Value, json};

use crate::common::{deepspec_eval, repository, target_dir};
use crate::drafters::{RealModel, dflash, eagle3, filling_in, stretched};
use crate::{ANSWER, ENOUGH, FEWER, LIMIT, accepted, drafting, near_tie, ours, prompts};

/// Converts the drafter as `--to vllm` writes it; what the conversion names for `--speculative-config`.
fn converted(drafter: &Path, target: &Path, out: &Path) -> String {
    let [from, beside, to] = [drafter, target, out].map(|path| path.to_str().unwrap());
    let convert = ["checkpoint", "convert", "--to", "vllm", "--from", from, "--target", beside];
    let converted = deepspec_eval(&[&convert[..], &["--output-dir", to]].concat());
    let log = String::from_utf8_lossy(&converted.stderr).into_owned();
    let named = log.split_once("--speculative-config '").and_then(|(_, rest)| rest.split_once('\''));
    named.unwrap_or_else(|| panic!("{log}")).0.to_string()
}

/// Has vLLM serve the drafter beside the tiny target.
fn agrees_with_vllm(python: &str, drafter: &Path, apart: usize) {
    let target = target_dir();
    agrees_with_vllm_on(python, [&target, &target], drafter, LIMIT, apart);
}

/// Has vLLM serve the drafter as `--to vllm` writes it and says, beside a target that both read, and compares answers, which may part at near ties
/// only, and what every cycle accepted, which may differ in so many of the same answers: where two candidates of the drafter are all but equal.
fn agrees_with_vllm_on(python: &str, target: [&Path; 2], drafter: &Path, limit: usize, apart: usize) {
    let root = tempfile::tempdir().unwrap();
    let [out, asked, told, run] =
        ["vllm", "asked.jsonl", "told.jsonl", "run"].map(|name| root.path().join(name));
    // Served by the very arguments that it names.
    let named: Value = serde_json::from_str(&converted(drafter, target[0], &out)).unwrap();
    let prompts = prompts(limit);
    let row = |((suite, id), prompt): (&(String, String), &String)| {
        json!({"suite": suite, "id": id, "prompt": prompt}).to_string()
    };
    fs::write(&asked, prompts.iter().map(row).collect::<Vec<_>>().join("\n")).unwrap();
    let ours = ours(target[0], drafter, limit, &run);
    let accepted = accepted(&run.join("traces.parquet"));
    let mut command = Command::new(python);
    // libtorch of this process is another than vLLM's.
    command.env_remove("LD_LIBRARY_PATH").arg(repository("scripts/vllm_ask.py"));
    command.arg(target[1]).args([&asked, &told]).arg(ANSWER.to_string());
    let [method, model] = ["method", "model"].map(|key| named[key].as_str().unwrap());
    let ran = command.args([method, model, &named["num_speculative_tokens"].to_string()]).output().unwrap();
    let log = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{log}");
    let (mut differing, mut parted, mut cycles, mut tokens) = (vec![], 0, 0, 0);
    let mut answered = 0;
    for line in fs::read_to_string(&told).unwrap().lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let key = (row["suite"].as_str().unwrap().to_string(), row["id"].as_str().unwrap().to_string());
        let list = |name: &str| -> Vec<i64> { serde_json::from_value(row[name].clone()).unwrap() };
        let (ids, theirs) = (list("token_ids"), list("accepted"));
        let (own_ids, _) = &ours[&key];
        answered += 1;
        if ids != *own_ids {
            eprintln!("{key:?}: {}", near_tie(target[0], &prompts[&key], own_ids, &ids));
            parted += 1;
            continue;
        }
        let (own, theirs) = (drafting(&accepted[&key]), drafting(&theirs));
        // The last cycle ends inside a block, where the two count differently.
        let same = own.len() == theirs.len() && own.iter().rev().skip(1).eq(theirs.iter().rev().skip(1));
        if !same {
            differing.push(format!("{key:?}: {theirs:?} there, {own:?} here"));
        }
        (tokens, cycles) = (tokens + ids.len(), cycles + own.len());
    }
    assert_eq!(answered, ours.len());
    assert!(tokens > cycles + ENOUGH, "{tokens} tokens in {cycles} cycles");
    eprintln!("{parted} of {answered} answers part at near ties; {}", differing.join("\n"));
    let most = if limit == LIMIT { 1 } else { answered / 4 };
    assert!(parted <= most, "{parted} of {answered} answers part");
    assert!(differing.len() <= apart, "{}", differing.join("\n"));
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
fn vllm_runs_dflash_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, dflash().path(), 0);
}

#[test]
fn vllm_runs_dflash_whose_slots_fill_in_cycle_by_cycle() {
    let Some(python) = vllm_python() else { return };
    agrees_with_vllm(&python, filling_in().path(), 0);
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

/// A server, which goes away with this, and with it the processes that it started.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let group = format!("-{}", self.0.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = self.0.wait();
    }
}

/// The server of the engine's page, in the form that the build for CPUs has. Other drafters take Triton there.
#[test]
fn vllm_serves_eagle3_by_the_command_of_its_page() {
    let Some(python) = vllm_python() else { return };
    let (root, target) = (tempfile::tempdir().unwrap(), target_dir());
    let config = converted(eagle3(&target, [0, 2, 4], 60).path(), &target, &root.path().join("vllm"));
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut command = Command::new(python);
    command.env_remove("LD_LIBRARY_PATH").env("VLLM_CPU_KVCACHE_SPACE", "1").env("VLLM_NO_USAGE_STATS", "1");
    command.args(["-m", "vllm.entrypoints.openai.api_server", "--port", &port, "--enforce-eager"]);
    command.arg("--model").arg(&target).args(["--speculative-config", &config]).process_group(0);
    let mut server = Server(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut log = BufReader::new(server.0.stderr.take().unwrap()).lines();
    let mut told = vec![];
    loop {
        let line = log.next().unwrap_or_else(|| panic!("it ended: {}", told.join("\n"))).unwrap();
        let listens = line.contains("Application startup complete");
        told.push(line);
        if listens {
            break;
        }
    }
    // Somebody has to read on: a full pipe would stop it.
    let rest = thread::spawn(move || log.map_while(Result::ok).collect::<Vec<_>>().join("\n"));
    let url = format!("http://127.0.0.1:{port}");
    // It says so just before it listens.
    while ureq::get(format!("{url}/health")).call().is_err() && server.0.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(50));
    }
    let messages = json!([{"role": "user", "content": "What is 3 + 4?"}]);
    let asked = json!({"model": target, "messages": messages, "max_tokens": 32, "temperature": 0});
    let answer = ureq::post(format!("{url}/v1/chat/completions"))
        .content_type("application/json")
        .send(asked.to_string());
    let answer = answer.and_then(|mut answer| answer.body_mut().read_to_string());
    let metrics =
        ureq::get(format!("{url}/metrics")).call().and_then(|mut page| page.body_mut().read_to_string());
    drop(server);
    let rest = rest.join().unwrap();
    let answer = answer.unwrap_or_else(|error| panic!("{error}: {rest}"));
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert!(!answer["choices"][0]["message"]["content"].as_str().unwrap().is_empty(), "{answer}");
    let metrics = metrics.unwrap();
    let drafts = metrics.lines().find(|line| line.starts_with("vllm:spec_decode_num_drafts_total")).unwrap();
    assert!(!drafts.ends_with(" 0.0"), "{drafts}");
}

#[test]
fn vllm_runs_dspark_of_a_real_model_cycle_by_cycle() {
    let (Some(python), Some(real)) = (vllm_python(), RealModel::new()) else { return };
    agrees_with_vllm_on(&python, [&real.folder, &real.file], real.block(Some(32)).path(), FEWER, 0);
}
