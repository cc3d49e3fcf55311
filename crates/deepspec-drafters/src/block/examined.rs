//! What a block drafter predicts of whole blocks, teacher-forced, and with its slots read in either convention.

use tch::{Kind, Tensor};

use super::batch::BlockBatch;
use super::model::Block;
use crate::{Predictions, SlotConvention, TrainSample};

/// See [`crate::ExaminedDrafter::predict`].
pub fn predict<'a>(
    block: &'a Block,
    samples: &[TrainSample],
    slots: SlotConvention,
) -> Option<Predictions<'a>> {
    let config = block.config();
    let (gamma, width) = (config.block_size as i64, config.model.hidden_size);
    let device = samples.first()?.taps.device();
    let batch = BlockBatch::new(samples, config, 1.0, device, block.kind())?;
    let hidden = block.hidden(&batch); // [A, γ, d]
    let teacher = batch.teacher().view([-1, gamma, width]);
    // In the other convention slot k, from 1, predicts what slot k − 1 does in ours, and the token before that stands one
    // place to the left too.
    let fills_in = slots == SlotConvention::FillIn;
    let first = i64::from(fills_in);
    if gamma <= first {
        return None;
    }
    let previous = if fills_in {
        Tensor::cat(&[batch.previous().narrow(1, 0, 1), batch.previous().narrow(1, 0, gamma - 1)], 1)
    } else {
        batch.previous().shallow_clone()
    };
    let markov = block.markov_features(&hidden, &previous);
    let confidence = block
        .confidence_logits(&hidden, markov.as_ref().map(|(e, _)| e))
        .filter(|_| !fills_in)
        .map(|logits| logits.sigmoid().sum(Kind::Double).double_value(&[]));
    // Position after position: [γ', A, d] and [γ', A, r] as rows.
    let (blocks, drafts) = (batch.blocks() as i64, gamma - first);
    let by_position = |all: &Tensor, from: i64| all.narrow(1, from, drafts).transpose(0, 1).flatten(0, 1);
    let rows = by_position(&hidden, first);
    let features = markov.as_ref().map(|(_, features)| by_position(features, first));
    let logits = move |start, len| {
        let features = features.as_ref().map(|features| features.narrow(0, start, len));
        block.corrected_logits(&rows.narrow(0, start, len), features.as_ref())
    };
    Some(Predictions {
        counts: vec![blocks; drafts as usize],
        teacher: by_position(&teacher, 0),
        logits: Box::new(logits),
        confidence,
    })
}
