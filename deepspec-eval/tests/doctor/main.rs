//! `checkpoint doctor` detects each kind of misuse of a drafter.
//!
//! Most drafters learn the target's greedy answers to the evaluated prompts, so seconds of training
//! suffice. The drafter with thinking, and one that was trained for minutes, are evaluated on new
//! prompts.

#[path = "../common/mod.rs"]
mod common;
mod kinds;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use common::training::{GAMMA, Lessons, smoke, train};
use common::{deepspec_eval, repository, target_dir};
use deepspec_checkpoint::{D2T, DraftVocab};
use deepspec_core::recipe::LossNormalization;
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, DSparkConfig, DSparkObjective, DSparkPlan, DSparkSettings, DraftDecoder, DrafterPlan,
    Eagle3Config, Eagle3Objective, Eagle3Plan, Eagle3Settings, LossRecipe, Supervise, TrainSample,
    TrainableDrafter,
};
use deepspec_models::{ModelConfig, save};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

/// Evaluated rows of every suite.
const LIMIT: usize = 3;
const TOKENS: usize = 40;
/// Rows and tokens if the prompts are new to the drafter.
const NEW: [usize; 2] = [12, 48];
const STEPS: usize = 280;
/// Eagle3 learns from whole sequences.
const EAGLE3_STEPS: usize = 80;
const TAPS: [i64; 3] = [0, 2, 4];
/// Taps of the drafter that reads the last layer.
const TOP_TAPS: [i64; 3] = [0, 2, 5];

/// How a drafter is trained.
struct Training {
    taps: [i64; 3],
    /// The training mode of its slots.
    slots: SlotTarget,
    /// Whether its blocks are causal.
    causal: bool,
    /// Whether its heads have attention sinks.
    sinks: bool,
    /// Whether the last layer's state is taken after the final norm.
    normed: bool,
    /// The chat template's `enable_thinking`.
    thinking: bool,
    /// The rows of every suite that it trains on.
    rows: Range<usize>,
}

const AS_USED: Training = Training {
    taps: TAPS,
    slots: SlotTarget::AnchorPredicts,
    causal: false,
    sinks: false,
    normed: false,
    thinking: false,
    rows: 0..LIMIT,
};

fn samples(training: &Training) -> Vec<TrainSample> {
    let (rows, thinking) = (training.rows.clone(), training.thinking);
    let lessons = Lessons { target: target_dir(), suites: smoke(), rows, tokens: TOKENS, thinking };
    lessons.samples(&Tap::from_layer_ids(training.taps).unwrap(), |out| {
        let width = out.hidden.size()[1];
        let taps = if training.normed {
            Tensor::cat(&[out.captured_states.narrow(1, 0, 2 * width), out.hidden.shallow_clone()], 1)
        } else {
            out.captured_states
        };
        (taps, out.hidden)
    })
}

fn block(training: &Training) -> DSparkPlan {
    let &Training { slots, causal, sinks, .. } = training;
    let model = ModelConfig::load(&target_dir()).unwrap();
    let decoder = model.draft_decoder(&[None]).unwrap();
    let config = DSparkConfig {
        decoder: DraftDecoder {
            model: if sinks { decoder.with_attention_sinks().unwrap() } else { decoder },
            taps: Tap::from_layer_ids(training.taps).unwrap(),
            num_target_layers: model.layers.len(),
        },
        settings: DSparkSettings {
            blocks: BlockSpec {
                block_size: GAMMA,
                slots,
                mask_token_id: model.vocab_size - 1,
                causal,
                num_anchors: 8,
            },
            markov: None,
            confidence: None,
        },
    };
    let loss = LossRecipe { ce_alpha: 1.0, soft_ce_alpha: 1.0, decay_gamma: 8.0, ..LossRecipe::NONE };
    DSparkPlan::new(config, DSparkObjective { loss, confidence_alpha: 0.0 })
}

/// The decoder of a drafter with one layer.
fn decoder() -> DraftDecoder {
    let model = ModelConfig::load(&target_dir()).unwrap();
    DraftDecoder {
        model: model.draft_decoder(&[None]).unwrap(),
        taps: Tap::from_layer_ids(TAPS).unwrap(),
        num_target_layers: model.layers.len(),
    }
}

/// The plan of an Eagle3 drafter.
fn eagle3(draft_vocab: Option<DraftVocab>) -> Eagle3Plan {
    let config = Eagle3Config {
        decoder: decoder(),
        settings: Eagle3Settings {
            ttt_length: GAMMA,
            step_loss_decay: 0.8,
            draft_vocab_size: draft_vocab.as_ref().map(|vocab| vocab.tokens().len() as i64),
            ..Eagle3Settings::default()
        },
    };
    let objective = Eagle3Objective {
        supervise: Supervise::Shifted,
        step_loss_decay: config.settings.step_loss_decay,
        normalization: LossNormalization::Global,
    };
    Eagle3Plan::new(config, objective).with_draft_vocab(draft_vocab)
}

/// A correctly used drafter.
struct Trained {
    config: Value,
    tensors: Vec<(String, Tensor)>,
}

static BASE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();

/// The folder of a drafter that is used as it was trained.
fn base() -> &'static Path {
    &BASE.get_or_init(|| written(&AS_USED)).1
}

fn written(training: &Training) -> (TempDir, PathBuf) {
    let trainee = train(&block(training), &target_dir(), STEPS, samples(training));
    checkpoint(trainee.as_ref())
}

fn checkpoint(trainee: &dyn TrainableDrafter) -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    put(&dir, &Value::Object(trainee.config_json()), &trainee.checkpoint());
    (root, dir)
}

fn put(dir: &Path, config: &Value, tensors: &[(String, Tensor)]) {
    fs::create_dir_all(dir).unwrap();
    save(&dir.join("model.safetensors"), tensors, Kind::BFloat16).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// A drafter that was trained on other prompts, so the evaluated ones are new to it.
fn general() -> PathBuf {
    repository("assets/tiny-dspark")
}

/// The trained drafter with a change.
fn misused(edit: impl Fn(&mut Trained)) -> (TempDir, PathBuf) {
    changed(base(), edit)
}

fn changed(drafter: &Path, edit: impl Fn(&mut Trained)) -> (TempDir, PathBuf) {
    let text = fs::read_to_string(drafter.join("config.json")).unwrap();
    let tensors = Tensor::read_safetensors(drafter.join("model.safetensors")).unwrap();
    let tensors = tensors.into_iter().map(|(name, tensor)| (name, tensor.to_kind(Kind::Float))).collect();
    let mut trained = Trained { config: serde_json::from_str(&text).unwrap(), tensors };
    edit(&mut trained);
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    put(&dir, &trained.config, &trained.tensors);
    (root, dir)
}

impl Trained {
    fn change(&mut self, name: &str, edit: impl Fn(&Tensor) -> Tensor) {
        let (_, tensor) = self.tensors.iter_mut().find(|(known, _)| known == name).unwrap();
        *tensor = edit(tensor);
    }

    /// Adds noise of twice its standard deviation to the LM head.
    fn disturb_lm_head(&mut self) {
        self.change("lm_head.weight", |head| {
            let noise = Tensor::from_slice(&deepspec_testkit::noise(5, head.numel())).view_as(head);
            head + noise * head.std(true) * 2.0
        });
    }

    /// Leaves the tokens that the training samples have most often.
    fn reduce_vocab(&mut self) {
        let vocab = draft_vocab();
        self.change("lm_head.weight", |head| head.index_select(0, &Tensor::from_slice(vocab.tokens())));
        self.tensors.push((D2T.into(), Tensor::from_slice(&vocab.offsets())));
        self.config["draft_vocab_size"] = json!(vocab.tokens().len());
    }
}

/// The 512 tokens that the training samples have most often.
fn draft_vocab() -> DraftVocab {
    let mut counts = vec![0; 1024];
    samples(&AS_USED).iter().flat_map(|sample| &sample.input_ids).for_each(|&id| counts[id as usize] += 1);
    DraftVocab::most_frequent(&counts, 512).unwrap()
}

/// The doctor's report on a drafter.
fn doctor(draft: &Path, args: &[&str]) -> Value {
    asked(draft, [LIMIT, TOKENS], args)
}

/// The doctor's report with these numbers of prompts per suite and tokens per answer.
fn asked(draft: &Path, sizes: [usize; 2], args: &[&str]) -> Value {
    let (target, suites) = (target_dir(), repository("eval_datasets"));
    let [limit, tokens] = sizes.map(|size| size.to_string());
    let mut all = vec!["--quiet", "checkpoint", "doctor", "--json", "--device", "cpu", "--temperature", "0"];
    all.extend(["--target", target.to_str().unwrap(), "--suites-dir", suites.to_str().unwrap()]);
    all.extend(["--draft", draft.to_str().unwrap(), "--limit", &limit, "--max-new-tokens", &tokens]);
    all.extend(args);
    let output = deepspec_eval(&all);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn assert_cause(report: &Value, cause: &str, words: &[&str]) {
    assert_eq!(report["cause"], cause, "{report:#}");
    let verdict = report["verdict"].as_str().unwrap();
    assert!(words.iter().all(|word| verdict.contains(word)), "{words:?} not in: {verdict}");
    assert!(!report["advice"].as_str().unwrap().is_empty());
}

#[test]
fn a_drafter_in_its_place_is_found_in_order() {
    let report = doctor(base(), &[]);
    assert_eq!(report["cause"], Value::Null, "{report:#}");
    assert!(report["accepted_length"].as_f64().unwrap() > 1.5, "{report:#}");
    // The estimate from one pass agrees with decoding, within the noise of so few blocks.
    let (real, estimated) =
        (report["accepted_length"].as_f64().unwrap(), report["estimated"].as_f64().unwrap());
    assert!((real - estimated).abs() < 0.35 * real, "{real} and {estimated}");
}

#[test]
fn taps_off_by_one_are_named_in_either_direction() {
    for (shifted, words) in
        [([1, 3, 5], "[0, 2, 4] instead of [1, 3, 5]"), ([-1, 1, 3], "[0, 2, 4] instead of [-1, 1, 3]")]
    {
        let shift = |trained: &mut Trained| trained.config["target_layer_ids"] = json!(shifted);
        let (_root, dir) = misused(shift);
        assert_cause(&doctor(&dir, &[]), "taps", &[words]);
        let (_root, dir) = changed(&general(), shift);
        assert_cause(&asked(&dir, NEW, &[]), "taps", &[words]);
    }
    let report = asked(&general(), NEW, &[]);
    assert_eq!(report["cause"], Value::Null, "{report:#}");
}

#[test]
fn shifted_taps_of_eagle3_are_named() {
    for draft_vocab in [None, Some(draft_vocab())] {
        let trainee = train(&eagle3(draft_vocab), &target_dir(), EAGLE3_STEPS, samples(&AS_USED));
        let (_root, dir) = checkpoint(trainee.as_ref());
        assert_eq!(doctor(&dir, &[])["cause"], Value::Null);
        edit_config(&dir, "target_layer_ids", json!([1, 3, 5]));
        assert_cause(&doctor(&dir, &[]), "taps", &["[0, 2, 4] instead of [1, 3, 5]"]);
    }
}

/// Changes one key of a drafter's config.json.
fn edit_config(dir: &Path, key: &str, value: Value) {
    let file = dir.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    config[key] = value;
    fs::write(&file, config.to_string()).unwrap();
}

/// Trains a drafter, which is found in order and accepts more than `least`. Returns its folder and the report.
fn found_in_order(plan: &dyn DrafterPlan, steps: usize, least: f64) -> (TempDir, PathBuf, Value) {
    let (root, dir) = checkpoint(train(plan, &target_dir(), steps, samples(&AS_USED)).as_ref());
    let report = doctor(&dir, &[]);
    assert_eq!(report["cause"], Value::Null, "{report:#}");
    let [real, estimated] = ["accepted_length", "estimated"].map(|key| report[key].as_f64().unwrap());
    assert!(real > least && (real - estimated).abs() < 0.35 * real, "{real} and {estimated}");
    (root, dir, report)
}

/// [`found_in_order`] of a drafter whose mask token is 1023. Another mask token is named.
fn assert_judged(plan: &dyn DrafterPlan, steps: usize, least: f64) {
    let (_root, dir, _) = found_in_order(plan, steps, least);
    assert_mask_token_is_named(&dir);
}

/// Changes the mask token of a drafter from 1023, which is named.
fn assert_mask_token_is_named(dir: &Path) {
    edit_config(dir, "mask_token_id", json!(300));
    assert_cause(&doctor(dir, &[]), "mask_token", &["mask_token_id 1023 instead of 300"]);
}

/// Another LM head in this drafter is named.
fn assert_head_is_named(dir: &Path) {
    let (_root, dir) = changed(dir, Trained::disturb_lm_head);
    assert_cause(&doctor(&dir, &[]), "ends", &["the target's embedding and head"]);
}

#[test]
fn a_wrong_mask_token_is_named() {
    let (_root, dir) = misused(|_| {});
    assert_mask_token_is_named(&dir);
}

#[test]
fn other_rope_settings_are_named() {
    let (_root, dir) = misused(|trained| {
        trained.config["rope_theta"] = json!(3.0);
        trained.config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 3.0});
    });
    assert_cause(&doctor(&dir, &[]), "rope", &["the target's RoPE settings"]);
}

#[test]
fn a_head_that_is_not_the_targets_is_named() {
    assert_head_is_named(base());
}

#[test]
fn another_vocabulary_is_named() {
    let (_root, dir) = misused(|trained| {
        for name in ["embed_tokens.weight", "lm_head.weight"] {
            trained.change(name, |rows| rows.roll([37], [0]));
        }
    });
    assert_cause(&doctor(&dir, &[]), "vocabulary", &["of 1024 rows", "under another id"]);
}

#[test]
fn another_target_is_named_without_a_forward() {
    let (_root, dir) = misused(|trained| trained.config["num_target_layers"] = json!(36));
    let report = doctor(&dir, &[]);
    assert_cause(&report, "target", &["number of target layers 6", "36"]);
    assert_eq!(report["accepted_length"], Value::Null);
}

#[test]
fn a_confidence_head_off_its_mark_is_named() {
    let (_root, dir) = misused(|trained| {
        trained.config["enable_confidence_head"] = json!(true);
        trained.config["confidence_head_with_markov"] = json!(false);
        let options = (Kind::Float, Device::Cpu);
        trained.tensors.push(("confidence_head.proj.weight".into(), Tensor::zeros([1, 192], options)));
        trained.tensors.push(("confidence_head.proj.bias".into(), Tensor::full([1], -4.0, options)));
    });
    assert_cause(&doctor(&dir, &[]), "confidence", &["predicts 0.02"]);
}

#[test]
fn prompts_unlike_those_of_training_are_named() {
    let report = doctor(base(), &["--system-prompt", "Answer in another way than ever before, at length."]);
    assert_cause(&report, "template", &["no system message instead of"]);
}

#[test]
fn thinking_unlike_that_of_training_is_named_either_way() {
    let report = doctor(base(), &["--thinking"]);
    assert_cause(&report, "template", &["thinking off, no system message instead of thinking on"]);
    let (_root, dir) = written(&Training { thinking: true, rows: LIMIT..33, ..AS_USED });
    let report = doctor(&dir, &[]);
    assert_cause(&report, "template", &["thinking on, no system message instead of thinking off"]);
    assert_eq!(doctor(&dir, &["--thinking"])["cause"], Value::Null);
    let report = asked(&general(), NEW, &["--thinking"]);
    assert_cause(&report, "template", &["thinking off, no system message instead of thinking on"]);
}

#[test]
fn slots_of_the_other_convention_are_named_in_either_direction() {
    let (_root, fills_in) = written(&Training { slots: SlotTarget::FillIn, ..AS_USED });
    let flag = "sample_from_anchor";
    let (_root, dir) = changed(&fills_in, |trained| {
        assert_eq!(trained.config.as_object_mut().unwrap().remove(flag), Some(json!(false)));
    });
    assert_cause(&doctor(&dir, &[]), "slots", &["slot k predicts anchor+k"]);
    let (_root, dir) = misused(|trained| trained.config[flag] = json!(false));
    assert_cause(&doctor(&dir, &[]), "slots", &["slot k predicts anchor+1+k"]);
}

#[test]
fn causal_blocks_without_a_mark_are_named_and_so_are_whole_blocks_with_one() {
    let (_root, causal) = written(&Training { causal: true, ..AS_USED });
    let flag = "is_causal";
    assert_eq!(doctor(&causal, &[])["cause"], Value::Null);
    let (_root, dir) = changed(&causal, |trained| {
        assert_eq!(trained.config.as_object_mut().unwrap().remove(flag), Some(json!(true)));
    });
    assert_cause(&doctor(&dir, &[]), "block_mask", &["see only those before them"]);
    let (_root, dir) = misused(|trained| trained.config[flag] = json!(true));
    assert_cause(&doctor(&dir, &[]), "block_mask", &["see their whole block"]);
}

#[test]
fn a_state_after_the_final_norm_is_named() {
    let (_root, dir) = written(&Training { taps: TOP_TAPS, normed: true, ..AS_USED });
    assert_cause(&doctor(&dir, &[]), "final_norm", &["after the final norm"]);
}
