//! Background tasks of a pool: pauses, probes, and the timeout when no server answers.

use std::sync::Arc;
use std::time::Duration;

use super::server_state::{Change, CircuitState, doubling};
use super::{Pool, Server};

/// Interval between checks of servers.
const TICK: Duration = Duration::from_millis(250);

impl Pool {
    /// Acts on a change of a server's state.
    pub(super) fn follow(self: &Arc<Self>, server: &Arc<Server>, change: Change) {
        match change {
            Change::None => return,
            Change::Back => {
                tracing::info!("{} is back", server.url());
                // Requests in progress at servers with an open circuit move to this one.
                self.servers
                    .iter()
                    .filter(|server| server.is_out())
                    .for_each(|out| out.cancelled.notify_waiters());
            }
            Change::Resume(pause) => {
                let (pool, server) = (Arc::clone(self), Arc::clone(server));
                tokio::spawn(async move {
                    tokio::time::sleep(pause).await;
                    server.state.resume();
                    pool.changed();
                });
            }
            Change::Look => {
                tracing::warn!("{}; asking the other servers and trying it again", server.state.problem());
                // If another server gets requests, the ones in progress here move there.
                if self.serving() > 0 {
                    server.cancelled.notify_waiters();
                }
                tokio::spawn(Arc::clone(self).look_after(Arc::clone(server)));
            }
        }
        self.changed();
    }

    /// Probes a server until it responds.
    async fn look_after(self: Arc<Self>, server: Arc<Server>) {
        let mut ticks = doubling((TICK, TICK));
        while server.is_out() {
            tokio::time::sleep(ticks.next().unwrap_or(TICK)).await;
            if server.state.is_due() && server.state.looked(server.look().await) {
                return self.changed();
            }
        }
    }

    /// Closes the pool if no server has answered for too long.
    pub(super) async fn keep_watch(self: Arc<Self>) {
        let patience = Duration::from_secs(self.options.server_wait);
        let mut changes = self.changes.subscribe();
        let answered = || self.servers.iter().map(|server| server.state.stats().answered).sum::<u64>();
        // Requests in progress, a pause or a trial may still bring an answer.
        let may_hope = |server: &Arc<Server>| {
            let circuit = server.state.circuit();
            server.state.in_flight() > 0 || matches!(circuit, CircuitState::Paused | CircuitState::HalfOpen)
        };
        while changes.wait_for(|()| self.serving() == 0).await.is_ok() {
            let (before, mut pause) = (answered(), patience);
            while tokio::time::timeout(pause, changes.wait_for(|()| self.serving() > 0)).await.is_err() {
                if answered() > before {
                    break;
                }
                if !self.servers.iter().any(may_hope) {
                    let all = self.problems();
                    return self.close(format!("no server has answered for {} s: {all}", patience.as_secs()));
                }
                pause = TICK;
            }
        }
    }
}
