//! A copy of the tiny target, and runs of the built binary on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use deepspec_testkit::folder;
use serde_json::json;
use tempfile::TempDir;

/// A folder with a copy of the tiny target, a recipe and some rows.
pub struct Bench {
    dir: TempDir,
}

impl Bench {
    pub fn new(rows: usize) -> Self {
        let bench = Self { dir: tempfile::tempdir().unwrap() };
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-target");
        fs::create_dir(bench.path("target")).unwrap();
        for file in fs::read_dir(tiny).unwrap().map(|entry| entry.unwrap().path()) {
            fs::copy(&file, bench.path("target").join(file.file_name().unwrap())).unwrap();
        }
        let recipe = format!(
            "name: t\ntarget: {{model: '{}', layer_ids: [1, 3, 5]}}\n\
             drafter: {{dspark: {{block_size: 3, num_draft_layers: 1, mask_token_id: 1023}}}}\n\
             data: {{states: {{cache: unused}}, chat_template: qwen, max_length: 512}}\n",
            bench.path("target").display()
        );
        bench.write("recipe.yaml", &recipe);
        bench.write("rows.jsonl", &(0..rows).map(|i| row(i) + "\n").collect::<String>());
        bench
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// `cache …` with the bench as working directory.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-data"));
        command
            .arg("cache")
            .args(args)
            .current_dir(self.dir.path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null());
        command
    }

    pub fn run(&self, args: &[&str]) -> Ended {
        let Output { status, stdout, stderr } = self.command(args).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ended { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }

    pub fn build(&self, dir: &str, more: &[&str]) -> Ended {
        self.run(&build_args(dir, more))
    }

    /// All files of a folder with their bytes.
    pub fn files(&self, dir: &str) -> Vec<(String, Vec<u8>)> {
        folder::files(&self.path(dir))
    }
}

/// `build` into `dir` in shards of 1 MiB on the CPU, unless `more` says otherwise.
pub fn build_args<'a>(dir: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["build", "--config", "recipe.yaml", "--input", "rows.jsonl", "--output-dir", dir];
    for default in [["--device", "cpu"], ["--shard-size", "1"]] {
        if !more.contains(&default[0]) {
            args.extend(default);
        }
    }
    args.extend(more);
    args
}

/// A conversation of one or two rounds.
pub fn row(index: usize) -> String {
    let story = "Leopold has 4 envelopes with 8 candles in each and donates 6 candles during the holidays, so he keeps 26. ";
    let mut messages = vec![
        json!({"role": "user", "content": format!("How many candles are there in the end, if {index} are lit?")}),
        json!({"role": "assistant", "content": story.repeat(1 + index % 4)}),
    ];
    if index.is_multiple_of(3) {
        messages.push(json!({"role": "user", "content": "And what if he brings 9 more?"}));
        messages.push(
            json!({"role": "assistant", "content": "Then the sum reads 26 + 9 = 35. The answer is 35."}),
        );
    }
    json!({"id": format!("row-{index}"), "conversations": messages}).to_string()
}

#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    #[track_caller]
    pub fn succeeds_with(&self, words: &[&str]) {
        assert_eq!(self.code, Some(0), "{self:?}");
        assert!(words.iter().all(|word| self.stdout.contains(word)), "{words:?} in {self:?}");
    }

    /// Checks the exit code and that standard error is one line that contains `words`.
    #[track_caller]
    pub fn fails_with(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(words.iter().all(|word| self.stderr.contains(word)), "{words:?} in {self:?}");
    }
}

pub fn flip(path: &Path, at: impl FnOnce(usize) -> usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = at(bytes.len());
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}
