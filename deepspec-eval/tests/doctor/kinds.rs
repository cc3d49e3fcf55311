//! Kinds of drafters: each is found in order, and a mistake with it is named.

use deepspec_core::SlotTarget;
use deepspec_drafters::{
    BlockSpec, Consistency, Convolution, DFlash2Config, DFlash2Objective, DFlash2Plan, DFlash2Settings,
    DSparkObjective, DSparkV4Config, DSparkV4Plan, DominoConfig, DominoObjective, DominoPlan, DominoSettings,
    DownSampling, DraftDecoder, Eagle3Norms, GruSettings, LambdaBase, LossRecipe, MtpConfig, MtpPlan,
    MtpSettings, PEagleConfig, PEagleObjective, PEaglePlan, PEagleSettings, StepObjective, XPressConfig,
    XPressObjective, XPressPlan, XPressSettings,
};
use serde_json::{Value, json};

use crate::common::dspark_v4_settings;
use crate::common::training::{GAMMA, write_xpress_on_dflash2};
use crate::{
    AS_USED, EAGLE3_STEPS, STEPS, Trained, Training, assert_cause, assert_head_is_named, assert_judged,
    assert_mask_token_is_named, block, changed, decoder, doctor, edit_config, found_in_order,
};

#[test]
fn mtp_1_in_its_place_is_found_in_order_and_another_head_is_named() {
    let config = MtpConfig {
        decoder: DraftDecoder { taps: vec![], ..decoder() },
        settings: MtpSettings { num_speculative_steps: GAMMA, step_weight_beta: 0.6 },
    };
    let plan = MtpPlan::new(config, StepObjective::new(0.6, GAMMA));
    let (_root, dir, _) = found_in_order(&plan, EAGLE3_STEPS, 1.3);
    assert_head_is_named(&dir);
}

/// Also with a reduced vocabulary.
#[test]
fn p_eagle_in_its_place_is_found_in_order_and_another_mask_token_is_named() {
    let config = PEagleConfig {
        decoder: decoder(),
        settings: PEagleSettings {
            num_depths: GAMMA,
            mask_token_id: 1023,
            draft_vocab_size: None,
            norms: Eagle3Norms::default(),
        },
    };
    let sampling = DownSampling { depths: GAMMA, ratio: 0.8, least_ratio: 0.2 };
    let plan = PEaglePlan::new(config, PEagleObjective { sampling, segments: 1 });
    let (_root, dir, _) = found_in_order(&plan, STEPS, 1.3);
    let (_root, reduced) = changed(&dir, Trained::reduce_vocab);
    assert_eq!(doctor(&reduced, &[])["cause"], Value::Null);
    [dir, reduced].iter().for_each(|dir| assert_mask_token_is_named(dir));
}

/// Its drafts come from the Markov head, so that another mask token changes few of them.
#[test]
fn dspark_of_deepseek_v4_in_its_place_is_found_in_order_and_another_head_is_named() {
    let config = DSparkV4Config { decoder: decoder(), settings: dspark_v4_settings() };
    let loss = LossRecipe { ce_alpha: 0.1, l1_alpha: 0.9, ..LossRecipe::NONE };
    let objective = DSparkObjective { loss, confidence_alpha: 1.0 };
    let (_root, dir, _) = found_in_order(&DSparkV4Plan::new(config, objective), STEPS / 2, 1.05);
    assert_head_is_named(&dir);
}

/// Blocks whose first slot drafts nothing.
const FILLED_BLOCKS: BlockSpec = BlockSpec {
    block_size: GAMMA + 1,
    slots: SlotTarget::FillIn,
    mask_token_id: 1023,
    causal: false,
    num_anchors: 24,
};

#[test]
fn xpress_in_its_place_is_found_in_order_and_another_mask_token_is_named() {
    let settings =
        XPressSettings { blocks: FILLED_BLOCKS, rank: 16, mlp_ratio: 2, num_passes: 4, convolution: None };
    let objective = XPressObjective {
        loss: LossRecipe { ce_alpha: 1.0, ..LossRecipe::NONE },
        consistency: Consistency::default(),
        base_alpha: 0.6,
    };
    assert_judged(&XPressPlan::new(XPressConfig { decoder: decoder(), settings }, objective), STEPS / 2, 1.3);
}

#[test]
fn xpress_on_dflash_2_is_found_in_order_and_another_mask_token_is_named() {
    let root = tempfile::tempdir().unwrap();
    write_xpress_on_dflash2(root.path());
    let report = doctor(root.path(), &[]);
    assert_eq!(report["cause"], Value::Null, "{report:#}");
    assert!(report["accepted_length"].as_f64().unwrap() > 1.5, "{report:#}");
    assert_mask_token_is_named(root.path());
}

#[test]
fn dflash2_in_its_place_is_found_in_order_and_another_mask_token_is_named() {
    let settings = DFlash2Settings {
        blocks: FILLED_BLOCKS,
        convolution: Convolution::default(),
        selector_rank: 16,
        selector_top_k: 8,
    };
    let objective =
        DFlash2Objective { loss: LossRecipe { ce_alpha: 1.0, ..LossRecipe::NONE }, selector_alpha: 1.0 };
    assert_judged(
        &DFlash2Plan::new(DFlash2Config { decoder: decoder(), settings }, objective),
        STEPS / 2,
        1.3,
    );
}

#[test]
fn dspark_with_attention_sinks_is_found_in_order_and_another_mask_token_is_named() {
    assert_judged(&block(&Training { sinks: true, ..AS_USED }), STEPS, 1.5);
}

#[test]
fn domino_in_its_place_is_found_in_order_and_other_slots_are_named() {
    let config = DominoConfig {
        decoder: decoder(),
        settings: DominoSettings {
            blocks: BlockSpec {
                block_size: GAMMA,
                slots: SlotTarget::AnchorPredicts,
                mask_token_id: 1023,
                causal: false,
                num_anchors: 8,
            },
            gru: GruSettings { hidden_size: 32, rank: 16 },
        },
    };
    let loss = LossRecipe { ce_alpha: 1.0, decay_gamma: 4.0, ..LossRecipe::NONE };
    let lambda_base = LambdaBase { start: 1.0, decay_ratio: 0.5 };
    let plan = DominoPlan::new(config, DominoObjective { loss, lambda_base });
    let (_root, dir, report) = found_in_order(&plan, STEPS, 1.2);
    // It may not have causal blocks, so that they are not tried.
    assert!(!report.to_string().contains("block_mask"), "{report:#}");
    edit_config(&dir, "sample_from_anchor", json!(false));
    assert_cause(&doctor(&dir, &[]), "slots", &["the other convention"]);
}
