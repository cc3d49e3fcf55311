//! The rank of a Slurm `srun` task.

use super::{DistributedEnv, RanksError, parse_number};

/// Variable with the step's number of tasks. Only tasks that `srun` started have it.
pub const TASK_COUNT_VARIABLE: &str = "SLURM_STEP_NUM_TASKS";
/// Size of the port range from which steps without `MASTER_PORT` pick their port.
const PORT_COUNT: u32 = 8192;
/// Default start of the system's ephemeral port range.
const FIRST_EPHEMERAL_PORT: u32 = 32_768;
/// Ports below this are for system services.
const FIRST_PORT: u32 = 1024;

/// The task's rank; `None` for the only task of a step without `MASTER_ADDR`, which runs alone.
/// `range` is the ephemeral port range in `/proc/sys/net/ipv4/ip_local_port_range`.
pub fn ranks_from_slurm(
    given: impl Fn(&str) -> Option<String>,
    range: Option<&str>,
) -> Result<Option<DistributedEnv>, RanksError> {
    let need =
        |name| given(name).ok_or(RanksError::Incomplete { present: TASK_COUNT_VARIABLE, absent: name });
    let world_size = parse_number(TASK_COUNT_VARIABLE, &need(TASK_COUNT_VARIABLE)?)?;
    let host = match given("MASTER_ADDR") {
        Some(host) => host,
        None if world_size == 1 => return Ok(None),
        None => {
            let list = need("SLURM_STEP_NODELIST")?;
            first_host(&list).ok_or_else(|| RanksError::Value {
                name: "SLURM_STEP_NODELIST",
                value: list.clone(),
                expected: "a list such as node[01-04], or set MASTER_ADDR".into(),
            })?
        }
    };
    let job: u32 = parse_number("SLURM_JOB_ID", &need("SLURM_JOB_ID")?)?;
    let step: u32 = parse_number("SLURM_STEP_ID", &need("SLURM_STEP_ID")?)?;
    let port = match given("MASTER_PORT") {
        Some(port) => parse_number("MASTER_PORT", &port)?,
        None => rendezvous_port(job, step, range),
    };
    Ok(Some(DistributedEnv {
        rank: parse_number("SLURM_PROCID", &need("SLURM_PROCID")?)?,
        world_size,
        local_rank: parse_number("SLURM_LOCALID", &need("SLURM_LOCALID")?)?,
        host,
        port,
        is_hosted: false,
        job: format!("slurm_{job}.{step}"),
        attempt: 0,
    }))
}

/// Rendezvous port of a job step. Steps of one job have different ports, and two jobs rarely share
/// a port. The port is below the ephemeral ports, any of which may be in use.
fn rendezvous_port(job: u32, step: u32, range: Option<&str>) -> u16 {
    // Every rank computes the port itself, so all machines of a job must have the same range.
    let floor = range.and_then(|range| range.split_whitespace().next()?.parse().ok());
    // If the range leaves no space below it, any port may be in use, and the default applies.
    let end = floor
        .filter(|floor| (FIRST_PORT + PORT_COUNT..FIRST_EPHEMERAL_PORT).contains(floor))
        .unwrap_or(FIRST_EPHEMERAL_PORT);
    // Knuth's multiplicative hash: the highest bits of neighbouring job ids differ.
    let spread = job.wrapping_mul(2_654_435_761) / (u32::MAX / PORT_COUNT + 1);
    (end - 1 - spread.wrapping_add(step) % PORT_COUNT) as u16
}

/// The first host of a Slurm list: `a` of `a,b`, `a01` of `a[01-04,07],b`, `a1b1` of
/// `a[1-2]b[1-3]`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(open) = rest.find(['[', ',']) {
        host.push_str(&rest[..open]);
        if rest[open..].starts_with(',') {
            return Some(host).filter(|host| !host.is_empty());
        }
        let (range, after) = rest[open + 1..].split_once(']')?;
        host.push_str(range.split([',', '-']).next()?);
        rest = after;
    }
    host.push_str(rest);
    Some(host).filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn steps_have_ports_of_their_own_below_those_of_connections() {
        let ports: BTreeSet<u16> = (0..1000).map(|step| rendezvous_port(123_456, step, None)).collect();
        assert_eq!(ports.len(), 1000);
        let jobs: BTreeSet<u16> = (123_000..123_100).map(|job| rendezvous_port(job, 0, None)).collect();
        assert_eq!(jobs.len(), 100);
        for (range, within) in [
            (None, 24_576..32_768),
            (Some("32768\t60999\n"), 24_576..32_768),
            (Some("40000 60999"), 24_576..32_768),
            (Some("15000 65000"), 6_808..15_000),
            // These ranges leave no space below them.
            (Some("1024 65535"), 24_576..32_768),
            (Some("what"), 24_576..32_768),
        ] {
            for (job, step) in [(0, 0), (u32::MAX, u32::MAX), (1, 8191), (7, 70_000)] {
                let port = rendezvous_port(job, step, range);
                assert!(within.contains(&port), "{range:?}: {port}");
            }
        }
    }

    #[test]
    fn the_first_host_of_a_list_is_found() {
        for (list, host) in
            [("a", "a"), ("a,b", "a"), ("a[01-04,07],b", "a01"), ("a[1-2]b[3-4]", "a1b3"), ("n[5,7]", "n5")]
        {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        assert_eq!((first_host(""), first_host("a[1")), (None, None));
    }
}
