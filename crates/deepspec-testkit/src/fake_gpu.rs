//! Runs programs on a fake GPU (`tests/standin`) and reports their GPU operations.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use serde_json::Value;

use crate::skip::{Kind, skip};

/// A symbol that programs built with NCCL need from libtorch's CUDA library, which the fake library
/// lacks. It is reversed, because test programs contain this constant and must not match.
const NCCL_BACKWARDS: &[u8] = b"LCCNpuorGssecorP";

/// A fake replacement for libtorch's CUDA library, compiled for this libtorch.
pub struct FakeGpu {
    dir: PathBuf,
}

impl FakeGpu {
    /// The fake library for a program. None, with a skipped test, if the program was built with
    /// NCCL for real GPUs.
    ///
    /// # Panics
    /// Panics if the library cannot be compiled, or if the program does not exist.
    pub fn for_program(program: &Path) -> Option<Self> {
        if is_built_with_nccl(program) {
            let why = format!("{} was built with NCCL; run it on its GPUs", program.display());
            skip(Kind::Absent, &why);
            return None;
        }
        Some(Self { dir: compile_library() })
    }

    /// Makes a program use the fake GPU.
    pub fn attach<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("LD_LIBRARY_PATH", &self.dir)
    }

    /// Like [`Self::attach`]; the program also writes a [`Report`] to `report` when it ends.
    pub fn attach_with_report<'a>(&self, command: &'a mut Command, report: &Path) -> &'a mut Command {
        self.attach(command).env("DEEPSPEC_STANDIN_REPORT", report)
    }
}

/// Whether a program was built with NCCL. Results are cached, because programs are large.
fn is_built_with_nccl(program: &Path) -> bool {
    static KNOWN: Mutex<BTreeMap<PathBuf, bool>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *known.entry(program.to_path_buf()).or_insert_with(|| {
        let bytes = fs::read(program).unwrap_or_else(|error| {
            panic!("{}: {error}; build it: cargo build --release --workspace", program.display())
        });
        bytes.windows(NCCL_BACKWARDS.len()).any(|part| part.iter().rev().eq(NCCL_BACKWARDS))
    })
}

/// Compiles the library once per process and returns its folder.
fn compile_library() -> PathBuf {
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

/// Operations of a process on its GPUs.
#[derive(Debug, Clone)]
pub struct Report(Value);

impl Report {
    /// Reads the report of a process.
    ///
    /// # Panics
    /// Panics if the process left no report.
    pub fn load(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    /// Total over all operators: `calls`, `uploads`, `downloads`, `waits`, …
    ///
    /// # Panics
    /// Panics if the report has no such count.
    pub fn operation_count(&self, what: &str) -> i64 {
        self.0[what].as_i64().unwrap_or_else(|| panic!("the report counts no `{what}`"))
    }

    /// A memory statistic of a GPU: `peak_bytes`, `live_bytes`, `allocations` or `refused`.
    ///
    /// # Panics
    /// Panics if there is no such GPU or statistic.
    pub fn memory(&self, gpu: usize, what: &str) -> i64 {
        self.0["devices"][gpu][what].as_i64().unwrap_or_else(|| panic!("GPU {gpu} has no `{what}`"))
    }

    /// Number of `what` operations that a longer run has beyond this one. Also returns the
    /// responsible operators and tensors as text for messages.
    pub fn added_operations(&self, longer: &Self, what: &str) -> (i64, String) {
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
        (longer.operation_count(what) - self.operation_count(what), lines.join("\n"))
    }
}
