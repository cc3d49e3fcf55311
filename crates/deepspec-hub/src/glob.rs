//! Glob patterns of dataset cards: `*` and `?` within a folder, `**` across folders, `[a-z]`,
//! `[!a-z]`.

use regex::Regex;

/// A glob pattern for whole paths.
pub struct Glob(Option<Regex>, String);

impl Glob {
    /// Compiles a pattern. An invalid pattern matches only the path that equals it.
    pub fn new(pattern: &str) -> Self {
        let pattern = pattern.trim_start_matches("./");
        Self(Regex::new(&format!("(?s)^{}$", to_regex(pattern))).ok(), pattern.into())
    }

    /// Whether the pattern matches all of `path`.
    pub fn matches(&self, path: &str) -> bool {
        self.0.as_ref().map_or(self.1 == path, |regex| regex.is_match(path))
    }
}

/// A pattern as a regular expression.
fn to_regex(pattern: &str) -> String {
    let text: Vec<char> = pattern.chars().collect();
    let (mut out, mut at) = (String::new(), 0);
    while let Some(&c) = text.get(at) {
        let rest = &text[at..];
        let begins = at == 0 || text[at - 1] == '/';
        let (expression, read) = match (rest, class_to_regex(rest)) {
            (['*', '*', '/', ..], _) if begins => ("(?:[^/]+/)*".into(), 3),
            (['*', '*', ..], _) => (".*".into(), 2),
            (['*', ..], _) => ("[^/]*".into(), 1),
            (['?', ..], _) => ("[^/]".into(), 1),
            (_, Some(class)) => class,
            _ => (regex::escape(&c.to_string()), 1),
        };
        out += &expression;
        at += read;
    }
    out
}

/// The character class at the start of a pattern as a regular expression, and its length. It never
/// matches a slash; a `]` in first place is literal.
fn class_to_regex(pattern: &[char]) -> Option<(String, usize)> {
    let ['[', inner @ ..] = pattern else { return None };
    let negated = usize::from(matches!(inner, ['!' | '^', ..]));
    let len = 1 + inner[negated..].iter().skip(1).position(|&c| c == ']')?;
    let (mut members, mut at) = (String::new(), 0);
    let text = &inner[negated..negated + len];
    let escaped = |c: char| regex::escape(&c.to_string());
    while let Some(&c) = text.get(at) {
        match text[at..] {
            // A range whose end is before its start is empty.
            [first, '-', last, ..] => {
                if first <= last {
                    members += &format!("{}-{}", escaped(first), escaped(last));
                }
                at += 3;
            }
            _ => {
                members += &escaped(c);
                at += 1;
            }
        }
    }
    let expression = match (negated, members.as_str()) {
        (1, members) => format!("[^/{members}]"),
        (_, "") => r"[^\s\S]".into(),
        (_, members) => format!("[{members}&&[^/]]"),
    };
    Some((expression, 1 + negated + len + 1))
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
            ("data/**.jsonl", "data/a/b.jsonl", true),
            ("data/**.jsonl", "data/b.jsonl", true),
            ("a{b},c", "a{b},c", true),
            ("a{b,c}", "ab", false),
            ("x[,]y", "x,y", true),
            ("test[!0-9].json", "test/.json", false),
            ("test[.-0].json", "test/.json", false),
            ("data[1/*.jsonl", "data[1/x.jsonl", true),
            ("?.jsonl", "é.jsonl", true),
            ("caf[é].jsonl", "café.jsonl", true),
            ("x[a-c-e].jsonl", "xd.jsonl", false),
            ("x[a-c-e].jsonl", "x-.jsonl", true),
            ("x[[]a**.jsonl", "x[a/b.jsonl", true),
            ("x[z-a]", "xb", false),
            ("x[!z-a]", "xb", true),
            ("x[&&a~]", "x&", true),
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
