//! Parses the metrics page of an engine, with one set of names for all engines.

use std::collections::BTreeMap;

use prometheus_parse::{Scrape, Value};

/// An engine's metrics of speculation and load at one time. Counters count from the start of the
/// engine.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MetricsPage {
    /// Number of verified blocks.
    pub drafts: Option<f64>,
    /// Number of drafted tokens that were verified.
    pub draft_tokens: Option<f64>,
    /// Number of drafted tokens that were accepted.
    pub accepted: Option<f64>,
    /// Accepted drafted tokens by position; empty if the engine does not count them so.
    pub accepted_at: Vec<f64>,
    /// Number of generated tokens.
    pub generated: Option<f64>,
    /// Number of verifications, if the engine does not count blocks (SGLang).
    pub verifications: Option<f64>,
    /// τ as the engine reports it, without counters.
    pub accepted_length: Option<f64>,
    /// Accepted share of drafted tokens as the engine reports it, without counters.
    pub accept_rate: Option<f64>,
    /// Number of running requests.
    pub running: Option<f64>,
    /// Number of waiting requests.
    pub waiting: Option<f64>,
}

/// Name of the counter of accepted tokens by position.
const PER_POSITION: &str = "spec_decode_num_accepted_tokens_per_pos";
/// Labels of processes that all report the same values.
const REPLICA_LABELS: [&str; 4] = ["tp_rank", "pp_rank", "moe_ep_rank", "engine_type"];

impl MetricsPage {
    /// Reads a page of vLLM, SGLang, llama.cpp or `deepspec-data serve`. Values of data-parallel
    /// engines are summed.
    ///
    /// # Errors
    /// Fails if the text is not a metrics page.
    pub fn parse(text: &str) -> Result<Self, String> {
        let scrape = Scrape::parse(text.lines().map(|line| Ok(replace_colon(line))))
            .map_err(|error| error.to_string())?;
        // Values by metric name without the engine's prefix, then by the labels that distinguish
        // engines.
        let mut values: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
        let mut positions: BTreeMap<usize, f64> = BTreeMap::new();
        for sample in scrape.samples {
            let value = match sample.value {
                Value::Counter(value) | Value::Gauge(value) | Value::Untyped(value) => value,
                Value::Histogram(_) | Value::Summary(_) => continue,
            };
            // SGLang's drafter has separate series.
            if sample.labels.get("engine_type") == Some("draft") {
                continue;
            }
            let name =
                sample.metric.split_once(COLON_SUBSTITUTE).map_or(sample.metric.as_str(), |(_, name)| name);
            let position = sample.labels.get("position").and_then(|position| position.parse().ok());
            if let Some(position) = position.filter(|_| name.starts_with(PER_POSITION)) {
                *positions.entry(position).or_default() += value;
            }
            let mut labels: Vec<String> = sample
                .labels
                .iter()
                .filter(|(label, _)| !REPLICA_LABELS.contains(&label.as_str()))
                .map(|(label, value)| format!("{label}={value}"))
                .collect();
            labels.sort();
            let of = values.entry(name.trim_end_matches("_total").to_string()).or_default();
            let place = of.entry(labels.join(",")).or_insert(value);
            *place = place.max(value);
        }
        let sum =
            |names: &[&str]| names.iter().find_map(|name| Some(values.get(*name)?.values().sum::<f64>()));
        let mean = |name: &str| values.get(name).map(|of| of.values().sum::<f64>() / of.len() as f64);
        Ok(Self {
            drafts: sum(&["spec_decode_num_drafts"]),
            draft_tokens: sum(&["spec_decode_num_draft_tokens"]),
            accepted: sum(&["spec_decode_num_accepted_tokens"]),
            accepted_at: positions.into_values().collect(),
            generated: sum(&["generation_tokens", "tokens_predicted"]),
            verifications: sum(&["spec_verify_calls"]),
            accepted_length: mean("spec_accept_length"),
            accept_rate: mean("spec_accept_rate"),
            running: sum(&["num_requests_running", "num_running_reqs", "requests_processing"]),
            waiting: sum(&["num_requests_waiting", "num_queue_reqs", "requests_deferred"]),
        })
    }
}

/// Text that replaces the colon in metric names such as `vllm:num_requests_running`, because the
/// parser rejects colons.
const COLON_SUBSTITUTE: &str = "__";

fn replace_colon(line: &str) -> String {
    match (line.find(':'), line.find('{')) {
        (Some(colon), Some(brace)) if brace < colon => line.into(),
        _ => line.replacen(':', COLON_SUBSTITUTE, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VLLM: &str = r#"# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1.234567e+06
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 3.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 70.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 21.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="m"} 1.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 1.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 1.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.02
"#;
    const SGLANG: &str = r#"# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="q",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.8
sglang:spec_accept_length{engine_type="unified",model_name="q",moe_ep_rank="0",pp_rank="0",tp_rank="1"} 2.8
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{engine_type="unified",model_name="q"} 50.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="q"} 900.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="q"} 100.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="q",tp_rank="0"} 4
sglang:num_running_reqs{engine_type="draft",model_name="q",tp_rank="0"} 9
"#;
    const LLAMA: &str = "# HELP llamacpp:spec_decode_num_drafts_total Speculative: Total speculative decoding verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 100
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 1.23457e+06
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 7
";

    #[test]
    fn every_engine_says_the_same_in_its_own_words() {
        let page = MetricsPage::parse(VLLM).unwrap();
        assert_eq!(
            (page.drafts, page.draft_tokens, page.accepted),
            (Some(1_234_570.0), Some(70.0), Some(21.0))
        );
        assert_eq!(page.accepted_at, [9.0]);
        assert_eq!((page.running, page.waiting, page.verifications), (Some(5.0), Some(0.0), None));
        let page = MetricsPage::parse(SGLANG).unwrap();
        assert_eq!(
            (page.accepted_length, page.verifications, page.generated),
            (Some(2.8), Some(50.0), Some(1000.0))
        );
        assert_eq!((page.running, page.drafts), (Some(4.0), None));
        let page = MetricsPage::parse(LLAMA).unwrap();
        assert_eq!((page.drafts, page.generated), (Some(100.0), Some(1_234_570.0)));
        assert_eq!((page.running, page.waiting), (Some(1.0), Some(7.0)));
        assert_eq!(MetricsPage::parse("").unwrap(), MetricsPage::default());
    }
}
