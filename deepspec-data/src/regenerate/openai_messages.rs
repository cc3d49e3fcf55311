//! Converts messages to the form of the OpenAI API.

use deepspec_text::{Message, Role};
use serde_json::{Map, Value, json};

/// The messages of a request. Only role, text and fields of tool calls are sent, because strict
/// servers refuse unknown fields. Missing call ids are generated, because servers require them.
pub fn messages(messages: &[Message]) -> Value {
    let mut sent = Vec::with_capacity(messages.len());
    // Ids of calls without a result yet, in order.
    let mut open: std::collections::VecDeque<String> = Default::default();
    for message in messages {
        let mut fields = Map::new();
        fields.insert("role".into(), json!(message.role));
        fields.insert("content".into(), json!(message.content));
        match message.role {
            Role::Assistant => {
                if !message.tool_calls().is_empty() {
                    let calls = message.tool_calls();
                    let calls: Vec<Value> = calls
                        .iter()
                        .enumerate()
                        .map(|(place, call)| self::to_openai_call(call, sent.len(), place))
                        .collect();
                    open = calls.iter().filter_map(|call| call["id"].as_str().map(str::to_owned)).collect();
                    fields.insert("tool_calls".into(), Value::Array(calls));
                }
            }
            Role::Tool => {
                let own = message.extra.get("tool_call_id").and_then(Value::as_str).map(str::to_owned);
                if let Some(own) = &own {
                    open.retain(|id| id != own);
                }
                if let Some(id) = own.or_else(|| open.pop_front()) {
                    fields.insert("tool_call_id".into(), json!(id));
                }
                if let Some(name) = message.extra.get("name").filter(|name| name.is_string()) {
                    fields.insert("name".into(), name.clone());
                }
            }
            Role::System | Role::User => {}
        }
        sent.push(Value::Object(fields));
    }
    Value::Array(sent)
}

/// Converts one tool call. Data sets store the arguments as an object, but the API expects JSON
/// text.
fn to_openai_call(call: &Value, message: usize, place: usize) -> Value {
    // Some data sets omit the `function` wrapper.
    let function = call.get("function").unwrap_or(call);
    let arguments = match function.get("arguments") {
        Some(Value::String(text)) => text.clone(),
        None | Some(Value::Null) => "{}".into(),
        Some(other) => other.to_string(),
    };
    let id = call.get("id").and_then(Value::as_str).filter(|id| !id.is_empty());
    let id = id.map_or_else(|| format!("call_{message}_{place}"), str::to_owned);
    json!({"id": id, "type": "function", "function": {"name": function.get("name"), "arguments": arguments}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_get_the_ids_and_the_form_that_servers_insist_on() {
        let parse = |value: Value| Message::try_from(value).unwrap();
        let said = [
            parse(json!({"role": "user", "content": "q", "lang": "en"})),
            parse(json!({"role": "assistant", "content": null, "finish_reason": "stop", "tool_calls": [
                {"function": {"name": "add", "arguments": {"b": 1, "a": 2}}},
                {"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}]})),
            parse(json!({"role": "tool", "content": "3", "name": "add"})),
            parse(json!({"role": "tool", "content": "12:00", "tool_call_id": "x"})),
        ];
        assert_eq!(
            messages(&said),
            json!([
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [
                    {"id": "call_1_0", "type": "function", "function": {"name": "add", "arguments": "{\"b\":1,\"a\":2}"}},
                    {"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
                {"role": "tool", "content": "3", "tool_call_id": "call_1_0", "name": "add"},
                {"role": "tool", "content": "12:00", "tool_call_id": "x"},
            ])
        );
    }
}
