//! `checkpoint inspect`.

use std::collections::BTreeSet;
use std::fmt::Write;

use deepspec_checkpoint::{Checkpoint, CheckpointFormat, Drafter, engine_compatibility, torch_dtype_name};
use deepspec_core::Tap;
use deepspec_core::cli::Verbosity;
use deepspec_drafters::open_checkpoint;
use serde_json::{Value, json};

use super::{model_folder, report};

/// Arguments of `checkpoint inspect`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder or hub id of a drafter checkpoint
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: String,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// Fails if the folder is no drafter checkpoint of a known format.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let checkpoint =
        open_checkpoint(&model_folder("CHECKPOINT", &args.checkpoint, verbosity)?).map_err(report)?;
    let text = if args.json {
        serde_json::to_string_pretty(&as_json(&checkpoint))? + "\n"
    } else {
        as_text(&checkpoint)
    };
    Ok(crate::output::print(&text)?)
}

/// Parameter counts of the trained tensors, and of the tensors copied from the target.
fn count_parameters(checkpoint: &Checkpoint) -> (usize, usize) {
    let (mut trained, mut targets) = (0, 0);
    for (name, facts) in checkpoint.tensors().iter() {
        let values: usize = facts.shape.iter().product();
        *if checkpoint.is_target_tensor(name) { &mut targets } else { &mut trained } += values;
    }
    (trained, targets)
}

/// All formats that a conversion could write, each with the reason if it is refused. For a
/// checkpoint without embedding and LM head the present format is also listed, because a conversion
/// to it adds both.
fn possible_conversions(checkpoint: &Checkpoint) -> Vec<(CheckpointFormat, Option<String>)> {
    let own = checkpoint.format();
    let others = CheckpointFormat::ALL
        .into_iter()
        .filter(|&format| format != own || checkpoint.lacks_embed_and_head());
    others.map(|to| (to, checkpoint.refusal(to))).collect()
}

fn as_json(checkpoint: &Checkpoint) -> Value {
    let drafter = checkpoint.drafter();
    let (trained, targets) = count_parameters(checkpoint);
    let tensors: Vec<Value> = checkpoint
        .tensors()
        .iter()
        .map(|(name, facts)| json!({"name": name, "dtype": facts.dtype, "shape": facts.shape, "bytes": facts.bytes}))
        .collect();
    let conversions: Vec<Value> = possible_conversions(checkpoint)
        .into_iter()
        .map(|(to, refusal)| json!({"to": to, "refused": refusal}))
        .collect();
    json!({
        "dialect": checkpoint.format(),
        "architecture": drafter.architecture,
        "algorithm": drafter.kind.name(),
        "family": drafter.family,
        "design": drafter.kind.to_json(),
        "attention_sinks": drafter.has_attention_sinks(),
        "drafted_tokens": drafter.kind.draft_len(),
        "layers": drafter.layers,
        "hidden_size": drafter.hidden_size,
        "vocab_size": drafter.vocab_size,
        "draft_vocab_size": drafter.draft_vocab_size,
        "target_layer_ids": Tap::layer_ids(&drafter.taps),
        "aux_layer_ids": drafter.aux_layer_ids(),
        "num_target_layers": drafter.num_target_layers,
        "parameters": {"trained": trained, "target": targets},
        "problem": checkpoint.check().err().map(|error| error.to_string()),
        "obstacles": drafter.incompatibilities,
        "conversions": conversions,
        "loaders": engine_compatibility(checkpoint),
        "tensors": tensors,
    })
}

/// Text about the hidden states that the drafter reads.
fn tapped_layers(drafter: &Drafter) -> String {
    if drafter.taps.is_empty() && drafter.kind.reads_layers() {
        return "not named: the default layers of the target".into();
    }
    if drafter.taps.is_empty() {
        return "none: it reads the final states".into();
    }
    let of = drafter.num_target_layers.map_or_else(String::new, |layers| format!(" of {layers}"));
    format!(
        "outputs of layers {:?}{of} (as speculators and vLLM count: {:?})",
        Tap::layer_ids(&drafter.taps),
        drafter.aux_layer_ids()
    )
}

fn as_text(checkpoint: &Checkpoint) -> String {
    let drafter = checkpoint.drafter();
    let mut text = String::new();
    let mut line = |what: &str, value: String| {
        let _ = writeln!(text, "{what:<12}{value}");
    };
    line("format", format!("{} ({})", checkpoint.format(), drafter.architecture));
    let (algorithm, layers) = (drafter.kind.title(), drafter.kind.layers_text(drafter));
    let (width, vocab) = (drafter.hidden_size, drafter.vocab_size);
    line("drafter", format!("{algorithm}, {layers}, hidden size {width}, vocabulary {vocab}"));
    if drafter.draft_vocab_size != vocab {
        line("vocabulary", format!("reduced to {} tokens (d2t)", drafter.draft_vocab_size));
    }
    drafter.kind.lines().into_iter().for_each(|(what, value)| line(what, value));
    if drafter.has_attention_sinks() {
        line("attention", "with a sink for each query head".into());
    }
    line("taps", tapped_layers(drafter));
    let (trained, targets) = count_parameters(checkpoint);
    let dtypes: BTreeSet<String> =
        checkpoint.tensors().iter().map(|(_, facts)| torch_dtype_name(facts.dtype)).collect();
    let dtypes = dtypes.into_iter().collect::<Vec<_>>().join(", ");
    line("parameters", format!("{trained} trained, {targets} copied from the target ({dtypes})"));
    if let Err(error) = checkpoint.check() {
        line("problem", error.to_string());
    }
    if checkpoint.lacks_embed_and_head() {
        line("for engines", "embedding and head are left to the target".into());
    }
    for (to, refusal) in possible_conversions(checkpoint) {
        line(
            "converts",
            format!("to {to}: {}", refusal.map_or_else(|| "yes".into(), |reason| format!("no, {reason}"))),
        );
    }
    for compatibility in engine_compatibility(checkpoint) {
        let loads = if compatibility.loads { "loads it" } else { "does not load it" };
        let how = compatibility.tried.map_or("by its sources".into(), |version| format!("{version}, tried"));
        line("engine", format!("{} ({how}) {loads}: {}", compatibility.engine, compatibility.note));
    }
    for (name, facts) in checkpoint.tensors().iter() {
        line("tensor", format!("{name} {:?} {}", facts.shape, torch_dtype_name(facts.dtype)));
    }
    text
}
