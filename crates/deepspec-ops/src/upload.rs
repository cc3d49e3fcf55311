//! Uploads of a step's integers and floats to its device.
//!
//! A copy to a GPU costs about as much as a small kernel, whatever its size. The host therefore collects all numbers of
//! a step and sends them as one tensor, of which readers take slices. Rows and positions in consecutive runs are slices
//! of existing tensors ([`cat_row_runs`], [`DeviceArange`]). A step with only whole blocks uploads nothing.

use std::cell::RefCell;
use std::iter::repeat_n;

use crate::ffi::empty_pinned;
use tch::kind::Element;
use tch::{Device, Kind, Tensor};

/// Numbers gathered on the host.
#[derive(Debug, Default)]
pub struct Upload<T> {
    values: Vec<T>,
}

/// Position of some numbers in an upload.
#[derive(Debug, Clone, Copy)]
pub struct UploadSlice {
    first: i64,
    len: i64,
}

/// Uploaded numbers, as one tensor on the device.
pub struct Uploaded(Tensor);

impl<T: Element> Upload<T> {
    /// Appends numbers and returns their position.
    pub fn push(&mut self, values: impl IntoIterator<Item = T>) -> UploadSlice {
        let first = self.values.len();
        self.values.extend(values);
        UploadSlice { first: first as i64, len: (self.values.len() - first) as i64 }
    }

    /// Sends all numbers without blocking the host. An empty upload copies nothing.
    pub fn send(&self, device: Device) -> Uploaded {
        if self.values.is_empty() {
            return Uploaded(Tensor::zeros([0], (T::KIND, device)));
        }
        let values = Tensor::from_slice(&self.values);
        if device == Device::Cpu {
            return Uploaded(values);
        }
        let mut staged = empty_pinned(&values.size(), &values);
        staged.copy_(&values);
        Uploaded(staged.to_device_(device, T::KIND, true, false))
    }
}

impl Upload<i64> {
    /// Appends float32 numbers, two per i64.
    pub fn push_floats(&mut self, values: &[f32]) -> FloatSlice {
        let bits = |pair: &[f32]| {
            let mut bytes = [0; 8];
            bytes
                .chunks_mut(4)
                .zip(pair)
                .for_each(|(half, value)| half.copy_from_slice(&value.to_ne_bytes()));
            i64::from_ne_bytes(bytes)
        };
        FloatSlice { part: self.push(values.chunks(2).map(bits)), len: values.len() as i64 }
    }
}

/// Position of some float32 numbers in an upload.
#[derive(Debug, Clone, Copy)]
pub struct FloatSlice {
    part: UploadSlice,
    len: i64,
}

impl Uploaded {
    /// The float32 numbers of a slice, `[len]`, as a view.
    pub fn slice_floats(&self, floats: FloatSlice) -> Tensor {
        self.slice(floats.part).view_dtype(Kind::Float).narrow(0, 0, floats.len)
    }

    /// The numbers of a slice, `[len]`, as a view.
    pub fn slice(&self, part: UploadSlice) -> Tensor {
        self.0.narrow(0, part.first, part.len)
    }
}

/// 0, 1, 2, … on a device, extended on demand. Slices of it replace uploads of consecutive numbers. On the CPU each
/// request builds its own tensor.
pub struct DeviceArange(RefCell<Tensor>);

impl DeviceArange {
    /// An empty arange on `device`.
    pub fn new(device: Device) -> Self {
        Self(RefCell::new(Tensor::zeros([0], (Kind::Int64, device))))
    }

    /// Concatenates runs `(first, count)` of consecutive numbers, `[Σ count]` int64.
    pub fn cat_runs(&self, list: impl IntoIterator<Item = (i64, i64)>) -> Tensor {
        let list: Vec<(i64, i64)> = list.into_iter().collect();
        if self.0.borrow().device() == Device::Cpu {
            return expand_runs(&list);
        }
        let end = list.iter().map(|(first, count)| first + count).max().unwrap_or(0);
        let mut arange = self.0.borrow_mut();
        if arange.size()[0] < end {
            let length = (end as u64).next_power_of_two().max(MIN_ARANGE_LEN) as i64;
            *arange = Tensor::arange(length, (Kind::Int64, arange.device()));
        }
        cat_row_runs(&arange, list)
    }

    /// A tensor of these numbers, `[N]` int64.
    pub fn int_tensor(&self, list: impl IntoIterator<Item = usize>) -> Tensor {
        self.cat_runs(list.into_iter().map(|number| (number as i64, 1)))
    }

    /// Repeats each number the given number of times, `[Σ times]` int64.
    pub fn repeat_each(&self, list: impl IntoIterator<Item = (usize, usize)>) -> Tensor {
        let list: Vec<(usize, usize)> = list.into_iter().collect();
        let all = || list.iter().flat_map(|&(number, times)| repeat_n(number, times));
        if self.0.borrow().device() == Device::Cpu {
            return self.int_tensor(all());
        }
        let [single, times] =
            [self.int_tensor(list.iter().map(|one| one.0)), self.int_tensor(list.iter().map(|one| one.1))];
        single.repeat_interleave_self_tensor(&times, 0, all().count() as i64)
    }
}

/// Minimum length of the cached arange.
const MIN_ARANGE_LEN: u64 = 1 << 10;

/// Concatenates runs `(first, count)` of rows; a single run is a view, not a copy.
pub fn cat_row_runs(of: &Tensor, list: impl IntoIterator<Item = (i64, i64)>) -> Tensor {
    match merge_adjacent_runs(list).as_slice() {
        [] => of.narrow(0, 0, 0),
        [(first, count)] => of.narrow(0, *first, *count),
        // On the CPU one index list costs less than a view of every run.
        several if of.device() == Device::Cpu => of.index_select(0, &expand_runs(several)),
        several => Tensor::cat(&several.iter().map(|&(at, n)| of.narrow(0, at, n)).collect::<Vec<_>>(), 0),
    }
}

/// All numbers of these runs, as a CPU tensor.
fn expand_runs(list: &[(i64, i64)]) -> Tensor {
    let numbers: Vec<i64> = list.iter().flat_map(|&(first, count)| first..first + count).collect();
    Tensor::from_slice(&numbers)
}

/// Like [`cat_row_runs`], but copies a single run, so that the other rows can be freed. A run of all rows stays
/// a view.
pub fn copy_row_runs(of: &Tensor, list: impl IntoIterator<Item = (i64, i64)>) -> Tensor {
    match merge_adjacent_runs(list).as_slice() {
        [(first, count)] if *count < of.size()[0] => of.narrow(0, *first, *count).copy(),
        list => cat_row_runs(of, list.iter().copied()),
    }
}

/// Merges adjacent runs.
fn merge_adjacent_runs(list: impl IntoIterator<Item = (i64, i64)>) -> Vec<(i64, i64)> {
    let mut joined: Vec<(i64, i64)> = vec![];
    for (first, count) in list {
        match joined.last_mut() {
            Some((start, length)) if *start + *length == first => *length += count,
            _ => joined.push((first, count)),
        }
    }
    joined
}

/// Concatenates `parts` on the device `from` along dimension 0, and converts them to `device` and `kind`. Between two
/// devices, one copy moves them before the cast.
pub fn cat_to_device(parts: &[Tensor], from: Device, device: Device, kind: Kind) -> Tensor {
    if from == device {
        let parts: Vec<Tensor> = parts.iter().map(|part| part.to_kind(kind)).collect();
        return Tensor::cat(&parts, 0);
    }
    Tensor::cat(parts, 0).to_device(device).to_kind(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_rows() {
        let rows = Tensor::arange(10, (Kind::Int64, Device::Cpu));
        let of =
            |list: &[(i64, i64)]| Vec::<i64>::try_from(cat_row_runs(&rows, list.iter().copied())).unwrap();
        assert_eq!(of(&[(7, 2), (1, 3), (4, 1)]), [7, 8, 1, 2, 3, 4]);
        assert_eq!((of(&[]), of(&[(2, 0)])), (vec![], vec![]));
        // A part is a copy, so that the rest can be freed. All rows are a view.
        let (part, all) = (copy_row_runs(&rows, [(2, 3)]), copy_row_runs(&rows, [(0, 4), (4, 6)]));
        assert_eq!(Vec::<i64>::try_from(&part).unwrap(), [2, 3, 4]);
        assert_ne!(part.data_ptr(), rows.narrow(0, 2, 3).data_ptr());
        assert_eq!(all.data_ptr(), rows.data_ptr());
        let arange = DeviceArange::new(Device::Cpu);
        assert_eq!(Vec::<i64>::try_from(arange.int_tensor([5, 5, 2000, 2001])).unwrap(), [5, 5, 2000, 2001]);
        assert_eq!(Vec::<i64>::try_from(arange.cat_runs([(7, 2), (1, 3)])).unwrap(), [7, 8, 1, 2, 3]);
        assert_eq!(Vec::<i64>::try_from(arange.repeat_each([(7, 2), (1, 0), (3, 1)])).unwrap(), [7, 7, 3]);
        assert_eq!((arange.int_tensor([]).size(), arange.cat_runs([(4, 0)]).size()), (vec![0], vec![0]));
    }

    #[test]
    fn lists_keep_their_places() {
        let mut upload = Upload::default();
        let parts = [vec![3i64, 1], vec![], vec![4]].map(|list| upload.push(list));
        let there = upload.send(Device::Cpu);
        let lists = parts.map(|part| Vec::<i64>::try_from(there.slice(part)).unwrap());
        assert_eq!(lists, [vec![3, 1], vec![], vec![4]]);
    }

    #[test]
    fn floats_travel_among_integers() {
        let mut upload = Upload::default();
        let first = upload.push([7]);
        let lists: [&[f32]; 4] = [&[1.5, -2.0, f32::MIN_POSITIVE], &[], &[0.25], &[-0.0, f32::INFINITY]];
        let floats = lists.map(|list| upload.push_floats(list));
        let there = upload.send(Device::Cpu);
        assert_eq!(Vec::<i64>::try_from(there.slice(first)).unwrap(), [7]);
        for (list, floats) in lists.iter().zip(floats) {
            assert_eq!(Vec::<f32>::try_from(there.slice_floats(floats)).unwrap(), *list);
        }
    }
}
