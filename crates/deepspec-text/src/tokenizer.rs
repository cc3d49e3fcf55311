//! A tokenizer with its chat template: text to ids, ids to text, conversations to text.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use deepspec_core::atomic::{self, FileError};
use deepspec_core::digest::{self, Hasher};
use deepspec_core::jsonl::kind_of;
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use crate::conversation::for_template;
use crate::error::TextError;
use crate::marks::{Marks, SpecialFence};
use crate::message::{Message, Role};
use crate::stream::{TokenStream, as_id, decode};
use crate::template::{DEFAULT, Jinja, RenderOptions};

/// The special tokens that transformers gives to chat templates.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Token ids and where each stands in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The ids.
    pub ids: Vec<i64>,
    /// Byte range of each id's text; the ids that share a character each have the whole of it.
    pub offsets: Vec<(usize, usize)>,
    /// The word of each id: tokens merge within the words that the pre-tokenizer splits a text into.
    pub(crate) words: Vec<Option<u32>>,
}

/// The tokenizer of a model folder. Share it by reference; it holds no state.
pub struct ChatTokenizer {
    tokenizer: Arc<Tokenizer>,
    jinja: Jinja,
    special: Vec<(&'static str, String)>,
    /// The special tokens as they stand in texts.
    special_texts: Vec<String>,
    /// The fences of thoughts that are special tokens.
    fences: Vec<SpecialFence>,
    /// Added tokens that are looked for in a text as it stands, before it is normalised.
    cuts: HashSet<u32>,
    vocab_size: usize,
    digest: String,
}

impl ChatTokenizer {
    /// Reads `tokenizer.json`, `tokenizer_config.json` and the chat templates, in the order of transformers: see
    /// [`Config::chat_template`].
    ///
    /// # Errors
    /// If a file is missing or not what it should be, or a template does not compile or does not come to an end.
    pub fn load(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let bytes = fs::read(&path).map_err(FileError::at("reading", &path))?;
        let unusable = |source| TextError::Tokenizer { path: path.clone(), source };
        let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes); // A byte order mark.
        let mut tokenizer = Tokenizer::from_bytes(text).map_err(unusable)?;
        // Whoever saved it may have left settings of one batch in it.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(unusable)?;

        let config = Config::read(dir)?;
        let loaded = Self {
            vocab_size: tokenizer.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1),
            special_texts: special_texts(&tokenizer),
            fences: SpecialFence::of(&tokenizer),
            cuts: cuts(&tokenizer),
            tokenizer: Arc::new(tokenizer),
            jinja: config.chat_template(dir)?,
            special: config.special_tokens()?,
            digest: digest::bytes(&bytes),
        };
        // An endless template is the model's fault, not that of the first row.
        match loaded.render(&[Message::new(Role::User, "Hi")], &RenderOptions::default()) {
            Err(error @ TextError::Endless { .. }) => Err(error),
            _ => Ok(loaded),
        }
    }

    /// The ids of `text`; special tokens that it spells are recognised, none are added.
    ///
    /// # Errors
    /// If the tokenizer's model cannot represent the text.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, TextError> {
        let encoding = self.tokenizer.encode_fast(text, false);
        let encoding = encoding.map_err(|source| TextError::Tokenize { action: "tokenising", source })?;
        Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
    }

    /// [`ChatTokenizer::encode`], with the place of each id.
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

    /// The text of `ids`; ids past the vocabulary (the padding of a model's embedding) have none.
    ///
    /// # Errors
    /// If an id is negative, or the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[i64], skip_special: bool) -> Result<String, TextError> {
        let ids = ids.iter().map(|&id| as_id(id)).collect::<Result<Vec<u32>, _>>()?;
        decode(&self.tokenizer, &ids, skip_special)
    }

    /// The conversation as the chat template writes it.
    ///
    /// # Errors
    /// If the template refuses the conversation or fails on it.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TextError> {
        self.jinja.render(&for_template(messages), options, &self.special, Utc::now())
    }

    /// [`ChatTokenizer::render`], and the byte ranges that the template marks by `{% generation %}` as the assistant's.
    ///
    /// # Errors
    /// As [`ChatTokenizer::render`], and if the template has no such tags or rewrites what they enclose.
    pub fn render_generations(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<(String, Vec<(usize, usize)>), TextError> {
        self.jinja.render_generations(&for_template(messages), options, &self.special, Utc::now())
    }

    pub(crate) fn require_generation_tags(&self) -> Result<(), TextError> {
        self.jinja.require_generation_tags()
    }

    /// Whether the template marks by `{% generation %}` what the assistant wrote.
    pub fn has_generation_tags(&self) -> bool {
        self.jinja.has_generation_tags()
    }

    /// The number of ids, counted to the largest one in use.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Warns where the tokenizer has ids behind the `rows` of a model's embedding, as after tokens were added without a
    /// resize. Texts without these tokens can be used.
    pub fn report_wider_than(&self, rows: usize) {
        if self.vocab_size > rows {
            tracing::warn!(
                "the tokenizer has ids up to {}, the model's embedding {rows} rows; texts with ids behind them cannot be used",
                self.vocab_size - 1
            );
        }
    }

    /// Says which tokens end an answer.
    pub fn report_ends(&self, ids: &[i64]) {
        let name =
            |id: &i64| self.token(*id).map_or_else(|| id.to_string(), |token| format!("{token} ({id})"));
        tracing::info!("answers end at {}", ids.iter().map(name).collect::<Vec<_>>().join(", "));
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_id(&self, token: &str) -> Option<i64> {
        self.tokenizer.token_to_id(token).map(i64::from)
    }

    /// The token of an id as the vocabulary spells it.
    pub fn token(&self, id: i64) -> Option<String> {
        self.tokenizer.id_to_token(u32::try_from(id).ok()?)
    }

    /// Whether the language model in `dir`, which is to draft for the model of this tokenizer, has the same tokens.
    ///
    /// # Errors
    /// [`TextError::OtherToken`] with the first that differs, and whatever keeps its tokenizer from being read.
    pub fn check_drafter(&self, dir: &Path) -> Result<(), TextError> {
        let other = Self::load(dir)?;
        let ids = self.vocab_size.max(other.vocab_size) as i64;
        match (0..ids).map(|id| (id, other.token(id), self.token(id))).find(|(_, own, target)| own != target)
        {
            Some((id, own, target)) => Err(TextError::OtherToken { dir: dir.to_path_buf(), id, own, target }),
            None => Ok(()),
        }
    }

    /// Whether an id stands for a special token such as an end-of-turn mark.
    pub fn is_special(&self, id: i64) -> bool {
        self.token(id).is_some_and(|token| self.tokenizer.get_added_vocabulary().is_special_token(&token))
    }

    /// Whether texts are cut at this token before anything else is looked at.
    pub(crate) fn is_cut(&self, id: i64) -> bool {
        u32::try_from(id).is_ok_and(|id| self.cuts.contains(&id))
    }

    /// `text` without special tokens.
    pub(crate) fn without_special(&self, text: &str) -> String {
        self.special_texts.iter().fold(text.to_string(), |text, token| match text.contains(token.as_str()) {
            true => text.replace(token.as_str(), ""),
            false => text,
        })
    }

    /// `text` without the special tokens and the white space at its end.
    pub(crate) fn without_special_ends<'a>(&self, text: &'a str) -> &'a str {
        let mut rest = text.trim_end();
        while let Some(shorter) =
            self.special_texts.iter().find_map(|token| rest.strip_suffix(token.as_str()))
        {
            rest = shorter.trim_end();
        }
        rest
    }

    /// The id of the config's `eos_token`.
    pub fn eos_token_id(&self) -> Option<i64> {
        let (_, token) = self.special.iter().find(|(name, _)| *name == "eos_token")?;
        self.token_id(token)
    }

    /// SHA-256 of `tokenizer.json`.
    pub fn tokenizer_digest(&self) -> &str {
        &self.digest
    }

    /// A digest of how the template writes a fixed set of conversations: templates that behave alike have the same
    /// one, however they are spelled. The time that templates may ask for is fixed, so the digest lasts.
    pub fn template_digest(&self) -> String {
        let mut hasher = Hasher::default();
        for (messages, options) in probes() {
            match self.jinja.render(&messages, &options, &self.special, DateTime::UNIX_EPOCH) {
                Ok(text) => hasher.part(b"text").part(text.as_bytes()),
                Err(_) => hasher.part(b"refused"),
            };
        }
        hasher.hex()
    }

    /// A digest of what the template writes and marks as the assistant's on the same conversations.
    pub(crate) fn generation_digest(&self) -> String {
        let mut hasher = Hasher::default();
        for (messages, options) in probes() {
            match self.jinja.render_generations(&messages, &options, &self.special, DateTime::UNIX_EPOCH) {
                Ok((text, places)) => {
                    hasher.part(b"text").part(text.as_bytes());
                    for (start, end) in places {
                        hasher.part(format!("{start}..{end}").as_bytes());
                    }
                }
                Err(_) => {
                    hasher.part(b"refused");
                }
            }
        }
        hasher.hex()
    }

    /// Starts turning the ids of the answer to `prompt` into text as they come.
    pub fn stream(&self, prompt: &str) -> TokenStream {
        TokenStream::new(Arc::clone(&self.tokenizer), Marks::after(prompt, &self.fences))
    }

    /// The text of a whole answer as [`TokenStream`] gives it, whether the prompt opened thoughts or not:
    /// [`without_thoughts`](crate::without_thoughts) finds what was said.
    ///
    /// # Errors
    /// As [`ChatTokenizer::decode`].
    pub fn decode_answer(&self, ids: &[i64]) -> Result<String, TextError> {
        let mut stream = TokenStream::new(Arc::clone(&self.tokenizer), Marks::all(&self.fences));
        let mut text = String::new();
        for &id in ids {
            text.extend(stream.push(id)?);
        }
        Ok(text + &stream.finish()?)
    }
}

fn cuts(tokenizer: &Tokenizer) -> HashSet<u32> {
    let added = tokenizer.get_added_tokens_decoder().into_iter();
    added.filter(|(_, token)| !token.normalized && !token.content.is_empty()).map(|(id, _)| id).collect()
}

fn special_texts(tokenizer: &Tokenizer) -> Vec<String> {
    let added = tokenizer.get_added_tokens_decoder().into_values();
    added.filter(|token| token.special && !token.content.is_empty()).map(|token| token.content).collect()
}

/// `tokenizer_config.json`, as far as we read it.
struct Config {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl Config {
    fn read(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer_config.json");
        Ok(Self { fields: read_object(&path)?, path })
    }

    /// The special tokens that are set; a token is a string or an object with `content`.
    fn special_tokens(&self) -> Result<Vec<(&'static str, String)>, TextError> {
        let mut tokens = Vec::new();
        for field in SPECIAL_TOKENS {
            match self.fields.get(field) {
                None | Some(Value::Null) => {}
                Some(token) => match token.get("content").unwrap_or(token) {
                    Value::String(content) => tokens.push((field, content.clone())),
                    other => return Err(self.wrong(field, "a string or an object with `content`", other)),
                },
            }
        }
        Ok(tokens)
    }

    /// The templates of the folder: `chat_template.jinja` with the named ones of `additional_chat_templates/`, else the
    /// config's `chat_template` (one, or a list of named ones), else the `chat_template.json` of older processors. Named
    /// templates beside no default are completed by the config's. Files go before entries of the config of the same name.
    fn chat_template(&self, dir: &Path) -> Result<Jinja, TextError> {
        let file = dir.join("chat_template.jinja");
        let mut templates = additional_templates(&dir.join("additional_chat_templates"))?;
        let mut origin = file.clone();
        if file.exists() {
            templates.insert(0, (DEFAULT.into(), atomic::read_text(&file)?));
        } else {
            let mut own = self.configured(&self.path, &self.fields)?;
            let processor = dir.join("chat_template.json");
            origin.clone_from(&self.path);
            if own.is_empty() && processor.exists() {
                own = self.configured(&processor, &read_object(&processor)?)?;
                origin = processor;
            }
            own.retain(|(name, _)| templates.iter().all(|(known, _)| known != name));
            templates.splice(0..0, own);
        }
        if templates.iter().all(|(name, _)| name != DEFAULT) {
            let named = templates.into_iter().map(|(name, _)| name).collect();
            return Err(TextError::NoTemplate { dir: dir.to_path_buf(), named });
        }
        Jinja::compile(templates, &origin)
    }

    /// The templates in the field `chat_template` of the file at `path`.
    fn configured(
        &self,
        path: &Path,
        fields: &Map<String, Value>,
    ) -> Result<Vec<(String, String)>, TextError> {
        let wrong = |expected, found: &Value| TextError::ConfigField {
            path: path.to_path_buf(),
            field: "chat_template",
            expected,
            found: kind_of(found),
        };
        let named = |entry: &Value| -> Result<(String, String), TextError> {
            let text = |key| entry.get(key).and_then(Value::as_str).map(str::to_owned);
            let named = text("name").zip(text("template"));
            named.ok_or_else(|| wrong("a list of objects with `name` and `template`", entry))
        };
        match fields.get("chat_template") {
            None | Some(Value::Null) => Ok(vec![]),
            Some(Value::String(template)) => Ok(vec![(DEFAULT.into(), template.clone())]),
            Some(Value::Array(entries)) => entries.iter().map(named).collect(),
            Some(Value::Object(entries)) if entries.values().all(Value::is_string) => {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                Ok(entries.iter().map(|(name, template)| (name.clone(), text(template))).collect())
            }
            Some(other) => Err(wrong("a string or a list of templates", other)),
        }
    }

    fn wrong(&self, field: &'static str, expected: &'static str, found: &Value) -> TextError {
        TextError::ConfigField { path: self.path.clone(), field, expected, found: kind_of(found) }
    }
}

fn read_object(path: &Path) -> Result<Map<String, Value>, TextError> {
    let config = |source| TextError::Config { path: path.to_path_buf(), source };
    serde_json::from_str(&atomic::read_text(path)?).map_err(config)
}

/// The templates of a folder, `NAME.jinja` each, by name; none where there is no folder.
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

/// Conversations on which templates differ where it matters to us.
fn probes() -> Vec<(Vec<Message>, RenderOptions)> {
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
