//! Background tasks of a pool: pauses, probes, and the timeout when no server answers.

use std::sync::Arc;
use std::time::Duration;

use super::server_state::{CircuitState, StateChange, exponential_backoff};
use super::{Pool, Server};

/// Interval between checks of servers.
const TICK: Duration = Duration::from_millis(250);

impl Pool {
    /// Acts on a change of a server's state.
    pub(super) fn apply_change(self: &Arc<Self>, server: &Arc<Server>, change: StateChange) {
        match change {
            StateChange::None => return,
            StateChange::Back => {
                tracing::info!("{} is back", server.url());
                // Requests in progress at servers with an open circuit move to this one.
                self.servers
                    .iter()
                    .filter(|server| server.is_circuit_open())
                    .for_each(|out| out.cancelled.notify_waiters());
            }
            StateChange::Resume(pause) => {
                let (pool, server) = (Arc::clone(self), Arc::clone(server));
                tokio::spawn(async move {
                    tokio::time::sleep(pause).await;
                    server.state.resume();
                    pool.notify_change();
                });
            }
            StateChange::Look => {
                tracing::warn!("{}; asking the other servers and trying it again", server.state.problem());
                // If another server gets requests, the requests in progress at this server move to
                // it.
                if self.serving_count() > 0 {
                    server.cancelled.notify_waiters();
                }
                tokio::spawn(Arc::clone(self).probe_until_up(Arc::clone(server)));
            }
        }
        self.notify_change();
    }

    /// Probes a server until it responds.
    async fn probe_until_up(self: Arc<Self>, server: Arc<Server>) {
        let mut ticks = exponential_backoff((TICK, TICK));
        while server.is_circuit_open() {
            tokio::time::sleep(ticks.next().unwrap_or(TICK)).await;
            if server.state.is_due() && server.state.record_probe(server.probe().await) {
                return self.notify_change();
            }
        }
    }

    /// Closes the pool if no server has answered for too long.
    pub(super) async fn watch_servers(self: Arc<Self>) {
        let patience = Duration::from_secs(self.options.server_wait);
        let mut changes = self.changes.subscribe();
        let answered = || self.servers.iter().map(|server| server.state.stats().answered).sum::<u64>();
        // Requests in progress, a pause or a trial may still bring an answer.
        let may_hope = |server: &Arc<Server>| {
            let circuit = server.state.circuit();
            server.state.in_flight() > 0 || matches!(circuit, CircuitState::Paused | CircuitState::HalfOpen)
        };
        while changes.wait_for(|()| self.serving_count() == 0).await.is_ok() {
            let (before, mut pause) = (answered(), patience);
            while tokio::time::timeout(pause, changes.wait_for(|()| self.serving_count() > 0)).await.is_err()
            {
                if answered() > before {
                    break;
                }
                if !self.servers.iter().any(may_hope) {
                    let all = self.last_failures();
                    return self.close(format!("no server has answered for {} s: {all}", patience.as_secs()));
                }
                pause = TICK;
            }
        }
    }
}
