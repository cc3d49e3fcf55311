//! `cache inspect`: shows the contents of a cache or of a sample.

use std::io::Write;

use deepspec_capture::cache::{Inspection, Manifest, Reader, TensorSummary};
use deepspec_core::Tap;
use deepspec_core::{cli, usage};
use serde_json::{Value, json};

use super::{CacheDirArgs, mib};

/// Maximum number of token ids shown of a sample; `--json` shows all.
const MAX_SHOWN_IDS: usize = 16;

/// Arguments of `cache inspect`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: CacheDirArgs,
    /// Look at the sample with this id, else at the one with this index (from 0)
    #[arg(long, value_name = "ID|INDEX")]
    sample: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// If there is no cache, no such sample, or the bytes are damaged.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let dir = args.place.dir()?;
    let Some(wanted) = &args.sample else {
        let manifest = Manifest::read(dir)?;
        return match args.json {
            true => print_json(&serde_json::to_value(&manifest)?),
            false => print(&summarize(&manifest)),
        };
    };
    let reader = Reader::open(dir)?;
    let index =
        reader.index_of_id(wanted).or_else(|| wanted.parse().ok().filter(|&index| index < reader.len()));
    let Some(index) = index else {
        let last = reader.len().saturating_sub(1);
        usage!("--sample {wanted}: {} has no such id, and its indices are 0 to {last}", dir.display());
    };
    let sample = reader.sample(index)?;
    let (inspection, ids) = (deepspec_capture::cache::inspect(&sample)?, sample.input_ids);
    match args.json {
        true => print_json(&sample_json(index, &inspection, ids)),
        false => print(&sample_text(index, &inspection, ids)),
    }
}

fn print(text: &str) -> anyhow::Result<()> {
    Ok(writeln!(cli::stdout(), "{text}")?)
}

fn print_json(value: &Value) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}

fn summarize(manifest: &Manifest) -> String {
    let Manifest { tool, identity, encoding, last, counts, shards, .. } = manifest;
    let short = |digest: &str| digest.chars().take(16).collect::<String>();
    let taps: Vec<String> = identity.taps.iter().map(Tap::to_string).collect();
    let system = identity.system_prompt.as_ref().map_or("none".to_string(), |prompt| format!("{prompt:?}"));
    let lines = [
        format!(
            "target      {}, hidden size {}, vocabulary {}, config {}, weights {}",
            identity.model_type,
            identity.hidden_size,
            identity.vocab_size,
            short(&identity.target_config),
            short(&identity.target_weights)
        ),
        format!(
            "text        template {} {}, tokenizer {}, system prompt {system}, at most {} tokens",
            identity.chat_template,
            short(&identity.template),
            short(&identity.tokenizer),
            identity.max_length
        ),
        format!("states      taps [{}], last hidden states of {last} tokens, {encoding}", taps.join(", ")),
        format!(
            "samples     {}, {} tokens, {} of them supervised",
            counts.samples, counts.tokens, counts.supervised_tokens
        ),
        format!(
            "files       {}, {}, written by {tool}",
            cli::count(shards.len(), "shard"),
            mib(manifest.bytes())
        ),
    ];
    lines.join("\n")
}

fn sample_text(index: usize, inspection: &Inspection, ids: &[i32]) -> String {
    let Inspection { id, shard, length, supervised, spans, tensors } = inspection;
    let shown: Vec<String> = ids.iter().take(MAX_SHOWN_IDS).map(i32::to_string).collect();
    let more = if ids.len() > MAX_SHOWN_IDS { " …" } else { "" };
    let spans: Vec<String> = spans.iter().map(|(start, end)| format!("{start}..{end}")).collect();
    let mut lines = vec![
        format!("sample      {id:?}, index {index}, shard {shard}"),
        format!("tokens      {length}: {}{more}", shown.join(" ")),
        format!("supervised  {supervised}: {}", spans.join(" ")),
        format!(
            "{:<20} {:>6} {:>12} {:>12} {:>11}",
            "states", "rows", "mean norm", "max |value|", "NaN or inf"
        ),
    ];
    lines.extend(tensors.iter().map(|tensor| {
        let TensorSummary { part, rows, mean_norm, max_abs, non_finite } = tensor;
        format!("{:<20} {rows:>6} {mean_norm:>12.4} {max_abs:>12.4} {non_finite:>11}", part.to_string())
    }));
    lines.join("\n")
}

fn sample_json(index: usize, inspection: &Inspection, ids: &[i32]) -> Value {
    let tensors: Vec<Value> = inspection
        .tensors
        .iter()
        .map(|TensorSummary { part, rows, mean_norm, max_abs, non_finite }| {
            json!({
                "states": part.to_string(), "rows": rows, "mean_norm": mean_norm, "max_abs": max_abs,
                "non_finite": non_finite,
            })
        })
        .collect();
    json!({
        "id": inspection.id, "index": index, "shard": inspection.shard, "length": inspection.length,
        "supervised": inspection.supervised, "spans": inspection.spans, "input_ids": ids, "tensors": tensors,
    })
}
