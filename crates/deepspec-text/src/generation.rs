//! `{% generation %} … {% endgeneration %}`: the template tags around the assistant's tokens.
//!
//! The template engine does not support these tags. Each tag is replaced by a tag of a filter
//! block, so that white space around it is trimmed in the same way. The filter inserts two marker
//! characters around its text if the rendering provides them.

use std::collections::HashSet;

use minijinja::Value;

/// Names of the filter, and of the template variable with its two marker characters. The filter
/// takes the variable as an argument, because a macro sees only variables that it names.
pub const FILTER_NAME: &str = "deepspec_generation";
pub const MARKS_VARIABLE: &str = "deepspec_generation_marks";

/// The filter: inserts the two markers around `text`, if there are any.
pub fn insert_marks(text: &str, marks: &Value) -> String {
    let mut marks = marks.as_str().unwrap_or_default().chars();
    match (marks.next(), marks.next()) {
        (Some(open), Some(close)) => format!("{open}{text}{close}"),
        _ => text.to_owned(),
    }
}

/// Replaces the tags of a template, except in comments, raw blocks and strings. Also returns
/// whether it found any.
pub fn replace_generation_tags(template: &str) -> (String, bool) {
    let mut out = String::with_capacity(template.len() + 64);
    let (mut rest, mut found) = (template, false);
    while let Some(open) = rest.find('{') {
        out.push_str(&rest[..open]);
        rest = &rest[open..];
        let length = match rest.as_bytes().get(1) {
            Some(b'#') => rest.find("#}").map_or(rest.len(), |end| end + 2),
            Some(b'{') => code_end(rest, "}}"),
            Some(b'%') => {
                let length = code_end(rest, "%}");
                let (start, word) = keyword(&rest[..length]);
                let becomes = match word {
                    "generation" => Some(format!("filter {FILTER_NAME}({MARKS_VARIABLE})")),
                    "endgeneration" => Some("endfilter".to_owned()),
                    _ => None,
                };
                if let Some(becomes) = becomes {
                    found = true;
                    out.push_str(&rest[..start]);
                    out.push_str(&becomes);
                    out.push_str(&rest[start + word.len()..length]);
                    rest = &rest[length..];
                    continue;
                }
                if word == "raw" { length + raw_block_end(&rest[length..]) } else { length }
            }
            _ => 1,
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    out.push_str(rest);
    (out, found)
}

/// Number of bytes up to and including `end`, ignoring `end` within a string.
fn code_end(code: &str, end: &str) -> usize {
    let mut quote = None;
    let mut characters = code.char_indices();
    while let Some((at, character)) = characters.next() {
        match quote {
            Some(_) if character == '\\' => drop(characters.next()),
            Some(open) if character == open => quote = None,
            Some(_) => {}
            None if character == '"' || character == '\'' => quote = Some(character),
            None if code[at..].starts_with(end) => return at + end.len(),
            None => {}
        }
    }
    code.len()
}

/// Position of the only word of a tag without arguments, and the word.
fn keyword(tag: &str) -> (usize, &str) {
    let inside = tag.strip_prefix("{%").and_then(|inside| inside.strip_suffix("%}")).unwrap_or_default();
    let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
    (tag.find(word).unwrap_or_default(), word)
}

/// Number of bytes before the tag that ends a raw block.
fn raw_block_end(text: &str) -> usize {
    let mut at = 0;
    while let Some(open) = text[at..].find("{%") {
        let tag = at + open;
        let length = text[tag..].find("%}").map_or(text.len() - tag, |end| end + 2);
        if keyword(&text[tag..tag + length]).1 == "endraw" {
            return tag;
        }
        at = tag + 2;
    }
    text.len()
}

/// Two private-use characters that do not occur in `text`: an opening and a closing marker.
pub fn pick_unused_marks(text: &str) -> Option<[char; 2]> {
    let private = || ('\u{F0000}'..='\u{FFFFD}').chain('\u{100000}'..='\u{10FFFD}');
    let range = '\u{F0000}'..='\u{10FFFD}';
    let used: HashSet<char> = text.chars().filter(|character| range.contains(character)).collect();
    let mut unused = private().filter(|character| !used.contains(character));
    Some([unused.next()?, unused.next()?])
}

/// Removes the markers from a rendering. Returns the text and the byte ranges between markers;
/// nested ranges count as one. None if markers are out of order because the template rearranged
/// text that it had rendered.
pub fn remove_marks(marked: &str, [open, close]: [char; 2]) -> Option<(String, Vec<(usize, usize)>)> {
    let mut text = String::with_capacity(marked.len());
    let (mut spans, mut depth, mut start) = (Vec::new(), 0, 0);
    let mut rest = marked;
    while let Some(at) = rest.find([open, close]) {
        text.push_str(&rest[..at]);
        let mark = rest[at..].chars().next()?;
        rest = &rest[at + mark.len_utf8()..];
        if mark == open {
            if depth == 0 {
                start = text.len();
            }
            depth += 1;
        } else {
            depth = usize::checked_sub(depth, 1)?;
            if depth == 0 && text.len() > start {
                spans.push((start, text.len()));
            }
        }
    }
    text.push_str(rest);
    (depth == 0).then_some((text, spans))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rewritten(template: &str) -> Option<String> {
        let (text, found) = replace_generation_tags(template);
        let plain =
            text.replace(&format!("filter {FILTER_NAME}({MARKS_VARIABLE})"), "<").replace("endfilter", ">");
        if !found {
            assert_eq!(text, template);
        }
        found.then_some(plain)
    }

    #[test]
    fn tags_keep_their_white_space_control() {
        assert_eq!(
            rewritten("a{%- generation -%}b{%+ endgeneration +%}c").as_deref(),
            Some("a{%- < -%}b{%+ > +%}c")
        );
        assert_eq!(rewritten("{%generation%}\n {%-endgeneration  %}").as_deref(), Some("{%<%}\n {%->  %}"));
    }

    #[test]
    fn what_only_looks_like_a_tag_stays() {
        for template in [
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{{ \"}} \\\" {% generation %}\" }}",
            "{% raw %}{% generation %}{% endgeneration %}{%- endraw %}",
            "{% if x == '{% generation %}' %}{% endif %}",
            "{% generation",
            "{ {% set generation = 1 %}",
            "{%",
            "{",
            "{% raw %}{% generation %}",
        ] {
            assert_eq!(rewritten(template), None, "{template}");
        }
        assert!(rewritten("{% raw %}{{{% endraw %}{% generation %}").is_some());
        assert!(rewritten("{{ {'a': {}}}}{% generation %}").is_some());
    }

    #[test]
    fn generations_may_lie_within_each_other() {
        let marks = ['(', ')'];
        assert_eq!(remove_marks("a(b(c)d)e()", marks), Some(("abcde".into(), vec![(1, 4)])));
        assert_eq!(remove_marks("a)(", marks), None);
        assert_eq!(remove_marks("a(", marks), None);
    }

    proptest! {
        /// Markers are found in any text, also in one with private-use characters.
        #[test]
        fn marks_never_hide_in_the_text(parts in prop::collection::vec("[a\u{F0000}\u{F0001}\u{F0002}é]{0,4}", 1..8)) {
            let plain = parts.concat();
            let [open, close] = pick_unused_marks(&plain).unwrap();
            let value = Value::from(format!("{open}{close}"));
            let marked: String = parts.iter().enumerate().map(|(index, part)| if index % 2 == 1 { insert_marks(part, &value) } else { part.clone() }).collect();
            let (text, spans) = remove_marks(&marked, [open, close]).unwrap();
            prop_assert_eq!(&text, &plain);
            let found: String = spans.iter().map(|&(start, end)| &text[start..end]).collect();
            let expected: String = parts.iter().skip(1).step_by(2).map(String::as_str).collect();
            prop_assert_eq!(found, expected);
        }

        /// Rewriting handles any broken template and changes only tags.
        #[test]
        fn rewriting_never_fails(pieces in prop::collection::vec(prop::sample::select(vec!["{%", "%}", "{{", "}}", "{#", "#}", "generation", "endgeneration", "raw", "endraw", "'", "\"", "\\", "-", " ", "é", "\n"]), 0..24)) {
            let template = pieces.concat();
            let (text, found) = replace_generation_tags(&template);
            prop_assert!(found || text == template);
        }
    }
}
