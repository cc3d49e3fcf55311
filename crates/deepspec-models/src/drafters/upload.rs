//! What a micro-batch sends to its device: a handful of transfers, however many samples and lists it has.

use tch::{Device, Kind, Tensor};

/// Lists of indices that travel together.
#[derive(Default)]
pub(super) struct Indices {
    values: Vec<i64>,
}

/// Where a list stands among its [`Indices`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    first: i64,
    count: i64,
}

impl Indices {
    /// Takes a list along.
    pub fn add(&mut self, list: impl IntoIterator<Item = i64>) -> Place {
        let first = self.values.len();
        self.values.extend(list);
        Place { first: first as i64, count: (self.values.len() - first) as i64 }
    }

    /// All lists on a device, by one transfer.
    pub fn on(&self, device: Device) -> Uploaded {
        Uploaded(Tensor::from_slice(&self.values).to_device(device))
    }
}

/// [`Indices`] on a device.
pub(super) struct Uploaded(Tensor);

impl Uploaded {
    /// One list, int64; the memory is that of all lists.
    pub fn of(&self, place: Place) -> Tensor {
        self.0.narrow(0, place.first, place.count)
    }
}

/// Joins the parts of each group, which lie on `from`, along their first dimension as `kind` on `device`. Where that is another
/// device, all groups travel by one transfer, and in the kind that they have.
pub(super) fn joined(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_places() {
        let mut indices = Indices::default();
        let places = [vec![3, 1], vec![], vec![4]].map(|list| indices.add(list));
        let there = indices.on(Device::Cpu);
        let lists = places.map(|place| Vec::<i64>::try_from(there.of(place)).unwrap());
        assert_eq!(lists, [vec![3, 1], vec![], vec![4]]);
    }
}
