//! `cache import` and `cache export`: converts from and to the reference's format 2.

use std::io::Write;
use std::path::PathBuf;

use deepspec_capture::cache::{Identity, Reader, ReferenceCache, export as export_cache, remove_cache};
use deepspec_capture::{StatesError, mask_rules};
use deepspec_core::cli::{self, Verbosity};
use deepspec_core::progress::Progress;
use deepspec_core::recipe::TemplateRecipe;
use deepspec_core::usage;
use deepspec_hub::model_dir;
use deepspec_models::{ModelConfig, chat_formats, config_digest, weights_digest};
use deepspec_text::ChatTokenizer;

use super::build::describe_cache;
use super::to_usage_error;

/// Arguments of `cache import`.
#[derive(clap::Args)]
pub struct ImportArgs {
    /// Folder of a format 2 cache
    #[arg(long, value_name = "DIR")]
    from: PathBuf,
    /// Target that it was made with, a folder or a hub id: format 2 does not say which weights and tokenizer those were
    #[arg(long, value_name = "M")]
    model: String,
    /// Revision of a hub id
    #[arg(long, value_name = "R")]
    revision: Option<String>,
    /// System message that conversations without one were given, where it is not that of the chat template
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Folder of the cache to write
    #[arg(long, value_name = "D")]
    output_dir: PathBuf,
    /// Discard a cache or unfinished import that is there
    #[arg(long)]
    overwrite: bool,
}

/// Arguments of `cache export`.
#[derive(clap::Args)]
pub struct ExportArgs {
    /// Folder of the cache
    #[arg(long, value_name = "D")]
    cache_dir: PathBuf,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Name of the target in the manifest, unless the cache was imported; by default its model type
    #[arg(long, value_name = "M")]
    model: Option<String>,
}

/// Runs `cache import`.
///
/// # Errors
/// With a usage error; if the cache is damaged or does not fit the target; or if reading or writing
/// fails.
pub fn import(args: &ImportArgs, verbosity: Verbosity) -> anyhow::Result<()> {
    if !args.from.is_dir() {
        usage!("--from {}: no such folder", args.from.display());
    }
    let reference = ReferenceCache::open(&args.from)?;
    let identity = identity(args, &reference, verbosity)?;
    let dir = &args.output_dir;
    if args.overwrite {
        remove_cache(dir)?;
    }
    let mut progress = Progress::new(verbosity, "samples", reference.len() as u64, 0);
    let manifest =
        reference.import(dir, &identity, || progress.add(1, String::new)).map_err(to_usage_error)?;
    progress.finish();
    Ok(writeln!(cli::stdout(), "{}: {}", dir.display(), describe_cache(&manifest))?)
}

/// The identity of the states, from the format 2 manifest and the target.
fn identity(args: &ImportArgs, reference: &ReferenceCache, verbosity: Verbosity) -> anyhow::Result<Identity> {
    let dir = model_dir(&args.model, args.revision.as_deref(), verbosity).map_err(StatesError::from)?;
    let (config, tokenizer) = (ModelConfig::load(&dir)?, ChatTokenizer::load(&dir)?);
    let (stored, hidden_size) = (reference.number("hidden_size")?, config.hidden_size as usize);
    if stored != hidden_size {
        usage!(
            "--model {}: its hidden size is {hidden_size}, the cache's {stored}; name the target that made it",
            args.model
        );
    }
    let mut template = mask_rules(&TemplateRecipe::Name(reference.text("chat_template")?.to_string()))?;
    if args.system_prompt.is_some() {
        template.default_system = args.system_prompt.clone();
    }
    let model_type = config.raw.get("model_type").and_then(|value| value.as_str());
    Ok(Identity {
        model_type: model_type.unwrap_or_default().to_string(),
        target_config: config_digest(&dir)?,
        target_weights: weights_digest(&dir)?,
        tokenizer: tokenizer.tokenizer_digest().to_string(),
        template: template.digest(&tokenizer, &chat_formats()),
        chat_template: template.name.clone(),
        system_prompt: template.default_system.clone(),
        taps: reference.target_layer_ids()?,
        max_length: reference.number("max_length")?,
        hidden_size,
        vocab_size: config.vocab_size as usize,
    })
}

/// Runs `cache export`.
///
/// # Errors
/// With a usage error; if the cache is damaged or format 2 cannot represent it; or if reading or
/// writing fails.
pub fn export(args: &ExportArgs, verbosity: Verbosity) -> anyhow::Result<()> {
    let ExportArgs { cache_dir, to, model } = args;
    if !cache_dir.is_dir() {
        usage!("--cache-dir {}: no such folder", cache_dir.display());
    }
    let reader = Reader::open(cache_dir)?;
    let model = model.clone().unwrap_or_else(|| reader.manifest().identity.model_type.clone());
    let samples = reader.len();
    let mut progress = Progress::new(verbosity, "samples", samples as u64, 0);
    let written = export_cache(cache_dir, to, &model, || progress.add(1, String::new))?;
    progress.finish();
    if !written {
        tracing::info!("{} is complete; nothing to do", to.display());
    }
    let samples = cli::count(samples, "sample");
    Ok(writeln!(cli::stdout(), "{}: {samples} in format 2", to.display())?)
}
