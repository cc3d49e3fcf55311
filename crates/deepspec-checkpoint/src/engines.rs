//! Checkpoint folders that vLLM and SGLang load.

use safetensors::Dtype;

use crate::convert::{
    Converted, check_target_matches, config_dtype_name, convert, other_tensors, with_target_settings,
};
use crate::export::Engine;
use crate::shapes::{EMBED, HEAD};
use crate::shards::MAX_SHARD_BYTES;
use crate::tensors::torch_dtype_name;
use crate::write::{TensorSource, TensorToWrite};
use crate::{Checkpoint, CheckpointError, CheckpointFormat, Drafter, Target, layouts, rope};

/// Tensor names of the vanilla Markov head.
const MARKOV_TENSORS: [&str; 2] = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"];
/// Rank of a Markov head of zeros. vLLM's CPU matrix products fail with smaller ranks.
const ZERO_MARKOV_RANK: usize = 16;

/// Plans the conversion of `source` to the format that `engine` loads. The engine takes embedding
/// and LM head from the target.
///
/// # Errors
/// Returns [`CheckpointError::Refused`] with the reason if the engine cannot run the drafter.
/// Returns other errors if the checkpoint or the target is broken.
pub fn convert_for_engine<'a>(
    source: &'a Checkpoint,
    engine: Engine,
    target: &'a Target,
) -> Result<Converted<'a>, CheckpointError> {
    let to = engine.title();
    let drafter = with_target_settings(source, Some(target));
    let format =
        drafter.reason_not_convertible().map_or_else(|| drafter.kind.engine_format(engine, &drafter), Err);
    match format.map_err(|reason| source.refused_error(to, reason))? {
        CheckpointFormat::Reference => plan_anchor_predicts(source, &drafter, target, to),
        format if format == source.format() && source.unread_by(engine).is_none() => {
            source.check()?;
            let reason = format!("it loads the checkpoint as it is, in the layout of {format}");
            Err(source.refused_error(to, reason))
        }
        format => {
            rope::engine_rope_parameters(source, to)?;
            convert(source, format, Some(target))
        }
    }
}

/// Plans a conversion to the reference's format without embedding and LM head. Every position of a
/// block drafts, including the anchor's. vLLM, SGLang and llama.cpp's converter interpret this
/// format in the same way.
fn plan_anchor_predicts<'a>(
    source: &'a Checkpoint,
    drafter: &Drafter,
    target: &'a Target,
    to: &'static str,
) -> Result<Converted<'a>, CheckpointError> {
    let rope = rope::engine_rope_parameters(source, to)?;
    check_target_matches(source, drafter, target, to)?;
    let (mut tensors, mut dropped) = other_tensors(source, CheckpointFormat::Reference)?;
    dropped.extend([EMBED, HEAD].into_iter().filter_map(|end| Some(source.find(end)?.0)));
    let mut config = layouts::config(
        drafter,
        CheckpointFormat::Reference,
        Some(target),
        config_dtype_name(source.dtype()),
    );
    if source.find(MARKOV_TENSORS[0]).is_none() {
        // SGLang requires a Markov head, and other engines infer from it that all positions draft.
        // A head of zeros changes no logits.
        let width = match source.dtype() {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            other => {
                return Err(source.refused_error(to, format!("its weights are {}", torch_dtype_name(other))));
            }
        };
        let shape = [drafter.vocab_size as usize, ZERO_MARKOV_RANK];
        tensors.extend(MARKOV_TENSORS.map(|name| TensorToWrite {
            name: name.into(),
            dtype: source.dtype(),
            shape: shape.to_vec(),
            source: TensorSource::Bytes(vec![0; width * shape[0] * shape[1]]),
        }));
        config.insert("markov_rank".into(), ZERO_MARKOV_RANK.into());
        config.insert("markov_head_type".into(), "vanilla".into());
    }
    layouts::add_engine_keys(&mut config, rope);
    if let Some(window) = drafter.shared_window() {
        layouts::mark_windows(&mut config, window);
    }
    Ok(Converted { config, tensors, dropped, copied_from_target: vec![], max_shard_bytes: MAX_SHARD_BYTES })
}
