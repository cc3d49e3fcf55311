//! Reads the files of a folder.

use std::fs;
use std::path::Path;

/// All entries of a folder by name: files with their bytes, subfolders with none.
///
/// # Panics
/// Panics if the folder cannot be read.
pub fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let named = |entry: fs::DirEntry| {
        (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).unwrap_or_default())
    };
    let mut files: Vec<_> = entries.map(|entry| named(entry.expect("an entry of the folder"))).collect();
    files.sort();
    files
}
