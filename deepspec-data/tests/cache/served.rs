//! `cache build` and `states` with a server that behaves like vLLM.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::{fs, thread};

use deepspec_capture::cache::Reader;
use deepspec_capture::{Dataset, TargetSpec};
use deepspec_core::cli::Verbosity;
use deepspec_testkit::server::{Reply, Server};
use deepspec_testkit::skip;
use serde_json::json;

use crate::bench::Bench;
use crate::fake_vllm::{FakeVllm, Fault};

/// Layer ids of the bench's taps; the last one is the last layer.
const LAYER_IDS: [u32; 3] = [2, 4, 6];
const TOKEN: &str = "a token of the test";

/// `regenerate --with-states` of the bench's rows, with the server's files in the bench's folder.
fn regenerate(bench: &Bench, url: &str, more: &[&str]) -> (Option<i32>, String) {
    regenerate_into(bench, url, "stored", more)
}

/// As [`regenerate`], with the states in another folder.
fn regenerate_into(bench: &Bench, url: &str, stored: &str, more: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-data"));
    command.args(["regenerate", "--model", "tiny", "--input", "rows.jsonl", "--output", "answers.jsonl"]);
    command.args(["--temperature", "0", "--server", url, "--with-states", stored, "--states-folder"]);
    command.arg(bench.path("states")).args(more).current_dir(bench.path("")).env_remove("RUST_LOG");
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A running `states agent`.
struct Agent {
    child: Child,
    url: String,
}

impl Agent {
    fn start(bench: &Bench, server: &Server, host: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-data"));
        command.args(["states", "agent", "--host", host, "--port", "0", "--server", &server.url()]);
        command.arg("--folder").arg(bench.path("states")).env("DEEPSPEC_STATES_TOKEN", TOKEN);
        let mut child = command.stderr(Stdio::piped()).env_remove("RUST_LOG").spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let line =
            log.find_map(|line| line.unwrap().split_once("listening on ").map(|(_, rest)| rest.to_string()));
        let url = line.unwrap().split(',').next().unwrap().to_string();
        thread::spawn(move || log.for_each(drop));
        Self { child, url }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start_fake(bench: &Bench, faults: impl Fn(usize) -> Fault + Send + Sync + 'static) -> Server {
    FakeVllm::start(&bench.path("target"), &bench.path("states"), &LAYER_IDS, faults).0
}

fn states(bench: &Bench, dir: &str, url: &str) -> String {
    format!("data.states={{cache: {dir}, server: '{url}', folder: '{}'}}", bench.path("states").display())
}

/// Bytes of all shards of a cache.
fn shard_bytes(bench: &Bench, dir: &str) -> Vec<u8> {
    fs::read(bench.path(dir).join("shard-00000.safetensors")).unwrap()
}

const BUILD: [&str; 7] = ["build", "--config", "recipe.yaml", "--input", "rows.jsonl", "--device", "cpu"];

#[test]
fn a_cache_comes_from_a_server_or_from_the_agent_beside_it() {
    let bench = Bench::new(12);
    let own = bench.run(&[&BUILD[..], &["--output-dir", "own"]].concat());
    assert_eq!(own.code, Some(0), "{}", own.stderr);
    let server = start_fake(&bench, |number| if number % 5 == 1 { Fault::NoFile } else { Fault::None });
    let agent = Agent::start(&bench, &server, "127.0.0.1");
    for (dir, url) in [("direct", server.url()), ("agent", agent.url.clone())] {
        let set = states(&bench, dir, &url);
        let mut command = bench.command(&[&BUILD[..], &["--output-dir", dir, "--set", &set]].concat());
        let built = command.env("DEEPSPEC_STATES_TOKEN", TOKEN).output().unwrap();
        assert!(built.status.success(), "{dir}: {}", String::from_utf8_lossy(&built.stderr));
        // Only roundings of the last state may differ: the final norm is computed in another order.
        let (own, found) = (shard_bytes(&bench, "own"), shard_bytes(&bench, dir));
        let other = own.iter().zip(&found).filter(|(own, found)| own != found).count();
        assert_eq!(own.len(), found.len());
        assert!(other * 200 < own.len(), "{dir}: {other} of {} bytes", own.len());
        let manifest = fs::read_to_string(bench.path(dir).join("manifest.json")).unwrap();
        assert!(manifest.contains("vLLM 0.32.0, layer ids [2, 4, 6]"), "{manifest}");
    }
    assert_eq!(fs::read_dir(bench.path("states")).unwrap().count(), 0);

    let set = states(&bench, "stranger", &agent.url);
    let refused = bench.run(&[&BUILD[..], &["--output-dir", "stranger", "--set", &set]].concat());
    assert_eq!(refused.code, Some(1));
    assert!(
        refused.stderr.contains("HTTP 401") && refused.stderr.contains("DEEPSPEC_STATES_TOKEN"),
        "{}",
        refused.stderr
    );
}

#[test]
fn states_come_with_the_answers() {
    let bench = Bench::new(12);
    let faults = [Fault::NoFile, Fault::OtherTokens, Fault::Aborted, Fault::Error, Fault::Empty];
    let server = start_fake(&bench, move |number| {
        faults.get(number / 3).copied().filter(|_| number % 3 == 1).unwrap_or(Fault::None)
    });
    let (code, said) = regenerate(&bench, &server.url(), &[]);
    assert_eq!(code, Some(0), "{said}");
    // An aborted request leaves a file that nobody can name; a sweep deletes it when it is old.
    assert_eq!(fs::read_dir(bench.path("states")).unwrap().count(), 2);
    let answers = ["build", "--config", "recipe.yaml", "--input", "answers.jsonl", "--device", "cpu"];
    let own = bench.run(&[&answers[..], &["--output-dir", "own"]].concat());
    assert_eq!(own.code, Some(0), "{}", own.stderr);
    let set = ["--set", "data.states={cache: with-answers, answers: stored}"];
    let built = bench.run(&[&answers[..], &set].concat());
    assert_eq!(built.code, Some(0), "{}", built.stderr);
    let [alone, with_answers] = ["own", "with-answers"].map(|dir| Reader::open(&bench.path(dir)).unwrap());
    assert_eq!((alone.len(), with_answers.len()), (12, 12));
    for index in 0..12 {
        let (own, found) = (alone.sample(index).unwrap(), with_answers.sample(index).unwrap());
        // The template writes a line break after the answer, which no engine runs.
        assert!(own.input_ids.starts_with(found.input_ids) && own.spans == found.spans);
        let ([own_taps, own_last], [taps, last]) = (own.states().unwrap(), found.states().unwrap());
        let token = taps.len() / found.len();
        let fed = taps.len() - token;
        assert!(own_taps[..fed] == taps[..fed], "taps of sample {index}");
        assert!(taps[fed..].iter().all(|&byte| byte == 0));
        // The final norm is computed in another order, so values may be rounded otherwise.
        let values = |bytes: &[u8]| -> Vec<f32> {
            let bits = bytes.chunks_exact(2).map(|value| u16::from_le_bytes([value[0], value[1]]));
            bits.map(|bits| f32::from_bits(u32::from(bits) << 16)).collect()
        };
        let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= a.abs() / 128.0 + 1e-5;
        let (own_last, last) = (values(&own_last), values(&last));
        // The engine never computes the state of the last token, and this drafter does not read it.
        let positions = with_answers.last_positions(index).unwrap();
        let zeros = positions.iter().filter(|&&position| position as usize + 1 == found.len()).count();
        let known = last.len() - zeros * 192;
        assert!(zeros == 1 && own_last[..known].iter().zip(&last).all(is_close), "sample {index}");
    }
    assert!(with_answers.manifest().no_last_token_states && !alone.manifest().no_last_token_states);
    let origin = with_answers.manifest().origin.as_deref().unwrap();
    assert!(origin.contains("layer ids [2, 4, 6]"), "{origin}");

    // Answered rows need their states when the run goes on.
    let (code, said) = regenerate_into(&bench, &server.url(), "emptied", &[]);
    assert_eq!(code, Some(2));
    assert!(said.contains("12 of 12 answered rows have no states"), "{said}");

    // A drafter that reads the missing states is refused.
    let recipe = fs::read_to_string(bench.path("recipe.yaml")).unwrap();
    let drafter = recipe.lines().find(|line| line.starts_with("drafter:")).unwrap();
    for (supervise, is_refused) in [("shifted", true), ("labels", false)] {
        let other = recipe.replace(drafter, &format!("drafter: {{eagle3: {{supervise: {supervise}}}}}"));
        bench.write("eagle3.yaml", &other.replace("cache: unused", "cache: with-answers"));
        let set = format!("data.states.cache={}", bench.path("with-answers").display());
        let recipe = deepspec_drafters::load_recipe(&bench.path("eagle3.yaml"), &[set]).unwrap();
        let spec = TargetSpec::open(&recipe, Verbosity::Quiet).unwrap();
        let problem = Dataset::open(&recipe, &spec, None, |_| vec![]).err().map(|error| error.to_string());
        match is_refused {
            true => assert!(problem.unwrap().contains("supervise: labels")),
            false => assert_eq!(problem, None),
        }
    }

    // A row that was edited has no states any more, nor has one that was never answered.
    let rows = fs::read_to_string(bench.path("answers.jsonl")).unwrap();
    let mut rows: Vec<serde_json::Value> =
        rows.lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    let last = rows[0]["conversations"].as_array_mut().unwrap().last_mut().unwrap();
    let prompt = last["prompt_token_ids"].as_array_mut().unwrap();
    prompt.insert(0, json!(5));
    rows[1]["id"] = json!("a new row");
    let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
    bench.write("answers.jsonl", &rows);
    let set = ["--set", "data.states={cache: edited, answers: stored}"];
    let edited = bench.run(&[&answers[..], &set].concat());
    assert_eq!(edited.code, Some(1));
    let rejected = fs::read_to_string(bench.path("edited.rejected.jsonl")).unwrap();
    for reason in ["token 0 is 5", "\\\"a new row\\\" has no hidden states"] {
        assert!(rejected.contains(reason), "{reason} in {rejected}");
    }
}

#[test]
fn requests_for_states_with_answers_that_cannot_succeed_are_refused() {
    let bench = Bench::new(2);
    let server = start_fake(&bench, |_| Fault::NoConnector);
    let (code, said) = regenerate(&bench, &server.url(), &[]);
    assert_eq!(code, Some(1));
    assert!(said.contains("names no file of states") && said.contains("states vllm-command"), "{said}");
    let (code, said) = regenerate(&bench, &server.url(), &["--reasoning", "drop"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("keep the reasoning"), "{said}");
    let rows = "{\"id\": \"answered before\"}\n";
    bench.write("answers.jsonl", rows);
    let (code, said) = regenerate(&bench, &server.url(), &["--max-tokens", "9", "--overwrite"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("stored") && said.contains("other settings (max_tokens)"), "{said}");
    assert_eq!(fs::read_to_string(bench.path("answers.jsonl")).unwrap(), rows, "answers are lost");
    bench.write("answers.jsonl", "");
    let other = Server::start(|_| Reply::Json(json!({"engine": "another"})));
    let (code, said) = regenerate_into(&bench, &other.url(), "elsewhere", &[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("not that of a vLLM server"), "{said}");
    let set = ["--set", "data.states={cache: c, answers: nowhere}"];
    let missing = bench.run(&[&BUILD[..], &set].concat());
    assert_eq!(missing.code, Some(2));
    assert!(missing.stderr.contains("answers: nowhere: no such folder"), "{}", missing.stderr);
}

/// A network namespace with a cable to this one.
struct Namespace {
    name: String,
}

impl Namespace {
    /// Address of this namespace and of the new one.
    const ADDRESSES: [&str; 2] = ["10.79.0.1", "10.79.0.2"];

    /// `None` where no namespace can be created.
    fn create() -> Option<Self> {
        let ip = |args: &[&str]| {
            Command::new("ip").args(args).output().is_ok_and(|output| output.status.success())
        };
        let name = format!("ds{}", std::process::id());
        let (here, there) = (format!("{name}a"), format!("{name}b"));
        if !ip(&["netns", "add", &name]) {
            return None;
        }
        let namespace = Self { name };
        let name = namespace.name.as_str();
        let steps: [&[&str]; 6] = [
            &["link", "add", &here, "type", "veth", "peer", "name", &there, "netns", name],
            &["addr", "add", "10.79.0.1/30", "dev", &here],
            &["link", "set", &here, "up"],
            &["-n", name, "addr", "add", "10.79.0.2/30", "dev", &there],
            &["-n", name, "link", "set", &there, "up"],
            &["-n", name, "link", "set", "lo", "up"],
        ];
        steps.iter().all(|step| ip(step)).then_some(namespace)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).output();
    }
}

/// The machine with vLLM and the machine that builds the cache share neither a network nor the
/// folder of states.
#[test]
fn an_agent_serves_another_machine() {
    let Some(namespace) = Namespace::create() else {
        return skip::skip(skip::Kind::Absent, "network namespaces need root and iproute2");
    };
    let bench = Bench::new(6);
    let server = start_fake(&bench, |_| Fault::None);
    let agent = Agent::start(&bench, &server, Namespace::ADDRESSES[0]);
    let set = states(&bench, "far", &agent.url);
    let hidden = bench.path("states");
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &namespace.name, "sh", "-c"]);
    command.arg(r#"mount -t tmpfs none "$1" && shift && exec "$@""#).arg("sh").arg(&hidden);
    command.arg(env!("CARGO_BIN_EXE_deepspec-data")).arg("cache").args(BUILD);
    command.args(["--output-dir", "far", "--set", &set]).current_dir(bench.path(""));
    let built = command.env("DEEPSPEC_STATES_TOKEN", TOKEN).env_remove("RUST_LOG").output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    assert_eq!(Reader::open(&bench.path("far")).unwrap().len(), 6);
    assert_eq!(fs::read_dir(&hidden).unwrap().count(), 0);
    // The server itself listens on this machine only.
    let set = states(&bench, "direct", &server.url());
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &namespace.name, env!("CARGO_BIN_EXE_deepspec-data"), "cache"]);
    command.args(BUILD).args(["--output-dir", "direct", "--set", &set]).current_dir(bench.path(""));
    let refused = command.output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("Connection refused"), "{said}");
}

#[test]
fn the_command_and_the_check_of_a_server() {
    let bench = Bench::new(1);
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-data"));
        let output = command.arg("states").args(args).current_dir(bench.path("")).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, line, errors) = run(&["vllm-command", "--config", "recipe.yaml", "--tensor-parallel", "4"]);
    assert_eq!((code, line.lines().count()), (Some(0), 1), "{errors}");
    for part in [
        "vllm serve ",
        "--max-model-len 513",
        "--tensor-parallel-size 4",
        "[2,4,6]",
        "/dev/shm/deepspec-states",
    ] {
        assert!(line.contains(part), "{part} in {line}");
    }
    let (code, _, errors) = run(&["check", "--config", "recipe.yaml"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("give --server URL"), "{errors}");
    let server = start_fake(&bench, |_| Fault::None);
    let set = states(&bench, "unused", &server.url());
    let (code, said, errors) = run(&["check", "--config", "recipe.yaml", "--set", &set]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(said.contains("3 layers of 192 values") && said.contains("vLLM 0.32.0"), "{said}");
    let shifted = start_fake(&bench, |_| Fault::OtherProbability);
    let (code, _, errors) =
        run(&["check", "--config", "recipe.yaml", "--set", &states(&bench, "unused", &shifted.url())]);
    assert_eq!(code, Some(1));
    assert!(errors.contains("log-probability") && errors.contains("vllm serve"), "{errors}");
}
