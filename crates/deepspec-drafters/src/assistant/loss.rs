//! Cross entropy of an assistant's own head, beside the distributions of its target.
//!
//! Shapes: R supervised rows, S states of the target, h hidden size of the assistant, d of the target, V vocabulary.

use deepspec_ops::{grad_or_zeros, range};
use tch::{Device, Kind, Tensor};

use super::model::Assistant;
use crate::token_common::{StepBatch, StepRows};

/// Bytes of the float32 logits of a chunk of rows.
const CHUNK_BYTES: i64 = 32 << 20;
/// Bytes of such logits on a GPU.
const GPU_CHUNK_BYTES: i64 = 512 << 20;
/// Limits on the rows of a chunk.
const CHUNK_ROWS: (i64, i64) = (16, 2048);
/// Buffers of a chunk that exist at once, in rows of float32 logits: of the drafter, of the target, and temporaries.
const CHUNK_BUFFERS: usize = 4;

/// Rows of a chunk.
fn chunk_rows(vocab: i64, device: Device) -> i64 {
    let bytes = if device == Device::Cpu { CHUNK_BYTES } else { GPU_CHUNK_BYTES };
    (bytes / (4 * vocab)).clamp(CHUNK_ROWS.0, CHUNK_ROWS.1)
}

/// Estimated buffer bytes of [`head_losses`]. `head_values` is the number of weights of the head if it is trained, and else 0.
pub fn buffer_bytes(vocab: i64, rows: usize, head_values: usize, kind: Kind, device: Device) -> usize {
    let logits = rows.min(chunk_rows(vocab, device) as usize) * vocab as usize * size_of::<f32>();
    // A chunk's gradient of the head, and its float32 sum if the weights are narrower.
    let sum = if kind == Kind::Float { 0 } else { size_of::<f32>() };
    CHUNK_BUFFERS * logits + head_values * (kind.elt_size_in_bytes() + sum)
}

/// Losses of the supervised rows.
pub struct HeadLosses {
    /// Measurements of each row.
    pub rows: StepRows,
    /// Gradient of the loss with respect to the outputs, `[R, h]`.
    pub grad_outputs: Tensor,
}

/// Computes Σ w·CE · scale over the supervised rows of a batch, whose outputs are `outputs [R, h]`, and adds to the gradient of the head
/// if the head is trained. Autograd must be off. Full `[R, V]` tensors never exist.
pub fn head_losses(model: &Assistant, batch: &StepBatch, outputs: &Tensor, scale: f64) -> HeadLosses {
    let _range = range(c"objective");
    let head = model.head().to_tensor();
    let (count, vocab, kind) = (outputs.size()[0], head.size()[0], outputs.kind());
    let head_grad = head.requires_grad().then(|| match head.kind() {
        Kind::Float => grad_or_zeros(&head),
        _ => Tensor::zeros(head.size(), (Kind::Float, head.device())),
    });
    let sources = batch.teacher_index();
    let (mut rows, mut gradients) = (vec![], vec![]);
    let most = chunk_rows(vocab, outputs.device());
    for first in (0..count).step_by(most as usize) {
        let len = most.min(count - first);
        let of_chunk = |rows: &Tensor| rows.narrow(0, first, len);
        let (x, labels) = (of_chunk(outputs), of_chunk(&batch.labels).unsqueeze(1));
        let log_probs = model.logits(&x).log_softmax(-1, Kind::Float); // [n, V]
        let ce = -log_probs.gather(1, &labels, false).squeeze_dim(1);
        let guess = log_probs.argmax(-1, false);
        let mut probs = log_probs.exp();
        drop(log_probs);
        // Sources ascend, and a chunk reads all states between its first one and its last one.
        let [begin, end] = [first, first + len - 1].map(|row| sources.of_rows[row as usize]);
        let targets = model.target_logits(&batch.teacher.narrow(0, begin, end - begin + 1));
        let of_row = of_chunk(sources.there) - begin;
        let agreement = guess.eq_tensor(&targets.argmax(-1, false).index_select(0, &of_row));
        let targets = targets.softmax(-1, Kind::Float).index_select(0, &of_row);
        let accept = targets.minimum(&probs).sum_dim_intlist(-1, false, Kind::Float);
        drop(targets);
        rows.push(Tensor::stack(&[ce, agreement.to_kind(Kind::Float), accept], 1));
        // (p − one-hot) · w · scale is the gradient of the logits.
        let weights = of_chunk(&batch.weights).unsqueeze(1) * scale;
        let _ = probs.scatter_add_(1, &labels, &-labels.ones_like().to_kind(Kind::Float));
        let _ = probs.g_mul_(&weights);
        let grad_logits = probs.to_kind(kind);
        drop(probs);
        if let Some(sum) = &head_grad {
            let _ = sum.shallow_clone().g_add_(&grad_logits.tr().matmul(&x));
        }
        gradients.push(grad_logits.matmul(&head));
    }
    if let Some(sum) = head_grad.filter(|sum| sum.kind() != head.kind()) {
        let _ = grad_or_zeros(&head).g_add_(&sum);
    }
    let rows = Tensor::cat(&rows, 0);
    let column = |index| rows.select(1, index);
    HeadLosses {
        rows: StepRows { ce: column(0), agreement: column(1), accept: column(2) },
        grad_outputs: Tensor::cat(&gradients, 0),
    }
}
