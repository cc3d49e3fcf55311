//! Accepted lengths with both models, the kept share, and the advice that follows from it.

use deepspec_datasets::suites::Domain;
use serde::Serialize;

use super::Args;
use super::checks::Fit;
use crate::compare::LabelledResult;
use crate::statistics::{Estimate, Interval};
use crate::table::{Table, number, range};

/// From this kept share on, a drafter is served as it is. A rule of thumb.
const SERVE_FROM: f64 = 0.9;
/// From this kept share on, LoRA is tried before training anew. A rule of thumb.
const LORA_FROM: f64 = 0.5;

/// What to do with a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Advice {
    Serve,
    Lora,
    TrainAnew,
}

/// A value with its 95 % bootstrap interval over prompts.
#[derive(Debug, Clone, Copy, Serialize)]
struct Figure {
    value: Option<f64>,
    interval: Option<Interval>,
}

/// Figures of a suite, of a domain, or of all suites.
#[derive(Debug, Clone, Serialize)]
struct Row {
    name: String,
    /// τ with the base.
    base: Option<Figure>,
    /// τ with the new target.
    target: Figure,
    /// Accepted drafts per cycle with the new target, as a share of those with the base.
    kept: Option<Figure>,
    advice: Option<Advice>,
}

/// The kept shares from which advice changes.
#[derive(Debug, Clone, Copy, Serialize)]
struct Thresholds {
    serve_from: f64,
    lora_from: f64,
}

/// Findings of the command.
#[derive(Debug, Clone, Serialize)]
pub struct Transfer {
    draft: String,
    target: String,
    base: Option<String>,
    /// Most drafted tokens per cycle.
    block_size: Option<usize>,
    fit: Fit,
    thresholds: Thresholds,
    suites: Vec<Row>,
    domains: Vec<Row>,
    overall: Row,
}

/// Accepted lengths of one suite with both models.
struct Pair {
    name: String,
    domain: Domain,
    target: Estimate,
    base: Option<Estimate>,
}

impl Transfer {
    /// Findings from the evaluations with the new target and with the base.
    pub fn new(args: &Args, fit: Fit, new: &LabelledResult, old: Option<&LabelledResult>) -> Self {
        let pairs: Vec<Pair> = new
            .results
            .suites
            .iter()
            .map(|suite| {
                let same = old.and_then(|old| {
                    let suites = &mut old.results.suites.iter();
                    Some((old, suites.find(|other| other.name == suite.name)?))
                });
                Pair {
                    name: suite.name.clone(),
                    domain: suite.domain,
                    target: new.accepted_length(suite),
                    base: same.map(|(old, suite)| old.accepted_length(suite)),
                }
            })
            .collect();
        let mean = |name: &str, pairs: &[&Pair]| {
            let base: Option<Vec<&Estimate>> = pairs.iter().map(|pair| pair.base.as_ref()).collect();
            let base = base.map(Estimate::mean);
            Row::new(name, &Estimate::mean(pairs.iter().map(|pair| &pair.target)), base.as_ref())
        };
        let of = |domain| pairs.iter().filter(|pair| pair.domain == domain).collect::<Vec<_>>();
        let domains = Domain::ALL.into_iter().map(|domain| (domain, of(domain)));
        Self {
            draft: args.draft.clone(),
            target: args.target.clone(),
            base: args.base.clone(),
            block_size: new.results.drafter.as_ref().map(|drafter| drafter.block_size),
            fit,
            thresholds: Thresholds { serve_from: SERVE_FROM, lora_from: LORA_FROM },
            domains: domains
                .filter(|(_, pairs)| !pairs.is_empty())
                .map(|(domain, pairs)| mean(domain.name(), &pairs))
                .collect(),
            overall: mean("overall", &pairs.iter().collect::<Vec<_>>()),
            suites: pairs.iter().map(|pair| Row::new(&pair.name, &pair.target, pair.base.as_ref())).collect(),
        }
    }

    /// The findings as a table with words below it.
    pub fn render(&self) -> String {
        let mut header = vec!["suite"];
        if self.base.is_some() {
            header.extend(["τ base", "95 %"]);
        }
        header.extend(["τ new", "95 %"]);
        if self.base.is_some() {
            header.extend(["kept", "95 %", "advice"]);
        }
        let mut table = Table::new(header.into_iter().map(String::from).collect());
        self.suites.iter().for_each(|row| table.row(row.cells()));
        table.add_rule();
        self.domains.iter().chain([&self.overall]).for_each(|row| table.row(row.cells()));
        let mut text = table.render();
        for line in self.words() {
            text += &format!("\n{}", deepspec_core::cli::wrap_paragraph("", 0, &line));
        }
        text + "\n"
    }

    /// What the numbers say.
    fn words(&self) -> Vec<String> {
        let mut said = vec![];
        for (what, moved) in [("embedding", self.fit.embedding), ("LM head", self.fit.lm_head)] {
            if let Some(moved) = moved {
                said.push(format!("The target's {what}: {}.", moved.words()));
            }
        }
        if self.fit.same_template == Some(false) {
            said.push("! The chat templates of --base and --target differ, and so do the prompts.".into());
        }
        let Some((advice, kept)) = self.overall.advice.zip(self.overall.kept) else {
            said.push(match &self.base {
                Some(_) => "! No kept share: with --base no draft was accepted, or nothing was drafted.".into(),
                None => "This tells nothing of what was lost; name the model that the drafter was trained for: --base.".into(),
            });
            return said;
        };
        let share = percent(kept.value);
        said.push(match advice {
            Advice::Serve => format!("It keeps {share} of the accepted drafts: serve it as it is."),
            Advice::Lora => format!(
                "It keeps {share} of the accepted drafts: fine-tune it with LoRA on the new target's answers (train.lora)."
            ),
            Advice::TrainAnew => format!(
                "It keeps {share} of the accepted drafts: train anew for the new target, from this drafter's weights (train.init_from)."
            ),
        });
        let unlike: Vec<&str> = self
            .suites
            .iter()
            .filter(|row| row.advice != Some(advice))
            .map(|row| row.name.as_str())
            .collect();
        if !unlike.is_empty() {
            said.push(format!("Other advice for {}: see the table.", unlike.join(", ")));
        }
        let is_unsure = kept
            .interval
            .is_some_and(|Interval { low, high }| Advice::of_share(low) != Advice::of_share(high));
        if is_unsure {
            said.push("The interval includes other advice; more prompts make it narrower.".into());
        }
        said.push(format!(
            "Kept is (τ new − 1) / (τ base − 1). Rules of thumb: from {} serve, from {} LoRA, below train anew.",
            percent(Some(SERVE_FROM)),
            percent(Some(LORA_FROM))
        ));
        said
    }
}

impl Row {
    fn new(name: &str, target: &Estimate, base: Option<&Estimate>) -> Self {
        let kept = base.map(|base| target.gain_over(base));
        let advice = kept.as_ref().and_then(|kept| kept.value).map(Advice::of_share);
        Self {
            name: name.into(),
            base: base.map(Figure::new),
            target: Figure::new(target),
            kept: kept.as_ref().map(Figure::new),
            advice,
        }
    }

    fn cells(&self) -> Vec<String> {
        let length = |figure: &Figure| [number(figure.value, 2), range(figure.interval)];
        let mut cells = vec![self.name.clone()];
        cells.extend(self.base.iter().flat_map(length));
        cells.extend(length(&self.target));
        if let Some(kept) = &self.kept {
            let interval = kept
                .interval
                .map_or_else(|| range(None), |i| format!("{:.0} … {:.0}", 100.0 * i.low, 100.0 * i.high));
            let advice = self.advice.map_or("–", Advice::word);
            cells.extend([percent(kept.value), interval, advice.into()]);
        }
        cells
    }
}

impl Figure {
    fn new(estimate: &Estimate) -> Self {
        Self { value: estimate.value, interval: estimate.interval() }
    }
}

impl Advice {
    fn of_share(kept: f64) -> Self {
        match kept {
            kept if kept >= SERVE_FROM => Self::Serve,
            kept if kept >= LORA_FROM => Self::Lora,
            _ => Self::TrainAnew,
        }
    }

    /// The advice in a cell.
    fn word(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::Lora => "LoRA",
            Self::TrainAnew => "anew",
        }
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| number(None, 0), |share| format!("{:.0} %", 100.0 * share))
}
