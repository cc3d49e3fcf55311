//! The path patterns of dataset cards: `*` and `?` within a folder, `**` across folders, `[a-z]` and `[!a-z]`.

use globset::{GlobBuilder, GlobMatcher};

/// A pattern to match whole paths with.
pub struct Glob(Option<GlobMatcher>, String);

impl Glob {
    /// Reads a pattern; one that cannot be read stands for itself.
    pub fn new(pattern: &str) -> Self {
        let pattern = pattern.trim_start_matches("./");
        let glob = GlobBuilder::new(&spelled(pattern)).literal_separator(true).build();
        Self(glob.ok().map(|glob| glob.compile_matcher()), pattern.into())
    }

    /// Whether the pattern describes all of `path`.
    pub fn matches(&self, path: &str) -> bool {
        self.0.as_ref().map_or(self.1 == path, |matcher| matcher.is_match(path))
    }
}

/// A pattern as `globset` spells it, for which braces and backslashes are special and `**` only between slashes.
fn spelled(pattern: &str) -> String {
    let text: Vec<char> = pattern.chars().collect();
    let (mut out, mut at, mut class) = (String::new(), 0, false);
    while let Some(&c) = text.get(at) {
        let is_part = |at: Option<usize>| at.and_then(|at| text.get(at)).is_none_or(|&c| c == '/');
        match c {
            '*' if !class && text.get(at + 1) == Some(&'*') => {
                let whole = is_part(at.checked_sub(1)) && is_part(Some(at + 2));
                out.push_str(if whole { "**" } else { "{*,*/**/*}" });
                at += 1;
            }
            '{' | '}' | ',' | '\\' if !class => out.extend(['[', c, ']']),
            _ => out.push(c),
        }
        class = match c {
            '[' => true,
            // A bracket in first place stands for itself.
            ']' => class && matches!(text[..at], [.., '['] | [.., '[', '!' | '^']),
            _ => class,
        };
        at += 1;
    }
    out
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
