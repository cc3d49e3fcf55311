//! Conversion of a drafter to another format.

use std::path::Path;

use deepspec_core::atomic;
use safetensors::Dtype;
use serde_json::{Map, Value};

use crate::draft_vocab::{D2T, DraftVocab};
use crate::experts::{copy_by_expert, stack_experts};
use crate::numbers::{cast, differing_rows};
use crate::shapes::{EMBED, HEAD, REBUILT_TENSORS, is_embed_or_head};
use crate::shards::{MAX_SHARD_BYTES, is_weights_file};
use crate::tensors::torch_dtype_name;
use crate::write::{TensorSource, TensorToWrite, write_weights};
use crate::{
    Checkpoint, CheckpointError, CheckpointFormat, Drafter, Target, TensorMetadata, Tensors, folder, layouts,
};

const CONFIG: &str = "config.json";

/// A converted drafter, ready to write.
pub struct Converted<'a> {
    pub(crate) config: Map<String, Value>,
    pub(crate) tensors: Vec<TensorToWrite<'a>>,
    /// Names of the checkpoint's tensors that the conversion omits.
    pub dropped: Vec<String>,
    /// Names of the tensors that are copied from the target.
    pub copied_from_target: Vec<String>,
    /// Maximum bytes of a weights file.
    pub max_shard_bytes: usize,
}

/// Plans the conversion of `source` to the format `to`. `target` supplies tensors that `to`
/// requires, and confirms tensors that `to` omits.
///
/// # Errors
/// Returns [`CheckpointError::Refused`] with the reason if `to` cannot express the drafter. Returns
/// other errors if the checkpoint or the target is broken.
pub fn convert<'a>(
    source: &'a Checkpoint,
    to: CheckpointFormat,
    target: Option<&'a Target>,
) -> Result<Converted<'a>, CheckpointError> {
    let refused = |reason: String| source.refused_error(to.name(), reason);
    let drafter = with_target_settings(source, target);
    if let Some(reason) = source.conversion_refusal(&drafter, to) {
        return Err(refused(reason));
    }
    source.check()?;
    if let Some(target) = target {
        target.check_fits(&drafter)?;
        if drafter.taps.is_empty() && drafter.kind.reads_layers() {
            let layers = target.layers();
            return Err(refused(format!(
                "config.json does not say which layers it captures, and a target of {layers} layers has no default ones"
            )));
        }
    }
    let Some(target) = target else {
        return convert_without_target(source, to, &drafter)?
            .ok_or_else(|| refused(target_needed_message(to, &drafter)));
    };
    let (mut tensors, mut dropped) = other_tensors(source, to)?;
    let mut copied_from_target = vec![];
    for (end, theirs) in [(EMBED, target.embed()), (HEAD, target.head())] {
        let own = source.find(end);
        // Loaders of all formats except the reference's take embedding and LM head from the target. The LM head of a reduced
        // vocabulary is the drafter's in all formats.
        let is_own = end == HEAD && drafter.has_reduced_vocab()
            || to == CheckpointFormat::Speculators && drafter.kind.owns_embed_and_head();
        if own.is_some() && !is_own && to != CheckpointFormat::Reference {
            check_same_embed_or_head(source, end, target, &theirs, to.name())?;
        }
        match own {
            Some((name, facts)) if is_own || to.has_embed_and_head() => {
                let shape = facts.shape.clone();
                let source = TensorSource::Copy(source.tensors(), name);
                tensors.push(TensorToWrite { name: end.into(), dtype: facts.dtype, shape, source });
            }
            Some((name, _)) => dropped.push(name),
            None if to.has_embed_and_head() => {
                tensors.push(tensor_from_target(target, &theirs, end, source.dtype())?);
                copied_from_target.push(end.to_string());
            }
            None => {}
        }
    }
    Ok(Converted {
        config: layouts::config(&drafter, to, Some(target), config_dtype_name(source.dtype())),
        tensors,
        dropped,
        copied_from_target,
        max_shard_bytes: MAX_SHARD_BYTES,
    })
}

/// The checkpoint's drafter; settings that its config omits are taken from the target.
pub(crate) fn with_target_settings(source: &Checkpoint, target: Option<&Target>) -> Drafter {
    let mut drafter = source.drafter().clone();
    drafter.num_target_layers = drafter.num_target_layers.or(target.map(Target::layers));
    if let (true, Some(layers)) = (drafter.taps.is_empty(), drafter.num_target_layers) {
        drafter.taps = drafter.kind.default_taps(layers);
    }
    drafter
}

/// Plans a conversion to the reference's format without a target. It is possible if the checkpoint
/// has embedding and LM head.
fn convert_without_target<'a>(
    source: &'a Checkpoint,
    to: CheckpointFormat,
    drafter: &Drafter,
) -> Result<Option<Converted<'a>>, CheckpointError> {
    if to != CheckpointFormat::Reference || drafter.num_target_layers.is_none() {
        return Ok(None);
    }
    let (mut tensors, dropped) = other_tensors(source, to)?;
    for end in [EMBED, HEAD] {
        let Some((name, facts)) = source.find(end) else { return Ok(None) };
        let shape = facts.shape.clone();
        tensors.push(TensorToWrite {
            name: end.into(),
            dtype: facts.dtype,
            shape,
            source: TensorSource::Copy(source.tensors(), name),
        });
    }
    let config = layouts::config(drafter, to, None, config_dtype_name(source.dtype()));
    Ok(Some(Converted {
        config,
        tensors,
        dropped,
        copied_from_target: vec![],
        max_shard_bytes: MAX_SHARD_BYTES,
    }))
}

fn target_needed_message(to: CheckpointFormat, drafter: &Drafter) -> String {
    let what = match to {
        CheckpointFormat::Reference if drafter.num_target_layers.is_none() => {
            "`num_target_layers` is not in config.json, and the target's layers have to be counted".into()
        }
        CheckpointFormat::Reference => {
            format!("{to} holds embedding and head, which are left to the target here")
        }
        CheckpointFormat::Speculators => format!("{to} names its verifier"),
        _ => format!("{to} leaves embedding and head to the target, which therefore has to be the same"),
    };
    format!("the target is needed: {what}; give it with --target")
}

/// All tensors except embedding and LM head under their new names, and the names of omitted
/// tensors.
pub(crate) fn other_tensors(
    source: &Checkpoint,
    to: CheckpointFormat,
) -> Result<(Vec<TensorToWrite<'_>>, Vec<String>), CheckpointError> {
    let (mut tensors, mut others, mut dropped) = (vec![], vec![], vec![]);
    let drafter = source.drafter();
    let kind = drafter.kind.as_ref();
    if drafter.has_reduced_vocab() {
        tensors = DraftVocab::of_tensors(source.tensors(), drafter.vocab_size as usize)?.tensors();
        tensors.retain(|tensor| tensor.name == D2T || to != CheckpointFormat::Reference);
    }
    let is_kept = |name: &str| tensors.iter().any(|kept| kept.name == name);
    let rebuilt = source.tensors().iter().map(|(name, _)| name).filter(|name| REBUILT_TENSORS.contains(name));
    dropped.extend(rebuilt.filter(|name| !is_kept(name)).map(String::from));
    for (stored, reference_name, _) in renamed_tensors(source, CheckpointFormat::Reference) {
        others.extend(copy_by_expert(source.tensors(), stored, &reference_name)?);
    }
    if to.stacks_experts() {
        others = stack_experts(others, source.tensors())?;
    }
    others.iter_mut().for_each(|tensor| tensor.name = to.to_format_name(kind, &tensor.name));
    tensors.extend(others);
    Ok((tensors, dropped))
}

/// All tensors except embedding, LM head and those that are rebuilt: the stored name, the name in the format `to`, and metadata.
pub(crate) fn renamed_tensors(
    source: &Checkpoint,
    to: CheckpointFormat,
) -> impl Iterator<Item = (&str, String, &TensorMetadata)> {
    let kind = source.drafter().kind.as_ref();
    source.tensors().iter().filter_map(move |(stored, facts)| {
        let name = source.format().to_reference_name(kind, stored);
        let is_other = !is_embed_or_head(&name) && !REBUILT_TENSORS.contains(&stored);
        is_other.then(|| (stored, to.to_format_name(kind, &name), facts))
    })
}

/// Copies a tensor from the target, cast to the drafter's dtype.
fn tensor_from_target<'a>(
    target: &'a Target,
    theirs: &str,
    name: &str,
    dtype: Dtype,
) -> Result<TensorToWrite<'a>, CheckpointError> {
    let tensors = target.tensors();
    let facts = target.metadata(theirs)?;
    let source = match facts.dtype == dtype {
        true => TensorSource::Copy(tensors, theirs.into()),
        false => TensorSource::Bytes(cast_bytes(tensors, theirs, dtype)?),
    };
    Ok(TensorToWrite { name: name.into(), dtype, shape: facts.shape.clone(), source })
}

/// The bytes of a tensor, cast to `dtype`.
pub(crate) fn cast_bytes(tensors: &Tensors, name: &str, dtype: Dtype) -> Result<Vec<u8>, CheckpointError> {
    let from = tensors.required_metadata(name)?.dtype;
    cast(tensors.bytes(name)?, from, dtype).ok_or_else(|| {
        let (from, to) = (torch_dtype_name(from), torch_dtype_name(dtype));
        tensors.error(name, format!("{from} cannot be read as {to}"))
    })
}

/// Refuses to drop the checkpoint's embedding or LM head unless it equals the target's, byte for
/// byte in the checkpoint's dtype.
fn check_same_embed_or_head(
    source: &Checkpoint,
    end: &str,
    target: &Target,
    theirs: &str,
    to: &'static str,
) -> Result<(), CheckpointError> {
    let Some((name, own)) = source.find(end) else { return Ok(()) };
    let other = target.metadata(theirs)?;
    if own.shape != other.shape {
        let reason = format!("`{end}` has shape {:?}, the target's {:?}", own.shape, other.shape);
        return Err(source.refused_error(to, reason));
    }
    let there = cast(target.tensors().bytes(theirs)?, other.dtype, own.dtype).ok_or_else(|| {
        target.tensors().error(theirs, format!("{} cannot be compared", torch_dtype_name(other.dtype)))
    })?;
    let here = source.tensors().bytes(&name)?;
    let rows = own.shape.first().copied().unwrap_or(1);
    match differing_rows(&here, &there, here.len() / rows.max(1)) {
        0 => Ok(()),
        differing => Err(source.refused_error(
            to,
            format!(
                "`{end}` is not the target's: {differing} of {rows} rows differ, and whoever loads the result takes the target's"
            ),
        )),
    }
}

/// Checks that checkpoint and target match, and that the target's embedding and LM head can replace
/// the checkpoint's.
pub(crate) fn check_target_matches(
    source: &Checkpoint,
    drafter: &Drafter,
    target: &Target,
    to: &'static str,
) -> Result<(), CheckpointError> {
    source.check()?;
    target.check_fits(drafter)?;
    // The LM head of a reduced vocabulary is the drafter's.
    let head = (!drafter.has_reduced_vocab()).then(|| (HEAD, target.head()));
    let mut ends = std::iter::once((EMBED, target.embed())).chain(head);
    ends.try_for_each(|(end, theirs)| check_same_embed_or_head(source, end, target, &theirs, to))
}

pub(crate) fn config_dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        _ => "bfloat16",
    }
}

impl Converted<'_> {
    /// The new config.json.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// Writes the folder atomically. `overwrite` replaces an existing folder that contains only a
    /// converted checkpoint.
    ///
    /// # Errors
    /// Fails if the folder exists and may not be replaced, or on any I/O error.
    pub fn write(mut self, dir: &Path, overwrite: bool) -> Result<(), CheckpointError> {
        folder::write_folder_atomically(
            dir,
            overwrite,
            |name| name == CONFIG || is_weights_file(name),
            |partial| {
                write_weights(partial, &mut self.tensors, self.max_shard_bytes)?;
                Ok(atomic::write_json(&partial.join(CONFIG), &self.config)?)
            },
        )
    }
}
