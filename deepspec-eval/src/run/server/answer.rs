//! An engine's answer to one request, checked against the request.

use deepspec_engine::{Finish, Request};
use serde_json::Value;

use super::figures::{ReportedCycles, ServedFigures};

/// An answer as the engine gives it.
#[derive(Debug)]
pub struct RawAnswer {
    /// Token ids, which may lack the stop token.
    pub tokens: Vec<i64>,
    /// Number of generated tokens, including the stop token.
    pub count: u64,
    /// Why the answer ended.
    pub finish: Finish,
    /// The stop token that ended the answer, if the engine names it.
    pub matched: Option<i64>,
    /// The answer's text, if the token ids may be incomplete.
    pub text: Option<String>,
    /// The cycles; None if the engine reports none.
    pub cycles: Option<ReportedCycles>,
    /// Number of drafted tokens per block, if the answer shows it.
    pub block_size: Option<usize>,
}

/// An answer that fits its request.
#[derive(Debug)]
pub struct CheckedAnswer {
    /// Token ids.
    pub tokens: Vec<i64>,
    /// Why the answer ended.
    pub finish: Finish,
    /// Counts of the answer.
    pub figures: ServedFigures,
    /// Number of drafted tokens per block, if the answer shows it.
    pub block_size: Option<usize>,
}

impl RawAnswer {
    /// Checks that an engine can have given this answer to `request`.
    ///
    /// # Errors
    /// A phrase that says what is wrong.
    pub fn check(mut self, request: &Request) -> Result<CheckedAnswer, String> {
        let is_stop = |id: &i64| request.stop_ids.contains(id);
        if self.finish == Finish::Stop && self.tokens.len() as u64 + 1 == self.count {
            self.tokens.extend(self.matched.filter(is_stop));
        }
        let behind = self.tokens.iter().position(is_stop).filter(|at| at + 1 < self.tokens.len());
        if let Some(at) = behind {
            return Err(format!(
                "the engine went on behind token {}, which ends answers of --target; serve the same target, \
                 whose end-of-generation tokens include it",
                self.tokens[at]
            ));
        }
        if self.count > request.max_new_tokens as u64 || self.tokens.len() as u64 > self.count {
            let (count, ids, most) = (self.count, self.tokens.len(), request.max_new_tokens);
            return Err(format!("it counts {count} tokens with {ids} ids; at most {most} were asked for"));
        }
        let cycles = self.cycles.unwrap_or(ReportedCycles::Unreported);
        // Token ids that are all there give the text as the target's tokenizer decodes it.
        let text = self.text.filter(|_| self.tokens.len() as u64 != self.count);
        let figures = ServedFigures { tokens: self.count, text, cycles };
        Ok(CheckedAnswer { tokens: self.tokens, finish: self.finish, figures, block_size: self.block_size })
    }
}

/// A list of token ids.
pub fn ids(value: &Value) -> Option<Vec<i64>> {
    value.as_array()?.iter().map(Value::as_i64).collect()
}

/// A count, which some engines write as a float.
pub fn number(value: &Value) -> Option<u64> {
    let whole = |float: f64| (float >= 0.0 && float.fract() == 0.0 && float < 1e15).then_some(float as u64);
    value.as_u64().or_else(|| value.as_f64().and_then(whole))
}

#[cfg(test)]
mod tests {
    use deepspec_engine::Sampling;

    use super::*;

    fn check(tokens: &[i64], count: u64, finish: Finish) -> Result<CheckedAnswer, String> {
        let sampling = Sampling::new(0.0, 1);
        let request =
            Request { id: "s/0".into(), prompt: vec![1], sampling, max_new_tokens: 8, stop_ids: vec![9] };
        let text = Some("x".into());
        let (tokens, matched) = (tokens.to_vec(), Some(9));
        RawAnswer { tokens, count, finish, matched, text, cycles: None, block_size: None }.check(&request)
    }

    #[test]
    fn answers_end_with_their_stop_token() {
        let whole = check(&[1, 2, 9], 3, Finish::Stop).unwrap();
        assert_eq!((whole.tokens.as_slice(), whole.figures.tokens), (&[1, 2, 9][..], 3));
        let cut = check(&[1, 2], 3, Finish::Stop).unwrap();
        assert_eq!((cut.tokens.as_slice(), cut.figures.text), (&[1, 2, 9][..], None));
        let gaps = check(&[1, 9], 4, Finish::Stop).unwrap();
        assert_eq!((gaps.tokens.len(), gaps.figures.text.as_deref()), (2, Some("x")));
    }

    #[test]
    fn answers_that_do_not_fit_are_refused() {
        assert!(check(&[1, 9, 2], 3, Finish::Length).unwrap_err().contains("behind token 9"));
        assert!(check(&[1], 9, Finish::Length).unwrap_err().contains("9 tokens with 1 ids"));
        assert!(check(&[1, 2, 3], 2, Finish::Length).unwrap_err().contains("2 tokens with 3 ids"));
    }

    #[test]
    fn counts_may_be_floats() {
        let of = |text: &str| number(&serde_json::from_str(text).unwrap());
        assert_eq!(
            [of("3"), of("3.0"), of("3.5"), of("-1"), of("null")],
            [Some(3), Some(3), None, None, None]
        );
    }
}
