//! Captures the target's hidden states for the target's answers, at all layers that a trial may
//! need.

use deepspec_core::Tap;
use deepspec_engine::{ModelInput, Target};
use deepspec_models::{ModelConfig, TargetModel};
use tch::Tensor;

use super::decode::PromptRun;

/// The drafter's tapped layers and their neighbours, within the target's layers.
pub fn layers_to_capture(taps: &[Tap], config: &ModelConfig) -> Vec<Tap> {
    let mut layers: Vec<Tap> =
        taps.iter().flat_map(|tap| [-1, 0, 1].map(|by| tap.shifted_by(by))).flatten().collect();
    layers.retain(|layer| layer.is_within(config.layers.len()));
    layers.sort_unstable();
    layers.dedup();
    layers
}

/// One prompt with its answer, T tokens.
pub struct CapturedAnswer {
    /// Token ids of prompt and answer.
    pub ids: Vec<i64>,
    /// Number of prompt tokens.
    pub prompt: usize,
    /// Hidden states after all captured layers, concatenated: `[T, n·d]`.
    states: Tensor,
    /// Hidden states after the final norm, `[T, d]`.
    pub last: Tensor,
}

/// All answers with their captured hidden states.
pub struct CapturedStates {
    layers: Vec<Tap>,
    width: i64,
    /// The last decoder layer.
    top: Tap,
    /// One entry per prompt.
    pub answers: Vec<CapturedAnswer>,
}

impl CapturedStates {
    /// Runs the target over its answers and captures the hidden states of `layers`.
    pub fn new(target: &mut TargetModel, layers: &[Tap], asked: &PromptRun) -> Self {
        let (width, top) = (target.config().hidden_size, Tap::Layer(target.config().layers.len() as u32 - 1));
        let answers = asked.answers.iter().map(|(ids, prompt)| {
            let tokens = Tensor::from_slice(ids).to_device(target.device());
            let forwarded = target.forward(&ModelInput { chunks: &[(0, ids.len())], tokens });
            target.truncate(0, 0);
            let (ids, prompt) = (ids.clone(), *prompt);
            CapturedAnswer { ids, prompt, states: forwarded.captured_states, last: forwarded.hidden }
        });
        let answers = answers.collect();
        Self { layers: layers.to_vec(), width, top, answers }
    }

    /// Whether all of `taps` were captured.
    pub fn has_layers(&self, taps: &[Tap]) -> bool {
        taps.iter().all(|tap| self.layers.contains(tap))
    }

    /// Whether `taps` contains the last decoder layer.
    pub fn includes_last_layer(&self, taps: &[Tap]) -> bool {
        taps.contains(&self.top)
    }

    /// Input of the drafter: the hidden states of an answer after the layers `taps`, `[T, m·d]`.
    /// With `normed`, the state of the last layer is taken after the final norm.
    pub fn hidden_states(&self, answer: &CapturedAnswer, taps: &[Tap], normed: bool) -> Tensor {
        if taps.is_empty() {
            return answer.states.narrow(1, 0, 0);
        }
        let of = |tap: &Tap| {
            if normed && *tap == self.top {
                return answer.last.shallow_clone();
            }
            let place = self.layers.iter().position(|layer| layer == tap).unwrap_or_default();
            answer.states.narrow(1, place as i64 * self.width, self.width)
        };
        Tensor::cat(&taps.iter().map(of).collect::<Vec<_>>(), 1)
    }
}
