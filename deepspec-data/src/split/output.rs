//! Writes the two outputs, which appear only when both are complete.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{self, SyncSender};
use std::thread;

use deepspec_core::atomic::{FileError, PartialLock};

use super::assign::Side;
use super::conversation::{Conversation, OutputId};

/// Number of written bytes after which a background sync to disk starts.
const SYNC_BYTES: usize = 64 << 20;

/// The output files, locked against other processes.
pub struct Outputs<'a> {
    /// Training conversations.
    train: Output<'a>,
    /// Held-out prompts.
    eval: Output<'a>,
}

/// One output file.
struct Output<'a> {
    path: &'a Path,
    lock: PartialLock,
}

impl<'a> Output<'a> {
    fn lock(path: &'a Path) -> anyhow::Result<Self> {
        match PartialLock::try_acquire(path)? {
            Some(lock) => Ok(Self { path, lock }),
            None => anyhow::bail!(
                "{} is being written by another split; wait for it, or name another output",
                path.display()
            ),
        }
    }
}

/// Lines to append to the two outputs.
#[derive(Default)]
pub struct Lines {
    train: Vec<u8>,
    eval: Vec<u8>,
}

impl Lines {
    /// Appends a row to the output of its side.
    pub fn add(&mut self, side: Side, row: &Conversation, name: &OutputId<'_>) {
        match side {
            Side::Train => row.write_train(name, &mut self.train),
            Side::Eval => row.write_eval(name, &mut self.eval),
            Side::Out => {}
        }
    }
}

/// The open outputs.
pub struct Writer<'a> {
    train: (&'a mut BufWriter<File>, &'a Path),
    eval: (&'a mut BufWriter<File>, &'a Path),
    unsynced: usize,
    sync: SyncSender<()>,
}

impl Writer<'_> {
    /// Appends lines to both files.
    pub fn write(&mut self, lines: &Lines) -> Result<(), FileError> {
        for ((file, path), lines) in [(&mut self.train, &lines.train), (&mut self.eval, &lines.eval)] {
            file.write_all(lines).map_err(FileError::at("writing", path))?;
        }
        self.unsynced += lines.train.len() + lines.eval.len();
        if self.unsynced >= SYNC_BYTES {
            self.unsynced = 0;
            // If the previous sync is still running, this sync is skipped.
            let _ = self.sync.try_send(());
        }
        Ok(())
    }
}

impl<'a> Outputs<'a> {
    /// Locks both files.
    ///
    /// # Errors
    /// If another process is writing one of them, or it cannot be created.
    pub fn lock(train: &'a Path, eval: &'a Path) -> anyhow::Result<Self> {
        Ok(Self { train: Output::lock(train)?, eval: Output::lock(eval)? })
    }

    /// Lets `fill` write both files. Publishes the files if `fill` returns true, and returns the
    /// value of `fill`.
    pub fn write(&self, fill: impl FnOnce(&mut Writer<'_>) -> anyhow::Result<bool>) -> anyhow::Result<bool> {
        let Self { train, eval } = self;
        let (mut train_file, mut eval_file) =
            (BufWriter::new(train.lock.reopen_truncated()?), BufWriter::new(eval.lock.reopen_truncated()?));
        let background = (clone_file(&train_file, train.path)?, clone_file(&eval_file, eval.path)?);
        let (sync, requests) = mpsc::sync_channel(1);
        let filled = thread::scope(|scope| {
            // Errors are ignored here, because the final sync reports them again.
            scope.spawn(move || requests.iter().for_each(|()| drop(sync_both(&background))));
            let (train, eval) = ((&mut train_file, train.path), (&mut eval_file, eval.path));
            fill(&mut Writer { train, eval, unsynced: 0, sync })
        })?;
        if !filled {
            return Ok(false);
        }
        // Flushes and syncs both files before publishing either, so that a full disk leaves
        // neither.
        flush_and_sync(train_file, train.path)?;
        flush_and_sync(eval_file, eval.path)?;
        [train, eval].into_iter().try_for_each(|output| output.lock.publish())?;
        Ok(true)
    }
}

fn clone_file(file: &BufWriter<File>, output: &Path) -> Result<File, FileError> {
    file.get_ref().try_clone().map_err(FileError::at("writing", output))
}

/// Waits until all data is on disk.
fn flush_and_sync(mut file: BufWriter<File>, output: &Path) -> Result<(), FileError> {
    let synced = file.flush().and_then(|()| file.get_ref().sync_all());
    synced.map_err(FileError::at("writing", output))
}

fn sync_both((train, eval): &(File, File)) -> io::Result<()> {
    train.sync_data()?;
    eval.sync_data()
}
