//! `calibrate`: temperatures that make a drafter's confidences say what happens (sequential temperature scaling).

mod bootstrap;
mod file;
mod shown;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Context;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_core::{atomic, usage};
use deepspec_schedule::calibrate::{Calibration as Temperatures, GridSearch, Proposal, fit};

use crate::confidence::{self, Observed};
use crate::results::Results;
use crate::statistics::Interval;
use crate::traces;
use bootstrap::{Prompt, PromptError};
pub use file::Calibration;
use file::{Bootstrap, Fit, HeldOut, Sureness};

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
        fitted.prompts.len(),
        held_out.judge(positions, &temperatures).with_context(traces)?,
    );
    if let Some(dir) = args.output.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        atomic::create_dir(dir)?;
    }
    atomic::write_json(&args.output, &calibration)?;
    let text = if args.json {
        serde_json::to_string_pretty(&calibration)? + "\n"
    } else {
        shown::render(&calibration)
    };
    Ok(crate::output::print(&text)?)
}

/// Some of the prompts.
#[derive(Default)]
struct Side {
    prompts: Vec<Prompt>,
}

impl Side {
    /// The prompts to fit to, and those to judge by: half of every suite's each, shuffled by a hash of their ids.
    fn read(args: &Args) -> anyhow::Result<[Self; 2]> {
        let mut suites: BTreeMap<String, BTreeMap<String, Vec<Observed>>> = BTreeMap::new();
        let (mut silent, mut unbounded) = (0, 0);
        traces::read(&args.results, |trace| {
            if trace.logits.is_empty() {
                silent += usize::from(trace.proposed > 0);
                return;
            }
            let Some(usable) = trace.usable else {
                unbounded += 1;
                return;
            };
            let suite = suites.entry(trace.suite.to_string()).or_default();
            let logits = trace.logits[..usable as usize].to_vec();
            let block = Observed { logits, accepted: trace.accepted as usize };
            suite.entry(trace.sample.to_string()).or_default().push(block);
        })?;
        let dir = args.results.display();
        if unbounded > 0 {
            usage!(
                "{dir}: {} does not say in column `usable` where a block's first stop token stands, as earlier versions did \
                 not; run the evaluation again",
                traces::FILE
            );
        }
        let mut sides = [Self::default(), Self::default()];
        for (suite, prompts) in suites {
            let place = |id: &str| Stream::new(0, &format!("{suite}/{id}")).bits(0, Purpose::Split, 0);
            let mut prompts: Vec<_> =
                prompts.into_iter().map(|(sample, blocks)| (place(&sample), sample, blocks)).collect();
            prompts.sort_by_key(|(place, _, _)| *place);
            for (rank, (_, sample, blocks)) in prompts.into_iter().enumerate() {
                sides[rank % 2].prompts.push(Prompt { suite: suite.clone(), sample, blocks });
            }
        }
        if sides[0].prompts.is_empty() && silent > 0 {
            usage!("{dir}: the drafter has no confidence head");
        }
        if let Some(few) = sides.iter().map(|side| side.prompts.len()).find(|&count| count < 2) {
            usage!("{dir}: one half of the prompts has {few} with a drafted block; run more prompts");
        }
        Ok(sides)
    }

    fn blocks(&self) -> impl Iterator<Item = &Observed> + Clone {
        self.prompts.iter().flat_map(|prompt| &prompt.blocks)
    }

    fn positions(&self) -> usize {
        self.blocks().map(|block| block.logits.len()).max().unwrap_or(0)
    }

    fn proposals(&self) -> Vec<Proposal<'_>> {
        self.blocks().map(|block| Proposal { logits: &block.logits, accepted: block.accepted }).collect()
    }

    fn judge(&self, positions: usize, temperatures: &Temperatures) -> anyhow::Result<HeldOut> {
        let raw = confidence::filled(&[], positions)?;
        let report = |temperatures: &Temperatures| {
            let observed = self.blocks().map(|block| (block.logits.as_slice(), block.accepted));
            confidence::reliability(observed, positions, temperatures)
        };
        let of_chance = |temperatures| confidence::noise(self.blocks(), positions, temperatures);
        let error = |temperatures| bootstrap::error(&self.prompts, positions, temperatures);
        let bootstrap = error(&raw)?.zip(error(temperatures)?).map(|(before, after)| Bootstrap {
            change: after.estimate.minus(&before.estimate).centred_interval(),
            before: sureness(&before),
            after: sureness(&after),
        });
        Ok(HeldOut {
            prompts: self.prompts.len(),
            before: report(&raw)?,
            after: report(temperatures)?,
            ece_of_chance: of_chance(temperatures)?,
            ece_of_chance_before: Some(of_chance(&raw)?),
            bootstrap,
        })
    }
}

/// What the file says of an error. None is below 0, which the interval does not know.
fn sureness(error: &PromptError) -> Sureness {
    let interval = error.estimate.centred_interval();
    let interval = interval.map(|Interval { low, high }| Interval { low: low.max(0.0), high: high.max(0.0) });
    Sureness { interval, ece_of_chance: error.of_chance }
}
