//! A tokenizer with its chat template: encodes text, decodes ids and renders conversations.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use deepspec_core::atomic::{self, FileError};
use deepspec_core::digest::{self, Hasher};
use deepspec_core::jsonl::json_type_name;
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use crate::conversation::to_template_messages;
use crate::error::TextError;
use crate::message::{Message, Role};
use crate::reasoning_tokens::{ReasoningTokens, SpecialThinkTags};
use crate::stream::{IncrementalDetokenizer, decode, to_token_id};
use crate::template::{DEFAULT_TEMPLATE, JinjaTemplates, RenderOptions};

/// The special tokens that transformers passes to chat templates.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Token ids and their positions in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The ids.
    pub ids: Vec<i64>,
    /// Byte range of each id. Ids that share a character all have the range of the whole character.
    pub offsets: Vec<(usize, usize)>,
    /// Index of each id's word. Tokens merge only within the words of the pre-tokenizer.
    pub(crate) words: Vec<Option<u32>>,
}

/// The tokenizer of a model folder. It is stateless, so share it by reference.
pub struct ChatTokenizer {
    tokenizer: Arc<Tokenizer>,
    jinja: JinjaTemplates,
    special: Vec<(&'static str, String)>,
    /// The text of each special token.
    special_texts: Vec<String>,
    /// Think tags that are special tokens.
    think_tags: Vec<SpecialThinkTags>,
    /// Added tokens that are matched before the text is normalised.
    cuts: HashSet<u32>,
    vocab_size: usize,
    digest: String,
}

impl ChatTokenizer {
    /// Loads `tokenizer.json`, `tokenizer_config.json` and the chat templates of a model folder. If
    /// `chat_template.jinja` exists, the templates in JSON files are not read (as in transformers).
    ///
    /// # Errors
    /// If a file is missing or malformed, or a template does not compile or does not terminate.
    pub fn load(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let bytes = fs::read(&path).map_err(FileError::at("reading", &path))?;
        let unusable = |source| TextError::Tokenizer { path: path.clone(), source };
        let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes); // A byte order mark.
        let mut tokenizer = Tokenizer::from_bytes(text).map_err(unusable)?;
        // Drops padding and truncation settings that the file may still have.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(unusable)?;

        let config = TokenizerConfig::read(dir)?;
        let loaded = Self {
            vocab_size: tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1),
            special_texts: special_texts(&tokenizer),
            think_tags: SpecialThinkTags::find(&tokenizer),
            cuts: split_token_ids(&tokenizer),
            tokenizer: Arc::new(tokenizer),
            jinja: config.chat_template(dir)?,
            special: config.special_tokens()?,
            digest: digest::sha256_of_bytes(&bytes),
        };
        // Detects a template that does not terminate here, rather than on the first row.
        match loaded.render(&[Message::new(Role::User, "Hi")], &RenderOptions::default()) {
            Err(error @ TextError::Endless { .. }) => Err(error),
            _ => Ok(loaded),
        }
    }

    /// The ids of `text`. Recognises special tokens in the text, but adds none.
    ///
    /// # Errors
    /// If the tokenizer's model cannot represent the text.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, TextError> {
        let encoding = self.tokenizer.encode_fast(text, false);
        let encoding = encoding.map_err(|source| TextError::Tokenize { action: "tokenising", source })?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    /// [`ChatTokenizer::encode`], with the byte range of each id.
    ///
    /// # Errors
    /// As [`ChatTokenizer::encode`].
    pub fn encode_with_offsets(&self, text: &str) -> Result<Encoded, TextError> {
        let encoding = self.tokenizer.encode(text, false);
        let encoding = encoding.map_err(|source| TextError::Tokenize { action: "tokenising", source })?;
        let ids = encoding.get_ids().iter().map(|&id| i64::from(id)).collect();
        let (offsets, words) = (encoding.get_offsets().to_vec(), encoding.get_word_ids().to_vec());
        Ok(Encoded { ids, offsets, words })
    }

    /// The text of `ids`. Ids beyond the vocabulary, which pad a model's embedding, have no text.
    ///
    /// # Errors
    /// If an id is negative, or the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[i64], skip_special: bool) -> Result<String, TextError> {
        let ids = ids.iter().map(|&id| to_token_id(id)).collect::<Result<Vec<u32>, _>>()?;
        decode(&self.tokenizer, &ids, skip_special)
    }

    /// Renders a conversation with the chat template.
    ///
    /// # Errors
    /// If the template refuses the conversation or fails on it.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TextError> {
        self.jinja.render(&to_template_messages(messages), options, &self.special, Utc::now())
    }

    /// Renders a conversation and returns its text with the byte ranges between `{% generation %}`
    /// tags.
    ///
    /// # Errors
    /// As [`ChatTokenizer::render`], and if the template has no such tags or modifies the text
    /// between them.
    pub fn render_generations(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<(String, Vec<(usize, usize)>), TextError> {
        self.jinja.render_generations(&to_template_messages(messages), options, &self.special, Utc::now())
    }

    pub(crate) fn require_generation_tags(&self) -> Result<(), TextError> {
        self.jinja.require_generation_tags()
    }

    /// Whether the template has `{% generation %}` tags.
    pub fn has_generation_tags(&self) -> bool {
        self.jinja.has_generation_tags()
    }

    /// Largest token id plus one.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Warns if the tokenizer has ids beyond the `rows` of a model's embedding, as after tokens
    /// were added without a resize. Only texts with such ids are unusable.
    pub fn warn_if_wider_than(&self, rows: usize) {
        if self.vocab_size > rows {
            tracing::warn!(
                "the tokenizer has ids up to {}, the model's embedding {rows} rows; texts with ids behind them cannot be used",
                self.vocab_size - 1
            );
        }
    }

    /// Logs which tokens end an answer.
    pub fn log_stop_tokens(&self, ids: &[i64]) {
        let name =
            |id: &i64| self.token(*id).map_or_else(|| id.to_string(), |token| format!("{token} ({id})"));
        tracing::info!("answers end at {}", ids.iter().map(name).collect::<Vec<_>>().join(", "));
    }

    /// The id of a token in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<i64> {
        self.tokenizer.token_to_id(token).map(i64::from)
    }

    /// The token of an id in the vocabulary.
    pub fn token(&self, id: i64) -> Option<String> {
        self.tokenizer.id_to_token(u32::try_from(id).ok()?)
    }

    /// Checks that the draft language model in `dir` has the same vocabulary as this target's
    /// tokenizer.
    ///
    /// # Errors
    /// With [`TextError::OtherToken`] at the first difference, or if its tokenizer cannot be
    /// loaded.
    pub fn check_same_vocabulary(&self, dir: &Path) -> Result<(), TextError> {
        let other = Self::load(dir)?;
        let ids = self.vocab_size.max(other.vocab_size) as i64;
        match (0..ids).map(|id| (id, other.token(id), self.token(id))).find(|(_, own, target)| own != target)
        {
            Some((id, own, target)) => Err(TextError::OtherToken { dir: dir.to_path_buf(), id, own, target }),
            None => Ok(()),
        }
    }

    /// Whether an id is a special token, such as an end of turn.
    pub fn is_special(&self, id: i64) -> bool {
        self.token(id).is_some_and(|token| self.tokenizer.get_added_vocabulary().is_special_token(&token))
    }

    /// Whether an id stands for nothing in ordinary texts: it has no token, a special one, or one that is reserved by its name.
    pub fn is_reserved(&self, id: i64) -> bool {
        self.token(id).is_none_or(|token| is_reserved_name(&token)) || self.is_special(id)
    }

    /// Whether the tokenizer splits texts at this token before any other step.
    pub(crate) fn is_split_token(&self, id: i64) -> bool {
        u32::try_from(id).is_ok_and(|id| self.cuts.contains(&id))
    }

    /// `text` without special tokens.
    pub(crate) fn remove_special_tokens(&self, text: &str) -> String {
        self.special_texts.iter().fold(text.to_string(), |text, token| match text.contains(token.as_str()) {
            true => text.replace(token.as_str(), ""),
            false => text,
        })
    }

    /// `text` without trailing special tokens and white space.
    pub(crate) fn trim_special_tokens<'a>(&self, text: &'a str) -> &'a str {
        let mut rest = text.trim_end();
        while let Some(shorter) =
            self.special_texts.iter().find_map(|token| rest.strip_suffix(token.as_str()))
        {
            rest = shorter.trim_end();
        }
        rest
    }

    /// The id of `eos_token` in the config.
    pub fn eos_token_id(&self) -> Option<i64> {
        let (_, token) = self.special.iter().find(|(name, _)| *name == "eos_token")?;
        self.token_id(token)
    }

    /// SHA-256 of `tokenizer.json`.
    pub fn tokenizer_digest(&self) -> &str {
        &self.digest
    }

    /// A digest of the template's renderings of fixed conversations. Templates with equal
    /// renderings have equal digests, even if their sources differ. The time for `strftime_now` is
    /// fixed, so the digest is stable.
    pub fn template_digest(&self) -> String {
        let mut hasher = Hasher::default();
        for (messages, options) in probe_conversations() {
            match self.jinja.render(&messages, &options, &self.special, DateTime::UNIX_EPOCH) {
                Ok(text) => hasher.update_part(b"text").update_part(text.as_bytes()),
                Err(_) => hasher.update_part(b"refused"),
            };
        }
        hasher.hex_digest()
    }

    /// A digest of the template's renderings and generation ranges for the same conversations.
    pub(crate) fn generation_digest(&self) -> String {
        let mut hasher = Hasher::default();
        for (messages, options) in probe_conversations() {
            match self.jinja.render_generations(&messages, &options, &self.special, DateTime::UNIX_EPOCH) {
                Ok((text, places)) => {
                    hasher.update_part(b"text").update_part(text.as_bytes());
                    for (start, end) in places {
                        hasher.update_part(format!("{start}..{end}").as_bytes());
                    }
                }
                Err(_) => {
                    hasher.update_part(b"refused");
                }
            }
        }
        hasher.hex_digest()
    }

    /// Starts detokenising a stream of ids of the answer to `prompt`.
    pub fn stream(&self, prompt: &str) -> IncrementalDetokenizer {
        IncrementalDetokenizer::new(
            Arc::clone(&self.tokenizer),
            ReasoningTokens::for_prompt(prompt, &self.think_tags),
        )
    }

    /// The text that [`IncrementalDetokenizer`] returns for a whole answer, for an unknown prompt.
    /// [`without_reasoning`](crate::without_reasoning) removes the reasoning.
    ///
    /// # Errors
    /// As [`ChatTokenizer::decode`].
    pub fn decode_answer(&self, ids: &[i64]) -> Result<String, TextError> {
        let mut stream = IncrementalDetokenizer::new(
            Arc::clone(&self.tokenizer),
            ReasoningTokens::for_unknown_prompt(&self.think_tags),
        );
        let mut text = String::new();
        for &id in ids {
            text.extend(stream.push(id)?);
        }
        Ok(text + &stream.finish()?)
    }
}

fn split_token_ids(tokenizer: &Tokenizer) -> HashSet<u32> {
    let added = tokenizer.get_added_tokens_decoder().into_iter();
    added.filter(|(_, token)| !token.normalized && !token.content.is_empty()).map(|(id, _)| id).collect()
}

/// Whether a token is set aside by its name, as `<mask>`, `<unused0>` and `<|reserved_special_token_0|>` are.
pub fn is_reserved_name(token: &str) -> bool {
    let is_marked = token.starts_with('<') && token.ends_with('>');
    is_marked && ["mask", "reserved", "unused"].iter().any(|part| token.contains(part))
}

fn special_texts(tokenizer: &Tokenizer) -> Vec<String> {
    let added = tokenizer.get_added_tokens_decoder().into_values();
    added.filter(|token| token.special && !token.content.is_empty()).map(|token| token.content).collect()
}

/// `tokenizer_config.json`.
struct TokenizerConfig {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl TokenizerConfig {
    fn read(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer_config.json");
        Ok(Self { fields: read_json_object(&path)?, path })
    }

    /// The special tokens that are set, each a string or an object with `content`.
    fn special_tokens(&self) -> Result<Vec<(&'static str, String)>, TextError> {
        let mut tokens = Vec::new();
        for field in SPECIAL_TOKENS {
            match self.fields.get(field) {
                None | Some(Value::Null) => {}
                Some(token) => match token.get("content").unwrap_or(token) {
                    Value::String(content) => tokens.push((field, content.clone())),
                    other => {
                        return Err(self.field_error(field, "a string or an object with `content`", other));
                    }
                },
            }
        }
        Ok(tokens)
    }

    /// Loads the chat templates of the folder. `chat_template.jinja` has priority, then the
    /// config's `chat_template` (one, or a list of named ones), then the `chat_template.json` of
    /// older processors. Named templates in `additional_chat_templates/` are added, and replace
    /// entries of the config with the same name.
    fn chat_template(&self, dir: &Path) -> Result<JinjaTemplates, TextError> {
        let file = dir.join("chat_template.jinja");
        let mut templates = additional_templates(&dir.join("additional_chat_templates"))?;
        let mut origin = file.clone();
        if file.exists() {
            templates.insert(0, (DEFAULT_TEMPLATE.into(), atomic::read_text(&file)?));
        } else {
            let mut own = self.read_chat_templates(&self.path, &self.fields)?;
            let processor = dir.join("chat_template.json");
            origin.clone_from(&self.path);
            if own.is_empty() && processor.exists() {
                own = self.read_chat_templates(&processor, &read_json_object(&processor)?)?;
                origin = processor;
            }
            own.retain(|(name, _)| templates.iter().all(|(known, _)| known != name));
            templates.splice(0..0, own);
        }
        if templates.iter().all(|(name, _)| name != DEFAULT_TEMPLATE) {
            let named = templates.into_iter().map(|(name, _)| name).collect();
            return Err(TextError::NoTemplate { dir: dir.to_path_buf(), named });
        }
        JinjaTemplates::compile(templates, &origin)
    }

    /// The templates in `chat_template` of the file at `path`.
    fn read_chat_templates(
        &self,
        path: &Path,
        fields: &Map<String, Value>,
    ) -> Result<Vec<(String, String)>, TextError> {
        let wrong = |expected, found: &Value| TextError::ConfigField {
            path: path.to_path_buf(),
            field: "chat_template",
            expected,
            found: json_type_name(found),
        };
        let named = |entry: &Value| -> Result<(String, String), TextError> {
            let text = |key| entry.get(key).and_then(Value::as_str).map(str::to_owned);
            let named = text("name").zip(text("template"));
            named.ok_or_else(|| wrong("a list of objects with `name` and `template`", entry))
        };
        match fields.get("chat_template") {
            None | Some(Value::Null) => Ok(vec![]),
            Some(Value::String(template)) => Ok(vec![(DEFAULT_TEMPLATE.into(), template.clone())]),
            Some(Value::Array(entries)) => entries.iter().map(named).collect(),
            Some(Value::Object(entries)) if entries.values().all(Value::is_string) => {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                Ok(entries.iter().map(|(name, template)| (name.clone(), text(template))).collect())
            }
            Some(other) => Err(wrong("a string or a list of templates", other)),
        }
    }

    fn field_error(&self, field: &'static str, expected: &'static str, found: &Value) -> TextError {
        TextError::ConfigField { path: self.path.clone(), field, expected, found: json_type_name(found) }
    }
}

fn read_json_object(path: &Path) -> Result<Map<String, Value>, TextError> {
    let config = |source| TextError::Config { path: path.to_path_buf(), source };
    serde_json::from_str(&atomic::read_text(path)?).map_err(config)
}

/// The templates `NAME.jinja` of a folder, sorted by name; none without the folder.
fn additional_templates(folder: &Path) -> Result<Vec<(String, String)>, TextError> {
    if !folder.is_dir() {
        return Ok(vec![]);
    }
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .map_err(FileError::at("reading", folder))?;
    let is_hidden =
        |path: &Path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    paths.retain(|path| {
        path.extension().is_some_and(|extension| extension == "jinja") && path.is_file() && !is_hidden(path)
    });
    paths.sort();
    let read = |path: &PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok((name, atomic::read_text(path)?))
    };
    paths.iter().map(read).collect()
}

/// Conversations that expose differences between templates that matter to training.
fn probe_conversations() -> Vec<(Vec<Message>, RenderOptions)> {
    let said = |turns: &[(Role, &str)]| -> Vec<Message> {
        turns.iter().map(|&(role, content)| Message::new(role, content)).collect()
    };
    let (system, user, assistant) = (Role::System, Role::User, Role::Assistant);
    let turns = said(&[(user, " Hi \n"), (assistant, "\nHello. "), (user, "1+1?"), (assistant, "2")]);
    let reasoned = |mut messages: Vec<Message>| {
        for message in messages.iter_mut().filter(|message| message.role == assistant) {
            message.reasoning_content = Some("Let me think.\n".into());
        }
        messages
    };
    let inline = said(&[
        (user, "a"),
        (assistant, "<think>\nb\n</think>\n\nc"),
        (user, "d"),
        (assistant, "<think>e</think>f"),
    ]);
    let asked = said(&[(system, "Be brief."), (user, "Hi"), (assistant, "Hello"), (user, "1+1?")]);
    let tools =
        json!([{"type": "function", "function": {"name": "add", "parameters": {"b": "<int>", "a": 1}}}]);
    let prompt = |kwargs: Value| RenderOptions {
        add_generation_prompt: true,
        kwargs: kwargs.as_object().cloned().unwrap_or_default(),
        tools: None,
    };

    let mut probes: Vec<(Vec<Message>, RenderOptions)> = [
        said(&[(user, "Hi"), (assistant, "Hello")]),
        said(&[(system, "Be brief."), (user, "Hi"), (assistant, "Hello")]),
        said(&[(user, "Hi"), (assistant, "")]),
        said(&[(user, "Hi"), (system, "Be brief."), (user, "Hi"), (assistant, "Hello")]),
        reasoned(turns.clone()),
        turns,
        inline,
        asked.clone(),
    ]
    .map(|messages| (messages, RenderOptions::default()))
    .into();
    for kwargs in [json!({}), json!({"enable_thinking": true}), json!({"enable_thinking": false})] {
        probes.push((asked.clone(), prompt(kwargs)));
    }
    probes.push((asked, RenderOptions { tools: Some(tools), ..RenderOptions::default() }));
    probes
}
