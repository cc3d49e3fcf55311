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
mod folder;
#[cfg(test)]
mod fuzz;
mod list;
mod mersenne;
mod plan;
mod record;
mod requests;
mod selection;
mod store;
mod suite;
mod turns;
#[cfg(test)]
mod turns_fuzz;

pub use builtin::SUITES;
pub use fetch::Fetcher;
pub use file::is_file;
pub use folder::{Folder, Sample, SuiteRows};
pub use list::list;
pub use plan::{Place, Plan, Wanted};
pub use record::Origin;
pub use requests::{RequestTemplate, TokenizedSuite};
pub use selection::{SuiteSelection, plans};
pub use store::{Outcome, Store, shown};
pub use suite::{Class, Domain, Suite};
pub use turns::{Form, RowError, Templates};
