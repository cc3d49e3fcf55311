//! The states of a micro-batch on their way to its device: one transfer, however many samples it has.

use tch::{Device, Kind, Tensor};

/// Joins the parts, which lie on `from`, along their first dimension as `kind` on `device`. Where that is another device, they
/// travel by one transfer, and in the kind that they have.
pub(crate) fn joined(parts: &[Tensor], from: Device, device: Device, kind: Kind) -> Tensor {
    if from == device {
        let parts: Vec<Tensor> = parts.iter().map(|part| part.to_kind(kind)).collect();
        return Tensor::cat(&parts, 0);
    }
    Tensor::cat(parts, 0).to_device(device).to_kind(kind)
}
