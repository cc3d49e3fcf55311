//! Conversation records: the messages of a JSONL row.

use std::fmt;

use deepspec_core::jsonl::kind_of;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The person asking.
    User,
    /// The model answering.
    Assistant,
    /// The result of a tool that the assistant called.
    Tool,
}

impl Role {
    const ALL: [Self; 4] = [Self::System, Self::User, Self::Assistant, Self::Tool];

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

/// One message. Fields that we do not know (`tool_calls`, `name`, …) travel along and reach the chat template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value")]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; empty where an assistant only calls tools.
    pub content: String,
    /// What the model thought before it answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Every other field of the record, in its order.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message of role and text alone.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning_content: None, extra: Map::new() }
    }
}

/// Why a record is no message; a phrase to follow its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Not a JSON object.
    #[error("expected an object with `role` and `content`, found {found}")]
    NotAnObject {
        /// What it is.
        found: &'static str,
    },
    /// A field is missing or has another type than expected.
    #[error("`{field}` must be a string, found {found}")]
    Field {
        /// The field.
        field: &'static str,
        /// What it holds.
        found: &'static str,
    },
    /// Tool calls given as a text.
    #[error("`tool_calls` is a text but no JSON")]
    Calls,
    /// A role outside the closed set.
    #[error("unknown role `{role}` (known: system, user, assistant, tool)")]
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
            other => return Err(MessageError::NotAnObject { found: kind_of(&other) }),
        };
        let role = text("role", fields.shift_remove("role").as_ref())?;
        let role =
            Role::ALL.into_iter().find(|known| known.as_str() == role).ok_or(MessageError::Role { role })?;
        let content = match fields.shift_remove("content") {
            // An assistant that only calls tools has nothing to say.
            None | Some(Value::Null) if fields.contains_key("tool_calls") => String::new(),
            Some(Value::Array(parts)) => text_parts(&parts)?,
            content => text("content", content.as_ref())?,
        };
        let reasoning_content = match fields.shift_remove("reasoning_content") {
            None | Some(Value::Null) => None,
            reasoning => Some(text("reasoning_content", reasoning.as_ref())?),
        };
        // Columnar files keep nested lists as their JSON text.
        if let Some(Value::String(text)) = fields.get("tool_calls") {
            match serde_json::from_str(text) {
                Ok(calls) => drop(fields.insert("tool_calls".into(), calls)),
                Err(_) if text.trim().is_empty() => drop(fields.shift_remove("tool_calls")),
                Err(_) => return Err(MessageError::Calls),
            }
        }
        Ok(Self { role, content, reasoning_content, extra: fields })
    }
}

/// The string that `value` must be.
fn text(field: &'static str, value: Option<&Value>) -> Result<String, MessageError> {
    match value {
        Some(Value::String(text)) => Ok(text.clone()),
        other => Err(MessageError::Field { field, found: other.map_or("nothing", kind_of) }),
    }
}

/// OpenAI's other form of `content`: `[{"type": "text", "text": …}]`, joined as chat templates join it.
fn text_parts(parts: &[Value]) -> Result<String, MessageError> {
    parts
        .iter()
        .map(|part| match part.get("type").and_then(Value::as_str) {
            Some("text") => text("content[].text", part.get("text")),
            _ => {
                Err(MessageError::Field { field: "content", found: "an array with parts that are not text" })
            }
        })
        .collect()
}

/// Why a row has no usable conversation; a phrase to follow "file:line: ".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// `conversations` is missing, empty or no array.
    #[error("`conversations` must be a non-empty array of messages, found {found}")]
    NotMessages {
        /// What it is.
        found: &'static str,
    },
    /// One of the messages is malformed.
    #[error("conversations[{index}]: {problem}")]
    Message {
        /// Its place, from 0.
        index: usize,
        /// What is wrong with it.
        problem: MessageError,
    },
    /// `tools` is no array of objects.
    #[error("`tools` must be an array of objects or its JSON text, found {found}")]
    Tools {
        /// What it is.
        found: &'static str,
    },
    /// Someone else than the user speaks first.
    #[error("Conversation must start with user, found {found}")]
    StartsWith {
        /// The role of the first message that is no system message.
        found: Role,
    },
    /// Nobody asks anything.
    #[error("Conversation must start with user, found no message besides the system's")]
    NoUser,
}

/// Parses the `conversations` of a JSONL row, in the OpenAI form `{"role", "content"}`.
///
/// # Errors
/// If the field is missing or empty, or a message is malformed.
pub fn conversation(row: &Map<String, Value>) -> Result<Vec<Message>, RowError> {
    let parse = |(index, value): (usize, &Value)| {
        Message::try_from(value.clone()).map_err(|problem| RowError::Message { index, problem })
    };
    records(row)?.iter().enumerate().map(parse).collect()
}

fn records(row: &Map<String, Value>) -> Result<&[Value], RowError> {
    match row.get("conversations") {
        Some(Value::Array(records)) if records.is_empty() => {
            Err(RowError::NotMessages { found: "an empty array" })
        }
        Some(Value::Array(records)) => Ok(records),
        other => Err(RowError::NotMessages { found: other.map_or("nothing", kind_of) }),
    }
}

/// Checks that the first message that is no system message is the user's.
///
/// # Errors
/// With the role that speaks first instead.
pub fn check_starts_with_user(messages: &[Message]) -> Result<(), RowError> {
    match messages.iter().map(|message| message.role).find(|&role| role != Role::System) {
        Some(Role::User) => Ok(()),
        Some(found) => Err(RowError::StartsWith { found }),
        None => Err(RowError::NoUser),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let messages = conversation(&row(calls)).unwrap();
        assert_eq!(messages[0].content, "ab");
        assert_eq!(
            serde_json::to_string(&messages[1..]).unwrap(),
            r#"[{"role":"assistant","content":"","reasoning_content":"hm","tool_calls":[{"z":1,"a":2}]},{"role":"tool","content":"3","name":"add"}]"#
        );
        let again: Vec<Message> = serde_json::from_value(json!(messages)).unwrap();
        assert_eq!(again, messages);
    }

    #[test]
    fn a_bad_row_says_where_and_why() {
        let problem = |conversations| conversation(&row(conversations)).unwrap_err().to_string();
        assert_eq!(
            problem(json!(1)),
            "`conversations` must be a non-empty array of messages, found a number"
        );
        assert!(problem(json!([])).ends_with("found an empty array"));
        assert!(conversation(&Map::new()).unwrap_err().to_string().ends_with("found nothing"));
        assert_eq!(
            problem(json!([{"role": "developer", "content": ""}])),
            "conversations[0]: unknown role `developer` (known: system, user, assistant, tool)"
        );
        assert_eq!(
            problem(json!([{"role": "user", "content": "a"}, {"role": "user"}])),
            "conversations[1]: `content` must be a string, found nothing"
        );
        assert!(problem(json!([{"role": "user", "content": [{"type": "image"}]}])).contains("not text"));
        assert!(problem(json!(["hi"])).contains("expected an object"));
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
        assert!(read(json!(" ")).unwrap().extra.is_empty());
        assert_eq!(read(json!("[")).unwrap_err().to_string(), "`tool_calls` is a text but no JSON");
    }
}
