//! DSpark (Markov and confidence heads) and DFlash (neither).

mod formats;
mod model;
mod train;

pub use model::{
    ConfidenceHead, ConfidenceRecipe, ConfidenceSettings, DSpark, DSparkConfig, DSparkRecipe, DSparkSettings,
    MarkovHead, MarkovKind, MarkovSettings,
};
pub use train::{
    DFLASH_INFO, DFLASH_LOSS, DSPARK_INFO, DSPARK_LOSS, DSPARK_SUMS, DSparkObjective, DSparkPlan,
    DSparkProposer, HeadLosses, build_plan, metric_defs, read_dflash, read_dspark,
};
