//! Process groups: how the processes of a job meet, what carries their tensors, and how one learns that another has failed.

mod carrier;
mod error;
mod group;
mod rendezvous;

pub use carrier::Carrier;
pub use error::GroupError;
pub use group::{ProcessGroup, Sum};
pub use rendezvous::Host;
