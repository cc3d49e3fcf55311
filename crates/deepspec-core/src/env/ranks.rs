//! The rank of a process in a job, from the variables of torchrun or Slurm.

pub(super) mod slurm;

use std::env::var_os;
use std::str::FromStr;

/// Rank, world size and rendezvous address of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DistributedEnv {
    /// Rank of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Rank of this process on its machine.
    pub local_rank: usize,
    /// Host of the rendezvous store.
    pub host: String,
    /// Port of the rendezvous store.
    pub port: u16,
    /// Whether the launcher hosts the store; otherwise rank 0 does.
    pub is_hosted: bool,
    /// Prefix of the rendezvous keys, which keeps other jobs on the machine out of the store. Empty
    /// if the port belongs to this job alone.
    pub job: String,
    /// Number of restarts by the launcher.
    pub attempt: usize,
}

/// Invalid variables of a launcher.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum RanksError {
    /// Some variables are set, but one is not.
    #[error(
        "{present} is set but {absent} is not; start the processes with torchrun or srun, or unset {present}"
    )]
    Incomplete {
        /// A variable that is set.
        present: &'static str,
        /// A variable that is missing.
        absent: &'static str,
    },
    /// The value is no number or is out of range.
    #[error("{name}={value}: expected {expected}")]
    Value {
        /// The variable.
        name: &'static str,
        /// The value found.
        value: String,
        /// The value expected.
        expected: String,
    },
}

impl DistributedEnv {
    /// torchrun's variables for a child process. The launcher hosts the store if `is_hosted`.
    pub fn variables(&self) -> [(&'static str, String); 7] {
        [
            ("RANK", self.rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_RANK", self.local_rank.to_string()),
            ("MASTER_ADDR", self.host.clone()),
            ("MASTER_PORT", self.port.to_string()),
            (AGENT_STORE_VARIABLE, if self.is_hosted { "True" } else { "False" }.into()),
            (RESTART_COUNT_VARIABLE, self.attempt.to_string()),
        ]
    }
}

/// Whether the user has set the number of threads per process by `OMP_NUM_THREADS`.
pub fn has_thread_count() -> bool {
    var_os(OMP_THREADS_VARIABLE).is_some_and(|value| !value.is_empty())
}

/// Environment variable for the number of threads per process.
pub const OMP_THREADS_VARIABLE: &str = "OMP_NUM_THREADS";
const AGENT_STORE_VARIABLE: &str = "TORCHELASTIC_USE_AGENT_STORE";
const RESTART_COUNT_VARIABLE: &str = "TORCHELASTIC_RESTART_COUNT";

pub(super) fn ranks_from_torchrun(
    given: impl Fn(&str) -> Option<String>,
) -> Result<DistributedEnv, RanksError> {
    let need = |name| given(name).ok_or(RanksError::Incomplete { present: "RANK", absent: name });
    Ok(DistributedEnv {
        rank: parse_number("RANK", &need("RANK")?)?,
        world_size: parse_number("WORLD_SIZE", &need("WORLD_SIZE")?)?,
        local_rank: parse_number("LOCAL_RANK", &need("LOCAL_RANK")?)?,
        host: need("MASTER_ADDR")?,
        port: parse_number("MASTER_PORT", &need("MASTER_PORT")?)?,
        job: String::new(),
        is_hosted: given(AGENT_STORE_VARIABLE).is_some_and(|value| value.eq_ignore_ascii_case("true")),
        attempt: given(RESTART_COUNT_VARIABLE)
            .map_or(Ok(0), |value| parse_number(RESTART_COUNT_VARIABLE, &value))?,
    })
}

fn parse_number<T: FromStr>(name: &'static str, value: &str) -> Result<T, RanksError> {
    let expected = || "a number in range".to_string();
    value.trim().parse().map_err(|_| RanksError::Value { name, value: value.into(), expected: expected() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::ranks_from;

    fn with(variables: &[(&str, &str)]) -> Result<Option<DistributedEnv>, RanksError> {
        let read =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
        ranks_from(read, || None)
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node-0"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn torchruns_variables_are_read_and_written() {
        let ranks = with(&TORCHRUN).unwrap().unwrap();
        let expected = DistributedEnv {
            rank: 3,
            world_size: 4,
            local_rank: 1,
            host: "node-0".into(),
            port: 29500,
            is_hosted: false,
            job: String::new(),
            attempt: 0,
        };
        assert_eq!(ranks, expected);
        let hosted = DistributedEnv { is_hosted: true, attempt: 2, ..expected };
        let variables = hosted.variables();
        let written: Vec<(&str, &str)> =
            variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(with(&written), Ok(Some(hosted)));
    }

    #[test]
    fn a_step_of_slurm_is_read_and_its_batch_script_is_alone() {
        let step = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_NODELIST", "gpu[03-04,09],big1"),
            ("SLURM_JOB_ID", "123456"),
            ("SLURM_STEP_ID", "0"),
        ];
        let ranks = with(&step).unwrap().unwrap();
        assert_eq!((ranks.rank, ranks.world_size, ranks.local_rank), (5, 8, 1));
        assert_eq!((ranks.host.as_str(), ranks.job.as_str()), ("gpu03", "slurm_123456.0"));
        let next = with(&[&[("SLURM_STEP_ID", "1")][..], &step[..5]].concat()).unwrap().unwrap();
        assert!(next.port != ranks.port && next.job != ranks.job, "{next:?}");
        let own = [&step[..], &[("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "4000")]].concat();
        let ranks = with(&own).unwrap().unwrap();
        assert_eq!((ranks.host.as_str(), ranks.port), ("10.0.0.1", 4000));
        assert_eq!(with(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]), Ok(None));
        // The only task of a step may start its own processes on all GPUs, unless MASTER_ADDR is
        // set.
        let only = [&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")][..], &step[2..]].concat();
        assert_eq!(with(&only), Ok(None));
        let placed = with(&[&only[..], &[("MASTER_ADDR", "10.0.0.1")]].concat()).unwrap().unwrap();
        assert_eq!((placed.rank, placed.world_size), (0, 1));
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |variables: &[(&str, &str)], hint: &str| {
            let error = with(variables).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        };
        wrong(&TORCHRUN[..4], "MASTER_PORT is not");
        wrong(&[("RANK", "0")], "WORLD_SIZE is not");
        wrong(&[("RANK", "four")], "RANK=four");
        wrong(&[&[("RANK", "4")][..], &TORCHRUN[1..]].concat(), "RANK=4");
        wrong(&[&[("MASTER_PORT", "70000")][..], &TORCHRUN[..4]].concat(), "MASTER_PORT=70000");
        wrong(&[("SLURM_STEP_NUM_TASKS", "2")], "SLURM_STEP_NODELIST");
    }
}
