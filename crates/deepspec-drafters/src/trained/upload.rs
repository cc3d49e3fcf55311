//! The states of a micro-batch on their way to its device: one transfer, however many samples it has.

use tch::{Device, Kind, Tensor};

/// Joins the parts of each group, which lie on `from`, along their first dimension as `kind` on `device`. Where that is another
/// device, all groups travel by one transfer, and in the kind that they have.
pub(crate) fn joined(
    groups: impl Iterator<Item = Vec<Tensor>>,
    from: Device,
    device: Device,
    kind: Kind,
) -> Vec<Tensor> {
    if from == device {
        let join = |parts: Vec<Tensor>| {
            let parts: Vec<Tensor> = parts.iter().map(|part| part.to_kind(kind)).collect();
            Tensor::cat(&parts, 0)
        };
        return groups.map(join).collect();
    }
    let (mut parts, mut lengths) = (vec![], vec![]);
    for group in groups {
        lengths.push(group.iter().map(|part| part.size()[0]).sum::<i64>());
        parts.extend(group);
    }
    let all = Tensor::cat(&parts, 0).to_device(device).to_kind(kind);
    let mut first = 0;
    lengths
        .into_iter()
        .map(|length| {
            first += length;
            all.narrow(0, first - length, length)
        })
        .collect()
}
