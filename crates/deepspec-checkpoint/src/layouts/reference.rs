//! The reference's own format: all keys at the top level, embedding and LM head in the checkpoint.

use deepspec_core::Tap;
use serde_json::{Map, Value, json};

use super::common::{Decoder, EMBEDDING_LAYER_ID, flat_config, read_layer_ids};
use super::dflash_config;
use super::reader::{KnownDrafters, Reader};
use super::windows::resolve_windows;
use crate::CheckpointError;
use crate::drafter::Drafter;
use crate::fields::Fields;

/// Keys that belong neither to the decoder nor to a kind.
const DRAFTER_KEYS: [&str; 7] = [
    "num_target_layers",
    "target_layer_ids",
    "dflash_config",
    "has_embed_tokens",
    "target_model_name_or_path",
    "target_model_type",
    "target_text_model_type",
];

/// Reads a drafter of `kind`.
pub fn read(
    fields: &Fields,
    architecture: &str,
    kind: &Reader,
    known: KnownDrafters,
) -> Result<Drafter, CheckpointError> {
    let of_kinds = known.kinds.iter().flat_map(|kind| kind.keys);
    let own: Vec<&str> = DRAFTER_KEYS.iter().chain(of_kinds).copied().collect();
    let resolved = if kind.has_block_options() { resolve_windows(fields)? } else { None };
    let plain = resolved.as_ref().map(|map| fields.with_map(map));
    let mut decoder = Decoder::read(plain.as_ref().unwrap_or(fields), &own, known.families)?;
    if kind.has_block_options() {
        decoder.accept_windows();
    }
    decoder
        .incompatibilities
        .extend(dflash_config::attention_incompatibilities(fields.map, kind.has_block_options()));
    let kind = (kind.reference)(fields, &decoder)?;
    fields.required_size::<u64>("num_target_layers")?;
    let taps = match kind.reads_layers() {
        true => read_layer_ids(fields, "target_layer_ids", EMBEDDING_LAYER_ID)?,
        false if fields.map.get("target_layer_ids").is_none_or(|ids| *ids == json!([])) => vec![],
        false => return Err(fields.error("target_layer_ids", "the drafter reads no layers; expected []")),
    };
    decoder.into_drafter(fields, architecture, taps, kind)
}

pub fn config_json(drafter: &Drafter) -> Map<String, Value> {
    let (class, keys) = drafter.kind.reference_config(drafter);
    let mut map = flat_config(drafter);
    map.insert("target_layer_ids".into(), Tap::layer_ids(&drafter.taps).into());
    map.insert("architectures".into(), vec![format!("{}{class}", drafter.family.prefix)].into());
    map.extend(keys);
    map
}
