//! File formats of datasets, and the data files of a folder.

use std::fs::{self, File};
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepspec_core::atomic::FileError;
use deepspec_core::{jsonl, usage};

use crate::rows::table::Table;

/// Supported file formats, for messages.
pub const SUPPORTED_FORMATS: &str =
    "a .parquet, .jsonl, .ndjson or .json file, text also as .gz or .zst, or a folder of such files";

/// Metadata files that hub tools write next to the data.
const METADATA_FILES: [&str; 3] = ["dataset_info.json", "dataset_infos.json", "state.json"];

/// Format of a file's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One JSON object per line.
    Lines,
    /// An array of JSON objects if the first character is `[`, otherwise one object per line.
    Json,
    /// Parquet columns.
    Parquet,
}

/// One file of a dataset.
#[derive(Debug, Clone)]
pub struct DataFile {
    path: Arc<Path>,
    format: Format,
}

impl DataFile {
    /// Detects the format from the name; None for unknown names.
    pub fn new(path: PathBuf) -> Option<Self> {
        let name = path.file_name()?.to_str()?.to_lowercase();
        let text = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(&name);
        let format = match text.rsplit_once('.')?.1 {
            "parquet" if text.len() == name.len() => Format::Parquet,
            "jsonl" | "ndjson" => Format::Lines,
            "json" => Format::Json,
            _ => return None,
        };
        Some(Self { path: path.into(), format })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the file, shared with the rows read from it.
    pub fn shared_path(&self) -> Arc<Path> {
        Arc::clone(&self.path)
    }

    /// Format of the file.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Opens the file and, for parquet, reads its schema.
    ///
    /// # Errors
    /// Fails if the file cannot be opened or read, with the path.
    pub fn check_readable(&self) -> anyhow::Result<()> {
        match self.format {
            Format::Parquet => Table::open(self.shared_path()).map(|_| ()),
            _ => Ok(jsonl::open_text(&self.path).map(|_| ())?),
        }
    }

    /// Whether the first non-blank character opens an array.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn is_array(&self) -> Result<bool, FileError> {
        let mut text = jsonl::open_text(&self.path)?;
        loop {
            let bytes = text.fill_buf().map_err(FileError::at("reading", &self.path))?;
            if let Some(first) = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
                return Ok(*first == b'[');
            }
            let read = bytes.len();
            if read == 0 {
                return Ok(false);
            }
            text.consume(read);
        }
    }

    /// Size on disk, in bytes.
    ///
    /// # Errors
    /// Fails if the file's metadata cannot be read.
    pub fn size_bytes(&self) -> Result<u64, FileError> {
        let size = File::open(&self.path).and_then(|file| file.metadata()).map(|data| data.len());
        size.map_err(FileError::at("reading", &self.path))
    }
}

/// The data files in a folder and its subfolders, sorted by path. Skips hidden files and the hub's
/// metadata files.
///
/// # Errors
/// Fails if the folder cannot be read or has no data files.
pub fn list_data_files(folder: &Path) -> anyhow::Result<Vec<DataFile>> {
    let (mut files, mut folders) = (vec![], vec![folder.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(FileError::at("reading", &folder))? {
            let path = entry.map_err(FileError::at("reading", &folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with('.') || METADATA_FILES.contains(&name.as_str()) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else {
                files.extend(DataFile::new(path));
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    if files.is_empty() {
        usage!("--dataset {}: the folder holds no data; expected {SUPPORTED_FORMATS}", folder.display());
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_format() {
        let format = |name: &str| DataFile::new(name.into()).map(|file| file.format());
        assert_eq!(format("a.parquet"), Some(Format::Parquet));
        assert_eq!(format("a.PARQUET"), Some(Format::Parquet));
        assert_eq!(format("a.b.jsonl.gz"), Some(Format::Lines));
        assert_eq!(format("a.ndjson.zst"), Some(Format::Lines));
        assert_eq!(format("a.json"), Some(Format::Json));
        for other in ["a.parquet.gz", "a.csv", "json", "a.gz", ""] {
            assert_eq!(format(other), None, "{other}");
        }
    }

    #[test]
    fn a_folder_is_its_data_files_in_order() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("more")).unwrap();
        for name in ["b.jsonl", "a.parquet", "README.md", ".x.jsonl", "dataset_infos.json", "more/c.json.gz"]
        {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let found = list_data_files(dir.path()).unwrap();
        let names: Vec<_> = found.iter().map(|file| file.path().strip_prefix(dir.path()).unwrap()).collect();
        assert_eq!(names, ["a.parquet", "b.jsonl", "more/c.json.gz"].map(Path::new));
        fs::create_dir(dir.path().join("empty")).unwrap();
        assert!(
            list_data_files(&dir.path().join("empty")).unwrap_err().to_string().contains("holds no data")
        );
    }
}
