//! Runs `regenerate` against four servers that misbehave in different ways, and kills it
//! repeatedly.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use deepspec_core::digest;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_testkit::server::{ReceivedRequest, Reply, Server};
use serde_json::{Value, json};

use crate::process::{Row, Running, command, full, lines, run, wait_for};
use crate::regenerate::{arguments, by_id, regenerate};

/// The answer of a model at temperature 0: always the same for a given conversation.
fn said(ask: &ReceivedRequest) -> Value {
    let content = &digest::sha256_of_bytes(ask.body["messages"].to_string().as_bytes())[..16];
    json!({
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 4},
    })
}

/// A server that does `odd` to a percentage of the requests and answers the others.
fn server(
    name: &'static str,
    seed: u64,
    odd: impl Fn(u64, &ReceivedRequest) -> Option<Reply> + Send + Sync + 'static,
) -> Server {
    let dice = Stream::new(seed, name);
    Server::start(move |ask| {
        let percent = dice.below(100, ask.number as u64, Purpose::Shuffle, 0);
        odd(percent, &ask).unwrap_or_else(|| Reply::Json(said(&ask)))
    })
}

fn error(status: u16) -> Reply {
    let wait = if status == 429 { vec![("retry-after", "0".to_string())] } else { vec![] };
    Reply::Status(status, wait, "{\"error\": {\"message\": \"out of order\"}}".into())
}

/// Conversations of one or two turns, some with a recorded tool call.
fn data(rows: u64) -> Vec<String> {
    let row = |id: u64| {
        let mut said = vec![json!({"role": "user", "content": format!("question {id}")})];
        if id.is_multiple_of(3) {
            said.push(json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"id": id}}}]}));
            said.push(json!({"role": "tool", "content": format!("{id}")}));
        }
        said.push(json!({"role": "assistant", "content": "to be replaced"}));
        if id.is_multiple_of(2) {
            said.push(json!({"role": "user", "content": "and then?"}));
        }
        json!({"id": id, "conversations": said}).to_string()
    };
    (0..rows).map(row).collect()
}

fn count(path: &Path) -> usize {
    fs::read(path).map_or(0, |bytes| bytes.iter().filter(|&&byte| byte == b'\n').count())
}

#[test]
fn nothing_is_lost_or_doubled_whatever_the_servers_and_the_killer_do() {
    let (kills, total) = if full() { (20, 3000) } else { (5, 600) };
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    eprintln!("seed {seed}");
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "in.jsonl", &data(total));
    let (calm, wild) = (dir.path().join("calm.jsonl"), dir.path().join("wild.jsonl"));
    let sampling = ["--temperature", "0", "--concurrency", "8"];

    let good = server("good", seed, |_, _| None);
    let ended = regenerate(&input, &calm, &[&sampling[..], &["--server", &good.url()]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let expected = by_id(&calm);
    assert_eq!(expected.len() as u64, total);

    let errors = server("errors", seed, |percent, _| match percent {
        0..20 => Some(error(500)),
        20..30 => Some(error(429)),
        30..35 => Some(error(503)),
        _ => None,
    });
    let hangs = server("hangs", seed, |percent, ask| match percent {
        0..2 => Some(Reply::Hang),
        _ => Some(Reply::Later(Duration::from_millis(percent / 10), said(ask))),
    });
    let breaks = server("breaks", seed, |percent, ask| match percent {
        0..10 => Some(Reply::Reset),
        10..18 => Some(Reply::Truncated(said(ask))),
        18..24 => Some(Reply::Garbage(b"220 smtp ready\r\n")),
        24..30 => Some(Reply::Json(json!({"choices": []}))),
        30..36 => Some(Reply::Status(200, vec![], "<html>".into())),
        _ => None,
    });
    let mut dies = server("dies", seed, |_, _| None);
    let urls = [errors.url(), hangs.url(), breaks.url(), dies.url()];
    let servers = urls.iter().flat_map(|url| ["--server", url]);
    let more: Vec<&str> = sampling.into_iter().chain(["--timeout", "1"]).chain(servers).collect();
    let args = arguments(&input, &wild, &more);

    let dice = Stream::new(seed, "kills");
    for kill in 0..kills {
        match kill % 4 {
            1 => dies.die(),
            3 => dies.revive(),
            _ => {}
        }
        // Immediately or after some rows. Half of the rows are reserved for answers that arrive
        // while the signal is on its way.
        let rows = count(&wild) + dice.below(total / kills / 2, kill, Purpose::Shuffle, 0) as usize;
        let mut process = Running::start(command(&args));
        wait_for("rows", || (count(&wild) >= rows).then_some(()));
        let ended = process.child.try_wait().unwrap();
        assert!(ended.is_none(), "the run ended by itself: {ended:?}, {}", process.end().stderr);
        process.signal("KILL");
        assert_eq!(process.end().code, None);
    }
    dies.revive();
    let ended = run(&args);
    assert!(matches!(ended.code, Some(0 | 1)), "{ended:?}");
    check(&wild, total, &expected);

    let mut tries = 0;
    while fs::exists(dir.path().join("wild_error.jsonl")).unwrap() {
        tries += 1;
        assert!(tries < 10, "rows fail for ever");
        run(&[&args[..], &["--retry-failed".into()]].concat());
        check(&wild, total, &expected);
    }
    assert_eq!(by_id(&wild), expected);
}

/// Every id appears exactly once in the two outputs, and answers equal those without faults.
fn check(output: &Path, total: u64, expected: &BTreeMap<String, Row>) {
    let ok = by_id(output);
    let failed_path = output.with_file_name("wild_error.jsonl");
    let failed = if failed_path.exists() { by_id(&failed_path) } else { BTreeMap::new() };
    assert_eq!((ok.len() + failed.len()) as u64, total);
    for (id, row) in &ok {
        assert!(!failed.contains_key(id), "{id} stands in both");
        assert_eq!(row, &expected[id]);
    }
    let report: Value =
        serde_json::from_slice(&fs::read(output.with_file_name("wild.jsonl.report.json")).unwrap()).unwrap();
    assert_eq!((&report["rows"]["ok"], &report["rows"]["failed"]), (&json!(ok.len()), &json!(failed.len())));
    assert_eq!(report["rows"]["pending"], 0);
}

#[test]
fn a_server_that_dies_and_comes_back_is_asked_again() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "in.jsonl", &data(3000));
    let output = dir.path().join("out.jsonl");
    let mut dies = Server::start(|ask| Reply::Json(said(&ask)));
    // Slow, so that the run lasts until the other server is trusted again.
    let steady = Server::start(|ask| Reply::Later(Duration::from_millis(20), said(&ask)));
    let urls = [dies.url(), steady.url()];
    let args =
        arguments(&input, &output, &["--concurrency", "2", "--server", &urls[0], "--server", &urls[1]]);
    let process = Running::start(command(&args));
    wait_for("answers", || (dies.count() > 100).then_some(()));
    dies.die();
    let line = process.line_with("trying it again");
    assert!(line.contains(&urls[0]), "{line}");
    dies.revive();
    let before = dies.count();
    wait_for("the server's return", || (dies.count() > before).then_some(()));
    let ended = process.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(dies.count() > before + 100, "it takes its part again");
    assert_eq!(by_id(&output).len(), 3000);
}

#[test]
fn fast_servers_take_what_slow_ones_would_have_got() {
    // Slots of four servers with 40 to 160 ms per answer; a request occupies one slot.
    let slots = 6;
    let rows: u64 = if full() { 2400 } else { 800 };
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..rows)
        .map(|id| {
            json!({"id": id, "conversations": [{"role": "user", "content": format!("{id}")}]}).to_string()
        })
        .collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let log: Arc<std::sync::Mutex<Vec<(std::time::Instant, i64)>>> = Arc::default();
    let servers: Vec<Server> = [40, 60, 90, 160]
        .into_iter()
        .map(|millis| {
            let log = Arc::clone(&log);
            Server::start(move |ask| {
                log.lock().unwrap().push((std::time::Instant::now(), 1));
                std::thread::sleep(Duration::from_millis(millis));
                log.lock().unwrap().push((std::time::Instant::now(), -1));
                Reply::Json(said(&ask))
            })
        })
        .collect();
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let slots_text = slots.to_string();
    let mut more = vec!["--concurrency", &slots_text];
    more.extend(urls.iter().flat_map(|url| ["--server", url]));
    let output = dir.path().join("out.jsonl");
    assert_eq!(regenerate(&input, &output, &more).code, Some(0));

    let mut log = log.lock().unwrap().clone();
    log.sort();
    // Between 10 % and 90 % of the answers.
    let ends: Vec<_> = log.iter().filter(|(_, change)| *change < 0).map(|(at, _)| *at).collect();
    let (from, to) = (ends[ends.len() / 10], ends[ends.len() * 9 / 10]);
    let (mut busy, mut now, mut last) = (0.0, 0, from);
    for &(at, change) in &log {
        if at > from && at <= to {
            busy += now as f64 * (at - last).as_secs_f64();
            last = at;
        }
        now += change;
    }
    let share = busy / ((to - from).as_secs_f64() * (slots * servers.len()) as f64);
    eprintln!("slots are busy {:.1} % of the time", 100.0 * share);
    assert!(share >= 0.95, "slots are busy only {:.1} % of the time", 100.0 * share);
    let counts: Vec<usize> = servers.iter().map(Server::count).collect();
    assert!(counts.windows(2).all(|pair| pair[0] > pair[1]), "faster servers answer more: {counts:?}");
}
