//! Eagle3 as a kind of drafter.

use deepspec_core::FinalStates;
use deepspec_core::recipe::{LossNormalization, Recipe};
use deepspec_models::ModelConfig;
use deepspec_models::nn::Builder;
use serde_json::{Value, json};
use tch::{Device, Tensor};

use super::batch::Eagle3Batch;
use super::config::Eagle3Config;
use super::metrics::Eagle3Metrics;
use super::model::{Eagle3, Eagle3Parts};
use super::proposer::Eagle3Proposer;
use super::recipe::Eagle3Objective;
use super::recipe::{Eagle3Recipe, Supervise};
use crate::draft_model::{
    DraftDecoder, DrafterConfig, DrafterKind, PassBytes, Plan, SampleSize, check, load,
};
use crate::registration::{Checkpoints, DrafterKindInfo, ParamGroup, RecipeSettings, classes};
use crate::{
    ConfigIssue, Drafter, DrafterPlan, GradReadyHook, LossDenominator, Metrics, Predictions, Settings,
    TrainSample,
};

/// Autoregressive drafter, trained on its own outputs.
pub const KIND: DrafterKindInfo = DrafterKindInfo {
    name: "eagle3",
    title: "Eagle3",
    parts: &[
        ParamGroup { name: "fusion", prefixes: &["fc."] },
        ParamGroup { name: "layers", prefixes: &["layers."] },
        ParamGroup { name: "norm", prefixes: &["norm."] },
    ],
    settings: Some(RecipeSettings {
        read: |section| {
            let recipe: Eagle3Recipe = section.read()?;
            recipe.check().map_err(|(key, problem)| section.error(key, problem))?;
            Ok(Box::new(recipe))
        },
        schema: |schemas| schemas.subschema_for::<Eagle3Recipe>(),
    }),
    checkpoints: Some(Checkpoints {
        classes: || classes(Eagle3Config::CLASS),
        hold: "Eagle3",
        are_language_models: false,
        check: check::<Eagle3Parts>,
        load: load::<Eagle3Parts>,
        layouts: Some(&super::layouts::READER),
    }),
};

/// An Eagle3 drafter before any weight is there.
pub type Eagle3Plan = Plan<Eagle3Parts>;

impl Settings for Eagle3Recipe {
    fn to_json(&self) -> Value {
        json!(self)
    }

    fn fit(&self, recipe: &Recipe, target: &ModelConfig) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
        let config = Eagle3Config {
            decoder: DraftDecoder::like_target(target, recipe, self.num_draft_layers)
                .map_err(|(_, problem)| ("num_draft_layers", problem))?,
            ttt_length: self.ttt_length,
            step_loss_decay: self.step_loss_decay,
        };
        config.validate().map_err(|(key, problem)| match key {
            "num_hidden_layers" => ("num_draft_layers", problem),
            other => (other, problem),
        })?;
        let objective = Eagle3Objective {
            supervise: self.supervise,
            step_loss_decay: self.step_loss_decay,
            normalization: recipe.train.loss_normalization,
        };
        Ok(Box::new(Eagle3Plan::new(config, objective)))
    }
}

impl DrafterKind for Eagle3Parts {
    type Config = Eagle3Config;
    type Objective = Eagle3Objective;
    const FINAL_STATES: FinalStates = FinalStates::Supervised;

    fn new(b: &Builder, config: &Eagle3Config) -> Self {
        Self::build(b, config)
    }

    fn accumulate(
        model: &Eagle3,
        objective: &Eagle3Objective,
        samples: &[TrainSample],
        normaliser: LossDenominator,
        _listener: Option<GradReadyHook>,
    ) -> Option<Tensor> {
        let steps = model.config().ttt_length;
        let batch = Eagle3Batch::new(samples, objective, steps, model.device(), model.kind());
        Some(model.accumulate(batch.as_ref(), normaliser, samples.len()))
    }

    fn metrics(plan: &Eagle3Plan) -> Box<dyn Metrics> {
        Box::new(Eagle3Metrics::new(plan.config.ttt_length, plan.objective.step_loss_decay))
    }

    fn flops(plan: &Eagle3Plan, samples: &[TrainSample]) -> f64 {
        plan.config.flops(samples, plan.objective.supervise)
    }

    fn pass_bytes(
        config: &Eagle3Config,
        samples: &[SampleSize],
        kind: tch::Kind,
        device: Device,
    ) -> PassBytes {
        config.pass_bytes(samples, kind.elt_size_in_bytes(), device)
    }

    fn product_shapes(config: &Eagle3Config) -> usize {
        config.product_shapes()
    }

    fn drafter(model: Eagle3, slots: usize) -> Box<dyn Drafter> {
        Box::new(Eagle3Proposer::new(model, slots))
    }

    fn predict<'a>(model: &'a Eagle3, samples: &[TrainSample]) -> Option<Predictions<'a>> {
        let objective = Eagle3Objective {
            supervise: Supervise::Labels,
            step_loss_decay: 1.0,
            normalization: LossNormalization::Global,
        };
        let device = samples.first()?.taps.device();
        let batch = Eagle3Batch::new(samples, &objective, model.config().ttt_length, device, model.kind())?;
        let states = model.states(&batch);
        let rows = |step: usize| batch.supervised(step);
        let steps: Vec<usize> = (0..states.len()).take_while(|&step| rows(step).size()[0] > 0).collect();
        let counts: Vec<i64> = steps.iter().map(|&step| rows(step).size()[0]).collect();
        let teacher: Vec<Tensor> = steps.iter().map(|&step| batch.teacher(step)).collect();
        let states: Vec<Tensor> =
            steps.iter().map(|&step| states[step].index_select(0, rows(step))).collect();
        if counts.is_empty() {
            return None;
        }
        let (teacher, states) = (Tensor::cat(&teacher, 0), Tensor::cat(&states, 0));
        let logits = move |start, len| model.draft_logits(&states.narrow(0, start, len));
        Some(Predictions { counts, teacher, logits: Box::new(logits), confidence: None })
    }
}
