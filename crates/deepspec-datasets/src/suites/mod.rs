//! Prompt suites: which there are, how they are made from datasets, their rows, and what the engine is asked.
//!
//! `deepspec-data suites` makes them. Evaluation scores them with a drafter that is done, training with one that is not.

mod asked;
mod convert;
mod description;
mod fetch;
mod file;
mod folder;
#[cfg(test)]
mod fuzz;
mod known;
mod list;
mod mersenne;
mod plan;
mod record;
mod requests;
mod store;
mod suite;
mod turns;
#[cfg(test)]
mod turns_fuzz;

pub use asked::{Asked, plans};
pub use fetch::Fetcher;
pub use file::is_file;
pub use folder::{Folder, Rows, Sample};
pub use known::SUITES;
pub use list::list;
pub use plan::{Place, Plan, Wanted};
pub use record::Origin;
pub use requests::{Asking, TokenizedSuite};
pub use store::{Outcome, Store, shown};
pub use suite::{Class, Domain, Suite};
pub use turns::{Form, RowError, Templates};
