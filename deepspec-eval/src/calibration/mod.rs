//! `calibrate`: temperatures that make a drafter's confidences say what happens (sequential temperature scaling).

mod file;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_core::{atomic, usage};
use deepspec_schedule::calibrate::{Calibration as Temperatures, GridSearch, Proposal, fit};
use deepspec_schedule::reliability::PositionReliability;

use crate::confidence::{self, Observed};
use crate::results::Results;
use crate::table::{Table, number};
use crate::traces;
pub use file::Calibration;
use file::{Fit, HeldOut};

/// Which run, and where the temperatures go.
#[derive(clap::Args)]
pub struct Args {
    /// Output folder of a `deepspec-eval run` of the drafter, without --confidence-threshold
    #[arg(value_name = "DIR")]
    results: PathBuf,
    /// Where to write the temperatures, for `deepspec-eval run --calibration`
    #[arg(long, value_name = "FILE", default_value = "calibration.json")]
    output: PathBuf,
    /// Replace a file that exists
    #[arg(long)]
    overwrite: bool,
    /// Print what was written instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// Usage errors: results without confidences, or too few prompts. An unwritable output.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if args.output.exists() && !args.overwrite {
        usage!("{} exists; --overwrite replaces it", args.output.display());
    }
    let results = Results::read(&args.results)?;
    if results.settings.confidence_threshold.is_some_and(|threshold| threshold > 0.0) {
        usage!(
            "{} is of a run with --confidence-threshold, which never saw what it cut; run it without",
            args.results.display()
        );
    }
    let Some(drafter) = results.drafter else {
        usage!("{} is of plain decoding; there is no confidence to calibrate", args.results.display());
    };
    let [fitted, held_out] = Side::read(args)?;
    let positions = fitted.positions().max(held_out.positions());
    let traces = || format!("the traces of {}", args.results.display());
    let found = fit(&fitted.proposals(), positions, &GridSearch::default()).with_context(traces)?;
    let temperatures = Temperatures::from_fits(&found);
    let fits = found.iter().map(|fit| {
        fit.map(|fit| Fit { count: fit.count, ece_before: fit.ece_before, ece_after: fit.ece_after })
    });
    let calibration = Calibration::new(
        (drafter, results.target),
        results.settings.temperature,
        temperatures.temperatures().to_vec(),
        fits.collect(),
        fitted.prompts,
        held_out.judge(positions, &temperatures).with_context(traces)?,
    );
    if let Some(dir) = args.output.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        atomic::create_dir(dir)?;
    }
    atomic::write_json(&args.output, &calibration)?;
    let text =
        if args.json { serde_json::to_string_pretty(&calibration)? + "\n" } else { render(&calibration) };
    Ok(crate::print(&text)?)
}

/// The blocks of some of the prompts.
#[derive(Default)]
struct Side {
    prompts: usize,
    blocks: Vec<Observed>,
}

impl Side {
    /// The prompts to fit to, and those to judge by: half of every suite's each, shuffled by a hash of their ids.
    fn read(args: &Args) -> anyhow::Result<[Self; 2]> {
        let mut suites: BTreeMap<String, BTreeMap<String, Vec<Observed>>> = BTreeMap::new();
        let mut silent = 0;
        traces::read(&args.results, |trace| {
            if trace.logits.is_empty() {
                silent += usize::from(trace.proposed > 0);
                return;
            }
            let suite = suites.entry(trace.suite.to_string()).or_default();
            let block = Observed { logits: trace.logits.to_vec(), accepted: trace.accepted as usize };
            suite.entry(trace.sample.to_string()).or_default().push(block);
        })?;
        let mut sides = [Self::default(), Self::default()];
        for (suite, prompts) in suites {
            let place = |id: &str| Stream::new(0, &format!("{suite}/{id}")).bits(0, Purpose::Split, 0);
            let mut prompts: Vec<_> = prompts.into_iter().map(|(id, blocks)| (place(&id), blocks)).collect();
            prompts.sort_by_key(|(place, _)| *place);
            for (rank, (_, blocks)) in prompts.into_iter().enumerate() {
                let side = &mut sides[rank % 2];
                side.prompts += 1;
                side.blocks.extend(blocks);
            }
        }
        let dir = args.results.display();
        if sides[0].prompts == 0 && silent > 0 {
            usage!("{dir}: the drafter has no confidence head");
        }
        if let Some(Self { prompts, .. }) = sides.iter().find(|side| side.prompts < 2) {
            usage!("{dir}: one half of the prompts has {prompts} with a drafted block; run more prompts");
        }
        Ok(sides)
    }

    fn positions(&self) -> usize {
        self.blocks.iter().map(|block| block.logits.len()).max().unwrap_or(0)
    }

    fn proposals(&self) -> Vec<Proposal<'_>> {
        self.blocks.iter().map(|block| Proposal { logits: &block.logits, accepted: block.accepted }).collect()
    }

    fn judge(&self, positions: usize, temperatures: &Temperatures) -> anyhow::Result<HeldOut> {
        let report = |temperatures: &Temperatures| {
            let observed = self.blocks.iter().map(|block| (block.logits.as_slice(), block.accepted));
            confidence::reliability(observed, positions, temperatures)
        };
        Ok(HeldOut {
            prompts: self.prompts,
            before: report(&confidence::filled(&[], positions)?)?,
            after: report(temperatures)?,
            ece_of_chance: confidence::noise(&self.blocks, positions, temperatures)?,
        })
    }
}

fn render(calibration: &Calibration) -> String {
    let HeldOut { before, after, .. } = &calibration.held_out;
    let header = ["position", "temperature", "blocks", "before", "after", "before", "after", "AUROC"];
    let mut table = Table::new(header.map(String::from).to_vec());
    for (columns, title) in [(3, ""), (2, "ECE"), (2, "Brier"), (1, "")] {
        table.title(columns, title);
    }
    let metrics = |position: &PositionReliability| position.metrics;
    for (k, (a, b)) in before.positions.iter().zip(&after.positions).enumerate() {
        let (before, after) = (metrics(a), metrics(b));
        table.row(vec![
            format!("@{}", k + 1),
            number(calibration.temperatures.get(k).copied(), 2),
            b.count.to_string(),
            number(before.map(|m| m.ece), 3),
            number(after.map(|m| m.ece), 3),
            number(before.map(|m| m.brier), 3),
            number(after.map(|m| m.brier), 3),
            number(after.and_then(|m| m.auroc), 3),
        ]);
    }
    table.rule();
    table.row(vec![
        "mean".into(),
        String::new(),
        after.positions.iter().map(|position| position.count).sum::<u64>().to_string(),
        number(before.summary.map(|m| m.ece), 3),
        number(after.summary.map(|m| m.ece), 3),
        number(before.summary.map(|m| m.brier), 3),
        number(after.summary.map(|m| m.brier), 3),
        number(after.summary.and_then(|m| m.auroc), 3),
    ]);
    format!(
        "{}\nFitted to {} prompts, judged by {}\n",
        table.render(),
        calibration.fit_prompts,
        verdict(&calibration.held_out)
    )
}

/// What the prompts say that the temperatures were not fitted to.
fn verdict(HeldOut { prompts, before, after, ece_of_chance }: &HeldOut) -> String {
    let harm = match before.summary.zip(after.summary) {
        Some((before, after)) if after.ece > before.ece => {
            " They do better without these temperatures: leave them out, or fit to more prompts."
        }
        _ => "",
    };
    format!("{prompts} others. Chance alone would leave an ECE of up to {ece_of_chance:.3}.{harm}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperatures_that_do_harm_are_told() {
        // Nine of ten accepted where the head says σ(2.2) = 0.9.
        let block = |i| Observed { logits: vec![2.2], accepted: usize::from(i % 10 > 0) };
        let side = Side { prompts: 50, blocks: (0..100).map(block).collect() };
        let told = |temperature: f64| {
            let temperatures = Temperatures::new(vec![temperature]).unwrap();
            verdict(&side.judge(1, &temperatures).unwrap())
        };
        assert!(told(0.5).contains("better without these temperatures"), "{}", told(0.5));
        assert!(told(1.0).starts_with("50 others. Chance alone") && !told(1.0).contains("without"));
    }
}
