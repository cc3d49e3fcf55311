//! DFlash 2 (Inco AI, z-lab, August 2026): blocks whose slots fill in, with short convolutions around attention and MLP. A
//! selector walks from the anchor over each slot's likeliest tokens.
//!
//! Legend beside the crate's: K taps of a convolution, c channels of its groups, k candidates of a slot, r rank of the selector.

mod formats;
mod model;
mod train;

pub use model::{Convolution, DFlash2, DFlash2Config, DFlash2Recipe, DFlash2Settings, Selector};
pub use train::{DFLASH2_SUMS, DFlash2Objective, DFlash2Plan, DFlash2Proposer, KIND, fit, read};
