//! Templates of turns: text with `{column}` placeholders.

use super::form::{Odd, Row, odd};

/// A turn's text with places for columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template(Vec<Piece>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(String),
    Column { name: String, optional: bool },
}

impl Template {
    /// Reads `{column}` (must have a text), `{column?}` (may be missing or blank) and `{{`, `}}` (braces).
    ///
    /// # Errors
    /// A phrase that says which brace or placeholder is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (mut pieces, mut plain, mut rest) = (vec![], String::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            plain.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                plain.push_str(brace);
                rest = after;
                continue;
            }
            let end = rest.find(['{', '}']).filter(|&end| brace == "{" && rest[end..].starts_with('}'));
            let Some(end) = end else {
                return Err(format!(
                    "a `{brace}` without its partner in {text:?}; write `{brace}{brace}` for a brace"
                ));
            };
            let name = &rest[..end];
            rest = &rest[end + 1..];
            let (name, optional) = name.strip_suffix('?').map_or((name, false), |name| (name, true));
            if name.trim().is_empty() {
                return Err(format!("a placeholder without a name in {text:?}; write `{{{{}}}}` for braces"));
            }
            if !plain.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut plain)));
            }
            pieces.push(Piece::Column { name: name.into(), optional });
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            pieces.push(Piece::Text(plain));
        }
        Ok(Self(pieces))
    }

    /// The columns it names, either those that may be missing or the others.
    pub fn columns(&self, may_be_missing: bool) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(move |piece| match piece {
            Piece::Column { name, optional } if *optional == may_be_missing => Some(name.as_str()),
            _ => None,
        })
    }

    /// The turn of a row.
    ///
    /// # Errors
    /// Which column has no text; of a turn that is blank as a whole, its first column.
    pub fn fill(&self, row: Row) -> Result<String, Odd> {
        let mut turn = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Text(text) => turn.push_str(text),
                Piece::Column { name, optional } => match row.shown(name)? {
                    Some(text) if *optional || !text.trim().is_empty() => turn.push_str(&text),
                    Some(_) => return Err(odd(name, "the text is blank")),
                    None if *optional => {}
                    None => return Err(odd(name, "expected a text or a number, found nothing")),
                },
            }
        }
        if turn.trim().is_empty() {
            let column = self.columns(true).next().unwrap_or_default();
            return Err(odd(column, "the turn is blank"));
        }
        Ok(turn)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fill(template: &str) -> Result<String, String> {
        let row = json!({"q": "Why?", "n": 3, "empty": " ", "list": [], "a b": "x", "none": null});
        let template = Template::parse(template)?;
        template.fill(Row(row.as_object().unwrap())).map_err(|odd| odd.to_string())
    }

    #[test]
    fn placeholders_are_filled_and_braces_kept() {
        assert_eq!(fill("{q}").unwrap(), "Why?");
        assert_eq!(fill("{n}. {q}\n\\boxed{{}}{a b}").unwrap(), "3. Why?\n\\boxed{}x");
        assert_eq!(fill("{q}{empty?}{none?}{absent?}!").unwrap(), "Why? !");
        assert_eq!(fill("no column").unwrap(), "no column");
    }

    #[test]
    fn what_cannot_be_filled_names_its_column() {
        assert_eq!(
            fill("{absent}").unwrap_err(),
            "column `absent`: expected a text or a number, found nothing"
        );
        assert_eq!(fill("Q: {empty}").unwrap_err(), "column `empty`: the text is blank");
        assert_eq!(fill("{empty?}").unwrap_err(), "column `empty`: the turn is blank");
        assert_eq!(
            fill("{list?}").unwrap_err(),
            "column `list`: expected a text or a number, found an array"
        );
    }

    #[test]
    fn loose_braces_are_refused() {
        for bad in ["{q", "q}", "{q{n}}", "{", "}", "a {q}} b"] {
            assert!(fill(bad).unwrap_err().contains("without its partner"), "{bad}");
        }
        for bad in ["{}", "{ }", "{?}"] {
            assert!(fill(bad).unwrap_err().contains("without a name"), "{bad}");
        }
    }
}
