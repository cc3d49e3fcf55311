//! Prompt suites: their list, their conversion from datasets, their rows, and their requests to the
//! engine.
//!
//! `deepspec-data suites` writes the suites. Evaluation scores a finished drafter on them, training
//! an unfinished one.

mod builtin;
mod convert;
mod description;
mod fetch;
mod file;
#[cfg(test)]
mod fuzz;
mod list;
mod mersenne;
mod plan;
mod prompt_conversion;
#[cfg(test)]
mod prompt_conversion_fuzz;
mod record;
mod requests;
mod selection;
mod store;
mod suite;
mod suite_dir;

pub use builtin::BUILTIN_SUITES;
pub use fetch::Fetcher;
pub use file::is_file;
pub use list::list;
pub use plan::{DatasetPart, RowSource, SuitePlan};
pub use prompt_conversion::{PromptConversion, RowError, Templates};
pub use record::Origin;
pub use requests::{RequestTemplate, TokenizedSuite};
pub use selection::{SuiteSelection, select_plans};
pub use store::{StoreResult, SuiteStore, describe_origin};
pub use suite::{Domain, Suite, SuiteClass};
pub use suite_dir::{Sample, SuiteDir, SuiteRows};
