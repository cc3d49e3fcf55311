//! Teacher-forced predictions of a drafter for whole blocks.

use tch::{Kind, Tensor};

use super::{BlockBatch, BlockDrafter};
use crate::draft_model::DraftModel;
use crate::{Predictions, TrainSample};

/// See [`crate::DrafterProbe::predict`].
pub fn predict<'a, K: BlockDrafter>(
    model: &'a DraftModel<K>,
    samples: &[TrainSample],
) -> Option<Predictions<'a>> {
    let config = model.config();
    let (gamma, width) = (K::blocks(config).drafted() as i64, config.model().hidden_size);
    if gamma == 0 {
        return None;
    }
    let device = samples.first()?.taps.device();
    let batch = BlockBatch::new(samples, K::blocks(config), false, 1.0, device, model.kind())?;
    let hidden = model.hidden(&batch); // [A, γ, d]
    let (embeddings, features) = model.logit_features(&hidden, &batch.previous).unzip();
    let confidence = model.confidence_logits(&hidden, embeddings.as_ref());
    // Position after position: [γ, A, d] and [γ, A, r] as rows.
    let by_position = |all: &Tensor| all.transpose(0, 1).flatten(0, 1);
    let (rows, features) = (by_position(&hidden), features.as_ref().map(by_position));
    let logits = move |start, len| {
        let features = features.as_ref().map(|features| features.narrow(0, start, len));
        model.slot_logits(&rows.narrow(0, start, len), features.as_ref())
    };
    Some(Predictions {
        counts: vec![batch.blocks as i64; gamma as usize],
        teacher: by_position(&batch.teacher().view([-1, gamma, width])),
        logits: Box::new(logits),
        confidence: confidence.map(|logits| logits.sigmoid().sum(Kind::Double).double_value(&[])),
    })
}
