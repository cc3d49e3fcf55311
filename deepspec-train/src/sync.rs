//! Exchanges gradients between the ranks and, with sharded optimiser state, the updated weights.

use std::cmp::Reverse;
use std::ops::Range;

use crate::dist::{GroupError, ProcessGroup, RunningAllReduce};
use deepspec_ops::range;
use tch::Tensor;

/// Most values of a bucket: large enough to hide the fixed cost of a collective, but small compared with the model.
const MAX_BUCKET_VALUES: usize = 8 << 20;
/// Fewest values of a bucket that is reduced early; for smaller buckets the fixed cost of a collective dominates.
const MIN_EARLY_BUCKET_VALUES: usize = 1 << 18;

/// Gradient sums over all ranks, in flat buckets. All ranks reduce the buckets in equal order, no
/// matter when each rank starts its sums.
pub struct GradientBuckets {
    /// Parameter indices of each bucket.
    buckets: Vec<Vec<usize>>,
    /// Number of buckets that are complete after each stage.
    ends: Vec<usize>,
    /// Running all-reduces of the first buckets.
    under_way: Vec<RunningBucket>,
}

struct RunningBucket {
    sum: RunningAllReduce,
    shapes: Vec<Vec<i64>>,
}

impl GradientBuckets {
    /// Buckets for parameters of these names and sizes. A stage is a name prefix: parameters of
    /// early stages come first, parameters without a stage last.
    pub fn new(parameters: &[(&str, usize)], stages: &[String]) -> Self {
        Self::with_buckets(parameters, stages, (MIN_EARLY_BUCKET_VALUES, MAX_BUCKET_VALUES))
    }

    /// Like [`GradientBuckets::new`], with the fewest values of an early bucket and the most values of any
    /// bucket.
    pub(crate) fn with_buckets(
        parameters: &[(&str, usize)],
        stages: &[String],
        (least, most): (usize, usize),
    ) -> Self {
        let stage_of = |name: &str| stages.iter().position(|stage| name.starts_with(stage.as_str()));
        let (mut sums, mut waiting) = (Self { buckets: vec![], ends: vec![], under_way: vec![] }, vec![]);
        for stage in (0..stages.len()).map(Some).chain([None]) {
            waiting.extend((0..parameters.len()).filter(|&index| stage_of(parameters[index].0) == stage));
            let values: usize = waiting.iter().map(|&index: &usize| parameters[index].1).sum();
            // A stage with too few values for a bucket joins the next stage.
            if values >= least || stage.is_none() {
                let buckets = bucket_ranges(waiting.iter().map(|&index| parameters[index].1), most);
                sums.buckets.extend(buckets.into_iter().map(|bucket| waiting[bucket].to_vec()));
                waiting.clear();
            }
            sums.ends.push(sums.buckets.len());
        }
        sums
    }

    /// Whether a bucket is complete before the end of the backward.
    pub fn can_start_early(&self) -> bool {
        self.ends.iter().rev().skip(1).any(|&end| end > 0)
    }

    /// Starts the sums of all buckets that the first `stages` stages complete. `gradient(index)`
    /// returns a parameter's gradient. All gradients have one dtype and device.
    ///
    /// # Errors
    /// Fails if another rank has failed.
    pub fn start(
        &mut self,
        stages: usize,
        group: &ProcessGroup,
        mut gradient: impl FnMut(usize) -> Tensor,
    ) -> Result<(), GroupError> {
        let end = stages.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(0);
        let _range = range(c"collectives");
        while self.under_way.len() < end {
            let tensors: Vec<Tensor> =
                self.buckets[self.under_way.len()].iter().map(|&index| gradient(index)).collect();
            let shapes = tensors.iter().map(Tensor::size).collect();
            let sum = group.start_all_reduce("adding up gradients", flatten_tensors(tensors.iter()))?;
            self.under_way.push(RunningBucket { sum, shapes });
        }
        Ok(())
    }

    /// Starts the remaining sums, waits for all, and returns the sum of each parameter.
    ///
    /// # Errors
    /// Fails if another rank has failed.
    pub fn finish(
        &mut self,
        group: &ProcessGroup,
        gradient: impl FnMut(usize) -> Tensor,
    ) -> Result<Vec<Tensor>, GroupError> {
        self.start(self.ends.len(), group, gradient)?;
        let _range = range(c"collectives");
        let mut sums = vec![];
        for (bucket, RunningBucket { sum, shapes }) in self.buckets.iter().zip(self.under_way.drain(..)) {
            let sum = sum.finish(group)?;
            sums.extend(bucket.iter().copied().zip(split_views(&sum, &shapes)));
        }
        sums.sort_unstable_by_key(|&(index, _)| index);
        Ok(sums.into_iter().map(|(_, sum)| sum).collect())
    }
}

/// Broadcasts each tensor from the rank that owns it, in flat buckets. All tensors have one dtype
/// and device.
///
/// # Errors
/// Fails if another rank has failed.
pub fn broadcast_from_owners(group: &ProcessGroup, owned: &[(usize, &Tensor)]) -> Result<(), GroupError> {
    let _guard = tch::no_grad_guard();
    let _range = range(c"collectives");
    for owner in 0..group.world_size() {
        let tensors: Vec<&Tensor> =
            owned.iter().filter(|(rank, _)| *rank == owner).map(|(_, tensor)| *tensor).collect();
        for bucket in bucket_ranges(tensors.iter().map(|tensor| tensor.numel()), MAX_BUCKET_VALUES) {
            let tensors = &tensors[bucket];
            let mut values = flatten_tensors(tensors.iter().copied());
            group.broadcast("sharing updated weights", &mut values, owner)?;
            if group.rank() != owner {
                let shapes: Vec<Vec<i64>> = tensors.iter().map(|tensor| tensor.size()).collect();
                let views = split_views(&values, &shapes);
                tensors.iter().zip(views).for_each(|(tensor, view)| tensor.shallow_clone().copy_(&view));
            }
        }
    }
    Ok(())
}

/// Assigns parameters of these sizes to `ranks` ranks: largest first, each to the rank with the
/// fewest values. Returns the owner of each.
pub fn assign_owners(sizes: &[usize], ranks: usize) -> Vec<usize> {
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

/// Concatenates contiguous tensors into a flat one; a single tensor is not copied.
fn flatten_tensors<'t>(tensors: impl Iterator<Item = &'t Tensor>) -> Tensor {
    let mut tensors: Vec<Tensor> = tensors.map(|tensor| tensor.detach().view([-1])).collect();
    match (tensors.len(), tensors.pop()) {
        (1, Some(only)) => only,
        (_, last) => {
            tensors.extend(last);
            Tensor::cat(&tensors, 0)
        }
    }
}

/// Views of a flat tensor in these shapes.
fn split_views(flat: &Tensor, shapes: &[Vec<i64>]) -> Vec<Tensor> {
    let mut start = 0;
    let view = |shape: &Vec<i64>| {
        let length = shape.iter().product::<i64>();
        start += length;
        flat.narrow(0, start - length, length).view(shape.as_slice())
    };
    shapes.iter().map(view).collect()
}

/// Groups consecutive tensors into buckets of at most `most` values; a larger tensor gets its own
/// bucket.
fn bucket_ranges(sizes: impl Iterator<Item = usize>, most: usize) -> Vec<Range<usize>> {
    let (mut buckets, mut held): (Vec<Range<usize>>, usize) = (vec![], 0);
    for (index, size) in sizes.enumerate() {
        match buckets.last_mut() {
            Some(bucket) if held + size <= most => {
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
    use std::thread;
    use std::time::Duration;

    use crate::dist::RendezvousServer;
    use deepspec_core::recipe::DistBackend;
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn buckets_keep_order_and_size() {
        let sizes = [MAX_BUCKET_VALUES / 2, MAX_BUCKET_VALUES / 2, 1, MAX_BUCKET_VALUES + 1, 3, 4];
        assert_eq!(bucket_ranges(sizes.into_iter(), MAX_BUCKET_VALUES), [0..2, 2..3, 3..4, 4..6]);
    }

    #[test]
    fn stages_travel_first_and_only_what_is_worth_it() {
        let parameters =
            [("fc", 2), ("layers.0.q", 3), ("layers.10.q", 1), ("layers.1.q", 9), ("layers.1.k", 1)];
        let stages = ["layers.10.", "layers.1.", "layers.0."].map(String::from);
        let sums = |least| GradientBuckets::with_buckets(&parameters, &stages, (least, 9));
        assert_eq!(sums(1).buckets, [vec![2], vec![3], vec![4], vec![1], vec![0]]);
        assert_eq!(sums(1).ends, [1, 3, 4, 5]);
        // The first stage joins the second, the last joins the parameters without a stage.
        assert_eq!(sums(4).buckets, [vec![2], vec![3], vec![4], vec![1, 0]]);
        assert_eq!(sums(4).ends, [0, 3, 3, 4]);
    }

    /// Each rank starts its sums after other stages, one of them only at the end.
    #[test]
    fn sums_do_not_depend_on_when_each_rank_begins() {
        const PATIENCE: Duration = Duration::from_secs(120);
        const RANKS: usize = 3;
        let starts: [&[usize]; RANKS] = [&[1, 2], &[], &[2]];
        let shapes =
            [("fc", [2_i64, 3]), ("layers.0.q", [4, 1]), ("layers.1.q", [1, 5]), ("layers.1.k", [2, 2])];
        let parameters = shapes.map(|(name, shape)| (name, (shape[0] * shape[1]) as usize));
        let stages = ["layers.1.", "layers.0."].map(String::from);
        let gradient = |rank: usize, index: usize| {
            let values = Tensor::arange(parameters[index].1 as i64, (Kind::Float, Device::Cpu));
            (values + (10 * index) as f64).view(shapes[index].1) * (rank + 1) as f64
        };
        let host = RendezvousServer::open(RANKS, PATIENCE).unwrap();
        let places: Vec<_> = (0..RANKS).map(|rank| host.child_env(rank, RANKS)).collect();
        thread::scope(|scope| {
            for (place, starts) in places.iter().zip(starts) {
                let (parameters, stages) = (&parameters, &stages);
                scope.spawn(move || {
                    let group =
                        ProcessGroup::connect(place, Device::Cpu, DistBackend::Auto, PATIENCE).unwrap();
                    let own = |index: usize| gradient(group.rank(), index);
                    let mut sums = GradientBuckets::with_buckets(parameters, stages, (1, 8));
                    // Two steps: the first must leave no state for the second.
                    for _ in 0..2 {
                        starts.iter().for_each(|&stages| sums.start(stages, &group, own).unwrap());
                        let found = sums.finish(&group, own).unwrap();
                        for (index, found) in found.iter().enumerate() {
                            assert_eq!(*found, gradient(0, index) * 6.0, "rank {}", group.rank());
                        }
                        assert_eq!(found.len(), parameters.len());
                    }
                });
            }
        });
    }

    #[test]
    fn shares_are_about_equal() {
        assert_eq!(assign_owners(&[5, 3, 3, 2, 2, 1], 2), [0, 1, 1, 0, 1, 0]);
        assert_eq!(assign_owners(&[1, 2], 1), [0, 0]);
        assert_eq!(assign_owners(&[7], 4), [0]);
    }
}
