//! DFlash 2 (Inco AI, z-lab, August 2026): blocks whose slots fill in, with short convolutions around attention and MLP, and a selector
//! that walks from the anchor over each slot's likeliest tokens.
//!
//! Legend beside the crate's: K taps of a convolution, c channels of its groups, k candidates of a slot, r rank of the selector.

mod config;
mod convolution;
mod cost;
mod kind;
mod layouts;
mod metrics;
mod model;
mod objective;
mod recipe;
mod selector;

pub use config::DFlash2Config;
pub use kind::{DFlash2Objective, DFlash2Plan, DFlash2Proposer, KIND};
pub use metrics::DFlash2Sum;
pub use model::DFlash2;
pub use recipe::{Convolution, DFlash2Recipe, Selector};
