//! The exact law of short outputs of the toy target, and requests whose outputs are compared with it.

use std::collections::BTreeMap;

use deepspec_engine::{DraftSampling, EngineOptions, Request, Sampling, SamplingBatch, VerifyRule};
use tch::Device;

use super::{PROMPT, V, extended, logits_of, prompt_prefix, target_logits};

/// The number of tokens whose joint distribution is checked: at most V³ outcomes.
pub const LENGTH: usize = 3;

pub fn options(slots: usize) -> EngineOptions {
    EngineOptions {
        slots,
        context: 64,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
        counts_overrun: true,
    }
}

pub fn requests(count: usize, sampling: Sampling, max_new_tokens: usize, stop_ids: &[i64]) -> Vec<Request> {
    let request = |i: usize| Request {
        id: format!("sample-{i}"),
        prompt: PROMPT.to_vec(),
        sampling,
        max_new_tokens,
        stop_ids: stop_ids.to_vec(),
    };
    (0..count).map(request).collect()
}

/// The probability of every output of up to [`LENGTH`] tokens under the target alone.
pub fn exact_law(sampling: Sampling, stop_ids: &[i64]) -> BTreeMap<Vec<i64>, f64> {
    let mut law = BTreeMap::new();
    let mut open = vec![(vec![], prompt_prefix(), 1.0)];
    while let Some((output, prefix, probability)) = open.pop() {
        if output.len() == LENGTH || output.last().is_some_and(|token| stop_ids.contains(token)) {
            law.insert(output, probability);
            continue;
        }
        let logits = logits_of([prefix].into_iter(), target_logits);
        let step = SamplingBatch::new(vec![sampling], Device::Cpu).distributions(&logits).squeeze();
        for token in 0..V {
            let longer = output.iter().copied().chain([token]).collect();
            open.push((longer, extended(prefix, token), probability * step.double_value(&[token])));
        }
    }
    law
}

pub fn samples() -> usize {
    if std::env::var_os("DEEPSPEC_TEST_FULL").is_some() { 400_000 } else { 20_000 }
}
