//! One pass over all suites with one engine, timed suite by suite.

use std::time::Instant;

use deepspec_core::cli::Verbosity;
use deepspec_core::progress::Progress;
use deepspec_decode::{Completion, Engine, Proposer, Request, Tally, Target};
use deepspec_suites::Prepared;

use crate::results::Timing;

/// Samples of the untimed warm-up, and tokens of each.
const WARM_UP: (usize, usize) = (4, 4);

/// What decoding one suite gave.
pub struct Pass {
    /// Finished samples in the order of the requests.
    pub completions: Vec<Completion>,
    /// Where the time went.
    pub timing: Timing,
}

/// Decodes the suites one after the other, each from empty slots to empty slots.
///
/// # Errors
/// If the engine refuses a request.
pub fn decode<T: Target, P: Proposer>(
    engine: &mut Engine<T, P>,
    suites: &[Prepared],
    verbosity: Verbosity,
) -> anyhow::Result<Vec<Pass>> {
    let drafting = engine.block_size() > 0;
    warm_up(engine, suites)?;
    let total = suites.iter().map(|suite| suite.requests.len() as u64).sum();
    let mut progress = Progress::new(verbosity, if drafting { "drafted" } else { "plain" }, total, 0);
    let mut passes = Vec::with_capacity(suites.len());
    for suite in suites {
        let (before, started) = (engine.times(), Instant::now());
        let mut tally = Tally::new(engine.block_size());
        let completions = engine.run(suite.requests.clone(), |completion| {
            tally.add(completion);
            progress.add(1, || match tally.accepted_length().filter(|_| drafting) {
                Some(tau) => format!("{}, accepted length {tau:.2}", suite.rows.suite.name),
                None => suite.rows.suite.name.to_string(),
            });
        })?;
        let timing = Timing::between(before, engine.times(), started.elapsed());
        passes.push(Pass { completions, timing });
    }
    progress.finish();
    Ok(passes)
}

/// The first forwards set up libtorch and its threads; they should not count against whoever comes first.
fn warm_up<T: Target, P: Proposer>(engine: &mut Engine<T, P>, suites: &[Prepared]) -> anyhow::Result<()> {
    let (samples, tokens) = WARM_UP;
    let requests = suites.iter().flat_map(|suite| &suite.requests).take(samples);
    let short = requests
        .map(|request| Request { max_new_tokens: request.max_new_tokens.min(tokens), ..request.clone() });
    engine.run(short.collect(), |_| {})?;
    Ok(())
}
