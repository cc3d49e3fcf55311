//! What the ranks tell each other in a step: gradients and, where each updates its own share, weights.

use std::cmp::Reverse;
use std::ops::Range;

use deepspec_dist::{GroupError, ProcessGroup};
use deepspec_native::range;
use tch::Tensor;

/// Values that travel at once: large enough that a collective's fixed cost does not count, small beside the model.
const BUCKET: usize = 8 << 20;

/// Adds up each tensor over all ranks, in flat buckets. All are of one kind and device.
///
/// # Errors
/// If another rank has failed.
pub fn add_up(group: &ProcessGroup, tensors: &mut [Tensor]) -> Result<(), GroupError> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let _range = range(c"collectives");
    for bucket in buckets(tensors.iter().map(Tensor::numel)) {
        let tensors = &mut tensors[bucket];
        let mut sums = flat(tensors.iter());
        group.all_reduce("adding up gradients", &mut sums)?;
        let views = split(&sums, tensors.iter());
        tensors.iter_mut().zip(views).for_each(|(tensor, sum)| *tensor = sum);
    }
    Ok(())
}

/// Copies each tensor from the rank that owns it to all others, in flat buckets. All are of one kind and device.
///
/// # Errors
/// If another rank has failed.
pub fn share(group: &ProcessGroup, owned: &[(usize, &Tensor)]) -> Result<(), GroupError> {
    let _guard = tch::no_grad_guard();
    let _range = range(c"collectives");
    for owner in 0..group.world_size() {
        let tensors: Vec<&Tensor> =
            owned.iter().filter(|(rank, _)| *rank == owner).map(|(_, tensor)| *tensor).collect();
        for bucket in buckets(tensors.iter().map(|tensor| tensor.numel())) {
            let tensors = &tensors[bucket];
            let mut values = flat(tensors.iter().copied());
            group.broadcast("sharing updated weights", &mut values, owner)?;
            if group.rank() != owner {
                let views = split(&values, tensors.iter().copied());
                tensors.iter().zip(views).for_each(|(tensor, view)| tensor.shallow_clone().copy_(&view));
            }
        }
    }
    Ok(())
}

/// Which of `ranks` ranks owns each of so many values: largest first, each to the rank that has the least.
pub fn owners(sizes: &[usize], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&index| (Reverse(sizes[index]), index));
    let (mut loads, mut owners) = (vec![0; ranks], vec![0; sizes.len()]);
    for index in order {
        let least = (0..ranks).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        owners[index] = least;
        loads[least] += sizes[index];
    }
    owners
}

fn flat<'t>(tensors: impl Iterator<Item = &'t Tensor>) -> Tensor {
    Tensor::cat(&tensors.map(|tensor| tensor.detach().flatten(0, -1)).collect::<Vec<_>>(), 0)
}

/// Views of a flat tensor in the shapes of `like`.
fn split<'t>(flat: &Tensor, like: impl Iterator<Item = &'t Tensor>) -> Vec<Tensor> {
    let mut start = 0;
    like.map(|tensor| {
        let length = tensor.numel() as i64;
        start += length;
        flat.narrow(0, start - length, length).view_as(tensor)
    })
    .collect()
}

/// Runs of consecutive tensors of at most [`BUCKET`] values; a larger tensor is alone.
fn buckets(sizes: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let (mut buckets, mut held): (Vec<Range<usize>>, usize) = (vec![], 0);
    for (index, size) in sizes.enumerate() {
        match buckets.last_mut() {
            Some(bucket) if held + size <= BUCKET => {
                bucket.end = index + 1;
                held += size;
            }
            _ => {
                buckets.push(index..index + 1);
                held = size;
            }
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_keep_order_and_size() {
        let sizes = [BUCKET / 2, BUCKET / 2, 1, BUCKET + 1, 3, 4];
        assert_eq!(buckets(sizes.into_iter()), [0..2, 2..3, 3..4, 4..6]);
    }

    #[test]
    fn shares_are_about_equal() {
        assert_eq!(owners(&[5, 3, 3, 2, 2, 1], 2), [0, 1, 1, 0, 1, 0]);
        assert_eq!(owners(&[1, 2], 1), [0, 0]);
        assert_eq!(owners(&[7], 4), [0]);
    }
}
