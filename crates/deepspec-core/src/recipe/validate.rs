//! Checks of a recipe that its types cannot express.

use super::{DataRecipe, LossNormalization, Recipe, StatesStorage, TemplateRecipe};

/// Maximum number of draft layers.
const MAX_DRAFT_LAYERS: usize = 1024;

impl<D> Recipe<D> {
    /// Checks values against their ranges and each other; the error is a key with its problem.
    pub(super) fn validate(&self) -> Result<(), (&'static str, String)> {
        let positive = [
            ("train.local_batch_size", self.train.local_batch_size),
            ("train.max_tokens_per_batch", self.train.max_tokens_per_batch.unwrap_or(1)),
            ("train.global_batch_size", self.train.global_batch_size),
            ("logging.logging_steps", self.logging.logging_steps),
            ("logging.checkpointing_steps", self.logging.checkpointing_steps),
            ("logging.keep_checkpoints", self.logging.keep_checkpoints.unwrap_or(1)),
            ("logging.eval_every", self.logging.eval_every.unwrap_or(1)),
            ("data.max_length", self.data.max_length),
            ("train.max_train_steps", self.train.max_train_steps.unwrap_or(1)),
            ("train.num_train_epochs", self.train.max_train_steps.map_or(self.train.num_train_epochs, |_| 1)),
        ];
        require_at_least_one(&positive)?;
        if self.name.is_empty() || self.name.contains(['/', '\\']) || self.name.starts_with('.') {
            return Err(("name", format!("\"{}\" cannot name a folder", self.name)));
        }
        if !(self.train.lr > 0.0 && self.train.lr.is_finite()) {
            return Err(("train.lr", format!("{} is no positive number", self.train.lr)));
        }
        if !(0.0..1.0).contains(&self.train.warmup_ratio) {
            return Err(("train.warmup_ratio", format!("{} is not in [0, 1)", self.train.warmup_ratio)));
        }
        if !self.train.weight_decay.is_finite() || self.train.weight_decay < 0.0 {
            return Err(("train.weight_decay", format!("{} is no number from 0", self.train.weight_decay)));
        }
        if self.train.init_from.is_none() && !self.train.freeze.is_empty() {
            let problem = "fresh weights would stay what they are; say in train.init_from whose are kept";
            return Err(("train.freeze", problem.into()));
        }
        if let Some(lora) = &self.train.lora {
            lora.check(self.train.init_from.is_some(), !self.train.freeze.is_empty())?;
        }
        let by_forward = self.train.loss_normalization == LossNormalization::MicroBatch;
        if by_forward && self.train.max_tokens_per_batch.is_some() {
            let problem =
                "with train.loss_normalization: micro_batch losses would depend on it; leave one of them out";
            return Err(("train.max_tokens_per_batch", problem.into()));
        }
        if self.train.max_tokens_per_batch.is_some() && self.train.local_batch_size == 1 {
            let problem = "train.local_batch_size: 1 packs nothing; set it to the most sequences that a forward may take";
            return Err(("train.max_tokens_per_batch", problem.into()));
        }
        if self.train.timeout_s == 0 {
            return Err(("train.timeout_s", "must be at least 1".into()));
        }
        if self.train.max_grad_norm.is_nan() || self.train.max_grad_norm <= 0.0 {
            return Err(("train.max_grad_norm", format!("{} is not positive", self.train.max_grad_norm)));
        }
        if self.target.layer_ids.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err((
                "target.layer_ids",
                "expected layers that are strictly increasing, `embedding` first".into(),
            ));
        }
        if let TemplateRecipe::Entry(entry) = &self.data.chat_template {
            entry.check()?;
        }
        self.data.check()?;
        match (&self.eval, self.logging.eval_every) {
            (Some(_), None) => {
                return Err((
                    "eval",
                    "nothing is measured without logging.eval_every; give both or none".into(),
                ));
            }
            (Some(eval), Some(_)) => eval.check()?,
            (None, _) => {}
        }
        Ok(())
    }
}

/// Returns the key and the problem of the first value that is 0. Also limits `num_draft_layers`.
///
/// # Errors
/// Fails if a value is out of range.
pub fn require_at_least_one(values: &[(&'static str, usize)]) -> Result<(), (&'static str, String)> {
    if let Some((key, layers)) =
        values.iter().find(|(key, value)| *key == "num_draft_layers" && *value > MAX_DRAFT_LAYERS)
    {
        return Err((*key, format!("{layers} is not between 1 and {MAX_DRAFT_LAYERS}")));
    }
    match values.iter().find(|(_, value)| *value == 0) {
        Some((key, _)) => Err((key, "must be at least 1".into())),
        None => Ok(()),
    }
}

impl DataRecipe {
    /// Checks that conversations and a target device are given only if hidden states are computed
    /// during training.
    fn check(&self) -> Result<(), (&'static str, String)> {
        if self.states.servers.is_some() && self.target_device.is_some() {
            return Err((
                "data.target_device",
                "no target runs here where servers compute the states; leave it out".into(),
            ));
        }
        match (&self.states.storage, self.input.is_empty(), &self.target_device) {
            (StatesStorage::Cache(_), false, _) => Err((
                "data.input",
                "a cache has its samples in it already; leave the files out, or take data.states: online".into(),
            )),
            (StatesStorage::Cache(_), true, Some(_)) => Err((
                "data.target_device",
                "no target runs where the states come from a cache; leave it out".into(),
            )),
            (StatesStorage::Online | StatesStorage::Hybrid(_), true, _) => Err((
                "data.input",
                "states that are computed while training need the conversations: a list of JSONL files, such as [answers.jsonl]".into(),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tap;
    use crate::config::{self, Document};
    use crate::recipe::{DrafterRecipe, TrainDtype};

    const MINIMAL: &str = "
name: tiny
target: {model: assets/tiny-target, layer_ids: [embedding, 1, 3]}
drafter: {dspark: {block_size: 7}}
data: {states: {cache: runs/cache}, chat_template: qwen}
";

    fn read(text: &str, overrides: &[&str]) -> Result<Recipe<DrafterRecipe>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("recipe.yaml");
        std::fs::write(&path, text).unwrap();
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        let recipe = Document::load(&path, &overrides).and_then(|document| Recipe::read(&document));
        recipe.map_err(|error| error.to_string())
    }

    #[test]
    fn a_minimal_recipe_takes_the_defaults_and_survives_a_round_trip() {
        let recipe = read(MINIMAL, &["train.lr=3e-4", "train.precision=fp32"]).unwrap();
        assert_eq!(Tap::layer_ids(&recipe.target.layer_ids), [-1, 1, 3]);
        assert_eq!((recipe.seed, recipe.train.lr, recipe.train.precision), (42, 3e-4, TrainDtype::Fp32));
        assert_eq!(
            (recipe.drafter.kind.as_str(), &recipe.drafter.settings["block_size"]),
            ("dspark", &7.into())
        );
        assert_eq!(read(&config::to_yaml(&recipe).unwrap(), &[]).unwrap(), recipe);
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |change: &str, hint: &str| {
            let error = read(MINIMAL, &[change]).unwrap_err();
            assert!(error.contains(hint), "{change}: {error}");
        };
        wrong("drafter={}", "`drafter`: 0 kinds of drafters; expected one");
        wrong("drafter.eagle3={}", "`drafter`: 2 kinds of drafters; expected one");
        wrong("train.global_batch_size=0", "train.global_batch_size");
        wrong("target.layer_ids=[3, 1]", "strictly increasing");
        wrong("target.layer_ids=[-2]", "expected a layer number or `embedding`");
        wrong("data.states=disk", "cache");
        wrong("data.states=online", "`data.input`: states that are computed while training need");
        wrong("data.states={hybrid: a}", "`data.input`");
        wrong("data.input=[a.jsonl]", "`data.input`: a cache has its samples in it already");
        wrong("data.input=a.jsonl", "`data.input`");
        wrong("data.target_device=cpu", "`data.target_device`");
        wrong("name=a/b", "cannot name a folder");
        wrong("train.freeze=[backbone]", "`train.freeze`: fresh weights would stay what they are");
        wrong(
            "train.lora={r: 4}",
            "`train.lora`: LoRA adapts a finished drafter; name it in train.init_from",
        );
        let adapts = |lora: &str| read(MINIMAL, &["train.init_from=there", lora]);
        for (lora, hint) in [
            ("train.lora={r: 0}", "`train.lora.r`: must be at least 1"),
            ("train.lora={r: 1025}", "`train.lora.r`: 1025 is above the highest rank, 1024"),
            ("train.lora={target_modules: []}", "`train.lora.target_modules`: names no module"),
            ("train.lora={lora_alpha: -1}", "`train.lora.lora_alpha`: -1 is no positive number"),
            ("train.lora={rank: 4}", "train.lora"),
            ("train={lora: {}, init_from: there, freeze: [backbone]}", "`train.freeze`: with train.lora"),
        ] {
            let error = adapts(lora).unwrap_err();
            assert!(error.contains(hint), "{lora}: {error}");
        }
        let lora = adapts("train.lora={target_modules: [q_proj, layers.1.mlp.up_proj]}")
            .unwrap()
            .train
            .lora
            .unwrap();
        assert_eq!((lora.r, lora.lora_alpha, lora.scale()), (16, 32.0, 2.0));
        let is_target = |name: &str| lora.is_target(name);
        assert!(is_target("layers.0.self_attn.q_proj") && is_target("layers.1.mlp.up_proj"));
        assert!(!is_target("layers.0.mlp.up_proj") && !is_target("layers.0.self_attn.eq_proj"));
        wrong("train.max_tokens_per_batch=0", "`train.max_tokens_per_batch`: must be at least 1");
        wrong(
            "train.max_tokens_per_batch=4096",
            "`train.max_tokens_per_batch`: train.local_batch_size: 1 packs nothing",
        );
        wrong(
            "train={local_batch_size: 4, max_tokens_per_batch: 4096, loss_normalization: micro_batch}",
            "`train.max_tokens_per_batch`: with train.loss_normalization: micro_batch",
        );
        wrong("logging.eval_every=0", "`logging.eval_every`: must be at least 1");
        wrong("eval={limit: 4}", "`eval`: nothing is measured without logging.eval_every");
        let entry = "data.chat_template={name: a, assistant_header: '', end_of_turn: x}";
        wrong(entry, "`data.chat_template.assistant_header`: must not be empty");
        wrong("data.chat_template={nam: a}", "did you mean `name`?");
        wrong("data.chat_template=/nowhere/a.yaml", "/nowhere/a.yaml");
        let evaluated = |eval: &str| read(MINIMAL, &["logging.eval_every=5", eval]).unwrap_err();
        assert!(evaluated("eval={slots: 0}").contains("`eval.slots`: must be at least 1"));
        assert!(evaluated("eval={suites: []}").contains("`eval.suites`"));
        assert!(evaluated("eval={temperature: -1}").contains("`eval.temperature`"));
        assert!(evaluated("eval={suite: [a]}").contains("did you mean `suites`?"));
    }
}
