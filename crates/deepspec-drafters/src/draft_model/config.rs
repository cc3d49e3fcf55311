//! config.json of a drafter: a decoder like the target's, the captured target layers, and the settings of the drafter's kind.

use std::fmt::Debug;
use std::path::Path;

use deepspec_checkpoint::{
    ATTENTION_SINK_BIAS, CheckpointError, Fields, OUTPUT_GATE_KEY, QUANTISATION_KEYS, resolve_windows,
};
use deepspec_core::Tap;
use deepspec_core::cli::UsageError;
use deepspec_core::recipe::Recipe;
use deepspec_models::config::{MAX_LAYERS, read_json};
use deepspec_models::{ModelConfig, ModelError, check_taps};
use serde_json::{Map, Value, json};

use super::WarmStartCheck;
use crate::ConfigIssue;
use crate::block_common::BlockSpec;

/// Settings of one kind of drafter, as config.json stores them.
pub trait DrafterSettings: Debug + Clone + Send + Sync + 'static {
    /// Class name in `architectures` without the family's prefix.
    const CLASS: &'static str;

    /// Whether recipe and config may set `slots`.
    const CHOOSES_SLOTS: bool = true;

    /// Whether the drafter may have causal blocks.
    const MAY_BE_CAUSAL: bool = false;

    /// Whether the drafter reads outputs of the target's layers. If not, it reads the target's final states only.
    const READS_LAYERS: bool = true;

    /// Whether the layers may have gates on the outputs of attention, as Qwen3.5's have.
    const MAY_HAVE_OUTPUT_GATE: bool = false;

    /// Whether the heads of a block drafter read the anchor's slot, although it drafts nothing, and the token before the anchor.
    const READS_ANCHOR_SLOT: bool = false;

    /// Whether checkpoints of other tools may have an embedding and an LM head of their own.
    const MAY_OWN_EMBED_AND_HEAD: bool = false;

    /// Pairs (key of config.json, key of the recipe) where the keys differ.
    const RECIPE_KEYS: &'static [(&'static str, &'static str)] = &[];

    /// Reads the settings from config.json.
    fn read(fields: &Fields) -> Result<Self, CheckpointError>;

    /// Writes the settings into config.json.
    fn write(&self, map: &mut Map<String, Value>);

    /// Checks the settings against each other and against the decoder.
    fn check(&self, model: &ModelConfig) -> Result<(), ConfigIssue>;

    /// Drafted tokens per block, γ.
    fn draft_len(&self) -> usize {
        self.block_spec().map_or(0, BlockSpec::draft_len)
    }

    /// Shape of the blocks; None for a drafter without blocks.
    fn block_spec(&self) -> Option<&BlockSpec> {
        None
    }

    /// Mutable [`Self::block_spec`].
    fn block_spec_mut(&mut self) -> Option<&mut BlockSpec> {
        None
    }

    /// Token that stands for tokens to predict, mutable; None for a drafter without one.
    fn mask_token_id_mut(&mut self) -> Option<&mut i64> {
        self.block_spec_mut().map(|blocks| &mut blocks.mask_token_id)
    }

    /// Width of the input of `fc`, as a multiple of the hidden size. `taps` is the number of captured layers.
    fn fc_inputs(taps: usize) -> usize {
        taps
    }

    /// Number of tokens that the drafter can draft, Vd; None for all of the target's.
    fn draft_vocab_size(&self) -> Option<i64> {
        None
    }

    /// Whether training embeds the tokens before the drafts, and adds to the gradients of their embeddings by a plan of the batch.
    fn embeds_previous(&self) -> bool {
        true
    }

    /// Sets the sizes of this kind's parts to tiny values, for dummy runs.
    fn shrink(&mut self) {}

    /// Compares these settings with the settings `from` of the checkpoint that training starts from.
    fn compare_for_warm_start(&self, _from: &Self, _transfer: &mut WarmStartCheck) {}
}

/// Architecture of a drafter, the contents of its config.json.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftConfig<S> {
    /// Decoder and captured target layers.
    pub decoder: DraftDecoder,
    /// Settings of the kind of drafter.
    pub settings: S,
}

impl<S: DrafterSettings> DraftConfig<S> {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// If a key is missing, of a wrong type, or contradicts another.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, map) = read_json(dir)?;
        let fields = Fields::new(&path, &map);
        let config = Self { decoder: DraftDecoder::read(&path, &map)?, settings: S::read(&fields)? };
        config.check().map_err(|(key, problem)| fields.error(key, problem))?;
        Ok(config)
    }

    /// Contents of config.json.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut map = self.decoder.to_json(&self.architecture());
        self.settings.write(&mut map);
        map
    }

    /// Class name in `architectures`.
    pub fn architecture(&self) -> String {
        format!("{}{}", self.model().family.decoder.prefix, S::CLASS)
    }

    /// Sizes of the decoder.
    pub fn model(&self) -> &ModelConfig {
        &self.decoder.model
    }

    /// Checks decoder and settings against each other.
    ///
    /// # Errors
    /// A key of config.json, and the problem with its value.
    pub fn check(&self) -> Result<(), ConfigIssue> {
        self.decoder.check(S::READS_LAYERS)?;
        let has_sinks = self.model().layers.iter().any(|layer| layer.attention.sinks);
        if has_sinks && self.settings.block_spec().is_none() {
            return Err((ATTENTION_SINK_BIAS, "only DSpark and DFlash have attention sinks".into()));
        }
        if self.model().layers.iter().any(|layer| layer.output_gate) && !S::MAY_HAVE_OUTPUT_GATE {
            let problem = "only MTP-1 has layers with a gate on attention's output".into();
            return Err((OUTPUT_GATE_KEY, problem));
        }
        self.settings.check(self.model())
    }

    /// [`check`](Self::check) whose error names the recipe's key.
    ///
    /// # Errors
    /// A key of the recipe, and the problem with its value.
    pub fn check_recipe(&self) -> Result<(), ConfigIssue> {
        self.check().map_err(|(key, problem)| {
            let mut names = S::RECIPE_KEYS.iter().chain(&[("num_hidden_layers", "num_draft_layers")]);
            (names.find(|(config, _)| *config == key).map_or(key, |(_, recipe)| recipe), problem)
        })
    }
}

/// Decoder of a drafter, and the target layers whose hidden states it reads.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftDecoder {
    /// Sizes of the decoder, whose layers are the draft layers.
    pub model: ModelConfig,
    /// Captured target layers, in order.
    pub taps: Vec<Tap>,
    /// Number of layers of the target.
    pub num_target_layers: usize,
}

impl DraftDecoder {
    /// Combines the decoder `model` with the recipe's target layers.
    ///
    /// # Errors
    /// A key of the recipe, and the problem with its value.
    pub fn new<D>(
        model: Result<ModelConfig, ModelError>,
        recipe: &Recipe<D>,
        target: &ModelConfig,
    ) -> Result<Self, ConfigIssue> {
        let model = model.map_err(|error| ("layer_types", error.to_string()))?;
        let taps = recipe.target.layer_ids.clone();
        Ok(Self { model, taps, num_target_layers: target.layers.len() })
    }

    /// Reads config.json of a checkpoint.
    pub fn read(path: &Path, map: &Map<String, Value>) -> Result<Self, ModelError> {
        let fields = Fields::new(path, map);
        let (key, layers) = ("target_layer_ids", "num_target_layers");
        let ids = fields.required(key, fields.integers(key)?)?;
        let taps = Tap::from_layer_ids(ids.iter().copied())
            .ok_or_else(|| fields.error(key, format!("{ids:?} are no layer ids; expected them from -1")))?;
        let num_target_layers = fields.required_size::<u64>(layers)? as usize;
        let config = resolve_windows(&fields)?.unwrap_or_else(|| map.clone());
        Ok(Self { model: ModelConfig::parse(path, config)?, taps, num_target_layers })
    }

    /// Checks the number of layers and the captured target layers, of which there are some if `reads_layers`, and else none.
    fn check(&self, reads_layers: bool) -> Result<(), ConfigIssue> {
        let layers = self.model.layers.len();
        if !(1..=MAX_LAYERS).contains(&layers) {
            return Err(("num_hidden_layers", format!("{layers} is not between 1 and {MAX_LAYERS}")));
        }
        if reads_layers && self.taps.is_empty() {
            return Err(("target_layer_ids", "at least one target layer is needed".into()));
        }
        if !reads_layers && !self.taps.is_empty() {
            let found = Tap::layer_ids(&self.taps);
            let problem =
                format!("the drafter reads final states and no layers; expected [], found {found:?}");
            return Err(("target_layer_ids", problem));
        }
        check_taps(&self.taps, self.num_target_layers)
            .map_err(|error| ("target_layer_ids", error.to_string()))
    }

    /// Checks that the drafter fits a target of this architecture.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    pub fn check_fits(&self, target: &ModelConfig) -> Result<(), ModelError> {
        let Self { model, num_target_layers, .. } = self;
        let pairs = [
            ("vocab_size", model.vocab_size, target.vocab_size),
            ("hidden_size", model.hidden_size, target.hidden_size),
            ("number of target layers", *num_target_layers as i64, target.layers.len() as i64),
        ];
        let mut differences: Vec<String> = pairs
            .iter()
            .filter(|(_, drafter, target)| drafter != target)
            .map(|(what, drafter, target)| format!("{what} {target}, the drafter was trained for {drafter}"))
            .collect();
        if !target.accepts_drafters_of(model.family) {
            let (target, drafter) = (target.family, model.family);
            differences.push(format!("the architecture of {target}, the drafter was trained for {drafter}"));
        }
        if differences.is_empty() {
            let (own, theirs) = (model.max_position_embeddings, target.max_position_embeddings);
            if own < theirs {
                tracing::warn!(
                    "the drafter was made for {own} positions, the target for {theirs}; behind position {own} drafts may be accepted less"
                );
            }
            return Ok(());
        }
        Err(ModelError::Mismatch(UsageError(format!(
            "the drafter does not belong to this target: the target has {}",
            differences.join("; ")
        ))))
    }

    /// The decoder's keys of config.json, and the keys that all drafters have.
    pub fn to_json(&self, architecture: &str) -> Map<String, Value> {
        let mut map = self.model.raw.clone();
        map.insert("architectures".into(), json!([architecture]));
        map.insert("num_target_layers".into(), json!(self.num_target_layers));
        map.insert("target_layer_ids".into(), json!(Tap::layer_ids(&self.taps)));
        map.insert("tie_word_embeddings".into(), json!(false));
        map.insert("dtype".into(), json!("bfloat16"));
        map.remove("torch_dtype");
        // The target's weights may be quantised; those of a drafter are not.
        QUANTISATION_KEYS.iter().for_each(|key| drop(map.remove(*key)));
        map
    }
}
