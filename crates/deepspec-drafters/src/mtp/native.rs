//! MTP layers in the checkpoints of targets: tensors `mtp.*` beside the target's own.

use deepspec_checkpoint::{
    self as checkpoint, Checkpoint, Converted, Fields, MergedTarget, Target, extract, json_map,
};
use deepspec_core::cli::UsageError;
use deepspec_models::config::read_json;
use deepspec_models::{ModelConfig, ModelError};
use serde_json::json;

use super::model::{Mtp, MtpConfig, MtpSettings};
use crate::draft_model::{DraftDecoder, DrafterSettings, WarmStartCheck};

/// Prefix of the tensors of a target's MTP layer.
const PREFIX: &str = "mtp.";

/// Keys of a target's config that change the MTP layer, with the only value that is read.
const LAYERS_KEY: &str = "mtp_num_hidden_layers";
const OWN_EMBEDDINGS_KEY: &str = "mtp_use_dedicated_embeddings";

/// Plans a drafter checkpoint of the MTP layer that the target's checkpoint stores. The drafter drafts `steps` tokens, one after the
/// other, by default.
///
/// # Errors
/// If checkpoints of the target's family store no MTP layer, or this one lacks it, or its tensors do not fit.
pub fn extract_mtp(target: &Target, steps: usize) -> Result<Converted<'_>, ModelError> {
    let model = ModelConfig::load(target.dir())?;
    check_target(target, &model)?;
    let config = MtpConfig {
        decoder: DraftDecoder {
            num_target_layers: model.layers.len(),
            model: model.mtp_decoder()?,
            taps: vec![],
        },
        settings: MtpSettings { num_speculative_steps: steps, ..MtpSettings::default() },
    };
    config.check().map_err(|(key, problem)| {
        ModelError::Mismatch(UsageError(format!("the target's MTP layer: `{key}`: {problem}")))
    })?;
    let json = config.to_json();
    let size = |shape: Vec<i64>| shape.into_iter().map(|n| n as usize).collect();
    let parameters = Mtp::meta_parameters(config).parameters.into_iter();
    let shapes = parameters.map(|(name, tensor)| (name, size(tensor.size()))).collect();
    Ok(extract(target, PREFIX, &shapes, json)?)
}

/// Checks that checkpoints of the target's family store an MTP layer that is read, and that the config describes one layer that shares
/// the embedding.
fn check_target(target: &Target, model: &ModelConfig) -> Result<(), ModelError> {
    if !model.stores_mtp() {
        let problem = format!(
            "checkpoints of {} hold no MTP layer that is read; those of Qwen3.5 and Qwen3.5-MoE do",
            model.family
        );
        return Err(ModelError::Mismatch(UsageError(problem)));
    }
    let (path, map) = read_json(target.dir())?;
    let outer = Fields::new(&path, &map);
    let text = outer.object("text_config")?;
    let fields = text.as_ref().unwrap_or(&outer);
    if let Some(layers) = fields.count(LAYERS_KEY)?.filter(|&layers| layers != 1) {
        let problem = format!("{layers} MTP layers; a drafter of this kind has 1");
        return Err(fields.error(LAYERS_KEY, problem).into());
    }
    fields.refuse_if_on(OWN_EMBEDDINGS_KEY, "an MTP layer with an embedding of its own is not supported")?;
    Ok(())
}

/// Plans a copy of the target's checkpoint with the MTP-1 drafter `source` as its MTP layer, as engines load it.
///
/// # Errors
/// If the drafter is of another kind, has other layers than the target's MTP layer, or does not fit the target.
pub fn merge<'a>(source: &'a Checkpoint, target: &Target) -> Result<MergedTarget<'a>, ModelError> {
    let misfit = |problem: String| ModelError::Mismatch(UsageError(problem));
    let (model, drafter) = (ModelConfig::load(target.dir())?, source.drafter());
    check_target(target, &model)?;
    if drafter.kind.method() != "mtp" || drafter.family != model.family.decoder {
        let class = format!("{}{}", model.family.decoder.prefix, MtpSettings::CLASS);
        let problem = format!(
            "{} with layers of {} is not merged into a target of {}; expected a drafter of the class {class}",
            drafter.kind.title(),
            drafter.family.name,
            model.family
        );
        return Err(misfit(problem));
    }
    let own = ModelConfig::parse(&source.dir().join("config.json"), drafter.decoder.clone())?;
    let mut check = WarmStartCheck::default();
    check.compare_decoders(&own, &model.mtp_decoder()?);
    let differences = check.differences();
    if !differences.is_empty() {
        let problem = format!(
            "the layer of the drafter (there) is no MTP layer of the target (here): {}",
            differences.join("; ")
        );
        return Err(misfit(problem));
    }
    // vLLM counts layers by this key, and targets that transformers saved lack it.
    let keys = json_map([(LAYERS_KEY, json!(1))]);
    Ok(checkpoint::merge(source, target, PREFIX, keys)?)
}
