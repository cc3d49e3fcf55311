//! Reports unusable input lines, and records them in a file next to the output.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use deepspec_capture::Rejected;
use deepspec_core::atomic::{self, FileError};
use serde_json::json;

/// Maximum number of rejected lines that are printed; the file has all.
const MAX_SHOWN_REJECTS: usize = 10;

/// Path of the rejected lines of `output`'s inputs.
pub fn rejects_path(output: &Path) -> PathBuf {
    with_appended_suffix(output, ".rejected.jsonl")
}

/// `path` with `suffix` after its file name.
pub fn with_appended_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Prints the first rejected lines and records all. Removes an old record if no line was rejected.
pub fn report(rejects: &[Rejected], output: &Path) -> Result<(), FileError> {
    let mut recorder = Recorder::new(output);
    rejects.iter().try_for_each(|reject| recorder.add(reject))?;
    recorder.finish().map(|_| ())
}

/// Records rejected lines one by one, without keeping them in memory.
pub struct Recorder {
    path: PathBuf,
    file: Option<BufWriter<File>>,
    count: usize,
}

impl Recorder {
    /// A recorder, which creates its file at the first rejected line.
    pub fn new(output: &Path) -> Self {
        Self { path: rejects_path(output), file: None, count: 0 }
    }

    /// Records a rejected line, and prints it if it is one of the first.
    pub fn add(&mut self, reject: &Rejected) -> Result<(), FileError> {
        let Rejected { file, line, reason } = reject;
        if self.count < MAX_SHOWN_REJECTS {
            tracing::warn!("{}:{line}: {reason}", file.display());
        }
        self.count += 1;
        let write = |out: &mut Option<BufWriter<File>>| -> io::Result<()> {
            let out = match out {
                Some(out) => out,
                None => out.insert(BufWriter::new(File::create(atomic::partial_path(&self.path))?)),
            };
            serde_json::to_writer(&mut *out, &json!({"file": file, "line": line, "reason": reason}))?;
            out.write_all(b"\n")
        };
        write(&mut self.file).map_err(FileError::at("writing", &self.path))
    }

    /// Publishes the record, or removes an old record if no line was rejected. Returns the number
    /// of rejected lines.
    pub fn finish(self) -> Result<usize, FileError> {
        let Some(file) = self.file else {
            return match fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(FileError::at("removing", &self.path)(error))
                }
                _ => Ok(0),
            };
        };
        if self.count > MAX_SHOWN_REJECTS {
            tracing::warn!(
                "and {} more lines; all are in {}",
                self.count - MAX_SHOWN_REJECTS,
                self.path.display()
            );
        }
        let publish = || -> io::Result<()> {
            file.into_inner()?.sync_all()?;
            fs::rename(atomic::partial_path(&self.path), &self.path)
        };
        publish().map_err(FileError::at("writing", &self.path))?;
        Ok(self.count)
    }
}
