//! Numbers of a step on their way to the device.
//!
//! A copy to a GPU costs about as much as a small kernel, however little it moves. What a step needs is gathered on the host
//! first and sent as one tensor, of which every reader sees its part.

use tch::kind::Element;
use tch::{Device, Kind, Tensor};

/// Numbers that are gathered on the host.
#[derive(Debug, Default)]
pub struct Upload<T> {
    values: Vec<T>,
}

/// Where some of an upload's numbers lie.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    first: i64,
    len: i64,
}

/// An upload on its device.
pub struct Uploaded(Tensor);

impl<T: Element> Upload<T> {
    /// Adds numbers.
    pub fn push(&mut self, values: impl IntoIterator<Item = T>) -> Part {
        let first = self.values.len();
        self.values.extend(values);
        Part { first: first as i64, len: (self.values.len() - first) as i64 }
    }

    /// Sends all of them; nothing travels where there are none.
    pub fn send(&self, device: Device) -> Uploaded {
        Uploaded(match self.values.is_empty() {
            true => Tensor::zeros([0], (T::KIND, device)),
            false => Tensor::from_slice(&self.values).to_device(device),
        })
    }
}

impl Upload<i64> {
    /// Adds float32 numbers, two in the place of one.
    pub fn push_floats(&mut self, values: &[f32]) -> Floats {
        let bits = |pair: &[f32]| {
            let mut bytes = [0; 8];
            bytes
                .chunks_mut(4)
                .zip(pair)
                .for_each(|(half, value)| half.copy_from_slice(&value.to_ne_bytes()));
            i64::from_ne_bytes(bytes)
        };
        Floats { part: self.push(values.chunks(2).map(bits)), len: values.len() as i64 }
    }
}

/// Where some of an upload's float32 numbers lie.
#[derive(Debug, Clone, Copy)]
pub struct Floats {
    part: Part,
    len: i64,
}

impl Uploaded {
    /// The float32 numbers of a part, `[len]`, sharing memory with all others.
    pub fn floats(&self, floats: Floats) -> Tensor {
        self.of(floats.part).view_dtype(Kind::Float).narrow(0, 0, floats.len)
    }

    /// The numbers of a part, `[len]`, sharing memory with all others.
    pub fn of(&self, part: Part) -> Tensor {
        self.0.narrow(0, part.first, part.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_places() {
        let mut upload = Upload::default();
        let parts = [vec![3i64, 1], vec![], vec![4]].map(|list| upload.push(list));
        let there = upload.send(Device::Cpu);
        let lists = parts.map(|part| Vec::<i64>::try_from(there.of(part)).unwrap());
        assert_eq!(lists, [vec![3, 1], vec![], vec![4]]);
    }

    #[test]
    fn floats_travel_among_integers() {
        let mut upload = Upload::default();
        let first = upload.push([7]);
        let lists: [&[f32]; 4] = [&[1.5, -2.0, f32::MIN_POSITIVE], &[], &[0.25], &[-0.0, f32::INFINITY]];
        let floats = lists.map(|list| upload.push_floats(list));
        let there = upload.send(Device::Cpu);
        assert_eq!(Vec::<i64>::try_from(there.of(first)).unwrap(), [7]);
        for (list, floats) in lists.iter().zip(floats) {
            assert_eq!(Vec::<f32>::try_from(there.floats(floats)).unwrap(), *list);
        }
    }
}
