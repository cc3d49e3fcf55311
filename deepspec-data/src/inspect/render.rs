//! Splits rows into supervised and other segments of text.

use std::path::PathBuf;

use deepspec_core::jsonl::{self, RawLine};
use deepspec_core::row::UniqueIds;
use deepspec_text::{ChatTokenizer, Served, Supervised, TextError};
use rayon::prelude::*;
use serde::Serialize;

use super::row::{MaskedRow, RowOutcome, inspect_line};
use super::settings::MaskSettings;

/// Rows that are rendered at once.
const LINES_PER_BATCH: usize = 64;

/// A piece of a row's text.
#[derive(Serialize)]
pub struct Segment {
    /// Text of the segment.
    pub text: String,
    /// Whether a drafter trains on its tokens.
    pub supervised: bool,
    /// Whether its tokens are special tokens.
    pub special: bool,
    /// Whether it was truncated at the maximal length.
    pub cut: bool,
}

/// A row with its segments.
#[derive(Serialize)]
pub struct RenderedRow {
    /// The file.
    pub file: PathBuf,
    /// 1-based line number.
    pub line: usize,
    /// The row's id.
    pub id: String,
    /// Number of tokens after truncation.
    pub tokens: usize,
    /// Number of tokens before truncation.
    pub untruncated: usize,
    /// Number of supervised tokens.
    pub supervised: usize,
    /// Ranges of supervised tokens, half-open.
    pub spans: Vec<(u32, u32)>,
    /// The row's problems.
    pub problems: Vec<String>,
    /// The whole text, in segments.
    pub segments: Vec<Segment>,
}

impl RenderedRow {
    fn new(
        file: PathBuf,
        line: usize,
        id: String,
        row: MaskedRow,
        tokenizer: &ChatTokenizer,
    ) -> Result<Self, TextError> {
        let MaskedRow { supervised, checked, .. } = row;
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

    /// The headline of the row.
    pub fn headline(&self) -> String {
        let Self { file, line, id, untruncated, tokens, supervised, spans, .. } = self;
        let cut = if untruncated > tokens { format!(" (cut, {untruncated} without)") } else { String::new() };
        let spans: Vec<String> = spans.iter().map(|(start, end)| format!("{start}..{end}")).collect();
        let name = file.display();
        let spans = if spans.is_empty() { "none".into() } else { spans.join(" ") };
        format!("{name}:{line}  id {id:?}  {tokens} tokens{cut}  {supervised} supervised: {spans}")
    }
}

/// Calls `show` with the rows of these ids, or with all rows if there are no ids. It keeps the
/// input order and stops after `most` rows.
pub fn each_rendered_row(
    files: &[PathBuf],
    settings: &MaskSettings,
    ids: &[String],
    most: usize,
    mut show: impl FnMut(RenderedRow) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (mut left, mut names, mut place) = (most, UniqueIds::default(), 0);
    for batch in jsonl::line_batches_of_files(files, LINES_PER_BATCH) {
        let (file, lines) = batch?;
        let inspect_line = |line: &RawLine| (line.number, inspect_line(settings, line.parse(file)));
        let mut wanted = vec![];
        for (line, outcome) in lines.par_iter().map(inspect_line).collect::<Vec<_>>() {
            if let RowOutcome::Row(mut row) = outcome {
                let id = row.assign_unique_id(&mut names, place);
                if ids.is_empty() || ids.contains(&id) {
                    wanted.push((line, id, *row));
                }
            }
            place += 1;
        }
        wanted.truncate(left.saturating_add(1));
        let show_row =
            |(line, id, row)| RenderedRow::new(file.to_path_buf(), line, id, row, &settings.tokenizer);
        for row in wanted.into_par_iter().map(show_row).collect::<Result<Vec<_>, _>>()? {
            if left == 0 {
                return Ok(());
            }
            show(row)?;
            left -= 1;
        }
    }
    Ok(())
}

/// Splits the text where the mask or the type of token changes. The text of each token begins where
/// the text of the previous token ends, so white space without an offset belongs to the next token.
fn segments(tokenizer: &ChatTokenizer, supervised: &Supervised) -> Result<Vec<Segment>, TextError> {
    let Supervised { text, loss_mask, input_ids, .. } = supervised;
    if supervised.served == Served::DiffersFromText {
        return served_segments(tokenizer, supervised);
    }
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

/// [`segments`] for served ids that differ from the text's: decodes each run of tokens separately.
fn served_segments(tokenizer: &ChatTokenizer, supervised: &Supervised) -> Result<Vec<Segment>, TextError> {
    let kinds: Vec<(bool, bool)> = supervised
        .input_ids
        .iter()
        .zip(&supervised.loss_mask)
        .map(|(&id, &supervised)| (supervised, tokenizer.is_special(id)))
        .collect();
    let (mut segments, mut at) = (vec![], 0);
    for run in kinds.chunk_by(|a, b| a == b) {
        let (supervised_here, special) = run[0];
        let text = tokenizer.decode(&supervised.input_ids[at..at + run.len()], false)?;
        segments.push(Segment { text, supervised: supervised_here, special, cut: false });
        at += run.len();
    }
    segments.retain(|segment: &Segment| !segment.text.is_empty());
    Ok(segments)
}

/// Replaces control characters of terminals and pages by visible symbols; tabs and line ends stay.
pub fn show_control_characters(text: &str) -> String {
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
        assert_eq!(
            show_control_characters("a\u{1b}[31m\tb\n\r\u{7f}\u{9b}\u{202e}é"),
            "a␛[31m\tb\n␍␡\u{fffd}\u{fffd}é"
        );
    }
}
