//! Arguments of `split`.

use std::path::PathBuf;

use super::roles::{self, RoleTarget};

/// Arguments of `split`.
#[derive(clap::Args)]
pub struct Args {
    /// Conversations of ShareGPT (`from`/`value`) or OpenAI (`role`/`content`) form. A .parquet, .jsonl or .json file (text
    /// also as .gz or .zst), or a folder of them. Also a dataset's id on the hub, or a mix of several as MIX.yaml
    #[arg(long, value_name = "ID|FILE|MIX.yaml")]
    pub dataset: String,
    /// Branch, tag or commit of a dataset on the hub
    #[arg(long, value_name = "R")]
    pub revision: Option<String>,
    /// Configuration of a dataset on the hub
    #[arg(long, value_name = "C")]
    pub config_name: Option<String>,
    /// Split of a dataset on the hub
    #[arg(long, value_name = "S")]
    pub split: Option<String>,
    /// Where the training conversations go; rejected rows go beside it, to F.rejected.jsonl, the accounts to F.report.json
    #[arg(long, value_name = "F")]
    pub train_output: PathBuf,
    /// Where the held-out prompts go, as lists of the user's turns
    #[arg(long, value_name = "F")]
    pub eval_output: PathBuf,
    /// Fraction of the rows that is held out
    #[arg(long, value_name = "FRACTION", default_value_t = 0.05)]
    pub test_size: f64,
    /// Decides which rows are drawn and which are held out
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Draw this many rows first and leave the others out
    #[arg(long, value_name = "N")]
    pub sample_size: Option<usize>,
    /// Role of a speaker's messages: system, user, assistant, tool or drop; may be repeated
    #[arg(long, value_name = "SPEAKER=ROLE", value_parser = roles::parse_speaker_role)]
    pub role: Vec<(String, RoleTarget)>,
    /// Leave out system messages
    #[arg(long)]
    pub drop_system: bool,
    /// Keep only the first of the rows with equal system and user messages, blanks aside
    #[arg(long)]
    pub dedup: bool,
    /// Leave out rows whose user messages share a whole turn, or 13 words in a row, with an evaluation suite ({"turns"} JSONL)
    #[arg(long, num_args = 1.., value_name = "FILE")]
    pub decontaminate: Vec<PathBuf>,
    /// Keep training rows whose first user message is that of a held-out row; without this flag they are left out
    #[arg(long)]
    pub allow_overlap: bool,
    /// Replace outputs that exist
    #[arg(long)]
    pub overwrite: bool,
}
