//! `inspect` on valid and invalid rows, as text, JSON and HTML.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::thread;

use deepspec_testkit::conversations::{Conversations, TOKENIZER_MARKERS, tokenizers};
use deepspec_testkit::skip;
use deepspec_text::{ChatTokenizer, THINK_TAGS};
use serde_json::{Value, json};

use crate::process::{Ended, command, full, lines, run, text, tiny};

const ANSWER: &str = "The sum reads 3 + 4 = 7. The answer is 7, and <b>nothing</b> else.";

fn row(id: &str, question: &str, answer: &str) -> Value {
    json!({"id": id, "conversations": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
}

fn inspect(input: &Path, more: &[&str]) -> Ended {
    let (input, tiny) = (text(input), tiny());
    run(&[&["inspect", "--input", &input, "--model", &tiny], more].concat())
}

fn parsed(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"))
}

/// A file with rows of every kind; only the first, second, fifth and eighth are fit for training.
fn mixed(dir: &Path) -> std::path::PathBuf {
    let mut system = row("ok", "What is 3 + 4?", ANSWER);
    system["conversations"]
        .as_array_mut()
        .unwrap()
        .insert(0, json!({"role": "system", "content": "Be brief.\u{1b}[31m"}));
    let rows = [
        system.to_string(),
        row("short", "Hi", "Yes.").to_string(),
        row("typed", "say <|im_start|>assistant\nfoo", ANSWER).to_string(),
        json!({"id": "silent", "conversations": [{"role": "user", "content": "Hi"}]}).to_string(),
        row("ok", "Hi", ANSWER).to_string(),
        "{broken".into(),
        json!({"id": "late", "conversations": [{"role": "assistant", "content": "x"}]}).to_string(),
        json!({"id": "failed", "status": "error", "conversations": []}).to_string(),
        row("long", &"word ".repeat(400), ANSWER).to_string(),
    ];
    lines(dir, "rows.jsonl", &rows)
}

#[test]
fn rows_with_the_mask_token_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let seven = ChatTokenizer::load(Path::new(&tiny())).unwrap().encode("7").unwrap()[0];
    let own = Path::new(&tiny()).join("../../configs/tiny/dspark.yaml");
    let masks = format!("drafter.dspark.mask_token_id={seven}");
    let other = row("without", "Hi", "There is nothing else to say, and no sum either.");
    let input = lines(dir.path(), "rows.jsonl", &[row("with", "Hi", ANSWER).to_string(), other.to_string()]);
    let inspected = |more: &[&str]| inspect(&input, &[&["--config", &text(&own)], more].concat());
    for (more, count) in [(&["--json"][..], 0), (&["--json", "--set", &masks], 1)] {
        assert_eq!(parsed(&inspected(more))["summary"]["with_mask_token"], json!(count));
    }
    let ended = inspected(&["--set", &masks]);
    assert!(ended.stdout.contains("1 rows have the drafter's mask_token_id"), "{ended:?}");
    // Candidates are listed where a mask token is still to be chosen: no ordinary token, and none of these rows.
    let listed = "no row has 1023 <|mask|>: candidates for a mask_token_id";
    assert!(ended.stdout.contains(listed), "{ended:?}");
    assert!(inspect(&input, &[]).stdout.contains(listed));
    assert!(!inspected(&[]).stdout.contains("candidates"));
}

#[test]
fn good_rows_are_shown_with_their_supervised_text() {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<String> =
        (0..8).map(|index| row(&format!("r{index}"), "What is 3 + 4?", ANSWER).to_string()).collect();
    let input = lines(dir.path(), "rows.jsonl", &rows);
    let ended = inspect(&input, &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.stdout.matches("── ").count(), 5);
    assert!(
        ended.stdout.contains(&format!("assistant\n⟦<think>\n\n</think>\n\n{ANSWER}<|im_end|>\n⟧\n")),
        "{ended:?}"
    );
    assert!(ended.stdout.contains("rows          8 = 8 good + 0 with fewer"), "{ended:?}");
    assert!(ended.stderr.contains("using the mask rules `qwen`"), "{ended:?}");
    assert!(!ended.stdout.contains('\u{1b}'), "no colours without a terminal");
    assert_eq!(inspect(&input, &["--all"]).stdout.matches("── ").count(), 8);
    assert_eq!(inspect(&input, &["--limit", "0", "--quiet"]).stdout.matches("── ").count(), 0);
    let one = inspect(&input, &["--id", "r6"]);
    assert!(
        one.stdout.contains("rows.jsonl:7  id \"r6\"") && one.stdout.matches("── ").count() == 1,
        "{one:?}"
    );
    inspect(&input, &["--id", "r99", "--quiet"]).fails_with(2, &["--id r99"]);
}

#[test]
fn every_row_that_is_not_fit_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let input = mixed(dir.path());
    let ended = inspect(&input, &["--max-length", "200", "--json"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let found = parsed(&ended);
    let problems = found["problems"].as_array().unwrap();
    let at = |line: u64| {
        let of_line = |problem: &&Value| problem["line"] == line && problem["file"] == text(&input);
        problems
            .iter()
            .find(of_line)
            .map(|problem| problem["reason"].as_str().unwrap().to_owned())
            .unwrap_or_default()
    };
    assert_eq!((at(1), at(2), at(8)), Default::default());
    assert!(at(3).contains("conversations[0], the user's, holds the assistant's header"), "{problems:?}");
    assert!(at(4).contains("no assistant speaks"), "{problems:?}");
    assert_eq!(at(5), "", "a row that repeats an id is a row");
    assert!(at(6).contains("not valid JSON"), "{problems:?}");
    assert!(at(7).contains("must start with user"), "{problems:?}");
    assert!(at(9).contains("cut at 200 tokens, before the first answer"), "{problems:?}");
    let summary = &found["summary"];
    let counts = ["rows", "good", "too_short", "with_problems", "status_error", "unusable"]
        .map(|name| summary[name].as_u64().unwrap());
    assert_eq!(counts, [9, 2, 1, 3, 1, 2]);
    assert_eq!(
        (&summary["empty_masks"], &summary["other_words"], &summary["cut"]),
        (&json!(2), &json!(1), &json!(1))
    );
    // Every problem also appears on standard error, and the last line gives the count.
    for problem in problems {
        assert!(ended.stderr.contains(problem["reason"].as_str().unwrap()), "{ended:?}");
    }
    assert!(
        ended.stderr.trim_end().lines().last().unwrap().contains("5 of 9 rows are not fit for training"),
        "{ended:?}"
    );
    // The segments add up to the whole text.
    let shown = &found["rows"][0];
    let joined: String = shown["segments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|segment| segment["text"].as_str().unwrap())
        .collect();
    assert!(
        joined.starts_with("<|im_start|>system\nBe brief.\u{1b}[31m<|im_end|>")
            && joined.ends_with("else.<|im_end|>\n")
    );
}

#[test]
fn the_page_is_whole_and_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let (input, page) = (mixed(dir.path()), dir.path().join("masks.html"));
    let ended = inspect(&input, &["--html", &text(&page), "--max-length", "200"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.starts_with("mask rules"), "the rows are in the page: {ended:?}");
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.ends_with("</body></html>\n") && html.contains("prefers-color-scheme: dark"));
    assert!(html.contains("&lt;b&gt;nothing&lt;/b&gt; else.") && !html.contains("<b>"));
    assert!(html.contains("<span class=\"learnt special\">&lt;|im_end|&gt;</span>"));
    assert!(html.contains("Be brief.␛[31m") && html.contains("5 problems"));
    assert!(!html.contains("http://") && !html.contains("https://") && !html.contains("<script"));
    assert!(!dir.path().join("masks.html.partial").exists());

    let other = inspect(&input, &["--html", &text(&page), "--quiet"]);
    assert_eq!(other.code, Some(2), "{other:?}");
    assert!(other.stderr.contains("masks.html exists and shows something else; --overwrite"), "{other:?}");
    assert_eq!(
        inspect(&input, &["--html", &text(&page), "--max-length", "200"]).code,
        Some(1),
        "it is there"
    );
    assert_eq!(fs::read_to_string(&page).unwrap(), html);
    assert_eq!(inspect(&input, &["--html", &text(&page), "--overwrite"]).code, Some(1));
    inspect(&input, &["--html", &text(&input), "--overwrite"]).fails_with(2, &["is also an input"]);
}

#[test]
fn rules_come_from_a_recipe_or_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "rows.jsonl", &[row("a", "What is 3 + 4?", ANSWER).to_string()]);
    let entry = "name: mine\nassistant_header: \"<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n\"\nend_of_turn: \"<|im_end|>\"\n";
    let file = lines(dir.path(), "mine.yaml", &[entry.to_owned()]);
    let mine = inspect(&input, &["--chat-template", &text(&file)]);
    assert_eq!(mine.code, Some(0), "{mine:?}");
    assert!(
        mine.stdout.contains(&format!("⟦{ANSWER}<|im_end|>⟧\n"))
            && mine.stdout.contains("mask rules    mine"),
        "{mine:?}"
    );

    let recipe = format!(
        "name: t\ntarget: {{model: '{}', layer_ids: [1]}}\ndrafter: {{dspark: {{block_size: 3, num_draft_layers: 1, mask_token_id: 1023}}}}\n\
         data: {{states: {{cache: unused}}, chat_template: {}, system_prompt: 'Be brief.', max_length: 50}}\n",
        tiny(),
        text(&file)
    );
    let recipe = lines(dir.path(), "recipe.yaml", &[recipe]);
    let ended = run(&["inspect", "--input", &text(&input), "--config", &text(&recipe), "--json"]);
    let found = parsed(&ended);
    assert_eq!(
        (&found["summary"]["chat_template"], &found["summary"]["max_length"]),
        (&json!("mine"), &json!(50))
    );
    assert_eq!((&found["rows"][0]["tokens"], &found["summary"]["default_system"]), (&json!(50), &json!(1)));

    let wrong = lines(dir.path(), "wrong.yaml", &[entry.replace("end_of", "end_off")]);
    inspect(&input, &["--chat-template", &text(&wrong)])
        .fails_with(2, &["wrong.yaml:3", "did you mean `end_of_turn`?"]);
    inspect(&input, &["--chat-template", "llama"])
        .fails_with(2, &["llama", "qwen, gemma4, llama3, ", "phi4, harmony, generation"]);
    inspect(&input, &["--chat-template", "generation"])
        .fails_with(2, &["no {% generation %} tags", "qwen, gemma4, llama3"]);
    inspect(&dir.path().join("absent"), &[]).fails_with(2, &["absent", "no such file"]);
    run(&["inspect", "--input", &text(&input), "--model", "/nowhere"]).fails_with(2, &["/nowhere"]);
    let empty = lines(dir.path(), "empty.jsonl", &[]);
    inspect(&empty, &["--quiet"]).fails_with(2, &["empty.jsonl", "no rows"]);
}

#[test]
fn tags_and_marks_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(
        dir.path(),
        "rows.jsonl",
        &[row("a", "What is 3 + 4?", ANSWER).to_string(), row("b", "Hi", ANSWER).to_string()],
    );
    let template = fs::read_to_string(Path::new(&tiny()).join("chat_template.jinja")).unwrap();
    let model = |start: &str, end: &str| {
        let header = "    {%- if message.role == 'assistant' -%}\n";
        let tail = "        {{- ns.answer.lstrip('\\n') -}}\n";
        let tagged =
            template.replace(header, &format!("{header}{start}")).replace(tail, &format!("{tail}{end}"));
        assert_ne!(tagged, template);
        let model = tempfile::tempdir().unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(Path::new(&tiny()).join(file), model.path().join(file)).unwrap();
        }
        fs::write(model.path().join("chat_template.jinja"), tagged).unwrap();
        model
    };
    let agree = |model: &Path, more: &[&str]| {
        let (input, model) = (text(&input), text(model));
        let ended = run(&[&["inspect", "--input", &input, "--model", &model, "--json"], more].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        parsed(&ended)["summary"].clone()
    };
    let whole = model("{%- generation -%}", "{{- '<|im_end|>\\n' -}}{%- endgeneration -%}{%- continue -%}");
    for more in [&[][..], &["--chat-template", "generation"]] {
        let summary = agree(whole.path(), more);
        assert_eq!(
            (&summary["tags_agree"], &summary["first_disagreement"]),
            (&json!(2), &Value::Null),
            "{summary}"
        );
    }
    let without_end = model("{%- generation -%}", "{%- endgeneration -%}");
    let summary = agree(without_end.path(), &[]);
    assert_eq!(summary["tags_agree"], 0);
    assert_eq!(summary["first_disagreement"], format!("{}:1", text(&input)));
}

/// A server that answers each request with `answer(path, body)`.
fn server(answer: impl Fn(&str, Value) -> (u16, Value) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut stream = BufReader::new(stream);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") && stream.read_line(&mut head).is_ok_and(|read| read > 0) {}
            let length = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
            let mut body = vec![0; length.unwrap_or(0)];
            let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
            if stream.read_exact(&mut body).is_err() {
                continue;
            }
            let (status, said) = answer(&path, serde_json::from_slice(&body).unwrap_or_default());
            let said = said.to_string();
            let _ = write!(
                stream.get_mut(),
                "HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{said}",
                said.len()
            );
        }
    });
    url
}

#[test]
fn a_server_that_renders_otherwise_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let input = lines(dir.path(), "rows.jsonl", &[row("a", "Hi", ANSWER).to_string()]);
    // The tiny target's template applied to "Hi" with the default system message.
    let ours: Vec<i64> = vec![
        1019, 653, 655, 198, 335, 325, 256, 339, 332, 357, 350, 311, 13, 1020, 198, 1019, 656, 198, 39, 72,
        1020, 198, 1019, 278, 350, 311, 198,
    ];
    let tokens = ours.clone();
    let same = server(move |path, body| {
        assert_eq!(
            (path, &body["messages"][1]["content"], &body["add_generation_prompt"]),
            ("/tokenize", &json!("Hi"), &json!(true))
        );
        (200, json!({"count": tokens.len(), "tokens": tokens}))
    });
    let agreed = inspect(&input, &["--server", &format!("{same}/v1"), "--json"]);
    assert_eq!(agreed.code, Some(0), "{agreed:?}");
    assert!(
        parsed(&agreed)["summary"]["server"].as_str().unwrap().ends_with("renders 1 of 1 prompts as we do")
    );

    let other = server(move |_, _| (200, json!({"tokens": ours[..20]})));
    let differs = inspect(&input, &["--server", &other, "--limit", "0"]);
    assert_eq!(differs.code, Some(1), "{differs:?}");
    assert!(
        differs.stderr.contains("the server's template differs from ours at token 20")
            && differs.stderr.contains("the server has the end, we have \"<|im_end|>\""),
        "{differs:?}"
    );

    let silent = server(|_, _| (404, json!({"detail": "Not Found"})));
    let untold = inspect(&input, &["--server", &silent, "--limit", "0"]);
    assert_eq!(untold.code, Some(0), "{untold:?}");
    assert!(untold.stdout.contains("cannot say how it renders"), "{untold:?}");
    inspect(&input, &["--server", "ftp://x", "--quiet"]).fails_with(2, &["--server ftp://x"]);
}

/// A mutated line, with a small deterministic random generator.
fn mutated(line: &str, state: &mut u64) -> String {
    let mut draw = |below: usize| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) as usize % below
    };
    let mut characters: Vec<char> = line.chars().collect();
    const ODD: [&str; 14] = [
        "<|im_start|>assistant\\n",
        "<|im_end|>",
        "\"",
        "{",
        "}",
        "[",
        "]",
        "\\u0000",
        "\\ud800",
        "null",
        "1e999",
        ",",
        "é",
        "\u{1b}",
    ];
    for _ in 0..draw(3) + 1 {
        let (at, piece) = (draw(characters.len()), ODD[draw(ODD.len())]);
        let end = (at + draw(3) * draw(20)).min(characters.len());
        characters.splice(at..end, piece.chars());
    }
    characters.into_iter().filter(|&character| character != '\n').collect()
}

#[test]
fn ten_thousand_mutated_rows_are_each_good_or_explained() {
    let dir = tempfile::tempdir().unwrap();
    let calls = json!({"id": "t", "tools": [{"type": "function", "function": {"name": "add"}}], "conversations": [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "content": "3"}, {"role": "assistant", "content": ANSWER, "reasoning_content": "hm", "finish_reason": "length"}]});
    let (seeds, mut state) = ([row("a", "Hi", ANSWER).to_string(), calls.to_string()], 7);
    let count = if full() { 100_000 } else { 10_000 };
    let rows: Vec<String> = (0..count)
        .map(|index| {
            mutated(&seeds[index % 2].replacen("\"id\":\"", &format!("\"id\":\"{index}-"), 1), &mut state)
        })
        .collect();
    let blank = rows.iter().filter(|row| row.trim().is_empty()).count();
    let input = lines(dir.path(), "rows.jsonl", &rows);
    let ended = inspect(&input, &["--json", "--all", "--quiet"]);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let found = parsed(&ended);
    let summary = &found["summary"];
    let count_of = |name: &str| summary[name].as_u64().unwrap() as usize;
    assert_eq!(count_of("rows"), count - blank);
    let parts = ["good", "too_short", "with_problems", "status_error", "unusable"].map(count_of);
    assert_eq!(parts.iter().sum::<usize>(), count - blank, "{summary}");
    assert!(parts[0] > count / 100 && parts[4] > count / 10, "{summary}");
    let problems = found["problems"].as_array().unwrap();
    let explained: std::collections::HashSet<u64> =
        problems.iter().map(|problem| problem["line"].as_u64().unwrap()).collect();
    assert_eq!(explained.len(), parts[2] + parts[4]);
    assert!(problems.iter().all(|problem| !problem["reason"].as_str().unwrap().is_empty() && problem["file"] == text(&input)));
}

#[test]
fn a_reader_that_is_gone_is_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<String> =
        (0..2000).map(|index| row(&format!("r{index}"), "Hi", ANSWER).to_string()).collect();
    let input = lines(dir.path(), "rows.jsonl", &rows);
    let (input, tiny) = (text(&input), tiny());
    let mut child = command(&["inspect", "--input", &input, "--model", &tiny, "--all", "--quiet"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""), "who has seen enough is no failure");
}

/// Rows of each real tokenizer, some of which its template refuses.
const ROWS: usize = 160;

/// Tokens, masks and text of conversations with real tokenizers equal those of transformers.
#[test]
fn real_tokenizers_are_inspected_as_transformers_reads_them() {
    let (Some(all), Some(python)) = (tokenizers(), skip::python("transformers")) else { return };
    let dir = tempfile::tempdir().unwrap();
    // All that transformers is asked, in one process; and what was found here.
    let (mut cases, mut inspected) = (vec![], vec![]);
    for (name, header, end) in TOKENIZER_MARKERS {
        let mut random = Conversations::new(name);
        let mut conversations = vec![];
        let mut row = |at: usize| {
            let (messages, tools) = random.conversation();
            conversations.push((messages.clone(), tools.clone()));
            let mut row = json!({"id": format!("{name}-{at}"), "conversations": messages});
            if !tools.is_null() {
                row["tools"] = tools;
            }
            row.to_string()
        };
        let rows: Vec<String> = (0..ROWS).map(&mut row).collect();
        let input = lines(dir.path(), &format!("{name}.jsonl"), &rows);
        let entry =
            format!("name: {name}\nassistant_header: {}\nend_of_turn: {}\n", json!(header), json!(end));
        let rules = lines(dir.path(), &format!("{name}.yaml"), &[entry]);
        let (gguf, cache) = (all.join(format!("{name}.gguf")), dir.path().join(format!("{name}-cache")));
        let model = if gguf.is_file() { gguf } else { all.join(name) };
        let told = command(&["inspect", "--all", "--json", "--quiet"])
            .args(["--input", &text(&input), "--model", &text(&model), "--chat-template", &text(&rules)])
            .env("DEEPSPEC_CACHE", &cache)
            .output()
            .unwrap();
        let found: Value = serde_json::from_slice(&told.stdout).unwrap();
        let unpacked = fs::read_dir(cache.join("gguf")).ok().and_then(|mut made| made.next());
        let folder = unpacked.map_or(model, |made| made.unwrap().path());

        cases.extend(conversations.iter().map(|(messages, tools)| {
            json!({"dir": folder, "header": header, "end": end, "messages": messages, "tools": tools, "thinking": null})
        }));
        inspected.push((name, folder, found));
    }
    let [asked, answered] = ["cases.json", "answers.json"].map(|name| dir.path().join(name));
    fs::write(&asked, json!(cases).to_string()).unwrap();
    let script =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/deepspec-text/tests/real_tokenizers.py");
    let mut peer = std::process::Command::new(&python);
    let peer = peer.arg(script).args([&asked, &answered]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(peer.status.success(), "{}", String::from_utf8_lossy(&peer.stderr));
    let answers: Vec<Value> = serde_json::from_slice(&fs::read(&answered).unwrap()).unwrap();
    assert_eq!(answers.len(), cases.len());
    for ((name, folder, found), answers) in inspected.into_iter().zip(answers.chunks(ROWS)) {
        let mut compared = 0;
        let tokenizer = ChatTokenizer::load(&folder).unwrap();
        for row in found["rows"].as_array().unwrap() {
            let at = row["line"].as_u64().unwrap() as usize - 1;
            let answer = &answers[at];
            let Some(ids) = answer["ids"].as_array() else {
                panic!("{name}: transformers refuses {row}");
            };
            assert_eq!(row["untruncated"], ids.len(), "{name}: {row}");
            let mask = answer["mask"].as_array().unwrap().iter().map(|bit| *bit == 1);
            let mut spans: Vec<[usize; 2]> = vec![];
            for at in mask.enumerate().filter_map(|(at, supervised)| supervised.then_some(at)) {
                match spans.last_mut() {
                    Some([_, end]) if *end == at => *end += 1,
                    _ => spans.push([at, at + 1]),
                }
            }
            // transformers also supervises the ends of empty turns.
            let says_something = |&[start, end]: &[usize; 2]| {
                let ids: Vec<i64> = ids[start..end].iter().map(|id| id.as_i64().unwrap()).collect();
                let words = tokenizer.decode(&ids, true).unwrap();
                let marks = THINK_TAGS.iter().flat_map(|fence| [fence.open, fence.close]);
                let words = marks.fold(words, |words, mark| words.replace(mark, ""));
                !words.trim().is_empty()
            };
            spans.retain(says_something);
            assert_eq!(row["spans"], json!(spans), "{name}: {row}");
            let shown = row["segments"].as_array().unwrap().iter();
            let shown: String = shown.map(|segment| segment["text"].as_str().unwrap()).collect();
            assert_eq!(shown, answer["text"], "{name}");
            compared += 1;
        }
        // Rows that are not shown are reported as problems, and rows that transformers cannot
        // render are not shown.
        let problems = found["problems"].as_array().unwrap().iter();
        let told: BTreeSet<u64> = problems.filter_map(|problem| problem["line"].as_u64()).collect();
        let shown: BTreeSet<u64> =
            found["rows"].as_array().unwrap().iter().filter_map(|row| row["line"].as_u64()).collect();
        for at in 0..answers.len() {
            let line = at as u64 + 1;
            assert!(shown.contains(&line) || told.contains(&line), "{name}: nothing is said of line {line}");
        }
        assert_eq!(compared, answers.iter().filter(|answer| !answer.is_null()).count(), "{name}");
    }
}

/// The tokens of a reduced vocabulary are the most frequent supervised ones.
#[test]
fn a_draft_vocabulary_has_the_most_frequent_supervised_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let input = mixed(dir.path());
    let tokenizer = ChatTokenizer::load(Path::new(&tiny())).unwrap();
    let out = dir.path().join("vocab.safetensors");
    let draft_vocab = |size: &str, more: &[&str]| {
        let (input, tiny, out) = (text(&input), tiny(), text(&out));
        let given = ["draft-vocab", "--input", &input, "--model", &tiny, "--size", size, "--output", &out];
        run(&[&given[..], more].concat())
    };
    let ended = draft_vocab("20", &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("20 of 1024") && ended.stdout.contains("skipped"), "{}", ended.stdout);
    let vocab = deepspec_checkpoint::DraftVocab::read(&out).unwrap();
    assert_eq!((vocab.tokens().len(), vocab.vocab_size()), (20, 1024));
    // Four rows have this answer, and its digits occur in no other one.
    let end = tokenizer.encode("<|im_end|>").unwrap()[0];
    let [seven, prompt] = ["7", "Hi"].map(|text| tokenizer.encode(text).unwrap()[0]);
    assert!([end, seven].iter().all(|token| vocab.tokens().contains(token)), "{vocab:?}");
    assert!(!vocab.tokens().contains(&prompt), "prompts are not supervised");

    let complete = draft_vocab("20", &[]);
    assert!(complete.code == Some(0) && complete.stderr.contains("complete"), "{complete:?}");
    for (size, more, words) in [
        ("21", &[][..], "--overwrite"),
        ("0", &["--overwrite"], "from 1 to 1023"),
        ("1024", &["--overwrite"], "from 1 to 1023"),
    ] {
        let ended = draft_vocab(size, more);
        assert!(ended.code == Some(2) && ended.stderr.contains(words), "{ended:?}");
    }
    assert_eq!(draft_vocab("21", &["--overwrite"]).code, Some(0));
    assert_eq!(deepspec_checkpoint::DraftVocab::read(&out).unwrap().tokens().len(), 21);
}
