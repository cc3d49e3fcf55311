//! Renders a generation as text and JSON.

use std::fmt::Write;

use deepspec_engine::Completion;
use deepspec_text::{ChatTokenizer, TextError};
use serde::Serialize;

const ACCEPTED_STYLE: &str = "\x1b[32m";
const REJECTED_STYLE: &str = "\x1b[9;31m";
const BONUS_STYLE: &str = "\x1b[1;36m";
const RESET_STYLE: &str = "\x1b[0m";

/// A generation, cycle by cycle.
#[derive(Debug, Serialize)]
pub struct Trace {
    /// The first token of the answer, which the prefill computes.
    first: String,
    cycles: Vec<Cycle>,
    /// Number of tokens of the answer.
    tokens: usize,
    /// Mean number of tokens that a cycle commits; None without cycles.
    accepted_length: Option<f64>,
}

/// One block and its verification. Each text is the text of one token.
#[derive(Debug, PartialEq, Serialize)]
struct Cycle {
    accepted: Vec<String>,
    /// The first text is the rejected token, and the following texts are the tokens after it.
    rejected: Vec<String>,
    /// The bonus token, sampled by the target; None after an accepted stop token.
    bonus: Option<String>,
    /// Confidences of the verified tokens; empty without a confidence head.
    confidences: Vec<f32>,
}

impl Trace {
    /// Combines the committed tokens with the drafted blocks.
    ///
    /// # Errors
    /// Fails if a token cannot be decoded.
    pub fn new(
        tokenizer: &ChatTokenizer,
        completion: &Completion,
        blocks: &[Vec<i64>],
    ) -> Result<Self, TextError> {
        let text = |&id: &i64| tokenizer.decode(&[id], false);
        let texts = |ids: &[i64]| ids.iter().map(text).collect::<Result<Vec<_>, _>>();
        let tokens = &completion.tokens;
        let (mut cycles, mut at) = (vec![], 1);
        for (cycle, block) in completion.cycles.iter().zip(blocks) {
            let (accepted, committed) = (cycle.accepted as usize, cycle.committed as usize);
            let verified = &block[..block.len().min(cycle.proposed as usize)];
            let (kept, fallen) = verified.split_at(accepted.min(verified.len()));
            let bonus = tokens.get(at + accepted).filter(|_| committed > accepted);
            cycles.push(Cycle {
                accepted: texts(kept)?,
                rejected: texts(fallen)?,
                bonus: bonus.map(text).transpose()?,
                confidences: cycle.confidence.iter().take(verified.len()).map(sigmoid).collect(),
            });
            at += committed;
        }
        let committed: u32 = completion.cycles.iter().map(|cycle| cycle.committed).sum();
        let accepted_length = (!cycles.is_empty()).then(|| f64::from(committed) / cycles.len() as f64);
        let first = tokens.first().map(text).transpose()?.unwrap_or_default();
        Ok(Self { first, cycles, tokens: tokens.len(), accepted_length })
    }

    /// One line per cycle. Without colours, rejected tokens are marked as `[-…-]`, and tokens that
    /// the target sampled as `{+…+}`.
    pub fn render(&self, colour: bool) -> String {
        let paint = |codes: &str, [open, close]: [&str; 2], text: String| match (text.is_empty(), colour) {
            (true, _) => text,
            (false, true) => format!("{codes}{text}{RESET_STYLE}"),
            (false, false) => format!("{open}{text}{close}"),
        };
        let accepted = |text| paint(ACCEPTED_STYLE, ["", ""], text);
        let rejected = |text| paint(REJECTED_STYLE, ["[-", "-]"], text);
        let bonus = |text| paint(BONUS_STYLE, ["{+", "+}"], text);
        let words = [accepted("accepted".into()), rejected("rejected".into()), bonus("target's own".into())];
        let mut out =
            format!("{}\n{:>5}  {:>8}  {}\n", words.join("  "), 0, "", bonus(single_line(&self.first)));
        for (i, cycle) in self.cycles.iter().enumerate() {
            let texts = |texts: &[String]| single_line(&texts.concat());
            let count = format!("{}/{}", cycle.accepted.len(), cycle.accepted.len() + cycle.rejected.len());
            let _ = writeln!(
                out,
                "{:>5}  {count:>8}  {}{}{}",
                i + 1,
                accepted(texts(&cycle.accepted)),
                rejected(texts(&cycle.rejected)),
                bonus(single_line(cycle.bonus.as_deref().unwrap_or_default()))
            );
        }
        let cycles = self.cycles.len();
        let _ = match self.accepted_length {
            Some(length) => {
                let word = if cycles == 1 { "cycle" } else { "cycles" };
                let tokens = self.tokens;
                let counted = (length * cycles as f64).round() as usize;
                let behind = counted.saturating_sub(tokens);
                let told = match behind {
                    0 => String::new(),
                    behind => format!(
                        " ({behind} of its tokens lie behind the end of the answer or --max-new-tokens)"
                    ),
                };
                writeln!(out, "{tokens} tokens in {cycles} {word}: accepted length {length:.2}{told}")
            }
            None => writeln!(out, "{} tokens, no cycle", self.tokens),
        };
        out
    }
}

fn sigmoid(logit: &f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

/// The text without line breaks and control characters.
fn single_line(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' => '↵',
        c if c.is_control() => '·',
        c => c,
    };
    text.chars().map(shown).collect()
}
