//! Identity of a cache. It prevents the use of a cache with other targets or settings.

use std::fmt::Display;

use serde_json::Value;

use crate::cache::files::CacheTotals;
use crate::cache::layout::Encoding;
use serde::{Deserialize, Serialize};

use deepspec_core::{FinalStates, Tap};

/// All inputs that determine the hidden states of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The target's `model_type`.
    pub model_type: String,
    /// Digest of the target's config.json.
    pub target_config: String,
    /// Digest of the target's weights (their index, or the file).
    pub target_weights: String,
    /// Digest of the tokenizer.
    pub tokenizer: String,
    /// Digest of the text that the chat template renders.
    pub template: String,
    /// Name of the chat template's mask rules.
    pub chat_template: String,
    /// The system prompt added to conversations without one.
    pub system_prompt: Option<String>,
    /// Captured layers, in storage order.
    pub taps: Vec<Tap>,
    /// Length at which samples were truncated, in tokens.
    pub max_length: usize,
    /// Values per hidden state.
    pub hidden_size: usize,
    /// Rows of the target's embedding; all token ids are smaller.
    pub vocab_size: usize,
}

impl Identity {
    /// Lists the fields that differ, with the value of `self` (found) and of `other` (wanted).
    pub fn differences(&self, other: &Self) -> Vec<String> {
        // Destructured, so that a new field cannot be forgotten.
        let Self {
            model_type,
            target_config,
            target_weights,
            tokenizer,
            template,
            chat_template,
            system_prompt,
            taps,
            max_length,
            hidden_size,
            vocab_size,
        } = self;
        let mut found = Differences::default();
        found.compare("model_type", model_type, &other.model_type);
        found.compare("target_config", shorten_digest(target_config), shorten_digest(&other.target_config));
        found.compare(
            "target_weights",
            shorten_digest(target_weights),
            shorten_digest(&other.target_weights),
        );
        found.compare("tokenizer", shorten_digest(tokenizer), shorten_digest(&other.tokenizer));
        found.compare("template", shorten_digest(template), shorten_digest(&other.template));
        found.compare("chat_template", chat_template, &other.chat_template);
        found.compare("system_prompt", quote_or_absent(system_prompt), quote_or_absent(&other.system_prompt));
        found.compare("taps", format_taps(taps), format_taps(&other.taps));
        found.compare("max_length", max_length, &other.max_length);
        found.compare("hidden_size", hidden_size, &other.hidden_size);
        found.compare("vocab_size", vocab_size, &other.vocab_size);
        found.0
    }
}

/// Collects the fields that differ between two records.
#[derive(Default)]
pub(crate) struct Differences(pub Vec<String>);

impl Differences {
    /// Adds a line if the values differ.
    pub fn compare<T: PartialEq + Display>(&mut self, field: &str, there: T, wanted: T) {
        if there != wanted {
            self.0.push(format!("{field} is {there} there, {wanted} is wanted"));
        }
    }
}

/// Shortens hexadecimal digests to 16 digits for messages.
///
/// A collision in the first 64 bits is ignored.
fn shorten_digest(digest: &str) -> &str {
    let hex = digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    if hex { &digest[..16] } else { digest }
}

fn quote_or_absent(text: &Option<String>) -> String {
    text.as_ref().map_or_else(|| "absent".to_string(), |text| format!("{text:?}"))
}

fn format_taps(taps: &[Tap]) -> String {
    let names: Vec<String> = taps.iter().map(Tap::to_string).collect();
    format!("[{}]", names.join(", "))
}

/// All inputs that determine the bytes of a cache: builds with equal recipes may share shards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Recipe {
    pub identity: Identity,
    pub encoding: Encoding,
    pub last: FinalStates,
    pub shard_bytes: u64,
    pub counts: CacheTotals,
    pub input: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Value>,
}

impl Recipe {
    /// Lists the fields that differ, with the found value (`self`) and the wanted one.
    pub fn differences(&self, wanted: &Self) -> Vec<String> {
        let mut found = Differences(self.identity.differences(&wanted.identity));
        found.compare("encoding", self.encoding, wanted.encoding);
        found.compare("last", self.last, wanted.last);
        found.compare("shard_bytes", self.shard_bytes, wanted.shard_bytes);
        found.compare("samples", self.counts.samples, wanted.counts.samples);
        found.compare("tokens", self.counts.tokens, wanted.counts.tokens);
        found.compare("supervised tokens", self.counts.supervised_tokens, wanted.counts.supervised_tokens);
        let reference =
            |recipe: &Self| recipe.reference.as_ref().map_or("none".to_string(), Value::to_string);
        found.compare("manifest of its origin", reference(self), reference(wanted));
        found.compare("input digest", self.input.as_str(), wanted.input.as_str());
        found.0
    }
}
