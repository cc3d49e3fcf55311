//! Thoughts that stand in the text of an answer, between the marks that models put around them.

/// How a model opens and closes its thoughts.
#[derive(Debug, PartialEq, Eq)]
pub struct ThinkTags {
    /// Begins them.
    pub open: &'static str,
    /// Stands behind `open` and belongs to the fence, but where the model leaves it out.
    pub label: &'static str,
    /// Ends them.
    pub close: &'static str,
}

/// All fences that are known. Some tokenizers spell them by special tokens, others by ordinary ones.
pub const FENCES: [ThinkTags; 4] = [
    ThinkTags { open: "<think>", label: "", close: "</think>" },
    ThinkTags { open: "<|channel>", label: "thought", close: "<channel|>" },
    ThinkTags { open: "<thinking>", label: "", close: "</thinking>" },
    ThinkTags { open: "[THINK]", label: "", close: "[/THINK]" },
];

impl ThinkTags {
    /// The fence that `prompt` opens at its end, so that the answer begins with thoughts.
    pub fn opened_by(prompt: &str) -> Option<&'static Self> {
        let end = prompt.trim_end();
        FENCES.iter().find(|fence| end.strip_suffix(fence.label).unwrap_or(end).ends_with(fence.open))
    }

    /// Thoughts without the label that may stand before them and the white space around them.
    fn bare<'a>(&self, thoughts: &'a str) -> &'a str {
        thoughts.strip_prefix(self.label).unwrap_or(thoughts).trim()
    }
}

/// Parts an answer from the thoughts before it, without their fence and the white space along it. A closing mark without
/// an opening one counts too: the prompt may have opened it.
pub(crate) fn split(answer: &str) -> (&str, &str) {
    let begun = answer.trim_start();
    // Whose opening mark stands first is the one that counts: thoughts may speak of other marks.
    if let Some(fence) = FENCES.iter().find(|fence| begun.starts_with(fence.open)) {
        return match begun[fence.open.len()..].split_once(fence.close) {
            Some((thoughts, said)) => (fence.bare(thoughts), said),
            None => ("", answer),
        };
    }
    for fence in &FENCES {
        if let Some((thoughts, said)) = answer.split_once(fence.close)
            && !thoughts.contains(fence.open)
        {
            return (fence.bare(thoughts.trim_start()), said);
        }
    }
    ("", answer)
}

/// Whether an answer has neither words nor thoughts, whatever fences stand in it.
pub(crate) fn is_nothing(answer: &str) -> bool {
    let (thought, said) = split(answer);
    let bare = |text: &str| {
        FENCES
            .iter()
            .fold(text.to_string(), |text, fence| text.replace(fence.open, "").replace(fence.close, ""))
    };
    [thought, said].into_iter().all(|text| bare(text).trim().is_empty())
}

/// What a model said in a whole answer, behind its thoughts and the newlines that follow them; nothing where it never came
/// to an end with them.
pub fn without_thoughts(answer: &str) -> &str {
    let (_, said) = split(answer);
    if said.len() < answer.len() {
        return said.trim_start_matches('\n');
    }
    let begun = answer.trim_start();
    if FENCES.iter().any(|fence| begun.starts_with(fence.open)) { "" } else { answer }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_are_parted_whoever_opened_them() {
        assert_eq!(split("<think>\nb\n</think>\n\nc "), ("b", "\n\nc "));
        assert_eq!(split("b</think>c"), ("b", "c"));
        assert_eq!(split("<|channel>thought\n<channel|>c"), ("", "c"));
        assert_eq!(split("\n<|channel>thought\nb\n<channel|>c"), ("b", "c"));
        assert_eq!(split("<|channel>thought\na </think> b\n<channel|>c"), ("a </think> b", "c"));
        assert_eq!(split("say <think>b</think>"), ("", "say <think>b</think>"));
        assert_eq!(split("plain"), ("", "plain"));
    }

    #[test]
    fn what_is_said_stands_behind_the_thoughts() {
        assert_eq!(without_thoughts("<think>\nb\n</think>\n\nc "), "c ");
        assert_eq!(without_thoughts("<|channel>thought\nb\n<channel|>c"), "c");
        assert_eq!(without_thoughts("b<channel|>\nc"), "c");
        assert_eq!(without_thoughts("<|channel>thought\nnever closed"), "");
        assert_eq!(without_thoughts("<think>never closed"), "");
        assert_eq!(without_thoughts("\n plain"), "\n plain");
    }

    #[test]
    fn prompts_may_open_thoughts() {
        let opened = |prompt| ThinkTags::opened_by(prompt).map(|fence| fence.close);
        assert_eq!(opened("assistant\n<think>\n"), Some("</think>"));
        assert_eq!(opened("model\n<|channel>thought\n"), Some("<channel|>"));
        assert_eq!(opened("model\n<|channel>"), Some("<channel|>"));
        assert_eq!(opened("model\n<|channel>thought\n<channel|>"), None);
        assert_eq!(opened("a thought"), None);
    }
}
