//! Backends of the collectives, and connecting GPUs with a timeout.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use deepspec_core::recipe::DistBackend;
use tch::Device;

use crate::dist::GroupError;
use crate::dist::rendezvous::Rendezvous;

/// How often a rank checks for failed ranks while its GPU is being connected.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The backend that transfers tensors of a rank's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommBackend {
    /// Gloo on tensors in host memory.
    Gloo,
    /// Gloo on GPU tensors, each copied through host memory.
    Staged,
    /// NCCL on tensors of this GPU.
    Nccl(usize),
}

impl CommBackend {
    /// Selects the implementation of `backend` for tensors of `device`.
    ///
    /// # Errors
    /// [`GroupError::NoNccl`] if the build has no NCCL; [`GroupError::NcclOnCpu`] for NCCL on the
    /// CPU.
    pub fn new(backend: DistBackend, device: Device) -> Result<Self, GroupError> {
        match (device, backend) {
            (Device::Cuda(_), DistBackend::Gloo) => Ok(Self::Staged),
            (Device::Cuda(index), DistBackend::Auto | DistBackend::Nccl) => {
                require_nccl().map(|()| Self::Nccl(index))
            }
            (_, DistBackend::Auto | DistBackend::Gloo) => Ok(Self::Gloo),
            (_, DistBackend::Nccl) => Err(GroupError::NcclOnCpu),
        }
    }
}

/// Fails if the build lacks NCCL.
fn require_nccl() -> Result<(), GroupError> {
    match deepspec_ops::NCCL_MISSING_REASON {
        "" => Ok(()),
        missing => Err(GroupError::NoNccl(missing.into())),
    }
}

/// Runs `connect` on a separate thread, because `connect` waits for all ranks and cannot be
/// interrupted. Gives up after `timeout` or when another rank has ended. Calls `abandon` if the
/// thread is still running.
///
/// # Errors
/// Returns the error in one line.
pub fn connect_with_timeout<T: Send + 'static>(
    rendezvous: &Rendezvous,
    timeout: Duration,
    connect: impl FnOnce() -> Result<T, String> + Send + 'static,
    abandon: impl FnOnce(),
) -> Result<T, String> {
    let (tell, told) = mpsc::channel();
    let worker = thread::Builder::new().name("connect".into());
    // The receiver no longer exists if the connection is made after the timeout.
    worker.spawn(move || drop(tell.send(connect()))).map_err(|error| error.to_string())?;
    let deadline = Instant::now() + timeout;
    let problem = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match told.recv_timeout(left.min(POLL_INTERVAL)) {
            Ok(connected) => return connected,
            Err(RecvTimeoutError::Disconnected) => return Err("the connecting thread has panicked".into()),
            Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                let waited = timeout.as_secs();
                break format!("not connected within {waited} s; NCCL_DEBUG=INFO shows what it waits for");
            }
            Err(RecvTimeoutError::Timeout) if rendezvous.any_peer_ended() => {
                break "another rank has ended before it was connected".into();
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    };
    abandon();
    Err(problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_its_carrier() {
        assert_eq!(CommBackend::new(DistBackend::Auto, Device::Cpu), Ok(CommBackend::Gloo));
        assert_eq!(CommBackend::new(DistBackend::Gloo, Device::Cpu), Ok(CommBackend::Gloo));
        assert_eq!(CommBackend::new(DistBackend::Nccl, Device::Cpu), Err(GroupError::NcclOnCpu));
        assert_eq!(CommBackend::new(DistBackend::Gloo, Device::Cuda(1)), Ok(CommBackend::Staged));
        for backend in [DistBackend::Auto, DistBackend::Nccl] {
            match CommBackend::new(backend, Device::Cuda(1)) {
                Ok(comm_backend) => assert_eq!(comm_backend, CommBackend::Nccl(1)),
                Err(error) => assert!(error.to_string().contains("train.backend=gloo"), "{error}"),
            }
        }
    }
}
