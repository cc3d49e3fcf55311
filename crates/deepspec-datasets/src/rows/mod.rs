//! Rows of a dataset in parquet, JSON Lines or JSON files, plain or compressed, read in batches or
//! one by one.

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
pub use iter::RowItem;
pub use table::Table;
pub use units::{Unit, Units, decode_row_group};

/// A dataset that can be read repeatedly from the start.
pub struct DatasetFiles {
    files: Vec<DataFile>,
}

impl DatasetFiles {
    /// Finds the local file or folder that `dataset` names.
    ///
    /// # Errors
    /// Fails with a usage error if the path does not exist or has no data of a supported format.
    pub fn open(dataset: &str) -> anyhow::Result<Self> {
        let path = deepspec_core::env::expand_home(dataset);
        if !path.exists() {
            usage!("--dataset {dataset}: no such file or folder");
        }
        if path.is_dir() {
            return Ok(Self { files: files::list_data_files(&path)? });
        }
        match DataFile::new(path) {
            Some(file) => Ok(Self { files: vec![file] }),
            None => usage!("--dataset {dataset}: expected {}", files::SUPPORTED_FORMATS),
        }
    }

    /// A dataset of these files, in this order.
    ///
    /// # Errors
    /// Fails if there is no file, or if a file has an unsupported format.
    pub fn from_files(paths: Vec<PathBuf>) -> anyhow::Result<Self> {
        let mut files = Vec::with_capacity(paths.len());
        for path in paths {
            match DataFile::new(path.clone()) {
                Some(file) => files.push(file),
                None => anyhow::bail!("{}: expected {}", path.display(), files::SUPPORTED_FORMATS),
            }
        }
        anyhow::ensure!(!files.is_empty(), "the dataset has no files");
        Ok(Self { files })
    }

    /// Files of the dataset, in reading order.
    pub fn files(&self) -> &[DataFile] {
        &self.files
    }

    /// All rows from the start, file by file.
    ///
    /// # Errors
    /// Fails if the first file cannot be opened or is no valid parquet file despite its name.
    /// Errors of later files are items.
    pub fn rows(&self) -> anyhow::Result<Box<dyn Iterator<Item = anyhow::Result<RowItem>>>> {
        self.files[0].check_readable()?;
        Ok(Box::new(iter::Rows::new(self.units())))
    }

    /// Number of rows, valid or not. Parquet metadata states it; other files are read completely.
    ///
    /// # Errors
    /// Fails if a file cannot be read.
    pub fn count_rows(&self) -> anyhow::Result<usize> {
        let count = |file: &DataFile| match file.format() {
            Format::Parquet => Table::open(file.shared_path()).map(|table| table.num_rows()),
            _ => Units::new(vec![file.clone()]).try_fold(0, |rows, unit| anyhow::Ok(rows + unit?.rows())),
        };
        self.files.iter().map(count).sum()
    }

    /// All rows from the start in unparsed units of at most a few thousand rows.
    pub fn units(&self) -> Units {
        Units::new(self.files.clone())
    }
}
