//! Measured throughput of servers, to which a [`HostOverhead`] is fitted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use deepspec_core::usage;
use deepspec_cost::ScheduleError;
use deepspec_cost::least_squares::non_negative_least_squares;
use deepspec_cost::policy::Policy;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::host::{HOST_PARTS, HostOverhead};
use super::replay::{Replay, ReplayResult};
use crate::load::{LOAD_FORMAT, LOAD_FORMAT_VERSION};
use crate::versioned;

/// Number of replays of the fit. The fitted step times change the decisions of prefix schedules,
/// which change the fit.
const FIT_REPLAYS: usize = 6;
/// A fitted factor on the costs below this means that the measurements do not follow the costs.
const MIN_FITTED_FACTOR: f64 = 0.01;

/// Measured throughput of a server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServedThroughput {
    /// Schedule of the server.
    pub schedule: Policy,
    /// Number of concurrent users.
    pub concurrency: usize,
    /// Tokens per second over all users; the median of repeated measurements.
    pub tokens_per_second: f64,
}

/// Fields that are read from load.json.
#[derive(Deserialize)]
struct LoadFile {
    runs: Vec<LoadRun>,
}

#[derive(Deserialize)]
struct LoadRun {
    server: String,
    level: LoadLevel,
    failed: usize,
    tokens_per_second: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum LoadLevel {
    Concurrency(usize),
    Rate(f64),
}

/// Reads load.json files of servers that are named after their schedules.
///
/// # Errors
/// Usage errors: a file of another format, a server of another name, Poisson arrivals, failed
/// requests, or too few measurements.
pub fn read(files: &[PathBuf]) -> anyhow::Result<Vec<ServedThroughput>> {
    let mut found: BTreeMap<(String, usize), (Policy, Vec<f64>)> = BTreeMap::new();
    for file in files {
        let load: LoadFile = versioned::read(
            file,
            (LOAD_FORMAT, LOAD_FORMAT_VERSION),
            "not written by this version of `deepspec-eval load`",
        )?;
        for LoadRun { server, level, failed, tokens_per_second } in load.runs {
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
                LoadLevel::Concurrency(users) if users > 0 && tokens_per_second > 0.0 => users,
                LoadLevel::Concurrency(users) => {
                    usage!("--served {place}: {server} at {users}: {tokens_per_second} tokens/s tell nothing")
                }
                LoadLevel::Rate(rate) => usage!(
                    "--served {place}: {server} at {rate} requests/s: expected users who ask at once (--concurrency)"
                ),
            };
            found.entry((server, concurrency)).or_insert((schedule, vec![])).1.push(tokens_per_second);
        }
    }
    let served = found.into_iter().map(|((_, concurrency), (schedule, mut rates))| {
        rates.sort_by(f64::total_cmp);
        let middle = [(rates.len() - 1) / 2, rates.len() / 2].map(|at| rates[at]);
        ServedThroughput { schedule, concurrency, tokens_per_second: (middle[0] + middle[1]) / 2.0 }
    });
    let served: Vec<ServedThroughput> = served.collect();
    let schedules = count_distinct(served.iter().map(|served| served.schedule.to_string()));
    let loads = count_distinct(served.iter().map(|served| served.concurrency));
    if served.len() < 2 * HOST_PARTS || schedules < 2 || loads < 2 {
        usage!(
            "--served: {} throughputs, of {schedules} schedules at {loads} loads; to tell what a server adds to its steps takes {}, of \
             two schedules at two loads at least",
            served.len(),
            2 * HOST_PARTS
        );
    }
    Ok(served)
}

fn count_distinct<T: Ord>(all: impl Iterator<Item = T>) -> usize {
    all.collect::<BTreeSet<T>>().len()
}

/// The fitted overhead, and how well it describes the servers.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct OverheadFit {
    /// Fitted overhead per step.
    pub host: HostOverhead,
    /// Largest relative error of the simulated throughputs.
    pub worst: f64,
}

/// Fits the overhead of servers to their measured throughputs: non-negative least squares of
/// relative errors. Without a measured schedule that weighs costs, `choice` stays as in `replay`.
///
/// # Errors
/// Fails if the costs do not suit a schedule. A usage error if the measurements do not follow the
/// costs.
pub fn fit_overhead(replay: &Replay, served: &[ServedThroughput]) -> anyhow::Result<OverheadFit> {
    let weighed = weighs_costs(served);
    let mut host = replay.host;
    let mut best: Option<(OverheadFit, f64)> = None;
    for _ in 0..FIT_REPLAYS {
        let replay = Replay { host, ..*replay };
        let replayed =
            served.par_iter().map(|served| replay.run_without_overhead(served.schedule, served.concurrency));
        let outcomes: Vec<ReplayResult> = replayed.collect::<Result<_, ScheduleError>>()?;
        let parts =
            || outcomes.iter().zip(served).map(|(outcome, served)| outcome.host_amounts(served.schedule));
        let took = || outcomes.iter().zip(served).map(|(o, s)| o.all_tokens() as f64 / s.tokens_per_second);
        let off = parts().zip(took()).map(|(parts, took)| (took / host.seconds(parts) - 1.0).abs());
        let off: Vec<f64> = off.collect();
        let squares: f64 = off.iter().map(|off| off * off).sum();
        if best.as_ref().is_none_or(|(_, least)| squares < *least) {
            best = Some((OverheadFit { host, worst: off.into_iter().fold(0.0, f64::max) }, squares));
        }
        let rows: Vec<[f64; HOST_PARTS]> =
            parts().zip(took()).map(|(parts, took)| parts.map(|part| part / took)).collect();
        let [factor, step, choice, token] = non_negative_least_squares(&rows);
        host =
            HostOverhead { factor, step, choice: if weighed { choice } else { replay.host.choice }, token };
    }
    let fit = best.map_or(OverheadFit { host, worst: f64::INFINITY }, |(fit, _)| fit);
    if fit.host.factor < MIN_FITTED_FACTOR {
        usage!(
            "--served: what servers took does not follow --cost at all; measure both on one machine, at loads further apart"
        );
    }
    Ok(fit)
}

/// Whether any measured schedule weighs costs.
pub fn weighs_costs(served: &[ServedThroughput]) -> bool {
    served.iter().any(|served| served.schedule.reads_cost())
}
