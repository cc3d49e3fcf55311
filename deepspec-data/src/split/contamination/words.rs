//! Hashes of runs of words.

use std::str::Chars;

use super::super::dedup;

/// Number of words in a run.
pub const WORDS_PER_RUN: usize = 13;

/// Base of the rolling hash, an odd number.
const BASE: u64 = 0x9e37_79b9_7f4a_7c15;

/// Rolling hashes of all runs of [`WORDS_PER_RUN`] words. A word is a run of letters and digits, in
/// lower case.
pub fn hash_word_runs(text: &str) -> impl Iterator<Item = u64> {
    let last = BASE.wrapping_pow(WORDS_PER_RUN as u32);
    let (mut window, mut count, mut sum) = ([0; WORDS_PER_RUN], 0, 0u64);
    WordHashes { rest: text.chars(), word: String::new() }.filter_map(move |word| {
        let oldest = std::mem::replace(&mut window[count % WORDS_PER_RUN], word);
        // The words of the window are the digits of a number in base BASE.
        sum = sum.wrapping_mul(BASE).wrapping_add(word).wrapping_sub(oldest.wrapping_mul(last));
        count += 1;
        (count >= WORDS_PER_RUN).then_some(sum)
    })
}

/// Iterates over the hashes of a text's words.
struct WordHashes<'a> {
    rest: Chars<'a>,
    word: String,
}

impl Iterator for WordHashes<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.word.clear();
        for c in self.rest.by_ref() {
            if c.is_ascii_alphanumeric() {
                self.word.push(c.to_ascii_lowercase());
            } else if c.is_alphanumeric() {
                self.word.extend(c.to_lowercase());
            } else if !self.word.is_empty() {
                break;
            }
        }
        (!self.word.is_empty()).then(|| dedup::hash(self.word.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_do_not_depend_on_what_surrounds_them() {
        let words: Vec<String> = (0..40).map(|n| format!("w{n}")).collect();
        let all: Vec<u64> = hash_word_runs(&words.join(" ")).collect();
        assert_eq!(all.len(), 40 - WORDS_PER_RUN + 1);
        for (at, &run) in all.iter().enumerate() {
            assert!(hash_word_runs(&words[at..at + WORDS_PER_RUN].join("--").to_uppercase()).eq([run]));
        }
        assert_eq!(hash_word_runs(&words[..WORDS_PER_RUN - 1].join(" ")).count(), 0);
        let mut swapped = words[..WORDS_PER_RUN].to_vec();
        swapped.swap(3, 4);
        assert_ne!(hash_word_runs(&swapped.join(" ")).next(), Some(all[0]));
        assert_eq!(
            hash_word_runs(&"Ärger, ".repeat(WORDS_PER_RUN)).next(),
            hash_word_runs(&"ärger ".repeat(WORDS_PER_RUN)).next()
        );
    }
}
