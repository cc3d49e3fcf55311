//! Rows become samples in input order, and every other row is accounted for.

mod common;

use common::Bench;
use deepspec_states::{Rejected, tokenise};
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
    let supervised: u64 = found.samples.iter().map(|sample| u64::from(sample.supervised())).sum();
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
    assert_eq!((report.read, report.kept, report.failed, report.too_short, report.cut), (12, 3, 1, 1, 1));
    assert_eq!(
        found.samples.iter().map(|sample| sample.id.as_str()).collect::<Vec<_>>(),
        ["good", "cut", "late"]
    );
    assert_eq!(found.samples[1].input_ids.len(), 80);
    let expected = [
        (2, "not valid JSON"),
        (3, "the row has no `id`"),
        (4, "id `good` was used by an earlier row"),
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
    // Same text, but the model never ended its turn: <|im_end|> and the line end are not learnt.
    assert_eq!(whole.input_ids, cut.input_ids);
    assert_eq!(whole.supervised(), cut.supervised() + 2);
    let [Rejected { line: 3, reason, .. }] = &found.report.rejected[..] else { panic!("{:?}", found.report) };
    assert!(reason.contains("`tools` must be an array of objects"), "{reason}");
}
