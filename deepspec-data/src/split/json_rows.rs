//! Rows that come as JSON objects, in ShareGPT's or OpenAI's shape.

use deepspec_core::jsonl::kind_of;
use deepspec_core::row;
use serde_json::{Map, Value};

use super::conversation::{Conversation, Id, Kind, Problem, Said, calls_in_text};
use super::roles::{Roles, Shape};
use deepspec_rows::MESSAGE_KEYS;

/// Turns a row into a conversation; fields that we do not know travel along.
///
/// # Errors
/// Why the row is unusable.
pub fn conversation(mut row: Map<String, Value>, roles: &Roles) -> Result<Conversation, Problem> {
    let (key, messages) = MESSAGE_KEYS
        .iter()
        .find_map(|&key| row.shift_remove(key).filter(|found| !found.is_null()).map(|found| (key, found)))
        .ok_or_else(|| Kind::NoMessages.because("no `conversations` or `messages`"))?;
    let Value::Array(messages) = messages else {
        let found = kind_of(&messages);
        return Err(Kind::NoMessages.because(format!("`{key}` must be a list, found {found}")));
    };
    let id = row.shift_remove("id").map_or(Ok(Id::Index), id);
    let mut out = Conversation::new(id?, inside(row));
    for (position, value) in messages.into_iter().enumerate() {
        message(value, roles, &mut out).map_err(|problem| at(key, position, problem))?;
    }
    out.check()
}

/// Says which message a problem is about.
fn at(key: &str, position: usize, problem: Problem) -> Problem {
    problem.kind.because(format!("`{key}[{position}]`: {}", problem.text))
}

/// A row's id; null is none.
///
/// # Errors
/// If it is neither text nor an integer of 64 bits.
fn id(value: Value) -> Result<Id, Problem> {
    match value {
        Value::Null => Ok(Id::Index),
        Value::String(id) if !id.is_empty() => Ok(Id::Text(id)),
        Value::Number(id) => {
            row::id_of_number(&id).map(Id::Number).map_err(|problem| Kind::Id.because(problem))
        }
        other => Err(Kind::Id
            .because(format!("`id` must be a non-empty string or an integer, found {}", kind_of(&other)))),
    }
}

fn message(message: Value, roles: &Roles, out: &mut Conversation) -> Result<(), Problem> {
    let Value::Object(mut message) = message else {
        return Err(Kind::Message.because(format!("expected an object, found {}", kind_of(&message))));
    };
    let shape = if message.contains_key("role") { Shape::OpenAi } else { Shape::ShareGpt };
    let (speaker_key, text_key) = shape.keys();
    let speaker = match message.shift_remove(speaker_key) {
        Some(Value::String(speaker)) => speaker,
        Some(other) => {
            let found = kind_of(&other);
            return Err(Kind::Message.because(format!("`{speaker_key}` must be a string, found {found}")));
        }
        None => return Err(Kind::Message.because("neither `role` nor `from`")),
    };
    // What nobody will read need not be well-formed.
    let (text, calls) = match roles.role(shape, &speaker) {
        Some(_) => (text(text_key, message.shift_remove(text_key).unwrap_or(Value::Null))?, calls(&message)?),
        None => (None, false),
    };
    // ShareGPT's text goes out under this name.
    message.shift_remove("content");
    out.say(Said { shape, speaker, text, calls, rest: inside(message) }, roles)
}

/// Whether a message calls tools.
fn calls(message: &Map<String, Value>) -> Result<bool, Problem> {
    let called = match message.get("tool_calls") {
        None | Some(Value::Null) => false,
        Some(Value::Array(calls)) => !calls.is_empty(),
        Some(Value::String(calls)) => calls_in_text(calls)?,
        Some(_) => true,
    };
    // The older form: one call.
    Ok(called || message.get("function_call").is_some_and(|call| !call.is_null() && call != ""))
}

/// A message's text, given as a string or as a list of `{"type": "text"}` parts.
fn text(key: &str, value: Value) -> Result<Option<String>, Problem> {
    match value {
        Value::String(text) => Ok(Some(text)),
        Value::Null => Ok(None),
        Value::Array(parts) => {
            let text =
                |part: &Value| part["text"].as_str().filter(|_| part["type"] == "text").map(str::to_owned);
            let text: Option<String> = parts.iter().map(text).collect();
            let text =
                text.ok_or_else(|| Kind::Message.because(format!("`{key}` has a part that is not text")))?;
            Ok(Some(text))
        }
        other => Err(Kind::Message.because(format!("`{key}` must be a string, found {}", kind_of(&other)))),
    }
}

/// The inside of an object's text, without fields that are null.
fn inside(mut fields: Map<String, Value>) -> Vec<u8> {
    fields.retain(|_, value| !value.is_null());
    let text = Value::Object(fields).to_string().into_bytes();
    text[1..text.len() - 1].to_vec()
}

#[cfg(test)]
mod tests {
    use super::super::conversation::Name;
    use super::*;
    use serde_json::json;

    fn convert(row: Value) -> Result<String, Problem> {
        let Value::Object(row) = row else { unreachable!() };
        let row = conversation(row, &Roles::default())?;
        let mut line = vec![];
        row.write_train(&Name { source: None, index: 7 }, &mut line);
        Ok(String::from_utf8(line).unwrap().trim_end().to_string())
    }

    #[test]
    fn both_shapes_become_one() {
        let share = json!({"source": "x", "conversations": [
            {"from": "system", "value": ""}, {"from": "human", "value": "hi", "weight": null},
            {"from": "tool", "value": "?"}, {"from": "bard", "value": "ho", "weight": 1}]});
        let expected = r#"{"id":7,"conversations":[{"role":"user","content":"hi"},{"role":"assistant","content":"ho","weight":1}],"source":"x"}"#;
        assert_eq!(convert(share).unwrap(), expected);
        let openai = json!({"id": "a", "messages": [
            {"role": "system", "content": "s"}, {"content": [{"type": "text", "text": "hi"}], "role": "user"}]});
        let expected =
            r#"{"id":"a","conversations":[{"role":"system","content":"s"},{"role":"user","content":"hi"}]}"#;
        assert_eq!(convert(openai).unwrap(), expected);
    }

    #[test]
    fn tools_and_their_calls_are_kept() {
        let row = json!({"id": 1, "tools": [{"name": "add"}], "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]},
            {"role": "tool", "content": "", "tool_call_id": "c"}, {"role": "assistant", "content": "2"}]});
        let expected = r#"{"id":1,"conversations":[{"role":"user","content":"1+1?"},{"role":"assistant","content":"","tool_calls":[{"id":"c"}]},{"role":"tool","content":"","tool_call_id":"c"},{"role":"assistant","content":"2"}],"tools":[{"name":"add"}]}"#;
        assert_eq!(convert(row).unwrap(), expected);
    }

    #[test]
    fn unusable_rows_say_why() {
        let says = |messages: Value, kind: Kind, reason: &str| {
            let problem = convert(json!({"conversations": messages})).unwrap_err();
            assert!(problem.kind == kind && problem.text.contains(reason), "{problem:?}");
        };
        says(json!("hi"), Kind::NoMessages, "must be a list, found a string");
        says(json!([]), Kind::Order, "no user message");
        says(json!([{"from": "gpt", "value": "x"}]), Kind::Order, "starts with an assistant");
        says(json!([{"role": "tool", "content": "x"}]), Kind::Order, "starts with a tool");
        says(
            json!([{"from": "human", "value": " \n"}]),
            Kind::Empty,
            "`conversations[0]`: the user's text is empty",
        );
        let silent = json!([{"from": "human", "value": "x"}, {"role": "assistant", "tool_calls": []}]);
        says(silent, Kind::Empty, "`conversations[1]`: the assistant's text is empty");
        says(json!([{"from": "human", "value": 3}]), Kind::Message, "found a number");
        let calls = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": "f("}]);
        says(calls, Kind::Message, "`tool_calls` is a text but no JSON");
        says(json!([{"value": "x"}]), Kind::Message, "neither `role` nor `from`");
        says(json!([{"role": "user", "content": [{"type": "image_url"}]}]), Kind::Message, "not text");
        assert_eq!(convert(json!({"id": 1})).unwrap_err().kind, Kind::NoMessages);
        let id = convert(json!({"id": [], "messages": [{"role": "user", "content": "x"}]})).unwrap_err();
        assert!(id.kind == Kind::Id && id.text.contains("`id`"));
        let id = convert(json!({"id": 0.5, "messages": [{"role": "user", "content": "x"}]})).unwrap_err();
        assert!(id.kind == Kind::Id && id.text.contains("use a string"));
    }
}
