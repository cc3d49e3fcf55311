//! P-EAGLE: Eagle3's network, which drafts all tokens of a block in one pass (arXiv 2602.01469).
//!
//! Position i pairs the state of token i with the embedding of token i + 1 and predicts token i + 2. Behind an anchor a, a row of depth d
//! has a learnt state and the mask token instead. It stands at position a + d and predicts token a + 2 + d.

mod batch;
mod depths;
mod formats;
mod model;
mod proposer;
mod train;

pub use batch::PEagleBatch;
pub use depths::DownSampling;
pub use model::{PEagle, PEagleConfig, PEagleObjective, PEagleRecipe, PEagleSettings};
pub use proposer::PEagleProposer;
pub use train::{PEAGLE_INFO, PEaglePlan, build_plan, read_recipe};
