//! Target and drafter: where they run, whether they fit, and what they are.

use std::path::Path;
use std::sync::Arc;

use deepspec_core::cli::Verbosity;
use deepspec_core::{Tap, env, usage};
use deepspec_decode::{Engine, EngineOptions, Proposer};
use deepspec_drafters::{Drafter, DrafterOptions};
use deepspec_models::{
    Fit, ModelConfig, ModelError, TargetModel, TargetOptions, config_digest, fit, history_bytes, room,
    weights_digest,
};
use deepspec_native::StepTrace;
use deepspec_schedule::cost_file::{self, Weights};
use deepspec_schedule::planner::Planner;
use deepspec_text::ChatTokenizer;
use tch::{Device, Kind};

use super::args::Dtype;
use super::decode::{Pass, Plan, decode};
use super::entry::Arm;
use super::journal::Journal;
use crate::results::{DrafterIdentity, Settings, TargetIdentity};

/// Where tensors live, and of which kind they are.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The device.
    pub device: Device,
    /// The kind of weights and activations.
    pub kind: Kind,
}

impl Place {
    /// The device as `--device` spells it.
    pub fn device_name(self) -> String {
        match self.device {
            Device::Cuda(index) => format!("cuda:{index}"),
            other => format!("{other:?}").to_lowercase(),
        }
    }

    /// The kind as `--dtype` spells it.
    pub fn kind_name(self) -> &'static str {
        if self.kind == Kind::BFloat16 { "bfloat16" } else { "float32" }
    }
}

/// Resolves `--device` and `--dtype`.
pub fn place(device: &str, dtype: Dtype) -> anyhow::Result<Place> {
    let device = match deepspec_native::device(device) {
        Ok(device) => device,
        Err(error) => usage!("--device: {error}"),
    };
    let kind = match dtype {
        Dtype::Auto => deepspec_native::default_kind(device),
        Dtype::Float32 => Kind::Float,
        Dtype::Bfloat16 => Kind::BFloat16,
    };
    Ok(Place { device, kind })
}

/// Tokens that the target in `dir` can hold, once it is clear that the tokenizer is one for it.
pub fn context(dir: &Path, tokenizer: &ChatTokenizer) -> anyhow::Result<usize> {
    let config = ModelConfig::load(dir)?;
    let (ids, vocab) = (tokenizer.vocab_size(), config.vocab_size);
    if ids as i64 > vocab {
        usage!(
            "{}: the tokenizer has {ids} ids, the model only {vocab}; they do not belong together",
            dir.display()
        );
    }
    Ok(config.max_position_embeddings)
}

/// What a run loads.
pub struct Models<'a> {
    /// The target's folder.
    pub target: &'a Path,
    /// Its tokenizer.
    pub tokenizer: &'a ChatTokenizer,
    /// Where everything runs.
    pub place: Place,
    /// Tokens per slot.
    pub context: usize,
    /// Slots, thresholds and limits.
    pub settings: &'a Settings,
}

impl Models<'_> {
    /// Loads the target, and the drafter if there is one (its name and folder), and decodes the suites. Nothing stays
    /// loaded.
    ///
    /// # Errors
    /// If a model cannot be loaded, or the drafter does not belong to the target.
    pub fn decode(
        &self,
        draft: Option<(&str, &Path)>,
        plan: &Plan,
        arm: Arm,
        journal: &mut Journal,
        trace: &mut StepTrace,
        verbosity: Verbosity,
    ) -> anyhow::Result<(Vec<Pass>, Option<DrafterIdentity>)> {
        let (Place { device, kind }, slots) = (self.place, self.settings.slots);
        if let Some((_, dir)) = draft {
            check_tokens(dir, self.tokenizer)?;
        }
        let load =
            |(_, dir): (_, &Path)| deepspec_drafters::load(dir, &DrafterOptions { device, kind, slots });
        let mut drafter = draft.map(load).transpose()?;
        if let Some((drafter, tokens)) = drafter.as_mut().zip(self.settings.max_draft_tokens) {
            drafter.draft(tokens);
        }
        let identity = draft
            .zip(drafter.as_ref())
            .map(|((name, dir), drafter)| drafter_identity(name, dir, drafter.as_ref()))
            .transpose()?;
        // Plain decoding captures nothing, so that it is as fast as it can be.
        let taps = drafter.as_ref().map_or_else(Vec::new, |drafter| drafter.taps().to_vec());
        let target = TargetModel::load(self.target, &TargetOptions { device, kind, slots, taps })?;
        if let Some(drafter) = &mut drafter {
            drafter.check_fits(target.config())?;
            if self.settings.no_markov && !drafter.ignore_markov() {
                usage!("--no-markov: the drafter has no Markov head");
            }
            let policy = self.settings.policy();
            if policy.reads_confidence() && !drafter.has_confidence() {
                usage!("--schedule {policy}: the drafter has no confidence head");
            }
        }
        let options = EngineOptions {
            slots,
            context: self.context,
            max_draft_tokens: self.settings.max_draft_tokens,
            draft_sampling: self.settings.draft_sampling,
            counts_overrun: true,
        };
        let temperatures = self.settings.calibration.clone().unwrap_or_default();
        let proposer = drafter.as_ref().map(|drafter| drafter as &dyn Proposer);
        let memory = room(&target, proposer, slots);
        if let Some(memory) = memory {
            tell_room(slots, plan, memory, &target, proposer);
        }
        let weights = Weights {
            target: &weights_digest(self.target)?,
            drafter: identity.as_ref().map(|identity| identity.weights_digest.as_str()),
        };
        let planner = planner(self.settings, weights)?;
        let mut engine =
            Engine::new(target, drafter, options).with_temperatures(temperatures).with_planner(planner);
        if let Some(bytes) = memory {
            engine = engine.with_memory(bytes);
        }
        let passes = decode(&mut engine, plan, arm, journal, trace, verbosity)?;
        Ok((passes, identity))
    }
}

/// What says how much of each block is verified.
fn planner(settings: &Settings, weights: Weights) -> anyhow::Result<Planner> {
    let Some(file) = &settings.cost else { return Ok(Planner::new(settings.policy(), None)?) };
    match cost_file::read_for(Path::new(file), weights, settings.slots) {
        Ok((cost, told)) => {
            told.iter().for_each(|words| tracing::warn!("--cost {words}"));
            Ok(Planner::new(settings.policy(), Some(Arc::new(cost)))?)
        }
        Err(problem) => usage!("--cost {problem}"),
    }
}

/// Says where fewer conversations run at once than could. One that never has room is refused by the engine, when its turn comes.
fn tell_room(slots: usize, plan: &Plan, memory: u64, target: &TargetModel, drafter: Option<&dyn Proposer>) {
    let bytes = |tokens: usize| history_bytes(target, drafter, tokens);
    let (conversations, longest) = plan.conversations();
    if let Fit::Fewer { told } = fit(slots.min(conversations), longest, memory, bytes) {
        tracing::warn!("{told}; the others wait");
    }
}

/// What the results say about the drafter.
pub fn drafter_identity(
    name: &str,
    dir: &Path,
    drafter: &dyn Drafter,
) -> Result<DrafterIdentity, ModelError> {
    Ok(DrafterIdentity {
        path: dir.display().to_string(),
        hub_id: hub_id(name),
        config_digest: config_digest(dir)?,
        weights_digest: weights_digest(dir)?,
        block_size: drafter.draft_len(),
        taps: Tap::layer_ids(drafter.taps()),
    })
}

/// A language model drafts in its own tokens: they must be the target's.
///
/// # Errors
/// A usage error with the first token that differs.
pub fn check_tokens(draft: &Path, tokenizer: &ChatTokenizer) -> anyhow::Result<()> {
    if deepspec_drafters::is_language_model(draft)?
        && let Err(error) = tokenizer.check_drafter(draft)
    {
        usage!("--draft {error}");
    }
    Ok(())
}

/// The hub id behind a model's name, unless it lies here.
fn hub_id(name: &str) -> Option<String> {
    (!env::expand_home(name).exists()).then(|| name.to_string())
}

/// What the results say about the target.
pub fn target_identity(
    name: &str,
    dir: &Path,
    tokenizer: &ChatTokenizer,
    stop_ids: Vec<i64>,
) -> Result<TargetIdentity, ModelError> {
    Ok(TargetIdentity {
        path: dir.display().to_string(),
        hub_id: hub_id(name),
        config_digest: config_digest(dir)?,
        weights_digest: weights_digest(dir)?,
        tokenizer_digest: tokenizer.tokenizer_digest().into(),
        template_digest: tokenizer.template_digest(),
        stop_ids,
    })
}
