//! Prometheus metrics of the engine. Counters of speculative decoding have the names that vLLM and
//! llama.cpp share, with a prefix of this server.

use std::time::Duration;

use deepspec_engine::AcceptanceStats;
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder,
};

/// Upper bounds of histogram buckets in seconds: from a millisecond to about nine minutes, each
/// twice the previous bound.
fn latency_buckets() -> Vec<f64> {
    (0..20).map(|power| 0.001 * f64::from(1u32 << power)).collect()
}

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    drafts: IntCounter,
    draft_tokens: IntCounter,
    accepted_tokens: IntCounter,
    accepted_at: IntCounterVec,
    cycles: IntCounter,
    wasted: Gauge,
    budget: Gauge,
    running: IntGauge,
    waiting: IntGauge,
    occupancy: Gauge,
    /// Tokens generated in answers.
    pub generated: IntCounter,
    /// Tokens of prompts.
    pub prompts: IntCounter,
    first_token: Histogram,
    between_tokens: Histogram,
    queue: Histogram,
    slots: usize,
}

impl Metrics {
    /// Metrics with zero counts, for an engine with `slots` slots.
    ///
    /// # Errors
    /// Fails if a name is registered twice.
    pub fn new(slots: usize) -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str| -> Result<IntCounter, prometheus::Error> {
            let counter = IntCounter::with_opts(Opts::new(format!("deepspec:{name}_total"), help))?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let gauge = |name: &str, help: &str| -> Result<Gauge, prometheus::Error> {
            let gauge = Gauge::with_opts(Opts::new(format!("deepspec:{name}"), help))?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let whole = |name: &str, help: &str| -> Result<IntGauge, prometheus::Error> {
            let gauge = IntGauge::with_opts(Opts::new(format!("deepspec:{name}"), help))?;
            registry.register(Box::new(gauge.clone()))?;
            Ok(gauge)
        };
        let histogram = |name: &str, help: &str| -> Result<Histogram, prometheus::Error> {
            let options =
                HistogramOpts::new(format!("deepspec:{name}_seconds"), help).buckets(latency_buckets());
            let histogram = Histogram::with_opts(options)?;
            registry.register(Box::new(histogram.clone()))?;
            Ok(histogram)
        };
        let accepted_at = IntCounterVec::new(
            Opts::new(
                "deepspec:spec_decode_num_accepted_tokens_per_pos_total",
                "Drafted tokens that were accepted, by position in the block from 0.",
            ),
            &["position"],
        )?;
        registry.register(Box::new(accepted_at.clone()))?;
        Ok(Self {
            drafts: counter("spec_decode_num_drafts", "Blocks of which tokens were verified.")?,
            draft_tokens: counter("spec_decode_num_draft_tokens", "Drafted tokens that were verified.")?,
            accepted_tokens: counter(
                "spec_decode_num_accepted_tokens",
                "Drafted tokens that were accepted.",
            )?,
            accepted_at,
            cycles: counter("decode_cycles", "Steps of sequences, whether anything was drafted or not.")?,
            wasted: gauge(
                "spec_decode_wasted_fraction",
                "Share of verified drafts that were rejected, since the start.",
            )?,
            budget: gauge(
                "verify_budget_per_request",
                "Drafted tokens verified per sequence in the last step.",
            )?,
            running: whole("num_requests_running", "Sequences that hold a slot.")?,
            waiting: whole("num_requests_waiting", "Sequences that wait for a slot.")?,
            occupancy: gauge("occupancy", "Share of slots that are held.")?,
            generated: counter("generation_tokens", "Tokens of answers.")?,
            prompts: counter("prompt_tokens", "Tokens of prompts.")?,
            first_token: histogram("time_to_first_token", "From a request's arrival to its first token.")?,
            between_tokens: histogram(
                "inter_token_latency",
                "Time of a step over the tokens that it committed, once for each of them.",
            )?,
            queue: histogram("request_queue_time", "From a request's arrival to its slot.")?,
            slots,
            registry,
        })
    }

    /// Adds the decoding counts between two reads of the engine's statistics to the counters.
    pub fn add_decoding_counts(&self, before: &AcceptanceStats, now: &AcceptanceStats) {
        let drafts = |tally: &AcceptanceStats| tally.proposed_at.first().copied().unwrap_or(0);
        let (cycles, proposed) = (now.cycles - before.cycles, now.proposed - before.proposed);
        self.cycles.inc_by(cycles);
        self.drafts.inc_by(drafts(now) - drafts(before));
        self.draft_tokens.inc_by(proposed);
        self.accepted_tokens.inc_by(now.accepted - before.accepted);
        for (position, accepted) in now.accepted_at.iter().enumerate() {
            let more = accepted - before.accepted_at.get(position).copied().unwrap_or(0);
            self.accepted_at.with_label_values(&[&position.to_string()]).inc_by(more);
        }
        if now.proposed > 0 {
            self.wasted.set((now.proposed - now.accepted) as f64 / now.proposed as f64);
        }
        if cycles > 0 {
            self.budget.set(proposed as f64 / cycles as f64);
        }
    }

    /// Sets the numbers of running and waiting requests.
    pub fn set_load(&self, running: usize, waiting: usize) {
        self.running.set(running as i64);
        self.waiting.set(waiting as i64);
        self.occupancy.set(running as f64 / self.slots.max(1) as f64);
    }

    /// Records the waiting time of a request that got its slot.
    pub fn record_wait(&self, wait: Duration) {
        self.queue.observe(wait.as_secs_f64());
    }

    /// Records the time to a request's first token.
    pub fn record_first_token(&self, since: Duration) {
        self.first_token.observe(since.as_secs_f64());
    }

    /// Records `tokens` tokens that arrived together after a pause.
    pub fn record_token_latency(&self, pause: Duration, tokens: usize) {
        (0..tokens).for_each(|_| self.between_tokens.observe(pause.as_secs_f64() / tokens as f64));
    }

    /// Renders the metrics page.
    ///
    /// # Errors
    /// Fails if the page cannot be encoded.
    pub fn render_page(&self) -> Result<String, prometheus::Error> {
        let mut text = vec![];
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}
