//! The reference's own layout: everything at the top level, embedding and head within.

use deepspec_core::{Slots, Tap};
use serde_json::{Map, Value};

use super::{block_size, confidence, decoder, flat, markov, mask_token, notes, taps};
use crate::DialectError;
use crate::drafter::{Block, Design, Drafter};
use crate::fields::Fields;

/// Keys that are not the decoder's.
const OWN: [&str; 14] = [
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
    "draft_num_hidden_layers",
    "target_model_name_or_path",
    "target_model_type",
    "target_text_model_type",
];

pub fn read(fields: &Fields, architecture: &str) -> Result<Drafter, DialectError> {
    let decoder = decoder(fields, &OWN)?;
    let design = if architecture.ends_with("Eagle3Model") {
        Design::Eagle3 { steps: fields.required_size("ttt_length")? }
    } else {
        let markov = markov(fields)?;
        let slots = match fields.flag("sample_from_anchor")? {
            Some(false) => Slots::FillIn,
            _ => Slots::AnchorPredicts,
        };
        Design::Block(Block {
            block_size: block_size(fields, slots)?,
            mask_token_id: mask_token(fields, decoder.vocab_size)?,
            slots,
            markov,
            confidence_with_markov: confidence(fields, markov)?,
        })
    };
    Ok(Drafter {
        architecture: architecture.into(),
        family: decoder.family,
        hidden_size: decoder.hidden_size,
        vocab_size: decoder.vocab_size,
        draft_vocab_size: decoder.vocab_size,
        layers: decoder.layers,
        taps: taps(fields, "target_layer_ids", -1)?,
        num_target_layers: Some(fields.required_size("num_target_layers")?),
        design,
        notes: notes(fields),
        obstacles: decoder.obstacles,
        decoder: decoder.map,
    })
}

pub fn config(drafter: &Drafter) -> Map<String, Value> {
    let family = drafter.family.prefix;
    let mut map = flat(drafter);
    let mut put = |key: &str, value: Value| map.insert(key.into(), value);
    put("target_layer_ids", Tap::layer_ids(&drafter.taps).into());
    match drafter.design {
        Design::Eagle3 { steps } => {
            put("architectures", vec![format!("{family}Eagle3Model")].into());
            put("ttt_length", steps.into());
            put("draft_num_hidden_layers", drafter.layers.into());
        }
        Design::Block(block) => {
            put("architectures", vec![format!("{family}DSparkModel")].into());
            put("block_size", block.block_size.into());
            put("mask_token_id", block.mask_token_id.into());
            if block.slots == Slots::FillIn {
                put("sample_from_anchor", false.into());
            }
            put("markov_rank", block.markov.map_or(0, |markov| markov.rank).into());
            if let Some(markov) = block.markov {
                put("markov_head_type", markov.kind.name().into());
            }
            put("enable_confidence_head", block.confidence_with_markov.is_some().into());
            if let Some(with_markov) = block.confidence_with_markov {
                put("confidence_head_with_markov", with_markov.into());
            }
        }
    }
    map
}
