//! A process's place among those of a job, as torchrun or Slurm tell it.

pub(super) mod slurm;

use std::env::var_os;
use std::str::FromStr;

/// The place of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks {
    /// This process, from 0.
    pub rank: usize,
    /// All processes.
    pub world_size: usize,
    /// This process among those of its machine.
    pub local_rank: usize,
    /// Host at which all processes meet.
    pub host: String,
    /// Port at which they meet.
    pub port: u16,
    /// Whether whoever launched them holds the meeting place; else rank 0 does.
    pub is_hosted: bool,
    /// Which job of the machine's they are, so that strays of another do not meet here; empty where the port is theirs alone.
    pub job: String,
    /// Which try of the job this is, where a launcher starts it again.
    pub attempt: usize,
}

/// A launcher's variables that make no sense.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum RanksError {
    /// Some are there, one is not.
    #[error(
        "{present} is set but {absent} is not; start the processes with torchrun or srun, or unset {present}"
    )]
    Incomplete {
        /// A variable that is set.
        present: &'static str,
        /// One that is missing.
        absent: &'static str,
    },
    /// Not a number, or too large.
    #[error("{name}={value}: expected {expected}")]
    Value {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// What it should hold.
        expected: String,
    },
}

impl Ranks {
    /// The variables that tell a child process its place: torchrun's, with the meeting place held by the launcher.
    pub fn variables(&self) -> [(&'static str, String); 7] {
        [
            ("RANK", self.rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_RANK", self.local_rank.to_string()),
            ("MASTER_ADDR", self.host.clone()),
            ("MASTER_PORT", self.port.to_string()),
            (AGENT_STORE, if self.is_hosted { "True" } else { "False" }.into()),
            (RESTART_COUNT, self.attempt.to_string()),
        ]
    }
}

/// `OMP_NUM_THREADS`: whether the user has said how many threads a process takes.
pub fn has_thread_count() -> bool {
    var_os(THREADS).is_some_and(|value| !value.is_empty())
}

/// The variable behind [`has_thread_count`], to be set for child processes.
pub const THREADS: &str = "OMP_NUM_THREADS";
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";

pub(super) fn torchrun(given: impl Fn(&str) -> Option<String>) -> Result<Ranks, RanksError> {
    let need = |name| given(name).ok_or(RanksError::Incomplete { present: "RANK", absent: name });
    Ok(Ranks {
        rank: number("RANK", &need("RANK")?)?,
        world_size: number("WORLD_SIZE", &need("WORLD_SIZE")?)?,
        local_rank: number("LOCAL_RANK", &need("LOCAL_RANK")?)?,
        host: need("MASTER_ADDR")?,
        port: number("MASTER_PORT", &need("MASTER_PORT")?)?,
        job: String::new(),
        is_hosted: given(AGENT_STORE).is_some_and(|value| value.eq_ignore_ascii_case("true")),
        attempt: given(RESTART_COUNT).map_or(Ok(0), |value| number(RESTART_COUNT, &value))?,
    })
}

fn number<T: FromStr>(name: &'static str, value: &str) -> Result<T, RanksError> {
    let expected = || "a number in range".to_string();
    value.trim().parse().map_err(|_| RanksError::Value { name, value: value.into(), expected: expected() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::ranks_from;

    fn with(variables: &[(&str, &str)]) -> Result<Option<Ranks>, RanksError> {
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
        let expected = Ranks {
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
        let hosted = Ranks { is_hosted: true, attempt: 2, ..expected };
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
        // The only task of a step may use all GPUs by processes of its own, unless somebody says where they meet.
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
