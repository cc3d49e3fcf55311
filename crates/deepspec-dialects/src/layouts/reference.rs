//! The reference's own layout: everything at the top level, embedding and head within.

use deepspec_core::Tap;
use serde_json::{Map, Value};

use super::common::{decoder, flat, taps};
use crate::DialectError;
use crate::drafter::Drafter;
use crate::fields::Fields;
use crate::kinds::Reader;

/// Keys that are not the decoder's.
const OWN: [&str; 20] = [
    "num_target_layers",
    "target_layer_ids",
    "block_size",
    "sample_from_anchor",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "ttt_length",
    "dflash_config",
    "has_embed_tokens",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "draft_num_hidden_layers",
    "target_model_name_or_path",
    "target_model_type",
    "target_text_model_type",
];

pub fn read(fields: &Fields, architecture: &str, kind: &Reader) -> Result<Drafter, DialectError> {
    let decoder = decoder(fields, &OWN)?;
    let kind = (kind.reference)(fields, &decoder)?;
    fields.required_size("num_target_layers")?;
    let taps = taps(fields, "target_layer_ids", -1)?;
    decoder.drafter(fields, architecture, taps, kind)
}

pub fn config(drafter: &Drafter) -> Map<String, Value> {
    let (class, keys) = drafter.kind.reference(drafter);
    let mut map = flat(drafter);
    map.insert("target_layer_ids".into(), Tap::layer_ids(&drafter.taps).into());
    map.insert("architectures".into(), vec![format!("{}{class}", drafter.family.prefix)].into());
    map.extend(keys);
    map
}
