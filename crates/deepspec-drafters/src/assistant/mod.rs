//! Assistants of Gemma 4: Google's own drafters, which read the KV cache of their target.
//!
//! Every layer has queries only. Its keys and values are those of the target's last layer of its attention type. Shapes: S slots,
//! d hidden size of the target, h hidden size of the assistant, V vocabulary.

mod config;
mod loss;
mod model;
mod probe;
mod proposer;
mod train;

pub use config::AssistantRecipe;
pub use model::Assistant;
pub use proposer::AssistantProposer;
pub use train::{build_plan, read_recipe};

use deepspec_checkpoint::Engine;

use crate::drafter::TREE_REFUSAL;
use crate::registration::{CheckpointKind, DrafterKindInfo, ParamGroup};

/// Class names in `architectures`.
const CLASSES: [&str; 2] = ["Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"];

/// Registry entry of assistants.
pub const ASSISTANT_INFO: DrafterKindInfo = DrafterKindInfo {
    name: "gemma4_assistant",
    title: "an assistant of Gemma 4",
    param_groups: &[
        ParamGroup { name: "projections", prefixes: &["pre_projection.", "post_projection."] },
        ParamGroup { name: "layers", prefixes: &["model.layers."] },
        ParamGroup { name: "norm", prefixes: &["model.norm."] },
        ParamGroup { name: "head", prefixes: &["model.embed_tokens."] },
    ],
    settings: Some(|schemas| schemas.subschema_for::<AssistantRecipe>()),
    checkpoints: Some(CheckpointKind {
        classes: || CLASSES.map(String::from).to_vec(),
        description: "an assistant of Gemma 4",
        are_language_models: false,
        tree_refusal: TREE_REFUSAL,
        check: config::check_config,
        load: |dir, options| Ok(Box::new(AssistantProposer::load(dir, options)?)),
        layouts: None,
        engines: &Engine::ALL,
    }),
};
