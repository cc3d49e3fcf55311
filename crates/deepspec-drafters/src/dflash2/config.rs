//! What a DFlash 2 drafter is, read from and written to its checkpoint's config.json.

use std::path::Path;

use deepspec_checkpoint::Fields;
use deepspec_core::Slots;
use deepspec_models::ModelError;
use deepspec_models::config::read_json;
use serde_json::{Map, Value, json};

use super::recipe::Convolution;
use crate::ConfigIssue;
use crate::block_common::{BlockSpec, MAX_RANK};
use crate::draft_model::{DraftDecoder, DrafterConfig, WarmStart};

/// A DFlash 2 drafter's architecture.
#[derive(Debug, Clone, PartialEq)]
pub struct DFlash2Config {
    /// Its decoder and where the target is tapped.
    pub decoder: DraftDecoder,
    /// Its blocks, whose slots fill in.
    pub blocks: BlockSpec,
    /// Its convolutions.
    pub convolution: Convolution,
    /// r of its selector.
    pub selector_rank: i64,
    /// k of its selector.
    pub selector_top_k: i64,
}

impl DrafterConfig for DFlash2Config {
    const CLASS: &'static str = "DFlash2Model";
    const CHOOSES_SLOTS: bool = false;

    fn load(dir: &Path) -> Result<Self, ModelError> {
        let (path, map) = read_json(dir)?;
        let fields = Fields::new(&path, &map);
        let size = |key: &str| fields.size(key).and_then(|value| fields.required(key, value));
        let config = Self {
            decoder: DraftDecoder::read(&path, &map)?,
            blocks: BlockSpec::read(&fields, Slots::FillIn)?,
            convolution: Convolution {
                kernel_size: size("conv_kernel_size")?,
                group_size: size("conv_group_size")?,
            },
            selector_rank: size("selector_rank")?,
            selector_top_k: size("selector_top_k")?,
        };
        config.validate().map_err(|(key, problem)| fields.error(key, problem))?;
        Ok(config)
    }

    fn decoder(&self) -> &DraftDecoder {
        &self.decoder
    }

    fn decoder_mut(&mut self) -> &mut DraftDecoder {
        &mut self.decoder
    }

    fn draft_len(&self) -> usize {
        self.blocks.drafted()
    }

    fn anchored(&self) -> Option<&BlockSpec> {
        Some(&self.blocks)
    }

    fn anchored_mut(&mut self) -> Option<&mut BlockSpec> {
        Some(&mut self.blocks)
    }

    fn shrink(&mut self) {
        self.blocks.shrink();
        (self.selector_rank, self.selector_top_k) = (8, self.selector_top_k.min(8));
        self.convolution.group_size = 1; // divides any width
    }

    fn transfer(&self, from: &Self, transfer: &mut WarmStart) {
        self.blocks.transfer(&from.blocks, transfer);
        let (theirs, own) = (&from.convolution, &self.convolution);
        transfer.compare("convolution.kernel_size", &theirs.kernel_size, &own.kernel_size);
        transfer.compare("convolution.group_size", &theirs.group_size, &own.group_size);
        transfer.compare("selector.rank", &from.selector_rank, &self.selector_rank);
        transfer.compare("selector.top_k", &from.selector_top_k, &self.selector_top_k);
    }

    fn to_json(&self) -> Map<String, Value> {
        let mut map = self.decoder.to_json(&self.architecture());
        self.blocks.write(&mut map);
        map.insert("conv_kernel_size".into(), json!(self.convolution.kernel_size));
        map.insert("conv_group_size".into(), json!(self.convolution.group_size));
        map.insert("selector_rank".into(), json!(self.selector_rank));
        map.insert("selector_top_k".into(), json!(self.selector_top_k));
        map
    }
}

impl DFlash2Config {
    /// Checks the fields against each other.
    ///
    /// # Errors
    /// A key and what is wrong with it.
    pub fn validate(&self) -> Result<(), ConfigIssue> {
        self.decoder.check()?;
        let (width, vocab) = (self.decoder.model.hidden_size, self.decoder.model.vocab_size);
        self.blocks.check(vocab)?;
        if self.blocks.slots != Slots::FillIn {
            return Err(("sample_from_anchor", "true; the slots of DFlash 2 fill in".into()));
        }
        let within = |key, found, most: i64| match found {
            found if (1..=most).contains(&found) => Ok(()),
            found => Err((key, format!("{found} is not between 1 and {most}"))),
        };
        within("conv_kernel_size", self.convolution.kernel_size, self.blocks.block_size as i64)?;
        within("selector_rank", self.selector_rank, MAX_RANK)?;
        within("selector_top_k", self.selector_top_k, vocab)?;
        let group = self.convolution.group_size;
        if group < 1 || width % group != 0 {
            return Err(("conv_group_size", format!("{group} does not divide the hidden size {width}")));
        }
        Ok(())
    }
}
