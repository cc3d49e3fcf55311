//! Ids to text as they come, without breaking a character in two.

use std::mem;
use std::sync::Arc;

use tokenizers::Tokenizer;

use crate::error::TextError;
use crate::marks::Marks;

/// What a decoder writes for bytes that are not (yet) a character.
const BROKEN: char = '\u{FFFD}';

/// Turns the ids of an answer into text incrementally: the pieces, joined, are what [`ChatTokenizer::decode`] makes of all
/// ids at once without the special tokens, except that those which [fence](crate::Fence) thoughts are left in where a
/// fence may stand: an opening one before anything else, and the closing one that is due then. Without them nobody could
/// tell thoughts and answer apart.
///
/// [`ChatTokenizer::decode`]: crate::ChatTokenizer::decode
pub struct TokenStream {
    tokenizer: Arc<Tokenizer>,
    marks: Marks,
    /// Whether no more than white space has come out.
    blank: bool,
    /// The ids of the last piece: decoders may write a token otherwise at the start of a text than within it.
    context: Vec<u32>,
    /// What the context alone decodes to.
    known: String,
    /// Ids whose text is not out yet.
    pending: Vec<u32>,
}

impl TokenStream {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, marks: Marks) -> Self {
        let (context, known, pending) = (Vec::new(), String::new(), Vec::new());
        Self { tokenizer, marks, blank: true, context, known, pending }
    }

    /// Adds an id; returns the text that is certain by now, if there is any.
    ///
    /// # Errors
    /// If the id is negative, or the tokenizer's decoder fails.
    pub fn push(&mut self, id: i64) -> Result<Option<String>, TextError> {
        let id = as_id(id)?;
        let Some(token) = self.tokenizer.id_to_token(id) else { return Ok(None) };
        if self.tokenizer.get_added_vocabulary().is_special_token(&token) {
            return self.special(id, &token);
        }
        self.pending.push(id);
        // With byte fallback a run of byte tokens is a string as a whole or not at all, so its end must be seen.
        if is_byte(&token) {
            return Ok(None);
        }
        let text = self.decode_pending()?;
        match text.strip_prefix(&self.known) {
            Some(new) if !new.is_empty() && !new.ends_with(BROKEN) => {
                let new = new.to_owned();
                self.blank &= new.trim().is_empty();
                self.context = mem::take(&mut self.pending);
                self.known = decode(&self.tokenizer, &self.context, true)?;
                Ok(Some(new))
            }
            _ => Ok(None),
        }
    }

    /// Ends the stream; returns what was held back, with U+FFFD for bytes that never became a character.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn finish(self) -> Result<String, TextError> {
        self.rest()
    }

    /// A special token: left out, unless it fences thoughts here. What follows a fence is decoded as a text of its own.
    fn special(&mut self, id: u32, token: &str) -> Result<Option<String>, TextError> {
        if !self.marks.has(id) {
            return Ok(None);
        }
        let mut text = self.rest()?;
        if !self.marks.take(id, self.blank && text.trim().is_empty()) {
            return Ok(None);
        }
        text.push_str(token);
        (self.context, self.known, self.pending) = (Vec::new(), String::new(), Vec::new());
        self.blank = false;
        Ok(Some(text))
    }

    /// The text that was held back.
    fn rest(&self) -> Result<String, TextError> {
        let text = self.decode_pending()?;
        match text.strip_prefix(&self.known) {
            Some(new) => Ok(new.to_owned()),
            None => decode(&self.tokenizer, &self.pending, true),
        }
    }

    /// The text of the context and what follows it.
    fn decode_pending(&self) -> Result<String, TextError> {
        decode(&self.tokenizer, &[self.context.as_slice(), &self.pending].concat(), true)
    }
}

/// Whether the token stands for one byte (`<0x0A>`), as in vocabularies with byte fallback.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

pub(crate) fn as_id(id: i64) -> Result<u32, TextError> {
    u32::try_from(id).map_err(|_| TextError::NotAnId { id })
}

pub(crate) fn decode(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
    tokenizer
        .decode(ids, skip_special)
        .map_err(|source| TextError::Tokenize { action: "detokenising", source })
}
