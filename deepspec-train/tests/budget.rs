//! The GPU operations that a training step may use, counted on the stand-in GPU. Any wait, and most
//! uploads, would cost more than the arithmetic. Two kinds of drafters are not counted: with DSpark of DeepSeek-V4 the
//! host waits for the routers of the experts, and assistants need another target.

mod common;

use common::{Bench, DFLASH2, gpu};

/// Maximum number of uploads per micro-batch.
const UPLOADS: i64 = 3;
/// Micro-batches per step.
const PASSES: i64 = 2;
const STEPS: [i64; 2] = [3, 9];
const BF16: &str = "train.precision=bf16";

/// Runs steps without logging in between, with these changes to the recipe.
#[track_caller]
fn within_budget(changes: &[&str]) {
    within_budget_of(Bench::new, changes);
}

#[track_caller]
fn within_budget_of(make: fn() -> Bench, changes: &[&str]) {
    let mut reports = vec![];
    for steps in STEPS {
        let Some(gpu) = gpu() else { return };
        let bench = make().on(gpu);
        let length = format!("train.max_train_steps={steps}");
        let silence: [&str; 3] = [&length, "logging.logging_steps=1000", "logging.checkpointing_steps=1000"];
        let args: Vec<&str> =
            changes.iter().copied().chain(silence).flat_map(|change| ["--set", change]).collect();
        bench.succeeds(&args);
        reports.push(bench.report());
    }
    let steps = STEPS[1] - STEPS[0];
    // A blocking upload would make the host wait until the GPU has finished all previous work.
    for what in ["downloads", "waits", "blocking_uploads"] {
        let (count, by) = reports[0].added_operations(&reports[1], what);
        assert_eq!(count, 0, "{changes:?}: {what} in {steps} steps:\n{by}");
    }
    let (uploads, by) = reports[0].added_operations(&reports[1], "uploads");
    let allowed = UPLOADS * PASSES * steps;
    assert!(uploads <= allowed, "{changes:?}: {uploads} uploads, {allowed} allowed:\n{by}");
}

#[test]
fn a_step_of_dspark_waits_for_nothing() {
    within_budget(&[]);
    within_budget(&[BF16]);
}

#[test]
fn a_step_of_dflash_waits_for_nothing() {
    within_budget(&[
        "drafter={dflash: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6}}",
        BF16,
    ]);
}

#[test]
fn a_step_with_attention_sinks_waits_for_nothing() {
    within_budget(&["drafter.dspark.attention_sinks=true", BF16]);
}

#[test]
fn a_step_of_dflash_2_waits_for_nothing() {
    within_budget(&[DFLASH2, BF16]);
}

#[test]
fn a_step_of_domino_waits_for_nothing() {
    let blocks = "block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6";
    let drafter = format!("drafter={{domino: {{{blocks}, gru: {{hidden_size: 16, rank: 8}}}}}}");
    within_budget(&[&drafter, BF16]);
}

#[test]
fn a_step_of_xpress_waits_for_nothing() {
    within_budget(&[
        "drafter={xpress: {block_size: 5, num_draft_layers: 1, mask_token_id: 1023, num_anchors: 6, refiner: {rank: 16}}}",
        BF16,
    ]);
}

#[test]
fn a_step_of_eagle3_waits_for_nothing() {
    within_budget(&["drafter={eagle3: {ttt_length: 3}}", BF16]);
}

#[test]
fn a_step_of_p_eagle_waits_for_nothing() {
    within_budget(&["drafter={peagle: {num_draft_layers: 2, num_depths: 3, mask_token_id: 1023}}", BF16]);
}

#[test]
fn a_step_of_mtp_1_waits_for_nothing() {
    let changes = ["drafter={mtp: {}}", "target.layer_ids=[]", BF16];
    within_budget_of(Bench::with_all_final_states, &changes);
}

#[test]
fn a_step_beside_its_target_waits_for_nothing() {
    let rows = Bench::new();
    let input = format!("data.input=['{}']", rows.path("rows.jsonl").display());
    within_budget(&["data.states=online", &input, BF16]);
}
