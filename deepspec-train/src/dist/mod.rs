//! Process groups: the rendezvous of the ranks, the backends, and the errors of failed ranks.

mod carrier;
mod error;
mod group;
mod rendezvous;

pub use carrier::Carrier;
pub use error::GroupError;
pub use group::{ProcessGroup, Sum};
pub use rendezvous::Host;
