//! Random samples for runs without data.

use deepspec_core::FinalStates;
use deepspec_core::rng::{Purpose, Stream};
use deepspec_drafters::Recipe;
use deepspec_drafters::TrainSample;
use deepspec_models::ModelConfig;
use tch::{Device, Kind, Tensor};

use crate::schedule::samples_per_forward;

/// Tokens of a turn in a random conversation; the first quarter is the user's.
const TURN_TOKENS: usize = 512;

/// Loss mask of a random conversation: all tokens except the first quarter of every turn.
pub fn loss_mask(length: usize) -> Vec<bool> {
    let turn = TURN_TOKENS.min(length);
    (0..length).map(|position| position % turn >= turn / 4).collect()
}

/// Random samples of forward `number`: conversations of `data.max_length` tokens, three quarters of
/// them supervised. The hidden states are bfloat16, as in a cache; `last` selects the final states.
pub fn random_samples(
    recipe: &Recipe,
    config: &ModelConfig,
    last: FinalStates,
    number: usize,
) -> Vec<TrainSample> {
    let length = recipe.data.max_length;
    let sample = |index: usize| {
        random_sample(recipe, config, last, &format!("bench-{number}-{index}"), loss_mask(length))
    };
    (0..samples_per_forward(&recipe.train, length)).map(sample).collect()
}

/// A random sample with this loss mask and without anchors. `name` seeds its tokens.
pub fn random_sample(
    recipe: &Recipe,
    config: &ModelConfig,
    last: FinalStates,
    name: &str,
    loss_mask: Vec<bool>,
) -> TrainSample {
    let (length, d) = (loss_mask.len(), config.hidden_size);
    let states = |rows: usize, width: i64| {
        Tensor::empty([rows as i64, width], (Kind::BFloat16, Device::Cpu)).normal_(0.0, 1.0)
    };
    let stream = Stream::new(recipe.seed, name);
    let id = |lane| (stream.uniform(0, Purpose::Init, lane) * config.vocab_size as f64) as i64;
    let last_positions = last.kept_positions(&loss_mask);
    TrainSample {
        input_ids: (0..length as u64).map(id).collect(),
        taps: states(length, d * recipe.target.layer_ids.len() as i64),
        last: states(last_positions.len(), d),
        last_positions,
        loss_mask,
        anchors: vec![],
    }
}
