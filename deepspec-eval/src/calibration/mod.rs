//! `calibrate`: fits temperatures that calibrate a drafter's confidences (sequential temperature
//! scaling).

mod bootstrap;
mod file;
mod fold;
mod render;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_core::{atomic, usage};
use deepspec_cost::calibrate::{
    Calibration as Temperatures, GridSearch, VerifiedProposal, fit_joint_temperatures,
    fit_shared_temperature, fit_temperatures, log_spaced,
};
use deepspec_datasets::suites::Domain;

use crate::confidence::{self, ObservedBlock};
use crate::results::Results;
use crate::statistics::Interval;
use crate::traces;
use bootstrap::{EceEstimate, PromptBlocks};
pub use file::Calibration;
use file::{AlternativeFit, EceBootstrap, EceUncertainty, HeldOutReport, TemperatureFit};

/// Arguments of `calibrate`.
#[derive(clap::Args)]
pub struct Args {
    /// Output folder of a `deepspec-eval run` of the drafter with whole blocks
    #[arg(value_name = "DIR")]
    results: PathBuf,
    /// Where to write the temperatures, for `deepspec-eval run --calibration`
    #[arg(long, value_name = "FILE", default_value = "calibration.json")]
    output: PathBuf,
    /// Also write a copy of the drafter to this folder, its confidence head divided by one temperature for all positions. It
    /// is for engines that read raw confidences (llama.cpp's --spec-draft-p-min, vLLM)
    #[arg(long, value_name = "DIR")]
    write_folded: Option<PathBuf>,
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
/// Usage errors: results without confidences, or too few prompts. Also fails if an output cannot be
/// written.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let results = Results::read(&args.results)?;
    results.settings.check_observed_tokens(&args.results)?;
    let Some(drafter) = results.drafter else {
        usage!("{} is of plain decoding; there is no confidence to calibrate", args.results.display());
    };
    let [fitted, held_out] = PromptHalf::read(args)?;
    let positions = fitted.positions().max(held_out.positions());
    let traces = || format!("the traces of {}", args.results.display());
    let found =
        fit_temperatures(&fitted.proposals(), positions, &GridSearch::default()).with_context(traces)?;
    let temperatures = Temperatures::from_fits(&found);
    let fits = found.iter().map(|fit| {
        fit.map(|fit| TemperatureFit {
            count: fit.count,
            ece_before: fit.ece_before,
            ece_after: fit.ece_after,
        })
    });
    let domains: BTreeMap<String, Domain> =
        results.suites.iter().map(|suite| (suite.name.clone(), suite.domain)).collect();
    let alternatives =
        fit_alternatives(&fitted, &held_out, positions, &temperatures, &domains).with_context(traces)?;
    let calibration = Calibration::new(
        (drafter.clone(), results.target),
        results.settings.temperature,
        temperatures.temperatures().to_vec(),
        fits.collect(),
        fitted.prompts.len(),
        held_out.evaluate_held_out(positions, &temperatures).with_context(traces)?,
        alternatives.clone(),
    );
    if !args.overwrite
        && args.write_folded.as_ref().is_none_or(|dir| dir.exists())
        && crate::output::is_already_written(&args.output, &calibration)?
    {
        return Ok(());
    }
    if let Some(dir) = &args.write_folded {
        fold::check_can_fold(&drafter, dir)?;
        let pooled = alternatives.iter().find(|other| other.method == POOLED_METHOD);
        let temperature =
            pooled.and_then(|pooled| pooled.temperatures[ALL_DOMAINS].first().copied()).unwrap_or(1.0);
        fold::write_folded_drafter(Path::new(&drafter.path), dir, temperature)?;
        tracing::info!(
            "{}: the drafter with its confidence logits divided by {temperature:.3}",
            dir.display()
        );
    }
    if let Some(dir) = args.output.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        atomic::create_dir(dir)?;
    }
    atomic::write_json(&args.output, &calibration)?;
    tracing::info!("temperatures in {}", args.output.display());
    let text = if args.json {
        serde_json::to_string_pretty(&calibration)? + "\n"
    } else {
        render::render(&calibration)
    };
    Ok(crate::output::print(&text)?)
}

/// Name of the method that fits one temperature for all positions.
const POOLED_METHOD: &str = "pooled";
/// Key of temperatures that apply to all domains.
const ALL_DOMAINS: &str = "all";
/// Grid size per position of joint fits, and number of sweeps over all positions.
const JOINT_GRID_POINTS: usize = 81;
const JOINT_SWEEPS: usize = 4;

/// Fits by the alternative methods, to compare them with the sequential fit.
fn fit_alternatives(
    fitted: &PromptHalf,
    held_out: &PromptHalf,
    positions: usize,
    sequential: &Temperatures,
    domains: &BTreeMap<String, Domain>,
) -> anyhow::Result<Vec<AlternativeFit>> {
    let of_sequential = bootstrap::estimate_ece(&held_out.prompts, positions, sequential)?;
    let domain =
        |prompt: &PromptBlocks| domains.get(&prompt.suite).map_or("", |domain| domain.name()).to_string();
    let judged = |method: &str,
                  by_domain: BTreeMap<String, Temperatures>|
     -> anyhow::Result<AlternativeFit> {
        // A domain without prompts to fit to uses the temperatures of all domains.
        let of = |prompt: &PromptBlocks| {
            by_domain.get(&domain(prompt)).or(by_domain.get(ALL_DOMAINS)).unwrap_or(sequential)
        };
        let error = bootstrap::estimate_ece_by_prompt(&held_out.prompts, positions, of)?;
        let change = error.as_ref().zip(of_sequential.as_ref());
        Ok(AlternativeFit {
            method: method.into(),
            ece: error.as_ref().and_then(|error| error.estimate.value),
            change: change.and_then(|(other, own)| other.estimate.minus(&own.estimate).centred_interval()),
            temperatures: by_domain
                .into_iter()
                .map(|(name, found)| (name, found.temperatures().to_vec()))
                .collect(),
        })
    };
    let for_all = |found: Temperatures| BTreeMap::from([(ALL_DOMAINS.to_string(), found)]);
    let proposals = fitted.proposals();
    let pooled = fit_shared_temperature(&proposals, positions, &GridSearch::default())?;
    let coarse = GridSearch { grid: log_spaced(0.1, 10.0, JOINT_GRID_POINTS), ..GridSearch::default() };
    let joint = fit_joint_temperatures(&proposals, positions, &coarse, JOINT_SWEEPS)?;
    let mut by_domain = for_all(sequential.clone());
    let names: BTreeSet<String> = fitted.prompts.iter().map(domain).collect();
    for name in names {
        let prompts = fitted.prompts.iter().filter(|prompt| domain(prompt) == name);
        let blocks = prompts.flat_map(|prompt| &prompt.blocks);
        let own: Vec<_> = blocks
            .map(|block| VerifiedProposal { logits: &block.logits, accepted: block.accepted })
            .collect();
        let found = Temperatures::from_fits(&fit_temperatures(&own, positions, &GridSearch::default())?);
        by_domain.insert(name, found);
    }
    Ok(vec![
        judged(POOLED_METHOD, for_all(Temperatures::new(vec![pooled; positions])?))?,
        judged("joint", for_all(joint))?,
        judged("by domain", by_domain)?,
    ])
}

/// One half of the prompts: the half to fit to, or the held-out half.
#[derive(Default)]
struct PromptHalf {
    prompts: Vec<PromptBlocks>,
}

impl PromptHalf {
    /// The prompts to fit to and the held-out prompts: half of each suite, shuffled by a hash of
    /// their ids.
    fn read(args: &Args) -> anyhow::Result<[Self; 2]> {
        let mut suites: BTreeMap<String, BTreeMap<String, Vec<ObservedBlock>>> = BTreeMap::new();
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
            let block = ObservedBlock { logits, accepted: trace.accepted as usize };
            suite.entry(trace.sample.to_string()).or_default().push(block);
        })?;
        let dir = args.results.display();
        if unbounded > 0 {
            usage!(
                "{dir}: {} does not say in column `usable` where a block's first stop token stands, as earlier versions did \
                 not; run the evaluation again",
                traces::TRACES_FILE
            );
        }
        let mut sides = [Self::default(), Self::default()];
        for (suite, prompts) in suites {
            let place = |id: &str| Stream::new(0, &format!("{suite}/{id}")).bits(0, Purpose::Split, 0);
            let mut prompts: Vec<_> =
                prompts.into_iter().map(|(sample, blocks)| (place(&sample), sample, blocks)).collect();
            prompts.sort_by_key(|(place, _, _)| *place);
            for (rank, (_, sample, blocks)) in prompts.into_iter().enumerate() {
                sides[rank % 2].prompts.push(PromptBlocks { suite: suite.clone(), sample, blocks });
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

    fn blocks(&self) -> impl Iterator<Item = &ObservedBlock> + Clone {
        self.prompts.iter().flat_map(|prompt| &prompt.blocks)
    }

    fn positions(&self) -> usize {
        self.blocks().map(|block| block.logits.len()).max().unwrap_or(0)
    }

    fn proposals(&self) -> Vec<VerifiedProposal<'_>> {
        self.blocks()
            .map(|block| VerifiedProposal { logits: &block.logits, accepted: block.accepted })
            .collect()
    }

    fn evaluate_held_out(
        &self,
        positions: usize,
        temperatures: &Temperatures,
    ) -> anyhow::Result<HeldOutReport> {
        let raw = confidence::temperatures_by_position(&[], positions)?;
        let report = |temperatures: &Temperatures| {
            let observed = self.blocks().map(|block| (block.logits.as_slice(), block.accepted));
            confidence::reliability(observed, positions, temperatures)
        };
        let of_chance = |temperatures| confidence::ece_noise_quantile(self.blocks(), positions, temperatures);
        let error = |temperatures| bootstrap::estimate_ece(&self.prompts, positions, temperatures);
        let bootstrap = error(&raw)?.zip(error(temperatures)?).map(|(before, after)| EceBootstrap {
            change: after.estimate.minus(&before.estimate).centred_interval(),
            before: ece_uncertainty(&before),
            after: ece_uncertainty(&after),
        });
        Ok(HeldOutReport {
            prompts: self.prompts.len(),
            before: report(&raw)?,
            after: report(temperatures)?,
            ece_of_chance: of_chance(temperatures)?,
            ece_of_chance_before: Some(of_chance(&raw)?),
            bootstrap,
        })
    }
}

/// The bootstrap entry of an error. The interval is clamped at 0, since no error is negative.
fn ece_uncertainty(error: &EceEstimate) -> EceUncertainty {
    let interval = error.estimate.centred_interval();
    let interval = interval.map(|Interval { low, high }| Interval { low: low.max(0.0), high: high.max(0.0) });
    EceUncertainty { interval, ece_of_chance: error.of_chance }
}
