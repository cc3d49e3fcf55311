//! Accumulates the metrics of a logging window.

use std::time::{Duration, Instant};

use crate::dist::{GroupError, ProcessGroup};
use deepspec_drafters::Metrics;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use crate::memory;

/// Added to the indices of samples whose states are finite, so that the minimum is the first sample
/// with other states. Larger than any index.
const FINITE_OFFSET: i64 = 1 << 40;

/// Sums since the last metrics line. [`MetricsWindow::take_metrics`] computes every mean by one
/// division.
pub struct MetricsWindow<'a> {
    metrics: &'a Metrics,
    sums: Option<Tensor>,
    samples: usize,
    tokens: usize,
    steps: usize,
    grad_norm: Option<Tensor>,
    /// Sum of all gradient norms: not finite if any norm is not finite.
    norms: Option<Tensor>,
    /// Samples whose hidden states are not yet known to be finite.
    watched: Vec<String>,
    /// Index in `watched` of the first sample whose states are not finite. At least
    /// [`FINITE_OFFSET`] if all are finite.
    not_finite: Option<Tensor>,
    started: Instant,
    /// Time since `started` that was not spent on training.
    paused: Duration,
}

impl<'a> MetricsWindow<'a> {
    /// An empty window for the sums of `metrics`.
    pub fn new(metrics: &'a Metrics) -> Self {
        Self {
            metrics,
            sums: None,
            samples: 0,
            tokens: 0,
            steps: 0,
            grad_norm: None,
            norms: None,
            watched: vec![],
            not_finite: None,
            started: Instant::now(),
            paused: Duration::ZERO,
        }
    }

    /// Adds the sums of a micro-batch.
    pub fn add_micro_batch(&mut self, sums: Option<&Tensor>, samples: usize, tokens: usize) {
        self.samples += samples;
        self.tokens += tokens;
        if let Some(sums) = sums {
            self.sums = Some(self.sums.take().map_or_else(|| sums.shallow_clone(), |total| total + sums));
        }
    }

    /// Registers a sample and a bool tensor that says whether all its hidden states are finite.
    /// Does not wait for the device.
    pub fn watch_finite(&mut self, sample: String, finite: &Tensor) {
        let _guard = tch::no_grad_guard();
        let place = finite.to_kind(Kind::Int64) * FINITE_OFFSET + self.watched.len() as i64;
        let first = self.not_finite.take();
        self.not_finite = Some(first.map_or_else(|| place.shallow_clone(), |first| first.minimum(&place)));
        self.watched.push(sample);
    }

    /// Returns the first sample since the last line whose hidden states are not finite. Waits for
    /// the device.
    pub fn first_non_finite_sample(&self) -> Option<&str> {
        let place = usize::try_from(self.not_finite.as_ref()?.int64_value(&[])).ok()?;
        self.watched.get(place).map(String::as_str)
    }

    /// Records the gradient norm of a finished optimiser step.
    pub fn record_step(&mut self, grad_norm: Tensor) {
        self.steps += 1;
        self.norms =
            Some(self.norms.take().map_or_else(|| grad_norm.shallow_clone(), |sum| sum + &grad_norm));
        self.grad_norm = Some(grad_norm);
    }

    /// Sums the windows of all ranks.
    ///
    /// # Errors
    /// Fails if another rank has failed.
    pub fn all_reduce(&mut self, group: &ProcessGroup) -> Result<(), GroupError> {
        if group.world_size() == 1 {
            return Ok(());
        }
        let count = self.metrics.count as i64;
        let none = || Tensor::zeros([count], (Kind::Double, Device::Cpu));
        let sums = self.sums.take().map_or_else(none, |sums| sums.to_device(Device::Cpu));
        let counts = Tensor::from_slice(&[self.samples as f64, self.tokens as f64]);
        let mut all = Tensor::cat(&[sums, counts], 0);
        group.all_reduce("adding up metrics", &mut all)?;
        self.sums = Some(all.narrow(0, 0, count));
        self.samples = all.double_value(&[count]) as usize;
        self.tokens = all.double_value(&[count + 1]) as usize;
        Ok(())
    }

    /// Excludes time that was not spent on training.
    pub fn exclude_time(&mut self, time: Duration) {
        self.paused += time;
    }

    /// Whether all gradient norms since the last line were finite.
    pub fn are_grad_norms_finite(&self) -> bool {
        self.norms.as_ref().is_none_or(|norms| norms.double_value(&[]).is_finite())
    }

    /// Returns the metrics of the window and resets it. Only this function, `all_reduce`,
    /// `are_grad_norms_finite` and `first_non_finite_sample` wait for the device.
    pub fn take_metrics(&mut self, step: usize, lr: f64, waited: Duration) -> Map<String, Value> {
        let elapsed = self.started.elapsed().saturating_sub(self.paused).as_secs_f64();
        let sums: Vec<f64> = self.sums.as_ref().map_or_else(|| vec![0.0; self.metrics.count], to_vec);
        let mut metrics = Map::from_iter([("step".to_string(), json!(step))]);
        metrics.append(&mut (self.metrics.compute)(&sums, self.samples));
        let own = json!({
            "lr": lr,
            "grad_norm": self.grad_norm.as_ref().map_or(0.0, |norm| norm.double_value(&[])),
            "samples_per_s": self.samples as f64 / elapsed,
            "tokens_per_s": self.tokens as f64 / elapsed,
            "step_s": elapsed / self.steps.max(1) as f64,
            "data_wait_s": waited.as_secs_f64(),
            "samples": self.samples,
            "tokens": self.tokens,
            "seconds": elapsed,
            "peak_memory_bytes": memory::peak_rss_bytes(),
        });
        *self = Self::new(self.metrics);
        if let Value::Object(mut own) = own {
            metrics.append(&mut own);
        }
        metrics
    }
}

fn to_vec(tensor: &Tensor) -> Vec<f64> {
    let mut values = vec![0.0; tensor.numel()];
    tensor.copy_data(&mut values, tensor.numel());
    values
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use deepspec_drafters::{DSPARK_SUMS, LossSum};
    use deepspec_models::ModelConfig;

    use super::*;

    const GAMMA: usize = 3;
    const RECIPE: &str = "
name: t
target: {model: nowhere, layer_ids: [0]}
drafter: {dflash: {block_size: 3, num_draft_layers: 1, mask_token_id: 7}}
data: {states: {cache: nowhere}, chat_template: qwen}
";

    fn sums_of_dflash() -> Metrics {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("recipe.yaml");
        std::fs::write(&path, RECIPE).unwrap();
        let recipe = deepspec_drafters::load_recipe(&path, &[]).unwrap();
        let target = json!({"model_type": "qwen3", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 2, "vocab_size": 8});
        let target =
            ModelConfig::parse(Path::new("config.json"), target.as_object().unwrap().clone()).unwrap();
        deepspec_drafters::plan_drafter(&recipe, &target).unwrap().metric_defs()
    }

    /// Two blocks: all slots of one are accepted, the other fails in its first slot.
    fn sums() -> Tensor {
        let value = |sum: LossSum| match sum {
            LossSum::Blocks => 2.0,
            LossSum::Drafts => 6.0,
            LossSum::Tau => 2.0 + 3.0,
            LossSum::Accept(_) => 1.0,
            LossSum::Count(_) => 2.0,
            other => other.name().len() as f64,
        };
        let values: Vec<f64> = LossSum::all(GAMMA, &DSPARK_SUMS).map(value).collect();
        Tensor::from_slice(&values)
    }

    fn metrics(times: usize) -> Map<String, Value> {
        let meaning = sums_of_dflash();
        let mut window = MetricsWindow::new(&meaning);
        (0..times).for_each(|_| window.add_micro_batch(Some(&sums()), 1, 10));
        window.take_metrics(1, 1e-3, Duration::ZERO)
    }

    /// speculators#759: sums that were reduced twice gave metrics multiplied by the number of
    /// ranks.
    #[test]
    fn metrics_are_not_multiplied_by_how_many_parts_they_are_summed_from() {
        let (one, four) = (metrics(1), metrics(4));
        for key in ["loss", "ce_loss", "l1_loss", "tau_probabilistic", "accept_rate", "confidence_bias"] {
            assert_eq!(one[key], four[key], "{key}");
        }
        assert_eq!((&four["samples"], &four["tokens"]), (&json!(4), &json!(40)));
    }

    #[test]
    fn the_first_sample_whose_states_are_not_finite_is_named() {
        let meaning = sums_of_dflash();
        let mut window = MetricsWindow::new(&meaning);
        assert_eq!(window.first_non_finite_sample(), None);
        window.watch_finite("good".into(), &Tensor::from(true));
        assert_eq!(window.first_non_finite_sample(), None);
        for (sample, finite) in [("bad", false), ("fine", true), ("worse", false)] {
            window.watch_finite(sample.into(), &Tensor::from(finite));
        }
        assert_eq!(window.first_non_finite_sample(), Some("bad"));
        window.take_metrics(1, 1e-3, Duration::ZERO);
        assert_eq!(window.first_non_finite_sample(), None);
    }

    /// speculators#805: the accepted length left out slot 0.
    #[test]
    fn accepted_length_does_not_skip_slot_0() {
        let metrics = metrics(1);
        assert_eq!(metrics["accept_rate"], json!([0.5, 0.5, 0.5]));
        assert_eq!(metrics["tau_probabilistic"], json!(2.5));
    }
}
