//! Parses chat completions of servers.

use std::ops::AddAssign;

use deepspec_capture::served::ServedAnswer;
use deepspec_text::{
    Completeness, FINISH_REASON, FinishReason, Message, PROMPT_TOKEN_IDS, REASONING_FIELDS, Role, TOKEN_IDS,
    without_reasoning,
};
use serde_json::{Map, Value, json};

use super::settings::Reasoning;

/// Token counts of requests and answers, 0 if the server does not report them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Prompt tokens.
    pub prompt: u64,
    /// Completion tokens.
    pub completion: u64,
}

impl AddAssign for TokenCounts {
    fn add_assign(&mut self, other: Self) {
        self.prompt += other.prompt;
        self.completion += other.completion;
    }
}

/// An assistant's answer to one turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// The answer's text.
    pub content: String,
    /// The reasoning, if the server returns it separately.
    pub thoughts: Option<String>,
    /// The tool calls.
    pub tool_calls: Option<Value>,
    /// The finish reason.
    pub finish: FinishReason,
    /// Token counts that the server reported.
    pub tokens: TokenCounts,
    /// The generated token ids, if the server returns them.
    pub token_ids: Option<Value>,
    /// The token ids of the prompt, if the server returns them.
    pub prompt_token_ids: Option<Value>,
    /// The file of hidden states that the server names.
    pub states_path: Option<String>,
    /// Log-probabilities of the generated tokens, if the server returns them.
    pub log_probs: Vec<f64>,
    /// The hidden states, if the run stores them.
    pub states: Option<ServedAnswer>,
}

/// Why a request failed.
#[derive(Debug)]
pub enum AskError {
    /// This row cannot be answered. Other rows may be.
    Row(String),
    /// The servers broke off every attempt at this row; other rows may succeed.
    BrokenOff(String, FinishReason),
    /// No row can be answered. Rows without an answer stay pending.
    Run(anyhow::Error),
}

/// Why a response has no usable answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerError {
    /// The response is not a chat completion.
    Invalid(&'static str),
    /// The response is a chat completion without text.
    Empty,
    /// The server broke off the answer.
    BrokenOff(FinishReason),
}

/// The file of hidden states that a completion names.
fn states_path(completion: &Value) -> Option<String> {
    completion["kv_transfer_params"]["hidden_states_path"].as_str().map(str::to_owned)
}

/// The file of hidden states of an answer that cannot be used.
pub fn states_path_of_unusable(text: &str) -> Option<String> {
    states_path(&serde_json::from_str(text).ok()?)
}

impl Answer {
    /// Parses a chat completion whose request had the stop strings `stops`.
    pub fn parse(text: &str, stops: &[&str]) -> Result<Self, AnswerError> {
        let mut completion: Value =
            serde_json::from_str(text).map_err(|_| AnswerError::Invalid("the answer is not JSON"))?;
        let tokens = TokenCounts {
            prompt: completion["usage"]["prompt_tokens"].as_u64().unwrap_or(0),
            completion: completion["usage"]["completion_tokens"].as_u64().unwrap_or(0),
        };
        if !completion["error"].is_null() {
            return Err(AnswerError::BrokenOff(FinishReason::Error));
        }
        let finish = FinishReason::from_choice(&completion["choices"][0], stops);
        let ids = |place: &str| {
            let ids = completion.pointer(place)?.as_array()?;
            (!ids.is_empty() && ids.iter().all(Value::is_u64)).then(|| json!(ids))
        };
        // In the fields of vLLM and deepspec-serve, of SGLang, and of llama.cpp.
        let places = ["/choices/0/token_ids", "/choices/0/response_token_ids", "/__verbose/tokens"];
        let token_ids = places.into_iter().find_map(ids);
        // In the fields of vLLM and deepspec-serve, and of SGLang.
        let prompt_token_ids = ids("/prompt_token_ids").or_else(|| ids("/choices/0/prompt_token_ids"));
        let states_path = states_path(&completion);
        let tokens_said = completion.pointer("/choices/0/logprobs/content").and_then(Value::as_array);
        let log_probs =
            tokens_said.into_iter().flatten().filter_map(|token| token["logprob"].as_f64()).collect();
        // `pointer_mut` returns None if there is no choice. Mutable indexing of a missing choice would panic.
        let message = completion.pointer_mut("/choices/0/message");
        let mut message = message.ok_or(AnswerError::Invalid("the answer has no choices"))?.take();
        if finish.completeness() == Completeness::Broken {
            return Err(AnswerError::BrokenOff(finish));
        }
        let mut thoughts = REASONING_FIELDS.iter().filter_map(|&field| message[field].as_str());
        let mut thoughts = thoughts.find(|thoughts| !thoughts.is_empty()).map(str::to_owned);
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        let mut calls: Vec<Value> = calls.filter(|call| call.is_object()).cloned().collect();
        // The older form of a single call.
        if calls.is_empty() && message["function_call"].is_object() {
            calls.push(json!({"type": "function", "function": message["function_call"]}));
        }
        let tool_calls = (!calls.is_empty()).then(|| json!(calls));
        if message["content"].is_array() {
            let parts = json!({"role": "assistant", "content": message["content"]});
            let parts = Message::try_from(parts)
                .map_err(|_| AnswerError::Invalid("the answer has parts that are no text"))?;
            thoughts = thoughts.or(parts.reasoning_content);
            message["content"] = json!(parts.content);
        }
        let content = match &message["content"] {
            Value::String(content) if !content.is_empty() => content.clone(),
            // All tokens were reasoning or tool calls.
            Value::Null | Value::String(_) if thoughts.is_some() || tool_calls.is_some() => String::new(),
            Value::Null | Value::String(_) => return Err(AnswerError::Empty),
            _ => return Err(AnswerError::Invalid("the answer has no text")),
        };
        Ok(Self {
            content,
            thoughts,
            tool_calls,
            finish,
            tokens,
            token_ids,
            prompt_token_ids,
            states_path,
            log_probs,
            states: None,
        })
    }

    /// Adds the hidden states in the bytes of the server's file.
    ///
    /// # Errors
    /// If the file is not one of this prompt and answer.
    pub fn with_states(mut self, file: Vec<u8>) -> Result<Self, String> {
        let ids = |ids: &Option<Value>| -> Vec<i64> {
            let ids = ids.as_ref().and_then(Value::as_array).into_iter().flatten();
            ids.filter_map(Value::as_i64).collect()
        };
        let (prompt, answer) = (ids(&self.prompt_token_ids), ids(&self.token_ids));
        if prompt.is_empty() || answer.is_empty() {
            return Err("the answer has no token ids; expected vLLM's `return_token_ids`".into());
        }
        let states = ServedAnswer { file, prompt, answer, log_probs: std::mem::take(&mut self.log_probs) };
        states.check()?;
        self.states = Some(states);
        Ok(self)
    }

    /// The assistant message for the rest of the conversation.
    pub fn into_message(self, reasoning: Reasoning) -> Message {
        let mut extra = Map::new();
        if let Some(calls) = self.tool_calls {
            extra.insert("tool_calls".into(), calls);
        }
        extra.insert(FINISH_REASON.into(), json!(self.finish.name()));
        // If rows drop the reasoning, the served ids no longer match the text.
        if reasoning == Reasoning::Keep {
            let ids = [(TOKEN_IDS, self.token_ids), (PROMPT_TOKEN_IDS, self.prompt_token_ids)];
            extra.extend(ids.into_iter().filter_map(|(name, ids)| Some((name.to_string(), ids?))));
        }
        let content = match (reasoning, &self.thoughts) {
            // Only servers that do not separate reasoning leave it in the text.
            (Reasoning::Drop, None) => without_reasoning(&self.content).to_string(),
            _ => self.content,
        };
        let kept = |thoughts: &String| reasoning == Reasoning::Keep && !thoughts.is_empty();
        let reasoning_content = self.thoughts.filter(kept);
        Message { role: Role::Assistant, content, reasoning_content, extra }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepspec_testkit::mutate::Fuzzer;

    fn completion(message: Value) -> String {
        json!({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 3, "prompt_tokens": 5}})
            .to_string()
    }

    #[test]
    fn answers_are_read_with_their_thoughts_and_calls() {
        let answer = Answer::parse(&completion(json!({"content": "a", "reasoning": "b"})), &[]).unwrap();
        assert_eq!(
            answer,
            Answer {
                content: "a".into(),
                thoughts: Some("b".into()),
                tool_calls: None,
                finish: FinishReason::Stop,
                tokens: TokenCounts { prompt: 5, completion: 3 },
                ..Answer::default()
            }
        );
        let thoughts =
            Answer::parse(&completion(json!({"content": null, "reasoning_content": "b"})), &[]).unwrap();
        assert_eq!(thoughts.content, "");
        let plain =
            Answer::parse(&completion(json!({"content": "a", "reasoning_content": null})), &[]).unwrap();
        assert_eq!(plain.thoughts, None);
        let call =
            Answer::parse(&completion(json!({"content": null, "tool_calls": [{"id": "x"}]})), &[]).unwrap();
        assert_eq!(call.into_message(Reasoning::Keep).extra["tool_calls"], json!([{"id": "x"}]));
        for broken in [
            "",
            "[]",
            "{\"choices\":[]}",
            "{\"choices\":3}",
            &completion(json!({"content": null})),
            &completion(json!({"content": ""})),
            "{\"choices\":[1]}",
        ] {
            assert!(
                matches!(Answer::parse(broken, &[]), Err(AnswerError::Invalid(_) | AnswerError::Empty)),
                "{broken}"
            );
        }
    }

    #[test]
    fn what_a_server_broke_off_is_no_answer() {
        for word in ["abort", "error", "repetition"] {
            let text = completion(json!({"content": "a"})).replace("\"stop\"", &format!("{word:?}"));
            assert_eq!(Answer::parse(&text, &[]), Err(AnswerError::BrokenOff(FinishReason::parse(word))));
        }
        let cut = completion(json!({"content": "a"})).replace("\"stop\"", "null");
        assert_eq!(Answer::parse(&cut, &[]).unwrap().finish, FinishReason::Unknown);
        let stopped = Answer::parse(&completion(json!({"content": "a"})), &["END"]).unwrap();
        assert_eq!(stopped.into_message(Reasoning::Keep).extra[FINISH_REASON], "stop_sequence");
    }

    #[test]
    fn tokens_are_found_where_each_server_puts_them() {
        let told = |place: &str, value: Value| {
            let mut whole: Value = serde_json::from_str(&completion(json!({"content": "a"}))).unwrap();
            let (parent, name) = place.rsplit_once('/').unwrap();
            whole.pointer_mut(parent).unwrap()[name] = value;
            let Answer { token_ids, prompt_token_ids, .. } = Answer::parse(&whole.to_string(), &[]).unwrap();
            (token_ids, prompt_token_ids)
        };
        let ids = json!([3, 4]);
        for place in ["/prompt_token_ids", "/choices/0/prompt_token_ids"] {
            assert_eq!(told(place, ids.clone()), (None, Some(ids.clone())), "{place}");
        }
        let answers = [
            ("/choices/0/token_ids", ids.clone()),
            ("/choices/0/response_token_ids", ids.clone()),
            ("/__verbose", json!({"tokens": ids})),
        ];
        for (place, value) in answers {
            assert_eq!(told(place, value), (Some(ids.clone()), None), "{place}");
        }
        for broken in [json!([]), json!("3"), json!([1.5])] {
            assert_eq!(told("/choices/0/token_ids", broken), (None, None));
        }
    }

    #[test]
    fn messages_carry_what_is_wanted() {
        let answer = Answer {
            content: "<think>x</think>a".into(),
            thoughts: Some("b".into()),
            finish: FinishReason::Length,
            ..Answer::default()
        };
        let kept = answer.clone().into_message(Reasoning::Keep);
        assert_eq!(
            (kept.reasoning_content.as_deref(), &kept.extra["finish_reason"]),
            (Some("b"), &json!("length"))
        );
        // If the server separates the reasoning, think tags in the text belong to the answer.
        let dropped = answer.clone().into_message(Reasoning::Drop);
        assert_eq!((dropped.reasoning_content, dropped.content.as_str()), (None, "<think>x</think>a"));
        let dropped = |content: &str| {
            Answer { content: content.into(), ..Answer::default() }.into_message(Reasoning::Drop).content
        };
        assert_eq!(dropped("<think>\na\n</think>\n\nb </think> c"), "b </think> c");
        assert_eq!(
            (dropped("a</think>b").as_str(), dropped("<think>a").as_str(), dropped("a").as_str()),
            ("b", "", "a")
        );
        assert_eq!(dropped("<|channel>thought\na\n<channel|>b"), "b");
        assert_eq!((dropped("a<channel|>b").as_str(), dropped("<|channel>thought\na").as_str()), ("b", ""));
        assert_eq!(answer.into_message(Reasoning::Keep).content, "<think>x</think>a");
    }

    /// Completions with nulls, other types and unknown keys anywhere parse to an answer or give an
    /// error.
    #[test]
    fn damaged_completions_are_answers_or_say_why_not() {
        let words = [
            "content",
            "role",
            "tool_calls",
            "finish_reason",
            "choices",
            "message",
            "abort",
            "length",
            "reasoning",
            "x",
        ];
        let call =
            json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
        let (mut read, mut none) = (0, 0);
        for seed in 0..20_000 {
            let mut dice = Fuzzer::new(seed, &words);
            let message = match dice.roll(3) {
                0 => json!({"role": "assistant", "content": null, "tool_calls": [call]}),
                1 => {
                    json!({"role": "assistant", "content": "a", "reasoning_content": "b", "token_ids": [1, 2]})
                }
                _ => json!({"role": "assistant", "content": "a", "refusal": null, "audio": null}),
            };
            let mut completion = json!({
                "id": "x", "object": "chat.completion", "error": null, "prompt_token_ids": [1],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop", "stop_reason": null, "logprobs": null}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": null},
            });
            (0..dice.roll(4)).for_each(|_| dice.mutate(&mut completion));
            let text = match dice.roll(20) {
                0 => String::from_utf8_lossy(&dice.line(completion)).into_owned(),
                _ => completion.to_string(),
            };
            match Answer::parse(&text, if dice.roll(2) == 0 { &["END"] } else { &[] }) {
                Ok(answer) => {
                    read += 1;
                    assert_ne!(answer.finish.completeness(), Completeness::Broken, "seed {seed}: {text}");
                    assert!(
                        !answer.clone().into_message(Reasoning::Keep).is_empty()
                            || answer.content.trim().is_empty(),
                        "seed {seed}: {text}"
                    );
                }
                Err(AnswerError::Empty) => {}
                Err(AnswerError::Invalid(why)) => {
                    none += 1;
                    assert!(why.len() > 10, "seed {seed}: {why}");
                }
                Err(AnswerError::BrokenOff(reason)) => {
                    assert_eq!(reason.completeness(), Completeness::Broken)
                }
            }
        }
        assert!(read > 5_000 && none > 1_000, "{read} read, {none} none");
    }
}
