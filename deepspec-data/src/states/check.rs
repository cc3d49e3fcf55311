//! `states check`: requests the states of one prompt from every server of a recipe.

use std::io::Write;

use anyhow::Context;
use deepspec_capture::cache::PlannedSample;
use deepspec_capture::served::{ServedLimits, ServedTarget};
use deepspec_capture::{StatesError, TargetSpec};
use deepspec_core::cli::{self, Verbosity};
use deepspec_core::usage;
use tch::Device;

use super::RecipeArgs;

/// The prompt of the check.
const PROMPT: &str = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.";

/// Arguments of `states check`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Server to check, in place of those of the recipe; may be repeated
    #[arg(long, value_name = "URL")]
    server: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// If a server cannot be reached, or its states are not those of the recipe's target.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let recipe = args.recipe.load(&args.server)?;
    let Some(servers) = &recipe.data.states.servers else {
        usage!("{} names no server; give --server URL", args.recipe.config.display());
    };
    let spec = TargetSpec::open(&recipe, verbosity).map_err(StatesError::report)?;
    let ids = spec.tokenizer.encode(PROMPT)?;
    let ids: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
    for url in &servers.urls {
        let one =
            deepspec_core::recipe::StateServers { urls: vec![url.clone()], folder: servers.folder.clone() };
        let longest = recipe.data.max_length;
        let mut target = ServedTarget::connect(&spec, &one, longest, Device::Cpu, ServedLimits::default())?;
        let length = ids.len() as u32;
        target.submit(PlannedSample { id: "check".into(), input_ids: ids.clone(), spans: vec![(0, length)] });
        let states = target.next_states()?.context("the server returned no states")?;
        writeln!(
            cli::stdout(),
            "{url}: {} tokens, {} layers of {} values; the head gives the server's log-probability. {}",
            ids.len(),
            spec.identity.taps.len(),
            states.last.size()[1],
            target.describe()
        )?;
    }
    Ok(())
}
