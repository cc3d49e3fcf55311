//! A result under the name that a comparison gives it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::results::{Results, SuiteResult};
use crate::statistics::{Counts, Estimate};

/// A result and its name.
pub struct Labelled {
    pub label: String,
    pub path: PathBuf,
    pub results: Results,
    /// What every prompt gave, by suite and sample.
    pub prompts: Prompts,
}

/// By suite.
pub type Prompts = BTreeMap<String, Suite>;
/// By sample.
pub type Suite = BTreeMap<String, Counts>;

impl Labelled {
    /// Which suites it has, as a phrase.
    pub fn suites(&self) -> String {
        let names: Vec<&str> = self.results.suites.iter().map(|suite| suite.name.as_str()).collect();
        let names = if names.is_empty() { "none".into() } else { names.join(", ") };
        format!("{} has {names}", self.path.display())
    }

    /// τ of a suite over resampled prompts.
    pub fn length(&self, suite: &SuiteResult) -> Estimate {
        match self.prompts.get(&suite.name) {
            Some(prompts) => {
                Estimate::accepted_length(&suite.name, prompts.iter().map(|(id, c)| (id.as_str(), *c)))
            }
            None => Estimate::bare(suite.metrics.accepted_length),
        }
    }
}
