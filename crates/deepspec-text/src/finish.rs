//! Finish reasons of answers, normalised across servers.

use serde_json::{Map, Value};

/// The field of messages, rows and chat completions with the reason.
pub const FINISH_REASON: &str = "finish_reason";

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum FinishReason {
    /// The model ended its turn.
    Stop,
    /// The model ended its turn with tool calls.
    ToolCalls,
    /// The answer reached its token limit or the end of the context.
    Length,
    /// A content filter cut the answer.
    ContentFilter,
    /// A stop string of the request cut the answer.
    StopSequence,
    /// The call was cut: its arguments are not valid JSON.
    InvalidToolCall,
    /// The server aborted the request.
    Abort,
    /// The server failed.
    Error,
    /// The server stopped an answer that repeated itself.
    Repetition,
    /// The server gave no known reason.
    #[default]
    Unknown,
}

/// Whether an answer is usable for training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completeness {
    /// The model finished its answer and generated the end of turn.
    Whole,
    /// The answer's text is usable, but the model did not generate the end of turn.
    Truncated,
    /// The request failed and can be sent again.
    Broken,
}

/// Finish reasons in lower case: OpenAI, vLLM, SGLang, llama.cpp, TGI, Mistral, Anthropic, Gemini,
/// DeepSeek.
const NAMES: [(&str, FinishReason); 38] = [
    ("stop", FinishReason::Stop),
    ("eos", FinishReason::Stop),
    ("eos_token", FinishReason::Stop),
    ("end_turn", FinishReason::Stop),
    ("complete", FinishReason::Stop),
    ("completed", FinishReason::Stop),
    ("tool_calls", FinishReason::ToolCalls),
    ("tool_call", FinishReason::ToolCalls),
    ("tool_use", FinishReason::ToolCalls),
    ("function_call", FinishReason::ToolCalls),
    ("length", FinishReason::Length),
    ("limit", FinishReason::Length),
    ("max_length", FinishReason::Length),
    ("max_tokens", FinishReason::Length),
    ("max_new_tokens", FinishReason::Length),
    ("max_output_tokens", FinishReason::Length),
    ("max_completion_tokens", FinishReason::Length),
    ("model_length", FinishReason::Length),
    ("model_context_window_exceeded", FinishReason::Length),
    ("content_filter", FinishReason::ContentFilter),
    ("safety", FinishReason::ContentFilter),
    ("recitation", FinishReason::ContentFilter),
    ("prohibited_content", FinishReason::ContentFilter),
    ("refusal", FinishReason::ContentFilter),
    ("stop_sequence", FinishReason::StopSequence),
    ("stop_string", FinishReason::StopSequence),
    ("invalid_tool_call", FinishReason::InvalidToolCall),
    ("malformed_function_call", FinishReason::InvalidToolCall),
    ("abort", FinishReason::Abort),
    ("aborted", FinishReason::Abort),
    ("cancelled", FinishReason::Abort),
    ("canceled", FinishReason::Abort),
    ("timeout", FinishReason::Abort),
    ("error", FinishReason::Error),
    ("internal_error", FinishReason::Error),
    ("insufficient_system_resource", FinishReason::Error),
    ("repetition", FinishReason::Repetition),
    ("unknown", FinishReason::Unknown),
];

impl FinishReason {
    /// Parses a server's finish reason, in any case.
    pub fn parse(word: &str) -> Self {
        let word = word.trim().to_ascii_lowercase();
        let known = NAMES.iter().find(|(known, _)| *known == word).map(|&(_, reason)| reason);
        known.unwrap_or_else(|| match word.as_str() {
            word if ["error", "fail", "overload", "unavailable"].iter().any(|part| word.contains(part)) => {
                Self::Error
            }
            word if ["abort", "cancel", "timeout", "timed"].iter().any(|part| word.contains(part)) => {
                Self::Abort
            }
            _ => Self::Unknown,
        })
    }

    /// Parses the `finish_reason` of a message, a row or a choice. None if it is null or absent.
    ///
    /// SGLang's native endpoints give an object with the reason in `type`.
    pub fn from_field(value: Option<&Value>) -> Option<Self> {
        match value? {
            Value::Null => None,
            Value::String(word) if word.trim().is_empty() => None,
            Value::String(word) => Some(Self::parse(word)),
            Value::Object(fields) => Self::from_field(fields.get("type")),
            _ => Some(Self::Unknown),
        }
    }

    /// Parses a choice of a chat completion whose request had the stop strings `stops`.
    ///
    /// For a stop string, most servers also report `stop`. vLLM names the string in `stop_reason`,
    /// SGLang in `matched_stop`. If a server has neither field, an answer of a request with stop
    /// strings counts as cut. Routers repeat the reason in `stop_reason`.
    pub fn from_choice(choice: &Value, stops: &[&str]) -> Self {
        if choice.get("error").is_some_and(|error| !error.is_null()) {
            return Self::Error;
        }
        let reason = Self::from_field(choice.get(FINISH_REASON)).unwrap_or(Self::Unknown);
        let arguments_are_json = choice["message"]["tool_calls"]
            .as_array()
            .is_none_or(|calls| calls.iter().all(has_json_arguments));
        if !arguments_are_json && reason.completeness() != Completeness::Broken {
            return Self::InvalidToolCall;
        }
        if reason != Self::Stop {
            return reason;
        }
        let named = ["stop_reason", "matched_stop"].map(|name| choice.get(name));
        let mut texts = named.into_iter().flatten().filter_map(Value::as_str);
        match named {
            _ if texts.any(|text| stops.contains(&text)) => Self::StopSequence,
            [None, None] if !stops.is_empty() => Self::StopSequence,
            // A token id, null, or another word for the end of turn.
            _ => Self::Stop,
        }
    }

    /// The reason as rows, reports and this project's server write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::ToolCalls => "tool_calls",
            Self::Length => "length",
            Self::ContentFilter => "content_filter",
            Self::StopSequence => "stop_sequence",
            Self::InvalidToolCall => "invalid_tool_call",
            Self::Abort => "abort",
            Self::Error => "error",
            Self::Repetition => "repetition",
            Self::Unknown => "unknown",
        }
    }

    /// Whether an answer with this reason is whole, truncated or broken.
    pub fn completeness(self) -> Completeness {
        match self {
            Self::Stop | Self::ToolCalls => Completeness::Whole,
            Self::Length
            | Self::ContentFilter
            | Self::StopSequence
            | Self::InvalidToolCall
            | Self::Unknown => Completeness::Truncated,
            Self::Abort | Self::Error | Self::Repetition => Completeness::Broken,
        }
    }

    /// Whether the model ended its turn.
    pub fn is_whole(self) -> bool {
        self.completeness() == Completeness::Whole
    }
}

/// Whether the arguments of a tool call are valid JSON. Absent arguments and objects count as
/// valid.
pub(crate) fn has_json_arguments(call: &Value) -> bool {
    match call.get("function").unwrap_or(call).get("arguments") {
        Some(Value::String(text)) => {
            text.trim().is_empty() || serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
        }
        _ => true,
    }
}

/// The finish reason of a message or a row.
pub(crate) fn read_finish_reason(fields: &Map<String, Value>) -> Option<FinishReason> {
    FinishReason::from_field(fields.get(FINISH_REASON))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_of_all_servers_are_one_vocabulary() {
        for (word, expected) in NAMES {
            assert_eq!(FinishReason::parse(word), expected);
            assert_eq!(FinishReason::parse(&word.to_uppercase()), expected);
            assert_eq!(FinishReason::parse(expected.name()), expected, "what is written is read again");
        }
        assert_eq!(FinishReason::parse("something new"), FinishReason::Unknown);
        assert_eq!(FinishReason::parse("server_error"), FinishReason::Error);
        assert_eq!(FinishReason::parse("timed out"), FinishReason::Abort);
        assert_eq!(
            FinishReason::from_field(Some(&json!({"type": "abort", "message": "x"}))),
            Some(FinishReason::Abort)
        );
        assert_eq!(FinishReason::from_field(Some(&json!(null))), None);
        assert_eq!(FinishReason::from_field(None), None);
    }

    #[test]
    fn stop_strings_and_cut_calls_are_told_from_ends_of_turns() {
        let read = |choice: Value, stops: bool| {
            FinishReason::from_choice(&choice, if stops { &["END"] } else { &[] })
        };
        assert_eq!(read(json!({"finish_reason": "stop"}), false), FinishReason::Stop);
        assert_eq!(read(json!({"finish_reason": "stop"}), true), FinishReason::StopSequence);
        assert_eq!(read(json!({"finish_reason": "stop", "stop_reason": null}), true), FinishReason::Stop);
        assert_eq!(
            read(json!({"finish_reason": "stop", "stop_reason": "END"}), true),
            FinishReason::StopSequence
        );
        assert_eq!(read(json!({"finish_reason": "stop", "matched_stop": 151645}), true), FinishReason::Stop);
        assert_eq!(
            read(json!({"finish_reason": "stop", "stop_reason": null, "matched_stop": "END"}), true),
            FinishReason::StopSequence
        );
        for word in ["end_turn", "stop", "<|im_end|>"] {
            assert_eq!(read(json!({"finish_reason": "stop", "stop_reason": word}), true), FinishReason::Stop);
        }
        assert_eq!(
            read(json!({"finish_reason": "stop", "error": {"message": "x"}}), false),
            FinishReason::Error
        );
        assert_eq!(read(json!({"finish_reason": null}), false), FinishReason::Unknown);
        assert_eq!(read(json!({"finish_reason": ""}), false), FinishReason::Unknown);
        let call = |arguments: &str, finish: &str| json!({"finish_reason": finish, "message": {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}});
        assert_eq!(read(call("{\"a\": 1}", "tool_calls"), false), FinishReason::ToolCalls);
        assert_eq!(read(call("{\"a\": ", "tool_calls"), false), FinishReason::InvalidToolCall);
        assert_eq!(read(call("{\"a\": ", "stop"), false), FinishReason::InvalidToolCall);
        assert_eq!(read(call("{\"a\": ", "abort"), false), FinishReason::Abort);
    }
}
