//! Stop strings in streamed text.

/// Finds the stop string that is completed first. Text that may begin a stop string is held back.
///
/// The result depends only on the text, not on how it is split into pieces.
pub struct StopFinder {
    stops: Vec<String>,
    held: String,
}

/// Result of a piece of text.
#[derive(Debug, PartialEq, Eq)]
pub enum StopScan {
    /// Text of the answer, possibly empty.
    Text(String),
    /// The text before a stop string, and the stop string. The stop string and later text are
    /// dropped.
    Stopped(String, String),
}

impl StopFinder {
    /// Creates a finder of `stops`; empty strings are ignored.
    pub fn new(stops: &[String]) -> Self {
        Self { stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Processes the next piece.
    pub fn push(&mut self, piece: &str) -> StopScan {
        self.held.push_str(piece);
        let found = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at + stop.len(), at, stop)));
        if let Some((_, start, stop)) = found.min() {
            let stop = stop.clone();
            self.held.truncate(start);
            return StopScan::Stopped(std::mem::take(&mut self.held), stop);
        }
        let kept = self.stops.iter().map(|stop| partial_match_len(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - kept);
        StopScan::Text(std::mem::replace(&mut self.held, rest))
    }

    /// Returns the held-back text at the end of the stream.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length in bytes of the longest suffix of `text` that is a proper prefix of `pattern`.
pub fn partial_match_len(text: &str, pattern: &str) -> usize {
    let begins = |len: &usize| {
        text.is_char_boundary(text.len() - len)
            && pattern.as_bytes().starts_with(&text.as_bytes()[text.len() - len..])
    };
    (1..pattern.len().min(text.len() + 1)).rev().find(begins).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `text` in pieces of `size` characters and joins the output.
    fn cut(text: &str, size: usize, stops: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let (mut finder, mut out) = (StopFinder::new(&stops), String::new());
        let characters: Vec<char> = text.chars().collect();
        for piece in characters.chunks(size) {
            match finder.push(&piece.iter().collect::<String>()) {
                StopScan::Text(text) => out.push_str(&text),
                StopScan::Stopped(text, _) => return (out + &text, true),
            }
        }
        (out + &finder.finish(), false)
    }

    #[test]
    fn the_cut_does_not_depend_on_the_pieces() {
        for size in 1..12 {
            assert_eq!(cut("one two three", size, &["two"]), ("one ".into(), true));
            assert_eq!(cut("aaab", size, &["aab"]), ("a".into(), true));
            assert_eq!(
                cut("xabcd", size, &["abcd", "bc"]),
                ("xa".into(), true),
                "the stop completed first counts"
            );
            assert_eq!(cut("naïve …no", size, &["… no", "ï!"]), ("naïve …no".into(), false));
            assert_eq!(cut("plain", size, &[""]), ("plain".into(), false));
        }
    }

    #[test]
    fn only_a_possible_beginning_is_held_back() {
        let mut finder = StopFinder::new(&["END".into()]);
        assert_eq!(finder.push("the E"), StopScan::Text("the ".into()));
        assert_eq!(finder.push("N"), StopScan::Text(String::new()));
        assert_eq!(finder.push("T"), StopScan::Text("ENT".into()));
    }
}
