//! A drafter's checkpoint folder: config and tensors.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use safetensors::Dtype;

use crate::draft_vocab::{D2T, DraftVocab};
use crate::drafter::Incompatibility;
use crate::experts::stack_shapes;
use crate::export::Engine;
use crate::fields::read_object;
use crate::layouts::UnreadOptions;
use crate::shapes::{self, REBUILT_TENSORS};
use crate::{
    CheckpointError, CheckpointFormat, Drafter, Fields, KnownDrafters, TensorMetadata, Tensors, layouts,
    quantised_folder_message,
};

/// An opened drafter checkpoint of any known format.
pub struct Checkpoint {
    dir: PathBuf,
    format: CheckpointFormat,
    drafter: Drafter,
    tensors: Tensors,
    /// Config key that this project cannot run, with the reason.
    unsupported: Option<(String, String)>,
    /// Why engines would ignore keys of the config.
    unread: UnreadOptions,
}

impl Checkpoint {
    /// Opens the folder and detects its format and drafter kind. Tensor values stay on disk.
    ///
    /// # Errors
    /// Fails if format or kind is unknown, or if a file or config key is broken.
    pub fn open(dir: &Path, known: KnownDrafters) -> Result<Self, CheckpointError> {
        let path = dir.join("config.json");
        let map = read_object(&path)?;
        layouts::refuse_unread_target(&Fields::new(&path, &map))?;
        let holds_drafter = layouts::is_target_with_drafter(&map);
        if let Some(problem) = quantised_folder_message(dir, &map).filter(|_| !holds_drafter) {
            Tensors::open(dir)?;
            return Err(CheckpointError::NotADrafter { path: dir.to_path_buf(), problem });
        }
        let tensors = match holds_drafter {
            true => Tensors::open_drafter_of_deepseek_v4(dir, &Fields::new(&path, &map))?,
            false => Tensors::open(dir)?,
        };
        let (format, drafter) = layouts::read(&path, &map, &tensors, known)?;
        let unread = UnreadOptions::new(&map, &drafter);
        Ok(Self { dir: dir.to_path_buf(), format, drafter, tensors, unsupported: None, unread })
    }

    /// Records a config key that this project cannot run. Then [`Self::check`] fails, and
    /// conversions are refused.
    pub fn set_unsupported(&mut self, key: String, reason: String) {
        if self.drafter.incompatibilities.iter().all(|known| known.key != key) {
            let reason = format!("it is not run here: {reason}");
            self.drafter.incompatibilities.push(Incompatibility { key: key.clone(), reason });
        }
        self.unsupported = Some((key, reason));
    }

    /// Key and reason recorded by [`Self::set_unsupported`].
    pub(crate) fn unsupported(&self) -> Option<(&str, &str)> {
        self.unsupported.as_ref().map(|(key, reason)| (key.as_str(), reason.as_str()))
    }

    /// Folder of the checkpoint.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Format of the checkpoint.
    pub fn format(&self) -> CheckpointFormat {
        self.format
    }

    /// The drafter that the config describes.
    pub fn drafter(&self) -> &Drafter {
        &self.drafter
    }

    /// Tensors of the checkpoint, by their names in the files.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Whether the tensor is a copy of the target's (embedding, LM head) or rebuilt from it, so
    /// that training does not change it.
    pub fn is_target_tensor(&self, name: &str) -> bool {
        let name = self.format.to_reference_name(self.drafter.kind.as_ref(), name);
        let is_own_head = name == shapes::HEAD && self.drafter.has_reduced_vocab();
        !is_own_head && (shapes::is_embed_or_head(&name) || REBUILT_TENSORS.contains(&name.as_str()))
    }

    /// Whether the checkpoint has the reference's format but lacks embedding and LM head, which
    /// engines take from the target.
    pub fn lacks_embed_and_head(&self) -> bool {
        self.format == CheckpointFormat::Reference
            && [shapes::EMBED, shapes::HEAD].iter().all(|end| self.find(end).is_none())
    }

    /// Why an engine would run other blocks, or layers without sinks, where it reads the layout. None if it reads what the drafter
    /// has.
    pub(crate) fn unread_by(&self, engine: Engine) -> Option<&'static str> {
        self.unread.of(engine)
    }

    /// The reason why the checkpoint cannot be converted to the format `to`; None if it can.
    pub fn refusal(&self, to: CheckpointFormat) -> Option<String> {
        self.conversion_refusal(&self.drafter, to)
    }

    /// Like [`Self::refusal`], for the drafter completed with the target's settings.
    pub(crate) fn conversion_refusal(&self, drafter: &Drafter, to: CheckpointFormat) -> Option<String> {
        // A conversion to the format that the checkpoint already has is useful only if it adds
        // embedding and LM head, or keys that engines read.
        let has_unread =
            [Engine::Vllm, Engine::Sglang].iter().any(|&engine| self.unread_by(engine).is_some());
        let adds_keys = to != CheckpointFormat::Reference && has_unread;
        if to == self.format && !self.lacks_embed_and_head() && !adds_keys {
            return Some(format!("it is a checkpoint of {to} already"));
        }
        drafter.reason_not_convertible().or_else(|| drafter.kind.refusal(drafter, to))
    }

    /// An error that refuses the conversion to `to`.
    pub(crate) fn refused_error(&self, to: &'static str, reason: String) -> CheckpointError {
        CheckpointError::Refused { path: self.dir.clone(), to, reason }
    }

    /// Finds a tensor by its name in the reference's format. Returns its name in the files, and its
    /// metadata.
    pub(crate) fn find(&self, reference_name: &str) -> Option<(String, &TensorMetadata)> {
        let name = self.format.to_format_name(self.drafter.kind.as_ref(), reference_name);
        self.tensors.get(&name).map(|facts| (name, facts))
    }

    /// Dtype of the trained weights.
    pub(crate) fn dtype(&self) -> Dtype {
        self.find("fc.weight").map_or(Dtype::BF16, |(_, facts)| facts.dtype)
    }

    /// Checks that the loader accepts the config and that the tensors match it. Tensors must have
    /// the expected names, shapes, plain dtypes and finite values.
    ///
    /// # Errors
    /// Fails with [`CheckpointError::Key`] for the config. Fails with [`CheckpointError::Tensor`]
    /// for the first tensor that is missing, misshapen, quantised, unexpected or not finite.
    pub fn check(&self) -> Result<(), CheckpointError> {
        if let Some((key, problem)) = self.unsupported.clone() {
            return Err(CheckpointError::Key { path: self.dir.join("config.json"), key, problem });
        }
        self.tensors.check_types()?;
        self.check_shapes()?;
        self.tensors.check_finite()
    }

    fn check_shapes(&self) -> Result<(), CheckpointError> {
        let Some(wanted) = shapes::tensor_shapes(&self.dir.join("config.json"), &self.drafter)? else {
            return Ok(());
        };
        let wanted = if self.format.stacks_experts() { stack_shapes(wanted) } else { wanted };
        let ends = [(shapes::EMBED, self.drafter.vocab_size), (shapes::HEAD, self.drafter.draft_vocab_size)];
        let shape = |rows: u64| vec![rows as usize, self.drafter.hidden_size as usize];
        let ends: Vec<(String, Vec<usize>)> = ends
            .iter()
            .filter(|(name, _)| {
                self.format == CheckpointFormat::DeepseekV4
                    || self.format == CheckpointFormat::Reference && !self.lacks_embed_and_head()
                    || *name == shapes::HEAD && self.drafter.has_reduced_vocab()
                    || self.find(name).is_some()
            })
            .map(|&(name, rows)| (name.to_string(), shape(rows)))
            .collect();
        let mut useless: BTreeSet<&str> = self.tensors.iter().map(|(name, _)| name).collect();
        for (reference_name, shape) in wanted.iter().chain(&ends) {
            let name = self.format.to_format_name(self.drafter.kind.as_ref(), reference_name);
            let facts = self.tensors.get(&name).ok_or_else(|| {
                self.tensors.error(&name, format!("missing; the config asks for one of shape {shape:?}"))
            })?;
            if facts.shape != *shape {
                let problem = format!("its shape is {:?}, the config asks for {shape:?}", facts.shape);
                return Err(self.tensors.error(&name, problem));
            }
            useless.remove(name.as_str());
        }
        if matches!(self.format, CheckpointFormat::Speculators | CheckpointFormat::Specforge) {
            useless.retain(|name| !REBUILT_TENSORS.contains(name));
        }
        if self.drafter.has_reduced_vocab() {
            self.check_draft_vocab()?;
            useless.remove(D2T);
        }
        match useless.first() {
            None => Ok(()),
            Some(name) => Err(self
                .tensors
                .error(name, "the config has no use for it; config.json and weights do not belong together")),
        }
    }

    fn check_draft_vocab(&self) -> Result<(), CheckpointError> {
        let Drafter { vocab_size, draft_vocab_size, .. } = self.drafter;
        let found = DraftVocab::of_tensors(&self.tensors, vocab_size as usize)?.tokens().len();
        if found as u64 != draft_vocab_size {
            let problem = format!("it has {found} entries, `draft_vocab_size` is {draft_vocab_size}");
            return Err(self.tensors.error(D2T, problem));
        }
        Ok(())
    }

    /// Tells in one sentence how to convert the checkpoint so that DeepSpec reads it. None for the
    /// reference's format, which DeepSpec reads without a conversion.
    pub fn conversion_advice(&self) -> Option<String> {
        let (format, kind) = (self.format, self.drafter.kind.title());
        let what = match format {
            CheckpointFormat::Reference if self.lacks_embed_and_head() => {
                format!(
                    "it is a {kind} checkpoint for engines, which take embedding and head from the target"
                )
            }
            CheckpointFormat::Reference => return None,
            _ => format!("it is a {kind} checkpoint in the format of {format}"),
        };
        Some(match self.refusal(CheckpointFormat::Reference) {
            Some(reason) => format!("{what}, which cannot be converted: {reason}"),
            None => {
                let dir = self.dir.display();
                format!(
                    "{what}; make one that is read here by `deepspec-eval checkpoint convert --from {dir} --to reference --target \
                     TARGET --output-dir {dir}-reference`"
                )
            }
        })
    }
}
