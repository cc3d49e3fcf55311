//! Thoughts that stand in the text of an answer.

/// How models open and close their thoughts.
const FENCES: [(&str, &str); 4] = [
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
];

/// Parts an answer from the thoughts before it, without their fence and the white space along it. A closing fence
/// without an opening one counts too: the prompt may have opened it.
pub(crate) fn split(answer: &str) -> (&str, &str) {
    for (open, close) in FENCES {
        if let Some((thoughts, answer)) = answer.split_once(close)
            && let before = thoughts.trim_start()
            && (before.starts_with(open) || !thoughts.contains(open))
        {
            return (before.strip_prefix(open).unwrap_or(before).trim(), answer);
        }
    }
    ("", answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_are_parted_whoever_opened_them() {
        assert_eq!(split("<think>\nb\n</think>\n\nc "), ("b", "\n\nc "));
        assert_eq!(split("b</think>c"), ("b", "c"));
        assert_eq!(split("<|channel>thought\n<channel|>c"), ("", "c"));
        assert_eq!(split("say <think>b</think>"), ("", "say <think>b</think>"));
        assert_eq!(split("plain"), ("", "plain"));
    }
}
