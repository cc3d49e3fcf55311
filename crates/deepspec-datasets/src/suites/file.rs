//! JSONL files of the user, which are suites without a description.

use std::path::Path;

use crate::suites::suite::{Domain, Suite, SuiteClass};
use deepspec_core::{env, usage};

/// File name endings of suite files.
const SUITE_EXTENSIONS: [&str; 3] = [".jsonl", ".jsonl.gz", ".jsonl.zst"];

/// Whether a suite name is a file path, which may be outside the suites folder.
pub fn is_file(name: &str) -> bool {
    SUITE_EXTENSIONS.iter().any(|ending| name.ends_with(ending))
}

/// The suite of a file. Its name is the file name without folder and ending, and its domain is
/// [`Domain::Own`].
///
/// # Errors
/// Fails with a usage error if the file does not exist or its name cannot be printed in a table.
pub fn suite_of_file(name: &str) -> anyhow::Result<Suite> {
    let path = env::expand_home(name);
    if !path.is_file() {
        usage!(
            "{} does not exist; a suite whose name ends with .jsonl is a file with rows like {{\"turns\": [\"…\"]}}",
            path.display()
        );
    }
    let file = path.file_name().map(|file| file.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = SUITE_EXTENSIONS.iter().find_map(|ending| file.strip_suffix(ending)).unwrap_or(&file);
    if stem.trim().is_empty() || stem.contains(char::is_control) {
        usage!("{}: `{}` is no name for a suite; rename the file", path.display(), stem.escape_debug());
    }
    Ok(Suite { name: stem.to_string(), domain: Domain::Own, class: SuiteClass::File(path) })
}

/// Whether two paths refer to the same file.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}
