//! Numbers of a step on their way to the device.
//!
//! A copy to a GPU costs about as much as a small kernel, however little it moves. What a step needs is gathered on the host
//! first and sent as one tensor, of which every reader sees its part.

use tch::kind::Element;
use tch::{Device, Tensor};

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

impl Uploaded {
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
}
