//! Signals that ask for a stop: SIGTERM and SIGUSR1.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use signal_hook::consts::{SIGTERM, SIGUSR1};
use signal_hook::flag;

/// Returns a flag that SIGTERM or SIGUSR1 sets. A second SIGTERM ends the process at once. A second
/// SIGUSR1 does not: the launcher may send one and the job scheduler another.
///
/// # Errors
/// Fails if a handler cannot be registered.
pub fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let (stop, terminated) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let registering = "registering a signal handler";
    flag::register_conditional_shutdown(SIGTERM, 1, Arc::clone(&terminated)).context(registering)?;
    flag::register(SIGTERM, terminated).context(registering)?;
    for signal in [SIGTERM, SIGUSR1] {
        flag::register(signal, Arc::clone(&stop)).context(registering)?;
    }
    Ok(stop)
}
