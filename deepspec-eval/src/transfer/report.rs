//! Accepted lengths with both models, the kept share, and the advice that follows from it.

use deepspec_datasets::suites::Domain;
use serde::Serialize;

use super::Args;
use super::checks::{Fit, InitFrom};
use crate::compare::LabelledResult;
use crate::statistics::{Estimate, Interval};
use crate::table::{Table, number, range};

/// From this kept share on, a drafter is served as it is. A rule of thumb.
const SERVE_FROM: f64 = 0.9;
/// From this kept share on, LoRA is tried before training anew. A rule of thumb.
const LORA_FROM: f64 = 0.5;

/// There is no advice if the interval of the base's τ reaches this or less: the share of few accepted drafts tells little.
const BASE_ABOVE: f64 = 1.05;

/// Advice on the use of a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Advice {
    /// Serve it as it is.
    Serve,
    /// Fine-tune it with LoRA.
    Lora,
    /// Train all weights, from the drafter's.
    TrainAnew,
    /// Train a new drafter, for `train.init_from` refuses this one.
    TrainNew,
    /// Take another kind of drafter, for this one is not trained here.
    OtherKind,
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

/// The kept shares from which advice changes, and the τ that the base's interval must be above.
#[derive(Debug, Clone, Copy, Serialize)]
struct Thresholds {
    serve_from: f64,
    lora_from: f64,
    base_above: f64,
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
            let target = Estimate::mean(pairs.iter().map(|pair| &pair.target));
            Row::new(name, &target, base.as_ref(), fit.init_from)
        };
        let of = |domain| pairs.iter().filter(|pair| pair.domain == domain).collect::<Vec<_>>();
        let domains = Domain::ALL.into_iter().map(|domain| (domain, of(domain)));
        let suite = |pair: &Pair| Row::new(&pair.name, &pair.target, pair.base.as_ref(), fit.init_from);
        Self {
            draft: args.draft.clone(),
            target: args.target.clone(),
            base: args.base.clone(),
            block_size: new.results.drafter.as_ref().map(|drafter| drafter.block_size),
            thresholds: Thresholds { serve_from: SERVE_FROM, lora_from: LORA_FROM, base_above: BASE_ABOVE },
            domains: domains
                .filter(|(_, pairs)| !pairs.is_empty())
                .map(|(domain, pairs)| mean(domain.name(), &pairs))
                .collect(),
            overall: mean("overall", &pairs.iter().collect::<Vec<_>>()),
            suites: pairs.iter().map(suite).collect(),
            fit,
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

    /// Report on the files and the accepted lengths.
    fn words(&self) -> Vec<String> {
        let mut said = self.words_of_files();
        if self.base.is_none() {
            said.push("This tells nothing of what was lost; name the model that the drafter was trained for: --base.".into());
            return said;
        }
        let Some((advice, kept)) = self.overall.advice.zip(self.overall.kept) else {
            said.push(format!(
                "! No advice: the drafter hardly drafts for --base. The interval of its τ must be above {BASE_ABOVE}."
            ));
            return said;
        };
        said.push(format!("It keeps {} of the accepted drafts: {}.", percent(kept.value), advice.sentence()));
        let suites = |wanted: &dyn Fn(Option<Advice>) -> bool| {
            let rows = self.suites.iter().filter(|row| wanted(row.advice));
            rows.map(|row| row.name.as_str()).collect::<Vec<_>>().join(", ")
        };
        let unlike = suites(&|other| other.is_some_and(|other| other != advice));
        if !unlike.is_empty() {
            said.push(format!("Other advice for {unlike}: see the table."));
        }
        let without = suites(&|other| other.is_none());
        if !without.is_empty() {
            said.push(format!("No advice for {without}: the drafter hardly drafts there for --base."));
        }
        let of_share = |share| Advice::of_share(share, self.fit.init_from);
        match kept.interval {
            None => {
                said.push("! There is no interval: the advice rests on too few prompts. Score more.".into())
            }
            Some(Interval { low, high }) if of_share(low) != of_share(high) => {
                said.push("The interval includes other advice; more prompts make it narrower.".into());
            }
            Some(_) => {}
        }
        let below = match self.fit.init_from {
            InitFrom::Possible => format!(", from {:.0} % LoRA, below train anew", 100.0 * LORA_FROM),
            InitFrom::OwnMatrices | InitFrom::NotTrainedHere => ", below replace".into(),
        };
        said.push(format!(
            "Kept is (τ new − 1) / (τ base − 1). Rules of thumb: from {:.0} % serve{below}.",
            100.0 * SERVE_FROM
        ));
        said
    }

    /// Report on the files alone.
    fn words_of_files(&self) -> Vec<String> {
        let (mut said, fit) = (vec![], &self.fit);
        let from = if self.base.is_some() { "that of --base" } else { "the drafter's copy" };
        for (what, moved) in [("embedding", fit.embedding), ("LM head", fit.lm_head)] {
            if let Some(moved) = moved {
                said.push(format!("The target's {what}: {}.", moved.words(from)));
            }
        }
        if self.base.is_none() && fit.may_own_matrices {
            let what = if fit.embedding.is_some() { "LM head" } else { "embedding and LM head" };
            said.push(format!(
                "Its {what} may be the drafter's own, and movement is measured with --base only."
            ));
        }
        if fit.copies_differ_from_base == Some(true) {
            said.push(
                "! The drafter's copies of embedding and LM head are not those of --base; --base may not be the model that the drafter \
                 was trained for."
                    .into(),
            );
        }
        if fit.copies_differ_from_target == Some(true) {
            said.push(
                "! Engines use the embedding and LM head of the target that they serve; this evaluation uses the drafter's copies. They \
                 differ, so `checkpoint convert` for an engine refuses the drafter with this target."
                    .into(),
            );
        }
        if let Some(first) = fit.other_special_tokens.first() {
            let more = match fit.other_special_tokens.len() - 1 {
                0 => String::new(),
                more => format!(", and {more} more"),
            };
            said.push(format!(
                "! Special or reserved tokens of --target are others than those of --base: {first}{more}."
            ));
        }
        if fit.same_template == Some(false) {
            said.push("! The chat templates of --base and --target differ, and so do the prompts.".into());
        }
        said
    }
}

impl Row {
    fn new(name: &str, target: &Estimate, base: Option<&Estimate>, init_from: InitFrom) -> Self {
        let kept = base.map(|base| target.gain_over(base));
        // Without an interval the value decides.
        let lowest = base.and_then(|base| base.interval().map_or(base.value, |interval| Some(interval.low)));
        let advice = kept
            .as_ref()
            .and_then(|kept| kept.value)
            .filter(|_| lowest.is_some_and(|tau| tau > BASE_ABOVE))
            .map(|share| Advice::of_share(share, init_from));
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
    fn of_share(kept: f64, init_from: InitFrom) -> Self {
        // Rounded as it is printed, so that a printed border is never beside the advice for less.
        match ((kept * 1000.0).round() / 1000.0, init_from) {
            (kept, _) if kept >= SERVE_FROM => Self::Serve,
            (_, InitFrom::OwnMatrices) => Self::TrainNew,
            (_, InitFrom::NotTrainedHere) => Self::OtherKind,
            (kept, InitFrom::Possible) if kept >= LORA_FROM => Self::Lora,
            (_, InitFrom::Possible) => Self::TrainAnew,
        }
    }

    /// The advice in a cell.
    fn word(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::Lora => "LoRA",
            Self::TrainAnew => "anew",
            Self::TrainNew => "replace",
            Self::OtherKind => "other",
        }
    }

    /// The advice in a sentence.
    fn sentence(self) -> &'static str {
        match self {
            Self::Serve => "serve it as it is",
            Self::Lora => "fine-tune it with LoRA on the new target's answers (train.lora)",
            Self::TrainAnew => "train anew for the new target, from this drafter's weights (train.init_from)",
            Self::TrainNew => {
                "train a new drafter without train.init_from, which refuses this one. Its LM head or embedding is its own and is not \
                 trained further"
            }
            Self::OtherKind => {
                "this kind is not trained here, so train a drafter of another kind for the new target"
            }
        }
    }
}

/// A share in percent with one decimal.
fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| number(None, 0), |share| format!("{:.1} %", 100.0 * share))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row and text of one suite with these τ, each with its resamples.
    fn said(target: (f64, &[f64]), base: (f64, &[f64]), init_from: InitFrom) -> (Row, String) {
        let [target, base] =
            [target, base].map(|(value, resampled)| Estimate::new(value, resampled.to_vec()));
        let row = Row::new("suite", &target, Some(&base), init_from);
        let found = Transfer {
            draft: "d".into(),
            target: "t".into(),
            base: Some("b".into()),
            block_size: None,
            fit: Fit {
                embedding: None,
                lm_head: None,
                copies_differ_from_base: None,
                copies_differ_from_target: None,
                may_own_matrices: false,
                init_from,
                other_special_tokens: vec![],
                same_template: None,
            },
            thresholds: Thresholds { serve_from: SERVE_FROM, lora_from: LORA_FROM, base_above: BASE_ABOVE },
            suites: vec![row.clone()],
            domains: vec![],
            overall: row.clone(),
        };
        (row, found.words().join("\n"))
    }

    #[test]
    fn an_interval_with_other_advice_is_told() {
        let base = (3.0, &[3.0, 3.0][..]);
        let (row, words) = said((2.7, &[2.5, 2.9]), base, InitFrom::Possible);
        assert_eq!(row.advice, Some(Advice::Lora));
        assert!(
            words.contains("keeps 85.0 %") && words.contains("The interval includes other advice"),
            "{words}"
        );
        let (_, words) = said((2.7, &[2.6, 2.7]), base, InitFrom::Possible);
        assert!(words.contains("train.lora") && !words.contains("interval"), "{words}");
        let (row, words) = said((2.7, &[]), (3.0, &[]), InitFrom::Possible);
        assert_eq!(row.advice, Some(Advice::Lora));
        assert!(words.contains("too few prompts"), "{words}");
    }

    #[test]
    fn printed_shares_and_advice_agree() {
        let kept = |share: f64| said((1.0 + 2.0 * share, &[]), (3.0, &[]), InitFrom::Possible);
        for (share, printed, advice) in [
            (0.8996, "90.0 %", Advice::Serve),
            (0.896, "89.6 %", Advice::Lora),
            (0.4996, "50.0 %", Advice::Lora),
            (0.499, "49.9 %", Advice::TrainAnew),
        ] {
            let (row, words) = kept(share);
            assert_eq!(row.advice, Some(advice), "{share}");
            assert!(words.contains(&format!("keeps {printed}")), "{words}");
        }
    }

    #[test]
    fn a_base_with_hardly_a_draft_gives_no_advice() {
        let (row, words) = said((1.2, &[1.1, 1.3]), (1.2, &[1.04, 1.3]), InitFrom::Possible);
        assert!(row.advice.is_none() && row.kept.unwrap().interval.is_some());
        assert!(words.contains("hardly drafts for --base") && words.contains("1.05"), "{words}");
        // A resample without accepted drafts makes the interval unknown.
        let (row, _) =
            said((2.0, &[2.0; 200]), (2.0, &[[2.0; 199].as_slice(), &[1.0]].concat()), InitFrom::Possible);
        assert!(row.advice.is_some() && row.kept.unwrap().interval.is_none());
        let (row, words) = said((1.5, &[]), (1.0, &[]), InitFrom::Possible);
        assert!(row.advice.is_none() && row.kept.unwrap().value.is_none(), "{words}");
    }

    #[test]
    fn advice_can_be_followed() {
        for (tau, init_from, advice, told) in [
            (2.95, InitFrom::OwnMatrices, Advice::Serve, "serve it as it is"),
            (2.5, InitFrom::OwnMatrices, Advice::TrainNew, "without train.init_from, which refuses this one"),
            (1.5, InitFrom::NotTrainedHere, Advice::OtherKind, "this kind is not trained here"),
            (1.5, InitFrom::Possible, Advice::TrainAnew, "(train.init_from)"),
        ] {
            let (row, words) = said((tau, &[tau; 2]), (3.0, &[3.0; 2]), init_from);
            assert_eq!(row.advice, Some(advice));
            assert!(words.contains(told), "{words}");
            assert_eq!(words.contains("LoRA"), init_from == InitFrom::Possible, "{words}");
        }
    }
}
