//! What a run comes to.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::Level;
use super::client::{Arrivals, RequestRecord};
use crate::statistics::Percentiles;

/// One server at one level.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// The server's name.
    pub server: String,
    /// How many asked.
    pub level: Level,
    /// Requests made within the time that counts, and those of them that failed.
    pub requests: usize,
    /// Failed ones.
    pub failed: usize,
    /// Why they failed, and how many for each reason.
    pub problems: BTreeMap<String, usize>,
    /// Answers whose tokens the server did not count: their pieces of text were counted.
    pub tokens_are_pieces: usize,
    /// Tokens of answers per second that came within the time, of all users together.
    pub tokens_per_second: f64,
    /// Tokens of prompts per second.
    pub prompt_tokens_per_second: f64,
    /// The time in which nobody waited for a first token: what decoding alone does, without prompts.
    pub decoding: Option<Decoding>,
    /// Median over answers of tokens per second behind the first token: what one user sees, without the prompt.
    pub user_tokens_per_second: Option<f64>,
    /// From a request to its first text.
    pub time_to_first_token: Option<Percentiles>,
    /// Between pieces of text, each as many tokens as the server sent at once.
    pub between_chunks: Option<Percentiles>,
    /// Time of an answer behind its first token over its other tokens.
    pub time_per_token: Option<Percentiles>,
    /// Requests under way, on average over the time that counts.
    pub under_way: f64,
}

/// Answers that were decoded while no prompt was computed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Decoding {
    /// Of all users together.
    pub tokens_per_second: f64,
    /// How much of the time that counts this was.
    pub seconds: f64,
}

impl Decoding {
    /// Of what was asked and the time that counts; `None` where at every moment somebody waited for a first token or nobody was answered.
    /// The tokens behind an answer's first are spread over its pieces of text alike, each over the time since the piece before.
    fn of(asked: &[RequestRecord], window: (f64, f64)) -> Option<Self> {
        let of = |time: &Duration| time.as_secs_f64();
        // What changes at a moment: how many wait, and how many tokens a second come.
        let mut changes = vec![(window.0, 0, 0.0), (window.1, 0, 0.0)];
        for one in asked {
            changes
                .extend([(of(&one.begun), 1, 0.0), (of(one.chunks.first().unwrap_or(&one.ended)), -1, 0.0)]);
            if one.problem.is_some() {
                continue;
            }
            let tokens = one.tokens[1].saturating_sub(1) as f64 / one.chunks.len().saturating_sub(1) as f64;
            // Pieces that were read at once all came in the time since those before.
            let at_once: Vec<&[Duration]> = one.chunks.chunk_by(|a, b| a == b).collect();
            for pair in at_once.windows(2) {
                let (from, to) = (of(&pair[0][0]), of(&pair[1][0]));
                let speed = tokens * pair[1].len() as f64 / (to - from);
                changes.extend([(from, 0, speed), (to, 0, -speed)]);
            }
        }
        changes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut waiting, mut speed, mut seconds, mut tokens) = (0, 0.0, 0.0, 0.0);
        for pair in changes.windows(2) {
            waiting += pair[0].1;
            speed += pair[0].2;
            let lasts = (pair[1].0.min(window.1) - pair[0].0.max(window.0)).max(0.0);
            // What is left of sums of speeds when all have ended is rounding.
            if waiting == 0 && speed > 1e-6 {
                seconds += lasts;
                tokens += speed * lasts;
            }
        }
        (seconds > 0.0).then(|| Self { tokens_per_second: tokens / seconds, seconds })
    }
}

impl Summary {
    /// Of what was asked. An answer that reaches beyond the time counts with the share of its tokens that came within it, as if they came
    /// evenly behind the first.
    pub fn new(server: &str, level: Level, arrivals: Arrivals, asked: &[RequestRecord]) -> Self {
        let window = (arrivals.warm_up.as_secs_f64(), (arrivals.warm_up + arrivals.seconds).as_secs_f64());
        let within = |begin: f64, end: f64| (end.min(window.1) - begin.max(window.0)).max(0.0);
        let of = |time: Duration| time.as_secs_f64();
        let (mut tokens, mut prompts, mut under_way) = (0.0, 0.0, 0.0);
        let (mut first, mut between, mut per_token, mut speeds) = (vec![], vec![], vec![], vec![]);
        let (mut requests, mut failed, mut problems) = (0, 0, BTreeMap::new());
        let mut tokens_are_pieces = 0;
        for one in asked {
            let counts = (window.0..window.1).contains(&of(one.begun));
            requests += usize::from(counts);
            tokens_are_pieces += usize::from(counts && one.problem.is_none() && one.tokens_are_pieces);
            if let Some(problem) = one.problem.as_ref().filter(|_| counts) {
                failed += 1;
                *problems.entry(problem.clone()).or_default() += 1;
            }
            let (Some(&begin), Some(&end), None) = (one.chunks.first(), one.chunks.last(), &one.problem)
            else {
                continue;
            };
            let (begin, end) = (of(begin), of(end));
            under_way += within(of(one.begun), end);
            let generated = one.tokens[1] as f64;
            let share = if end > begin {
                within(begin, end) / (end - begin)
            } else {
                f64::from(u8::from((window.0..window.1).contains(&end)))
            };
            tokens += generated * share;
            if (window.0..window.1).contains(&begin) {
                prompts += one.tokens[0] as f64;
            }
            if counts {
                first.push(begin - of(one.begun));
                between.extend(one.chunks.windows(2).map(|pair| of(pair[1] - pair[0])));
                if generated > 1.0 && end > begin {
                    per_token.push((end - begin) / (generated - 1.0));
                    speeds.push((generated - 1.0) / (end - begin));
                }
            }
        }
        let seconds = window.1 - window.0;
        Self {
            server: server.into(),
            level,
            requests,
            failed,
            problems,
            tokens_are_pieces,
            tokens_per_second: tokens / seconds,
            prompt_tokens_per_second: prompts / seconds,
            decoding: Decoding::of(asked, window),
            user_tokens_per_second: Percentiles::of(speeds).map(|speeds| speeds.p50),
            time_to_first_token: Percentiles::of(first),
            between_chunks: Percentiles::of(between),
            time_per_token: Percentiles::of(per_token),
            under_way: under_way / seconds,
        }
    }

    /// Why nothing was answered, if nothing was.
    pub fn hopeless<'a>(&self, asked: &'a [RequestRecord]) -> Option<&'a str> {
        let problems: Vec<_> = asked.iter().map(|one| one.problem.as_deref()).collect();
        problems
            .iter()
            .all(Option::is_some)
            .then(|| problems.first().copied().flatten().unwrap_or("none was made in the time"))
    }

    /// In one line.
    pub fn line(&self) -> String {
        format!(
            "{} at {}: {:.0} tokens/s, {} requests, {} failed",
            self.server, self.level, self.tokens_per_second, self.requests, self.failed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reaches_beyond_the_time_counts_in_part() {
        let seconds = Duration::from_secs_f64;
        let asked = |begun: f64, chunks: &[f64], tokens: u64| RequestRecord {
            begun: seconds(begun),
            chunks: chunks.iter().map(|&at| seconds(at)).collect(),
            tokens: [7, tokens],
            ..RequestRecord::default()
        };
        let arrivals =
            Arrivals { level: Level::Concurrency(2), warm_up: seconds(10.0), seconds: seconds(10.0) };
        let half_before = asked(8.0, &[9.0, 11.0], 20);
        let inside = asked(12.0, &[13.0, 14.0, 18.0], 51);
        let beyond = asked(19.0, &[21.0, 22.0], 100);
        let failed = RequestRecord {
            begun: seconds(15.0),
            ended: seconds(16.0),
            problem: Some("busy".into()),
            ..RequestRecord::default()
        };
        let all = [half_before, inside, beyond, failed];
        let found = Summary::new("s", arrivals.level, arrivals, &all);
        assert_eq!((found.requests, found.failed), (3, 1));
        assert!((found.tokens_per_second - 6.1).abs() < 1e-9, "{}", found.tokens_per_second);
        assert!((found.prompt_tokens_per_second - 0.7).abs() < 1e-9);
        assert!((found.under_way - 0.8).abs() < 1e-9, "{}", found.under_way);
        let first = found.time_to_first_token.unwrap();
        assert_eq!((first.p50, first.p99), (1.0, 2.0));
        assert_eq!(found.user_tokens_per_second, Some(10.0), "of 10 and 99 the lower middle");
        // Nobody waits from 10 to 11 (of 19 tokens half), from 13 to 15 (of 50 tokens 25 in one second, a fourth of 25 in the next), where
        // one fails at 16, from then to 18 (half of 25), and from 21 on, which does not count.
        let decoding = found.decoding.unwrap();
        assert!((decoding.seconds - 5.0).abs() < 1e-9, "{decoding:?}");
        let tokens = 9.5 + 25.0 + 25.0 / 4.0 + 25.0 / 2.0;
        assert!((decoding.tokens_per_second - tokens / 5.0).abs() < 1e-9, "{decoding:?}");
        assert_eq!(Decoding::of(&[asked(0.0, &[30.0, 31.0], 5)], (10.0, 20.0)), None);
        // Pieces that were read at once are as many tokens as others: 10 behind the first in each of three, two of them from 1 to 2.
        let at_once = Decoding::of(&[asked(0.0, &[1.0, 2.0, 2.0, 3.0], 31)], (0.0, 9.0)).unwrap();
        assert!(
            (at_once.seconds - 2.0).abs() < 1e-9 && (at_once.tokens_per_second - 15.0).abs() < 1e-9,
            "{at_once:?}"
        );
        assert!(found.hopeless(&all).is_none());
        assert_eq!(found.hopeless(&all[3..]), Some("busy"));
    }
}
