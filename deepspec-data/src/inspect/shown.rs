//! Rows as they are shown: text in segments that are supervised or not.

use std::ops::ControlFlow;
use std::path::PathBuf;

use deepspec_text::{ChatTokenizer, Supervised, TextError};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::row::{Examined, Outcome, examine};
use super::settings::Settings;
use super::survey::each_batch;

/// Rows rendered at once.
const BATCH: usize = 64;

/// Which rows to show.
pub enum Selection<'a> {
    /// Every row that can be rendered.
    All,
    /// The first ones.
    First(usize),
    /// Those with these ids.
    Ids(&'a [String]),
}

/// A piece of a row's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Its text.
    pub text: String,
    /// Whether a drafter learns from its tokens.
    pub supervised: bool,
    /// Whether it is special tokens.
    pub special: bool,
    /// Whether it lies behind the cut at the maximal length.
    pub cut: bool,
}

/// A row ready to be shown.
pub struct ShownRow {
    /// The file.
    pub file: PathBuf,
    /// 1-based line number.
    pub line: usize,
    /// The row's id.
    pub id: String,
    /// Tokens before the cut.
    pub untruncated: usize,
    /// Tokens after it.
    pub tokens: usize,
    /// Supervised tokens.
    pub supervised: usize,
    /// Runs of supervised tokens, half-open.
    pub spans: Vec<(u32, u32)>,
    /// The whole text.
    pub segments: Vec<Segment>,
    /// What is wrong with the row.
    pub problems: Vec<String>,
}

impl ShownRow {
    fn new(file: PathBuf, line: usize, row: Examined, tokenizer: &ChatTokenizer) -> Result<Self, TextError> {
        let Examined { id, supervised, checked, .. } = row;
        Ok(Self {
            file,
            line,
            id,
            untruncated: supervised.untruncated_len,
            tokens: supervised.input_ids.len(),
            supervised: supervised.supervised_count(),
            spans: supervised.spans(),
            segments: segments(tokenizer, &supervised)?,
            problems: checked.problems.iter().map(ToString::to_string).collect(),
        })
    }

    /// What stands over the row.
    pub fn headline(&self) -> String {
        let Self { file, line, id, untruncated, tokens, supervised, spans, .. } = self;
        let cut = if untruncated > tokens { format!(" (cut, {untruncated} without)") } else { String::new() };
        let spans: Vec<String> = spans.iter().map(|(start, end)| format!("{start}..{end}")).collect();
        let name = file.display();
        let spans = if spans.is_empty() { "none".into() } else { spans.join(" ") };
        format!("{name}:{line}  id {id:?}  {tokens} tokens{cut}  {supervised} supervised: {spans}")
    }

    /// The row for programs.
    pub fn to_json(&self) -> Value {
        let segments: Vec<Value> = self
            .segments
            .iter()
            .map(|segment| {
                let Segment { text, supervised, special, cut } = segment;
                json!({"text": text, "supervised": supervised, "special": special, "cut": cut})
            })
            .collect();
        json!({
            "file": self.file, "line": self.line, "id": self.id, "tokens": self.tokens,
            "untruncated": self.untruncated, "supervised": self.supervised, "spans": self.spans,
            "problems": self.problems, "segments": segments,
        })
    }
}

/// Calls `show` with each selected row, in input order.
///
/// # Errors
/// Those of `show`, and if a file cannot be read.
pub fn each(
    files: &[PathBuf],
    settings: &Settings,
    selection: &Selection<'_>,
    mut show: impl FnMut(ShownRow) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut left = match selection {
        Selection::All => usize::MAX,
        Selection::First(count) => *count,
        Selection::Ids(_) => usize::MAX,
    };
    if left == 0 {
        return Ok(());
    }
    each_batch(files, BATCH, |file, lines| {
        let rows: Vec<Option<ShownRow>> = lines
            .par_iter()
            .map(|line| match examine(settings, line.parse(file)) {
                Outcome::Row(row) if selection.has(&row.id) => {
                    ShownRow::new(file.to_path_buf(), line.number, *row, &settings.tokenizer).map(Some)
                }
                _ => Ok(None),
            })
            .collect::<Result<_, _>>()?;
        for row in rows.into_iter().flatten() {
            show(row)?;
            left -= 1;
            if left == 0 {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    })
}

impl Selection<'_> {
    fn has(&self, id: &str) -> bool {
        match self {
            Self::All | Self::First(_) => true,
            Self::Ids(ids) => ids.iter().any(|wanted| wanted == id),
        }
    }
}

/// Cuts the text where the mask or the kind of token changes. A token's text begins where the one before it ends, so that
/// blanks which a tokenizer leaves out of its offsets are shown with the word behind them.
fn segments(tokenizer: &ChatTokenizer, supervised: &Supervised) -> Result<Vec<Segment>, TextError> {
    let Supervised { text, loss_mask, input_ids, .. } = supervised;
    let offsets = tokenizer.encode_with_offsets(text)?.offsets;
    let (mut segments, mut at): (Vec<Segment>, usize) = (Vec::new(), 0);
    for ((&id, &supervised), &(_, end)) in input_ids.iter().zip(loss_mask).zip(&offsets) {
        let end = (end..=text.len()).find(|&end| text.is_char_boundary(end)).unwrap_or(text.len()).max(at);
        let special = tokenizer.is_special(id);
        match segments.last_mut() {
            Some(last) if last.supervised == supervised && last.special == special => {
                last.text.push_str(&text[at..end]);
            }
            _ => {
                segments.push(Segment { text: text[at..end].to_owned(), supervised, special, cut: false });
            }
        }
        at = end;
    }
    if at < text.len() {
        let cut = supervised.untruncated_len > input_ids.len();
        segments.push(Segment { text: text[at..].to_owned(), supervised: false, special: false, cut });
    }
    segments.retain(|segment| !segment.text.is_empty());
    Ok(segments)
}

/// The text with characters that a terminal or a page would act on replaced by pictures of them; tabs and line ends stay.
pub fn visible(text: &str) -> String {
    let picture = |character: char| match character {
        '\n' | '\t' => character,
        '\0'..='\u{1F}' => char::from_u32(0x2400 + character as u32).unwrap_or('\u{FFFD}'),
        '\u{7F}' => '\u{2421}',
        '\u{80}'..='\u{9F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => '\u{FFFD}',
        other => other,
    };
    text.chars().map(picture).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_character_reaches_the_terminal_as_a_command() {
        assert_eq!(visible("a\u{1b}[31m\tb\n\r\u{7f}\u{9b}\u{202e}é"), "a␛[31m\tb\n␍␡\u{fffd}\u{fffd}é");
    }
}
