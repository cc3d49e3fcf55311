//! The messages of a JSONL row.

use std::fmt;

use deepspec_core::jsonl::json_type_name;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The role of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// Parses a role as data sets and servers name it, in any case; `None` if it is unknown.
    ///
    /// `developer` is OpenAI's newer name for system, `model` is Gemma's for assistant, `function`
    /// is an older one for tool. Further names come from ShareGPT and Llama.
    pub fn from_speaker(name: &str) -> Option<Self> {
        Some(match name.trim().to_ascii_lowercase().as_str() {
            "system" | "developer" => Self::System,
            "user" | "human" => Self::User,
            "assistant" | "model" | "gpt" | "chatgpt" | "bot" | "bing" | "bard" => Self::Assistant,
            "tool" | "function" | "ipython" | "observation" => Self::Tool,
            _ => return None,
        })
    }

    /// The name used in records and templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One message. Other fields (`tool_calls`, `name`, …) are passed to the chat template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value")]
pub struct Message {
    /// The role.
    pub role: Role,
    /// The text; empty if an assistant only calls tools.
    pub content: String,
    /// The model's reasoning before its answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// All other fields of the record, in order.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message with only a role and a text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning_content: None, extra: Map::new() }
    }
}

/// Why a record is not a message; a phrase that follows its position.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Not a JSON object.
    #[error("expected an object with `role` and `content`, found {found}")]
    NotAnObject {
        /// The type of the value.
        found: &'static str,
    },
    /// A field is missing or has another type than expected.
    #[error("`{field}` must be a string, found {found}")]
    Field {
        /// The field.
        field: &'static str,
        /// The type of its value.
        found: &'static str,
    },
    /// `tool_calls` is not a list.
    #[error("`tool_calls` must be an array of calls or its JSON text, found {found}")]
    Calls {
        /// The type of the value.
        found: &'static str,
    },
    /// A weight that is neither 0 nor 1.
    #[error("`weight` must be 1, or 0 for a message that is not trained on, found {found}")]
    Weight {
        /// The weight as written.
        found: String,
    },
    /// An unknown role.
    #[error(
        "unknown role `{}` (known: system or developer, user, assistant or model, tool or function)",
        role.escape_debug()
    )]
    Role {
        /// The role as written.
        role: String,
    },
}

impl TryFrom<Value> for Message {
    type Error = MessageError;

    fn try_from(value: Value) -> Result<Self, MessageError> {
        let mut fields = match value {
            Value::Object(fields) => fields,
            other => return Err(MessageError::NotAnObject { found: json_type_name(&other) }),
        };
        // An explicit null means an empty text, unlike a missing field.
        let has_null = TEXT_FIELDS.iter().any(|name| fields.get(*name).is_some_and(Value::is_null));
        // Python tools write an explicit null for every field that is not set.
        fields.retain(|_, value| !value.is_null());
        // ShareGPT names the same two fields otherwise; some data sets mix the names.
        let speaker =
            if fields.contains_key("role") || !fields.contains_key("from") { "role" } else { "from" };
        let own = if speaker == "role" { TEXT_FIELDS[0] } else { TEXT_FIELDS[1] };
        let said =
            [own].into_iter().chain(TEXT_FIELDS).find(|name| fields.contains_key(*name)).unwrap_or(own);
        let role = require_string(speaker, fields.shift_remove(speaker).as_ref())?;
        let role = Role::from_speaker(&role).ok_or(MessageError::Role { role })?;
        let has_calls = fields.contains_key(TOOL_CALLS);
        parse_calls(&mut fields)?;
        if let Some(weight) = fields.get(WEIGHT).filter(|_| role == Role::Assistant)
            && !weight.as_f64().is_some_and(|weight| weight == 0.0 || weight == 1.0)
        {
            return Err(MessageError::Weight { found: weight.to_string() });
        }
        let mut reasoning_content = take_reasoning(&mut fields)?;
        // Text may be missing if an assistant calls tools or only thinks, or if a tool returns
        // nothing.
        let says_otherwise = has_null || reasoning_content.is_some() || has_calls;
        let content = match fields.shift_remove(said) {
            None if matches!(role, Role::Assistant | Role::Tool) && says_otherwise => String::new(),
            Some(Value::Array(parts)) => {
                let (said, reasoning) = text_parts(&parts)?;
                reasoning_content = reasoning_content.or(reasoning);
                said
            }
            content => require_string(said, content.as_ref())?,
        };
        Ok(Self { role, content, reasoning_content, extra: fields })
    }
}

/// Fields with a message's text: OpenAI's, ShareGPT's and another common one.
pub const TEXT_FIELDS: [&str; 3] = ["content", "value", "text"];
/// The field with an assistant's tool calls.
pub(crate) const TOOL_CALLS: &str = "tool_calls";

/// OpenAI's field of fine-tuning rows: an assistant message of weight 0 is context and not trained
/// on.
pub const WEIGHT: &str = "weight";

/// Parses `tool_calls` that a columnar file stores as JSON text, and removes nulls from calls. An empty list is
/// removed: some templates, such as that of gpt-oss, only ask whether the key is there.
fn parse_calls(fields: &mut Map<String, Value>) -> Result<(), MessageError> {
    if let Some(Value::String(text)) = fields.get(TOOL_CALLS) {
        match serde_json::from_str(text) {
            Ok(calls) => drop(fields.insert(TOOL_CALLS.into(), calls)),
            Err(_) if text.trim().is_empty() => drop(fields.shift_remove(TOOL_CALLS)),
            Err(_) => return Err(MessageError::Calls { found: "a text that is not JSON" }),
        }
    }
    match fields.get_mut(TOOL_CALLS) {
        Some(Value::Null) => drop(fields.shift_remove(TOOL_CALLS)),
        // Arguments are JSON that the model wrote, in which null is a value.
        Some(Value::Array(calls)) => {
            calls.retain(|call| !call.is_null());
            for call in calls.iter_mut().filter_map(Value::as_object_mut) {
                call.retain(|_, value| !value.is_null());
                if let Some(Value::Object(function)) = call.get_mut("function") {
                    function.retain(|_, value| !value.is_null());
                }
            }
            if calls.is_empty() {
                fields.shift_remove(TOOL_CALLS);
            }
        }
        Some(other) => return Err(MessageError::Calls { found: json_type_name(other) }),
        None => {}
    }
    Ok(())
}

/// Fields with an assistant's reasoning: of SGLang and older vLLM, of newer vLLM, of DeepSpec's
/// generator.
pub const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// Removes and returns the reasoning of a message. Values that are not strings stay, because
/// `reasoning` and `thinking` may mean something else.
fn take_reasoning(fields: &mut Map<String, Value>) -> Result<Option<String>, MessageError> {
    if let Some(other) = fields.get(REASONING_FIELDS[0]).filter(|value| !value.is_string()) {
        return Err(MessageError::Field { field: REASONING_FIELDS[0], found: json_type_name(other) });
    }
    let mut found = None;
    for name in REASONING_FIELDS {
        if let Some(Value::String(text)) = fields.get(name) {
            let text = text.clone();
            fields.shift_remove(name);
            found = found.or((!text.is_empty()).then_some(text));
        }
    }
    Ok(found)
}

/// `value` as a string, or an error that names the field.
fn require_string(field: &'static str, value: Option<&Value>) -> Result<String, MessageError> {
    match value {
        Some(Value::String(text)) => Ok(text.clone()),
        other => Err(MessageError::Field { field, found: type_name(other) }),
    }
}

/// The type of a value, for messages.
fn type_name(value: Option<&Value>) -> &'static str {
    value.map_or("nothing", json_type_name)
}

/// Parses `content` as a list of parts. Joins texts with line breaks, as vLLM does. Reasoning
/// parts, as Anthropic and Mistral write them, are returned separately.
fn text_parts(parts: &[Value]) -> Result<(String, Option<String>), MessageError> {
    let (mut said, mut reasoning): (Vec<&str>, Vec<&str>) = (vec![], vec![]);
    for part in parts.iter().filter(|part| !part.is_null()) {
        let kind = part.get("type").and_then(Value::as_str);
        let field = |name: &str| part.get(name).and_then(Value::as_str);
        match (part, kind) {
            (Value::String(text), _) => said.push(text),
            (_, Some("text" | "input_text" | "output_text")) => match field("text") {
                Some(text) => said.push(text),
                None if part.get("text").is_some_and(Value::is_null) => {}
                None => {
                    return Err(MessageError::Field {
                        field: "content[].text",
                        found: type_name(part.get("text")),
                    });
                }
            },
            (_, Some("thinking" | "reasoning")) => {
                reasoning.extend(REASONING_FIELDS.into_iter().chain(["text"]).find_map(field))
            }
            (_, None) if field("text").is_some() => said.extend(field("text")),
            _ => {
                return Err(MessageError::Field {
                    field: "content",
                    found: "an array with parts that are not text",
                });
            }
        }
    }
    Ok((said.join("\n"), (!reasoning.is_empty()).then(|| reasoning.join("\n"))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{RowError, check_starts_with_user, parse_messages};
    use serde_json::json;

    fn row(conversations: Value) -> Map<String, Value> {
        Map::from_iter([("conversations".to_owned(), conversations)])
    }

    #[test]
    fn unknown_fields_travel_along() {
        let calls = json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [{"z": 1, "a": 2}]},
            {"role": "tool", "content": "3", "name": "add"},
        ]);
        let messages = parse_messages(&row(calls)).unwrap();
        assert_eq!(messages[0].content, "a\nb");
        assert_eq!(
            serde_json::to_string(&messages[1..]).unwrap(),
            r#"[{"role":"assistant","content":"","reasoning_content":"hm","tool_calls":[{"z":1,"a":2}]},{"role":"tool","content":"3","name":"add"}]"#
        );
        let again: Vec<Message> = serde_json::from_value(json!(messages)).unwrap();
        assert_eq!(again, messages);
    }

    #[test]
    fn a_bad_row_says_where_and_why() {
        let problem = |conversations| parse_messages(&row(conversations)).unwrap_err().to_string();
        assert_eq!(
            problem(json!(1)),
            "`conversations` must be a non-empty array of messages, found a number"
        );
        assert!(problem(json!([])).ends_with("found an empty array"));
        assert!(parse_messages(&Map::new()).unwrap_err().to_string().ends_with("no fields"));
        assert!(
            problem(json!([{"role": "narrator", "content": ""}]))
                .starts_with("conversations[0]: unknown role `narrator` (known: ")
        );
        assert_eq!(
            problem(json!([{"role": "user", "content": "a"}, {"role": "user"}])),
            "conversations[1]: `content` must be a string, found nothing"
        );
        assert!(problem(json!([{"role": "user", "content": [{"type": "image"}]}])).contains("not text"));
        assert!(problem(json!(["hi", {"role": "user", "content": "a"}])).contains("expected an object"));
        assert!(problem(json!(["hi"])).ends_with("found an array without objects"));
    }

    #[test]
    fn roles_go_by_many_names_in_any_case() {
        let role = |name: &str| {
            Message::try_from(json!({"role": name, "content": "a"})).map(|message| message.role).ok()
        };
        for (names, expected) in [
            (["system", "developer", "System"], Role::System),
            (["user", "USER", "human"], Role::User),
            (["assistant", "Assistant", "model"], Role::Assistant),
            (["tool", "function", "ipython"], Role::Tool),
        ] {
            names.into_iter().for_each(|name| assert_eq!(role(name), Some(expected), "{name}"));
        }
        assert_eq!(role("narrator"), None);
        let sharegpt = Message::try_from(json!({"from": "human", "value": "a"})).unwrap();
        assert_eq!((sharegpt.role, sharegpt.content.as_str(), sharegpt.extra.len()), (Role::User, "a", 0));
    }

    #[test]
    fn nulls_are_absent() {
        let dumped = json!({"role": "assistant", "content": "a", "refusal": null, "tool_calls": null, "reasoning_content": null, "function_call": null});
        assert_eq!(Message::try_from(dumped).unwrap(), Message::new(Role::Assistant, "a"));
        let call = json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": null, "type": "function", "function": {"name": "f", "arguments": {"a": null}, "strict": null}}, null]});
        let call = Message::try_from(call).unwrap();
        assert_eq!(
            json!(call.tool_calls()),
            json!([{"type": "function", "function": {"name": "f", "arguments": {"a": null}}}])
        );
        assert!(Message::try_from(json!({"role": "assistant", "content": null})).unwrap().is_empty());
        assert!(Message::try_from(json!({"role": "user", "content": null})).is_err());
    }

    #[test]
    fn thoughts_go_by_three_names() {
        for name in REASONING_FIELDS {
            let message =
                Message::try_from(json!({"role": "assistant", "content": "a", name: "hm"})).unwrap();
            assert_eq!(
                (message.reasoning_content.as_deref(), message.extra.len()),
                (Some("hm"), 0),
                "{name}"
            );
        }
        let parts = json!({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]});
        let message = Message::try_from(parts).unwrap();
        assert_eq!((message.reasoning_content.as_deref(), message.content.as_str()), (Some("hm"), "a"));
        let flag = Message::try_from(json!({"role": "assistant", "content": "a", "thinking": true})).unwrap();
        assert_eq!(flag.extra["thinking"], true);
    }

    #[test]
    fn whoever_speaks_first_is_the_user() {
        let said = |role| Message::new(role, "a");
        assert_eq!(check_starts_with_user(&[said(Role::System), said(Role::User)]), Ok(()));
        assert_eq!(
            check_starts_with_user(&[said(Role::Assistant)]),
            Err(RowError::StartsWith { found: Role::Assistant })
        );
        assert_eq!(check_starts_with_user(&[said(Role::System)]), Err(RowError::NoUser));
        assert_eq!(check_starts_with_user(&[]), Err(RowError::NoUser));
    }

    #[test]
    fn calls_are_a_list_or_its_text() {
        let read = |calls: Value| {
            Message::try_from(json!({"role": "assistant", "content": null, "tool_calls": calls}))
        };
        let calls = json!([{"name": "f"}]);
        assert_eq!(
            read(calls.clone()).unwrap().tool_calls(),
            read(json!(calls.to_string())).unwrap().tool_calls()
        );
        assert_eq!(read(json!(calls.to_string())).unwrap().extra["tool_calls"], calls);
        for empty in [json!(" "), json!([]), json!("[]"), json!([null])] {
            assert!(read(empty).unwrap().extra.is_empty());
        }
        // The key says that the assistant's text may be missing.
        let bare = Message::try_from(json!({"role": "assistant", "tool_calls": []})).unwrap();
        assert!(bare.is_empty() && bare.extra.is_empty());
        assert_eq!(
            read(json!("[")).unwrap_err().to_string(),
            "`tool_calls` must be an array of calls or its JSON text, found a text that is not JSON"
        );
    }
}
