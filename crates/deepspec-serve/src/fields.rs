//! Fields of chat completion requests: supported, unsupported, and without effect.

use serde_json::{Map, Value};

use crate::error::ChatError;

/// Supported fields.
pub const SUPPORTED_FIELDS: [&str; 23] = [
    "model",
    "messages",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stop_token_ids",
    "seed",
    "stream",
    "stream_options",
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
    "tool_choice",
    "ignore_eos",
    "return_token_ids",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
];

/// Unsupported fields of OpenAI, vLLM and SGLang that change the answer. They are rejected, unless
/// their value has no effect.
pub const UNSUPPORTED_FIELDS: [&str; 51] = [
    "response_format",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "echo",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "regex",
    "ebnf",
    "json_schema",
    "chat_template",
    "documents",
    "continue_final_message",
    "add_generation_prompt",
    "truncate_prompt_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "grammar",
    "logits_processors",
    "custom_logit_processor",
    "stop_regex",
    "no_stop_trim",
    "typical_p",
    "mirostat",
    "dry_multiplier",
    "xtc_probability",
    "dynatemp_range",
    "repeat_penalty",
    "n_probs",
    "lora_path",
    "lora",
    "top_a",
    "tfs_z",
    "samplers",
    "separate_reasoning",
    "include_reasoning",
    "add_special_tokens",
];

/// Fields that are accepted and ignored because they never change the answer, including options of
/// other servers.
pub const IGNORED_FIELDS: [&str; 19] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "parallel_tool_calls",
    "priority",
    "request_id",
    "cache_salt",
    "cache_prompt",
    "return_tokens",
    "verbose",
    "timings_per_token",
    "return_meta_info",
    "spaces_between_special_tokens",
    "mm_processor_kwargs",
];

/// Rejects unknown fields, and unsupported fields unless their value has no effect. Ignoring them
/// would change the answer.
///
/// # Errors
/// Names the rejected field.
pub fn reject_unsupported_fields(sent: &Map<String, Value>) -> Result<(), ChatError> {
    for (name, value) in sent {
        if UNSUPPORTED_FIELDS.contains(&name.as_str()) && !requests_default(name, value) {
            return Err(ChatError::field(name, "not supported by this server; leave it out"));
        }
        let is_known = [&SUPPORTED_FIELDS[..], &UNSUPPORTED_FIELDS, &IGNORED_FIELDS]
            .iter()
            .any(|names| names.contains(&name.as_str()));
        if !is_known {
            return Err(ChatError::field(name, "not a field that this server knows; leave it out"));
        }
    }
    Ok(())
}

/// Whether the value of an unsupported field requests the default behaviour.
pub fn requests_default(name: &str, value: &Value) -> bool {
    match (name, value) {
        ("response_format", format) => format.get("type").is_some_and(|kind| kind == "text"),
        ("modalities", Value::Array(list)) => list.iter().all(|kind| kind == "text"),
        (
            "add_generation_prompt" | "skip_special_tokens" | "separate_reasoning" | "include_reasoning",
            value,
        ) => *value == true,
        // Any JSON matches an empty schema.
        ("guided_json" | "json_schema" | "structured_outputs", value) => *value == false,
        ("best_of" | "length_penalty" | "typical_p" | "repeat_penalty" | "tfs_z", value) => {
            value.as_f64() == Some(1.0)
        }
        ("function_call", value) => value == "none" || value == "auto",
        (_, Value::Bool(on)) => !on,
        (_, Value::Number(number)) => number.as_f64() == Some(0.0),
        (_, Value::Array(list)) => list.is_empty(),
        (_, Value::Object(fields)) => fields.is_empty(),
        _ => false,
    }
}
