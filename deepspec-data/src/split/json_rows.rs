//! Parses rows in ShareGPT's or OpenAI's form.

use deepspec_core::jsonl::json_type_name;
use deepspec_core::row;
use serde_json::{Map, Value};

use super::conversation::{Conversation, Id, Problem, ProblemKind, RawMessage};
use super::fields::{Field, Fields};
use super::roles::{MessageShape, Roles};
use deepspec_text::{
    MESSAGE_KEYS, Message, RawMessages, Role, RowError, TEXT_FIELDS, find_messages, is_record_key,
    system_message, warn_about_two_fields,
};

/// Converts a row to a conversation; unknown fields are kept.
pub fn conversation(mut row: Fields, roles: &Roles) -> Result<Conversation, Problem> {
    let (key, messages) = take_messages(&mut row)?;
    let id = row.take_value("id")?.map_or(Ok(Id::Index), parse_id);
    let mut out = Conversation::new(id?, row.into_json_members());
    for (position, value) in messages.into_iter().enumerate() {
        add_parsed_message(value, roles, &mut out).map_err(|problem| at_message(key, position, problem))?;
    }
    out.check()
}

/// Removes and returns the messages of a row: the first field with a list of messages, else the
/// result of [`find_messages`].
fn take_messages<'a>(row: &mut Fields<'a>) -> Result<(&'static str, Vec<Field<'a>>), Problem> {
    // Values that are not lists are checked again below, together with all other fields.
    let (mut rest, mut lists) = (Map::new(), vec![]);
    for key in MESSAGE_KEYS {
        let Some(found) = row.take(key).filter(|found| !found.is_null()) else { continue };
        match found.into_list()? {
            Ok(mut items) => {
                items.retain(|item| !item.is_null());
                lists.push((key, items));
            }
            Err(other) => drop(rest.insert(key.into(), other)),
        }
    }
    let fits = |items: &[Field]| !items.is_empty() && items.iter().all(Field::is_message);
    let chosen = lists.iter().position(|(_, items)| fits(items));
    let chosen = chosen.or_else(|| lists.iter().position(|(_, items)| items.iter().any(Field::is_object)));
    if let Some(chosen) = chosen {
        let (key, mut messages) = lists.swap_remove(chosen);
        if let Some((other, _)) = lists.iter().find(|(_, items)| fits(items)) {
            warn_about_two_fields(key, other);
        }
        if let Some(system) = row.take_value("system")? {
            let first = messages.first().map(|first| first.clone().into_value()).transpose()?;
            messages.splice(0..0, system_message(&system, first.as_ref()).map(Field::Value));
        }
        return Ok((key, messages));
    }
    for (key, items) in lists {
        let items = items.into_iter().map(Field::into_value).collect::<Result<_, _>>()?;
        rest.insert(key.into(), Value::Array(items));
    }
    for name in row.names() {
        if is_record_key(&name)
            && let Some(value) = row.take_value(&name)?
        {
            rest.insert(name, value);
        }
    }
    let columns = || row.names().into_iter().map(|name| (name, Value::Null));
    match find_messages(&rest) {
        Ok(RawMessages { key, messages }) => Ok((key, messages.into_iter().map(Field::Value).collect())),
        Err(RowError::NoConversation { .. }) => {
            let all: Map<String, Value> = rest.into_iter().chain(columns()).collect();
            Err(ProblemKind::NoMessages
                .with_text(find_messages(&all).map_or_else(|error| error.to_string(), |_| String::new())))
        }
        Err(problem) => Err(ProblemKind::NoMessages.with_text(problem.to_string())),
    }
}

/// Adds the message's position to a problem.
fn at_message(key: &str, position: usize, problem: Problem) -> Problem {
    problem.kind.with_text(format!("`{key}[{position}]`: {}", problem.text))
}

/// A row's id; null counts as no id.
///
/// # Errors
/// If it is neither a string nor a 64-bit integer.
fn parse_id(value: Value) -> Result<Id, Problem> {
    match value {
        Value::Null => Ok(Id::Index),
        Value::String(id) if id.is_empty() => Ok(Id::Index),
        Value::String(id) => Ok(Id::Text(id)),
        Value::Number(id) => {
            row::id_from_number(&id).map(Id::Number).map_err(|problem| ProblemKind::Id.with_text(problem))
        }
        other => Err(ProblemKind::Id
            .with_text(format!("`id` must be a string or an integer, found {}", json_type_name(&other)))),
    }
}

fn add_parsed_message(message: Field, roles: &Roles, out: &mut Conversation) -> Result<(), Problem> {
    let mut message = message.into_object()?.map_err(|other| {
        ProblemKind::Message.with_text(format!("expected an object, found {}", json_type_name(&other)))
    })?;
    let shape = if message.has("role") { MessageShape::OpenAi } else { MessageShape::ShareGpt };
    let (speaker_key, text_key) = shape.keys();
    let speaker = match message.take_value(speaker_key)? {
        Some(Value::String(speaker)) => speaker,
        Some(other) => {
            let found = json_type_name(&other);
            return Err(
                ProblemKind::Message.with_text(format!("`{speaker_key}` must be a string, found {found}"))
            );
        }
        None => return Err(ProblemKind::Message.with_text("neither `role` nor `from`")),
    };
    // The text of a dropped message may be malformed.
    let text = match roles.role(shape, &speaker) {
        Some(role) => {
            check_rest(role, &message)?;
            let mut names = [text_key].into_iter().chain(TEXT_FIELDS);
            let name = names.find(|name| message.has(name)).unwrap_or(text_key);
            text(name, message.take_value(name)?.unwrap_or(Value::Null))?
        }
        None => None,
    };
    // Drops the field `content` of a ShareGPT message, because the output uses that name for the
    // text.
    message.take("content");
    out.add_message(RawMessage { shape, speaker, text, rest: message.into_json_members() }, roles)
}

/// Checks that later stages can parse a message's other fields.
fn check_rest(role: Role, message: &Fields) -> Result<(), Problem> {
    let mut probe = Map::from_iter([("role".into(), role.as_str().into()), ("content".into(), "".into())]);
    for name in ["tool_calls", "reasoning_content", "weight"] {
        probe.extend(message.value(name)?.map(|value| (name.to_string(), value)));
    }
    match probe.len() {
        2 => Ok(()),
        _ => Message::try_from(Value::Object(probe))
            .map(drop)
            .map_err(|error| ProblemKind::Message.with_text(error.to_string())),
    }
}

/// A message's text, from a string or a list of `{"type": "text"}` parts.
fn text(key: &str, value: Value) -> Result<Option<String>, Problem> {
    match value {
        Value::String(text) => Ok(Some(text)),
        Value::Null => Ok(None),
        Value::Array(parts) => {
            let text =
                |part: &Value| part["text"].as_str().filter(|_| part["type"] == "text").map(str::to_owned);
            let text: Option<Vec<String>> = parts.iter().map(text).collect();
            let text = text.map(|parts| parts.join("\n"));
            let text = text.ok_or_else(|| {
                ProblemKind::Message.with_text(format!("`{key}` has a part that is not text"))
            })?;
            Ok(Some(text))
        }
        other => Err(ProblemKind::Message
            .with_text(format!("`{key}` must be a string, found {}", json_type_name(&other)))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::conversation::OutputId;
    use super::*;
    use arrow_array::{Array, ArrayRef, Decimal256Array, RecordBatch};
    use arrow_buffer::i256;
    use arrow_json::ReaderBuilder;
    use arrow_json::reader::infer_json_schema;
    use arrow_schema::Schema;
    use deepspec_datasets::rows::Cell;
    use serde_json::json;
    use std::sync::Arc;

    /// The line of training data for a row.
    fn line(row: Fields) -> Result<String, Problem> {
        let row = conversation(row, &Roles::default())?;
        let mut line = vec![];
        row.write_train(&OutputId { source: None, index: 7, renamed: None }, &mut line);
        Ok(String::from_utf8(line).unwrap().trim_end().to_string())
    }

    fn convert(row: Value) -> Result<String, Problem> {
        let Value::Object(row) = row else { unreachable!() };
        line(row.into())
    }

    #[test]
    fn what_travels_along_keeps_its_digits() {
        let price = Decimal256Array::from(vec![i256::from_string("12345678901234567890123")]);
        let price = price.with_precision_and_scale(40, 3).unwrap();
        let message = r#"{"messages": [{"role": "user", "content": "x"}], "n": 0.1}"#;
        let messages = columns(message);
        let mut fields: Vec<_> = messages.schema_ref().fields().iter().cloned().collect();
        fields.push(Arc::new(arrow_schema::Field::new("price", price.data_type().clone(), true)));
        let columns = messages.columns().iter().cloned().chain([Arc::new(price) as ArrayRef]).collect();
        let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap();
        let expected = r#"{"id":7,"conversations":[{"role":"user","content":"x"}],"n":0.1,"price":12345678901234567890.123}"#;
        assert_eq!(line(Fields::of_cells(Cell::row_cells(&batch, 0))).unwrap(), expected);
    }

    /// A row as columns with inferred types.
    fn columns(row: &str) -> RecordBatch {
        let schema = infer_json_schema(row.as_bytes(), None).unwrap().0;
        let mut reader = ReaderBuilder::new(Arc::new(schema)).build(row.as_bytes()).unwrap();
        reader.next().unwrap().unwrap()
    }

    #[test]
    fn columns_are_read_as_json_is() {
        let rows = [
            json!({"messages": [{"role": "user", "content": "\"a\"\n😀"}, {"role": "assistant", "content": "b", "w": 1.5}],
                "id": "x", "meta": {"a": [{"b": true}], "c": [1, null]}, "gone": null}),
            json!({"conversations": [{"from": "human", "value": "q", "n": 3}, {"from": "gpt", "value": null}]}),
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "id": 12}),
            json!({"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]}),
            json!({"messages": "hi", "id": [1]}),
            json!({"messages": [{"role": "user", "content": "x"}], "id": 0.5}),
        ];
        for row in rows {
            let batch = columns(&row.to_string());
            assert_eq!(line(Fields::of_cells(Cell::row_cells(&batch, 0))), convert(row.clone()), "{row}");
        }
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
        let says = |messages: Value, kind: ProblemKind, reason: &str| {
            let problem = convert(json!({"conversations": messages})).unwrap_err();
            assert!(problem.kind == kind && problem.text.contains(reason), "{problem:?}");
        };
        says(json!("hi"), ProblemKind::NoMessages, "must be a non-empty array of messages, found a string");
        says(json!([]), ProblemKind::NoMessages, "found an empty array");
        says(json!([{"from": "gpt", "value": "x"}]), ProblemKind::Order, "starts with an assistant");
        says(json!([{"role": "tool", "content": "x"}]), ProblemKind::Order, "starts with a tool");
        says(
            json!([{"from": "human", "value": " \n"}]),
            ProblemKind::Empty,
            "`conversations[0]`: the user's text is empty",
        );
        let silent = json!([{"from": "human", "value": "x"}, {"role": "assistant", "tool_calls": []}]);
        assert!(
            convert(json!({"conversations": silent})).is_ok(),
            "regenerate may replace an answer of nothing"
        );
        says(json!([{"from": "human", "value": 3}]), ProblemKind::Message, "found a number");
        let calls = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": "f("}]);
        says(
            calls,
            ProblemKind::Message,
            "`tool_calls` must be an array of calls or its JSON text, found a text that is not JSON",
        );
        says(json!([{"value": "x"}]), ProblemKind::Message, "neither `role` nor `from`");
        says(json!([{"role": "user", "content": [{"type": "image_url"}]}]), ProblemKind::Message, "not text");
        assert_eq!(convert(json!({"id": 1})).unwrap_err().kind, ProblemKind::NoMessages);
        let id = convert(json!({"id": [], "messages": [{"role": "user", "content": "x"}]})).unwrap_err();
        assert!(id.kind == ProblemKind::Id && id.text.contains("`id`"));
        let id = convert(json!({"id": 0.5, "messages": [{"role": "user", "content": "x"}]})).unwrap_err();
        assert!(id.kind == ProblemKind::Id && id.text.contains("use a string"));
    }
}
