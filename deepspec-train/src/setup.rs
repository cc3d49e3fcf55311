//! Resolves a recipe's dtypes, devices and data on this machine, for training and planning.

use deepspec_capture::{Dataset, StatesError, TargetRuntime, TargetSpec};
use deepspec_core::cli::UsageError;
use deepspec_core::env;
use deepspec_core::recipe::TrainDtype;
use deepspec_drafters::Recipe;
use deepspec_ops::LocalRank;
use tch::{Device, Kind};

use crate::schedule::epoch_shuffle;

/// Number of unusable rows that are listed individually.
const MAX_REJECTED_LISTED: usize = 5;

/// dtype of the drafter's weights.
pub fn weight_dtype(precision: TrainDtype) -> Kind {
    match precision {
        TrainDtype::Bf16 => Kind::BFloat16,
        TrainDtype::Fp32 => Kind::Float,
    }
}

/// Device and dtype of this process's target, as for building a cache.
///
/// # Errors
/// A usage error if the device does not exist.
pub fn target_runtime(recipe: &Recipe, trainer: Device, local: LocalRank) -> anyhow::Result<TargetRuntime> {
    let device = match &recipe.data.target_device {
        // Targets do not communicate, so processes may share a GPU.
        Some(name) => deepspec_ops::rank_device(name, LocalRank { shares: true, ..local })
            .map_err(|error| UsageError(format!("`data.target_device`: {error}")))?,
        None => trainer,
    };
    let kind = deepspec_ops::default_dtype(device);
    Ok(TargetRuntime { device, dtype: kind, per_step: recipe.train.global_batch_size })
}

/// Opens the data set of a recipe and logs the rows that are left out.
///
/// # Errors
/// Fails if an input or the cache cannot be read, or has no usable rows.
pub fn open_data(recipe: &Recipe, source: &TargetSpec) -> anyhow::Result<Dataset> {
    let first_epoch = |samples| epoch_shuffle(recipe.seed, samples)(0);
    let place = env::cache_dir().map(|dir| dir.join("samples"));
    let dataset =
        Dataset::open(recipe, source, place.as_deref(), first_epoch).map_err(StatesError::report_data)?;
    if let Some(report) = dataset.report() {
        tracing::info!("{report}");
        for rejected in report.rejected.iter().take(MAX_REJECTED_LISTED) {
            tracing::warn!("{}:{}: {}", rejected.file.display(), rejected.line, rejected.reason);
        }
        if let Some(more) = report.rejected().checked_sub(MAX_REJECTED_LISTED).filter(|&more| more > 0) {
            tracing::warn!("{more} more rows cannot be used");
        }
    }
    Ok(dataset)
}
