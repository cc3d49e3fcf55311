//! xPress (arXiv 2608.02438): a DFlash whose refiner corrects all slots of a block at once, several times over. The backbone may be that
//! of DFlash 2.
//!
//! Further symbols: r rank of the refiner, K its passes over a block, J free-running rounds of training.

mod formats;
mod model;
mod refiner;
mod train;

pub use model::{
    Consistency, RefinerRecipe, XPress, XPressBackbone, XPressConfig, XPressRecipe, XPressSettings,
};
pub use train::{
    XPRESS_INFO, XPRESS_SUMS, XPressObjective, XPressPlan, XPressProposer, build_plan, read_recipe,
};
