//! The two outputs: they appear when both are whole, or not at all.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{self, SyncSender};
use std::thread;

use deepspec_core::atomic::{self, FileError};

use super::assign::Side;
use super::conversation::{Conversation, Name};

/// Bytes after which what was written is sent on to the disk, while more is being made.
const SYNC: usize = 64 << 20;

/// Where rows are written.
pub struct Outputs<'a> {
    /// Training conversations.
    pub train: &'a Path,
    /// Held-out prompts.
    pub eval: &'a Path,
}

/// Lines for the two outputs.
#[derive(Default)]
pub struct Lines {
    train: Vec<u8>,
    eval: Vec<u8>,
}

impl Lines {
    /// Adds a row to its side.
    pub fn add(&mut self, side: Side, row: &Conversation, name: &Name<'_>) {
        match side {
            Side::Train => row.write_train(name, &mut self.train),
            Side::Eval => row.write_eval(name, &mut self.eval),
            Side::Out => {}
        }
    }
}

/// The open outputs.
pub struct Writer<'a> {
    train: &'a mut BufWriter<File>,
    eval: &'a mut BufWriter<File>,
    unsynced: usize,
    sync: SyncSender<()>,
}

impl Writer<'_> {
    /// Appends lines to both.
    pub fn write(&mut self, lines: &Lines) -> io::Result<()> {
        self.train.write_all(&lines.train)?;
        self.eval.write_all(&lines.eval)?;
        self.unsynced += lines.train.len() + lines.eval.len();
        if self.unsynced >= SYNC {
            self.unsynced = 0;
            // If the last one is still under way, this one need not wait in line.
            let _ = self.sync.try_send(());
        }
        Ok(())
    }
}

impl Outputs<'_> {
    /// Lets `fill` write both files and, if it says true, publishes them; whether it did.
    pub fn write(&self, fill: impl FnOnce(&mut Writer<'_>) -> anyhow::Result<bool>) -> anyhow::Result<bool> {
        let (mut train, mut eval) = (create(self.train)?, create(self.eval)?);
        let background = (copy(&train, self.train)?, copy(&eval, self.eval)?);
        let (sync, requests) = mpsc::sync_channel(1);
        let filled = thread::scope(|scope| {
            // A failure shows again when the whole file is synced.
            scope.spawn(move || requests.iter().for_each(|()| drop(sync_both(&background))));
            fill(&mut Writer { train: &mut train, eval: &mut eval, unsynced: 0, sync })
        })?;
        if !filled {
            for output in [self.train, self.eval] {
                let partial = atomic::partial_name(output);
                fs::remove_file(&partial).map_err(FileError::at("removing", &partial))?;
            }
            return Ok(false);
        }
        // All that may fail for want of space comes before either file appears.
        finish(train, self.train)?;
        finish(eval, self.eval)?;
        for output in [self.train, self.eval] {
            fs::rename(atomic::partial_name(output), output).map_err(FileError::at("writing", output))?;
        }
        Ok(true)
    }
}

fn create(output: &Path) -> Result<BufWriter<File>, FileError> {
    let file = File::create(atomic::partial_name(output)).map_err(FileError::at("writing", output))?;
    Ok(BufWriter::new(file))
}

fn copy(file: &BufWriter<File>, output: &Path) -> Result<File, FileError> {
    file.get_ref().try_clone().map_err(FileError::at("writing", output))
}

/// Waits until all that was written is on the disk.
fn finish(mut file: BufWriter<File>, output: &Path) -> Result<(), FileError> {
    let synced = file.flush().and_then(|()| file.get_ref().sync_all());
    synced.map_err(FileError::at("writing", output))
}

fn sync_both((train, eval): &(File, File)) -> io::Result<()> {
    train.sync_data()?;
    eval.sync_data()
}
