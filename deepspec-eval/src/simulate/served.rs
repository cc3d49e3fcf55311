//! What servers were seen to do: it tells what they take beside the steps that a cost curve knows.

use std::collections::BTreeMap;
use std::path::PathBuf;

use deepspec_core::usage;
use deepspec_schedule::ScheduleError;
use deepspec_schedule::policy::Policy;
use serde::{Deserialize, Serialize};

use super::host::{Host, PARTS};
use super::replay::Replay;
use crate::load::{FORMAT, VERSION};
use crate::versioned;

/// Rounds of the fit; it has settled long before.
const ROUNDS: usize = 20_000;

/// Throughput of a server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Served {
    /// How it schedules.
    pub schedule: Policy,
    /// Users at once.
    pub concurrency: usize,
    /// Tokens per second of all of them, the median where it was measured several times.
    pub tokens_per_second: f64,
}

/// A file of `deepspec-eval load`, as far as it is read.
#[derive(Deserialize)]
struct Load {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    server: String,
    level: Level,
    tokens_per_second: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Level {
    Concurrency(usize),
    Rate(f64),
}

/// Reads files of `deepspec-eval load` whose servers are named after their schedules.
///
/// # Errors
/// Usage errors: a file that is none, a server of another name, loads that arrive by chance, too few of them.
pub fn read(files: &[PathBuf]) -> anyhow::Result<Vec<Served>> {
    let mut found: BTreeMap<(String, usize), (Policy, Vec<f64>)> = BTreeMap::new();
    for file in files {
        let load: Load =
            versioned::read(file, (FORMAT, VERSION), "not written by this version of `deepspec-eval load`")?;
        for Run { server, level, tokens_per_second } in load.runs {
            let place = file.display();
            let schedule: Policy = match server.parse() {
                Ok(schedule) => schedule,
                Err(_) => usage!(
                    "--served {place}: the server is called `{server}`, expected its schedule: `deepspec-eval load --server prefix=http://…`"
                ),
            };
            let concurrency = match level {
                Level::Concurrency(users) if users > 0 && tokens_per_second > 0.0 => users,
                Level::Concurrency(users) => {
                    usage!("--served {place}: {server} at {users}: {tokens_per_second} tokens/s tell nothing")
                }
                Level::Rate(rate) => usage!(
                    "--served {place}: {server} at {rate} requests/s: expected users who ask at once (--concurrency)"
                ),
            };
            found.entry((server, concurrency)).or_insert((schedule, vec![])).1.push(tokens_per_second);
        }
    }
    let served = found.into_iter().map(|((_, concurrency), (schedule, mut rates))| {
        rates.sort_by(f64::total_cmp);
        let middle = [(rates.len() - 1) / 2, rates.len() / 2].map(|at| rates[at]);
        Served { schedule, concurrency, tokens_per_second: (middle[0] + middle[1]) / 2.0 }
    });
    let served: Vec<Served> = served.collect();
    if served.len() < 2 * PARTS {
        usage!(
            "--served: {} schedules at loads were measured; it takes {} to tell what a server adds to its steps",
            served.len(),
            2 * PARTS
        );
    }
    Ok(served)
}

/// What servers add to the costs of `replay`, that it takes what they took: least squares of relative errors, no part negative.
///
/// # Errors
/// The costs do not suit a schedule.
pub fn fit(replay: &Replay, served: &[Served]) -> Result<Host, ScheduleError> {
    let replay = Replay { host: Host::scheduling(0.0), ..*replay };
    let mut rows = vec![];
    for Served { schedule, concurrency, tokens_per_second } in served {
        let outcome = replay.run(*schedule, *concurrency)?;
        let took = outcome.all_tokens() as f64 / tokens_per_second;
        rows.push(outcome.parts(*schedule).map(|part| part / took));
    }
    let [factor, step, choice, token] = non_negative(&rows);
    Ok(Host { factor, step, choice, token })
}

/// x ≥ 0 for which the products of x and these rows are as near as can be to 1, by squares: one coordinate after the other.
fn non_negative<const N: usize>(rows: &[[f64; N]]) -> [f64; N] {
    let mut x = [0.0; N];
    for round in 0..ROUNDS * N {
        let at = round % N;
        let square: f64 = rows.iter().map(|row| row[at] * row[at]).sum();
        if square > 0.0 {
            let missing = |row: &[f64; N]| 1.0 - row.iter().zip(&x).map(|(a, b)| a * b).sum::<f64>();
            let slope: f64 = rows.iter().map(|row| row[at] * missing(row)).sum();
            x[at] = (x[at] + slope / square).max(0.0);
        }
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_are_there_are_found_and_others_are_none() {
        let rows = [[0.5, 100.0], [0.25, 150.0], [0.1, 400.0], [0.8, 20.0]];
        let took = rows.map(|[seconds, steps]| 1.2 * seconds + 1e-3 * steps);
        let relative: Vec<[f64; 2]> =
            rows.iter().zip(took).map(|(row, took)| row.map(|part| part / took)).collect();
        let [factor, step] = non_negative(&relative);
        assert!((factor - 1.2).abs() < 1e-9 && (step - 1e-3).abs() < 1e-12, "{factor} {step}");
        // Steps that would have to take less than nothing take nothing.
        let took = rows.map(|[seconds, steps]| 2.0 * seconds - 1e-5 * steps);
        let relative: Vec<[f64; 2]> =
            rows.iter().zip(took).map(|(row, took)| row.map(|part| part / took)).collect();
        assert_eq!(non_negative(&relative)[1], 0.0);
    }
}
