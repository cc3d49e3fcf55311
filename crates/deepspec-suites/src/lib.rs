//! Prompt suites: which are asked for, their rows, and what the engine is asked.
//!
//! Evaluation scores them with a drafter that is done, training with one that is not.

mod file;
mod folder;
mod mersenne;
#[cfg(test)]
mod mutated;
mod requests;

pub use file::is_file;
pub use folder::{Folder, Rows, Sample};
pub use requests::{Asking, Prepared};
