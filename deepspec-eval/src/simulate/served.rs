//! What servers were seen to do: it tells what they take beside the steps that a cost curve knows.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use deepspec_core::usage;
use deepspec_cost::ScheduleError;
use deepspec_cost::least_squares::non_negative;
use deepspec_cost::policy::Policy;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::host::{Host, PARTS};
use super::replay::{Replay, ReplayResult};
use crate::load::{FORMAT, VERSION};
use crate::versioned;

/// Replays of the fit: what steps take decides what the prefix schedules do, and that what is told of the steps.
const REPLAYS: usize = 6;
/// Share of the costs below which measurements follow something else.
const LEAST_FACTOR: f64 = 0.01;

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
    failed: usize,
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
/// Usage errors: a file that is none, a server of another name, loads that arrive by chance, requests that failed, too few of them.
pub fn read(files: &[PathBuf]) -> anyhow::Result<Vec<Served>> {
    let mut found: BTreeMap<(String, usize), (Policy, Vec<f64>)> = BTreeMap::new();
    for file in files {
        let load: Load =
            versioned::read(file, (FORMAT, VERSION), "not written by this version of `deepspec-eval load`")?;
        for Run { server, level, failed, tokens_per_second } in load.runs {
            let place = file.display();
            if failed > 0 {
                usage!("--served {place}: {failed} requests to {server} failed; measure that again");
            }
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
    let schedules = distinct(served.iter().map(|served| served.schedule.to_string()));
    let loads = distinct(served.iter().map(|served| served.concurrency));
    if served.len() < 2 * PARTS || schedules < 2 || loads < 2 {
        usage!(
            "--served: {} throughputs, of {schedules} schedules at {loads} loads; to tell what a server adds to its steps takes {}, of \
             two schedules at two loads at least",
            served.len(),
            2 * PARTS
        );
    }
    Ok(served)
}

fn distinct<T: Ord>(all: impl Iterator<Item = T>) -> usize {
    all.collect::<BTreeSet<T>>().len()
}

/// What servers add to their steps, and how well that describes them.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Fit {
    /// What they add.
    pub host: Host,
    /// The furthest that a foretold throughput is off a measured one it was told from, as a share of it.
    pub worst: f64,
}

/// What servers add to the costs of `replay`, that it takes what they took: least squares of relative errors, no part negative. What
/// weighing costs takes is left as it stands in `replay` where no such schedule was measured.
///
/// # Errors
/// The costs do not suit a schedule. A usage error where what was measured does not follow them at all.
pub fn fit(replay: &Replay, served: &[Served]) -> anyhow::Result<Fit> {
    let weighed = weighs_costs(served);
    let mut host = replay.host;
    let mut best: Option<(Fit, f64)> = None;
    for _ in 0..REPLAYS {
        let replay = Replay { host, ..*replay };
        let replayed = served.par_iter().map(|served| replay.at_cost(served.schedule, served.concurrency));
        let outcomes: Vec<ReplayResult> = replayed.collect::<Result<_, ScheduleError>>()?;
        let parts = || outcomes.iter().zip(served).map(|(outcome, served)| outcome.parts(served.schedule));
        let took = || outcomes.iter().zip(served).map(|(o, s)| o.all_tokens() as f64 / s.tokens_per_second);
        let off = parts().zip(took()).map(|(parts, took)| (took / host.seconds(parts) - 1.0).abs());
        let off: Vec<f64> = off.collect();
        let squares: f64 = off.iter().map(|off| off * off).sum();
        if best.as_ref().is_none_or(|(_, least)| squares < *least) {
            best = Some((Fit { host, worst: off.into_iter().fold(0.0, f64::max) }, squares));
        }
        let rows: Vec<[f64; PARTS]> =
            parts().zip(took()).map(|(parts, took)| parts.map(|part| part / took)).collect();
        let [factor, step, choice, token] = non_negative(&rows);
        host = Host { factor, step, choice: if weighed { choice } else { replay.host.choice }, token };
    }
    let fit = best.map_or(Fit { host, worst: f64::INFINITY }, |(fit, _)| fit);
    if fit.host.factor < LEAST_FACTOR {
        usage!(
            "--served: what servers took does not follow --cost at all; measure both on one machine, at loads further apart"
        );
    }
    Ok(fit)
}

/// Whether a schedule that weighs costs is among those that were measured.
pub fn weighs_costs(served: &[Served]) -> bool {
    served.iter().any(|served| served.schedule.reads_cost())
}
