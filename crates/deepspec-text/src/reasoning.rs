//! Finds reasoning in the text of an answer, between think tags.

/// A model's think tags.
#[derive(Debug, PartialEq, Eq)]
pub struct ThinkTags {
    /// Opens reasoning.
    pub open: &'static str,
    /// Follows `open` as part of the tag, unless the model omits it.
    pub label: &'static str,
    /// Closes reasoning.
    pub close: &'static str,
}

/// All known think tags. In some tokenizers they are special tokens, in other tokenizers ordinary
/// text.
pub const THINK_TAGS: [ThinkTags; 5] = [
    ThinkTags { open: "<think>", label: "", close: "</think>" },
    ThinkTags { open: "<|channel>", label: "thought", close: "<channel|>" },
    ThinkTags { open: "<thinking>", label: "", close: "</thinking>" },
    ThinkTags { open: "[THINK]", label: "", close: "[/THINK]" },
    // Harmony: a message in the channel `analysis`, and the header of the answer behind it.
    ThinkTags {
        open: "<|channel|>analysis<|message|>",
        label: "",
        close: "<|end|><|start|>assistant<|channel|>final<|message|>",
    },
];

impl ThinkTags {
    /// The tags that the end of `prompt` opens, so that the answer begins with reasoning.
    pub fn opened_by(prompt: &str) -> Option<&'static Self> {
        let end = prompt.trim_end();
        THINK_TAGS.iter().find(|tags| end.strip_suffix(tags.label).unwrap_or(end).ends_with(tags.open))
    }

    /// Reasoning without its label and surrounding white space.
    fn strip_label<'a>(&self, reasoning: &'a str) -> &'a str {
        reasoning.strip_prefix(self.label).unwrap_or(reasoning).trim()
    }
}

/// Splits an answer into its reasoning and the rest. Removes the tags, and white space around the
/// reasoning. A closing tag without an opening tag counts too, because the prompt may have the
/// opening tag.
pub(crate) fn split_reasoning(answer: &str) -> (&str, &str) {
    let begun = answer.trim_start();
    // The opening tag at the start decides, because reasoning may mention other tags.
    if let Some(tags) = THINK_TAGS.iter().find(|tags| begun.starts_with(tags.open)) {
        return match begun[tags.open.len()..].split_once(tags.close) {
            Some((reasoning, said)) => (tags.strip_label(reasoning), said),
            None => ("", answer),
        };
    }
    for tags in &THINK_TAGS {
        if let Some((reasoning, said)) = answer.split_once(tags.close)
            && !reasoning.contains(tags.open)
        {
            return (tags.strip_label(reasoning.trim_start()), said);
        }
    }
    ("", answer)
}

/// Whether an answer has neither text nor reasoning, ignoring think tags.
pub(crate) fn is_empty_answer(answer: &str) -> bool {
    let (reasoning, said) = split_reasoning(answer);
    let bare = |text: &str| {
        THINK_TAGS
            .iter()
            .fold(text.to_string(), |text, tags| text.replace(tags.open, "").replace(tags.close, ""))
    };
    [reasoning, said].into_iter().all(|text| bare(text).trim().is_empty())
}

/// The text of an answer after its reasoning and the newlines that follow. Empty if the reasoning
/// does not end.
pub fn without_reasoning(answer: &str) -> &str {
    let (_, said) = split_reasoning(answer);
    if said.len() < answer.len() {
        return said.trim_start_matches('\n');
    }
    let begun = answer.trim_start();
    if THINK_TAGS.iter().any(|tags| begun.starts_with(tags.open)) { "" } else { answer }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thoughts_are_parted_whoever_opened_them() {
        assert_eq!(split_reasoning("<think>\nb\n</think>\n\nc "), ("b", "\n\nc "));
        assert_eq!(split_reasoning("b</think>c"), ("b", "c"));
        assert_eq!(split_reasoning("<|channel>thought\n<channel|>c"), ("", "c"));
        assert_eq!(split_reasoning("\n<|channel>thought\nb\n<channel|>c"), ("b", "c"));
        assert_eq!(split_reasoning("<|channel>thought\na </think> b\n<channel|>c"), ("a </think> b", "c"));
        assert_eq!(split_reasoning("say <think>b</think>"), ("", "say <think>b</think>"));
        assert_eq!(split_reasoning("plain"), ("", "plain"));
    }

    #[test]
    fn what_is_said_stands_behind_the_thoughts() {
        assert_eq!(without_reasoning("<think>\nb\n</think>\n\nc "), "c ");
        assert_eq!(without_reasoning("<|channel>thought\nb\n<channel|>c"), "c");
        assert_eq!(without_reasoning("b<channel|>\nc"), "c");
        assert_eq!(without_reasoning("<|channel>thought\nnever closed"), "");
        assert_eq!(without_reasoning("<think>never closed"), "");
        assert_eq!(without_reasoning("\n plain"), "\n plain");
    }

    #[test]
    fn prompts_may_open_thoughts() {
        let opened = |prompt| ThinkTags::opened_by(prompt).map(|tags| tags.close);
        assert_eq!(opened("assistant\n<think>\n"), Some("</think>"));
        assert_eq!(opened("model\n<|channel>thought\n"), Some("<channel|>"));
        assert_eq!(opened("model\n<|channel>"), Some("<channel|>"));
        assert_eq!(opened("model\n<|channel>thought\n<channel|>"), None);
        assert_eq!(opened("a thought"), None);
    }
}
