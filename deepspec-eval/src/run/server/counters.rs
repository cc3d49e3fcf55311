//! Counters of `/metrics`, for engines whose answers have no figures.

use anyhow::bail;
use deepspec_checkpoint::Engine;

use super::engine::{Server, start_command};
use super::figures::AcceptanceCounts;
use crate::watch::MetricsPage;

/// Counters of speculation since the engine's start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counters {
    cycles: f64,
    drafted: f64,
    accepted: f64,
    accepted_at: Vec<f64>,
    /// Number of generated tokens of all requests.
    pub generated: f64,
}

impl Counters {
    /// Reads the server's counters; None if it does not count its cycles, or has no cycle yet.
    ///
    /// # Errors
    /// Fails if the server cannot be reached.
    pub async fn read(server: &Server) -> anyhow::Result<Option<Self>> {
        let Some(text) = server.client.get("/metrics").await? else { return Ok(None) };
        match MetricsPage::parse(&text) {
            Ok(page) => Ok(Self::from_page(page).filter(|counters| counters.cycles > 0.0)),
            Err(problem) => bail!("{}: /metrics is no page of counters: {problem}", server.client.name()),
        }
    }

    fn from_page(page: MetricsPage) -> Option<Self> {
        let generated = page.generated.unwrap_or(0.0);
        Some(Self {
            cycles: page.drafts.or(page.verifications)?,
            drafted: page.draft_tokens.unwrap_or(0.0),
            accepted: page.accepted.unwrap_or(0.0),
            accepted_at: page.accepted_at,
            generated,
        })
    }

    /// Counts since `before`.
    ///
    /// # Errors
    /// A phrase, if the counters cannot have grown so.
    pub fn since(&self, before: &Self) -> Result<AcceptanceCounts, String> {
        let grown = |now: f64, before: f64| (now - before).max(0.0).round() as u64;
        if self.cycles < before.cycles {
            return Err("the counters of /metrics went back, as after a restart; start this run again".into());
        }
        let at = |k: usize| before.accepted_at.get(k).copied().unwrap_or(0.0);
        let accepted_at = self.accepted_at.iter().enumerate().map(|(k, now)| grown(*now, at(k)));
        let totals = AcceptanceCounts {
            cycles: grown(self.cycles, before.cycles),
            drafted: grown(self.drafted, before.drafted),
            accepted: grown(self.accepted, before.accepted),
            accepted_at: accepted_at.collect(),
        };
        totals.checked()
    }
}

/// How to start the engine so that it reports figures of every answer.
pub fn per_request_hint(engine: Engine) -> String {
    match engine {
        Engine::Vllm => format!("vLLM 0.29 and later report them when started by {}", start_command(engine)),
        Engine::Sglang | Engine::LlamaCpp => format!("start the engine by {}", start_command(engine)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_differences() {
        let page = |cycles: u64, at: [u64; 2]| {
            let text = format!(
                "# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total {cycles}\n\
                 # TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter\n\
                 vllm:spec_decode_num_accepted_tokens_per_pos_total{{position=\"0\"}} {}\n\
                 vllm:spec_decode_num_accepted_tokens_per_pos_total{{position=\"1\"}} {}\n\
                 # TYPE vllm:spec_decode_num_accepted_tokens_total counter\n\
                 vllm:spec_decode_num_accepted_tokens_total {}\n",
                at[0],
                at[1],
                at[0] + at[1]
            );
            Counters::from_page(MetricsPage::parse(&text).unwrap()).unwrap()
        };
        let (before, after) = (page(10, [8, 3]), page(14, [11, 4]));
        let totals = AcceptanceCounts { cycles: 4, drafted: 0, accepted: 4, accepted_at: vec![3, 1] };
        assert_eq!(after.since(&before), Ok(totals));
        assert!(before.since(&after).unwrap_err().contains("went back"));
        assert_eq!(Counters::from_page(MetricsPage::parse("").unwrap()), None);
    }
}
