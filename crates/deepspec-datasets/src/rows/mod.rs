//! Rows of a dataset: one or many files of parquet, JSON Lines or JSON, plain or compressed, read in batches or one by one.

mod array;
mod cell;
mod files;
mod iter;
mod table;
mod units;

use std::path::PathBuf;

use deepspec_core::usage;

pub use cell::Cell;
pub use files::{DataFile, Format};
pub use iter::Item;
pub use table::Table;
pub use units::{Unit, Units, decode};

/// A dataset that can be read from its start any number of times.
pub struct Source {
    files: Vec<DataFile>,
}

impl Source {
    /// Finds the local file or folder that `dataset` names.
    ///
    /// # Errors
    /// A usage error unless it is there and is, or holds, data of a kind that we read.
    pub fn find(dataset: &str) -> anyhow::Result<Self> {
        let path = deepspec_core::env::expand_home(dataset);
        if !path.exists() {
            usage!("--dataset {dataset}: no such file or folder");
        }
        if path.is_dir() {
            return Ok(Self { files: files::in_folder(&path)? });
        }
        match DataFile::new(path) {
            Some(file) => Ok(Self { files: vec![file] }),
            None => usage!("--dataset {dataset}: expected {}", files::KNOWN),
        }
    }

    /// The dataset that these files are, in this order.
    ///
    /// # Errors
    /// If there is none, or one is of a kind that we do not read.
    pub fn of_files(paths: Vec<PathBuf>) -> anyhow::Result<Self> {
        let mut files = Vec::with_capacity(paths.len());
        for path in paths {
            match DataFile::new(path.clone()) {
                Some(file) => files.push(file),
                None => anyhow::bail!("{}: expected {}", path.display(), files::KNOWN),
            }
        }
        anyhow::ensure!(!files.is_empty(), "the dataset has no files");
        Ok(Self { files })
    }

    /// Its files, in the order in which they are read.
    pub fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// All rows from the first on, file after file.
    ///
    /// # Errors
    /// If the first file cannot be opened, or is no parquet file although it says so; later files report it as an item.
    pub fn rows(&self) -> anyhow::Result<Box<dyn Iterator<Item = anyhow::Result<Item>>>> {
        self.files[0].check()?;
        Ok(Box::new(iter::Rows::new(self.units())))
    }

    /// How many rows there are, usable or not; parquet files say so, others are read through.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn count(&self) -> anyhow::Result<usize> {
        let count = |file: &DataFile| match file.format() {
            Format::Parquet => Table::open(file.shared_path()).map(|table| table.rows()),
            _ => Units::new(vec![file.clone()]).try_fold(0, |rows, unit| anyhow::Ok(rows + unit?.rows())),
        };
        self.files.iter().map(count).sum()
    }

    /// All rows from the first on, a few hundred at a time and not parsed yet.
    pub fn units(&self) -> Units {
        Units::new(self.files.clone())
    }
}
