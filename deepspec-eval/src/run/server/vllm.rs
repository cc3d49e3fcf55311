//! vLLM's requests, answers and settings.

use deepspec_engine::{Finish, Request};
use serde_json::{Value, json};

use super::answer::{RawAnswer, ids, number};
use super::engine::{AS_CONFIGURED, ServerInfo};
use super::figures::{AcceptanceCounts, ReportedCycles, Step, checked_steps};

/// Path of the endpoint that answers token ids.
pub const PATH: &str = "/v1/completions";
/// Start of a server whose answers have figures.
pub const START: &str = "vllm serve TARGET --speculative-config '{\"method\": METHOD, \"model\": DRAFTER, \
                         \"num_speculative_tokens\": K}' --per-request-spec-decode-metrics detailed";

/// The body of a request. Settings that filter tokens are explicit, because the server's defaults
/// come from generation_config.json.
pub fn body(request: &Request, model: Option<&str>, seed: u32) -> Value {
    let mut body = json!({
        "prompt": request.prompt, "max_tokens": request.max_new_tokens, "stop_token_ids": request.stop_ids,
        "temperature": request.sampling.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "seed": seed, "n": 1, "stream": false, "return_token_ids": true, "add_special_tokens": false,
    });
    if let Some(model) = model {
        body["model"] = json!(model);
    }
    body
}

/// Reads an answer of `/v1/completions`.
///
/// # Errors
/// A phrase that says what the answer lacks.
pub fn parse(text: &str) -> Result<RawAnswer, String> {
    let answer: Value = serde_json::from_str(text).map_err(|error| format!("no JSON: {error}"))?;
    let choice = &answer["choices"][0];
    let finish = match choice["finish_reason"].as_str() {
        Some("stop") => Finish::Stop,
        Some("length") => Finish::Length,
        other => {
            return Err(format!("`finish_reason` is {}, not stop or length", other.unwrap_or("missing")));
        }
    };
    let tokens = ids(&choice["token_ids"]).ok_or(
        "no `token_ids`, which vLLM gives from 0.10.2 on with `return_token_ids`; start a later one",
    )?;
    let reported = &answer["metrics"]["speculative_decoding"];
    Ok(RawAnswer {
        count: tokens.len() as u64,
        tokens,
        finish,
        matched: choice["stop_reason"].as_i64(),
        text: None,
        cycles: if reported.is_object() { Some(cycles(reported)?) } else { None },
        block_size: number(&reported["num_spec_tokens"]).map(|count| count as usize),
    })
}

/// The cycles that `metrics.speculative_decoding` reports: each of them at the level `detailed`,
/// else their histogram.
fn cycles(reported: &Value) -> Result<ReportedCycles, String> {
    let counts = |key: &str| -> Option<Vec<u64>> { reported[key].as_array()?.iter().map(number).collect() };
    if let (Some(accepted), Some(drafted)) = (counts("per_step_accepted"), counts("per_step_drafted")) {
        if accepted.len() != drafted.len() {
            return Err("`per_step_accepted` and `per_step_drafted` differ in length".into());
        }
        let small = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let step = |(accepted, drafted)| Step { drafted: small(drafted), accepted: small(accepted) };
        return Ok(ReportedCycles::Steps(checked_steps(
            accepted.into_iter().zip(drafted).map(step).collect(),
        )?));
    }
    let histogram = counts("acceptance_histogram")
        .ok_or("no `acceptance_histogram` in `metrics.speculative_decoding`")?;
    let drafted = number(&reported["num_draft_tokens"]).unwrap_or(0);
    Ok(ReportedCycles::Totals(AcceptanceCounts::from_histogram(&histogram, drafted)?))
}

/// Describes the server from `/version`, `/v1/models` and, of a server in development mode,
/// `/server_info`.
pub fn info(version: &Value, models: &Value, settings: Option<&Value>) -> ServerInfo {
    let model = &models["data"][0];
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let config = settings.map(|settings| &settings["vllm_config"]).filter(|config| config.is_object());
    let speculation = config.map(|config| &config["speculative_config"]);
    let known = speculation.filter(|speculation| speculation.is_object());
    let rule = known.and_then(|known| {
        let (rejection, draft) =
            (known["rejection_sample_method"].as_str()?, known["draft_sample_method"].as_str()?);
        Some(format!("{rejection} rejection sampling, {draft} draft sampling"))
    });
    ServerInfo {
        version: text(&version["version"]),
        model: text(&model["id"]),
        context: number(&model["max_model_len"]).map(|tokens| tokens as usize),
        verification: rule.unwrap_or_else(|| AS_CONFIGURED.into()),
        drafter: known.and_then(|known| text(&known["model"])),
        block_size: known.and_then(|known| number(&known["num_speculative_tokens"])).map(|n| n as usize),
        speculates: speculation.map(Value::is_object),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(speculation: &Value) -> String {
        json!({"choices": [{"token_ids": [5, 6, 7, 9], "finish_reason": "stop", "stop_reason": 9}],
            "metrics": {"speculative_decoding": speculation}, "usage": {"completion_tokens": 4}})
        .to_string()
    }

    #[test]
    fn detailed_figures_are_cycles_and_a_summary_is_a_histogram() {
        let mut figures = json!({"mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.2,
            "acceptance_histogram": [0, 1, 1, 0], "num_spec_steps": 2, "num_accepted_draft_tokens": 3,
            "num_draft_tokens": 6, "num_spec_tokens": 3, "per_step_accepted": [1, 2], "per_step_drafted": [3, 3]});
        let detailed = parse(&answer(&figures)).unwrap();
        let steps = [(3, 1), (3, 2)].map(|(drafted, accepted)| Step { drafted, accepted });
        assert_eq!(detailed.cycles, Some(ReportedCycles::Steps(steps.to_vec())));
        assert_eq!((detailed.count, detailed.matched, detailed.block_size), (4, Some(9), Some(3)));
        for key in ["per_step_accepted", "per_step_drafted"] {
            figures[key] = Value::Null;
        }
        let summary = AcceptanceCounts { cycles: 2, drafted: 6, accepted: 3, accepted_at: vec![2, 1, 0] };
        assert_eq!(parse(&answer(&figures)).unwrap().cycles, Some(ReportedCycles::Totals(summary)));
        assert_eq!(parse(&answer(&Value::Null)).unwrap().cycles, None);
    }

    #[test]
    fn wrong_answers_are_told_by_their_key() {
        let told = |text: &str| parse(text).err().unwrap();
        assert!(told("<html>").contains("no JSON"));
        assert!(told(r#"{"choices": [{"finish_reason": "abort"}]}"#).contains("`finish_reason` is abort"));
        assert!(told(r#"{"choices": [{"finish_reason": "stop"}]}"#).contains("`token_ids`"));
        let wrong = json!({"per_step_accepted": [4], "per_step_drafted": [3]});
        assert!(told(&answer(&wrong)).contains("3 drafted tokens with 4 accepted"));
    }

    #[test]
    fn a_server_in_development_mode_names_its_rule() {
        let (version, models) =
            (json!({"version": "0.32.0"}), json!({"data": [{"id": "m", "max_model_len": 512}]}));
        let plain = info(&version, &models, None);
        assert_eq!((plain.verification.as_str(), plain.speculates), (AS_CONFIGURED, None));
        assert_eq!((plain.context, plain.model.as_deref()), (Some(512), Some("m")));
        let settings = json!({"vllm_config": {"speculative_config": {"method": "dspark", "model": "a/b",
            "num_speculative_tokens": 7, "rejection_sample_method": "standard", "draft_sample_method": "greedy"}}});
        let told = info(&version, &models, Some(&settings));
        assert_eq!(told.verification, "standard rejection sampling, greedy draft sampling");
        assert_eq!((told.block_size, told.drafter.as_deref()), (Some(7), Some("a/b")));
        let none = json!({"vllm_config": {"speculative_config": null}});
        assert_eq!(info(&version, &models, Some(&none)).speculates, Some(false));
    }
}
