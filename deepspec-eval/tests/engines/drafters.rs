//! The drafters that the engines load.

use std::fs;
use std::path::{Path, PathBuf};

use deepspec_checkpoint::DraftVocab;
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, DSparkConfig, DSparkObjective, DSparkPlan, DSparkSettings, DSparkV4Config, DSparkV4Plan,
    DSparkV4Settings, DownSampling, DraftDecoder, DrafterPlan, Eagle3Norms, LossRecipe, MarkovKind,
    MarkovSettings, PEagleConfig, PEagleObjective, PEaglePlan, PEagleSettings, StageSettings,
};
use deepspec_models::{ModelConfig, save};
use deepspec_testkit::conversations::tokenizers;
use serde_json::{Value, json};
use tch::{Kind, Tensor};
use tempfile::TempDir;

use crate::LIMIT;
use crate::common::gguf::dequantised;
use crate::common::training::{Lessons, eagle3_plan, smoke, train};
use crate::common::{dspark_v4_settings, repository, target_dir};

/// A drafter from `assets` with a change.
pub fn edited(name: &str, edit: impl FnOnce(&mut Value, &mut Vec<(String, Tensor)>)) -> TempDir {
    let (root, from) = (tempfile::tempdir().unwrap(), repository("assets").join(name));
    let mut config = serde_json::from_str(&fs::read_to_string(from.join("config.json")).unwrap()).unwrap();
    let mut tensors = Tensor::read_safetensors(from.join("model.safetensors")).unwrap();
    edit(&mut config, &mut tensors);
    fs::write(root.path().join("config.json"), config.to_string()).unwrap();
    save(&root.path().join("model.safetensors"), &tensors, Kind::BFloat16).unwrap();
    root
}

/// The trained DSpark without its heads: a DFlash, though it was not trained without them.
pub fn dflash() -> TempDir {
    edited("tiny-dspark", |config, tensors| {
        (config["markov_rank"], config["enable_confidence_head"]) = (json!(0), json!(false));
        config["confidence_head_with_markov"] = json!(false);
        tensors
            .retain(|(name, _)| !name.starts_with("markov_head.") && !name.starts_with("confidence_head."));
    })
}

/// The trained DSpark with Llama 3's rotary scaling, without which it was trained. It drafts worse,
/// but equally in all programs.
pub fn stretched() -> TempDir {
    edited("tiny-dspark", |config, _| {
        config.as_object_mut().unwrap().remove("rope_scaling");
        config["rope_parameters"] = json!({
            "rope_type": "llama3", "rope_theta": config["rope_theta"], "factor": 2.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        });
    })
}

/// The trained DSpark with YaRN, without which it was trained. It drafts worse, but equally in all programs.
pub fn yarn() -> TempDir {
    edited("tiny-dspark", |config, _| {
        config.as_object_mut().unwrap().remove("rope_scaling");
        config["rope_parameters"] = json!({
            "rope_type": "yarn", "rope_theta": config["rope_theta"], "factor": 4.0,
            "original_max_position_embeddings": 256,
        });
    })
}

/// The trained DSpark with a window in all layers, without which it was trained.
pub fn windowed() -> TempDir {
    edited("tiny-dspark", |config, _| mark_windows(config))
}

/// A causal DFlash with attention sinks, as Nemotron's drafters have them, and with a window, without which it was trained.
pub fn causal_windowed_with_sinks() -> TempDir {
    let drafter = filling_in(BlockOptions { causal: true, sinks: true });
    let path = drafter.path().join("config.json");
    let mut config = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    mark_windows(&mut config);
    fs::write(&path, config.to_string()).unwrap();
    drafter
}

/// Gives all layers a window of 24 tokens, in the keys of Nemotron's and MiMo's drafters.
fn mark_windows(config: &mut Value) {
    config["dflash_config"] = json!({"use_swa": true, "swa_window_size": 24});
}

/// An Eagle3 trained on this target's answers.
pub fn eagle3(target: &Path, taps: [i64; 3], steps: usize) -> TempDir {
    eagle3_variant(target, taps, steps, None, Eagle3Norms::default())
}

/// An Eagle3 trained on this target's answers, with these norms, and with a reduced vocabulary if one is given.
pub fn eagle3_variant(
    target: &Path,
    taps: [i64; 3],
    steps: usize,
    draft_vocab: Option<DraftVocab>,
    norms: Eagle3Norms,
) -> TempDir {
    let taps = Tap::from_layer_ids(taps).unwrap();
    taught(&eagle3_plan(target, &taps, draft_vocab, norms), target, &taps, steps)
}

/// 600 of the tiny target's 1,024 tokens: every seventh token cannot be drafted, and of the rest the last ones.
pub fn some_tokens() -> DraftVocab {
    let counts: Vec<u64> = (0..1024).map(|id| if id % 7 == 0 { 0 } else { 1024 - id }).collect();
    DraftVocab::most_frequent(&counts, 600).unwrap()
}

/// A P-EAGLE trained on the tiny target's answers, with these norms, and with a reduced vocabulary if one is given.
pub fn peagle(draft_vocab: Option<DraftVocab>, norms: Eagle3Norms) -> TempDir {
    let model = ModelConfig::load(&target_dir()).unwrap();
    let taps = Tap::from_layer_ids([0, 2, 4]).unwrap();
    let config = PEagleConfig {
        decoder: DraftDecoder {
            model: model.draft_decoder(&[None, None]).unwrap(),
            taps: taps.clone(),
            num_target_layers: model.layers.len(),
        },
        settings: PEagleSettings {
            num_depths: 5,
            mask_token_id: 1023,
            draft_vocab_size: draft_vocab.as_ref().map(|vocab| vocab.tokens().len() as i64),
            norms,
        },
    };
    let sampling = DownSampling { depths: 5, ratio: 0.8, least_ratio: 0.2 };
    let plan = PEaglePlan::new(config, PEagleObjective { sampling, segments: 1 });
    taught(&plan.with_draft_vocab(draft_vocab), &target_dir(), &taps, 200)
}

/// The drafter after `steps` training steps on the target's answers.
fn taught(plan: &dyn DrafterPlan, target: &Path, taps: &[Tap], steps: usize) -> TempDir {
    let rows = LIMIT..2 * LIMIT;
    let lessons =
        Lessons { target: target.to_path_buf(), suites: smoke(), rows, tokens: 48, thinking: false };
    let samples = lessons.samples(taps, |out| (out.captured_states, out.hidden));
    let trained = train(plan, target, steps, samples);
    let drafter = tempfile::tempdir().unwrap();
    save(&drafter.path().join("model.safetensors"), &trained.checkpoint(), Kind::BFloat16).unwrap();
    let config = Value::Object(trained.config_json()).to_string();
    fs::write(drafter.path().join("config.json"), config).unwrap();
    drafter
}

/// A real model of 135 M parameters, whose 4-bit weights are converted to float32 for all programs.
/// With quantised weights llama.cpp also rounds the activations, which gives other answers.
pub struct RealModel {
    /// The GGUF file.
    pub file: PathBuf,
    /// The folder that it is unpacked into.
    pub folder: PathBuf,
    _root: TempDir,
}

impl RealModel {
    /// None skips the test.
    pub fn new() -> Option<Self> {
        let root = tempfile::tempdir().unwrap();
        let [file, cache] = ["target.gguf", "unpacked"].map(|name| root.path().join(name));
        dequantised(&tokenizers()?.join("smollm2.gguf"), &file);
        let folder = deepspec_checkpoint::gguf::unpack(&file, &cache).unwrap();
        Some(Self { file, folder, _root: root })
    }

    /// A briefly trained block drafter with a Markov head of this rank.
    pub fn block(&self, markov: Option<i64>) -> TempDir {
        let options = BlockOptions::default();
        block(&self.folder, REAL_TAPS, UNUSED, (SlotTarget::AnchorPredicts, options), markov, 200)
    }
}

/// Attention of a block drafter.
#[derive(Clone, Copy, Default)]
pub struct BlockOptions {
    pub causal: bool,
    pub sinks: bool,
}

/// A DFlash for the tiny target with fill-in slots, as z-lab's have, and as JetSpec's have if it is causal.
pub fn filling_in(options: BlockOptions) -> TempDir {
    block(&target_dir(), [0, 2, 4], 1023, (SlotTarget::FillIn, options), None, 300)
}

/// A DSpark for the tiny target without a confidence head.
pub fn dspark(options: BlockOptions) -> TempDir {
    block(&target_dir(), [0, 2, 4], 1023, (SlotTarget::AnchorPredicts, options), Some(16), 300)
}

/// A DSpark of DeepSeek-V4 for the tiny target. Its window is longer than all texts, since llama.cpp's ends earlier for later slots.
pub fn dspark_v4() -> TempDir {
    let (model, taps) = (ModelConfig::load(&target_dir()).unwrap(), Tap::from_layer_ids([0, 2, 4]).unwrap());
    let settings = dspark_v4_settings();
    let config = DSparkV4Config {
        decoder: DraftDecoder {
            model: model.anchored_decoder(&[None, None]).unwrap(),
            taps: taps.clone(),
            num_target_layers: model.layers.len(),
        },
        settings: DSparkV4Settings {
            stages: StageSettings { sliding_window: 256, ..settings.stages },
            ..settings
        },
    };
    let loss = LossRecipe { ce_alpha: 1.0, decay_gamma: 4.0, ..LossRecipe::NONE };
    let plan = DSparkV4Plan::new(config, DSparkObjective { loss, confidence_alpha: 1.0 });
    taught(&plan, &target_dir(), &taps, 200)
}

/// A block drafter trained on this target's answers for `steps` steps.
fn block(
    target: &Path,
    taps: [i64; 3],
    mask_token_id: i64,
    (slots, BlockOptions { causal, sinks }): (SlotTarget, BlockOptions),
    markov: Option<i64>,
    steps: usize,
) -> TempDir {
    let model = ModelConfig::load(target).unwrap();
    let taps = Tap::from_layer_ids(taps).unwrap();
    let layers = model.anchored_decoder(&[None, None]).unwrap();
    let config = DSparkConfig {
        decoder: DraftDecoder {
            model: if sinks { layers.with_attention_sinks().unwrap() } else { layers },
            taps: taps.clone(),
            num_target_layers: model.layers.len(),
        },
        settings: DSparkSettings {
            blocks: BlockSpec { block_size: 5, slots, mask_token_id, causal, num_anchors: 8 },
            markov: markov.map(|rank| MarkovSettings { kind: MarkovKind::Vanilla, rank }),
            confidence: None,
        },
    };
    let loss = LossRecipe { ce_alpha: 1.0, decay_gamma: 4.0, ..LossRecipe::NONE };
    let plan = DSparkPlan::new(config, DSparkObjective { loss, confidence_alpha: 0.0 });
    taught(&plan, target, &taps, steps)
}

/// Taps of the real model's drafters, and one of its tokens that occurs in no text.
pub const REAL_TAPS: [i64; 3] = [1, 15, 27];
pub const UNUSED: i64 = 7;
