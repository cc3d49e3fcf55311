//! Assistants of Gemma 4: Google's own drafters, which read the KV cache of their target.
//!
//! Every layer has queries only. Its keys and values are those of the target's last layer of its attention type. Shapes: S slots,
//! d hidden size of the target, h hidden size of the assistant, V vocabulary.

mod model;
mod proposer;

pub use model::Assistant;
pub use proposer::{ASSISTANT_INFO, AssistantProposer};
