//! Fuzz test of damaged journals: a run continues with plausible answers, or fails with the name of
//! the file.

use std::fs;
use std::path::Path;

use deepspec_core::cli::one_line;
use deepspec_engine::{AcceptanceStats, Cycle, Finish, Request, Sampling};
use deepspec_testkit::mutate::Fuzzer;
use serde_json::{Map, Value, json};

use super::entry::{AnswerKey, DecodeMode, JournalEntry};
use super::journal::Journal;
use super::journal_check::ExpectedAnswer;
use crate::results::Timing;

const STOP: i64 = 9;
const LIMIT: usize = 8;
const BLOCK: usize = 4;
const VOCAB: usize = 100;
const TIMING: Timing = Timing { wall_s: 0.5, draft_s: 0.125, verify_s: 0.25, host_s: 0.125, steps: 3 };

fn cycle(proposed: u32, accepted: u32, committed: u32) -> Cycle {
    let confidence = (0..proposed).map(|k| 0.5 - k as f32).collect();
    Cycle { proposed, nodes: 0, until_stop: proposed, accepted, committed, confidence }
}

fn entry(sample: usize, tokens: &[i64], finish: Finish, cycles: Vec<Cycle>) -> JournalEntry {
    let sample = sample.to_string();
    let key = AnswerKey { mode: DecodeMode::Main, suite: "s".into(), sample, seed: 1, turn: 0 };
    JournalEntry {
        key,
        prompt_tokens: 3,
        tokens: tokens.to_vec(),
        finish,
        cycles,
        timing: TIMING,
        served: None,
    }
}

/// Answers that an engine can return: ended by a bonus token, within a block, by the limit, beyond
/// it, and at once.
fn answers() -> Vec<JournalEntry> {
    vec![
        entry(0, &[1, 2, 3, STOP], Finish::Stop, vec![cycle(4, 1, 2), cycle(4, 0, 1)]),
        entry(1, &[1, 2, 3, STOP], Finish::Stop, vec![cycle(4, 0, 1), cycle(2, 2, 2)]),
        entry(2, &[1; LIMIT], Finish::Length, vec![cycle(4, 4, 5), cycle(3, 1, 2), cycle(4, 2, 3)]),
        entry(3, &[1; LIMIT], Finish::Length, vec![cycle(4, 4, 5), cycle(3, 3, 3)]),
        entry(4, &[STOP], Finish::Stop, vec![]),
    ]
}

fn request() -> Request {
    let (sampling, stop_ids) = (Sampling::new(1.0, 1), vec![STOP]);
    Request { id: "s/0".into(), prompt: vec![1; 3], sampling, max_new_tokens: LIMIT, stop_ids }
}

fn facts() -> Map<String, Value> {
    let Value::Object(facts) = json!({"seed": 1, "temperature": 1.0, "suite s": "abc"}) else {
        unreachable!()
    };
    facts
}

fn open(dir: &Path) -> anyhow::Result<Journal> {
    Journal::open(dir, None, &facts(), false)
}

/// The answers that the journal accepts for the request.
fn taken(journal: &mut Journal) -> Vec<JournalEntry> {
    let request = request();
    let asked = ExpectedAnswer { request: &request, block_size: BLOCK, vocab_size: VOCAB, tree_nodes: 0 };
    answers().iter().filter_map(|answer| journal.take_answer(&answer.key, &asked)).collect()
}

/// A folder with a journal of all answers, and the journal's contents.
fn written() -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = open(dir.path()).unwrap();
    answers().iter().for_each(|answer| journal.append_answer(answer).unwrap());
    drop(journal);
    let text = fs::read(dir.path().join("journal.jsonl")).unwrap();
    (dir, text)
}

#[test]
fn what_was_kept_is_taken_again() {
    let (dir, _) = written();
    assert_eq!(taken(&mut open(dir.path()).unwrap()), answers());
}

#[test]
fn damaged_journals_never_give_what_cannot_be() {
    let (dir, sound) = written();
    let mut dice = Fuzzer::new(13, &["main", "baseline", "stop", "length", "cycles", "tokens", "s"]);
    let (mut refused, mut lost, mut whole) = (0, 0, 0);
    for _ in 0..500 {
        fs::write(dir.path().join("journal.jsonl"), dice.file(&sound)).unwrap();
        match open(dir.path()) {
            Err(error) => {
                let told = one_line(&error);
                assert!(told.contains("journal.jsonl") && !told.contains(char::is_control), "{told:?}");
                refused += 1;
            }
            Ok(mut journal) => {
                let answers = taken(&mut journal);
                let (mut tally, mut timing) = (AcceptanceStats::new(BLOCK), Timing::ZERO);
                for answer in answers {
                    timing.add(&answer.timing);
                    tally.add(&answer.into_completion(String::new()));
                }
                assert_eq!(tally.proposed_at.len(), BLOCK);
                assert!(tally.accepted <= tally.proposed && tally.output_tokens <= 5 * LIMIT as u64);
                assert!(timing.wall_s.is_finite() && timing.is_plausible());
                if tally.samples < 5 { lost += 1 } else { whole += 1 }
            }
        }
    }
    assert_eq!(refused + lost + whole, 500);
    assert!(refused > 50 && lost > 150, "{refused} refused, {lost} with answers lost, {whole} whole");
}

#[test]
fn counts_beyond_the_run_are_no_answer() {
    let request = request();
    let asked = ExpectedAnswer { request: &request, block_size: BLOCK, vocab_size: VOCAB, tree_nodes: 0 };
    let told = |change: fn(&mut JournalEntry)| {
        let mut answer = answers().swap_remove(2);
        asked.check(&answer).unwrap();
        change(&mut answer);
        asked.check(&answer).unwrap_err()
    };
    assert_eq!(
        told(|a| a.cycles[0].proposed = u32::MAX),
        "`cycles[0]` has proposed 4294967295, the block has 4"
    );
    assert_eq!(told(|a| a.cycles[0].nodes = 3), "`cycles[0]` has 3 nodes for proposed 4");
    assert_eq!(told(|a| a.cycles[0].nodes = 5), "`cycles[0]` has 5 nodes for proposed 4");
    assert_eq!(told(|a| a.cycles[1].accepted = 4), "`cycles[1]` has accepted 4 of proposed 3");
    assert_eq!(
        told(|a| a.cycles[1].committed = u32::MAX),
        "`cycles[1]` has committed 4294967295 for accepted 1"
    );
    assert_eq!(told(|a| a.cycles[1].committed = 1), "`cycles[1]` has committed 1 for accepted 1");
    assert_eq!(
        told(|a| a.cycles[0].until_stop = 5),
        "`cycles[0]` has usable 5 of proposed 4 with accepted 4"
    );
    assert_eq!(
        told(|a| a.cycles[1].until_stop = 0),
        "`cycles[1]` has usable 0 of proposed 3 with accepted 1"
    );
    assert_eq!(
        told(|a| a.cycles[0].confidence.truncate(3)),
        "`cycles[0]` has 3 values of confidence for proposed 4"
    );
    assert_eq!(told(|a| a.cycles[0].confidence[1] = f32::INFINITY), "`cycles[0]` has confidence inf");
    assert_eq!(told(|a| a.cycles.push(a.cycles[2].clone())), "`cycles` committed 13 for 8 `tokens`");
    assert_eq!(told(|a| a.cycles.truncate(1)), "`cycles` committed 5 for 8 `tokens`");
    assert_eq!(told(|a| a.tokens.push(1)), "`finish` is length after 9 of 8 `tokens`");
    assert_eq!(told(|a| a.tokens[3] = STOP), "`finish` is length after 8 of 8 `tokens`");
    assert_eq!(told(|a| a.tokens[3] = 100), "`tokens` has 100, the vocabulary has 100 ids");
    assert_eq!(told(|a| a.prompt_tokens = 4), "`prompt_tokens` is 4, not 3");
    assert_eq!(told(|a| a.timing.wall_s = 1e300), "`timing` is none that a clock shows");
}

#[test]
fn nodes_are_those_of_a_tree_within_the_budget() {
    let request = request();
    let asked = ExpectedAnswer { request: &request, block_size: BLOCK, vocab_size: VOCAB, tree_nodes: 16 };
    let checked = |nodes: u32| {
        let mut answer = answers().swap_remove(2);
        answer.cycles.iter_mut().for_each(|cycle| cycle.nodes = nodes);
        asked.check(&answer)
    };
    assert!(checked(4).is_ok() && checked(16).is_ok());
    for nodes in [0, 3, 17] {
        assert!(checked(nodes).unwrap_err().contains(&format!("{nodes} nodes for proposed")));
    }
}
