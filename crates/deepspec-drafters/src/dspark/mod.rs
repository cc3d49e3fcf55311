//! DSpark (Markov and confidence heads) and DFlash (neither).

mod formats;
mod model;
mod train;

pub use model::{
    Block, BlockConfig, BlockRecipe, BlockSettings, Confidence, ConfidenceRecipe, Markov, MarkovKind,
};
pub use train::{
    BLOCK_SUMS, BlockObjective, BlockPlan, BlockProposer, DFLASH_INFO, DFLASH_LOSS, DSPARK_INFO, DSPARK_LOSS,
    build_plan, read_dflash, read_dspark,
};
