//! Parses a row into a conversation, with its messages and tools, and prepares both for chat
//! templates.

use std::borrow::Cow;

use deepspec_core::jsonl::json_type_name;
use serde_json::{Map, Value};

use crate::finish::{self, FINISH_REASON};
use crate::message::{Message, Role, TOOL_CALLS, WEIGHT};
use crate::reasoning;
use crate::records::{RowError, check_starts_with_user, parse_messages};

/// The token ids that the server generated for an answer, if it reported them.
pub const TOKEN_IDS: &str = "token_ids";
/// The token ids of the prompt of a conversation's last answer.
pub const PROMPT_TOKEN_IDS: &str = "prompt_token_ids";
/// Fields that `regenerate` and fine-tuning rows add to messages. Chat templates do not see them.
const HIDDEN_FIELDS: [&str; 4] = [FINISH_REASON, TOKEN_IDS, PROMPT_TOKEN_IDS, WEIGHT];

/// The input of a chat template.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    /// The messages in order.
    pub messages: Vec<Message>,
    /// The tools that the assistant may call, as a JSON array.
    pub tools: Option<Value>,
}

impl From<Vec<Message>> for Conversation {
    fn from(messages: Vec<Message>) -> Self {
        Self { messages, tools: None }
    }
}

impl Conversation {
    /// Parses the messages and `tools` of a row. The `finish_reason` of a row applies to the last
    /// answer, unless the message of that answer has a `finish_reason`.
    ///
    /// # Errors
    /// If a field is missing or malformed, or the first non-system message is not the user's.
    pub fn from_row(row: &Map<String, Value>) -> Result<Self, RowError> {
        let mut messages = parse_messages(row)?;
        check_starts_with_user(&messages)?;
        if let Some(last) = messages.last_mut().filter(|last| last.role == Role::Assistant)
            && let Some(reason) = row.get(FINISH_REASON).filter(|reason| !reason.is_null())
        {
            last.extra.entry(FINISH_REASON).or_insert_with(|| reason.clone());
        }
        Ok(Self { messages, tools: parse_tools(row.get("tools"))? })
    }

    /// Whether the last message has the token ids that the server generated.
    pub(crate) fn has_served_ids(&self) -> bool {
        let last = self.messages.last().filter(|last| last.role == Role::Assistant);
        last.is_some_and(|last| last.extra.contains_key(TOKEN_IDS))
    }
}

/// The tools of a row: an array, or its JSON text as in columnar files. None for an empty array.
fn parse_tools(value: Option<&Value>) -> Result<Option<Value>, RowError> {
    let parsed = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => {
            serde_json::from_str(text).map_err(|_| RowError::Tools { found: "a text that is not JSON" })?
        }
        Some(other) => other.clone(),
    };
    match parsed {
        Value::Null => Ok(None),
        Value::Array(mut tools) => match tools.iter().find(|tool| !tool.is_object() && !tool.is_null()) {
            Some(_) => Err(RowError::Tools { found: "an array with entries that are no objects" }),
            None => {
                tools.retain(|tool| !tool.is_null());
                // Drops nulls that columnar files fill in. The schema in `parameters` stays
                // unchanged.
                for tool in tools.iter_mut().filter_map(Value::as_object_mut) {
                    tool.retain(|_, value| !value.is_null());
                    if let Some(Value::Object(function)) = tool.get_mut("function") {
                        function.retain(|_, value| !value.is_null());
                    }
                }
                Ok((!tools.is_empty()).then_some(Value::Array(tools)))
            }
        },
        other => Err(RowError::Tools { found: json_type_name(&other) }),
    }
}

impl Message {
    /// Whether the answer is truncated, by its `finish_reason` or because the arguments of a tool
    /// call are not valid JSON.
    pub fn is_truncated(&self) -> bool {
        let is_said = || finish::read_finish_reason(&self.extra).is_some_and(|reason| !reason.is_whole());
        let is_broken = || !self.tool_calls().iter().all(finish::has_json_arguments);
        self.role == Role::Assistant && (is_said() || is_broken())
    }

    /// Whether a drafter trains on the message: an assistant message whose `weight` is not 0.
    pub fn is_trained_on(&self) -> bool {
        self.role == Role::Assistant && self.extra.get(WEIGHT).and_then(Value::as_f64) != Some(0.0)
    }

    /// Whether a message has no answer, no reasoning and no tool calls.
    pub fn is_empty(&self) -> bool {
        let kept = self.reasoning_content.as_deref().unwrap_or_default();
        reasoning::is_empty_answer(&self.content) && kept.trim().is_empty() && self.tool_calls().is_empty()
    }

    /// The message's tool calls.
    pub fn tool_calls(&self) -> &[Value] {
        self.extra.get(TOOL_CALLS).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }
}

/// The messages as chat templates expect them. Arguments of calls become objects, where the OpenAI
/// API has JSON text, and [`HIDDEN_FIELDS`] are removed.
pub(crate) fn to_template_messages(messages: &[Message]) -> Cow<'_, [Message]> {
    let ready = |message: &Message| {
        !HIDDEN_FIELDS.iter().any(|note| message.extra.contains_key(*note))
            && message.tool_calls().iter().all(|call| parse_arguments(call).is_none())
    };
    if messages.iter().all(ready) {
        return Cow::Borrowed(messages);
    }
    let mut messages = messages.to_vec();
    for message in &mut messages {
        HIDDEN_FIELDS.iter().for_each(|note| drop(message.extra.shift_remove(*note)));
        if let Some(Value::Array(calls)) = message.extra.get_mut(TOOL_CALLS) {
            for call in calls {
                if let Some(parsed) = parse_arguments(call) {
                    let function = if call.get("function").is_some() { &mut call["function"] } else { call };
                    function["arguments"] = parsed;
                }
            }
        }
    }
    Cow::Owned(messages)
}

/// The arguments of a tool call as an object. None if they are not the JSON text of an object.
fn parse_arguments(call: &Value) -> Option<Value> {
    let text = call.get("function").unwrap_or(call).get("arguments")?.as_str()?;
    serde_json::from_str::<Map<String, Value>>(text).ok().map(Value::Object)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(more: Value) -> Map<String, Value> {
        let mut row = json!({"conversations": [{"role": "user", "content": "a"}]});
        row["tools"] = more;
        row.as_object().unwrap().clone()
    }

    #[test]
    fn tools_are_an_array_or_its_text() {
        let tools = json!([{"type": "function", "function": {"name": "add"}}]);
        let read = |value: Value| Conversation::from_row(&row(value)).map(|found| found.tools);
        assert_eq!(read(tools.clone()).unwrap(), Some(tools.clone()));
        assert_eq!(read(json!(tools.to_string())).unwrap(), Some(tools));
        for none in [json!(null), json!([]), json!("[]"), json!(" "), json!("null")] {
            assert_eq!(read(none).unwrap(), None);
        }
        let problem = |value: Value| read(value).unwrap_err().to_string();
        assert!(problem(json!("[")).contains("`tools`") && problem(json!("[")).contains("not JSON"));
        assert!(problem(json!({})).ends_with("found an object"));
        assert!(problem(json!([1])).ends_with("no objects"));
    }

    #[test]
    fn templates_see_arguments_as_objects_and_none_of_our_notes() {
        let call = |arguments: Value| json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}, {"name": "g", "arguments": "{}"}]});
        let message = |value: Value| Message::try_from(value).unwrap();
        let mut noted = call(json!("{\"b\": 1, \"a\": [2]}"));
        noted["finish_reason"] = json!("length");
        noted["token_ids"] = json!([1, 2]);
        let noted = [message(noted)];
        assert!(noted[0].is_truncated());
        let seen = to_template_messages(&noted);
        let expected = json!([{"function": {"name": "f", "arguments": {"b": 1, "a": [2]}}}, {"name": "g", "arguments": {}}]);
        assert_eq!(json!(seen[0].tool_calls()).to_string(), expected.to_string());
        assert_eq!(seen[0].extra.len(), 1);
        // Arguments that are not an object stay unchanged for the template to handle.
        let odd = [message(
            json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "[1"}}, 3]}),
        )];
        assert!(matches!(to_template_messages(&odd), Cow::Borrowed(_)));
    }
}
