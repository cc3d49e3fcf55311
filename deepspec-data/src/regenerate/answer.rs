//! Answers as servers give them.

use std::ops::AddAssign;

use deepspec_text::{Message, PROMPT_TOKEN_IDS, Role, TOKEN_IDS, without_thoughts};
use serde_json::{Map, Value, json};

use super::settings::Reasoning;

/// Tokens of requests and answers, 0 where the server does not tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Of the rendered conversations.
    pub prompt: u64,
    /// Of the answers.
    pub completion: u64,
}

impl AddAssign for Tokens {
    fn add_assign(&mut self, other: Self) {
        self.prompt += other.prompt;
        self.completion += other.completion;
    }
}

/// An answer to one turn.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// What the assistant says.
    pub content: String,
    /// What it thought, if the server tells.
    pub thoughts: Option<String>,
    /// Tools that it calls.
    pub tool_calls: Option<Value>,
    /// Why it ended: `stop`, `length`, `tool_calls`, …
    pub finish: Option<String>,
    /// What it cost.
    pub tokens: Tokens,
    /// The tokens that it was generated as, where the server tells.
    pub token_ids: Option<Value>,
    /// Those of what was asked, where the server tells.
    pub prompt_token_ids: Option<Value>,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum AskError {
    /// The row cannot be answered; others may.
    Row(String),
    /// No row can be answered; those without an answer stay pending.
    Run(anyhow::Error),
}

impl Answer {
    /// Reads a chat completion.
    pub fn read(text: &str) -> Result<Self, &'static str> {
        let mut completion: Value = serde_json::from_str(text).map_err(|_| "the answer is not JSON")?;
        let tokens = Tokens {
            prompt: completion["usage"]["prompt_tokens"].as_u64().unwrap_or(0),
            completion: completion["usage"]["completion_tokens"].as_u64().unwrap_or(0),
        };
        let finish = completion["choices"][0]["finish_reason"].as_str().map(str::to_owned);
        let ids = |place: &str| {
            let ids = completion.pointer(place)?.as_array()?;
            (!ids.is_empty() && ids.iter().all(Value::is_u64)).then(|| json!(ids))
        };
        // As vLLM and our own server say it; as SGLang does; as llama.cpp does.
        let places = ["/choices/0/token_ids", "/choices/0/response_token_ids", "/__verbose/tokens"];
        let token_ids = places.into_iter().find_map(ids);
        // As vLLM and our own server say it; as SGLang does.
        let prompt_token_ids = ids("/prompt_token_ids").or_else(|| ids("/choices/0/prompt_token_ids"));
        // Reading by index gives null for what is not there; taking out by index would panic.
        let message = completion.pointer_mut("/choices/0/message").ok_or("the answer has no choices")?.take();
        let thoughts = ["reasoning_content", "reasoning"].iter().find_map(|&field| message[field].as_str());
        let thoughts = thoughts.filter(|thoughts| !thoughts.is_empty()).map(str::to_owned);
        let tool_calls = message["tool_calls"].as_array().filter(|calls| !calls.is_empty());
        let tool_calls = tool_calls.map(|calls| json!(calls));
        let content = match &message["content"] {
            Value::String(content) => content.clone(),
            // All the tokens went into thoughts or calls.
            Value::Null if thoughts.is_some() || tool_calls.is_some() => String::new(),
            _ => return Err("the answer has no text"),
        };
        Ok(Self { content, thoughts, tool_calls, finish, tokens, token_ids, prompt_token_ids })
    }

    /// The message that the conversation goes on with.
    pub fn message(self, reasoning: Reasoning) -> Message {
        let mut extra = Map::new();
        if let Some(calls) = self.tool_calls {
            extra.insert("tool_calls".into(), calls);
        }
        if let Some(finish) = self.finish {
            extra.insert("finish_reason".into(), json!(finish));
        }
        // Where thoughts are left out of the row, the tokens that were served are not what is to be learnt.
        if reasoning == Reasoning::Keep {
            let ids = [(TOKEN_IDS, self.token_ids), (PROMPT_TOKEN_IDS, self.prompt_token_ids)];
            extra.extend(ids.into_iter().filter_map(|(name, ids)| Some((name.to_string(), ids?))));
        }
        let content = match (reasoning, &self.thoughts) {
            // Only a server that does not part thoughts from text leaves them in it.
            (Reasoning::Drop, None) => without_thoughts(&self.content).to_string(),
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

    fn completion(message: Value) -> String {
        json!({"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 3, "prompt_tokens": 5}})
            .to_string()
    }

    #[test]
    fn answers_are_read_with_their_thoughts_and_calls() {
        let answer = Answer::read(&completion(json!({"content": "a", "reasoning": "b"}))).unwrap();
        assert_eq!(
            answer,
            Answer {
                content: "a".into(),
                thoughts: Some("b".into()),
                tool_calls: None,
                finish: Some("stop".into()),
                tokens: Tokens { prompt: 5, completion: 3 },
                ..Answer::default()
            }
        );
        let thoughts = Answer::read(&completion(json!({"content": null, "reasoning_content": "b"}))).unwrap();
        assert_eq!(thoughts.content, "");
        let plain = Answer::read(&completion(json!({"content": "a", "reasoning_content": null}))).unwrap();
        assert_eq!(plain.thoughts, None);
        let call = Answer::read(&completion(json!({"content": null, "tool_calls": [{"id": "x"}]}))).unwrap();
        assert_eq!(call.message(Reasoning::Keep).extra["tool_calls"], json!([{"id": "x"}]));
        for broken in [
            "",
            "[]",
            "{\"choices\":[]}",
            "{\"choices\":3}",
            &completion(json!({"content": null})),
            "{\"choices\":[1]}",
        ] {
            assert!(Answer::read(broken).is_err(), "{broken}");
        }
    }

    #[test]
    fn tokens_are_found_where_each_server_puts_them() {
        let told = |place: &str, value: Value| {
            let mut whole: Value = serde_json::from_str(&completion(json!({"content": "a"}))).unwrap();
            let (parent, name) = place.rsplit_once('/').unwrap();
            whole.pointer_mut(parent).unwrap()[name] = value;
            let Answer { token_ids, prompt_token_ids, .. } = Answer::read(&whole.to_string()).unwrap();
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
            finish: Some("length".into()),
            ..Answer::default()
        };
        let kept = answer.clone().message(Reasoning::Keep);
        assert_eq!(
            (kept.reasoning_content.as_deref(), &kept.extra["finish_reason"]),
            (Some("b"), &json!("length"))
        );
        // Whoever parts thoughts from text leaves none in it: what looks like them is the answer's.
        let dropped = answer.clone().message(Reasoning::Drop);
        assert_eq!((dropped.reasoning_content, dropped.content.as_str()), (None, "<think>x</think>a"));
        let dropped = |content: &str| {
            Answer { content: content.into(), ..Answer::default() }.message(Reasoning::Drop).content
        };
        assert_eq!(dropped("<think>\na\n</think>\n\nb </think> c"), "b </think> c");
        assert_eq!(
            (dropped("a</think>b").as_str(), dropped("<think>a").as_str(), dropped("a").as_str()),
            ("b", "", "a")
        );
        assert_eq!(dropped("<|channel>thought\na\n<channel|>b"), "b");
        assert_eq!((dropped("a<channel|>b").as_str(), dropped("<|channel>thought\na").as_str()), ("b", ""));
        assert_eq!(answer.message(Reasoning::Keep).content, "<think>x</think>a");
    }
}
