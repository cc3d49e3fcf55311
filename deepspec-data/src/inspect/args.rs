//! Arguments of `inspect` and `draft-vocab`.

use std::path::PathBuf;

/// Arguments that decide which tokens of a row are supervised.
#[derive(clap::Args)]
pub struct MaskArgs {
    /// JSONL rows of conversations, plain, .gz or .zst
    #[arg(long, required = true, num_args = 1.., value_name = "F")]
    pub input: Vec<PathBuf>,
    /// Folder, GGUF file or hub id of the target, for its tokenizer and chat template; by default the recipe's
    #[arg(long, value_name = "M", required_unless_present = "config")]
    pub model: Option<String>,
    /// Recipe of the run; its chat_template, system_prompt and max_length decide the mask
    #[arg(long, value_name = "C")]
    pub config: Option<PathBuf>,
    /// Override a key of the recipe, such as data.max_length=2048; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "config")]
    pub overrides: Vec<String>,
    /// Mask rules without a recipe: qwen, qwen2.5, gemma3, gemma4, llama3, mistral, granite, phi4, harmony,
    /// generation (the template's tags). Also a YAML file with an entry. By default the rules whose marks the template writes
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "config")]
    pub chat_template: Option<String>,
    /// Tokens at which a row is cut, by default the recipe's, else 4096
    #[arg(long, value_name = "N")]
    pub max_length: Option<usize>,
}

/// Arguments of `inspect`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub mask: MaskArgs,
    /// Show this many rows, the first ones; all rows are checked
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub limit: usize,
    /// Show the rows with these ids instead
    #[arg(long, num_args = 1.., value_name = "ID", conflicts_with = "limit")]
    pub id: Vec<String>,
    /// Show every row
    #[arg(long, conflicts_with_all = ["limit", "id"])]
    pub all: bool,
    /// Write the rows and the findings to an HTML page
    #[arg(long, value_name = "F")]
    pub html: Option<PathBuf>,
    /// Print rows, findings and summary as one JSON object
    #[arg(long)]
    pub json: bool,
    /// Also compare prompts with those of a running server that can say how it renders them (vLLM's /tokenize)
    #[arg(long, value_name = "URL")]
    pub server: Option<String>,
    /// Replace an HTML file that is there
    #[arg(long)]
    pub overwrite: bool,
}
