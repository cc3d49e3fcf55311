//! Drafters: one folder each, one variant each.

pub mod block;
pub mod cost;
pub mod learner;

use std::path::Path;

use deepspec_decode::{Context, Proposal, Proposer, SamplingBatch};
use tch::{Device, Kind, Tensor};

use crate::config::{Fields, read_json};
use crate::{Block, BlockProposer, ModelError, TargetModel};

/// How a drafter is loaded.
#[derive(Debug, Clone)]
pub struct DrafterOptions {
    /// Where it runs.
    pub device: Device,
    /// Kind of weights and activations.
    pub kind: Kind,
    /// Sequences it holds at once.
    pub slots: usize,
}

/// Any drafter that can propose.
pub enum Drafter {
    /// DSpark, or DFlash, which is DSpark without heads.
    Block(BlockProposer),
}

impl Drafter {
    /// Loads the drafter checkpoint in `dir`.
    ///
    /// # Errors
    /// If the folder is no drafter checkpoint of a known kind, or its tensors do not fit its config.
    pub fn load(dir: &Path, options: &DrafterOptions) -> Result<Self, ModelError> {
        let (path, map) = read_json(dir)?;
        let fields = Fields::new(&path, &map);
        let architecture =
            map.get("architectures").and_then(|list| list.get(0)).and_then(|name| name.as_str());
        match architecture {
            Some("Qwen3DSparkModel") => Ok(Self::Block(BlockProposer::new(
                Block::load(dir, options.device, options.kind)?,
                options.slots,
            ))),
            other => Err(fields.error(
                "architectures",
                format!("{other:?} is no known drafter; expected [\"Qwen3DSparkModel\"]"),
            )),
        }
    }

    /// Target layers whose states it reads.
    pub fn taps(&self) -> &[i64] {
        match self {
            Self::Block(proposer) => &proposer.block().config().target_layer_ids,
        }
    }

    /// Whether this drafter belongs to this target, judged by their configs.
    ///
    /// # Errors
    /// [`ModelError::Mismatch`] naming what differs.
    pub fn check_fits(&self, target: &TargetModel) -> Result<(), ModelError> {
        match self {
            Self::Block(proposer) => proposer.block().config().check_fits(target.config()),
        }
    }
}

impl Proposer for Drafter {
    fn block_size(&self) -> usize {
        match self {
            Self::Block(proposer) => proposer.block_size(),
        }
    }

    fn propose(
        &mut self,
        context: &Context,
        slots: &[usize],
        anchors: &Tensor,
        uniforms: &Tensor,
        sampling: &SamplingBatch,
    ) -> Proposal {
        match self {
            Self::Block(proposer) => proposer.propose(context, slots, anchors, uniforms, sampling),
        }
    }

    fn reset(&mut self, slot: usize) {
        match self {
            Self::Block(proposer) => proposer.reset(slot),
        }
    }
}
