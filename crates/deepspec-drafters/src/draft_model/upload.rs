//! Hidden states of a micro-batch, sent to its device by one copy.

use tch::{Device, Kind, Tensor};

/// Joins parts on the device `from` along their first dimension, as `kind` on `device`. Between two devices, one copy moves them before
/// they are cast.
pub(crate) fn joined(parts: &[Tensor], from: Device, device: Device, kind: Kind) -> Tensor {
    if from == device {
        let parts: Vec<Tensor> = parts.iter().map(|part| part.to_kind(kind)).collect();
        return Tensor::cat(&parts, 0);
    }
    Tensor::cat(parts, 0).to_device(device).to_kind(kind)
}
