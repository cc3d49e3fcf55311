//! What must agree before a drafter can serve a model, and how far the model's embedding and LM head moved.

use std::path::Path;

use deepspec_core::usage;
use deepspec_drafters::{Drafter, DrafterOptions};
use deepspec_models::{ModelConfig, load_embed_and_head};
use deepspec_text::{ChatTokenizer, TextError};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

/// The distance between the matrix `[V, d]` of the drafter's checkpoint and the new target's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Movement {
    /// Norm of the difference over the norm of the drafter's matrix.
    pub relative: f64,
    /// Rows (tokens) that differ in bfloat16, the dtype of checkpoints.
    pub rows_moved: i64,
    /// All rows.
    pub rows: i64,
}

/// Findings about files, before anything is decoded.
#[derive(Debug, Clone, Serialize)]
pub struct Fit {
    /// Movement of the embedding; None for drafters that keep no copy.
    pub embedding: Option<Movement>,
    /// Movement of the LM head, or of its rows for a reduced vocabulary; None for drafters that keep no copy.
    pub lm_head: Option<Movement>,
    /// Whether the chat template is that of the base; None without a base.
    pub same_template: Option<bool>,
}

impl Fit {
    /// Checks the drafter in `draft` against the models.
    ///
    /// # Errors
    /// Usage errors that name what differs: sizes, captured layers, or a token.
    pub fn check(draft: &Path, target: &Path, base: Option<&Path>) -> anyhow::Result<Self> {
        let options = DrafterOptions {
            device: Device::Cpu,
            kind: Kind::Float,
            slots: 1,
            target: Some(target.to_path_buf()),
        };
        let drafter = deepspec_drafters::load_drafter(draft, &options)?;
        let config = ModelConfig::load(target)?;
        drafter.check_fits(&config)?;
        let tokenizer = ChatTokenizer::load(target)?;
        let mut same_template = None;
        if let Some(base) = base {
            drafter.check_fits(&ModelConfig::load(base)?)?;
            match tokenizer.check_same_vocabulary(base) {
                Ok(()) => {}
                Err(TextError::OtherToken { id, own, target: new, .. }) => usage!(
                    "--target {}: token {id} is {new:?}, with --base it is {own:?}; a drafter serves models of one tokenizer, so train one \
                     for this target",
                    target.display()
                ),
                Err(error) => return Err(error.into()),
            }
            let own = ChatTokenizer::load(base)?;
            same_template = Some(own.template_digest() == tokenizer.template_digest());
        }
        let (embedding, lm_head) = movements(drafter.as_ref(), target, &config)?;
        Ok(Self { embedding, lm_head, same_template })
    }
}

/// Movement of embedding and LM head, for drafters that hold copies of their target's.
fn movements(
    drafter: &dyn Drafter,
    target: &Path,
    config: &ModelConfig,
) -> anyhow::Result<(Option<Movement>, Option<Movement>)> {
    let Some(probe) = drafter.probe() else { return Ok((None, None)) };
    let (embed, head) = load_embed_and_head(target, config, Device::Cpu, Kind::Float)?;
    let head =
        probe.draft_tokens().map_or_else(|| head.shallow_clone(), |tokens| head.index_select(0, tokens));
    let (own_embed, own_head) = probe.embed_and_head();
    Ok((Movement::new(&own_embed, &embed), Movement::new(&own_head, &head)))
}

impl Movement {
    /// None if the shapes differ: the drafter keeps a matrix of its own.
    fn new(own: &Tensor, new: &Tensor) -> Option<Self> {
        if own.size() != new.size() {
            return None;
        }
        let _guard = tch::no_grad_guard();
        let rounded = |tensor: &Tensor| tensor.to_kind(Kind::BFloat16).to_kind(Kind::Float);
        let (own, new) = (rounded(own), rounded(new));
        let difference = &new - &own;
        let moved = difference.ne(0.0).any_dim(1, false).sum(Kind::Int64).int64_value(&[]);
        let norm = own.norm().double_value(&[]);
        let relative = if norm > 0.0 { difference.norm().double_value(&[]) / norm } else { 0.0 };
        Some(Self { relative, rows_moved: moved, rows: own.size()[0] })
    }

    /// The movement in words.
    pub fn words(self) -> String {
        match self.rows_moved {
            0 => "as in the drafter's checkpoint".into(),
            rows => format!(
                "moved by {:.2} % of its norm, in {rows} of {} rows",
                100.0 * self.relative,
                self.rows
            ),
        }
    }
}
