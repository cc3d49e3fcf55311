//! Which suites are to be written, and from what.

use std::path::PathBuf;

use crate::suites::suite::Domain;
use crate::suites::turns::Form;

/// A suite to be written.
pub struct Plan {
    /// Its name.
    pub name: String,
    /// Its domain.
    pub domain: Domain,
    /// Rows that are scored, if there are more.
    pub cap: Option<usize>,
    /// What the record says of the conversion.
    pub converter: String,
    /// How rows become prompts.
    pub form: Form,
    /// Where the rows come from.
    pub wanted: Wanted,
}

/// Where rows are wanted from.
pub enum Wanted {
    /// A dataset on the hub.
    Hub {
        /// `owner/name`.
        dataset: String,
        /// Branch, tag or commit; the main branch without one.
        revision: Option<String>,
        /// Where in the dataset.
        place: Place,
    },
    /// Files on disk, in this order.
    Files(Vec<PathBuf>),
}

/// Where a dataset of the hub keeps the rows.
pub enum Place {
    /// A split, of the only configuration or of the one named.
    Split(Option<String>, String),
    /// Files whose paths match these patterns, pattern by pattern.
    Files(Vec<String>),
}
