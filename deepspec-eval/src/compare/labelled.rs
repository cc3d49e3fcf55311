//! A result with the label that the comparison gives it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::read_prompt_counts;
use crate::results::{Results, SuiteResult};
use crate::statistics::{Estimate, PromptCounts};

/// A result with its label.
pub struct LabelledResult {
    pub label: String,
    pub path: PathBuf,
    pub results: Results,
    /// Counts of every prompt, by suite and sample.
    pub prompts: CountsBySuite,
}

/// Counts of every prompt, by suite and then by sample id.
pub type CountsBySuite = BTreeMap<String, CountsBySample>;
/// Counts of every prompt of a suite, by sample id.
pub type CountsBySample = BTreeMap<String, PromptCounts>;

impl LabelledResult {
    /// A result of the folder `path`, whose traces have the counts of its prompts.
    pub fn new(label: String, path: PathBuf, results: Results) -> Self {
        Self { prompts: read_prompt_counts(&path, &results), label, path, results }
    }

    /// The suites of the result, as a phrase.
    pub fn describe_suites(&self) -> String {
        let names: Vec<&str> = self.results.suites.iter().map(|suite| suite.name.as_str()).collect();
        let names = if names.is_empty() { "none".into() } else { names.join(", ") };
        format!("{} has {names}", self.path.display())
    }

    /// τ of a suite, over resampled prompts.
    pub fn accepted_length(&self, suite: &SuiteResult) -> Estimate {
        match self.prompts.get(&suite.name) {
            Some(prompts) => {
                Estimate::accepted_length(&suite.name, prompts.iter().map(|(id, c)| (id.as_str(), *c)))
            }
            None => Estimate::without_resamples(suite.metrics.accepted_length),
        }
    }
}
