//! Runs trials on the captured answers, one for each possible cause.

use deepspec_core::Tap;
use deepspec_drafters::DrafterProbe;
use deepspec_models::{ModelConfig, TargetModel};
use deepspec_text::ChatTokenizer;
use serde_json::Value;

use super::capture::CapturedStates;
use super::finding;
use super::report::{Cause, Diagnosis, Trial};
use super::score::{DrafterChange, score_change};

/// Mask tokens of released drafters (Qwen3, Gemma 4).
const KNOWN_MASK_IDS: [i64; 2] = [151_669, 4];
/// Maximum number of mask tokens to try.
const MAX_MASK_TRIALS: usize = 24;
/// A difference of mean confidence and mean acceptance above this is reported.
const MIN_CALIBRATION_GAP: f64 = 0.15;

/// Estimates the accepted length of the unchanged drafter, and then once for each applicable trial.
///
/// # Errors
/// Fails if the target's layers cannot attend with the windows of the drafter's layers.
pub fn run_trials(
    report: &mut Diagnosis,
    drafter: &dyn DrafterProbe,
    captured: &CapturedStates,
    target: &TargetModel,
    tokenizer: &ChatTokenizer,
    embed_and_head_differ: bool,
    temperature: f64,
) -> anyhow::Result<()> {
    let judge = |change: &DrafterChange| score_change(drafter, change, captured, target, temperature);
    let Some(base) = judge(&DrafterChange::None)? else {
        report.add_note(
            "the answers are too short for a block: ask for more tokens (--max-new-tokens) or other suites",
        );
        return Ok(());
    };
    let estimated = base.accepted_length();
    report.estimated = Some(estimated);
    report.accept = base.mean_acceptance();
    if let Some((predicted, accepted)) = base.confidence()
        && (predicted - accepted).abs() > MIN_CALIBRATION_GAP
    {
        let evidence =
            format!("the confidence head predicts {predicted:.2} on average, {accepted:.2} is accepted");
        report.findings.push(finding(Cause::Confidence, evidence));
    }
    for (cause, what, change) in
        applicable_trials(drafter, captured, target, tokenizer, embed_and_head_differ)
    {
        if let Some(found) = judge(&change)? {
            let (after, rise) = (found.accepted_length(), found.rise_over(&base));
            report.trials.push(Trial { cause, what, before: estimated, after, rise });
        }
    }
    if let Some(text) = untried(drafter) {
        report.add_note(&text);
    }
    let own = drafter.layers();
    let theirs = &target.config().layers;
    if let (Some(own), Some(theirs)) = (own.first(), theirs.first())
        && rope_differs(drafter, target.config())
    {
        let evidence = format!(
            "rope_theta {} and {}, the target has rope_theta {} and {}",
            own.rope.theta, own.rope.scaling, theirs.rope.theta, theirs.rope.scaling
        );
        report.findings.push(finding(Cause::Rope, evidence));
    }
    Ok(())
}

/// Whether the drafter's RoPE settings differ from the target's.
fn rope_differs(drafter: &dyn DrafterProbe, target: &ModelConfig) -> bool {
    let windows: Vec<Option<usize>> = drafter.layers().iter().map(|layer| layer.attention.window).collect();
    let like = target.anchored_decoder(&windows).map(|like| like.layers).unwrap_or_default();
    drafter.layers().iter().zip(&like).any(|(own, like)| own.rope != like.rope)
}

/// The causes that this kind of drafter cannot have, with reasons; None if it can have all of them.
fn untried(drafter: &dyn DrafterProbe) -> Option<String> {
    let has_blocks = drafter.block_spec().is_some();
    let fixed = |what: &str| {
        let reason = if has_blocks { "this kind has one only" } else { "it drafts no blocks" };
        format!("{what} ({reason})")
    };
    let causes = [
        (drafter.names_taps(), "target layers (its config names none)".into()),
        (drafter.mask_token_id().is_some(), "mask token (it reads none)".into()),
        (drafter.chooses_slots(), fixed("slot convention")),
        (drafter.may_be_causal(), fixed("attention within a block")),
        (drafter.embed_and_head().is_some(), "embedding and head (it has no copies of the target's)".into()),
    ];
    let untried: Vec<String> =
        causes.into_iter().filter(|(applies, _)| !applies).map(|(_, cause)| cause).collect();
    (!untried.is_empty()).then(|| format!("not tried: {}", untried.join(", ")))
}

fn applicable_trials(
    drafter: &dyn DrafterProbe,
    captured: &CapturedStates,
    target: &TargetModel,
    tokenizer: &ChatTokenizer,
    embed_and_head_differ: bool,
) -> Vec<(Cause, String, DrafterChange)> {
    let mut found = vec![];
    let taps = drafter.taps();
    for by in [-1, 1].into_iter().filter(|_| drafter.names_taps()) {
        let shifted: Option<Vec<Tap>> = taps.iter().map(|tap| tap.shifted_by(by)).collect();
        let is_captured = |shifted: &Vec<Tap>| !shifted.is_empty() && captured.has_layers(shifted);
        if let Some(shifted) = shifted.filter(is_captured) {
            let ids = Tap::layer_ids;
            let what = format!("target_layer_ids {:?} instead of {:?}", ids(&shifted), ids(taps));
            found.push((Cause::Taps, what, DrafterChange::Taps(shifted)));
        }
    }
    if captured.includes_last_layer(taps) {
        let what = "the last layer's state taken after the final norm".into();
        found.push((Cause::FinalNorm, what, DrafterChange::FinalNorm));
    }
    if let Some(own) = drafter.mask_token_id() {
        for id in candidate_mask_ids(target.config(), tokenizer).into_iter().filter(|&id| id != own) {
            found.push((
                Cause::MaskToken,
                format!("mask_token_id {id} instead of {own}"),
                DrafterChange::Mask(id),
            ));
        }
    }
    if let Some(blocks) = drafter.block_spec() {
        if drafter.chooses_slots() {
            let other = blocks.slots.other_convention();
            found.push((Cause::Slots, format!("the other convention: {other}"), DrafterChange::Slots(other)));
        }
        if drafter.may_be_causal() {
            let what = match blocks.causal {
                true => "slots that see their whole block",
                false => "slots that see only those before them",
            };
            found.push((Cause::BlockMask, what.into(), DrafterChange::Causal(!blocks.causal)));
        }
    }
    if rope_differs(drafter, target.config()) {
        found.push((Cause::Rope, "the target's RoPE settings".into(), DrafterChange::Rope));
    }
    if embed_and_head_differ {
        found.push((
            Cause::EmbedAndHead,
            "the target's embedding and head".into(),
            DrafterChange::EmbedAndHead,
        ));
    }
    found
}

/// Candidates for the mask token: ids that the target's config names, special tokens, and unused
/// ids.
fn candidate_mask_ids(config: &ModelConfig, tokenizer: &ChatTokenizer) -> Vec<i64> {
    let vocab = config.vocab_size;
    let text = config.raw.get("text_config").and_then(Value::as_object).unwrap_or(&config.raw);
    let named = ["mask_token_id", "pad_token_id", "unk_token_id", "bos_token_id", "eos_token_id"]
        .into_iter()
        .filter_map(|key| text.get(key).and_then(Value::as_i64));
    let words =
        ["<|mask|>", "<mask>", "[MASK]", "<|MASK|>"].into_iter().filter_map(|word| tokenizer.token_id(word));
    let unused = tokenizer.vocab_size() as i64;
    let special = (0..unused).rev().filter(|&id| tokenizer.is_special(id));
    let mut found: Vec<i64> = vec![];
    for id in words.chain([vocab - 1, unused, unused + 1]).chain(KNOWN_MASK_IDS).chain(named).chain(special) {
        if (0..vocab).contains(&id) && !found.contains(&id) && found.len() < MAX_MASK_TRIALS {
            found.push(id);
        }
    }
    found
}
