//! Rows become samples in input order, and the report accounts for every other row.

mod common;

use common::Bench;
use deepspec_capture::{Rejected, tokenise};
use deepspec_testkit::mutate::Fuzzer;
use serde_json::json;

const LONG: &str =
    "Clementine has 9 baskets with 9 seashells in each, which means that there are 81 seashells in the end.";

fn row(id: &str, answer: &str) -> String {
    let said = [("user", "How many seashells are there?"), ("assistant", answer)];
    let messages = said.map(|(role, content)| json!({"role": role, "content": content}));
    json!({"id": id, "conversations": messages, "extra": 1}).to_string()
}

#[test]
fn samples_come_in_input_order_with_their_mask() {
    let bench = Bench::new();
    let source = bench.source(&[]).unwrap();
    let rows: Vec<String> = (0..200).map(|i| row(&format!("r{i}"), &format!("{LONG} {i}."))).collect();
    let files =
        [bench.write("a.jsonl", &rows[..150].join("\n")), bench.write("b.jsonl", &rows[150..].join("\n"))];
    let mut lines = 0;
    let found = tokenise(&files, &source, |read| lines += read).unwrap();
    assert_eq!((found.report.read, found.report.kept, lines), (200, 200, 200));
    for (i, sample) in found.samples.iter().enumerate() {
        assert_eq!(sample.id, format!("r{i}"));
        let ids: Vec<i64> = sample.input_ids.iter().map(|&id| i64::from(id)).collect();
        let text = source.tokenizer.decode(&ids, false).unwrap();
        assert!(text.starts_with("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"), "{text}");
        let [(start, end)] = sample.spans[..] else { panic!("{:?}", sample.spans) };
        let supervised = source.tokenizer.decode(&ids[start as usize..end as usize], false).unwrap();
        assert_eq!(supervised, format!("<think>\n\n</think>\n\n{LONG} {i}.<|im_end|>\n"));
    }
    let tokens: u64 = found.samples.iter().map(|sample| sample.input_ids.len() as u64).sum();
    let supervised: u64 = found.samples.iter().map(|sample| u64::from(sample.supervised_count())).sum();
    assert_eq!((found.report.tokens, found.report.supervised_tokens), (tokens, supervised));
}

#[test]
fn every_other_row_is_accounted_for() {
    let bench = Bench::new();
    let source = bench.source(&["data.max_length=80"]).unwrap();
    let good = row("good", LONG);
    let lines = [
        good.clone(),
        r#"{"id": "torn", "conversations": [{"role""#.into(),
        r#"{"conversations": [{"role": "user", "content": "hi"}]}"#.into(),
        good.replace("9 baskets", "8 baskets"),
        r#"{"id": 1, "conversations": [{"role": "assistant", "content": "hi"}]}"#.into(),
        r#"{"id": 2, "conversations": [{"role": "robot", "content": "hi"}]}"#.into(),
        r#"{"id": "good", "status": "error", "error": "timeout", "conversations": []}"#.into(),
        String::new(),
        "[1]".into(),
        row("short", "81"),
        row("cut", &LONG.repeat(5)),
        r#"{"id": 3, "conversations": "hi"}"#.into(),
        good.replace("\"good\"", "\"late\"").replace("{\"id\"", "{\"status\":\"success\",\"id\""),
    ];
    let file = bench.write("rows.jsonl", &lines.join("\n"));
    let found = tokenise(std::slice::from_ref(&file), &source, |_| ()).unwrap();
    let report = found.report;
    assert_eq!((report.read, report.kept, report.failed, report.too_short, report.cut), (12, 4, 1, 2, 1));
    assert_eq!(
        found.samples.iter().map(|sample| sample.id.as_str()).collect::<Vec<_>>(),
        ["good", "good~2", "cut", "late"]
    );
    assert_eq!(found.samples[2].input_ids.len(), 80);
    let expected = [
        (2, "not valid JSON"),
        (5, "must start with user, found assistant"),
        (6, "unknown role `robot`"),
        (9, "expected a JSON object, found an array"),
        (12, "`conversations` must be a non-empty array"),
    ];
    assert_eq!(report.rejected.len(), expected.len());
    for (Rejected { file: named, line, reason }, (number, words)) in report.rejected.iter().zip(expected) {
        assert_eq!((named, *line), (&file, number));
        assert!(reason.contains(words), "{words} in {reason}");
    }
    assert_eq!(report.read, report.kept + report.failed + report.too_short + report.rejected.len());

    let missing = bench.path("missing.jsonl");
    assert!(tokenise(&[missing], &source, |_| ()).unwrap_err().to_string().contains("missing.jsonl"));
}

#[test]
fn cut_answers_and_tools_reach_the_samples() {
    let bench = Bench::new();
    let source = bench.source(&["data.system_prompt=''"]).unwrap();
    let row = row("whole", LONG);
    let cut = row
        .replace("\"whole\"", "\"cut\"")
        .replace("\"role\":\"assistant\"", "\"finish_reason\":\"length\",\"role\":\"assistant\"");
    let bad_tools = row.replace("\"whole\"", "\"bad\"").replace("\"extra\":1", "\"tools\":\"{\"");
    assert_ne!(cut, row.replace("\"whole\"", "\"cut\""));
    let file = bench.write("rows.jsonl", &[row, cut, bad_tools].join("\n"));
    let found = tokenise(std::slice::from_ref(&file), &source, |_| ()).unwrap();
    let [whole, cut] = &found.samples[..] else { panic!("{:?}", found.report) };
    // Equal text, but the model never ended its turn: <|im_end|> and the line end are not
    // supervised.
    assert_eq!(whole.input_ids, cut.input_ids);
    assert_eq!(whole.supervised_count(), cut.supervised_count() + 2);
    let [Rejected { line: 3, reason, .. }] = &found.report.rejected[..] else { panic!("{:?}", found.report) };
    assert!(reason.contains("`tools` must be an array of objects"), "{reason}");
}

#[test]
fn rows_without_ids_and_with_repeated_ones_are_all_kept() {
    let bench = Bench::new();
    let source = bench.source(&[]).unwrap();
    let without = |id: &str| row(id, LONG).replace(&format!("\"id\":\"{id}\","), "");
    assert!(!without("x").contains("\"id\""));
    let null = row("x", LONG).replace("\"id\":\"x\"", "\"id\":null");
    // Two splits with rows without ids, a repeated id, and an id that equals the index of another
    // row.
    let files = [
        bench.write("a.jsonl", &[without("x"), row("a", LONG), null, row("a", LONG)].join("\n")),
        bench.write("b.jsonl", &[without("x"), row("0", LONG), row("a", LONG), row("a~2", LONG)].join("\n")),
    ];
    let ids = || {
        let found = tokenise(&files, &source, |_| ()).unwrap();
        assert_eq!((found.report.kept, found.report.rejected.len()), (8, 0));
        found.samples.into_iter().map(|sample| sample.id).collect::<Vec<_>>()
    };
    assert_eq!(ids(), ["0", "a", "2", "a~2", "4", "0~2", "a~3", "a~2~2"]);
    assert_eq!(ids(), ids(), "the same rows get the same ids");
    let odd = bench.write("odd.jsonl", &row("x", LONG).replace("\"id\":\"x\"", "\"id\":[1]"));
    let found = tokenise(&[odd], &source, |_| ()).unwrap();
    assert!(found.report.rejected[0].reason.contains("`id`"), "{:?}", found.report);
}

#[test]
fn a_tokenizer_wider_than_the_embedding_costs_the_rows_that_use_it() {
    let bench = Bench::new();
    bench.edit("config.json", "\"vocab_size\": 1024", "\"vocab_size\": 1023");
    let source = bench.source(&["drafter.dspark.mask_token_id=1018"]).unwrap();
    let file = bench.write("rows.jsonl", &[row("a", LONG), row("b", &format!("{LONG} <|mask|>"))].join("\n"));
    let found = tokenise(std::slice::from_ref(&file), &source, |_| ()).unwrap();
    assert_eq!(found.samples.iter().map(|sample| sample.id.as_str()).collect::<Vec<_>>(), ["a"]);
    let [Rejected { line: 2, reason, .. }] = &found.report.rejected[..] else { panic!("{:?}", found.report) };
    assert!(["<|mask|>", "1023"].iter().all(|word| reason.contains(word)), "{reason}");
}

#[test]
fn rows_of_every_shape_are_read_alike() {
    let bench = Bench::new();
    let source = bench.source(&[]).unwrap();
    let asked = "How many seashells are there?";
    let said = json!([{"role": "user", "content": asked}, {"role": "assistant", "content": LONG}]);
    let rows = [
        json!({"conversations": said}),
        json!({"messages": said}),
        json!({"messages": said.to_string()}),
        json!({"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": LONG}]}),
        json!({"prompt": asked, "response": LONG}),
        json!({"instruction": asked, "input": "", "output": LONG}),
        json!({"messages": [{"role": "User", "content": asked}, {"role": "MODEL", "content": LONG, "tool_calls": null}]}),
    ];
    let lines: Vec<String> = rows.iter().map(ToString::to_string).collect();
    // A number that JSON cannot represent, in a column that is not used.
    let scored = lines[0].replacen('{', "{\"score\": NaN, \"best\": -Infinity, ", 1);
    let file = bench.write("rows.jsonl", &[lines.join("\n"), scored].join("\n"));
    let found = tokenise(&[file], &source, |_| ()).unwrap();
    assert_eq!((found.report.kept, found.report.rejected.len()), (8, 0), "{:?}", found.report);
    for sample in &found.samples {
        assert_eq!(
            (&sample.input_ids, &sample.spans),
            (&found.samples[0].input_ids, &found.samples[0].spans)
        );
    }
}

/// Rows with nulls, wrong types and unknown keys. Each is kept, counted, or rejected with its file,
/// its line and a reason.
#[test]
fn no_damaged_row_is_lost_in_silence() {
    let bench = Bench::new();
    let source = bench.source(&[]).unwrap();
    let words = [
        "conversations",
        "messages",
        "role",
        "content",
        "id",
        "tools",
        "status",
        "error",
        "finish_reason",
        "reasoning",
        "prompt",
    ];
    let mut dice = Fuzzer::new(46, &words);
    let sound: serde_json::Value = serde_json::from_str(&row("a", LONG)).unwrap();
    let mut text = vec![];
    for _ in 0..600 {
        text.extend(dice.line(sound.clone()));
        text.push(b'\n');
    }
    let file = bench.path("rows.jsonl");
    std::fs::write(&file, text).unwrap();
    let found = tokenise(std::slice::from_ref(&file), &source, |_| ()).unwrap();
    let report = found.report;
    assert_eq!(report.read, 600);
    assert_eq!(report.read, report.kept + report.failed + report.too_short + report.rejected.len());
    assert!(
        report.kept > 100 && report.rejected.len() > 50,
        "{} kept, {} rejected",
        report.kept,
        report.rejected.len()
    );
    assert!(report.rejected.iter().all(|row| row.file == file && row.line > 0 && !row.reason.is_empty()));
    let mut ids: Vec<&str> = found.samples.iter().map(|sample| sample.id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), report.kept, "no two samples have one id");
}
