//! Domino (arXiv 2605.29707): a DFlash whose logits are corrected by a recurrent network over the block's previous tokens.
//!
//! Further symbols: H size of the recurrent state, E rank of the correction.

mod formats;
mod model;
mod train;

pub use formats::{PROJECTORS, read_container};
pub use model::{Domino, DominoConfig, DominoRecipe, DominoSettings, GruSettings, LambdaBase};
pub use train::{
    DOMINO_INFO, DOMINO_SUMS, DominoObjective, DominoPlan, DominoProposer, build_plan, read_recipe,
};
