//! Killing `regenerate` at random times neither loses nor duplicates rows.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use deepspec_core::rng::{Purpose, Stream};

use crate::process::{Running, Server, command, full, lines, run, wait_for};
use crate::regenerate::{arguments, by_id, question, regenerate};

fn count(path: &Path) -> usize {
    fs::read(path).map_or(0, |bytes| bytes.iter().filter(|&&byte| byte == b'\n').count())
}

#[test]
fn a_killed_run_goes_on_as_if_nothing_had_happened() {
    let (kills, total) = if full() { (10, 60) } else { (3, 24) };
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<String> = (0..total)
        .map(|id| {
            question(id, &format!("Dorothea has {id} postcards. Sebastian has 4 more. How many are there?"))
        })
        .collect();
    let input = lines(dir.path(), "in.jsonl", &data);
    let (killed, calm) = (dir.path().join("killed.jsonl"), dir.path().join("calm.jsonl"));
    let server = Server::start(&["--max-num-seqs", "4"]);
    let more = [
        "--server",
        &server.url,
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "--disable-thinking",
        "--concurrency",
        "6",
    ];
    assert_eq!(regenerate(&input, &calm, &more).code, Some(0));

    let args = arguments(&input, &killed, &more);
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    eprintln!("seed {seed}");
    let dice = Stream::new(seed, "kills");
    for kill in 0..kills {
        // Immediately or after some rows. Half of the rows are reserved for answers that arrive
        // while the signal is on its way.
        let rows = count(&killed) + dice.below(total / kills / 2, kill, Purpose::Shuffle, 0) as usize;
        let mut process = Running::start(command(&args));
        wait_for("rows", || (count(&killed) >= rows).then_some(()));
        let ended = process.child.try_wait().unwrap();
        assert!(ended.is_none(), "the run ended by itself: {ended:?}");
        process.signal("KILL");
        assert_eq!(process.end().code, None);
        if dice.below(2, kill, Purpose::Shuffle, 1) == 0 {
            // A partial line, as after a machine crash in the middle of a write.
            let mut file = OpenOptions::new().append(true).create(true).open(&killed).unwrap();
            file.write_all(b"{\"id\": 99, \"conv").unwrap();
        }
    }
    let ended = run(&args);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(
        ended.stdout,
        format!("{total} rows = {total} ok + 0 failed + 0 pending; 0 malformed lines\n")
    );
    assert_eq!(by_id(&killed), by_id(&calm));
}
