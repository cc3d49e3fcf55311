//! The process group of a job, as in torch.distributed: all ranks call the collectives in the same
//! order.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use deepspec_core::env::DistributedEnv;
use deepspec_core::recipe::DistBackend;
use tch::{Device, Kind, Tensor};

use crate::dist::GroupError;
use crate::dist::comm_backend::{CommBackend, connect_with_timeout};
use crate::dist::rendezvous::{PeerStatus, Rendezvous, first_error_line};
use deepspec_ops::c10d;

/// The process group of a job. All ranks call the same operations in the same order. An operation
/// fails if a rank has failed, is gone, or exceeds the timeout.
pub struct ProcessGroup {
    rank: usize,
    world_size: usize,
    /// `None` for a single process.
    link: Option<Connection>,
}

struct Connection {
    // Dropped before the rendezvous that created it.
    group: c10d::Group,
    rendezvous: Rendezvous,
    timeout: Duration,
    /// Whether GPU tensors are copied through host memory.
    is_staged: bool,
}

impl ProcessGroup {
    /// A group of one process, whose operations do nothing.
    pub fn single_process() -> Self {
        Self { rank: 0, world_size: 1, link: None }
    }

    /// Connects to all other ranks; collectives then accept tensors of `device` and of the CPU. A
    /// GPU first becomes the current device of the calling thread.
    ///
    /// # Errors
    /// Fails if ranks are missing after `timeout`, or if the build lacks the backend. Each later
    /// operation has this timeout too, including the exchange of error messages.
    pub fn connect(
        ranks: &DistributedEnv,
        device: Device,
        backend: DistBackend,
        timeout: Duration,
    ) -> Result<Self, GroupError> {
        let (rank, world_size) = (ranks.rank, ranks.world_size);
        let comm_backend = CommBackend::new(backend, device)?;
        if let Device::Cuda(index) = device {
            c10d::set_device(index).map_err(|problem| GroupError::Collective {
                rank,
                operation: "taking its GPU",
                problem: first_error_line(&problem),
            })?;
        }
        let rendezvous = Rendezvous::open(ranks, timeout)?;
        let member = c10d::GroupMember { rank, world_size, timeout: rendezvous.collective_timeout() };
        let group = match c10d::Group::open(&rendezvous.store, &rendezvous.reachable_address(), member) {
            Ok(group) => group,
            Err(problem) => return Err(diagnose_failure(rank, &rendezvous, timeout, "connecting", &problem)),
        };
        let link = Connection { group, rendezvous, timeout, is_staged: comm_backend == CommBackend::Staged };
        let mut group = Self { rank, world_size, link: Some(link) };
        if let CommBackend::Nccl(device) = comm_backend {
            let open = move |store: c10d::Store| c10d::Nccl::open(&store, member, device);
            let nccl = group.connect_gpus(member.timeout, open, deepspec_ops::skip_exit_cleanup)?;
            if let (Some(link), Some(nccl)) = (&mut group.link, nccl) {
                link.group.use_nccl(nccl);
            }
        }
        Ok(group)
    }

    /// Runs `open` once all ranks are connected; `open` blocks until all ranks have called it.
    /// Gives up after `timeout`, or as soon as a rank fails. Calls `abandon` if `open` is still
    /// running.
    fn connect_gpus<T: Send + 'static>(
        &self,
        timeout: Duration,
        open: impl FnOnce(c10d::Store) -> Result<T, String> + Send + 'static,
        abandon: impl FnOnce(),
    ) -> Result<Option<T>, GroupError> {
        self.barrier("meeting before the GPUs are connected")?;
        let Some(link) = &self.link else { return Ok(None) };
        let own_failure = Arc::new(OnceLock::new());
        let noted = Arc::clone(&own_failure);
        let open = move |store| open(store).inspect_err(|problem| drop(noted.set(problem.clone())));
        let store = link.rendezvous.store.clone_connection();
        let opened =
            store.and_then(|store| connect_with_timeout(&link.rendezvous, timeout, || open(store), abandon));
        opened.map(Some).map_err(|problem| {
            let (rank, operation) = (self.rank, "connecting the GPUs");
            if let Some(problem) = own_failure.get().map(|problem| first_error_line(problem)) {
                link.rendezvous.fail(&problem);
                return GroupError::Collective { rank, operation, problem };
            }
            // The rank ends now, whether the abort works or not.
            let _ = link.group.abort();
            diagnose_failure(rank, &link.rendezvous, link.timeout, operation, &problem)
        })
    }

    /// Rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of processes.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Whether this is rank 0, which writes files and prints messages.
    pub fn is_leader(&self) -> bool {
        self.rank == 0
    }

    /// Sums a contiguous tensor over all ranks, in place. All ranks get the same bits.
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn all_reduce(&self, operation: &'static str, tensor: &mut Tensor) -> Result<(), GroupError> {
        self.run_collective(operation, |link| match link.copies_through_host(tensor) {
            false => link.group.all_reduce(tensor),
            true => {
                let mut host = tensor.detach().to_device(Device::Cpu);
                link.group.all_reduce(&mut host)?;
                tensor.detach().copy_(&host);
                Ok(())
            }
        })
    }

    /// Whether [`Self::start_all_reduce`] returns before the sum is done. For GPU tensors that are
    /// copied through host memory, it waits for the sum.
    pub fn is_async(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.is_staged)
    }

    /// Starts to sum a contiguous tensor over all ranks, in place unless it is copied through host
    /// memory. [`RunningAllReduce::finish`] returns the result.
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn start_all_reduce(
        &self,
        operation: &'static str,
        mut tensor: Tensor,
    ) -> Result<RunningAllReduce, GroupError> {
        let state = match &self.link {
            None => AllReduceState::Done(tensor),
            Some(link) if link.copies_through_host(&tensor) => {
                self.all_reduce(operation, &mut tensor)?;
                AllReduceState::Done(tensor)
            }
            Some(link) => {
                let sum = link.group.start_all_reduce(tensor);
                AllReduceState::Pending(sum.map_err(|problem| self.abort_with_error(operation, &problem))?)
            }
        };
        Ok(RunningAllReduce { operation, state })
    }

    /// Copies a contiguous tensor of rank `root` to all ranks, in place.
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn broadcast(
        &self,
        operation: &'static str,
        tensor: &mut Tensor,
        root: usize,
    ) -> Result<(), GroupError> {
        self.run_collective(operation, |link| match link.copies_through_host(tensor) {
            false => link.group.broadcast(tensor, root),
            true if self.rank == root => {
                link.group.broadcast(&mut tensor.detach().to_device(Device::Cpu), root)
            }
            true => {
                let mut host = Tensor::empty(tensor.size(), (tensor.kind(), Device::Cpu));
                link.group.broadcast(&mut host, root)?;
                tensor.detach().copy_(&host);
                Ok(())
            }
        })
    }

    /// Returns the bytes of all ranks, in rank order.
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn all_gather(&self, operation: &'static str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        if self.link.is_none() {
            return Ok(vec![bytes.to_vec()]);
        }
        let ranks = self.world_size as i64;
        let mut lengths = Tensor::zeros([ranks, 1], (Kind::Int64, Device::Cpu));
        let length = Tensor::from_slice(&[bytes.len() as i64]);
        self.run_collective(operation, |link| link.group.all_gather(&mut lengths, &length))?;
        let longest = lengths.max().int64_value(&[]).max(1);
        let mut padded = bytes.to_vec();
        padded.resize(longest as usize, 0);
        let mut rows = Tensor::zeros([ranks, longest], (Kind::Uint8, Device::Cpu));
        let padded = Tensor::from_slice(&padded);
        self.run_collective(operation, |link| link.group.all_gather(&mut rows, &padded))?;
        let row = |rank: i64| {
            let length = lengths.int64_value(&[rank, 0]) as usize;
            let mut bytes = vec![0; length];
            rows.get(rank).copy_data(&mut bytes, length);
            bytes
        };
        Ok((0..ranks).map(row).collect())
    }

    /// Returns whether `yes` is true on any rank.
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn any(&self, operation: &'static str, yes: bool) -> Result<bool, GroupError> {
        let mut count = Tensor::from_slice(&[i64::from(yes)]);
        self.all_reduce(operation, &mut count)?;
        Ok(count.int64_value(&[0]) > 0)
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn barrier(&self, operation: &'static str) -> Result<(), GroupError> {
        self.any(operation, false).map(drop)
    }

    /// Sends the error that ends this rank to the other ranks.
    pub fn fail(&self, cause: &str) {
        if let Some(link) = &self.link {
            link.rendezvous.fail(cause);
        }
    }

    fn run_collective(
        &self,
        operation: &'static str,
        work: impl FnOnce(&Connection) -> Result<(), String>,
    ) -> Result<(), GroupError> {
        let Some(link) = &self.link else { return Ok(()) };
        work(link).map_err(|problem| self.abort_with_error(operation, &problem))
    }

    /// Aborts all connections after a collective has failed, and returns the error.
    fn abort_with_error(&self, operation: &'static str, problem: &str) -> GroupError {
        let Some(link) = &self.link else {
            return GroupError::Collective { rank: self.rank, operation, problem: first_error_line(problem) };
        };
        // The rank ends now, whether the abort works or not.
        let _ = link.group.abort();
        diagnose_failure(self.rank, &link.rendezvous, link.timeout, operation, problem)
    }
}

/// A sum over all ranks that may still be running.
pub struct RunningAllReduce {
    operation: &'static str,
    state: AllReduceState,
}

enum AllReduceState {
    Done(Tensor),
    Pending(c10d::PendingAllReduce),
}

impl RunningAllReduce {
    /// Waits for the sum; `group` must be the group that started it. All ranks get the same bits.
    ///
    /// # Errors
    /// See [`ProcessGroup`].
    pub fn finish(self, group: &ProcessGroup) -> Result<Tensor, GroupError> {
        match self.state {
            AllReduceState::Done(tensor) => Ok(tensor),
            AllReduceState::Pending(sum) => match &group.link {
                Some(link) => {
                    link.group.finish(sum).map_err(|problem| group.abort_with_error(self.operation, &problem))
                }
                None => Err(group.abort_with_error(self.operation, "it is another group's")),
            },
        }
    }
}

impl Connection {
    /// Whether a tensor is copied through host memory.
    fn copies_through_host(&self, tensor: &Tensor) -> bool {
        self.is_staged && tensor.device() != Device::Cpu
    }
}

/// Finds out why a collective failed.
fn diagnose_failure(
    rank: usize,
    rendezvous: &Rendezvous,
    timeout: Duration,
    operation: &'static str,
    problem: &str,
) -> GroupError {
    let problem = first_error_line(problem);
    match rendezvous.query_peers() {
        PeerStatus::Failed(peer, cause) => GroupError::Peer { rank, operation, peer, cause },
        PeerStatus::Silent(silent) => GroupError::Silent { rank, operation, timeout, silent, problem },
        PeerStatus::Alive => GroupError::Collective { rank, operation, problem },
    }
}

#[cfg(test)]
mod tests;
