//! Settings and inputs that make results incomparable.

use deepspec_core::digest::short_digest;
use deepspec_engine::DraftSampling;
use serde_json::{Value, json};

use super::labelled::LabelledResult;
use crate::results::{Results, Served, SuiteResult};

/// All differences that make the results incomparable, one sentence each.
pub fn list_differences(compared: &[LabelledResult]) -> Vec<String> {
    let Some((first, others)) = compared.split_first() else { return vec![] };
    let mut sentences = vec![];
    for other in others {
        let mut compare = |what: &str, a: &Value, b: &Value, effect: &str| {
            // An engine does not report everything.
            if a != b && ![a, b].contains(&&json!(UNKNOWN)) {
                let (left, right) = (&first.label, &other.label);
                sentences.push(format!("{what} differs: {a} in {left}, {b} in {right}; {effect}"));
            }
        };
        for (what, effect, facts) in [
            ("target", LENGTHS_NOTE, target_facts as fn(&Results) -> Vec<(String, Value)>),
            ("", LENGTHS_NOTE, asked_facts),
            ("", DRAFTING_NOTE, drafting_facts),
            ("", SPEEDS_NOTE, speed_facts),
        ] {
            for ((name, a), (_, b)) in facts(&first.results).iter().zip(&facts(&other.results)) {
                compare(format!("{what} {name}").trim_start(), a, b, effect);
            }
        }
        let names = |one: &LabelledResult| {
            json!(one.results.suites.iter().map(|suite| &suite.name).collect::<Vec<_>>())
        };
        compare(
            "set of suites",
            &names(first),
            &names(other),
            "only suites in all results are shown and averaged",
        );
        for suite in &first.results.suites {
            if let Some(same) = other.results.suites.iter().find(|same| same.name == suite.name) {
                let scored =
                    |suite: &SuiteResult| json!([short_digest(&suite.file_digest), suite.counts.samples]);
                compare(
                    &format!("{} [file, samples]", suite.name),
                    &scored(suite),
                    &scored(same),
                    LENGTHS_NOTE,
                );
                let domain = |suite: &SuiteResult| json!(suite.domain);
                compare(&format!("{} domain", suite.name), &domain(suite), &domain(same), DOMAINS_NOTE);
            }
        }
    }
    sentences.extend(lengths_by_rule(compared));
    sentences
}

/// The accepted lengths under each rule of draft sampling, if the results use several, all have both, and all were verified by one
/// rule.
fn lengths_by_rule(compared: &[LabelledResult]) -> Vec<String> {
    let rule = |one: &LabelledResult| one.results.settings.draft_sampling;
    if compared.iter().any(|one| one.results.served.is_some()) {
        return vec![];
    }
    let verify = |one: &LabelledResult| one.results.settings.verify;
    if compared.windows(2).all(|pair| rule(&pair[0]) == rule(&pair[1]))
        || compared.windows(2).any(|pair| verify(&pair[0]) != verify(&pair[1]))
    {
        return vec![];
    }
    let under = |wanted: DraftSampling| {
        let length = |one: &LabelledResult| {
            let other = one.results.other_rule.as_ref().filter(|other| other.draft_sampling == wanted);
            let own = one.results.overall.accepted_length.filter(|_| rule(one) == wanted);
            let length = own.or_else(|| other.and_then(|other| other.accepted_length))?;
            Some(format!("{length:.2} {}", one.label))
        };
        let lengths: Option<Vec<String>> = compared.iter().map(length).collect();
        lengths
            .map(|lengths| format!("accepted length, drafted tokens {wanted} in all: {}", lengths.join(", ")))
    };
    [DraftSampling::Probabilistic, DraftSampling::Greedy].into_iter().filter_map(under).collect()
}

/// Value of a fact that the engine of a run does not report.
const UNKNOWN: &str = "unknown";
const LENGTHS_NOTE: &str = "accepted lengths are not comparable";
const DRAFTING_NOTE: &str = "that is part of what is compared";
const DOMAINS_NOTE: &str = "it is averaged with the suites of the first";
const SPEEDS_NOTE: &str = "speeds are not comparable";

fn target_facts(results: &Results) -> Vec<(String, Value)> {
    let target = &results.target;
    let digests = [
        ("config", &target.config_digest),
        ("weights", &target.weights_digest),
        ("tokenizer", &target.tokenizer_digest),
        ("chat template", &target.template_digest),
    ];
    let digests = digests.into_iter().map(|(name, digest)| {
        let is_unknown = digest.is_empty() && results.served.is_some();
        (name.to_string(), json!(if is_unknown { UNKNOWN } else { short_digest(digest) }))
    });
    digests.chain([("stop ids".into(), json!(target.stop_ids))]).collect()
}

fn asked_facts(results: &Results) -> Vec<(String, Value)> {
    let s = &results.settings;
    let facts = [
        ("seed", if s.seeds.len() > 1 { json!(s.seeds) } else { json!(s.seed) }),
        ("temperature", json!(s.temperature)),
        ("max_new_tokens", json!(s.max_new_tokens)),
        ("limit", json!(s.limit)),
        ("turns", json!(s.turns)),
        ("thinking", json!(s.thinking)),
        ("system prompt", json!(s.system_prompt)),
        ("dtype", unless_served(results, json!(s.dtype))),
    ];
    facts.map(|(name, value)| (name.to_string(), value)).to_vec()
}

fn drafting_facts(results: &Results) -> Vec<(String, Value)> {
    let s = &results.settings;
    let facts = [
        ("schedule", json!(s.policy())),
        ("cost", json!(s.cost)),
        ("calibration", json!(s.calibration)),
        ("no_markov", json!(s.no_markov)),
        ("max_draft_tokens", json!(s.max_draft_tokens)),
        ("draft_sampling", json!(s.draft_sampling)),
        ("verify", json!(s.verify)),
    ];
    facts.map(|(name, value)| (name.to_string(), unless_served(results, value))).to_vec()
}

/// The value, or that it is unknown because the engine decided it.
fn unless_served(results: &Results, value: Value) -> Value {
    if results.served.is_some() { json!(UNKNOWN) } else { value }
}

fn speed_facts(results: &Results) -> Vec<(String, Value)> {
    let s = &results.settings;
    let engine = results.served.as_ref().map_or_else(|| "deepspec-eval".into(), Served::name);
    let facts = [
        ("slots", json!(s.slots)),
        ("lanes", unless_served(results, json!(s.lanes))),
        ("engine", json!(engine)),
        ("device", unless_served(results, json!(s.device))),
        ("threads", unless_served(results, json!(s.threads))),
    ];
    facts.map(|(name, value)| (name.to_string(), value)).to_vec()
}

/// Whether the prompts of a suite can be paired: both results have the same target and the same
/// suite file.
pub fn can_pair_prompts(a: &Results, b: &Results, suite: &str) -> bool {
    let digest = |results: &Results| {
        let suite = results.suites.iter().find(|one| one.name == suite);
        suite.map(|suite| suite.file_digest.clone())
    };
    let (a_facts, b_facts) = (target_facts(a), target_facts(b));
    let is_same =
        |((_, a), (_, b)): (&(String, Value), &(String, Value))| a == b || [a, b].contains(&&json!(UNKNOWN));
    a_facts.iter().zip(&b_facts).all(is_same) && digest(a) == digest(b)
}
