//! Drafters of a run as the engine decodes with them.

use std::path::Path;

use deepspec_drafters::{Drafter, DrafterOptions};
use deepspec_engine::{DraftSampling, Engine, EngineOptions, Request, Sampling, VerifyRule};
use deepspec_models::{TargetModel, TargetOptions};
use tch::{Device, Kind};

use super::Bench;

/// The drafter of a run's newest checkpoint.
pub fn loads(bench: &Bench) -> Box<dyn Drafter> {
    let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
    deepspec_drafters::load_drafter(&bench.path("out/t/step_latest"), &options)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Greedy answers of a target to some prompts, with any drafter, which has to fit it.
pub fn greedy(target: &Path, drafter: Option<Box<dyn Drafter>>) -> Vec<Vec<i64>> {
    let taps = drafter.as_ref().map_or_else(Vec::new, |drafter| drafter.taps().to_vec());
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, taps };
    let target = TargetModel::load(target, &options).unwrap();
    if let Some(drafter) = &drafter {
        drafter.check_fits(target.config()).unwrap();
    }
    let options = EngineOptions {
        slots: 1,
        context: 256,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
        counts_overrun: false,
    };
    let request = |number: i64| Request {
        id: number.to_string(),
        prompt: (0..20).map(|i| (37 * i + number) % 600).collect(),
        sampling: Sampling::new(0.0, 1),
        max_new_tokens: 24,
        stop_ids: vec![],
    };
    let answers = Engine::new(target, drafter, options).run((0..3).map(request).collect(), |_| {}).unwrap();
    answers.into_iter().map(|answer| answer.tokens).collect()
}
