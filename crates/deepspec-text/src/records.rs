//! Finds the conversation of a row in the fields that public data sets use.

use std::borrow::Cow;
use std::sync::Once;

use deepspec_core::jsonl::json_type_name;
use serde_json::{Map, Value, json};

use crate::message::{Message, MessageError, Role};

/// Fields with a list of messages. The first field that holds a list is read.
pub const MESSAGE_KEYS: [&str; 2] = ["conversations", "messages"];

/// Fields of a question, fields appended to the question, and fields of the answer.
const QUESTION_ANSWER_FIELDS: [(&str, &[&str], &[&str]); 3] = [
    ("prompt", &[], &["response", "completion", "answer"]),
    ("instruction", &["input", "context"], &["output", "response"]),
    ("question", &[], &["answer", "response"]),
];

/// A system message outside the list.
const SYSTEM: &str = "system";
/// Earlier question and answer pairs, each a list of two texts.
const HISTORY: &str = "history";

/// A list of user messages without answers.
const TURNS: &str = "turns";

/// Whether [`find_messages`] may read this field.
pub fn is_record_key(key: &str) -> bool {
    MESSAGE_KEYS.contains(&key)
        || [TURNS, SYSTEM, HISTORY].contains(&key)
        || QUESTION_ANSWER_FIELDS
            .iter()
            .any(|(asked, more, answers)| key == *asked || more.contains(&key) || answers.contains(&key))
}

/// The unparsed messages of a row.
#[derive(Debug, PartialEq)]
pub struct RawMessages {
    /// The field with the messages, or the first of several.
    pub key: &'static str,
    /// In the form of OpenAI (`role`, `content`) or of ShareGPT (`from`, `value`).
    pub messages: Vec<Value>,
}

/// Finds the messages of a row:
/// - a list, or its JSON text, in `conversations` or `messages`
/// - a question and an answer in `prompt` and `response`, `instruction` and `output`, or `question`
///   and `answer`, with `history` before them
/// - a list of user messages in `turns`
///
/// A text in `system` becomes the system message.
///
/// # Errors
/// If no field holds messages. The error names the type in `conversations` or `messages`, or all
/// fields.
pub fn find_messages(row: &Map<String, Value>) -> Result<RawMessages, RowError> {
    let mut found = find_messages_or_pairs(row)?;
    if let Some(system) = row.get(SYSTEM) {
        found.messages.splice(0..0, system_message(system, found.messages.first()));
    }
    Ok(found)
}

/// The system message from a row's `system`. None if `system` is not a text, or if the messages
/// have a system message.
pub fn system_message(system: &Value, first: Option<&Value>) -> Option<Value> {
    let text = system.as_str().filter(|text| !text.trim().is_empty())?;
    let speaks = |message: &Value| ["role", "from"].iter().any(|key| message[key] == SYSTEM);
    (!first.is_some_and(speaks)).then(|| json!({"role": SYSTEM, "content": text}))
}

/// Whether a value has a role, in `role` or `from`.
pub fn is_message(value: &Value) -> bool {
    value.get("role").or_else(|| value.get("from")).is_some()
}

fn find_messages_or_pairs(row: &Map<String, Value>) -> Result<RawMessages, RowError> {
    let mut wrong = None;
    // Prefers a list of messages only to a list that contains other objects.
    for fits in [|all: &[Value]| all.iter().all(is_message), |all: &[Value]| all.iter().any(Value::is_object)]
    {
        for key in MESSAGE_KEYS {
            let Some(list) = row.get(key).and_then(parse_list) else { continue };
            let messages: Vec<Value> =
                list.as_array().into_iter().flatten().filter(|value| !value.is_null()).cloned().collect();
            if !messages.is_empty() && fits(&messages) {
                warn_if_ambiguous(row, key);
                return Ok(RawMessages { key, messages });
            }
        }
    }
    for key in MESSAGE_KEYS {
        let Some(value) = row.get(key).filter(|value| !value.is_null()) else { continue };
        match parse_list(value).as_deref() {
            Some(Value::Array(messages)) if messages.is_empty() => {
                wrong = wrong.or(Some((key, "an empty array")));
            }
            Some(Value::Array(_)) => wrong = wrong.or(Some((key, "an array without objects"))),
            _ => wrong = wrong.or(Some((key, json_type_name(value)))),
        }
    }
    if let Some(found) = messages_of_pair(row).or_else(|| messages_of_turns(row)) {
        return Ok(found);
    }
    Err(match wrong {
        Some((key, found)) => RowError::NotMessages { key, found },
        None => RowError::NoConversation { columns: field_names(row) },
    })
}

/// Warns once that rows have messages in both `read` and `other`, and that `read` is used.
pub fn warn_about_two_fields(read: &str, other: &str) {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| tracing::warn!("rows have both `{read}` and `{other}`: `{read}` is read"));
}

fn warn_if_ambiguous(row: &Map<String, Value>, key: &'static str) {
    let has_messages = |other: &&&str| {
        **other != key
            && row
                .get(**other)
                .and_then(parse_list)
                .is_some_and(|value| value[0].is_object() && Some(&*value) != row.get(key))
    };
    if let Some(other) = MESSAGE_KEYS.iter().find(has_messages) {
        warn_about_two_fields(key, other);
    }
}

/// A list, or a list as JSON text, which columnar files use for nested values.
fn parse_list(value: &Value) -> Option<Cow<'_, Value>> {
    match value {
        Value::Array(_) => Some(Cow::Borrowed(value)),
        Value::String(text) if text.trim_start().starts_with('[') => {
            serde_json::from_str(text).ok().map(Cow::Owned)
        }
        _ => None,
    }
}

/// A question and its answer, if any. `prompt` may itself be a list of messages.
fn messages_of_pair(row: &Map<String, Value>) -> Option<RawMessages> {
    let present = |key: &str| row.get(key).filter(|value| !value.is_null());
    let answer_of = |answers: &[&str]| answers.iter().find_map(|key| present(key));
    // Prefers a question that has an answer.
    let (answered, open): (Vec<_>, Vec<_>) =
        QUESTION_ANSWER_FIELDS.iter().partition(|(_, _, answers)| answer_of(answers).is_some());
    answered.into_iter().chain(open).find_map(|&(asked, more, answers)| {
        let question = present(asked)?;
        let answer = answer_of(answers);
        let mut messages = match (parse_list(question).as_deref(), question) {
            (Some(Value::Array(messages)), _)
                if messages.iter().all(Value::is_object) && !messages.is_empty() =>
            {
                messages.clone()
            }
            (_, Value::String(text)) => {
                let mut more = more.iter().filter_map(|key| present(key)).filter_map(Value::as_str);
                let more = more.find(|more| !more.trim().is_empty());
                let text = more.map_or_else(|| text.clone(), |more| format!("{text}\n\n{more}"));
                vec![json!({"role": "user", "content": text})]
            }
            _ => return None,
        };
        match answer {
            None => {}
            Some(Value::String(text)) => messages.push(json!({"role": "assistant", "content": text})),
            Some(Value::Array(said)) if said.iter().all(Value::is_object) => {
                messages.extend(said.iter().cloned())
            }
            Some(_) => return None,
        }
        if let Some(history) = present(HISTORY) {
            messages.splice(0..0, messages_of_history(history)?);
        }
        Some(RawMessages { key: asked, messages })
    })
}

/// The messages of `history`; None if it has another form.
fn messages_of_history(history: &Value) -> Option<Vec<Value>> {
    let mut messages = vec![];
    for pair in history.as_array()? {
        let [question, answer] = pair.as_array()?.as_slice() else { return None };
        messages.push(json!({"role": "user", "content": question.as_str()?}));
        messages.push(json!({"role": "assistant", "content": answer.as_str()?}));
    }
    Some(messages)
}

/// The user messages in `turns`, a field of evaluation suites.
fn messages_of_turns(row: &Map<String, Value>) -> Option<RawMessages> {
    let turns = row.get(TURNS)?.as_array().filter(|turns| !turns.is_empty())?;
    let said: Option<Vec<&str>> = turns.iter().map(Value::as_str).collect();
    let messages = said?.into_iter().map(|text| json!({"role": "user", "content": text})).collect();
    Some(RawMessages { key: TURNS, messages })
}

/// The names of a row's fields, for messages.
fn field_names(row: &Map<String, Value>) -> String {
    let names: Vec<String> = row.keys().take(12).map(|name| format!("`{name}`")).collect();
    if names.is_empty() { "no fields".into() } else { names.join(", ") }
}

/// Why a row has no usable conversation; a phrase that follows "file:line: ".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// No field holds a conversation.
    #[error(
        "no conversation: expected `conversations` or `messages` with a list of messages, `prompt` with `response`, `instruction` with `output`, or `turns`; the row has {columns}"
    )]
    NoConversation {
        /// The names of the row's fields.
        columns: String,
    },
    /// The conversation's field does not hold messages.
    #[error("`{key}` must be a non-empty array of messages, found {found}")]
    NotMessages {
        /// The field.
        key: &'static str,
        /// The type of its value.
        found: &'static str,
    },
    /// One of the messages is malformed.
    #[error("{key}[{index}]: {problem}")]
    Message {
        /// The field that holds the messages.
        key: &'static str,
        /// The message's index, from 0.
        index: usize,
        /// The problem.
        problem: MessageError,
    },
    /// `tools` is not an array of objects.
    #[error("`tools` must be an array of objects or its JSON text, found {found}")]
    Tools {
        /// The type of the value.
        found: &'static str,
    },
    /// The first non-system message is not the user's.
    #[error("Conversation must start with user, found {found}")]
    StartsWith {
        /// The role of the first non-system message.
        found: Role,
    },
    /// There are only system messages.
    #[error("Conversation must start with user, found no message besides the system's")]
    NoUser,
}

/// Parses the messages of a row; see [`find_messages`] for the fields.
///
/// # Errors
/// If no field holds a conversation, or a message is malformed.
pub fn parse_messages(row: &Map<String, Value>) -> Result<Vec<Message>, RowError> {
    let RawMessages { key, messages } = find_messages(row)?;
    let parse = |(index, value): (usize, Value)| {
        Message::try_from(value).map_err(|problem| RowError::Message { key, index, problem })
    };
    messages.into_iter().enumerate().map(parse).collect()
}

/// Checks that the first non-system message is the user's.
///
/// # Errors
/// If another role comes first, or there are only system messages.
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

    /// The field that was read, and the role and text of each message.
    type Said = (&'static str, Vec<(String, String)>);

    fn read(row: Value) -> Result<Said, String> {
        let found = find_messages(row.as_object().unwrap()).map_err(|error| error.to_string())?;
        let said = found.messages.iter().map(|message| {
            (message["role"].as_str().unwrap().into(), message["content"].as_str().unwrap().into())
        });
        Ok((found.key, said.collect()))
    }

    #[test]
    fn the_field_that_holds_messages_is_used() {
        let messages = json!([{"role": "user", "content": "a"}]);
        let said = vec![("user".to_string(), "a".to_string())];
        for row in [
            json!({"conversations": messages}),
            json!({"conversations": messages.to_string()}),
            json!({"conversations": null, "messages": messages}),
            json!({"conversations": "a talk", "messages": messages}),
            json!({"conversations": [], "messages": messages.to_string()}),
            json!({"prompt": "a"}),
            json!({"prompt": messages}),
            json!({"instruction": "a", "input": " "}),
            json!({"turns": ["a"]}),
        ] {
            assert_eq!(read(row.clone()).unwrap().1, said, "{row}");
        }
        let answered =
            vec![("user".to_string(), "a\n\nb".to_string()), ("assistant".to_string(), "c".to_string())];
        assert_eq!(read(json!({"instruction": "a", "input": "b", "output": "c"})).unwrap().1, answered);
        assert_eq!(read(json!({"prompt": "a", "response": "c"})).unwrap().1[1].1, "c");
        assert_eq!(
            read(json!({"prompt": "a", "completion": [{"role": "assistant", "content": "c"}]})).unwrap().1[1]
                .1,
            "c"
        );
        assert_eq!(
            read(json!({"prompt": "x", "instruction": "a", "context": "b", "output": "c"})).unwrap().1,
            answered
        );
        let told = [("system", "s"), ("user", "h"), ("assistant", "i"), ("user", "a"), ("assistant", "c")];
        let row = json!({"system": "s", "history": [["h", "i"]], "instruction": "a", "output": "c"});
        assert_eq!(read(row).unwrap().1, told.map(|(role, text)| (role.to_string(), text.to_string())));
        let row = json!({"conversations": [{"x": 1}], "messages": [null, {"role": "user", "content": "a"}]});
        assert_eq!(read(row).unwrap(), ("messages", said));
    }

    #[test]
    fn what_holds_none_is_named() {
        assert_eq!(
            read(json!({"messages": 1})).unwrap_err(),
            "`messages` must be a non-empty array of messages, found a number"
        );
        assert_eq!(
            read(json!({"conversations": "talk"})).unwrap_err(),
            "`conversations` must be a non-empty array of messages, found a string"
        );
        let error = read(json!({"text": "a", "id": 1})).unwrap_err();
        assert!(error.contains("`text`, `id`") && error.contains("`prompt` with `response`"), "{error}");
        assert!(read(json!({"turns": [1]})).is_err());
    }
}
