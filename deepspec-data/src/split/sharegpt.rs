//! Dataset rows, in ShareGPT's or OpenAI's shape, as conversations.

use deepspec_core::jsonl::kind_of;
use serde_json::{Map, Value, json};

/// Where a row keeps its messages; the first that is there counts.
const MESSAGE_KEYS: [&str; 2] = ["conversations", "messages"];

/// Turns a dataset row into `{"id", "conversations": [{"role", "content"}], …}`; other fields travel along.
///
/// ShareGPT's speakers become roles, speakers other than system, user and assistant are dropped, and so are empty system
/// messages. A row without an `id` gets its index.
///
/// # Errors
/// Why the row is unusable, as a phrase to follow the file and line.
pub fn conversation(mut row: Map<String, Value>, index: usize) -> Result<Map<String, Value>, String> {
    let (key, messages) = MESSAGE_KEYS
        .iter()
        .find_map(|&key| row.shift_remove(key).map(|messages| (key, messages)))
        .ok_or("no `conversations` or `messages`")?;
    let Value::Array(messages) = messages else {
        return Err(format!("`{key}` must be a list, found {}", kind_of(&messages)));
    };
    let mut kept = Vec::with_capacity(messages.len());
    for (position, message) in messages.into_iter().enumerate() {
        let message = self::message(message).map_err(|problem| format!("`{key}[{position}]`: {problem}"))?;
        kept.extend(message.map(Value::Object));
    }
    let first = kept.iter().position(|message| message["role"] != "system");
    match first.map(|first| &kept[first]["role"]) {
        None => return Err("the conversation has no user message".into()),
        Some(role) if role != "user" => {
            return Err("the conversation starts with an assistant message".into());
        }
        Some(_) => {}
    }
    let mut out = Map::new();
    let id = row.shift_remove("id").filter(|id| !id.is_null()).unwrap_or_else(|| json!(index));
    out.insert("id".into(), id);
    deepspec_core::row::id_of(&out)?;
    out.insert("conversations".into(), Value::Array(kept));
    out.extend(row);
    Ok(out)
}

/// The texts of the user's turns.
pub fn user_turns(row: &Map<String, Value>) -> Vec<&Value> {
    let messages = row.get("conversations").and_then(Value::as_array);
    messages
        .into_iter()
        .flatten()
        .filter(|message| message["role"] == "user")
        .map(|message| &message["content"])
        .collect()
}

/// One message with `role` and `content` in front; None if its speaker is dropped.
fn message(message: Value) -> Result<Option<Map<String, Value>>, String> {
    let Value::Object(mut message) = message else {
        return Err(format!("expected an object, found {}", kind_of(&message)));
    };
    let (speaker_key, text_key) =
        if message.contains_key("role") { ("role", "content") } else { ("from", "value") };
    let speaker = match message.shift_remove(speaker_key) {
        Some(Value::String(speaker)) => speaker,
        Some(other) => return Err(format!("`{speaker_key}` must be a string, found {}", kind_of(&other))),
        None => return Err("neither `role` nor `from`".into()),
    };
    let role = match speaker.as_str() {
        "system" => "system",
        "user" | "human" => "user",
        "assistant" | "gpt" | "chatgpt" | "bing" | "bard" => "assistant",
        _ => return Ok(None),
    };
    let text = text(text_key, message.shift_remove(text_key).unwrap_or(Value::Null))?;
    if text.trim().is_empty() {
        return if role == "system" { Ok(None) } else { Err(format!("the {role}'s text is empty")) };
    }
    let mut out = Map::new();
    out.insert("role".into(), json!(role));
    out.insert("content".into(), json!(text));
    out.extend(message.into_iter().filter(|(_, value)| !value.is_null()));
    Ok(Some(out))
}

/// A message's text, given as a string or as a list of `{"type": "text"}` parts.
fn text(key: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        Value::Null => Ok(String::new()),
        Value::Array(parts) => parts
            .iter()
            .map(|part| {
                part["text"]
                    .as_str()
                    .filter(|_| part["type"] == "text")
                    .ok_or_else(|| format!("`{key}` has a part that is not text"))
            })
            .collect(),
        other => Err(format!("`{key}` must be a string, found {}", kind_of(&other))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(row: Value) -> Result<String, String> {
        let Value::Object(row) = row else { unreachable!() };
        conversation(row, 7).map(|row| Value::Object(row).to_string())
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
    fn unusable_rows_say_why() {
        let says = |messages: Value, reason: &str| {
            let error = convert(json!({"conversations": messages})).unwrap_err();
            assert!(error.contains(reason), "{error}");
        };
        says(json!("hi"), "must be a list, found a string");
        says(json!([]), "no user message");
        says(json!([{"from": "gpt", "value": "x"}]), "starts with an assistant");
        says(json!([{"from": "human", "value": " \n"}]), "`conversations[0]`: the user's text is empty");
        says(json!([{"from": "human", "value": 3}]), "found a number");
        says(json!([{"value": "x"}]), "neither `role` nor `from`");
        says(json!([{"role": "user", "content": [{"type": "image_url"}]}]), "not text");
        assert!(convert(json!({"id": 1})).unwrap_err().contains("no `conversations`"));
        assert!(
            convert(json!({"id": [], "messages": [{"role": "user", "content": "x"}]}))
                .unwrap_err()
                .contains("`id`")
        );
    }
}
