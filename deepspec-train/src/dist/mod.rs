//! Process groups: the rendezvous of the ranks, the backends, and the errors of failed ranks.

mod comm_backend;
mod error;
mod group;
mod rendezvous;

pub use comm_backend::CommBackend;
pub use error::GroupError;
pub use group::{ProcessGroup, RunningAllReduce};
pub use rendezvous::RendezvousServer;
