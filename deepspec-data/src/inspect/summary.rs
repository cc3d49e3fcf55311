//! Summary of all rows.

use std::collections::HashSet;
use std::fmt;

use deepspec_text::{ChatTokenizer, MIN_SUPERVISED_TOKENS, is_reserved_name};
use serde::Serialize;

/// Number of candidates for the mask token that are shown.
const SHOWN_CANDIDATES: usize = 8;

/// Counts over all rows. `rows` is the sum of good, too_short, with_problems, status_error and
/// unusable.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Summary {
    /// Name of the mask rules.
    pub chat_template: String,
    /// Maximal length of a row in tokens.
    pub max_length: usize,
    /// Lines that are not blank.
    pub rows: usize,
    /// Rows that are fit for training.
    pub good: usize,
    /// Rows that `cache build` skips, because they have too few supervised tokens.
    pub too_short: usize,
    /// Rows with problems, such as an empty mask.
    pub with_problems: usize,
    /// Rows that `regenerate` could not answer.
    pub status_error: usize,
    /// Lines without a usable row.
    pub unusable: usize,
    /// Rows whose mask is empty.
    pub empty_masks: usize,
    /// Rows whose mask differs from the assistant's messages.
    pub other_words: usize,
    /// Rows whose template differs from the served one.
    pub other_prompts: usize,
    /// Rows truncated at the maximal length.
    pub cut: usize,
    /// Tokens of all rows, after truncation.
    pub tokens: u64,
    /// Supervised tokens of all rows.
    pub supervised_tokens: u64,
    /// Rows that got the default system message.
    pub default_system: usize,
    /// Answers whose reasoning the template drops.
    pub thoughts_left_out: usize,
    /// Answers that consist of tool calls only, which the template does not write.
    pub calls_left_out: usize,
    /// Supervised tool calls with recorded results.
    pub recorded_calls: usize,
    /// Assistant messages of weight 0, which are not trained on.
    pub untrained: usize,
    /// Earlier answers whose training text lacks the end of their served prompt.
    pub outside_their_prompt: usize,
    /// Rows that contain the drafter's mask token.
    pub with_mask_token: usize,
    /// Tokens that may be the mask token; empty if the recipe's mask token is in no row.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mask_candidates: Vec<MaskCandidate>,
    /// Rows whose markers and tags give equal masks; absent without both rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tags_agree: Option<usize>,
    /// The first row whose masks differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_disagreement: Option<String>,
    /// Lengths of rows before truncation, in tokens.
    pub lengths: Lengths,
    /// Rows whose prompt the server renders differently.
    pub server_differs: usize,
    /// Result of the comparison with a server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
}

/// A token that may be the mask token of a block drafter or a P-EAGLE, because no row has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MaskCandidate {
    /// The id.
    pub id: i64,
    /// The tokenizer's token; None for an id that only the embedding has.
    pub token: Option<String>,
}

impl MaskCandidate {
    /// The best candidates of `unused`: ids without a token, tokens that are reserved by their names,
    /// then others.
    pub fn likeliest(unused: HashSet<i64>, tokenizer: &ChatTokenizer) -> Vec<Self> {
        let mut all: Vec<Self> =
            unused.into_iter().map(|id| Self { id, token: tokenizer.token(id) }).collect();
        let class = |token: &String| if is_reserved_name(token) { 1 } else { 2 };
        all.sort_by_key(|candidate| (candidate.token.as_ref().map_or(0, class), candidate.id));
        all.truncate(SHOWN_CANDIDATES);
        all
    }
}

impl fmt::Display for MaskCandidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.token {
            Some(token) => write!(f, "{} {token}", self.id),
            None => write!(f, "{}", self.id),
        }
    }
}

/// Quantiles of row lengths, in tokens.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Lengths {
    /// The shortest row.
    pub min: u32,
    /// Half of the rows are no longer.
    pub p50: u32,
    /// 90 % of the rows are no longer.
    pub p90: u32,
    /// 99 % of the rows are no longer.
    pub p99: u32,
    /// The longest row.
    pub max: u32,
}

impl Lengths {
    /// The quantiles of `lengths`, without interpolation.
    pub fn of(mut lengths: Vec<u32>) -> Self {
        lengths.sort_unstable();
        let Some(last) = lengths.len().checked_sub(1) else { return Self::default() };
        let at = |share: f64| lengths[(share * last as f64).round() as usize];
        Self { min: lengths[0], p50: at(0.5), p90: at(0.9), p99: at(0.99), max: lengths[last] }
    }
}

impl Summary {
    /// The summary as names and texts.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let Self { rows, good, too_short, with_problems, status_error, unusable, .. } = self;
        let share = 100.0 * self.supervised_tokens as f64 / (self.tokens.max(1)) as f64;
        let Lengths { min, p50, p90, p99, max } = self.lengths;
        let mut lines = vec![
            ("mask rules", format!("{}, rows cut at {} tokens", self.chat_template, self.max_length)),
            (
                "rows",
                format!(
                    "{rows} = {good} good + {too_short} with fewer than {MIN_SUPERVISED_TOKENS} supervised tokens (left out by cache build) + {with_problems} with problems + {status_error} with status error + {unusable} unusable"
                ),
            ),
            (
                "tokens",
                format!("{}, {} of them supervised ({share:.1} %)", self.tokens, self.supervised_tokens),
            ),
            (
                "lengths",
                format!("{min} to {max} tokens; half up to {p50}, 90 % up to {p90}, 99 % up to {p99}"),
            ),
            ("cut", format!("{} rows", self.cut)),
            (
                "problems",
                format!(
                    "{} empty masks, {} masks with other words than the assistant's, {} templates that differ from the served one",
                    self.empty_masks, self.other_words, self.other_prompts
                ),
            ),
        ];
        if let Some(agree) = self.tags_agree {
            let first = self.first_disagreement.as_deref();
            let first = first.map(|first| format!("; the first that differs is {first}")).unwrap_or_default();
            let rendered = good + too_short + with_problems;
            let text = format!(
                "marks and {{% generation %}} tags give the same mask for {agree} of {rendered} rows{first}"
            );
            lines.push(("tags", text));
        }
        let notes = [
            (
                self.default_system,
                "rows without a system message were given the default one; a server gets it only if the request has it",
            ),
            (self.thoughts_left_out, "answers stand without their thoughts, which the template leaves out"),
            (
                self.calls_left_out,
                "answers are tool calls that the template does not write, so nothing of them is learned",
            ),
            (
                self.recorded_calls,
                "tool calls with recorded results are trained on; where the target did not write them, regenerate with --recorded-calls mask",
            ),
            (self.untrained, "assistant messages have weight 0 and are not trained on"),
            (
                self.outside_their_prompt,
                "earlier answers stand without what ended their prompt, such as an empty block of thoughts",
            ),
            (
                self.with_mask_token,
                "rows have the drafter's mask_token_id, which should stand for nothing else: choose a token that no row has",
            ),
        ];
        if !self.mask_candidates.is_empty() {
            let candidates: Vec<String> = self.mask_candidates.iter().map(ToString::to_string).collect();
            let text = format!("no row has {}: candidates for a mask_token_id", candidates.join(", "));
            lines.push(("mask token", text));
        }
        let notes = notes.iter().filter(|(count, _)| *count > 0);
        lines.extend(notes.map(|(count, note)| ("note", format!("{count} {note}"))));
        lines.extend(self.server.iter().map(|text| ("server", text.clone())));
        lines
    }

    /// Reason why the command fails, in one line.
    pub fn failure_reason(&self) -> String {
        if self.with_problems + self.unusable == 0 {
            return format!("the server renders {} prompts otherwise than we do", self.server_differs);
        }
        let wrong = self.with_problems + self.unusable;
        format!(
            "{wrong} of {} rows are not fit for training: {} unusable, {} with an empty mask, {} with other words than the assistant's, {} with a template that differs from the served one",
            self.rows, self.unusable, self.empty_masks, self.other_words, self.other_prompts
        )
    }
}
