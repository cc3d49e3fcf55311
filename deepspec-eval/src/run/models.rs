//! Target and drafter: device, dtype, loading, memory, and identities.

use std::path::Path;
use std::sync::Arc;

use deepspec_core::cli::Verbosity;
use deepspec_core::{Tap, env, usage};
use deepspec_cost::cost_file::{self, WeightDigests};
use deepspec_cost::planner::Planner;
use deepspec_drafters::{Drafter, DrafterOptions};
use deepspec_engine::{Engine, EngineOptions, EngineReplicas, Proposer, sequence_bytes, split_evenly};
use deepspec_models::{
    MemoryFit, ModelConfig, ModelError, TargetModel, TargetOptions, check_memory_fit, config_digest,
    kv_cache_budget, weights_digest,
};
use deepspec_ops::StepTrace;
use deepspec_text::ChatTokenizer;
use tch::{Device, Kind};

use super::args::{Args, Dtype};
use super::decode::{DecodePlan, SuitePass, decode};
use super::entry::DecodeMode;
use super::journal::Journal;
use crate::results::{DrafterIdentity, Settings, TargetIdentity, Turns};

/// Device and dtype of the tensors.
#[derive(Debug, Clone, Copy)]
pub struct DeviceAndDtype {
    /// The device.
    pub device: Device,
    /// Dtype of weights and activations.
    pub kind: Kind,
}

impl DeviceAndDtype {
    /// The device as `--device` spells it.
    pub fn device_name(self) -> String {
        deepspec_ops::device_name(self.device)
    }

    /// The dtype as `--dtype` spells it.
    pub fn dtype_name(self) -> &'static str {
        deepspec_ops::dtype_name(self.kind)
    }
}

/// Resolves `--device` and `--dtype`.
pub fn resolve_device_and_dtype(device: &str, dtype: Dtype) -> anyhow::Result<DeviceAndDtype> {
    let device = match deepspec_ops::parse_device(device) {
        Ok(device) => device,
        Err(error) => usage!("--device: {error}"),
    };
    let kind = match dtype {
        Dtype::Auto => deepspec_ops::default_dtype(device),
        Dtype::Float32 => Kind::Float,
        Dtype::Bfloat16 => Kind::BFloat16,
    };
    Ok(DeviceAndDtype { device, kind })
}

/// Context length and embedding rows of the target in `dir`. Warns of a tokenizer with more ids
/// than rows.
pub fn context_and_vocab_size(dir: &Path, tokenizer: &ChatTokenizer) -> anyhow::Result<(usize, usize)> {
    let config = ModelConfig::load(dir)?;
    let vocab_size = config.vocab_size as usize;
    tokenizer.warn_if_wider_than(vocab_size);
    Ok((config.max_position_embeddings, vocab_size))
}

/// Results of a decoding pass.
pub struct DecodeOutput {
    /// Answers, suite by suite.
    pub passes: Vec<SuitePass>,
    /// Number of engines that shared the slots.
    pub replicas: usize,
}

/// Settings of the models that a pass loads.
pub struct ModelSettings<'a> {
    /// The target's folder.
    pub target: &'a Path,
    /// Device and dtype of all models.
    pub place: DeviceAndDtype,
    /// Maximum number of tokens per slot.
    pub context: usize,
    /// Settings of the run: slots, thresholds and limits.
    pub settings: &'a Settings,
}

/// A drafter that a pass decodes with.
#[derive(Clone, Copy)]
pub struct Speculation<'a> {
    /// The drafter.
    pub drafter: &'a dyn Drafter,
    /// Its identity.
    pub identity: &'a DrafterIdentity,
}

/// The models of a pass, loaded.
struct LoadedModels {
    target: TargetModel,
    drafter: Option<Box<dyn Drafter>>,
    planner: Planner,
}

/// How engines share slots and memory.
struct EngineShares {
    /// Slots of each engine.
    slots: Vec<usize>,
    /// Bytes for all KV caches, if the device reports free memory.
    memory: Option<u64>,
}

impl ModelSettings<'_> {
    /// Loads the target and decodes the suites with at most `replicas` engines, with the drafter if there
    /// is one. The target is unloaded afterwards.
    ///
    /// # Errors
    /// Fails if the target cannot be loaded, or if the drafter does not fit it.
    pub fn decode(
        &self,
        speculation: Option<Speculation>,
        plan: &DecodePlan,
        (mode, replicas): (DecodeMode, usize),
        journal: &mut Journal,
        trace: &mut StepTrace,
        verbosity: Verbosity,
    ) -> anyhow::Result<DecodeOutput> {
        let loaded = self.load(speculation)?;
        let shares = self.share_slots_and_memory(&loaded, plan, replicas);
        let replicas = shares.slots.len();
        let mut engines = self.build_engines(loaded, &shares, mode)?;
        let passes = match engines.as_mut_slice() {
            [engine] => decode(engine, plan, mode, journal, trace, verbosity)?,
            _ => {
                let threads = usize::try_from(self.settings.threads).unwrap_or(1);
                let mut replicas = EngineReplicas::new(engines, threads);
                decode(&mut replicas, plan, mode, journal, trace, verbosity)?
            }
        };
        Ok(DecodeOutput { passes, replicas })
    }

    /// Loads target, drafter and planner, and checks that they fit together.
    fn load(&self, speculation: Option<Speculation>) -> anyhow::Result<LoadedModels> {
        let (DeviceAndDtype { device, kind }, settings) = (self.place, self.settings);
        let slots = settings.slots;
        let drafter = speculation.map(|with| self.share_drafter(with.drafter, slots)).transpose()?;
        // Plain decoding captures no hidden states, so that it runs at full speed.
        let taps = drafter.as_ref().map_or_else(Vec::new, |drafter| drafter.taps().to_vec());
        let target = TargetModel::load(self.target, &TargetOptions { device, kind, slots, taps })?;
        if let Some(drafter) = &drafter {
            drafter.check_fits(target.config())?;
            let policy = settings.policy();
            if policy.reads_confidence() && !drafter.has_confidence_head() {
                usage!("--schedule {policy}: the drafter has no confidence head");
            }
        }
        let weights = WeightDigests {
            target: &weights_digest(self.target)?,
            drafter: speculation.map(|with| with.identity.weights_digest.as_str()),
        };
        Ok(LoadedModels { planner: load_planner(settings, weights)?, target, drafter })
    }

    /// Shares slots and memory among at most `replicas` engines. Warns if memory limits the conversations.
    fn share_slots_and_memory(
        &self,
        loaded: &LoadedModels,
        plan: &DecodePlan,
        replicas: usize,
    ) -> EngineShares {
        let proposer = loaded.drafter.as_ref().map(|drafter| drafter as &dyn Proposer);
        let shares = self.replicas_that_fit(replicas, plan, &loaded.target, proposer);
        if let Some(memory) = shares.memory {
            let rule = self.settings.verify;
            let bytes = |tokens: usize| sequence_bytes(&loaded.target, proposer, rule, tokens);
            warn_memory_limit(self.settings.slots, plan, memory, bytes);
        }
        shares
    }

    /// An engine for each share. Several engines share the weights.
    fn build_engines(
        &self,
        LoadedModels { target, drafter, planner }: LoadedModels,
        shares: &EngineShares,
        mode: DecodeMode,
    ) -> anyhow::Result<Vec<Engine<TargetModel, Box<dyn Drafter>>>> {
        let settings = self.settings;
        let engine = |(target, drafter, slots): (TargetModel, Option<Box<dyn Drafter>>, usize)| {
            let options = EngineOptions {
                slots,
                context: self.context,
                max_draft_tokens: settings.max_draft_tokens,
                draft_sampling: match mode {
                    DecodeMode::Main | DecodeMode::Baseline => settings.draft_sampling,
                    DecodeMode::Other => settings.draft_sampling.other(),
                },
                verify_rule: settings.verify,
                counts_overrun: true,
            };
            let temperatures = settings.calibration.clone().unwrap_or_default();
            let engine = Engine::new(target, drafter, options).with_temperatures(temperatures);
            let engine = engine.with_planner(planner.clone());
            match shares.memory {
                Some(bytes) => engine.with_kv_cache_limit(bytes / settings.slots as u64 * slots as u64),
                None => engine,
            }
        };
        if let [slots] = shares.slots.as_slice() {
            return Ok(vec![engine((target, drafter, *slots))]);
        }
        let share = |&slots: &usize| {
            let drafter = drafter.as_deref().map(|drafter| self.share_drafter(drafter, slots)).transpose()?;
            Ok(engine((target.share(slots), drafter, slots)))
        };
        shares.slots.iter().map(share).collect()
    }

    /// Shares for `wanted` replicas, or for fewer if the longest conversation would not fit into each.
    fn replicas_that_fit(
        &self,
        wanted: usize,
        plan: &DecodePlan,
        target: &TargetModel,
        drafter: Option<&dyn Proposer>,
    ) -> EngineShares {
        let Settings { slots, turns, .. } = *self.settings;
        let (_, longest) = plan.count_and_longest();
        let longest = if turns == Turns::All { self.context } else { longest };
        let of = |replicas| EngineShares {
            slots: split_evenly(slots, replicas),
            memory: kv_cache_budget(target, self.max_drafted(drafter), slots, replicas),
        };
        let fits = |shares: &EngineShares| {
            let least = shares.slots.last().copied().unwrap_or(0) as u64;
            let needed = sequence_bytes(target, drafter, self.settings.verify, longest);
            shares.memory.is_none_or(|all| all / slots as u64 * least >= needed)
        };
        let found = (2..=wanted).rev().map(of).find(fits).unwrap_or_else(|| of(1));
        let replicas = found.slots.len();
        if replicas < wanted {
            tracing::warn!(
                "the longest conversation does not fit into each of {wanted} replicas; {replicas} will run"
            );
        }
        found
    }

    /// Most drafted tokens of a sequence that a step verifies.
    fn max_drafted(&self, drafter: Option<&dyn Proposer>) -> usize {
        self.settings.verify.max_drafted(drafter.map_or(0, |drafter| drafter.draft_len()))
    }

    /// A copy of the drafter for `slots` slots, set up as the run's settings say.
    fn share_drafter(&self, drafter: &dyn Drafter, slots: usize) -> anyhow::Result<Box<dyn Drafter>> {
        let mut shared = drafter.share(slots);
        configure_drafter(shared.as_mut(), self.settings.max_draft_tokens, self.settings.no_markov)?;
        Ok(shared)
    }
}

/// Loads the drafter in `dir`, for the target in the folder `target`, and sets it up as the arguments say.
///
/// # Errors
/// Fails if it cannot be loaded, or if it is a language model with another tokenizer. Fails too, before its weights are read, if it is
/// to grow trees and cannot.
pub fn load_drafter(
    dir: &Path,
    target: &Path,
    args: &Args,
    tokenizer: &ChatTokenizer,
    DeviceAndDtype { device, kind }: DeviceAndDtype,
) -> anyhow::Result<Box<dyn Drafter>> {
    check_tokens(dir, tokenizer)?;
    if args.verify.tree_budget().is_some()
        && let Some(reason) = deepspec_drafters::tree_refusal(dir)?
    {
        usage!("--verify {} with the drafter {}: {reason}", args.verify, dir.display());
    }
    let options =
        DrafterOptions { device, kind, slots: args.max_num_seqs, target: Some(target.to_path_buf()) };
    let mut drafter = deepspec_drafters::load_drafter(dir, &options)?;
    configure_drafter(drafter.as_mut(), args.max_draft_tokens, args.no_markov)?;
    Ok(drafter)
}

fn configure_drafter(
    drafter: &mut dyn Drafter,
    max_draft_tokens: Option<usize>,
    no_markov: bool,
) -> anyhow::Result<()> {
    if let Some(tokens) = max_draft_tokens {
        drafter.set_draft_len(tokens);
    }
    if no_markov && !drafter.disable_markov_bias() {
        usage!("--no-markov: the drafter has no Markov head");
    }
    Ok(())
}

/// The planner, which decides how much of each block is verified.
fn load_planner(settings: &Settings, weights: WeightDigests) -> anyhow::Result<Planner> {
    let Some(file) = &settings.cost else { return Ok(Planner::new(settings.policy(), None)?) };
    match cost_file::read_step_cost_for(Path::new(file), weights, settings.slots) {
        Ok((cost, told)) => {
            told.iter().for_each(|words| tracing::warn!("--cost {words}"));
            Ok(Planner::new(settings.policy(), Some(Arc::new(cost)))?)
        }
        Err(problem) => usage!("--cost {problem}"),
    }
}

/// Warns if memory limits the number of concurrent conversations. The engine itself refuses a
/// conversation that never fits.
fn warn_memory_limit(slots: usize, plan: &DecodePlan, memory: u64, bytes: impl Fn(usize) -> u64) {
    let (conversations, longest) = plan.count_and_longest();
    if let MemoryFit::Fewer { told } = check_memory_fit(slots.min(conversations), longest, memory, bytes) {
        tracing::warn!("{told}; the others wait");
    }
}

/// Identity of the drafter for the results.
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

/// Checks that a language model used as drafter has the target's tokens.
///
/// # Errors
/// A usage error that names the first token that differs.
pub fn check_tokens(draft: &Path, tokenizer: &ChatTokenizer) -> anyhow::Result<()> {
    if deepspec_drafters::is_language_model(draft)?
        && let Err(error) = tokenizer.check_same_vocabulary(draft)
    {
        usage!("--draft {error}");
    }
    Ok(())
}

/// Returns `name` if it is a hub id, and None if it is a local path.
pub fn hub_id(name: &str) -> Option<String> {
    (!env::expand_home(name).exists()).then(|| name.to_string())
}

/// Identity of the target for the results.
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
