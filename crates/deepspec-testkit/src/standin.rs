//! Runs of the programs on a GPU that is none (`tests/standin`), and what they did there.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use serde_json::Value;

use crate::skip::{Kind, skip};

/// What a program that was built to speak to GPUs through NCCL needs of libtorch's own CUDA part, and does not find here.
/// Backwards, so that a test program, which holds this as well, is not taken for one.
const NCCL_BACKWARDS: &[u8] = b"LCCNpuorGssecorP";

/// A library in the place of libtorch's CUDA part, compiled for this libtorch.
pub struct Standin {
    dir: PathBuf,
}

impl Standin {
    /// The stand-in for a program; none, and the test left out, where the program was built with NCCL and so for true GPUs.
    ///
    /// # Panics
    /// If it cannot be compiled or the program is not there.
    pub fn for_program(program: &Path) -> Option<Self> {
        if is_for_gpus(program) {
            let why = format!("{} was built with NCCL; run it on its GPUs", program.display());
            skip(Kind::Absent, &why);
            return None;
        }
        Some(Self { dir: compiled() })
    }

    /// Lets a program find this GPU.
    pub fn lend<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("LD_LIBRARY_PATH", &self.dir)
    }

    /// As [`Self::lend`]; the program writes a [`Report`] to `report` as it ends.
    pub fn watch<'a>(&self, command: &'a mut Command, report: &Path) -> &'a mut Command {
        self.lend(command).env("DEEPSPEC_STANDIN_REPORT", report)
    }
}

/// Whether a program was built with NCCL. Each is read once: they are large.
fn is_for_gpus(program: &Path) -> bool {
    static KNOWN: Mutex<BTreeMap<PathBuf, bool>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *known.entry(program.to_path_buf()).or_insert_with(|| {
        let bytes = fs::read(program).unwrap_or_else(|error| {
            panic!("{}: {error}; build it: cargo build --release --workspace", program.display())
        });
        bytes.windows(NCCL_BACKWARDS.len()).any(|part| part.iter().rev().eq(NCCL_BACKWARDS))
    })
}

/// The folder of the compiled library.
fn compiled() -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/standin.sh");
        let output = Command::new(&script).stderr(Stdio::inherit()).output();
        let output = output.unwrap_or_else(|error| panic!("{}: {error}", script.display()));
        assert!(output.status.success(), "{} failed", script.display());
        PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
    });
    dir.clone()
}

/// What a process did on its GPUs.
#[derive(Debug, Clone)]
pub struct Report(Value);

impl Report {
    /// Reads the file that a process left.
    ///
    /// # Panics
    /// If it left none.
    pub fn load(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    /// A sum over all operators: `calls`, `uploads`, `downloads`, `waits`, …
    ///
    /// # Panics
    /// If nothing of this name is counted.
    pub fn total(&self, what: &str) -> i64 {
        self.0[what].as_i64().unwrap_or_else(|| panic!("the report counts no `{what}`"))
    }

    /// A fact of a GPU's memory: `peak_bytes`, `live_bytes`, `allocations` or `refused`.
    ///
    /// # Panics
    /// If there is no such GPU or fact.
    pub fn memory(&self, gpu: usize, what: &str) -> i64 {
        self.0["devices"][gpu][what].as_i64().unwrap_or_else(|| panic!("GPU {gpu} has no `{what}`"))
    }

    /// What a longer run of the same thing did `what` of beyond this one, and by which operators and tensors, for a test's message.
    pub fn beyond(&self, longer: &Self, what: &str) -> (i64, String) {
        let mut lines = vec![];
        for (name, counts) in longer.0["operators"].as_object().into_iter().flatten() {
            let more =
                counts[what].as_i64().unwrap_or(0) - self.0["operators"][name][what].as_i64().unwrap_or(0);
            if more != 0 {
                lines.push(format!("{more} by {name}"));
            }
        }
        for (name, count) in longer.0["transfers"].as_object().into_iter().flatten() {
            let more = count.as_i64().unwrap_or(0) - self.0["transfers"][name].as_i64().unwrap_or(0);
            if more != 0 {
                lines.push(format!("{more} of {name}"));
            }
        }
        (longer.total(what) - self.total(what), lines.join("\n"))
    }
}
