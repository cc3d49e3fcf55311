//! Verification policies: how many tokens of each drafted block are verified.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepspec_core::usage;
use deepspec_cost::cost_file::{self, WeightDigests};
use deepspec_cost::planner::Planner;
use deepspec_cost::temperatures::Temperatures;
use deepspec_models::{config_digest, weights_digest};

use crate::EngineArgs;

/// The planner that chooses how many drafted tokens are verified for `model`.
///
/// # Errors
/// A usage error if the costs cannot be read, or if they have no entry for one token per slot.
pub fn build_planner(model: &Path, args: &EngineArgs) -> anyhow::Result<Planner> {
    let Some(file) = &args.cost else { return Ok(Planner::new(args.schedule, None)?) };
    let (target, drafter) = (weights_digest(model)?, args.draft.as_deref().map(weights_digest).transpose()?);
    let weights = WeightDigests { target: &target, drafter: drafter.as_deref() };
    match cost_file::read_step_cost_for(file, weights, args.max_num_seqs) {
        Ok((cost, told)) => {
            told.iter().for_each(|words| tracing::warn!("--cost {words}"));
            Ok(Planner::new(args.schedule, Some(Arc::new(cost)))?)
        }
        Err(problem) => usage!("--cost {problem}"),
    }
}

/// Calibration temperatures for the confidences of the drafter in `dir`, with `block` tokens per
/// block; empty without a calibration file.
///
/// # Errors
/// A usage error if the file cannot be read, or if it belongs to another drafter.
pub fn load_temperatures(args: &EngineArgs, dir: Option<&PathBuf>, block: usize) -> anyhow::Result<Vec<f64>> {
    let (Some(file), Some(dir)) = (&args.calibration, dir) else { return Ok(vec![]) };
    let (config, weights) = (config_digest(dir)?, weights_digest(dir)?);
    let read = Temperatures::read(file);
    match read.and_then(|read| read.into_temperatures_for(file, [&config, &weights], block)) {
        Ok(temperatures) => Ok(temperatures),
        Err(problem) => usage!("--calibration {problem}"),
    }
}
