//! Warm start: loads the weights of a checkpoint into a drafter that is to be trained.

use std::path::Path;

use deepspec_checkpoint::D2T;
use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_models::{ModelError, Weights};
use tch::{Kind, Tensor};

use super::checkpoint::{HEAD_KEY, is_embed_or_head};
use super::{DraftConfig, DraftModel, DrafterKind, DrafterSettings as _, WarmStartCheck};
use crate::registry::find_checkpoint_kind;

impl<K: DrafterKind> DraftModel<K> {
    /// See [`crate::TrainableDrafter::load_pretrained`].
    pub(super) fn load_pretrained(&self, dir: &Path) -> Result<Vec<String>, ModelError> {
        let misfit = |problem: String| {
            ModelError::Mismatch(UsageError(format!("train.init_from: {}: {problem}", dir.display())))
        };
        let (found, here) = (find_checkpoint_kind(dir)?, self.config());
        if !(found.classes)().contains(&here.architecture()) {
            let problem =
                format!("it holds {}, the recipe asks for another kind of drafter", found.description);
            return Err(misfit(problem));
        }
        let there = DraftConfig::<K::Settings>::load(dir)?;
        let mut transfer = WarmStartCheck::default();
        transfer.compare_decoders(there.model(), here.model());
        let (theirs, own) = (&there.decoder, &here.decoder);
        let ids = |taps: &[Tap]| format!("{:?}", Tap::layer_ids(taps));
        transfer.compare("target_layer_ids", ids(&theirs.taps), ids(&own.taps));
        transfer.compare("num_target_layers", theirs.num_target_layers, own.num_target_layers);
        here.settings.compare_for_warm_start(&there.settings, &mut transfer);
        let differing = transfer.differences();
        if !differing.is_empty() {
            return Err(misfit(format!(
                "another drafter than the recipe asks for: {}",
                differing.join("; ")
            )));
        }
        let _guard = tch::no_grad_guard();
        let weights = Weights::open(dir, "drafter", self.device(), Kind::Float)?;
        weights.check_finite()?;
        let mut fresh = vec![];
        for (name, mut tensor) in self.checkpoint() {
            // The weights belong to one embedding, and with a reduced vocabulary to one set of tokens and one LM head.
            let of_vocab = self.draft_tokens.is_some() && (name == D2T || name == HEAD_KEY);
            if of_vocab || K::Settings::MAY_OWN_EMBED_AND_HEAD && is_embed_or_head(&name) {
                let there = weights.get(&name, &tensor.size())?;
                let stored = |tensor: &Tensor| match tensor.kind() {
                    Kind::Int64 => tensor.shallow_clone(),
                    _ => tensor.to_kind(Kind::BFloat16),
                };
                if !stored(&there).equal(&stored(&tensor)) {
                    let problem = format!(
                        "its `{name}` is another than that of the recipe's draft_vocab and target, and is not trained here"
                    );
                    return Err(misfit(problem));
                }
                continue;
            }
            if is_embed_or_head(&name) {
                continue;
            }
            let may_stay_random = transfer.may_stay_random.iter().any(|part| name.starts_with(part));
            if may_stay_random && !weights.contains(&name) {
                fresh.push(name);
                continue;
            }
            tensor.copy_(&weights.get(&name, &tensor.size())?);
        }
        let mut unread = weights.unread_names();
        unread.retain(|name| !is_embed_or_head(name));
        if unread.is_empty() {
            return Ok(fresh);
        }
        Err(misfit(format!("the recipe's drafter has no use for its tensors {}", unread.join(", "))))
    }
}
