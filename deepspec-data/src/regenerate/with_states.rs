//! `--with-states`: the hidden states that vLLM returns with the answers.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use deepspec_capture::served::AnswerStates;
use deepspec_core::atomic::{self, FileError};
use deepspec_core::env;
use deepspec_core::recipe::DEFAULT_STATES_FOLDER;
use deepspec_core::usage;
use serde_json::Value;

use super::ids::IdSet;
use super::settings::{RequestSettings, WORKER};

/// File in the folder of states with the settings of its answers.
const RECORD_FILE: &str = "regenerate.json";

/// Whether hidden states are stored with the answers, and where.
#[derive(clap::Args)]
pub struct StatesArgs {
    /// Store the hidden states of prompts and answers in this folder; `cache build` with data.states: {cache: D, answers: DIR}
    /// takes them from there. The servers are vLLM's with its hidden-states connector (`states vllm-command`)
    #[arg(long, value_name = "DIR", conflicts_with_all = ["local_model", "reuse"])]
    with_states: Option<PathBuf>,
    /// Folder in which these servers leave their files, under the path that they have for it
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATES_FOLDER, requires = "with_states")]
    states_folder: String,
}

impl StatesArgs {
    /// The folder of the stored states, if they are wanted.
    pub fn stored(&self) -> Option<AnswerStates> {
        self.with_states.clone().map(AnswerStates::new)
    }

    /// The folder of the servers' files, if states are wanted.
    pub fn servers_folder(&self) -> Option<PathBuf> {
        self.with_states.as_ref().map(|_| env::expand_home(&self.states_folder))
    }
}

/// Checks that the rows that an earlier run answered have their states.
///
/// # Errors
/// With a usage error that counts the rows without states.
pub fn check_answered(states: &AnswerStates, answered: &IdSet) -> anyhow::Result<()> {
    let missing = answered.fingerprints().filter(|&fingerprint| !states.contains(fingerprint)).count();
    if missing > 0 {
        usage!(
            "--with-states {}: {missing} of {} answered rows have no states there; name the folder of the earlier run, or --overwrite to start anew",
            states.dir().display(),
            answered.len()
        );
    }
    Ok(())
}

/// Creates the folder of states for answers of these settings.
///
/// # Errors
/// With a usage error if it has states of answers with other settings.
pub fn open_folder(states: &AnswerStates, settings: &RequestSettings) -> anyhow::Result<()> {
    let record = states.dir().join(RECORD_FILE);
    if !record.exists() {
        atomic::create_dir(states.dir())?;
        // Workers that start together each link a file of their own; the first one stays.
        let own = states.dir().join(format!("{RECORD_FILE}.{}", std::process::id()));
        atomic::write_json(&own, &settings.record())?;
        let linked = fs::hard_link(&own, &record);
        let removed = fs::remove_file(&own);
        if !record.exists() {
            linked.and(removed).map_err(FileError::at("writing", &record))?;
        }
    }
    let text = atomic::read_text(&record)?;
    let earlier: Value =
        serde_json::from_str(&text).with_context(|| format!("{}: not valid JSON", record.display()))?;
    let mut differing = settings.differing_settings(&earlier);
    // Workers share a folder.
    differing.retain(|name| name != WORKER);
    if !differing.is_empty() {
        usage!(
            "--with-states {}: it has the states of answers with other settings ({}); give another folder",
            states.dir().display(),
            differing.join(", ")
        );
    }
    Ok(())
}
