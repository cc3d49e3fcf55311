//! Drafters that learn a target's answers within seconds of training.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use deepspec_checkpoint::DraftVocab;
use deepspec_core::recipe::LossNormalization;
use deepspec_core::{SlotTarget, Tap};
use deepspec_datasets::suites::{RequestTemplate, SuiteDir};
use deepspec_drafters::{
    BlockSpec, ConfidenceSettings, DFlash2, DFlash2Config, DSparkConfig, DSparkObjective, DSparkPlan,
    DSparkProposer, DSparkSettings, DraftDecoder, DrafterPlan, Eagle3Config, Eagle3Norms, Eagle3Objective,
    Eagle3Plan, Eagle3Settings, LossDenominator, LossRecipe, MtpConfig, MtpPlan, MtpSettings, StepObjective,
    Supervise, TrainSample, TrainableDrafter, XPress, XPressConfig, XPressSettings, load_recipe,
    plan_drafter,
};
use deepspec_engine::{
    DraftSampling, Engine, EngineOptions, ModelInput, ModelOutput, Sampling, Target, VerifyRule,
};
use deepspec_models::{ModelConfig, TargetModel, TargetOptions, load_embed_and_head, save, stop_ids};
use deepspec_ops::grad_or_zeros;
use deepspec_text::ChatTokenizer;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::repository;

/// Drafted tokens per block.
pub const GAMMA: usize = 5;
/// Drafted tokens of an MTP-1 drafter.
pub const MTP_DRAFTS: usize = 3;
/// The target's layers whose hidden states a DSpark of these tests reads.
pub const DSPARK_TAPS: [i64; 2] = [0, 2];
/// The smoke suites.
pub fn smoke() -> Vec<String> {
    ["smoke-math", "smoke-code", "smoke-chat"].map(String::from).into()
}

/// Sequences that are decoded concurrently.
const SLOTS: usize = 16;

/// The training data of a drafter: greedy answers to some prompts.
pub struct Lessons {
    /// The target's folder.
    pub target: PathBuf,
    /// The suites.
    pub suites: Vec<String>,
    /// The rows of each suite.
    pub rows: Range<usize>,
    /// Maximum number of tokens of an answer.
    pub tokens: usize,
    /// The chat template's `enable_thinking`.
    pub thinking: bool,
}

impl Lessons {
    /// Prompts with their answers: all ids, and the length of the prompt.
    fn answers(&self) -> Vec<(Vec<i64>, usize)> {
        let tokenizer = ChatTokenizer::load(&self.target).unwrap();
        let stops = stop_ids(&self.target, tokenizer.eos_token_id()).unwrap();
        let config = ModelConfig::load(&self.target).unwrap();
        let context = config.max_position_embeddings;
        let asking = RequestTemplate {
            tokenizer: &tokenizer,
            sampling: Sampling::new(0.0, 1),
            max_new_tokens: self.tokens,
            thinking: self.thinking,
            system_prompt: None,
            stop_ids: &stops,
            context,
            vocab_size: config.vocab_size as usize,
        };
        let options = EngineOptions {
            slots: SLOTS,
            context,
            max_draft_tokens: None,
            draft_sampling: DraftSampling::default(),
            verify_rule: VerifyRule::default(),
            counts_overrun: false,
        };
        let mut engine: Engine<TargetModel, DSparkProposer> =
            Engine::new(self.model(SLOTS, &[]), None, options);
        let suites = repository("eval_datasets");
        let folder = SuiteDir::open(&suites).unwrap();
        let mut found = vec![];
        for suite in folder.select(&self.suites, &[]).unwrap() {
            let mut rows = folder.load(suite, 980_406, None).unwrap();
            rows.samples = rows.samples[self.rows.clone()].to_vec();
            let requests = asking.prepare(rows).unwrap().requests;
            let prompts: Vec<Vec<i64>> = requests.iter().map(|request| request.prompt.clone()).collect();
            for (prompt, done) in prompts.into_iter().zip(engine.run(requests, |_| {}).unwrap()) {
                found.push(([prompt.clone(), done.tokens].concat(), prompt.len()));
            }
        }
        found
    }

    fn model(&self, slots: usize, taps: &[Tap]) -> TargetModel {
        let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots, taps: taps.to_vec() };
        TargetModel::load(&self.target, &options).unwrap()
    }

    /// The answers with the target's hidden states. `lay` turns a forward's output into taps and
    /// last states.
    pub fn samples(&self, taps: &[Tap], lay: impl Fn(ModelOutput) -> (Tensor, Tensor)) -> Vec<TrainSample> {
        let _no_grad = tch::no_grad_guard();
        let mut model = self.model(1, taps);
        let sample = |(ids, prompt): (Vec<i64>, usize)| {
            let out =
                model.forward(&ModelInput { chunks: &[(0, ids.len())], tokens: Tensor::from_slice(&ids) });
            model.truncate(0, 0);
            let (taps, last) = lay(out);
            TrainSample {
                loss_mask: (0..ids.len()).map(|at| at >= prompt).collect(),
                last_positions: (0..ids.len() as u32).collect(),
                input_ids: ids,
                taps,
                last,
                anchors: vec![],
            }
        };
        self.answers().into_iter().map(sample).collect()
    }
}

/// Trains with Adam on all samples in turn, four per step.
pub fn train(
    plan: &dyn DrafterPlan,
    target: &Path,
    steps: usize,
    mut all: Vec<TrainSample>,
) -> Box<dyn TrainableDrafter> {
    let model = ModelConfig::load(target).unwrap();
    let (embed, head) = load_embed_and_head(target, &model, Device::Cpu, Kind::Float).unwrap();
    let trainee = plan.build(&embed, &head, 1, Kind::Float);
    trainee.load_target(target).unwrap();
    let mut moments: Vec<(Tensor, Tensor)> = vec![];
    for (_, parameter) in trainee.parameters() {
        let parameter = parameter.set_requires_grad(true);
        moments.push((parameter.zeros_like().detach(), parameter.zeros_like().detach()));
    }
    for step in 0..steps {
        let mut batch: Vec<TrainSample> = vec![];
        let mut weight = 0.0;
        for turn in 0..4.min(all.len()) {
            let mut sample = all.remove(0);
            sample.anchors = plan.choose_anchors(&sample.loss_mask, &mut |candidates, count, _| {
                let stride = (candidates.len() / count).max(1);
                candidates.iter().copied().skip((step + turn) % stride).step_by(stride).take(count).collect()
            });
            weight += plan.loss_denominator_part(&sample.loss_mask, &sample.anchors);
            batch.push(sample);
        }
        trainee.accumulate(&batch, LossDenominator(weight), step as f64 / steps as f64, None);
        all.extend(batch);
        let rate = 6e-3 * ((steps - step) as f64 / steps as f64).min((step + 1) as f64 / 10.0);
        tch::no_grad(|| adam(trainee.as_ref(), &mut moments, step + 1, rate));
    }
    trainee
}

/// An Eagle3 of one layer for `target` that drafts 4 tokens.
pub fn eagle3_plan(
    target: &Path,
    taps: &[Tap],
    draft_vocab: Option<DraftVocab>,
    norms: Eagle3Norms,
) -> Eagle3Plan {
    let model = ModelConfig::load(target).unwrap();
    let config = Eagle3Config {
        decoder: DraftDecoder {
            model: model.draft_decoder(&[None]).unwrap(),
            taps: taps.to_vec(),
            num_target_layers: model.layers.len(),
        },
        settings: Eagle3Settings {
            ttt_length: 4,
            step_loss_decay: 0.8,
            draft_vocab_size: draft_vocab.as_ref().map(|vocab| vocab.tokens().len() as i64),
            norms,
        },
    };
    let objective = Eagle3Objective {
        supervise: Supervise::Labels,
        step_loss_decay: 0.8,
        normalization: LossNormalization::Global,
    };
    Eagle3Plan::new(config, objective).with_draft_vocab(draft_vocab)
}

/// Writes to `dir` an Eagle3 with this reduced vocabulary that has learned the answers to the prompts.
pub fn write_eagle3_drafter(
    lessons: &Lessons,
    dir: &Path,
    taps: [i64; 3],
    draft_vocab: DraftVocab,
    steps: usize,
) {
    let taps = Tap::from_layer_ids(taps).unwrap();
    let plan = eagle3_plan(&lessons.target, &taps, Some(draft_vocab), Eagle3Norms::default());
    let samples = lessons.samples(&taps, |out| (out.captured_states, out.hidden));
    write_drafter(train(&plan, &lessons.target, steps, samples).as_ref(), dir);
}

/// Writes to `dir` an MTP-1 drafter of [`MTP_DRAFTS`] tokens that has learned the answers to the prompts.
pub fn write_mtp_drafter(lessons: &Lessons, dir: &Path, steps: usize) {
    let target = &lessons.target;
    let model = ModelConfig::load(target).unwrap();
    let decoder = DraftDecoder {
        model: model.mtp_decoder().unwrap(),
        taps: vec![],
        num_target_layers: model.layers.len(),
    };
    let settings = MtpSettings { num_speculative_steps: MTP_DRAFTS, ..MtpSettings::default() };
    let plan = MtpPlan::new(MtpConfig { decoder, settings }, StepObjective::new(0.6, MTP_DRAFTS));
    let samples = lessons.samples(&[], |out| (out.captured_states, out.hidden));
    write_drafter(train(&plan, target, steps, samples).as_ref(), dir);
}

/// Writes to `dir` an assistant of a [`gemma4`](deepspec_testkit::tiny::gemma4), trained for [`MTP_DRAFTS`] steps of drafting, that has
/// learned the answers to the prompts.
pub fn write_assistant(lessons: &Lessons, dir: &Path, steps: usize) {
    let target = &lessons.target;
    let drafter = json!({"gemma4_assistant": {
        "num_speculative_steps": MTP_DRAFTS, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }});
    let recipe = json!({
        "name": "t", "target": {"model": target, "layer_ids": [1, 2]}, "drafter": drafter,
        "data": {"states": {"cache": "unused"}, "chat_template": "gemma4"},
    });
    let file = dir.with_extension("yaml");
    fs::write(&file, recipe.to_string()).unwrap();
    let recipe = load_recipe(&file, &[]).unwrap();
    let plan = plan_drafter(&recipe, &ModelConfig::load(target).unwrap()).unwrap();
    let samples = lessons.samples(&recipe.target.layer_ids, |out| (out.captured_states, out.hidden));
    write_drafter(train(plan.as_ref(), target, steps, samples).as_ref(), dir);
}

/// Writes to `dir` a DSpark of one layer, without a Markov head, that has learned the answers to the prompts.
pub fn write_dspark_drafter(lessons: &Lessons, dir: &Path, mask_token_id: i64, steps: usize) {
    let target = &lessons.target;
    let model = ModelConfig::load(target).unwrap();
    let taps = Tap::from_layer_ids(DSPARK_TAPS).unwrap();
    let blocks = BlockSpec {
        block_size: GAMMA,
        slots: SlotTarget::AnchorPredicts,
        mask_token_id,
        causal: false,
        num_anchors: 8,
    };
    let config = DSparkConfig {
        decoder: DraftDecoder {
            model: model.anchored_decoder(&[None]).unwrap(),
            taps: taps.clone(),
            num_target_layers: model.layers.len(),
        },
        settings: DSparkSettings {
            blocks,
            markov: None,
            confidence: Some(ConfidenceSettings { with_markov: false }),
        },
    };
    let loss = LossRecipe { ce_alpha: 1.0, soft_ce_alpha: 1.0, decay_gamma: 8.0, ..LossRecipe::NONE };
    let plan = DSparkPlan::new(config, DSparkObjective { loss, confidence_alpha: 1.0 });
    let samples = lessons.samples(&taps, |out| (out.captured_states, out.hidden));
    write_drafter(train(&plan, target, steps, samples).as_ref(), dir);
}

/// Writes into the folder `dir` an xPress with the trained layers of `assets/tiny-dflash2`, whose refiner adds nothing to the logits.
pub fn write_xpress_on_dflash2(dir: &Path) {
    let trained = DFlash2::load(&repository("assets/tiny-dflash2"), Device::Cpu, Kind::Float).unwrap();
    let DFlash2Config { decoder, settings } = trained.config().clone();
    let settings = XPressSettings {
        blocks: settings.blocks,
        rank: 8,
        mlp_ratio: 2,
        num_passes: 1,
        convolution: Some(settings.convolution),
    };
    let (embed, head) = trained.embed_and_head();
    let model = XPress::fresh(XPressConfig { decoder, settings }, &embed, &head, 1, Kind::Float);
    let layers: BTreeMap<String, Tensor> = trained.checkpoint().into_iter().collect();
    let tensors: Vec<(String, Tensor)> = model
        .checkpoint()
        .into_iter()
        .map(|(name, fresh)| {
            let tensor = layers.get(&name).map_or_else(|| fresh.zeros_like(), Tensor::shallow_clone);
            (name, tensor)
        })
        .collect();
    save(&dir.join("model.safetensors"), &tensors, Kind::BFloat16).unwrap();
    fs::write(dir.join("config.json"), Value::Object(model.config().to_json()).to_string()).unwrap();
}

fn write_drafter(trainee: &dyn TrainableDrafter, dir: &Path) {
    fs::create_dir(dir).unwrap();
    save(&dir.join("model.safetensors"), &trainee.checkpoint(), Kind::BFloat16).unwrap();
    fs::write(dir.join("config.json"), Value::Object(trainee.config_json()).to_string()).unwrap();
}

fn adam(trainee: &dyn TrainableDrafter, moments: &mut [(Tensor, Tensor)], step: usize, rate: f64) {
    for ((_, parameter), (first, second)) in trainee.parameters().iter().zip(moments) {
        // No row may have chosen an expert yet.
        let gradient = grad_or_zeros(parameter);
        *first = &*first * 0.9 + &gradient * 0.1;
        *second = &*second * 0.99 + gradient.square() * 0.01;
        let corrected = &*first / (1.0 - 0.9f64.powi(step as i32));
        let scale = (&*second / (1.0 - 0.99f64.powi(step as i32))).sqrt() + 1e-8;
        let _ = parameter.shallow_clone().g_sub_(&(corrected / scale * rate));
        let _ = grad_or_zeros(parameter).zero_();
    }
}
