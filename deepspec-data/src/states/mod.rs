//! `states`: hidden states from vLLM servers.

mod agent;
mod check;

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use deepspec_capture::served::ServeCommand;
use deepspec_core::cli::{self, UsageError, Verbosity};
use deepspec_core::recipe::{StateServers, States, check_server_urls};
use deepspec_core::usage;
use deepspec_drafters::Recipe;
use deepspec_hub::{HubError, ModelFiles, model_files};
use deepspec_models::ModelConfig;

/// Subcommands of `states`.
#[derive(clap::Subcommand)]
pub enum Subcommand {
    /// Print the `vllm serve` command that returns the states of a recipe
    VllmCommand(CommandArgs),
    /// Request the states of one prompt and check them
    Check(check::Args),
    /// Send the states of a vLLM server on this machine to machines without a shared disk
    Agent(agent::Args),
}

/// Arguments of `states vllm-command`.
#[derive(clap::Args)]
pub struct CommandArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// GPUs that hold one copy of the target
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    tensor_parallel: u64,
    /// Port of the server
    #[arg(long, default_value_t = 8000)]
    port: u16,
}

/// The recipe of a run.
#[derive(clap::Args)]
struct RecipeArgs {
    /// Recipe of the run; its target, layers and length decide the states
    #[arg(long, value_name = "C")]
    config: PathBuf,
    /// Override a value of the recipe, as in data.max_length=2048
    #[arg(long, value_name = "K=V")]
    set: Vec<String>,
}

impl RecipeArgs {
    /// The recipe; `urls` replace its servers unless they are empty.
    fn load(&self, urls: &[String]) -> anyhow::Result<Recipe> {
        let mut recipe = deepspec_drafters::load_recipe(&self.config, &self.set)?;
        let States { servers, .. } = &mut recipe.data.states;
        let folder = servers.as_ref().and_then(|servers| servers.folder.clone());
        if !urls.is_empty() {
            let urls = check_server_urls(urls.to_vec())
                .map_err(|problem| UsageError(format!("--server {problem}")))?;
            *servers = Some(StateServers { urls, folder });
        }
        Ok(recipe)
    }
}

/// Runs the command.
///
/// # Errors
/// With a usage error, or if a server fails.
pub fn run(command: &Subcommand, verbosity: Verbosity) -> anyhow::Result<()> {
    match command {
        Subcommand::VllmCommand(args) => print_command(args, verbosity),
        Subcommand::Check(args) => check::run(args, verbosity),
        Subcommand::Agent(args) => agent::run(args),
    }
}

fn print_command(args: &CommandArgs, verbosity: Verbosity) -> anyhow::Result<()> {
    let recipe = args.recipe.load(&[])?;
    let target = &recipe.target;
    let dir = model_files(&target.model, target.revision.as_deref(), ModelFiles::Config, verbosity);
    let dir = dir.map_err(HubError::report)?;
    let config = ModelConfig::load_any(&dir)?;
    let layers = config.layers.len();
    if let Some(outside) = target.layer_ids.iter().find(|tap| !tap.is_within(layers)) {
        usage!(
            "target.layer_ids: {} has no layer {outside}; its layers are 0 to {}",
            target.model,
            layers - 1
        );
    }
    let (servers, longest) = (recipe.data.states.servers.as_ref(), recipe.data.max_length);
    let command = ServeCommand {
        tensor_parallel: args.tensor_parallel as usize,
        port: args.port,
        ..ServeCommand::new(target, &dir, layers, servers, longest)?
    };
    writeln!(cli::stdout(), "{command}").context("writing the command")
}
