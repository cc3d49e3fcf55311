//! `cache build` and `states` with a server that behaves like vLLM.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::{fs, thread};

use deepspec_testkit::server::Server;

use crate::bench::Bench;
use crate::fake_vllm::{FakeVllm, Fault};

/// Layer ids of the bench's taps; the last one is the last layer.
const LAYER_IDS: [u32; 3] = [2, 4, 6];
const TOKEN: &str = "a token of the test";

/// A running `states agent`.
struct Agent {
    child: Child,
    url: String,
}

impl Agent {
    fn start(bench: &Bench, server: &Server) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-data"));
        command.args(["states", "agent", "--port", "0", "--server", &server.url()]);
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
    let agent = Agent::start(&bench, &server);
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
