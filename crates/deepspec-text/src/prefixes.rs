//! Counts the tokens of many prefixes of one text, each tokenised alone, in time linear in the
//! text.

use crate::error::TextError;
use crate::tokenizer::{ChatTokenizer, Encoded};

/// A text with its tokens.
///
/// Tokenizers split a text at added tokens (such as `<|im_end|>`) first, and tokenise each piece
/// alone. The ids of `text[..byte]` are therefore the text's ids up to the last added token before
/// `byte`, then the ids of the text after that token.
///
/// Without added tokens, a word some words before `byte` serves as the cut. Pre-tokenizers split
/// each piece into words from left to right, and tokens merge only within words. Some tokenizers
/// treat the start of a text differently. If the two words at the cut change their ids, the added
/// token is used instead.
pub(crate) struct PrefixTokenCounts<'t> {
    tokenizer: &'t ChatTokenizer,
    text: &'t str,
    ids: Vec<i64>,
    /// The added tokens of the text.
    cuts: Vec<CutPoint>,
    /// Words that begin with an ASCII character, which no normaliser joins to the previous
    /// character.
    words: Vec<CutPoint>,
}

/// An added token or a word: the index of its first id, and its bytes in the text.
#[derive(Debug, Clone, Copy)]
struct CutPoint {
    place: usize,
    start: usize,
    end: usize,
}

/// Number of words between a cut and the end of a prefix. The end of a prefix changes how its last
/// words are split. The tokens of earlier words do not change.
const WORDS_BEFORE_END: usize = 8;

impl<'t> PrefixTokenCounts<'t> {
    /// Tokenises `text`.
    pub(crate) fn new(tokenizer: &'t ChatTokenizer, text: &'t str) -> Result<Self, TextError> {
        let Encoded { ids, offsets, words } = tokenizer.encode_with_offsets(text)?;
        let cut = |(place, (&id, &(start, end))): (usize, (&i64, &(usize, usize)))| {
            (tokenizer.is_split_token(id) && text.is_char_boundary(start) && start < end)
                .then_some(CutPoint { place, start, end })
        };
        let cuts = ids.iter().zip(&offsets).enumerate().filter_map(cut).collect();
        let word = |place: usize| {
            let (start, end) = offsets[place];
            let is_first = place == 0 || words[place] != words[place - 1];
            let is_ascii = text.as_bytes().get(start).is_some_and(u8::is_ascii);
            (is_first && is_ascii && start < end).then_some(CutPoint { place, start, end })
        };
        let words = (0..ids.len()).filter_map(word).collect();
        Ok(Self { tokenizer, text, ids, cuts, words })
    }

    /// The ids of the whole text.
    pub(crate) fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// The number of ids of `text[..byte]`.
    pub(crate) fn count_tokens(&self, byte: usize) -> Result<usize, TextError> {
        if byte == self.text.len() {
            return Ok(self.ids.len());
        }
        let (place, rest) = self.ids_after_cut(&self.text[..byte], byte)?;
        Ok(place + rest.len())
    }

    /// The number of ids that `other` shares with the text, and the ids of the rest of `other`. The
    /// shared part ends at a cut point within the common prefix.
    pub(crate) fn ids_after_shared(&self, other: &str) -> Result<(usize, Vec<i64>), TextError> {
        let mut shared = self.text.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
        while !self.text.is_char_boundary(shared) {
            shared -= 1;
        }
        self.ids_after_cut(other, shared)
    }

    /// Tokenises `other` from the last cut point in its first `shared` bytes, which equal the
    /// text's. Returns the index of the first id, and the ids.
    fn ids_after_cut(&self, other: &str, shared: usize) -> Result<(usize, Vec<i64>), TextError> {
        let (place, start) = self.cut_before(shared);
        let words = self.words.partition_point(|word| word.end <= shared);
        if let Some(first) = words.checked_sub(WORDS_BEFORE_END)
            && self.words[first].start > start
        {
            let word = self.words[first];
            let [next, end] = [1, 2].map(|more| self.words[first + more].place);
            // If the next words have equal ids, a token that the tokenizer adds at the start could
            // go unnoticed.
            if self.ids[word.place..next] != self.ids[next..end] {
                let rest = self.tokenizer.encode(&other[word.start..])?;
                if rest.starts_with(&self.ids[word.place..end]) {
                    return Ok((word.place, rest));
                }
            }
        }
        Ok((place, self.tokenizer.encode(&other[start..])?))
    }

    /// Index and first byte of the last added token that ends at or before `byte`; zeros if there
    /// is none.
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
    use deepspec_testkit::mutate::Fuzzer;

    /// Pieces that merge with their neighbours, and added tokens, whole or in part.
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

    fn said(dice: &mut Fuzzer, random: &mut Conversations) -> String {
        let pieces = |dice: &mut Fuzzer| -> String {
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
            let mut dice = Fuzzer::new(46, &["x"]);
            for _ in 0..40 {
                let text = said(&mut dice, &mut random);
                let prefixes = PrefixTokenCounts::new(&tokenizer, &text).unwrap();
                assert_eq!(prefixes.ids(), tokenizer.encode(&text).unwrap());
                for byte in (0..=text.len()).filter(|&byte| text.is_char_boundary(byte)) {
                    let alone = tokenizer.encode(&text[..byte]).unwrap().len();
                    assert_eq!(
                        prefixes.count_tokens(byte).unwrap(),
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
            let mut dice = Fuzzer::new(47, &["x"]);
            for _ in 0..60 {
                let text = said(&mut dice, &mut random);
                let ends: Vec<usize> = (0..=text.len()).filter(|&byte| text.is_char_boundary(byte)).collect();
                let other = text[..ends[dice.roll(ends.len())]].to_owned() + &said(&mut dice, &mut random);
                let prefixes = PrefixTokenCounts::new(&tokenizer, &text).unwrap();
                let (shared, behind) = prefixes.ids_after_shared(&other).unwrap();
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

    /// Prefixes of texts without added tokens, with many kinds of words.
    #[test]
    fn beginnings_of_plain_text_are_counted_as_if_each_was_tokenised_alone() {
        for dir in folders() {
            let tokenizer = ChatTokenizer::load(&dir).unwrap();
            let mut random = Conversations::new("plain");
            let mut dice = Fuzzer::new(48, &["x"]);
            let plain: Vec<&str> = PIECES.into_iter().filter(|piece| !piece.contains(['<', '>'])).collect();
            for _ in 0..25 {
                let mut text = String::new();
                for _ in 0..6 {
                    let (messages, _) = random.conversation();
                    text +=
                        &tokenizer.remove_special_tokens(messages[0]["content"].as_str().unwrap_or_default());
                    text.extend((0..dice.roll(9)).map(|_| plain[dice.roll(plain.len())]));
                }
                let prefixes = PrefixTokenCounts::new(&tokenizer, &text).unwrap();
                let ends: Vec<usize> = (0..text.len()).filter(|&byte| text.is_char_boundary(byte)).collect();
                for byte in (0..120).map(|_| ends[dice.roll(ends.len())]) {
                    let (place, rest) = prefixes.ids_after_cut(&text[..byte], byte).unwrap();
                    let joined = [&prefixes.ids()[..place], &rest].concat();
                    let alone = tokenizer.encode(&text[..byte]).unwrap();
                    assert_eq!(joined, alone, "{}: {:?}", dir.display(), &text[..byte]);
                }
            }
        }
    }

    /// If the tokenizer splits words, text without added tokens is counted from the words before
    /// each border.
    #[test]
    fn plain_text_is_counted_in_linear_work() {
        let words = folders().into_iter().filter(|dir| dir.ends_with("qwen3") || dir.ends_with("llama3_1"));
        for dir in words {
            let tokenizer = ChatTokenizer::load(&dir).unwrap();
            let text: String =
                (0..1000).map(|at| format!("User: this is what is said at {at}.\n\n")).collect();
            let prefixes = PrefixTokenCounts::new(&tokenizer, &text).unwrap();
            let borders = (0..1000).map(|at| text.find(&format!("said at {at}.")).unwrap());
            let work: usize =
                borders.map(|byte| prefixes.ids_after_cut(&text[..byte], byte).unwrap().1.len()).sum();
            assert!(work < 20 * 1000, "{}: {work} tokens", dir.display());
        }
    }

    /// Counting at all borders of a row of 1,000 turns tokenises fewer than twice the row's bytes.
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
            let prefixes = PrefixTokenCounts::new(&tokenizer, &text).unwrap();
            let borders: Vec<usize> =
                (0..1000).map(|at| text.find(&format!("said at {at}.")).unwrap()).collect();
            let work: usize = borders.iter().map(|&byte| byte - prefixes.cut_before(byte).1).sum();
            assert!(work < 2 * text.len(), "{}: {work} bytes of {}", dir.display(), text.len());
        }
    }
}
