//! Input lines that are unusable: shown, and recorded beside the output that they are missing from.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use deepspec_capture::Rejected;
use deepspec_core::atomic::{self, FileError};
use serde_json::json;

/// Lines that are shown one by one; all of them are in the file.
const SHOWN: usize = 10;

/// Where the unusable lines of `output`'s inputs are recorded.
pub fn path(output: &Path) -> PathBuf {
    beside(output, ".rejected.jsonl")
}

/// `path` with something behind its name.
pub fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Warns of the first rejects and records all of them, or removes an old record when there are none.
pub fn report(rejects: &[Rejected], output: &Path) -> Result<(), FileError> {
    let mut recorder = Recorder::new(output);
    rejects.iter().try_for_each(|reject| recorder.add(reject))?;
    recorder.finish().map(|_| ())
}

/// Records rejects as they come, so that they need not fit into memory.
pub struct Recorder {
    path: PathBuf,
    file: Option<BufWriter<File>>,
    count: usize,
}

impl Recorder {
    /// Nothing is written before the first reject.
    pub fn new(output: &Path) -> Self {
        Self { path: path(output), file: None, count: 0 }
    }

    /// Records a reject, and warns of it if it is one of the first.
    pub fn add(&mut self, reject: &Rejected) -> Result<(), FileError> {
        let Rejected { file, line, reason } = reject;
        if self.count < SHOWN {
            tracing::warn!("{}:{line}: {reason}", file.display());
        }
        self.count += 1;
        let write = |out: &mut Option<BufWriter<File>>| -> io::Result<()> {
            let out = match out {
                Some(out) => out,
                None => out.insert(BufWriter::new(File::create(atomic::partial_name(&self.path))?)),
            };
            serde_json::to_writer(&mut *out, &json!({"file": file, "line": line, "reason": reason}))?;
            out.write_all(b"\n")
        };
        write(&mut self.file).map_err(FileError::at("writing", &self.path))
    }

    /// Publishes the record, or removes an old one when there is nothing to record; how many there are.
    pub fn finish(self) -> Result<usize, FileError> {
        let Some(file) = self.file else {
            return match fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(FileError::at("removing", &self.path)(error))
                }
                _ => Ok(0),
            };
        };
        if self.count > SHOWN {
            tracing::warn!("and {} more lines; all are in {}", self.count - SHOWN, self.path.display());
        }
        let publish = || -> io::Result<()> {
            file.into_inner()?.sync_all()?;
            fs::rename(atomic::partial_name(&self.path), &self.path)
        };
        publish().map_err(FileError::at("writing", &self.path))?;
        Ok(self.count)
    }
}
