//! Compares files behind path names, so that an output does not replace its input.

use std::fs;
use std::path::{Path, PathBuf};

/// Whether two paths, which may not exist, name the same file.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    candidate_paths(a).iter().any(|place| candidate_paths(b).contains(place))
}

/// Location of the path itself and, if the path is a link, of the file that it points to.
pub fn candidate_paths(path: &Path) -> Vec<PathBuf> {
    let mut paths = vec![resolve_path(path)];
    paths.extend(fs::canonicalize(path));
    paths
}

/// The absolute path, with links and dots resolved in its existing folders. The file itself may not
/// exist.
pub fn resolve_path(path: &Path) -> PathBuf {
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
        assert!(is_same_file(&at("a"), &at("./a")) && is_same_file(&at("a"), &at("link")));
        assert!(is_same_file(&at("absent/b"), &at("absent/./b")) && !is_same_file(&at("a"), &at("b")));
    }
}
