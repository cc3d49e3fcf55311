//! Hashes of runs of words.

use std::str::Chars;

use super::super::dedup;

/// Number of words in a run.
pub const RUN: usize = 13;

/// Base of the rolling hash, an odd number.
const BASE: u64 = 0x9e37_79b9_7f4a_7c15;

/// Rolling hashes of all runs of [`RUN`] words. A word is a run of letters and digits, in lower
/// case.
pub fn runs(text: &str) -> impl Iterator<Item = u64> {
    let last = BASE.wrapping_pow(RUN as u32);
    let (mut window, mut count, mut sum) = ([0; RUN], 0, 0u64);
    Words { rest: text.chars(), word: String::new() }.filter_map(move |word| {
        let oldest = std::mem::replace(&mut window[count % RUN], word);
        // The words of the window are the digits of a number in base BASE.
        sum = sum.wrapping_mul(BASE).wrapping_add(word).wrapping_sub(oldest.wrapping_mul(last));
        count += 1;
        (count >= RUN).then_some(sum)
    })
}

/// Iterates over the hashes of a text's words.
struct Words<'a> {
    rest: Chars<'a>,
    word: String,
}

impl Iterator for Words<'_> {
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
        let all: Vec<u64> = runs(&words.join(" ")).collect();
        assert_eq!(all.len(), 40 - RUN + 1);
        for (at, &run) in all.iter().enumerate() {
            assert!(runs(&words[at..at + RUN].join("--").to_uppercase()).eq([run]));
        }
        assert_eq!(runs(&words[..RUN - 1].join(" ")).count(), 0);
        let mut swapped = words[..RUN].to_vec();
        swapped.swap(3, 4);
        assert_ne!(runs(&swapped.join(" ")).next(), Some(all[0]));
        assert_eq!(runs(&"Ärger, ".repeat(RUN)).next(), runs(&"ärger ".repeat(RUN)).next());
    }
}
