//! DFlash 2 (Inco AI, z-lab, August 2026): a block drafter with convolutions in its layers and a selector over each slot's top-k tokens.
//!
//! Further symbols: K kernel size of a convolution, c channels per group, k candidates of a slot, r rank of the selector.

mod formats;
mod model;
mod train;

pub use model::{DFlash2, DFlash2Config, DFlash2Recipe, DFlash2Settings, Selector};
pub use train::{
    DFLASH2_INFO, DFLASH2_SUMS, DFlash2Objective, DFlash2Plan, DFlash2Proposer, build_plan, read_recipe,
};
