//! SGLang's requests, answers and settings.

use deepspec_engine::{Finish, Request};
use serde_json::{Value, json};

use super::answer::{RawAnswer, ids, number};
use super::engine::{AS_CONFIGURED, ServerInfo};
use super::figures::{AcceptanceCounts, ReportedCycles};

/// Path of the endpoint that answers token ids.
pub const PATH: &str = "/generate";
/// Start of a server whose answers have figures.
pub const START: &str = "python -m sglang.launch_server --model-path TARGET --speculative-algorithm ALGORITHM \
                         --speculative-draft-model-path DRAFTER --enable-metrics";

/// The body of a request. SGLang uses the seed only with `--enable-deterministic-inference`.
pub fn body(request: &Request, seed: u32) -> Value {
    let sampling = &request.sampling;
    let mut settings = json!({
        "max_new_tokens": request.max_new_tokens, "stop_token_ids": request.stop_ids,
        "temperature": sampling.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    });
    if !sampling.is_greedy() {
        settings["sampling_seed"] = json!(seed);
    }
    json!({"input_ids": request.prompt, "sampling_params": settings, "stream": false})
}

/// Names of `meta_info` for one count, the latest first.
const ACCEPTED: [&str; 3] = ["spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"];
const DRAFTED: [&str; 3] = ["spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"];
const HISTOGRAMS: [&str; 2] = ["spec_correct_drafts_histogram", "spec_accept_histogram"];

/// Reads an answer of `/generate`.
///
/// # Errors
/// A phrase that says what the answer lacks.
pub fn parse(text: &str) -> Result<RawAnswer, String> {
    let answer: Value = serde_json::from_str(text).map_err(|error| format!("no JSON: {error}"))?;
    let meta = &answer["meta_info"];
    let reason = &meta["finish_reason"];
    let finish = match reason["type"].as_str() {
        Some("stop") => Finish::Stop,
        Some("length") => Finish::Length,
        other => {
            return Err(format!("`finish_reason` is {}, not stop or length", other.unwrap_or("missing")));
        }
    };
    let tokens = ids(&answer["output_ids"]).ok_or("no `output_ids`, which SGLang gives from 0.4.7 on")?;
    let count = number(&meta["completion_tokens"]).ok_or("no `completion_tokens` in `meta_info`")?;
    Ok(RawAnswer {
        tokens,
        count,
        finish,
        matched: reason["matched"].as_i64(),
        text: None,
        cycles: cycles(meta, count)?,
        block_size: None,
    })
}

/// The cycles that `meta_info` reports; None without speculation.
fn cycles(meta: &Value, tokens: u64) -> Result<Option<ReportedCycles>, String> {
    let Some(cycles) = number(&meta["spec_verify_ct"]) else { return Ok(None) };
    let first = |names: &[&str]| names.iter().find_map(|name| number(&meta[*name]));
    let drafted = first(&DRAFTED).unwrap_or(0);
    let histogram = HISTOGRAMS.iter().find_map(|name| meta[*name].as_array());
    let histogram: Option<Vec<u64>> = histogram.and_then(|counts| counts.iter().map(number).collect());
    // A histogram that counts other cycles than the verifications says nothing of these.
    if let Some(counts) = histogram.filter(|counts| counts.iter().sum::<u64>() == cycles && cycles > 0) {
        return Ok(Some(ReportedCycles::Totals(AcceptanceCounts::from_histogram(&counts, drafted)?)));
    }
    let accepted = first(&ACCEPTED).unwrap_or_else(|| tokens.saturating_sub(1 + cycles));
    let totals = AcceptanceCounts { cycles, drafted, accepted, accepted_at: vec![] }.checked()?;
    Ok(Some(ReportedCycles::Totals(totals)))
}

/// Describes the server from `/server_info`.
pub fn info(settings: &Value) -> ServerInfo {
    let text = |key: &str| settings[key].as_str().map(str::to_owned);
    let count = |key: &str| number(&settings[key]).map(|count| count as usize);
    let algorithm = text("speculative_algorithm");
    let thresholds = ["single", "acc"]
        .map(|name| settings[format!("speculative_accept_threshold_{name}").as_str()].as_f64());
    let verification = match (&algorithm, thresholds) {
        (Some(algorithm), [Some(single), Some(acc)]) => {
            format!("{algorithm}, acceptance thresholds {single} (single) and {acc} (accumulated)")
        }
        _ => AS_CONFIGURED.into(),
    };
    ServerInfo {
        version: text("version"),
        model: text("model_path"),
        context: count("context_length"),
        verification,
        drafter: text("speculative_draft_model_path"),
        // A block of SGLang includes the token before the drafted ones.
        block_size: count("speculative_num_draft_tokens").map(|tokens| tokens.saturating_sub(1)),
        speculates: Some(algorithm.is_some()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(meta: &Value) -> String {
        let mut meta = meta.clone();
        meta["finish_reason"] = json!({"type": "stop", "matched": 9});
        meta["completion_tokens"] = json!(8);
        json!({"text": "x", "output_ids": [1, 2, 3, 4, 5, 6, 7], "meta_info": meta}).to_string()
    }

    #[test]
    fn counts_are_read_by_their_names_of_every_version() {
        let wanted = AcceptanceCounts { cycles: 3, drafted: 9, accepted: 4, accepted_at: vec![2, 1, 1] };
        for (drafted, histogram) in [
            ("spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
            ("spec_draft_token_num", "spec_accept_histogram"),
        ] {
            let read = parse(&answer(&json!({"spec_verify_ct": 3, drafted: 9, histogram: [1, 1, 0, 1]})));
            let read = read.unwrap();
            assert_eq!(read.cycles, Some(ReportedCycles::Totals(wanted.clone())));
            assert_eq!((read.count, read.matched), (8, Some(9)));
        }
        let plain = parse(&answer(&json!({"spec_verify_ct": 3}))).unwrap();
        let totals = AcceptanceCounts { cycles: 3, drafted: 0, accepted: 4, accepted_at: vec![] };
        assert_eq!(plain.cycles, Some(ReportedCycles::Totals(totals)));
        assert_eq!(parse(&answer(&json!({}))).unwrap().cycles, None);
        assert!(
            parse(r#"{"meta_info": {"finish_reason": {"type": "abort"}}}"#).err().unwrap().contains("abort")
        );
    }

    #[test]
    fn settings_name_drafter_and_rule() {
        let told = info(&json!({"version": "0.5.23", "model_path": "m", "context_length": 4096,
            "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "a/b",
            "speculative_num_draft_tokens": 8, "speculative_accept_threshold_single": 1.0,
            "speculative_accept_threshold_acc": 1.0}));
        assert_eq!((told.block_size, told.context, told.speculates), (Some(7), Some(4096), Some(true)));
        assert_eq!(told.verification, "EAGLE3, acceptance thresholds 1 (single) and 1 (accumulated)");
        assert_eq!(info(&json!({"speculative_algorithm": null})).speculates, Some(false));
    }
}
