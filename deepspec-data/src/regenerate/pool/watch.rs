//! What goes on beside the requests: servers are given time, looked after and waited for.

use std::sync::Arc;
use std::time::Duration;

use super::circuit::Change;
use super::{Pool, fraction, jittered};

impl Pool {
    /// Does what a change of a server's state asks for.
    pub(super) fn follow(self: &Arc<Self>, index: usize, change: Change) {
        let server = &self.servers[index];
        match change {
            Change::None => {}
            Change::Back => {
                tracing::info!("{} is back", server.url());
                // It takes over what others that are still out were working on.
                let out = self.lock().out();
                out.into_iter().for_each(|out| self.servers[out].recalled.notify_waiters());
            }
            Change::Resume(pause) => {
                let pool = Arc::clone(self);
                tokio::spawn(async move {
                    tokio::time::sleep(pause.mul_f64(1.0 + 0.2 * fraction())).await;
                    pool.lock().resume(index);
                });
            }
            Change::Look(pause) => {
                let problem = self.lock().problem(index).to_string();
                tracing::warn!(
                    "{problem}; asking the other servers and trying it again in {} s",
                    pause.as_secs()
                );
                // Where there is another server, it takes over what this one was working on.
                if self.lock().serving() > 0 {
                    server.recalled.notify_waiters();
                }
                tokio::spawn(Arc::clone(self).look_after(index, pause));
            }
        }
    }

    /// Looks now and then whether a server is back.
    async fn look_after(self: Arc<Self>, index: usize, mut pause: Duration) {
        loop {
            tokio::time::sleep(jittered(pause)).await;
            match self.servers[index].look().await {
                Ok(()) => return self.lock().try_again(index),
                Err(problem) => match self.lock().still_out(index, &problem) {
                    Change::Look(next) => pause = next,
                    _ => return,
                },
            }
        }
    }

    /// Gives up when no server has served for too long.
    pub(super) fn keep_watch(self: &Arc<Self>) {
        let Some(since) = self.lock().watch() else { return };
        let pool = Arc::clone(self);
        tokio::spawn(async move {
            let patience = Duration::from_secs(pool.options.patience);
            let mut pause = patience;
            loop {
                tokio::time::sleep(pause).await;
                let mut admission = pool.lock();
                // Another moment means that some server has served in between.
                if admission.none_serves_since() != Some(since) {
                    return;
                }
                if !admission.may_hope() {
                    let all = admission.problems(&pool.urls());
                    return admission
                        .close(format!("no server has answered for {} s: {all}", patience.as_secs()));
                }
                pause = patience.min(Duration::from_secs(1));
            }
        });
    }
}
