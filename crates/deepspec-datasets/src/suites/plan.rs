//! The suites to write and their sources.

use std::path::PathBuf;

use crate::suites::prompt_conversion::PromptConversion;
use crate::suites::suite::Domain;

/// A suite to write.
pub struct SuitePlan {
    /// Name of the suite.
    pub name: String,
    /// Domain of the suite.
    pub domain: Domain,
    /// Maximum number of rows to score; None scores all rows.
    pub cap: Option<usize>,
    /// Version of the conversion in the record.
    pub converter: String,
    /// Conversion from rows to prompts.
    pub conversion: PromptConversion,
    /// Source of the rows.
    pub source: RowSource,
}

/// Source of rows.
pub enum RowSource {
    /// A dataset on the Hugging Face hub.
    Hub {
        /// `owner/name`.
        dataset: String,
        /// Branch, tag or commit; None is the main branch.
        revision: Option<String>,
        /// Part of the dataset.
        part: DatasetPart,
    },
    /// Local files, in order.
    Files(Vec<PathBuf>),
}

/// Part of a hub dataset with the rows.
pub enum DatasetPart {
    /// A split of the named configuration. None means the only configuration of the dataset.
    Split(Option<String>, String),
    /// Files whose paths match these patterns, in the order of the patterns.
    Files(Vec<String>),
}
