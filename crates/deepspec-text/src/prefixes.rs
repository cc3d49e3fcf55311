//! How many tokens the beginnings of one text have, each tokenised alone, in time linear in the text.

use crate::error::TextError;
use crate::tokenizer::{ChatTokenizer, Encoded};

/// A text with its tokens.
///
/// Tokenizers cut a text at its added tokens (such as `<|im_end|>`) before anything else, and tokenise what lies between
/// independently. So the tokens of `text[..byte]` are those of the whole text up to the last added token before `byte`, and
/// those of the rest, which is short.
pub(crate) struct Prefixes<'t> {
    tokenizer: &'t ChatTokenizer,
    text: &'t str,
    ids: Vec<i64>,
    /// The added tokens of the text.
    cuts: Vec<Cut>,
}

/// An added token: its place among the ids, and its bytes in the text.
#[derive(Debug, Clone, Copy)]
struct Cut {
    place: usize,
    start: usize,
    end: usize,
}

impl<'t> Prefixes<'t> {
    /// Tokenises `text`.
    pub(crate) fn new(tokenizer: &'t ChatTokenizer, text: &'t str) -> Result<Self, TextError> {
        let Encoded { ids, offsets } = tokenizer.encode_with_offsets(text)?;
        let cut = |(place, (&id, &(start, end))): (usize, (&i64, &(usize, usize)))| {
            (tokenizer.is_cut(id) && text.is_char_boundary(start) && start < end).then_some(Cut {
                place,
                start,
                end,
            })
        };
        let cuts = ids.iter().zip(&offsets).enumerate().filter_map(cut).collect();
        Ok(Self { tokenizer, text, ids, cuts })
    }

    /// The ids of the whole text.
    pub(crate) fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// The number of ids of `text[..byte]`.
    pub(crate) fn count(&self, byte: usize) -> Result<usize, TextError> {
        if byte == self.text.len() {
            return Ok(self.ids.len());
        }
        let (place, start) = self.cut_before(byte);
        Ok(place + self.tokenizer.encode(&self.text[start..byte])?.len())
    }

    /// The ids of `other` behind those that it shares with the text for certain, and how many these are: up to the last
    /// added token in the bytes that both begin with.
    pub(crate) fn behind_shared(&self, other: &str) -> Result<(usize, Vec<i64>), TextError> {
        let mut shared = self.text.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        while !self.text.is_char_boundary(shared) {
            shared -= 1;
        }
        let (place, start) = self.cut_before(shared);
        Ok((place, self.tokenizer.encode(&other[start..])?))
    }

    /// The last added token that ends before `byte`: its place among the ids and its first byte; the start of the text
    /// where there is none.
    fn cut_before(&self, byte: usize) -> (usize, usize) {
        let cuts = self.cuts.partition_point(|cut| cut.end <= byte);
        self.cuts[..cuts].last().map_or((0, 0), |cut| (cut.place, cut.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    use crate::message::{Message, Role};
    use crate::template::RenderOptions;
    use deepspec_testkit::conversations::{Conversations, tokenizers};
    use deepspec_testkit::golden;
    use deepspec_testkit::mutate::Dice;

    /// What merges with its neighbours, or stands for an added token, in whole or in part.
    const PIECES: [&str; 22] = [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "end|>",
        "<think>",
        "</think>",
        "<turn|>",
        "<|turn>",
        "<|eot_id|>",
        "<end_of_turn>",
        "\n",
        "\n\n\n",
        " ",
        "    ",
        "\t",
        "e\u{301}",
        "👩‍👩‍👧",
        "你好，世界",
        "\u{FEFF}",
        "ﷺ",
        "Hello, world",
        "1234567.89",
    ];

    fn folders() -> Vec<PathBuf> {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target");
        let known = [tiny, golden::dir("templates_qwen"), golden::dir("templates_gemma4")];
        let real = tokenizers().into_iter().flat_map(|all| {
            ["qwen3", "llama3_1", "gemma3"].map(|name| all.join(name)).into_iter().filter(|dir| dir.is_dir())
        });
        known.into_iter().chain(real).collect()
    }

    fn said(dice: &mut Dice, random: &mut Conversations) -> String {
        let pieces = |dice: &mut Dice| -> String {
            (0..dice.roll(14)).map(|_| PIECES[dice.roll(PIECES.len())]).collect()
        };
        let (messages, _) = random.conversation();
        let of_others = messages[0]["content"].as_str().unwrap_or_default().to_owned();
        pieces(dice) + &of_others + &pieces(dice)
    }

    #[test]
    fn beginnings_are_counted_as_if_each_was_tokenised_alone() {
        for dir in folders() {
            let tokenizer = ChatTokenizer::load(&dir).unwrap();
            let mut random = Conversations::new("prefixes");
            let mut dice = Dice::new(46, &["x"]);
            for _ in 0..40 {
                let text = said(&mut dice, &mut random);
                let prefixes = Prefixes::new(&tokenizer, &text).unwrap();
                assert_eq!(prefixes.ids(), tokenizer.encode(&text).unwrap());
                for byte in (0..=text.len()).filter(|&byte| text.is_char_boundary(byte)) {
                    let alone = tokenizer.encode(&text[..byte]).unwrap().len();
                    assert_eq!(
                        prefixes.count(byte).unwrap(),
                        alone,
                        "{}: {:?}",
                        dir.display(),
                        &text[..byte]
                    );
                }
            }
        }
    }

    #[test]
    fn what_another_text_shares_is_told_from_what_it_has_behind() {
        for dir in folders() {
            let tokenizer = ChatTokenizer::load(&dir).unwrap();
            let mut random = Conversations::new("shared");
            let mut dice = Dice::new(47, &["x"]);
            for _ in 0..60 {
                let text = said(&mut dice, &mut random);
                let ends: Vec<usize> = (0..=text.len()).filter(|&byte| text.is_char_boundary(byte)).collect();
                let other = text[..ends[dice.roll(ends.len())]].to_owned() + &said(&mut dice, &mut random);
                let prefixes = Prefixes::new(&tokenizer, &text).unwrap();
                let (shared, behind) = prefixes.behind_shared(&other).unwrap();
                let joined = [&prefixes.ids()[..shared], &behind].concat();
                assert_eq!(
                    joined,
                    tokenizer.encode(&other).unwrap(),
                    "{}: {text:?}, {other:?}",
                    dir.display()
                );
            }
        }
    }

    /// The bytes that counting tokenises, of all the borders of a row of 1,000 turns, are about those of the row.
    #[test]
    fn a_thousand_turns_are_counted_in_linear_work() {
        for dir in folders() {
            let tokenizer = ChatTokenizer::load(&dir).unwrap();
            let turn = |at: usize| {
                let role = if at.is_multiple_of(2) { Role::User } else { Role::Assistant };
                Message::new(role, format!("This is what is said at {at}."))
            };
            let text = tokenizer
                .render(&(0..1000).map(turn).collect::<Vec<_>>(), &RenderOptions::default())
                .unwrap();
            let prefixes = Prefixes::new(&tokenizer, &text).unwrap();
            let borders: Vec<usize> =
                (0..1000).map(|at| text.find(&format!("said at {at}.")).unwrap()).collect();
            let work: usize = borders.iter().map(|&byte| byte - prefixes.cut_before(byte).1).sum();
            assert!(work < 2 * text.len(), "{}: {work} bytes of {}", dir.display(), text.len());
        }
    }
}
