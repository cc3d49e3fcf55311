//! Teacher-forced predictions of a block drafter, for the doctor.

use tch::{Kind, Tensor};

use super::{BackboneDrafter, BlockBatch, BlockDrafter};
use crate::draft_model::DraftModel;
use crate::{Predictions, TrainSample};

/// See [`crate::DrafterProbe::predict`].
pub fn predict<'a, K: BackboneDrafter>(
    model: &'a DraftModel<K>,
    samples: &[TrainSample],
) -> Option<Predictions<'a>> {
    predict_from(model, samples, |batch| model.hidden_states(batch))
}

/// [`predict`] with the hidden states `[A, H, d]` that `hidden_states` computes.
pub fn predict_from<'a, K: BlockDrafter>(
    model: &'a DraftModel<K>,
    samples: &[TrainSample],
    hidden_states: impl Fn(&BlockBatch) -> Tensor,
) -> Option<Predictions<'a>> {
    let config = model.config();
    let (gamma, width) = (K::block_spec(config).draft_len() as i64, config.model().hidden_size);
    if gamma == 0 {
        return None;
    }
    let device = samples.first()?.taps.device();
    let batch = config.batch(samples, 1.0, device, model.kind())?;
    let hidden = hidden_states(&batch); // [A, H, d]
    let (embeddings, features) = model.teacher_forced_features(&hidden, &batch.previous).unzip();
    let hidden = hidden.narrow(1, hidden.size()[1] - gamma, gamma); // [A, γ, d]
    let confidence = model.confidence_logits(&hidden, embeddings.as_ref());
    // Sorts rows by position: [γ, A, d] and [γ, A, r], flattened.
    let by_position = |all: &Tensor| all.transpose(0, 1).flatten(0, 1);
    let (rows, features) = (by_position(&hidden), features.as_ref().map(by_position));
    let logits = move |start, len| {
        let features = features.as_ref().map(|features| features.narrow(0, start, len));
        model.teacher_forced_logits(&rows.narrow(0, start, len), features.as_ref())
    };
    Some(Predictions {
        counts: vec![batch.blocks as i64; gamma as usize],
        teacher: by_position(&batch.teacher_states().view([-1, gamma, width])),
        logits: Box::new(logits),
        confidence: confidence.map(|logits| logits.sigmoid().sum(Kind::Double).double_value(&[])),
    })
}
