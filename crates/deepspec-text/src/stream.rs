//! Detokenises a stream of ids without splitting characters.

use std::mem;
use std::sync::Arc;

use tokenizers::Tokenizer;

use crate::error::TextError;
use crate::reasoning_tokens::ReasoningTokens;

/// The replacement character, which a decoder writes for incomplete bytes.
const REPLACEMENT_CHARACTER: char = '\u{FFFD}';

/// Detokenises the ids of an answer incrementally. The joined pieces equal
/// [`ChatTokenizer::decode`] of all ids without special tokens, except for [think
/// tags](crate::ThinkTags). An opening tag at the start of the answer, and its closing tag, stay in
/// the text to separate reasoning from the answer.
///
/// [`ChatTokenizer::decode`]: crate::ChatTokenizer::decode
pub struct IncrementalDetokenizer {
    tokenizer: Arc<Tokenizer>,
    reasoning_tokens: ReasoningTokens,
    /// Whether the output so far is only white space.
    blank: bool,
    /// The ids of the last piece. Decoders may write a token differently at the start of a text.
    context: Vec<u32>,
    /// The text of `context` alone.
    known: String,
    /// Ids whose text has not been returned yet.
    pending: Vec<u32>,
}

impl IncrementalDetokenizer {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, reasoning_tokens: ReasoningTokens) -> Self {
        let (context, known, pending) = (Vec::new(), String::new(), Vec::new());
        Self { tokenizer, reasoning_tokens, blank: true, context, known, pending }
    }

    /// Adds an id and returns the text that is now final, if any.
    ///
    /// # Errors
    /// If the id is negative, or the tokenizer's decoder fails.
    pub fn push(&mut self, id: i64) -> Result<Option<String>, TextError> {
        let id = to_token_id(id)?;
        let Some(token) = self.tokenizer.id_to_token(id) else { return Ok(None) };
        if self.tokenizer.get_added_vocabulary().is_special_token(&token) {
            return self.push_special(id, &token);
        }
        self.pending.push(id);
        // With byte fallback, a run of byte tokens decodes only as a whole, so decoding waits for
        // its end.
        if is_byte_token(&token) {
            return Ok(None);
        }
        let text = self.decode_pending()?;
        match text.strip_prefix(&self.known) {
            Some(new) if !new.is_empty() && !new.ends_with(REPLACEMENT_CHARACTER) => {
                let new = new.to_owned();
                self.blank &= new.trim().is_empty();
                self.context = mem::take(&mut self.pending);
                self.known = decode(&self.tokenizer, &self.context, true)?;
                Ok(Some(new))
            }
            _ => Ok(None),
        }
    }

    /// Ends the stream and returns the remaining text, with U+FFFD for incomplete characters.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn finish(self) -> Result<String, TextError> {
        self.remaining_text()
    }

    /// Drops a special token, unless it opens or closes reasoning here. The text after a think tag
    /// is decoded separately.
    fn push_special(&mut self, id: u32, token: &str) -> Result<Option<String>, TextError> {
        if !self.reasoning_tokens.contains(id) {
            return Ok(None);
        }
        let mut text = self.remaining_text()?;
        if !self.reasoning_tokens.accept(id, self.blank && text.trim().is_empty()) {
            return Ok(None);
        }
        text.push_str(token);
        (self.context, self.known, self.pending) = (Vec::new(), String::new(), Vec::new());
        self.blank = false;
        Ok(Some(text))
    }

    /// The text that has not been returned yet.
    fn remaining_text(&self) -> Result<String, TextError> {
        let text = self.decode_pending()?;
        match text.strip_prefix(&self.known) {
            Some(new) => Ok(new.to_owned()),
            None => decode(&self.tokenizer, &self.pending, true),
        }
    }

    /// The text of the context and the pending ids.
    fn decode_pending(&self) -> Result<String, TextError> {
        decode(&self.tokenizer, &[self.context.as_slice(), &self.pending].concat(), true)
    }
}

/// Whether the token stands for one byte (`<0x0A>`), as in vocabularies with byte fallback.
fn is_byte_token(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

pub(crate) fn to_token_id(id: i64) -> Result<u32, TextError> {
    u32::try_from(id).map_err(|_| TextError::NotAnId { id })
}

pub(crate) fn decode(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
    tokenizer
        .decode(ids, skip_special)
        .map_err(|source| TextError::Tokenize { action: "detokenising", source })
}
