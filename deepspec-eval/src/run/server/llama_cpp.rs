//! llama.cpp's requests, answers and settings.
//!
//! The server's timings have the drafted and accepted tokens so far, and no number of cycles. An
//! answer that is streamed with the timings of every token shows each cycle: the drafted tokens
//! grow with it.

use deepspec_engine::{Finish, Request};
use serde_json::{Value, json};

use super::answer::{RawAnswer, ids, number};
use super::engine::{AS_CONFIGURED, ServerInfo};
use super::figures::{AcceptanceCounts, ReportedCycles, Step, checked_steps};
use crate::load::SseParser;

/// Path of the endpoint that answers token ids.
pub const PATH: &str = "/completion";
/// Start of a server whose answers have figures.
pub const START: &str = "llama-server --model TARGET.gguf --model-draft DRAFTER.gguf --spec-type TYPE \
                         --spec-draft-n-max K";

/// The body of a request.
pub fn body(request: &Request, seed: u32) -> Value {
    json!({
        "prompt": request.prompt, "n_predict": request.max_new_tokens, "temperature": request.sampling.temperature,
        // By default llama.cpp also filters and penalises.
        "samplers": ["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "seed": seed, "stream": true, "timings_per_token": true, "return_tokens": true, "cache_prompt": false,
    })
}

/// Timings at one time of an answer.
#[derive(Debug, Clone, Copy, Default)]
struct Timings {
    generated: u64,
    drafted: u64,
    accepted: u64,
}

impl Timings {
    fn read(event: &Value) -> Option<Self> {
        let timings = &event["timings"];
        // Both counts are left out until something is drafted.
        let count = |key: &str| number(&timings[key]).unwrap_or(0);
        Some(Self {
            generated: number(&timings["predicted_n"])?,
            drafted: count("draft_n"),
            accepted: count("draft_n_accepted"),
        })
    }
}

/// Reads an answer of `/completion`, streamed or whole.
///
/// # Errors
/// A phrase that says what the answer lacks.
pub fn parse(text: &str) -> Result<RawAnswer, String> {
    let events = events(text)?;
    let last = events.iter().rev().find(|event| event["stop"] == true).ok_or("the answer breaks off")?;
    let finish = match last["stop_type"].as_str() {
        Some("eos" | "word") => Finish::Stop,
        Some("limit") => Finish::Length,
        other => return Err(format!("`stop_type` is {}, not eos or limit", other.unwrap_or("missing"))),
    };
    let end = Timings::read(last).ok_or("no `timings`, which llama.cpp gives with every answer")?;
    let text: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    // Tokens before the last one of a character are not streamed.
    let tokens = events.iter().filter_map(|event| ids(&event["tokens"])).flatten().collect();
    let steps = steps(&events)?;
    Ok(RawAnswer {
        tokens,
        count: end.generated,
        finish,
        matched: None,
        text: Some(text),
        block_size: steps.iter().flatten().map(|step| step.drafted as usize).max(),
        cycles: Some(match steps {
            Some(steps) => ReportedCycles::Steps(steps),
            // Without a draft, every token is a cycle of its own.
            None if end.drafted == 0 => ReportedCycles::Steps(vec![]),
            None => ReportedCycles::Totals(totals(end)?),
        }),
    })
}

/// The events of a stream, or the whole answer as one.
fn events(text: &str) -> Result<Vec<Value>, String> {
    let json = |data: &str| serde_json::from_str::<Value>(data).map_err(|error| format!("no JSON: {error}"));
    if text.trim_start().starts_with('{') {
        return Ok(vec![json(text)?]);
    }
    let mut parser = SseParser::default();
    let mut data = parser.push(text.as_bytes());
    data.extend(parser.finish());
    let events = data.iter().filter(|data| data.trim() != "[DONE]").map(|data| json(data));
    let events: Vec<Value> = events.collect::<Result<_, _>>()?;
    match events.iter().find_map(|event| event.get("error")).filter(|error| !error.is_null()) {
        Some(error) => Err(error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned)),
        None => Ok(events),
    }
}

/// The blocks of a streamed answer; None without the timings of single tokens.
fn steps(events: &[Value]) -> Result<Option<Vec<Step>>, String> {
    let seen: Vec<Timings> = events.iter().filter_map(Timings::read).collect();
    if seen.len() < 2 {
        return Ok(None);
    }
    let (mut steps, mut before) = (vec![], Timings::default());
    for now in seen {
        let grown = |now: u64, before: u64| u32::try_from(now.saturating_sub(before)).unwrap_or(u32::MAX);
        let (drafted, accepted) = (grown(now.drafted, before.drafted), grown(now.accepted, before.accepted));
        if drafted > 0 {
            steps.push(Step { drafted, accepted });
        }
        before = now;
    }
    checked_steps(steps).map(Some)
}

/// Counts of an answer that was not streamed. Every cycle adds a token to the accepted ones.
fn totals(end: Timings) -> Result<AcceptanceCounts, String> {
    let cycles = end.generated.saturating_sub(1 + end.accepted);
    AcceptanceCounts { cycles, drafted: end.drafted, accepted: end.accepted, accepted_at: vec![] }.checked()
}

/// Describes the server from `/props`.
pub fn info(props: &Value) -> ServerInfo {
    let text = |key: &str| props[key].as_str().map(str::to_owned);
    ServerInfo {
        version: text("build_info"),
        model: text("model_path"),
        context: number(&props["default_generation_settings"]["n_ctx"]).map(|tokens| tokens as usize),
        verification: AS_CONFIGURED.into(),
        drafter: None,
        block_size: None,
        // Its settings do not say whether there is a drafter.
        speculates: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An event after `generated` tokens, with the drafted and accepted tokens so far.
    fn event(token: i64, generated: u64, drafted: u64, accepted: u64) -> String {
        let mut timings = json!({"predicted_n": generated});
        if drafted > 0 {
            timings["draft_n"] = json!(drafted);
            timings["draft_n_accepted"] = json!(accepted);
        }
        format!("data: {}\n\n", json!({"content": "x", "tokens": [token], "stop": false, "timings": timings}))
    }

    fn ended(word: &str, generated: u64, drafted: u64, accepted: u64) -> String {
        let timings = json!({"predicted_n": generated, "draft_n": drafted, "draft_n_accepted": accepted});
        let last = json!({"content": "", "tokens": [], "stop": true, "stop_type": word, "timings": timings});
        format!("data: {last}\n\n")
    }

    #[test]
    fn streamed_timings_show_every_cycle() {
        // The prompt's token, a block of 2 accepted, one of none, and one that ends in its middle.
        let stream = event(1, 1, 0, 0)
            + &event(2, 2, 7, 2)
            + &event(3, 3, 7, 2)
            + &event(4, 4, 7, 2)
            + &event(5, 5, 14, 2)
            + &event(6, 6, 21, 6)
            + &event(9, 7, 21, 6)
            + &ended("eos", 7, 21, 6);
        let read = parse(&stream).unwrap();
        let steps = [(7, 2), (7, 0), (7, 4)].map(|(drafted, accepted)| Step { drafted, accepted });
        assert_eq!(read.cycles, Some(ReportedCycles::Steps(steps.to_vec())));
        assert_eq!((read.count, read.tokens.len(), read.finish), (7, 7, Finish::Stop));
        assert_eq!((read.block_size, read.text.as_deref()), (Some(7), Some("xxxxxxx")));
    }

    #[test]
    fn whole_answers_have_totals() {
        let whole = json!({"content": "x", "tokens": [1, 2, 3], "stop": true, "stop_type": "limit",
            "timings": {"predicted_n": 9, "draft_n": 21, "draft_n_accepted": 5}});
        let totals = AcceptanceCounts { cycles: 3, drafted: 21, accepted: 5, accepted_at: vec![] };
        assert_eq!(parse(&whole.to_string()).unwrap().cycles, Some(ReportedCycles::Totals(totals)));
        let plain = json!({"stop": true, "stop_type": "eos", "timings": {"predicted_n": 3}});
        assert_eq!(parse(&plain.to_string()).unwrap().cycles, Some(ReportedCycles::Steps(vec![])));
    }

    #[test]
    fn broken_streams_say_so() {
        assert!(parse(&event(1, 1, 0, 0)).err().unwrap().contains("breaks off"));
        let error = "data: {\"error\": {\"message\": \"the context is full\"}}\n\n";
        assert!(parse(error).err().unwrap().contains("the context is full"));
    }
}
