//! Differences of accepted lengths between two results, paired by prompt.

use deepspec_datasets::suites::Domain;
use serde::Serialize;

use super::differences;
use super::labelled::{CountsBySample, LabelledResult};
use crate::results::SuiteResult;
use crate::statistics::{Estimate, Interval};
use crate::table::{Table, number};

/// Differences between two results.
#[derive(Serialize)]
pub struct Deltas {
    label: String,
    against: String,
    suites: Vec<Delta>,
    domains: Vec<Delta>,
    overall: Delta,
}

/// The difference of two accepted lengths.
#[derive(Serialize)]
struct Delta {
    name: String,
    /// τ of the first result minus τ of the second.
    delta: Option<f64>,
    /// 95 % bootstrap interval over the prompts that both results answered.
    interval: Option<Interval>,
    /// Two-sided p-value of the hypothesis that there is no difference.
    p_value: Option<f64>,
    /// Number of prompts with at least one cycle in both results.
    prompts: usize,
}

/// The difference between two results in one suite, with its resamples.
struct SuiteDelta {
    name: String,
    domain: Domain,
    estimate: Estimate,
    prompts: usize,
}

impl Deltas {
    /// Computes `one` minus `other` over the suites that all results have.
    pub fn new(one: &LabelledResult, other: &LabelledResult, common: &[String]) -> Self {
        let suites: Vec<SuiteDelta> =
            common.iter().filter_map(|name| paired_difference(one, other, name)).collect();
        let of = |domain| suites.iter().filter(move |suite: &&SuiteDelta| suite.domain == domain);
        let mean = |name: &str, suites: &[&SuiteDelta]| {
            let estimate = Estimate::mean(suites.iter().map(|suite| &suite.estimate));
            Delta::new(name, &estimate, suites.iter().map(|suite| suite.prompts).sum())
        };
        let domains = Domain::ALL.into_iter().filter(|&domain| of(domain).next().is_some());
        Self {
            label: one.label.clone(),
            against: other.label.clone(),
            domains: domains.map(|domain| mean(domain.name(), &of(domain).collect::<Vec<_>>())).collect(),
            overall: mean("overall", &suites.iter().collect::<Vec<_>>()),
            suites: suites
                .iter()
                .map(|suite| Delta::new(&suite.name, &suite.estimate, suite.prompts))
                .collect(),
        }
    }

    /// Renders the differences as a table.
    pub fn render(&self) -> String {
        let header = ["suite", "Δτ", "95 % interval", "p", "prompts"];
        let mut table = Table::new(header.map(String::from).to_vec());
        table.add_title(1, "");
        table.add_title(4, &format!("{} less {}", self.label, self.against));
        self.suites.iter().for_each(|delta| table.row(delta.cells()));
        table.add_rule();
        self.domains.iter().chain([&self.overall]).for_each(|delta| table.row(delta.cells()));
        table.render()
    }
}

/// The paired difference in a suite, over the prompts of both results; without common prompts, the
/// plain difference.
fn paired_difference(one: &LabelledResult, other: &LabelledResult, name: &String) -> Option<SuiteDelta> {
    let of = |labelled: &'_ LabelledResult| {
        labelled.results.suites.iter().find(|suite| suite.name == *name).cloned()
    };
    let (a, b): (SuiteResult, SuiteResult) = (of(one)?, of(other)?);
    let pairs = differences::can_pair_prompts(&one.results, &other.results, name);
    let prompts = one.prompts.get(name).zip(other.prompts.get(name)).filter(|_| pairs);
    let (estimate, count) = match prompts {
        Some((mine, theirs)) => {
            let length = |prompts: &CountsBySample, also: &CountsBySample| {
                let both = prompts.iter().filter(|(id, _)| also.contains_key(*id));
                Estimate::accepted_length(name, both.map(|(id, counts)| (id.as_str(), *counts)))
            };
            let count = mine.keys().filter(|id| theirs.contains_key(*id)).count();
            (length(mine, theirs).minus(&length(theirs, mine)), count)
        }
        None => {
            let length = |suite: &SuiteResult| Estimate::without_resamples(suite.metrics.accepted_length);
            (length(&a).minus(&length(&b)), 0)
        }
    };
    Some(SuiteDelta { name: name.clone(), domain: a.domain, estimate, prompts: count })
}

impl Delta {
    fn new(name: &str, estimate: &Estimate, prompts: usize) -> Self {
        Self {
            name: name.to_string(),
            delta: estimate.value,
            interval: estimate.interval(),
            p_value: estimate.p_value(),
            prompts,
        }
    }

    fn cells(&self) -> Vec<String> {
        let signed = |value: f64| format!("{value:+.2}");
        let range = |i: Interval| format!("{} … {}", signed(i.low), signed(i.high));
        vec![
            self.name.clone(),
            self.delta.map_or_else(|| number(None, 2), signed),
            self.interval.map_or_else(|| number(None, 2), range),
            number(self.p_value, 3),
            self.prompts.to_string(),
        ]
    }
}
