//! The right to ask.

use std::sync::Arc;

use anyhow::anyhow;

use super::super::answer::AskError;
use super::Pool;
use super::admission::{Acquired, Slot};

/// The right to have one request at a server. Dropping it gives the slot to the next in line.
pub struct Permit {
    pool: Arc<Pool>,
    taken: Slot,
}

impl Permit {
    /// Waits for a slot, at `home` if it has one free, at `avoid` only if no other server serves.
    pub async fn take(pool: &Arc<Pool>, home: Option<usize>, avoid: Option<usize>) -> Result<Self, AskError> {
        let turn = pool.lock().take(home, avoid);
        let taken = match turn.map_err(|problem| AskError::Run(anyhow!(problem)))? {
            Acquired::Now(taken) => taken,
            Acquired::Later(turn) => turn.await.map_err(|_| {
                let problem = pool.lock().closed().unwrap_or("the run has ended").to_string();
                AskError::Run(anyhow!(problem))
            })?,
        };
        Ok(Self { pool: Arc::clone(pool), taken })
    }

    /// The server's number.
    pub fn server(&self) -> usize {
        self.taken.server
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.pool.lock().release(self.taken);
    }
}
