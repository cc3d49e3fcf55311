//! Bootstrap over prompts for the mean calibration error (ECE): its interval, and the part that
//! chance explains.
//!
//! The blocks of one prompt are not independent: a head that is overconfident on a prompt is
//! overconfident in most blocks of the prompt. The bootstrap therefore resamples whole prompts,
//! with all their blocks, turns and seeds. The ECE is Σ_cells |Σ a − Σ accepted| / observations; a
//! is the predicted acceptance, and a cell is one bin of one position. Chance and resampling can
//! only increase such a sum of absolute values.

use deepspec_cost::ScheduleError;
use deepspec_cost::calibrate::Calibration;
use deepspec_cost::reliability::{Binning, Reliability};

use crate::confidence::ObservedBlock;
use crate::statistics::{Estimate, RESAMPLES, poisson_weights, quantiles};

/// A prompt and the blocks drafted for it, over all turns and seeds.
pub struct PromptBlocks {
    /// Suite of the prompt.
    pub suite: String,
    /// Id of the prompt.
    pub sample: String,
    /// Confidence logits and outcomes of the drafted blocks.
    pub blocks: Vec<ObservedBlock>,
}

/// The mean calibration error of some prompts, and its uncertainty.
pub struct EceEstimate {
    /// The measured error, and its values over resamples.
    pub estimate: Estimate,
    /// 95 % quantile of the error that differences between prompts alone would cause.
    pub of_chance: f64,
}

/// Sums over prompts that the calibration error is computed from.
#[derive(Clone)]
struct CalibrationSums {
    observations: f64,
    /// Σ a − Σ accepted of each cell.
    gaps: Vec<f64>,
}

impl CalibrationSums {
    fn add_weighted(&mut self, other: &Self, weight: f64) {
        self.observations += weight * other.observations;
        self.gaps.iter_mut().zip(&other.gaps).for_each(|(sum, gap)| *sum += weight * gap);
    }

    /// The mean calibration error; NaN without observations.
    fn ece(&self) -> f64 {
        self.gaps.iter().map(|gap| gap.abs()).sum::<f64>() / self.observations
    }

    /// The error that this resample would have if the true gaps were the gaps of `all`. It shows
    /// how far chance moves the error.
    fn ece_around(&self, all: &Self) -> f64 {
        let gaps = self.gaps.iter().zip(&all.gaps);
        gaps.map(|(gap, all)| (gap - all).abs()).sum::<f64>() / all.observations
    }
}

/// The mean calibration error of the prompts' confidences under `temperatures`; None without
/// drafted tokens.
///
/// # Errors
/// A logit is NaN, or there are more logits than positions.
pub fn estimate_ece(
    prompts: &[PromptBlocks],
    positions: usize,
    temperatures: &Calibration,
) -> Result<Option<EceEstimate>, ScheduleError> {
    estimate_ece_by_prompt(prompts, positions, |_| temperatures)
}

/// [`estimate_ece`] with temperatures that depend on the prompt.
///
/// # Errors
/// As [`estimate_ece`].
pub fn estimate_ece_by_prompt<'t>(
    prompts: &[PromptBlocks],
    positions: usize,
    temperatures: impl Fn(&PromptBlocks) -> &'t Calibration,
) -> Result<Option<EceEstimate>, ScheduleError> {
    let sums = |prompt: &PromptBlocks| {
        let mut own = Reliability::with_binning(positions, Binning { fine: 1, ..Binning::default() })?;
        for block in &prompt.blocks {
            own.update(&temperatures(prompt).confidences(&block.logits)?, block.accepted)?;
        }
        Ok(CalibrationSums {
            observations: own.observations() as f64,
            gaps: own.calibration_gaps().collect(),
        })
    };
    let shares = prompts.iter().map(sums).collect::<Result<Vec<_>, ScheduleError>>()?;
    let cells = shares.first().map_or(0, |share| share.gaps.len());
    let mut total = CalibrationSums { observations: 0.0, gaps: vec![0.0; cells] };
    let mut resampled = vec![total.clone(); RESAMPLES];
    for (prompt, share) in prompts.iter().zip(&shares) {
        total.add_weighted(share, 1.0);
        let resamples = resampled.iter_mut().zip(poisson_weights(&prompt.suite, &prompt.sample));
        resamples
            .filter(|(_, weight)| *weight > 0.0)
            .for_each(|(sums, weight)| sums.add_weighted(share, weight));
    }
    if total.observations == 0.0 {
        return Ok(None);
    }
    let around: Vec<f64> = resampled.iter().map(|sums| sums.ece_around(&total)).collect();
    let [of_chance] = quantiles(&around, [0.95]).unwrap_or_default();
    let estimate = Estimate::new(total.ece(), resampled.iter().map(CalibrationSums::ece).collect());
    Ok(Some(EceEstimate { estimate, of_chance }))
}

#[cfg(test)]
mod tests {
    use deepspec_core::rng::{Purpose, Stream};
    use deepspec_cost::survival::sigmoid;

    use super::*;
    use crate::confidence::{ObservedBlock, ece_noise_quantile};

    /// With this temperature, a head is calibrated on average if each prompt shifts its logits by
    /// up to ±2.
    const RIGHT: f64 = 1.21;

    /// Prompts of one-token blocks. The true logit is the head's plus an offset per prompt, uniform
    /// within ±`spread`.
    fn prompts(experiment: u64, count: u64, spread: f64) -> Vec<PromptBlocks> {
        let stream = Stream::new(experiment, "calibration");
        let prompt = |i: u64| {
            let own = spread * (2.0 * stream.uniform(i, Purpose::Init, 0) - 1.0);
            let block = |b: u64| {
                let uniform = |lane| stream.uniform(i, Purpose::Accept, 2 * b + lane);
                let logit = 4.0 * uniform(0) - 1.0;
                ObservedBlock {
                    logits: vec![logit as f32],
                    accepted: usize::from(uniform(1) < sigmoid(logit + own)),
                }
            };
            PromptBlocks {
                suite: experiment.to_string(),
                sample: i.to_string(),
                blocks: (0..60).map(block).collect(),
            }
        };
        (0..count).map(prompt).collect()
    }

    fn at(prompts: &[PromptBlocks], temperature: f64) -> EceEstimate {
        estimate_ece(prompts, 1, &Calibration::new(vec![temperature]).unwrap()).unwrap().unwrap()
    }

    /// Share of experiments for which `holds` is true.
    fn share(holds: impl Fn(u64) -> bool) -> f64 {
        let experiments = 60;
        (0..experiments).filter(|&experiment| holds(experiment)).count() as f64 / experiments as f64
    }

    #[test]
    fn the_error_is_that_of_the_report() {
        let prompts = prompts(1, 30, 1.0);
        let mut sums = Reliability::new(1);
        let temperatures = Calibration::new(vec![0.6]).unwrap();
        for block in prompts.iter().flat_map(|prompt| &prompt.blocks) {
            sums.update(&temperatures.confidences(&block.logits).unwrap(), block.accepted).unwrap();
        }
        let reported = sums.finish().summary.unwrap().ece;
        assert!((at(&prompts, 0.6).estimate.value.unwrap() - reported).abs() < 1e-12);
        assert!(estimate_ece(&[], 1, &temperatures).unwrap().is_none());
    }

    #[test]
    fn chance_among_prompts_leaves_more_than_chance_among_blocks() {
        // The head is calibrated over all prompts, whatever the offset of each: any error left is
        // chance.
        let independent = |prompts: &[PromptBlocks]| {
            let blocks = prompts.iter().flat_map(|prompt| &prompt.blocks);
            ece_noise_quantile(blocks, 1, &Calibration::new(vec![RIGHT]).unwrap()).unwrap()
        };
        let exceeds = |[spread, temperature]: [f64; 2], bound: &dyn Fn(&[PromptBlocks]) -> f64| {
            share(|experiment| {
                let prompts = prompts(experiment, 40, spread);
                at(&prompts, temperature).estimate.value.unwrap() > bound(&prompts)
            })
        };
        let by_prompt = |prompts: &[PromptBlocks]| at(prompts, RIGHT).of_chance;
        // At a rate of 5 %, more than 15 % of 60 experiments exceed the bound once in a thousand
        // times.
        assert!(exceeds([2.0, RIGHT], &by_prompt) <= 0.15);
        assert!(exceeds([2.0, RIGHT], &independent) > 0.25, "blocks of one prompt are not independent");
        let by_prompt = |prompts: &[PromptBlocks]| at(prompts, 1.0).of_chance;
        assert!(exceeds([0.0, 1.0], &by_prompt) <= 0.15, "where they are, the bounds agree");
    }

    #[test]
    fn harm_is_seen_where_there_is_some_and_hardly_ever_where_there_is_none() {
        let worse = |prompts: &[PromptBlocks], before: f64, after: f64| {
            let change = at(prompts, after).estimate.minus(&at(prompts, before).estimate);
            change.centred_interval().unwrap().low > 0.0
        };
        let told = |before, after| share(|experiment| worse(&prompts(experiment, 40, 2.0), before, after));
        assert!(told(RIGHT, 0.5) > 0.9, "more than twice as sure as is right");
        assert!(told(2.0, RIGHT) < 0.08 && told(0.9, RIGHT) < 0.08, "these temperatures help");
        let sample = prompts(3, 40, 2.0);
        let change = at(&sample, 1.0).estimate.minus(&at(&sample, 1.0).estimate).centred_interval().unwrap();
        assert_eq!((change.low, change.high), (0.0, 0.0));
    }
}
