//! `checkpoint doctor`: a drafter that is misused in one way is told to be misused in that way.
//!
//! The drafters learn the target's likeliest answers to the very prompts that are asked, so that seconds of training do.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use common::{deepspec_eval, repository, target, target_dir};
use deepspec_core::recipe::{LossNormalization, Supervise};
use deepspec_decode::{Engine, EngineOptions, Feed, Sampling, Target};
use deepspec_models::{
    BlockConfig, BlockProposer, Design, Eagle3Config, Eagle3Objective, Learner, LossAlphas, ModelConfig,
    Normaliser, TargetModel, TrainSample, load_ends, save, stop_ids,
};
use deepspec_suites::{Asking, Folder};
use deepspec_text::ChatTokenizer;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

const LIMIT: usize = 3;
const TOKENS: usize = 40;
const STEPS: usize = 400;
/// Eagle3 learns from whole sequences.
const EAGLE3_STEPS: usize = 80;
const GAMMA: usize = 5;
const TAPS: [i64; 3] = [0, 2, 4];
/// Taps of the drafter that reads the last layer.
const TOP_TAPS: [i64; 3] = [0, 2, 5];

/// Prompt and answer of the smoke prompts, the likeliest tokens.
fn answers() -> Vec<(Vec<i64>, usize)> {
    let dir = target_dir();
    let tokenizer = ChatTokenizer::load(&dir).unwrap();
    let stops = stop_ids(&dir, tokenizer.eos_token_id()).unwrap();
    let asking = Asking {
        tokenizer: &tokenizer,
        sampling: Sampling::new(0.0, 1),
        max_new_tokens: TOKENS,
        thinking: false,
        system_prompt: None,
        stop_ids: &stops,
        context: 2048,
    };
    let options = EngineOptions {
        slots: 16,
        context: 2048,
        confidence_threshold: 0.0,
        max_draft_tokens: None,
        counts_overrun: false,
    };
    let mut engine: Engine<TargetModel, BlockProposer> = Engine::new(target(16, &[]), None, options);
    let suites = repository("eval_datasets");
    let folder = Folder::open(&suites).unwrap();
    let names = ["smoke-math", "smoke-code", "smoke-chat"].map(String::from);
    let mut found = vec![];
    for suite in folder.select(&names, &[]).unwrap() {
        let requests = asking.prepare(folder.load(suite, 980_406, Some(LIMIT)).unwrap()).unwrap().requests;
        let prompts: Vec<Vec<i64>> = requests.iter().map(|request| request.prompt.clone()).collect();
        for (prompt, done) in prompts.into_iter().zip(engine.run(requests, |_| {}).unwrap()) {
            found.push(([prompt.clone(), done.tokens].concat(), prompt.len()));
        }
    }
    found
}

/// How a drafter is trained.
struct Training {
    taps: [i64; 3],
    /// Slot k learns the token at anchor + k.
    at_anchor: bool,
    /// The last layer's state is taken after the final norm.
    normed: bool,
}

fn samples(training: &Training) -> Vec<TrainSample> {
    let _no_grad = tch::no_grad_guard();
    let mut model = target(1, &training.taps);
    let sample = |(ids, prompt): (Vec<i64>, usize)| {
        let tokens = Tensor::from_slice(&ids);
        let out = model.forward(&Feed { chunks: &[(0, ids.len())], tokens });
        model.truncate(0, 0);
        let width = out.hidden.size()[1];
        let taps = if training.normed {
            Tensor::cat(&[out.taps.narrow(1, 0, 2 * width), out.hidden.shallow_clone()], 1)
        } else {
            out.taps
        };
        let last = if training.at_anchor { out.hidden.roll([1], [0]) } else { out.hidden };
        TrainSample {
            loss_mask: (0..ids.len()).map(|at| at >= prompt).collect(),
            last_positions: (0..ids.len() as u32).collect(),
            input_ids: ids,
            taps,
            last,
            anchors: vec![],
        }
    };
    answers().into_iter().map(sample).collect()
}

fn design(taps: [i64; 3], at_anchor: bool) -> Design {
    let model = ModelConfig::load(&target_dir()).unwrap();
    let config = BlockConfig {
        block_size: GAMMA,
        mask_token_id: model.vocab_size - 1,
        target_layer_ids: taps.to_vec(),
        num_target_layers: model.layers.len(),
        num_anchors: 8,
        markov: None,
        confidence: None,
        model: model.draft_decoder(&[None]).unwrap(),
    };
    // The labels of a batch are those of our slots; what the target would say is as the states are laid.
    let ce = if at_anchor { 0.0 } else { 1.0 };
    Design::Block {
        config,
        alphas: LossAlphas { ce, soft_ce: 1.0, ..LossAlphas::default() },
        decay_gamma: 8.0,
    }
}

/// The same for an Eagle3 drafter.
fn eagle3(taps: [i64; 3]) -> Design {
    let model = ModelConfig::load(&target_dir()).unwrap();
    let config = Eagle3Config {
        target_layer_ids: taps.to_vec(),
        num_target_layers: model.layers.len(),
        ttt_length: GAMMA,
        step_loss_decay: 0.8,
        model: model.draft_decoder(&[None]).unwrap(),
    };
    let objective = Eagle3Objective {
        supervise: Supervise::Shifted,
        step_loss_decay: config.step_loss_decay,
        normalization: LossNormalization::Global,
    };
    Design::Eagle3 { config, objective }
}

/// Adam on all samples in turn, four a step.
fn train(design: &Design, steps: usize, mut all: Vec<TrainSample>) -> Learner {
    let model = ModelConfig::load(&target_dir()).unwrap();
    let (embed, head) = load_ends(&target_dir(), &model, Device::Cpu, Kind::Float).unwrap();
    let learner = design.build(&embed, &head, 1, Kind::Float).unwrap();
    let mut moments: Vec<(Tensor, Tensor)> = vec![];
    for (_, parameter) in learner.parameters() {
        let parameter = parameter.set_requires_grad(true);
        moments.push((parameter.zeros_like().detach(), parameter.zeros_like().detach()));
    }
    for step in 0..steps {
        let mut batch: Vec<TrainSample> = vec![];
        let mut weight = 0.0;
        for turn in 0..4.min(all.len()) {
            let mut sample = all.remove(0);
            sample.anchors = design.supervision().anchors(&sample.loss_mask, |candidates, count| {
                let stride = (candidates.len() / count).max(1);
                candidates.iter().copied().skip((step + turn) % stride).step_by(stride).take(count).collect()
            });
            weight += design.supervision().weight(&sample.loss_mask, &sample.anchors);
            batch.push(sample);
        }
        learner.accumulate(&batch, Normaliser(weight));
        all.extend(batch);
        let rate = 6e-3 * ((steps - step) as f64 / steps as f64).min((step + 1) as f64 / 10.0);
        tch::no_grad(|| adam(&learner, &mut moments, step + 1, rate));
    }
    learner
}

fn adam(learner: &Learner, moments: &mut [(Tensor, Tensor)], step: usize, rate: f64) {
    for ((_, parameter), (first, second)) in learner.parameters().iter().zip(moments) {
        let gradient = parameter.grad();
        *first = &*first * 0.9 + &gradient * 0.1;
        *second = &*second * 0.99 + gradient.square() * 0.01;
        let corrected = &*first / (1.0 - 0.9f64.powi(step as i32));
        let scale = (&*second / (1.0 - 0.99f64.powi(step as i32))).sqrt() + 1e-8;
        let _ = parameter.shallow_clone().g_sub_(&(corrected / scale * rate));
        let _ = parameter.grad().zero_();
    }
}

/// A drafter as it should be used.
struct Trained {
    config: Value,
    tensors: Vec<(String, Tensor)>,
}

static BASE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();

/// The folder of a drafter that was trained as it says.
fn base() -> &'static Path {
    &BASE.get_or_init(|| written(&Training { taps: TAPS, at_anchor: false, normed: false })).1
}

fn written(training: &Training) -> (TempDir, PathBuf) {
    let learner = train(&design(training.taps, training.at_anchor), STEPS, samples(training));
    checkpoint(&learner)
}

fn checkpoint(learner: &Learner) -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("drafter");
    put(&dir, &Value::Object(learner.config_json()), &learner.checkpoint());
    (root, dir)
}

fn put(dir: &Path, config: &Value, tensors: &[(String, Tensor)]) {
    fs::create_dir_all(dir).unwrap();
    save(&dir.join("model.safetensors"), tensors, Kind::BFloat16).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// The trained drafter with something changed.
fn misused(edit: impl Fn(&mut Trained)) -> (TempDir, PathBuf) {
    let text = fs::read_to_string(base().join("config.json")).unwrap();
    let tensors = Tensor::read_safetensors(base().join("model.safetensors")).unwrap();
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
}

/// What the doctor says of a drafter.
fn doctor(draft: &Path, args: &[&str]) -> Value {
    let (target, suites) = (target_dir(), repository("eval_datasets"));
    let (limit, tokens) = (LIMIT.to_string(), TOKENS.to_string());
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
    // What is estimated in one pass is what decoding gives, as far as so few blocks can tell.
    let (real, estimated) =
        (report["accepted_length"].as_f64().unwrap(), report["estimated"].as_f64().unwrap());
    assert!((real - estimated).abs() < 0.35 * real, "{real} and {estimated}");
}

#[test]
fn shifted_taps_are_named() {
    let (_root, dir) = misused(|trained| trained.config["target_layer_ids"] = json!([1, 3, 5]));
    assert_cause(&doctor(&dir, &[]), "taps", &["[0, 2, 4] instead of [1, 3, 5]"]);
}

#[test]
fn shifted_taps_of_eagle3_are_named() {
    let samples = samples(&Training { taps: TAPS, at_anchor: false, normed: false });
    let (_root, dir) = checkpoint(&train(&eagle3(TAPS), EAGLE3_STEPS, samples));
    assert_eq!(doctor(&dir, &[])["cause"], Value::Null);
    let file = dir.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    config["target_layer_ids"] = json!([1, 3, 5]);
    fs::write(&file, config.to_string()).unwrap();
    assert_cause(&doctor(&dir, &[]), "taps", &["[0, 2, 4] instead of [1, 3, 5]"]);
}

#[test]
fn a_wrong_mask_token_is_named() {
    let (_root, dir) = misused(|trained| trained.config["mask_token_id"] = json!(300));
    assert_cause(&doctor(&dir, &[]), "mask_token", &["mask_token_id 1023 instead of 300"]);
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
    let (_root, dir) = misused(|trained| {
        trained.change("lm_head.weight", |head| {
            let noise = Tensor::from_slice(&deepspec_testkit::noise(5, head.numel())).view_as(head);
            head + noise * head.std(true) * 2.0
        });
    });
    assert_cause(&doctor(&dir, &[]), "ends", &["the target's embedding and head"]);
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
fn another_slot_convention_is_named() {
    let (_root, dir) = written(&Training { taps: TAPS, at_anchor: true, normed: false });
    assert_cause(&doctor(&dir, &[]), "slots", &["anchor+k"]);
}

#[test]
fn a_state_after_the_final_norm_is_named() {
    let (_root, dir) = written(&Training { taps: TOP_TAPS, at_anchor: false, normed: true });
    assert_cause(&doctor(&dir, &[]), "final_norm", &["after the final norm"]);
}
