//! Summary of a run's requests.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::Level;
use super::client::{Arrivals, RequestRecord};
use crate::statistics::Percentiles;

/// Summary of one server at one level of load.
#[derive(Debug, Clone, Serialize)]
pub struct LoadSummary {
    /// The server's name.
    pub server: String,
    /// Level of load.
    pub level: Level,
    /// Requests sent within the measured time, failed ones included.
    pub requests: usize,
    /// Number of these requests that failed.
    pub failed: usize,
    /// Number of failures by reason.
    pub problems: BTreeMap<String, usize>,
    /// Answers whose text chunks were counted, because the server did not count tokens.
    pub tokens_are_pieces: usize,
    /// Generated tokens per second within the measured time, over all users.
    pub tokens_per_second: f64,
    /// Prompt tokens per second.
    pub prompt_tokens_per_second: f64,
    /// Throughput while no request waited for its first token: decoding without prefill.
    pub decoding: Option<DecodingThroughput>,
    /// Median over answers of tokens per second after the first token: a user's speed without
    /// prefill.
    pub user_tokens_per_second: Option<f64>,
    /// Time from a request to its first text chunk.
    pub time_to_first_token: Option<Percentiles>,
    /// Time between text chunks, which can have several tokens each.
    pub between_chunks: Option<Percentiles>,
    /// Time of an answer after its first token, divided by its number of other tokens.
    pub time_per_token: Option<Percentiles>,
    /// Mean number of requests in flight over the measured time.
    #[serde(rename = "under_way")]
    pub in_flight: f64,
}

/// Decoding throughput while no request was in prefill.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DecodingThroughput {
    /// Tokens per second over all users.
    pub tokens_per_second: f64,
    /// Seconds of the measured time without prefill.
    pub seconds: f64,
}

impl DecodingThroughput {
    /// Measures the decoding throughput of `asked` within `window`; `None` if no moment had
    /// decoding without prefill. An answer's tokens after the first are spread evenly over its
    /// later text chunks, each over the time since the chunk before.
    fn measure(asked: &[RequestRecord], window: (f64, f64)) -> Option<Self> {
        let of = |time: &Duration| time.as_secs_f64();
        // Events: time, change in the number of waiting requests, change in tokens per second.
        let mut changes = vec![(window.0, 0, 0.0), (window.1, 0, 0.0)];
        for one in asked {
            changes
                .extend([(of(&one.begun), 1, 0.0), (of(one.chunks.first().unwrap_or(&one.ended)), -1, 0.0)]);
            if one.problem.is_some() {
                continue;
            }
            let tokens = one.tokens[1].saturating_sub(1) as f64 / one.chunks.len().saturating_sub(1) as f64;
            // Chunks with equal arrival times share the interval since the chunk before.
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
            // A remainder of the sum of speeds after all answers have ended is rounding error.
            if waiting == 0 && speed > 1e-6 {
                seconds += lasts;
                tokens += speed * lasts;
            }
        }
        (seconds > 0.0).then(|| Self { tokens_per_second: tokens / seconds, seconds })
    }
}

impl LoadSummary {
    /// Summarises `asked`. An answer that ends after the measured time counts with the share of
    /// tokens that arrived in time, assuming an even rate after the first.
    pub fn new(server: &str, level: Level, arrivals: Arrivals, asked: &[RequestRecord]) -> Self {
        let window = (arrivals.warm_up.as_secs_f64(), (arrivals.warm_up + arrivals.seconds).as_secs_f64());
        let within = |begin: f64, end: f64| (end.min(window.1) - begin.max(window.0)).max(0.0);
        let of = |time: Duration| time.as_secs_f64();
        let (mut tokens, mut prompts, mut in_flight) = (0.0, 0.0, 0.0);
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
            in_flight += within(of(one.begun), end);
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
            decoding: DecodingThroughput::measure(asked, window),
            user_tokens_per_second: Percentiles::from_values(speeds).map(|speeds| speeds.p50),
            time_to_first_token: Percentiles::from_values(first),
            between_chunks: Percentiles::from_values(between),
            time_per_token: Percentiles::from_values(per_token),
            in_flight: in_flight / seconds,
        }
    }

    /// The reason of the first failure, if no request was answered.
    pub fn all_failed_reason<'a>(&self, asked: &'a [RequestRecord]) -> Option<&'a str> {
        let problems: Vec<_> = asked.iter().map(|one| one.problem.as_deref()).collect();
        problems
            .iter()
            .all(Option::is_some)
            .then(|| problems.first().copied().flatten().unwrap_or("none was made in the time"))
    }

    /// The summary in one line.
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
        let found = LoadSummary::new("s", arrivals.level, arrivals, &all);
        assert_eq!((found.requests, found.failed), (3, 1));
        assert!((found.tokens_per_second - 6.1).abs() < 1e-9, "{}", found.tokens_per_second);
        assert!((found.prompt_tokens_per_second - 0.7).abs() < 1e-9);
        assert!((found.in_flight - 0.8).abs() < 1e-9, "{}", found.in_flight);
        let first = found.time_to_first_token.unwrap();
        assert_eq!((first.p50, first.p99), (1.0, 2.0));
        assert_eq!(found.user_tokens_per_second, Some(10.0), "of 10 and 99 the lower middle");
        // No request waits from 10 to 11, with half of 19 tokens. From 13 to 15, 25 of 50 tokens
        // arrive in the first second, and a fourth of 25 in the other. A request fails at 16; half
        // of 25 tokens arrive from then to 18. The time from 21 on is not measured.
        let decoding = found.decoding.unwrap();
        assert!((decoding.seconds - 5.0).abs() < 1e-9, "{decoding:?}");
        let tokens = 9.5 + 25.0 + 25.0 / 4.0 + 25.0 / 2.0;
        assert!((decoding.tokens_per_second - tokens / 5.0).abs() < 1e-9, "{decoding:?}");
        assert_eq!(DecodingThroughput::measure(&[asked(0.0, &[30.0, 31.0], 5)], (10.0, 20.0)), None);
        // Chunks with equal arrival times carry as many tokens as others: 10 after the first in
        // each of three. Two of these chunks arrive from 1 to 2.
        let at_once =
            DecodingThroughput::measure(&[asked(0.0, &[1.0, 2.0, 2.0, 3.0], 31)], (0.0, 9.0)).unwrap();
        assert!(
            (at_once.seconds - 2.0).abs() < 1e-9 && (at_once.tokens_per_second - 15.0).abs() < 1e-9,
            "{at_once:?}"
        );
        assert!(found.all_failed_reason(&all).is_none());
        assert_eq!(found.all_failed_reason(&all[3..]), Some("busy"));
    }
}
