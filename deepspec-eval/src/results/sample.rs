//! Results for tests.

use std::collections::BTreeMap;

use deepspec_datasets::suites::Domain;
use deepspec_engine::{AcceptanceStats, Completion, Cycle, Finish};
use serde_json::json;

use super::{Baseline, Metrics, Results, ScoredSuite, SuiteResult, Timing};
use crate::statistics::{Estimate, PromptCounts};

const TIMING: Timing = Timing { wall_s: 2.0, draft_s: 0.5, verify_s: 1.0, host_s: 0.5, steps: 9 };

/// Results of a suite of blocks of 2, with one cycle per entry of `accepted`.
pub fn suite(name: &str, domain: Domain, accepted: &[u32]) -> ScoredSuite {
    let cycle = |&accepted: &u32| {
        let (proposed, committed, confidence) = (2, accepted + 1, vec![]);
        Cycle { proposed, nodes: 0, until_stop: proposed, accepted, committed, confidence }
    };
    let cycles: Vec<Cycle> = accepted.iter().map(cycle).collect();
    let mut counts = AcceptanceStats::new(2);
    counts.add(&Completion { id: "0".into(), tokens: vec![0; 8], finish: Finish::Stop, cycles });
    let baseline = Some(Baseline::new(4, TIMING));
    let prompt = PromptCounts { committed: counts.committed, cycles: counts.cycles };
    let suite = SuiteResult {
        name: name.into(),
        domain,
        file: String::new(),
        file_digest: String::new(),
        rows: 1,
        skipped: vec![],
        shortened: 0,
        unasked: 0,
        prompt_tokens: 1,
        metrics: Metrics::new(&counts, &TIMING, baseline.as_ref()),
        counts,
        prompts: BTreeMap::new(),
        context_lengths: vec![],
        sweep: vec![],
        timing: TIMING,
        baseline,
    };
    ScoredSuite { suite, length: Estimate::accepted_length(name, [("0", prompt), ("1", prompt)]) }
}

/// Results of two suites.
pub fn results() -> Results {
    let target = json!({"path": "t", "config_digest": "", "weights_digest": "", "tokenizer_digest": "",
        "template_digest": "", "stop_ids": [1]});
    let settings = json!({"seed": 1, "temperature": 1.0, "max_new_tokens": 4, "limit": null, "turns": "first",
        "thinking": false, "system_prompt": null, "schedule": "whole", "confidence_threshold": null, "cost": null, "max_draft_tokens": null, "slots": 1,
        "device": "cpu", "dtype": "float32", "threads": 1});
    let [target, settings] = [target, settings].map(|value| value.to_string());
    let suites = vec![suite("a", Domain::Math, &[2]), suite("b", Domain::Chat, &[1, 0])];
    let settings = serde_json::from_str(&settings).unwrap();
    Results::new(settings, serde_json::from_str(&target).unwrap(), None, suites)
}
