//! Resolves the arguments of `run --server`: the target's tokenizer, and the settings.

use std::path::PathBuf;

use anyhow::Context;
use deepspec_core::cli::Verbosity;
use deepspec_datasets::suites::{RequestTemplate, TokenizedSuite};
use deepspec_engine::{DraftSampling, VerifyRule};
use deepspec_hub::{HubError, ModelFiles, model_files};
use deepspec_models::config::read_json;
use deepspec_models::config_digest;
use deepspec_text::ChatTokenizer;
use serde_json::{Map, Value, json};

use crate::results::{Settings, TargetIdentity};
use crate::run::args::{Args, Switch};
use crate::run::models;
use crate::run::setup::request_template;

/// A run by a server, whose arguments are resolved.
pub struct ServedSetup {
    /// Folder of the target's tokenizer and config.json.
    target_dir: PathBuf,
    /// The target's tokenizer.
    pub tokenizer: ChatTokenizer,
    /// Tokens that end an answer.
    stop_ids: Vec<i64>,
    /// Maximum number of tokens of a conversation.
    pub context: usize,
    /// Token ids are below this.
    vocab_size: usize,
    /// Settings that the results record.
    pub settings: Settings,
}

impl ServedSetup {
    /// Loads the target's tokenizer and reads its config.json, of any architecture.
    ///
    /// # Errors
    /// Fails if the tokenizer cannot be loaded, or if no token ends an answer.
    pub fn resolve(args: &Args, verbosity: Verbosity) -> anyhow::Result<Self> {
        let target_dir = model_files(&args.target, None, ModelFiles::Config, verbosity)
            .map_err(HubError::report)
            .context("--target")?;
        let tokenizer = ChatTokenizer::load(&target_dir)?;
        let stop_ids = deepspec_models::stop_ids(&target_dir, tokenizer.eos_token_id())?;
        tokenizer.log_stop_tokens(&stop_ids);
        let (_, config) = read_json(&target_dir)?;
        let size = |key: &str| {
            let text = config.get("text_config").and_then(|text| text.get(key));
            text.or_else(|| config.get(key)).and_then(Value::as_u64).map(|size| size as usize)
        };
        let vocab_size = size("vocab_size").unwrap_or_else(|| tokenizer.vocab_size());
        tokenizer.warn_if_wider_than(vocab_size);
        Ok(Self {
            // Some architectures have no limit of positions; the engine's own limit remains.
            context: size("max_position_embeddings").unwrap_or(usize::MAX),
            vocab_size,
            settings: settings(args),
            target_dir,
            tokenizer,
            stop_ids,
        })
    }

    /// The template that turns conversations into requests.
    pub fn request_template(&self) -> RequestTemplate<'_> {
        let sizes = [self.context, self.vocab_size];
        request_template(&self.settings, &self.tokenizer, &self.stop_ids, sizes)
    }

    /// Identity of the target. The engine's weights are unknown, so that they have no digest.
    ///
    /// # Errors
    /// Fails if config.json cannot be read.
    pub fn target_identity(&self, name: &str) -> anyhow::Result<TargetIdentity> {
        Ok(TargetIdentity {
            path: self.target_dir.display().to_string(),
            hub_id: models::hub_id(name),
            config_digest: config_digest(&self.target_dir)?,
            weights_digest: String::new(),
            tokenizer_digest: self.tokenizer.tokenizer_digest().into(),
            template_digest: self.tokenizer.template_digest(),
            stop_ids: self.stop_ids.clone(),
        })
    }

    /// Everything that the answers depend on, except the engines.
    ///
    /// # Errors
    /// Fails if config.json cannot be read.
    pub fn inputs(&self, args: &Args, suites: &[TokenizedSuite]) -> anyhow::Result<Map<String, Value>> {
        let mut inputs = match json!(self.settings) {
            Value::Object(inputs) => inputs,
            other => Map::from_iter([("settings".to_string(), other)]),
        };
        // Another version may ask differently.
        inputs.insert("tool_version".into(), json!(deepspec_core::VERSION));
        inputs.insert("drafter".into(), json!(args.draft));
        let target = json!(self.target_identity(&args.target)?);
        for part in ["config_digest", "tokenizer_digest", "template_digest", "stop_ids"] {
            inputs.insert(format!("target {part}"), target[part].clone());
        }
        for suite in suites {
            inputs.insert(format!("suite {}", suite.rows.suite.name), json!(suite.rows.digest));
        }
        Ok(inputs)
    }
}

/// The settings of requests. The engine decides about drafting, device and dtype.
fn settings(args: &Args) -> Settings {
    Settings {
        seed: args.seeds[0],
        seeds: args.seeds.clone(),
        temperature: args.temperature,
        max_new_tokens: args.max_new_tokens,
        limit: args.limit,
        turns: args.turns,
        thinking: args.thinking == Switch::On,
        system_prompt: args.system_prompt.clone(),
        schedule: args.policy(),
        confidence_threshold: None,
        cost: None,
        calibration: None,
        no_markov: false,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify: VerifyRule::default(),
        slots: args.max_num_seqs,
        lanes: 1,
        device: "of the engine".into(),
        dtype: "of the engine".into(),
        threads: 0,
    }
}
