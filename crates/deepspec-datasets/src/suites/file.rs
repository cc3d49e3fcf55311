//! Files of the user's own, which are suites without a description.

use std::path::Path;

use crate::suites::suite::{Class, Domain, Suite};
use deepspec_core::{env, usage};

/// What a name ends with that is a file's.
const ENDINGS: [&str; 3] = [".jsonl", ".jsonl.gz", ".jsonl.zst"];

/// Whether a suite is named by its file, which need not lie in the folder of suites.
pub fn is_file(name: &str) -> bool {
    ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// The suite that a file is: its name is the file's without folder and ending, its domain [`Domain::Own`].
///
/// # Errors
/// Usage errors: no such file, a name that no table can show.
pub fn suite(name: &str) -> anyhow::Result<Suite> {
    let path = env::expand_home(name);
    if !path.is_file() {
        usage!(
            "{} does not exist; a suite whose name ends with .jsonl is a file with rows like {{\"turns\": [\"…\"]}}",
            path.display()
        );
    }
    let file = path.file_name().map(|file| file.to_string_lossy().into_owned()).unwrap_or_default();
    let stem = ENDINGS.iter().find_map(|ending| file.strip_suffix(ending)).unwrap_or(&file);
    if stem.trim().is_empty() || stem.contains(char::is_control) {
        usage!("{}: `{}` is no name for a suite; rename the file", path.display(), stem.escape_debug());
    }
    Ok(Suite { name: stem.to_string(), domain: Domain::Own, class: Class::File(path) })
}

/// Whether two paths lead to one file.
pub fn same(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}
