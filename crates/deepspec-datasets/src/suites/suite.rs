//! Prompt suites: the known suites, their domains, and the number of rows scored.
//!
//! `deepspec-data suites` writes the suites and `deepspec-eval run` scores them; both use this
//! table.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The subject of a suite's prompts. Scores are averaged over the suites of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Domain {
    /// Word problems and competitions.
    Math,
    /// Programming.
    Code,
    /// Open conversation.
    Chat,
    /// The user's own files, on any subject.
    Own,
}

impl Domain {
    /// All domains, in the order of tables.
    pub const ALL: [Self; 4] = [Self::Math, Self::Code, Self::Chat, Self::Own];
    /// The domains of the known suites.
    pub const KNOWN: [Self; 3] = [Self::Math, Self::Code, Self::Chat];

    /// Name in flags and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Math => "math",
            Self::Code => "code",
            Self::Chat => "chat",
            Self::Own => "own",
        }
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Domain {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|domain| domain.name() == text)
            .ok_or_else(|| format!("`{text}` is no domain; the domains are math, code, chat and own"))
    }
}

/// The origin of a suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SuiteClass {
    /// Part of the published table, which scores at most this many rows.
    Published(usize),
    /// Public and supported, but not part of the published table.
    Extra,
    /// This project's small suite for the toy target.
    Smoke,
    /// A suite that the user describes. At most this many rows are scored, or all rows for None.
    User(Option<usize>),
    /// A JSONL file of the user in any folder; all its rows are scored.
    File(PathBuf),
}

/// A suite by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suite {
    /// Name of the suite. The file in a folder of suites is `NAME.jsonl`.
    pub name: String,
    /// Domain of the suite.
    pub domain: Domain,
    /// Origin of the suite.
    pub class: SuiteClass,
}

impl Suite {
    /// Maximum number of rows to score; None scores all rows.
    pub fn cap(&self) -> Option<usize> {
        match self.class {
            SuiteClass::Published(cap) => Some(cap),
            SuiteClass::Extra | SuiteClass::Smoke | SuiteClass::File(_) => None,
            SuiteClass::User(cap) => cap,
        }
    }

    /// File of the suite: the user's file, or `NAME.jsonl` in the suites folder `dir`.
    pub fn path(&self, dir: &Path) -> PathBuf {
        match &self.class {
            SuiteClass::File(file) => file.clone(),
            _ => suite_path(dir, &self.name),
        }
    }
}

/// The file of the suite `name` in a folder of suites.
pub fn suite_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.jsonl"))
}

/// Checks that a name is a plain file name: lower-case letters and digits, with `-`, `_`, `.`
/// between them.
///
/// # Errors
/// Returns a phrase that describes valid names.
pub fn check_name(name: &str) -> Result<(), String> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_' | '.');
    let outer = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    if name.chars().all(inner) && outer(name.chars().next()) && outer(name.chars().next_back()) {
        return Ok(());
    }
    Err(format!(
        "`{name}` is no name for a suite; use lower-case letters, digits and `-`, `_`, `.` between them"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_file_names() {
        for bad in ["", ".", "-a", "a/b", "../a", "A", "a.", "ä", "a b"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn domains_are_read_as_they_are_shown() {
        for domain in Domain::ALL {
            assert_eq!(domain.to_string().parse(), Ok(domain));
            assert_eq!(serde_json::to_value(domain).unwrap(), domain.name());
        }
        assert!("maths".parse::<Domain>().unwrap_err().contains("math, code, chat and own"));
    }
}
