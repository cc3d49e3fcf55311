//! Model folders from other tools: the stop tokens of an answer, and the chat template that is
//! used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::process::{DEADLINE, Running, Server, command, ended, lines, rows, run, text, tiny, tiny_for};
use crate::regenerate::question;

const ANSWER: &str = "The sum reads 3 + 4 = 7. The answer is 7, and there is nothing else to say.";

/// A copy of the tiny target in its own folder.
fn model(dir: &Path, name: &str) -> PathBuf {
    let model = dir.join(name);
    fs::create_dir(&model).unwrap();
    tiny_for(&model, 2048);
    model
}

fn edit(file: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    change(&mut value);
    fs::write(file, value.to_string()).unwrap();
}

#[test]
fn answers_end_where_any_file_of_the_model_says_and_it_is_said_once() {
    let dir = tempfile::tempdir().unwrap();
    let asked = "Dorothea has 11 postcards. Sebastian has 14 more than Dorothea. What is the total number of postcards?";
    let input = lines(dir.path(), "in.jsonl", &[question("a", asked), question("b", "Hello?")]);
    let ends = |target: &Path| {
        let (target, output) = (text(target), text(&dir.path().join("out.jsonl")));
        let args = [
            "regenerate",
            "--input",
            &text(&input),
            "--output",
            &output,
            "--model",
            "tiny",
            "--local-model",
            &target,
        ];
        let more = [
            "--device",
            "cpu",
            "--temperature",
            "0",
            "--disable-thinking",
            "--max-tokens",
            "120",
            "--overwrite",
        ];
        let ended = run(&[&args[..], &more].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let told: Vec<&str> = ended.stderr.lines().filter(|line| line.contains("answers end at")).collect();
        assert_eq!(told.len(), 1, "{ended:?}");
        assert!(told[0].contains("<|im_end|> (1020)"), "{told:?}");
        let rows = rows(Path::new(&output));
        let row = rows.iter().find(|row| row["id"] == "a").unwrap();
        (row["finish_reason"].clone(), row["conversations"][1]["content"].clone())
    };
    let expected = ends(Path::new(&tiny()));
    assert_eq!(expected.0, "stop");
    // The tokenizer's end of turn is 1020. The other files name another token, or no file names
    // one.
    let (generation, config, bare) =
        (model(dir.path(), "generation"), model(dir.path(), "config"), model(dir.path(), "bare"));
    edit(&generation.join("generation_config.json"), |file| file["eos_token_id"] = json!(1018));
    for folder in [&config, &bare] {
        fs::remove_file(folder.join("generation_config.json")).unwrap();
    }
    edit(&config.join("config.json"), |file| file["eos_token_id"] = json!(1018));
    edit(&bare.join("config.json"), |file| drop(file.as_object_mut().unwrap().shift_remove("eos_token_id")));
    for folder in [&generation, &config, &bare] {
        assert_eq!(ends(folder), expected, "{}", folder.display());
    }

    let server =
        Running::start(command(&["serve", "--model", &text(&generation), "--device", "cpu", "--port", "0"]));
    let line = server.line_with("answers end at");
    assert!(line.contains("(1018)") && line.contains("<|im_end|> (1020)"), "{line}");
}

/// The text of a row with tools, as `inspect` shows it.
fn shown(model: &Path, input: &Path) -> String {
    let ended = run(&[
        "inspect",
        "--input",
        &text(input),
        "--model",
        &text(model),
        "--chat-template",
        "qwen",
        "--json",
        "--quiet",
    ]);
    let found: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    found["rows"][0]["segments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["text"].as_str().unwrap())
        .collect()
}

#[test]
fn chat_templates_are_found_wherever_a_folder_keeps_them() {
    let dir = tempfile::tempdir().unwrap();
    let row = json!({"id": "a", "tools": [{"type": "function", "function": {"name": "add"}}], "conversations": [
        {"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": ANSWER}]});
    let input = lines(dir.path(), "rows.jsonl", &[row.to_string()]);
    let template = fs::read_to_string(Path::new(&tiny()).join("chat_template.jinja")).unwrap();
    let tool_use = format!("{{{{- '[TOOLS]' + (tools | tojson) }}}}{template}");

    let folder = model(dir.path(), "folder");
    fs::create_dir(folder.join("additional_chat_templates")).unwrap();
    fs::write(folder.join("additional_chat_templates/tool_use.jinja"), &tool_use).unwrap();
    let listed = model(dir.path(), "listed");
    fs::remove_file(listed.join("chat_template.jinja")).unwrap();
    let named =
        json!([{"name": "default", "template": template}, {"name": "tool_use", "template": tool_use}]);
    edit(&listed.join("tokenizer_config.json"), |file| file["chat_template"] = named);
    for model in [&folder, &listed] {
        assert!(shown(model, &input).starts_with("[TOOLS][{\"type\""), "{}", shown(model, &input));
    }
    // Templates of older processors; the tokenizer's own template has precedence.
    let processor = model(dir.path(), "processor");
    fs::remove_file(processor.join("chat_template.jinja")).unwrap();
    edit(&processor.join("tokenizer_config.json"), |file| {
        drop(file.as_object_mut().unwrap().shift_remove("chat_template"))
    });
    fs::write(processor.join("chat_template.json"), json!({"chat_template": template}).to_string()).unwrap();
    assert!(shown(&processor, &input).starts_with("<|im_start|>"), "{}", shown(&processor, &input));
    fs::write(listed.join("chat_template.json"), json!({"chat_template": "no"}).to_string()).unwrap();
    assert!(shown(&listed, &input).starts_with("[TOOLS]"));
}

#[test]
fn an_endless_template_is_an_error_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let endless = model(dir.path(), "endless");
    let turns = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    fs::write(endless.join("chat_template.jinja"), turns).unwrap();
    let input = lines(dir.path(), "in.jsonl", &[question("a", "Hello?")]);
    let (input, endless, output) = (text(&input), text(&endless), text(&dir.path().join("out.jsonl")));
    let commands: [&[&str]; 3] = [
        &["inspect", "--input", &input, "--model", &endless, "--chat-template", "qwen"],
        &[
            "regenerate",
            "--input",
            &input,
            "--output",
            &output,
            "--model",
            "tiny",
            "--local-model",
            &endless,
            "--device",
            "cpu",
        ],
        &["serve", "--model", &endless, "--device", "cpu", "--port", "0"],
    ];
    for args in commands {
        // The process must end: a run that hangs is aborted by the deadline.
        let ended = Running::start(command(args)).end();
        assert!(matches!(ended.code, Some(1 | 2)), "{ended:?}");
        assert!(
            ended.stderr.contains("chat_template.jinja") && !ended.stderr.contains("panicked"),
            "{ended:?}"
        );
    }
}

#[test]
fn a_conversation_of_a_thousand_turns_is_read_in_linear_time() {
    let dir = tempfile::tempdir().unwrap();
    let turn = |at: usize| {
        [
            json!({"role": "user", "content": format!("What is {at} + 1, please?")}),
            json!({"role": "assistant", "content": format!("It is {}, I would say: the sum is the next number. Ask me for another one whenever you like to.", at + 1)}),
        ]
    };
    let turns: Vec<Value> = (0..500).flat_map(turn).collect();
    let input = lines(dir.path(), "rows.jsonl", &[json!({"id": "m", "conversations": turns}).to_string()]);
    assert!(fs::metadata(&input).unwrap().len() > 80_000);
    let (input, tiny) = (text(&input), tiny());
    let recipe = format!(
        "name: t\ntarget: {{model: '{tiny}', layer_ids: [1]}}\ndrafter: {{dspark: {{block_size: 3, num_draft_layers: 1, mask_token_id: 1023}}}}\n\
         data: {{states: {{cache: '{}'}}, chat_template: qwen, max_length: 2048}}\n",
        dir.path().join("cache").display()
    );
    let recipe = text(&lines(dir.path(), "recipe.yaml", &[recipe]));
    // A run with quadratic time in the length hits the deadline: it would take more than four
    // minutes.
    let in_time = |args: &[&str]| {
        let mut limited = Command::new("timeout");
        limited.arg(DEADLINE.as_secs().to_string()).arg(env!("CARGO_BIN_EXE_deepspec-data")).args(args);
        ended(limited)
    };
    let inspected = in_time(&[
        "inspect",
        "--max-length",
        "100000",
        "--input",
        &input,
        "--model",
        &tiny,
        "--json",
        "--quiet",
    ]);
    assert_eq!(inspected.code, Some(0), "{}", inspected.stderr);
    let found: Value = serde_json::from_str(&inspected.stdout).unwrap();
    let spans = found["rows"][0]["spans"].as_array().unwrap().len();
    assert_eq!((&found["summary"]["good"], spans), (&json!(1), 500));
    let planned = in_time(&["cache", "plan", "--config", &recipe, "--input", &input, "--json", "--quiet"]);
    assert_eq!(planned.code, Some(0), "{planned:?}");
    let plan: Value = serde_json::from_str(&planned.stdout).unwrap();
    assert_eq!(plan["tokens"], 2048, "{plan}");
    let built =
        in_time(&["cache", "build", "--config", &recipe, "--input", &input, "--device", "cpu", "--quiet"]);
    assert_eq!(built.code, Some(0), "{built:?}");
    assert!(built.stdout.contains("1 row = 1 kept"), "{built:?}");
}

#[test]
fn tokens_behind_the_embedding_cost_only_the_rows_that_use_them() {
    let dir = tempfile::tempdir().unwrap();
    let wide = model(dir.path(), "wide");
    edit(&wide.join("tokenizer.json"), |file| {
        let pad = json!({"id": 1024, "content": "[PAD]", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        file["added_tokens"].as_array_mut().unwrap().push(pad);
    });
    let input =
        lines(dir.path(), "in.jsonl", &[question("plain", "Hello?"), question("pad", "Hello [PAD]?")]);
    let output = dir.path().join("out.jsonl");
    let (wide, input, output_text) = (text(&wide), text(&input), text(&output));
    let args = [
        "regenerate",
        "--input",
        &input,
        "--output",
        &output_text,
        "--model",
        "tiny",
        "--local-model",
        &wide,
    ];
    let ended = run(&[&args[..], &["--device", "cpu", "--max-tokens", "4"]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.starts_with("2 rows = 1 ok + 1 failed"), "{ended:?}");
    assert_eq!(rows(&output)[0]["id"], "plain");
    let failed = rows(&dir.path().join("out_error.jsonl"));
    assert!(failed[0]["error"].as_str().unwrap().contains("1024"), "{failed:?}");
    let server = Server::of(&wide, &[]);
    let http = crate::http::Http::new();
    let (status, said) = http.post_text(&server.url, crate::http::ask("Hello [PAD]?", 4).to_string());
    assert!(status == 400 && said.contains("1024"), "{status}: {said}");
    http.complete(&server.url, &crate::http::ask("Hello?", 4));
}

#[test]
fn drafters_that_are_not_as_they_seem_are_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let drafter = |name: &str| {
        let folder = dir.path().join(name);
        fs::create_dir(&folder).unwrap();
        for (name, bytes) in
            deepspec_testkit::folder::files(&Path::new(&tiny()).with_file_name("tiny-dspark"))
        {
            fs::write(folder.join(name), bytes).unwrap();
        }
        folder
    };
    let serve = |draft: &Path| {
        let args = ["serve", "--model", &tiny(), "--draft", &text(draft), "--device", "cpu", "--port", "0"];
        Running::start(command(&args)).end()
    };
    let damaged = drafter("damaged");
    let weights = damaged.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 64..].fill(0xff);
    fs::write(&weights, bytes).unwrap();
    let told = serve(&damaged);
    assert!(matches!(told.code, Some(1 | 2)), "{told:?}");
    assert!(told.stderr.contains("NaN") || told.stderr.contains("finite"), "{told:?}");
    let sinks = drafter("sinks");
    edit(&sinks.join("config.json"), |file| file["attention_sinks"] = json!(true));
    let told = serve(&sinks);
    assert!(matches!(told.code, Some(1 | 2)) && told.stderr.contains("attention_sinks"), "{told:?}");
}
