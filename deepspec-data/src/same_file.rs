//! Where files lie, whatever they are called: an output must not replace what it is made from.

use std::fs;
use std::path::{Path, PathBuf};

/// Whether two names, which need not exist, mean one file.
pub fn same(a: &Path, b: &Path) -> bool {
    places(a).iter().any(|place| places(b).contains(place))
}

/// A file's own place and, if it is a link, that of what it leads to.
pub fn places(path: &Path) -> Vec<PathBuf> {
    let mut places = vec![place(path)];
    places.extend(fs::canonicalize(path));
    places
}

/// A path from the root, without links and dots as far as its folders are there; the file itself need not be.
pub fn place(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    for folder in path.ancestors().skip(1) {
        if let (Ok(found), Ok(rest)) = (fs::canonicalize(folder), path.strip_prefix(folder)) {
            return found.join(rest);
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_is_one_under_all_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("a"), "").unwrap();
        std::os::unix::fs::symlink(at("a"), at("link")).unwrap();
        assert!(same(&at("a"), &at("./a")) && same(&at("a"), &at("link")));
        assert!(same(&at("absent/b"), &at("absent/./b")) && !same(&at("a"), &at("b")));
    }
}
