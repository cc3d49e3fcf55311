//! Prints rows on a terminal in colour, or with brackets around supervised text.

use std::io::{self, Write};

use super::render::{RenderedRow, Segment, show_control_characters};

const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const RED: &str = "\x1b[31m";
/// Black on green.
const SUPERVISED: &str = "\x1b[30;42m";
/// Grey on green.
const SUPERVISED_SPECIAL: &str = "\x1b[90;42m";
const PLAIN: &str = "\x1b[0m";

/// Brackets around supervised text without colour.
const BRACKETS: [&str; 2] = ["⟦", "⟧"];

/// Prints a row: headline, problems, text and an empty line.
pub fn write_row(out: &mut impl Write, row: &RenderedRow, colour: bool) -> io::Result<()> {
    let [bold, red, plain] = if colour { [BOLD, RED, PLAIN] } else { [""; 3] };
    writeln!(out, "{bold}── {}{plain}", show_control_characters(&row.headline()))?;
    for problem in &row.problems {
        writeln!(out, "{red}!! {}{plain}", show_control_characters(problem))?;
    }
    let mut supervised = false;
    for segment in &row.segments {
        if segment.cut {
            continue;
        }
        if colour {
            paint(out, segment)?;
            continue;
        }
        if segment.supervised != supervised {
            write!(out, "{}", BRACKETS[usize::from(supervised)])?;
            supervised = segment.supervised;
        }
        write!(out, "{}", show_control_characters(&segment.text))?;
    }
    if supervised {
        write!(out, "{}", BRACKETS[1])?;
    }
    if row.untruncated > row.tokens {
        let [dim, plain] = if colour { [DIM, PLAIN] } else { [""; 2] };
        write!(out, "{dim}[cut: {} more tokens]{plain}", row.untruncated - row.tokens)?;
    }
    writeln!(out, "\n")
}

/// Colours each line separately, so that the background ends with the text.
fn paint(out: &mut impl Write, segment: &Segment) -> io::Result<()> {
    let style = match (segment.supervised, segment.special) {
        (true, true) => SUPERVISED_SPECIAL,
        (true, false) => SUPERVISED,
        (false, true) => DIM,
        (false, false) => "",
    };
    for line in show_control_characters(&segment.text).split_inclusive('\n') {
        let (text, end) = line.strip_suffix('\n').map_or((line, ""), |text| (text, "\n"));
        // Shows supervised line ends.
        let mark = if segment.supervised && !end.is_empty() { "⏎" } else { "" };
        write!(out, "{style}{text}{mark}{PLAIN}{end}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> RenderedRow {
        let segment =
            |text: &str, supervised, special| Segment { text: text.into(), supervised, special, cut: false };
        RenderedRow {
            file: "a.jsonl".into(),
            line: 3,
            id: "x".into(),
            untruncated: 9,
            tokens: 6,
            supervised: 2,
            spans: vec![(3, 5)],
            segments: vec![
                segment("<s>", false, true),
                segment("hi\n", false, false),
                segment("ho", true, false),
                segment("</s>", true, true),
                segment("\n", false, false),
                Segment { cut: true, ..segment("gone", false, false) },
            ],
            problems: vec!["bad \u{1b}".into()],
        }
    }

    #[test]
    fn brackets_stand_where_there_is_no_colour() {
        let mut out = Vec::new();
        write_row(&mut out, &row(), false).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "── a.jsonl:3  id \"x\"  6 tokens (cut, 9 without)  2 supervised: 3..5\n!! bad ␛\n<s>hi\n⟦ho</s>⟧\n[cut: 3 more tokens]\n\n"
        );
    }

    #[test]
    fn colours_end_with_their_line() {
        let mut out = Vec::new();
        write_row(&mut out, &row(), true).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(
            text.contains("\x1b[2m<s>\x1b[0mhi\x1b[0m\n\x1b[30;42mho\x1b[0m\x1b[90;42m</s>\x1b[0m"),
            "{text:?}"
        );
        assert!(!text.contains('⟦') && !text.contains("gone"));
    }
}
