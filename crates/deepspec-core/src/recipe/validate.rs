//! What the types of a recipe cannot rule out.

use super::{DataRecipe, DrafterRecipe, Recipe, States, TemplateRecipe};

impl Recipe {
    /// Checks values against their ranges and each other; the error is a key and what is wrong with it.
    pub(super) fn validate(&self) -> Result<(), (&'static str, String)> {
        let positive = [
            ("train.local_batch_size", self.train.local_batch_size),
            ("train.global_batch_size", self.train.global_batch_size),
            ("logging.logging_steps", self.logging.logging_steps),
            ("logging.checkpointing_steps", self.logging.checkpointing_steps),
            ("logging.keep_checkpoints", self.logging.keep_checkpoints.unwrap_or(1)),
            ("logging.eval_every", self.logging.eval_every.unwrap_or(1)),
            ("data.max_length", self.data.max_length),
            ("train.max_train_steps", self.train.max_train_steps.unwrap_or(1)),
            ("train.num_train_epochs", self.train.max_train_steps.map_or(self.train.num_train_epochs, |_| 1)),
        ];
        at_least_one(&positive)?;
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
        if self.train.timeout_s == 0 {
            return Err(("train.timeout_s", "must be at least 1".into()));
        }
        if self.train.max_grad_norm.is_nan() || self.train.max_grad_norm <= 0.0 {
            return Err(("train.max_grad_norm", format!("{} is not positive", self.train.max_grad_norm)));
        }
        if self.target.layer_ids.is_empty()
            || self.target.layer_ids.windows(2).any(|pair| pair[0].0 >= pair[1].0)
        {
            return Err((
                "target.layer_ids",
                "expected at least one layer, strictly increasing, `embedding` first".into(),
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
        self.drafter.check()
    }
}

/// The error about the first of these values that is 0.
pub(super) fn at_least_one(values: &[(&'static str, usize)]) -> Result<(), (&'static str, String)> {
    match values.iter().find(|(_, value)| *value == 0) {
        Some((key, _)) => Err((key, "must be at least 1".into())),
        None => Ok(()),
    }
}

impl DrafterRecipe {
    fn check(&self) -> Result<(), (&'static str, String)> {
        match self {
            Self::Dspark(block) => block.check()?,
            Self::Dflash(block) if block.markov.is_some() || block.confidence.is_some() => {
                let problem = "DFlash has no Markov and no confidence head; use `dspark`";
                return Err(("drafter.dflash", problem.into()));
            }
            Self::Dflash(block) => block.check()?,
            Self::Eagle3(eagle3) => eagle3.check()?,
        }
        self.block().map_or(Ok(()), |block| self.block_loss(block).check())
    }
}

impl DataRecipe {
    /// Conversations and their target belong to states that are computed while training, and to no others.
    fn check(&self) -> Result<(), (&'static str, String)> {
        match (&self.states, self.input.is_empty(), &self.target_device) {
            (States::Cache(_), false, _) => Err((
                "data.input",
                "a cache has its samples in it already; leave the files out, or take data.states: online".into(),
            )),
            (States::Cache(_), true, Some(_)) => Err((
                "data.target_device",
                "no target runs where the states come from a cache; leave it out".into(),
            )),
            (States::Online | States::Hybrid(_), true, _) => Err((
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
    use crate::config;
    use crate::recipe::Precision;

    const MINIMAL: &str = "
name: tiny
target: {model: assets/tiny-target, layer_ids: [embedding, 1, 3]}
drafter:
  dspark:
    block_size: 7
    num_draft_layers: 2
    mask_token_id: 5
    markov: {type: vanilla, rank: 32}
    confidence: {with_markov: true}
data: {states: {cache: runs/cache}, chat_template: qwen}
";

    fn read(text: &str, overrides: &[&str]) -> Result<Recipe, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("recipe.yaml");
        std::fs::write(&path, text).unwrap();
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        Recipe::load(&path, &overrides).map_err(|error| error.to_string())
    }

    #[test]
    fn a_minimal_recipe_takes_the_defaults_and_survives_a_round_trip() {
        let recipe = read(MINIMAL, &["train.lr=3e-4", "train.precision=fp32"]).unwrap();
        assert_eq!(recipe.taps(), [-1, 1, 3]);
        assert_eq!((recipe.seed, recipe.train.lr, recipe.train.precision), (42, 3e-4, Precision::Fp32));
        let loss = recipe.drafter.block_loss(recipe.drafter.block().unwrap());
        assert_eq!((loss.ce_alpha, loss.l1_alpha), (0.1, 0.9));
        assert_eq!(read(&config::to_yaml(&recipe).unwrap(), &[]).unwrap(), recipe);
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |change: &str, hint: &str| {
            let error = read(MINIMAL, &[change]).unwrap_err();
            assert!(error.contains(hint), "{change}: {error}");
        };
        wrong("drafter.dspark.blok_size=3", "did you mean `block_size`?");
        wrong("train.global_batch_size=0", "train.global_batch_size");
        wrong("target.layer_ids=[3, 1]", "strictly increasing");
        wrong("target.layer_ids=[-1]", "expected an integer from 0, or embedding");
        wrong("data.states=disk", "cache");
        wrong("data.states=online", "`data.input`: states that are computed while training need");
        wrong("data.states={hybrid: a}", "`data.input`");
        wrong("data.input=[a.jsonl]", "`data.input`: a cache has its samples in it already");
        wrong("data.input=a.jsonl", "`data.input`");
        wrong("data.target_device=cpu", "`data.target_device`");
        wrong("drafter.dspark.markov.rank=0", "leave `markov` out");
        wrong(
            "drafter.dspark.loss={ce_alpha: 0.1, kl_alpha: -1}",
            "`drafter.loss.kl_alpha`: -1 is no number from 0",
        );
        wrong("drafter.dspark.loss={decay_gamma: 3}", "`drafter.loss`: all weights are 0");
        wrong("drafter.dspark.loss={ce_alpha: 1, dpace: {smoothing: 0}}", "`drafter.loss.dpace.smoothing`");
        wrong(
            "drafter.dspark.loss={l1_alpha: 1, dpace: {}}",
            "`drafter.loss.dpace`: it weighs the cross entropy",
        );
        wrong("drafter.dspark.loss={lk: {type: hybird}}", "hybird");
        wrong("drafter.dspark.loss={lk: {type: hybrid, eta: -1}}", "`drafter.loss.lk.eta`");
        wrong("name=a/b", "cannot name a folder");
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
        let dflash = MINIMAL.replace("dspark:", "dflash:");
        assert!(read(&dflash, &[]).unwrap_err().contains("use `dspark`"));
        wrong("drafter.dspark.layer_types=[full_attention]", "1 types for 2 draft layers");
        wrong(
            "drafter.dspark.layer_types=[full_attention, sliding_attention]",
            "`drafter.sliding_window`: missing",
        );
        wrong("drafter.dspark.layer_types=[full_attention, windowed]", "sliding_attention");
        let windows = |changes: &[&str]| {
            let recipe = read(MINIMAL, changes).unwrap();
            recipe.drafter.block().unwrap().windows().collect::<Vec<_>>()
        };
        assert_eq!(windows(&[]), [None, None]);
        assert_eq!(windows(&["drafter.dspark.sliding_window=9"]), [Some(9), Some(9)]);
        let mixed = "drafter.dspark.layer_types=[sliding_attention, full_attention]";
        assert_eq!(windows(&["drafter.dspark.sliding_window=9", mixed]), [Some(9), None]);
        let eagle3 = "drafter={eagle3: {ttt_length: 0}}";
        wrong(eagle3, "`drafter.eagle3.ttt_length`: must be at least 1");
        wrong("drafter={eagle3: {step_loss_decay: 1.5}}", "not in (0, 1]");
        wrong("drafter={eagle3: {supervise: all}}", "shifted");
    }
}
