//! Checks that a drafter fits a model, and measures how far the model's embedding and LM head moved.

use std::path::Path;

use anyhow::Context;
use deepspec_core::usage;
use deepspec_drafters::{Drafter, DrafterOptions, is_language_model, open_checkpoint};
use deepspec_models::{ModelConfig, load_embed_and_head};
use deepspec_text::ChatTokenizer;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::run::models::check_tokens;

/// Rows that are compared in float32 at a time.
const ROWS_AT_ONCE: i64 = 4096;

/// The distance between two matrices `[V, d]`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Movement {
    /// Norm of the difference over the norm of the old matrix.
    pub relative: f64,
    /// Rows (tokens) that differ in bfloat16, the dtype of checkpoints.
    pub rows_moved: i64,
    /// All rows.
    pub rows: i64,
}

/// Whether `train.init_from` can start from the drafter's weights for the new target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum InitFrom {
    /// It can.
    Possible,
    /// It refuses an LM head or an embedding that is the drafter's own and differs from the new target's.
    OwnMatrices,
    /// Drafters of this kind are not trained here: language models.
    NotTrainedHere,
}

/// Findings about files, before anything is decoded.
#[derive(Debug, Clone, Serialize)]
pub struct Fit {
    /// Movement of the new target's embedding: from the base's, or without a base from the drafter's copy. None if the drafter has no
    /// copy, or one that may be its own.
    pub embedding: Option<Movement>,
    /// Movement of the LM head, as of the embedding. Without a base also None for a reduced vocabulary, whose head may be trained.
    pub lm_head: Option<Movement>,
    /// Whether the drafter's copies differ from the base's matrices; None without a base or copies.
    pub copies_differ_from_base: Option<bool>,
    /// Whether the drafter's copies differ from the new target's matrices; None without copies.
    pub copies_differ_from_target: Option<bool>,
    /// Whether the drafter has an LM head or an embedding that may be its own.
    pub may_own_matrices: bool,
    /// Whether training can start from the drafter.
    pub init_from: InitFrom,
    /// Special and reserved tokens of the new target that are others than the base's.
    pub other_special_tokens: Vec<String>,
    /// Whether the chat template is that of the base; None without a base.
    pub same_template: Option<bool>,
}

/// Embedding and LM head, `[V, d]` each.
type Matrices = (Tensor, Tensor);

impl Fit {
    /// Checks the drafter in `draft` against the models.
    ///
    /// # Errors
    /// Usage errors that name what differs: sizes, captured layers, or a token.
    pub fn check(draft: &Path, target: &Path, base: Option<&Path>) -> anyhow::Result<Self> {
        let config = ModelConfig::load(target).context("--target")?;
        let tokenizer = ChatTokenizer::load(target).context("--target")?;
        let base_config = base.map(ModelConfig::load).transpose().context("--base")?;
        let is_language_model = is_language_model(draft).context("--draft")?;
        let copies = if is_language_model {
            check_language_model(
                draft,
                &tokenizer,
                [Some(("--target", &config)), base_config.as_ref().map(|c| ("--base", c))],
            )?;
            None
        } else {
            let options = DrafterOptions {
                device: Device::Cpu,
                kind: Kind::BFloat16,
                slots: 1,
                target: Some(target.to_path_buf()),
            };
            let drafter = deepspec_drafters::load_drafter(draft, &options).context("--draft")?;
            drafter.check_fits(&config).context("--target")?;
            if let Some(base) = &base_config {
                drafter.check_fits(base).context("--base")?;
            }
            Copies::of(drafter.as_ref(), draft)
        };
        let (mut same_template, mut other_special_tokens) = (None, vec![]);
        if let Some(base) = base {
            let own = ChatTokenizer::load(base).context("--base")?;
            other_special_tokens = compare_tokens(&tokenizer, &own)?;
            same_template = Some(own.template_digest() == tokenizer.template_digest());
        }

        let matrices =
            |dir: &Path, config: &ModelConfig| load_embed_and_head(dir, config, Device::Cpu, Kind::BFloat16);
        let new = matrices(target, &config).context("--target")?;
        let old = match base.zip(base_config.as_ref()) {
            Some((dir, config)) => Some(matrices(dir, config).context("--base")?),
            None => None,
        };
        let copies = copies.as_ref();
        let (embedding, lm_head) = match (&old, copies) {
            (Some(old), _) => (Movement::between(&old.0, &new.0), Movement::between(&old.1, &new.1)),
            (None, Some(copies)) => (
                copies.embed_is_copy().then(|| Movement::between(&copies.embed, &new.0)).flatten(),
                copies.head_is_copy().then(|| Movement::between(&copies.head, &new.1)).flatten(),
            ),
            (None, None) => (None, None),
        };
        Ok(Self {
            embedding,
            lm_head,
            copies_differ_from_base: copies
                .zip(old.as_ref())
                .and_then(|(copies, old)| copies.differ_from(old)),
            copies_differ_from_target: copies.and_then(|copies| copies.differ_from(&new)),
            may_own_matrices: copies.is_some_and(|copies| !copies.head_is_copy()),
            init_from: match copies {
                Some(copies) => copies.init_from(&new),
                None if is_language_model => InitFrom::NotTrainedHere,
                // An assistant of Gemma 4 has no copies, and its own head is trained.
                None => InitFrom::Possible,
            },
            other_special_tokens,
            same_template,
        })
    }
}

/// Checks a language model against the models, without its weights.
fn check_language_model(
    draft: &Path,
    tokenizer: &ChatTokenizer,
    models: [Option<(&str, &ModelConfig)>; 2],
) -> anyhow::Result<()> {
    check_tokens(draft, tokenizer)?;
    let found = ModelConfig::load(draft).context("--draft")?.vocab_size;
    for (flag, model) in models.into_iter().flatten() {
        if model.vocab_size != found {
            usage!(
                "{flag}: its vocab_size is {}, that of --draft is {found}; a language model drafts for models of its vocabulary",
                model.vocab_size
            );
        }
    }
    Ok(())
}

/// Compares the tokens of the new target with those of the base. Returns the special and reserved ones that differ.
///
/// # Errors
/// A usage error that names the first ordinary token that differs.
fn compare_tokens(target: &ChatTokenizer, base: &ChatTokenizer) -> anyhow::Result<Vec<String>> {
    let mut special = vec![];
    for id in 0..target.vocab_size().max(base.vocab_size()) as i64 {
        let (old, new) = (base.token(id), target.token(id));
        if old == new {
            continue;
        }
        let [old, new] =
            [old, new].map(|token| token.map_or("no token".into(), |token| format!("`{token}`")));
        if !(target.is_reserved(id) && base.is_reserved(id)) {
            usage!(
                "--target: token {id} is {new}, with --base it is {old}; a drafter serves models of one tokenizer, so train one for this \
                 target"
            );
        }
        special.push(format!("{id} is {new}, not {old}"));
    }
    Ok(special)
}

/// Embedding and LM head in a drafter's checkpoint.
struct Copies {
    embed: Tensor,
    head: Tensor,
    /// The target's ids of a reduced vocabulary.
    draft_tokens: Option<Tensor>,
    /// Whether both matrices may be the drafter's own.
    may_own: bool,
}

impl Copies {
    /// None for kinds that keep no copies.
    fn of(drafter: &dyn Drafter, dir: &Path) -> Option<Self> {
        let probe = drafter.probe()?;
        let (embed, head) = probe.embed_and_head()?;
        let may_own =
            open_checkpoint(dir).is_ok_and(|checkpoint| checkpoint.drafter().kind.owns_embed_and_head());
        Some(Self { embed, head, draft_tokens: probe.draft_tokens().map(Tensor::shallow_clone), may_own })
    }

    fn embed_is_copy(&self) -> bool {
        !self.may_own
    }

    fn head_is_copy(&self) -> bool {
        !self.may_own && self.draft_tokens.is_none()
    }

    /// Whether copies differ from a model's matrices; None if no matrix is known to be a copy.
    fn differ_from(&self, (embed, head): &Matrices) -> Option<bool> {
        let head_differs = || self.head_is_copy() && differ(&self.head, head);
        self.embed_is_copy().then(|| differ(&self.embed, embed) || head_differs())
    }

    /// As `load_pretrained` of the drafters decides: an own matrix is not trained, so it must be the new target's.
    fn init_from(&self, (embed, head): &Matrices) -> InitFrom {
        let rows = self
            .draft_tokens
            .as_ref()
            .map_or_else(|| head.shallow_clone(), |tokens| head.index_select(0, tokens));
        let own_embed_differs = !self.embed_is_copy() && differ(&self.embed, embed);
        let own_head_differs = !self.head_is_copy() && differ(&self.head, &rows);
        if own_embed_differs || own_head_differs { InitFrom::OwnMatrices } else { InitFrom::Possible }
    }
}

/// Whether any row differs in bfloat16.
fn differ(a: &Tensor, b: &Tensor) -> bool {
    Movement::between(a, b).is_none_or(|movement| movement.rows_moved > 0)
}

impl Movement {
    /// None if the shapes differ.
    fn between(old: &Tensor, new: &Tensor) -> Option<Self> {
        if old.size() != new.size() {
            return None;
        }
        let _guard = tch::no_grad_guard();
        let rows = old.size()[0];
        let (mut moved, mut distance, mut norm) = (0, 0.0, 0.0);
        let mut start = 0;
        while start < rows {
            let count = ROWS_AT_ONCE.min(rows - start);
            let part =
                |matrix: &Tensor| matrix.narrow(0, start, count).to_kind(Kind::BFloat16).to_kind(Kind::Float);
            let (old, new) = (part(old), part(new));
            let difference = new - &old;
            let squares = |matrix: &Tensor| matrix.square().sum(Kind::Double).double_value(&[]);
            moved += difference.ne(0.0).any_dim(1, false).sum(Kind::Int64).int64_value(&[]);
            distance += squares(&difference);
            norm += squares(&old);
            start += count;
        }
        let relative = if norm > 0.0 { (distance / norm).sqrt() } else { 0.0 };
        Some(Self { relative, rows_moved: moved, rows })
    }

    /// The movement in words. `from` is whose matrix the old one is.
    pub fn words(self, from: &str) -> String {
        match self.rows_moved {
            0 => format!("as {from}"),
            rows => format!(
                "moved from {from} by {:.2} % of its norm, in {rows} of {} rows",
                100.0 * self.relative,
                self.rows
            ),
        }
    }
}
