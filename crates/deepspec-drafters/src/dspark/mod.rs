//! DSpark (Markov and confidence heads) and DFlash (neither).

mod formats;
mod model;
mod train;

pub use model::{
    ConfidenceRecipe, ConfidenceSettings, DSpark, DSparkConfig, DSparkRecipe, DSparkSettings, MarkovKind,
    MarkovSettings,
};
pub use train::{
    DFLASH_INFO, DFLASH_LOSS, DSPARK_INFO, DSPARK_LOSS, DSPARK_SUMS, DSparkObjective, DSparkPlan,
    DSparkProposer, build_plan, read_dflash, read_dspark,
};
