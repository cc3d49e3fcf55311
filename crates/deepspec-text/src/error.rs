//! Errors of tokenizers, chat templates and conversations.

use std::path::PathBuf;

use deepspec_core::atomic::FileError;

use crate::records::RowError;

/// Why a tokenizer, template or conversation cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// Token ids of an answer that the tokenizer does not have.
    #[error(
        "`{name}` of the last answer: {found}; expected ids of the tokenizer. Were these answers made by another model?"
    )]
    ServedIds {
        /// The field.
        name: &'static str,
        /// The malformed value.
        found: String,
    },
    /// A file of the tokenizer cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The tokenizers library cannot parse `tokenizer.json`.
    #[error("{}: not a usable tokenizer ({source}); copy tokenizer.json from the target model again", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The error of the tokenizers library.
        source: tokenizers::Error,
    },
    /// `tokenizer_config.json` is not a JSON object.
    #[error("{}: not a JSON object ({source})", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A field of `tokenizer_config.json` has another type than expected.
    #[error("{}: `{field}` must be {expected}, found {found}", path.display())]
    ConfigField {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// The expected type.
        expected: &'static str,
        /// The type in the file.
        found: &'static str,
    },
    /// The tokenizer has no chat template, or no template called `default`.
    #[error("{}: no chat template (named templates: {named:?}); put one into chat_template.jinja", dir.display())]
    NoTemplate {
        /// The tokenizer's folder.
        dir: PathBuf,
        /// The names of the other templates.
        named: Vec<String>,
    },
    /// The chat template does not compile.
    #[error("{}: the chat template does not compile: {source}", path.display())]
    Syntax {
        /// The file that holds the template.
        path: PathBuf,
        /// The template engine's error, with the line.
        source: minijinja::Error,
    },
    /// The chat template called `raise_exception`: it does not accept this conversation.
    #[error("the chat template of {} refuses the conversation: {message}", path.display())]
    Refused {
        /// The file that holds the template.
        path: PathBuf,
        /// The message of `raise_exception`.
        message: String,
    },
    /// Rendering the chat template takes too long.
    #[error("the chat template of {} does not come to an end within {steps} steps; look for nested loops in it", path.display())]
    Endless {
        /// The file that holds the template.
        path: PathBuf,
        /// The limit on instructions of a rendering.
        steps: u64,
    },
    /// The chat template failed on a conversation.
    #[error("the chat template of {} failed: {source}", path.display())]
    Render {
        /// The file that holds the template.
        path: PathBuf,
        /// The template engine's error, with the line.
        source: minijinja::Error,
    },
    /// The tokenizer failed on a text or on token ids.
    #[error("{action} failed: {source}")]
    Tokenize {
        /// `tokenising` or `detokenising`.
        action: &'static str,
        /// The error of the tokenizers library.
        source: tokenizers::Error,
    },
    /// A number that cannot be a token id.
    #[error("{id} is not a token id")]
    NotAnId {
        /// The number.
        id: i64,
    },
    /// A draft language model whose vocabulary differs from the target's.
    #[error("{}: token {id} is {own:?}, the target's is {target:?}; a language model drafts for targets of its own tokenizer", dir.display())]
    OtherToken {
        /// The draft model's folder.
        dir: PathBuf,
        /// The first id whose tokens differ.
        id: i64,
        /// Token that the tokenizer has for the id; None if the id is not in its vocabulary.
        own: Option<String>,
        /// The target's token for that id.
        target: Option<String>,
    },
    /// A mask rule with an empty marker, which would match everywhere.
    #[error("chat template `{name}`: assistant_header and end_of_turn must not be empty")]
    EmptyMark {
        /// The template's name.
        name: String,
    },
    /// The mask rule needs `{% generation %}` tags, but the template has no such tags.
    #[error("the chat template of {} has no {{% generation %}} tags to take the mask from; choose a format by its name, or an entry of your own", path.display())]
    NoGenerationTags {
        /// The file that holds the template.
        path: PathBuf,
    },
    /// The template modifies the text between its tags after writing it.
    #[error("the chat template of {} rewrites what stands between its {{% generation %}} tags, so that the mask cannot be told; put the tags around the final output", path.display())]
    GenerationMoved {
        /// The file that holds the template.
        path: PathBuf,
    },
    /// The conversation is malformed.
    #[error(transparent)]
    Row(#[from] RowError),
}
