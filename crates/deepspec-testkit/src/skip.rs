//! Skipped tests. Each prints its reason and is counted by `scripts/test.sh`; a skip fails where
//! skips are forbidden.
//!
//! Each skip appends a line to the file `DEEPSPEC_SKIPS`: kind, test and reason, separated by tabs.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::{env, thread};

/// Why a test is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A program or setting is missing. With `DEEPSPEC_FORBID_SKIPS=1` this is a failure.
    Missing,
    /// The machine cannot provide it: a type of processor, or files that may not be distributed.
    Absent,
    /// The test or the build of its engine takes long; it runs with `scripts/test.sh --full` or
    /// `--engines`.
    Long,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Absent => "absent",
            Self::Long => "long",
        }
    }
}

/// Records that the running test is skipped, and why. The test must return next.
///
/// # Panics
/// Panics if the reason is [`Kind::Missing`] and `DEEPSPEC_FORBID_SKIPS=1`, or if the skip cannot
/// be recorded.
pub fn skip(kind: Kind, why: &str) {
    let test = thread::current().name().unwrap_or("a test").to_string();
    eprintln!("skipped: {why}");
    if let Some(file) = env::var_os("DEEPSPEC_SKIPS") {
        record(Path::new(&file), kind, &test, why)
            .unwrap_or_else(|error| panic!("DEEPSPEC_SKIPS={}: {error}", file.display()));
    }
    let forbidden = env::var("DEEPSPEC_FORBID_SKIPS").is_ok_and(|value| value == "1");
    assert!(is_permitted(kind, forbidden), "{test} may not be left out: {why}");
}

/// Whether the long tests are enabled.
pub fn full() -> bool {
    env::var_os("DEEPSPEC_TEST_FULL").is_some()
}

/// The Python of `DEEPSPEC_TEST_PYTHON`, which has `packages`; `None` skips the test.
pub fn python(packages: &str) -> Option<String> {
    require_python("DEEPSPEC_TEST_PYTHON", packages)
}

/// The Python of `DEEPSPEC_SPECULATORS_PYTHON`, which has `packages`; `None` skips the test.
pub fn speculators_python(packages: &str) -> Option<String> {
    require_python("DEEPSPEC_SPECULATORS_PYTHON", packages)
}

/// The Python of `DEEPSPEC_VLLM_PYTHON`, which has vLLM; `None` skips the test.
pub fn vllm_python() -> Option<String> {
    let python = python_from_env("DEEPSPEC_VLLM_PYTHON");
    if python.is_none() {
        skip(Kind::Long, "it needs vLLM: scripts/test.sh --engines");
    }
    python
}

fn require_python(variable: &str, packages: &str) -> Option<String> {
    let python = python_from_env(variable);
    if python.is_none() {
        skip(Kind::Missing, &format!("{variable} names no Python with {packages}"));
    }
    python
}

fn python_from_env(variable: &str) -> Option<String> {
    env::var(variable).ok().filter(|python| !python.is_empty())
}

fn is_permitted(kind: Kind, forbidden: bool) -> bool {
    kind != Kind::Missing || !forbidden
}

/// A single write in append mode, so that lines of concurrent processes do not mix.
fn record(file: &Path, kind: Kind, test: &str, why: &str) -> io::Result<()> {
    let line = format!("{}\t{test}\t{}\n", kind.name(), why.replace(['\n', '\t'], " "));
    File::options().append(true).create(true).open(file)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn only_what_could_be_there_is_forbidden() {
        assert!(!is_permitted(Kind::Missing, true) && is_permitted(Kind::Missing, false));
        assert!([Kind::Absent, Kind::Long].iter().all(|&kind| is_permitted(kind, true)));
    }

    /// All tests of the workspace must get their interpreter from this module, so that every skip
    /// is recorded.
    #[test]
    fn no_test_asks_for_an_interpreter_by_itself() {
        fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(dir).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    sources(&path, found);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    found.push(path);
                }
            }
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut packages =
            vec![root.join("deepspec-data"), root.join("deepspec-train"), root.join("deepspec-eval")];
        packages.extend(fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path()));
        let mut found = vec![];
        packages.iter().for_each(|package| sources(&package.join("tests"), &mut found));
        assert!(found.len() > 50, "{found:?}");
        for path in found {
            let text = fs::read_to_string(&path).unwrap();
            let asks = |line: &&str| line.contains("env::var") && line.contains("_PYTHON\"");
            assert_eq!(text.lines().find(asks), None, "{}: use skip::python", path.display());
        }
    }

    #[test]
    fn lines_that_are_written_at_once_stay_whole() {
        let file = env::temp_dir().join(format!("deepspec-skips-{}", std::process::id()));
        thread::scope(|scope| {
            for index in 0..8 {
                let file = &file;
                scope.spawn(move || {
                    let test = format!("test-{index}");
                    (0..50).for_each(|_| record(file, Kind::Absent, &test, "no\nreason").unwrap());
                });
            }
        });
        let text = fs::read_to_string(&file).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(text.lines().count(), 400);
        for index in 0..8 {
            let line = format!("absent\ttest-{index}\tno reason");
            assert_eq!(text.lines().filter(|found| *found == line).count(), 50);
        }
    }
}
