//! The path patterns of dataset cards: `*` and `?` within a folder, `**` across folders, `[a-z]` and `[!a-z]`.

enum Token {
    Char(char),
    /// `?`
    One,
    /// `*`
    Within,
    /// `**`
    Across,
    /// `**/`: any folders, or none.
    Folders,
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
}

/// A pattern to match whole paths with.
pub struct Glob(Vec<Token>);

impl Glob {
    /// Reads a pattern; what has no special meaning stands for itself.
    pub fn new(pattern: &str) -> Self {
        let text: Vec<char> = pattern.trim_start_matches("./").chars().collect();
        let (mut tokens, mut at) = (vec![], 0);
        while at < text.len() {
            let (token, length) = match &text[at..] {
                ['*', '*', '/', ..] => (Token::Folders, 3),
                ['*', '*', ..] => (Token::Across, 2),
                ['*', ..] => (Token::Within, 1),
                ['?', ..] => (Token::One, 1),
                ['[', rest @ ..] => class(rest).unwrap_or((Token::Char('['), 1)),
                [c, ..] => (Token::Char(*c), 1),
                [] => break,
            };
            tokens.push(token);
            at += length;
        }
        Self(tokens)
    }

    /// Whether the pattern describes all of `path`; takes steps in proportion to both lengths at worst.
    pub fn matches(&self, path: &str) -> bool {
        // `at[i]`: the first i tokens describe what was read so far.
        let mut at = vec![false; self.0.len() + 1];
        at[0] = true;
        self.skip_empty(&mut at, true);
        for c in path.chars() {
            let mut next = vec![false; at.len()];
            for (i, token) in self.0.iter().enumerate().filter(|(i, _)| at[*i]) {
                match token {
                    Token::Char(expected) => next[i + 1] |= c == *expected,
                    Token::One => next[i + 1] |= c != '/',
                    Token::Class { negated, ranges } => {
                        let inside = ranges.iter().any(|(low, high)| (*low..=*high).contains(&c));
                        next[i + 1] |= c != '/' && inside != *negated;
                    }
                    Token::Within => next[i] |= c != '/',
                    Token::Across | Token::Folders => next[i] = true,
                }
            }
            self.skip_empty(&mut next, c == '/');
            at = next;
        }
        at[self.0.len()]
    }

    /// Passes over tokens that may describe nothing; `**/` ends only at the start of a name.
    fn skip_empty(&self, at: &mut [bool], at_name: bool) {
        for (i, token) in self.0.iter().enumerate() {
            let skips = match token {
                Token::Within | Token::Across => true,
                Token::Folders => at_name,
                _ => false,
            };
            at[i + 1] |= at[i] && skips;
        }
    }
}

/// Reads what follows `[`; nothing if the bracket is never closed.
fn class(rest: &[char]) -> Option<(Token, usize)> {
    let negated = matches!(rest.first(), Some('!' | '^'));
    let start = usize::from(negated);
    // A bracket in first place stands for itself.
    let end = rest.iter().skip(start + 1).position(|c| *c == ']')? + start + 1;
    let (mut ranges, mut members) = (vec![], &rest[start..end]);
    while let [first, more @ ..] = members {
        let (last, after) = match more {
            ['-', last, after @ ..] => (last, after),
            _ => (first, more),
        };
        ranges.push((*first, *last));
        members = after;
    }
    Some((Token::Class { negated, ranges }, end + 2))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn patterns_describe_paths() {
        let cases = [
            ("data/train-*", "data/train-00000-of-00002.parquet", true),
            ("data/train-*", "data/more/train-0.parquet", false),
            ("*.jsonl", "a.jsonl", true),
            ("*.jsonl", "a/b.jsonl", false),
            ("**/*.jsonl", "b.jsonl", true),
            ("**/*.jsonl", "a/b/c.jsonl", true),
            ("a/**/c", "a/c", true),
            ("a/**/c", "a/xc", false),
            ("a/**", "a/b/c", true),
            ("test[0-9].json", "test7.json", true),
            ("test[!0-9].json", "test7.json", false),
            ("test?.json", "test/.json", false),
            ("./main/x", "main/x", true),
            ("[", "[", true),
            ("a[]]b", "a]b", true),
            ("data", "data/x", false),
        ];
        for (pattern, path, expected) in cases {
            assert_eq!(Glob::new(pattern).matches(path), expected, "{pattern} {path}");
        }
    }

    proptest! {
        #[test]
        fn no_pattern_is_too_much(pattern in r"[\[\]*?!/a-c-]{0,24}", path in "[a-c/]{0,40}") {
            Glob::new(&pattern).matches(&path);
        }

        #[test]
        fn a_plain_path_describes_itself_alone(path in "[a-c/.]{1,12}", other in "[a-c/.]{1,12}") {
            let path = path.trim_start_matches("./");
            prop_assert_eq!(Glob::new(path).matches(&other), path == other);
            prop_assert!(Glob::new("**").matches(path));
        }
    }
}
