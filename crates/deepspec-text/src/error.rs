//! What can go wrong between a conversation and its tokens.

use std::path::PathBuf;

use deepspec_core::atomic::FileError;

use crate::records::RowError;

/// A tokenizer, template or conversation that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// Ids beside an answer that are none.
    #[error(
        "`{name}` of the last answer: {found}; expected ids of the tokenizer. Were these answers made by another model?"
    )]
    ServedIds {
        /// The field.
        name: &'static str,
        /// What it holds.
        found: String,
    },
    /// A file of the tokenizer cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// `tokenizer.json` is not what the tokenizers library writes.
    #[error("{}: not a usable tokenizer ({source}); copy tokenizer.json from the target model again", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the tokenizers library says.
        source: tokenizers::Error,
    },
    /// `tokenizer_config.json` is not a JSON object.
    #[error("{}: not a JSON object ({source})", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A field of `tokenizer_config.json` has another type than expected.
    #[error("{}: `{field}` must be {expected}, found {found}", path.display())]
    ConfigField {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// What it must hold.
        expected: &'static str,
        /// What it holds.
        found: &'static str,
    },
    /// The tokenizer has no chat template, or none called `default`.
    #[error("{}: no chat template (named templates: {named:?}); put one into chat_template.jinja", dir.display())]
    NoTemplate {
        /// The tokenizer's folder.
        dir: PathBuf,
        /// The names of the templates that are there.
        named: Vec<String>,
    },
    /// The chat template does not compile.
    #[error("{}: the chat template does not compile: {source}", path.display())]
    Syntax {
        /// The file that holds the template.
        path: PathBuf,
        /// What the template engine says, with the line.
        source: minijinja::Error,
    },
    /// The chat template called `raise_exception`: it does not accept this conversation.
    #[error("the chat template of {} refuses the conversation: {message}", path.display())]
    Refused {
        /// The file that holds the template.
        path: PathBuf,
        /// The template's own words.
        message: String,
    },
    /// The chat template runs for too long.
    #[error("the chat template of {} does not come to an end within {steps} steps; look for nested loops in it", path.display())]
    Endless {
        /// The file that holds the template.
        path: PathBuf,
        /// Instructions that a rendering may take.
        steps: u64,
    },
    /// The chat template failed on a conversation.
    #[error("the chat template of {} failed: {source}", path.display())]
    Render {
        /// The file that holds the template.
        path: PathBuf,
        /// What the template engine says, with the line.
        source: minijinja::Error,
    },
    /// The tokenizer failed on a text or on token ids.
    #[error("{action} failed: {source}")]
    Tokenize {
        /// `tokenising` or `detokenising`.
        action: &'static str,
        /// What the tokenizers library says.
        source: tokenizers::Error,
    },
    /// A number that no vocabulary can hold.
    #[error("{id} is not a token id")]
    NotAnId {
        /// The number.
        id: i64,
    },
    /// A language model that is to draft for a target with other tokens.
    #[error("{}: token {id} is {own:?}, the target's is {target:?}; a language model drafts for targets of its own tokenizer", dir.display())]
    OtherToken {
        /// The language model's folder.
        dir: PathBuf,
        /// The first id whose tokens differ.
        id: i64,
        /// Its token there; None if there is none.
        own: Option<String>,
        /// The target's.
        target: Option<String>,
    },
    /// A loss-mask template whose marks match everywhere.
    #[error("chat template `{name}`: assistant_header and end_of_turn must not be empty")]
    EmptyMark {
        /// The template's name.
        name: String,
    },
    /// The template's own tags are the mask rule, and it has none.
    #[error("the chat template of {} has no {{% generation %}} tags to take the mask from; choose a format by its name, or an entry of your own", path.display())]
    NoGenerationTags {
        /// The file that holds the template.
        path: PathBuf,
    },
    /// The template works on what it wrote between its tags.
    #[error("the chat template of {} rewrites what stands between its {{% generation %}} tags, so that the mask cannot be told; put the tags around the final output", path.display())]
    GenerationMoved {
        /// The file that holds the template.
        path: PathBuf,
    },
    /// The conversation itself is unusable.
    #[error(transparent)]
    Row(#[from] RowError),
}
