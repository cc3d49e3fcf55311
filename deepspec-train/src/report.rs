//! What training says: a console line and a line of metrics.jsonl per logging window.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use deepspec_core::atomic::{self, FileError};
use deepspec_core::jsonl::{Appender, Line, Reader};
use deepspec_dist::{GroupError, ProcessGroup};
use deepspec_models::Terms;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

/// One JSON object per logging window.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Sums since the last line; every mean is divided once, here.
pub struct Window {
    terms: Terms,
    sums: Option<Tensor>,
    samples: usize,
    tokens: usize,
    steps: usize,
    grad_norm: Option<Tensor>,
    /// Sum of all gradient norms: not finite as soon as one is not.
    norms: Option<Tensor>,
    started: Instant,
}

impl Window {
    /// An empty window for sums of this meaning.
    pub fn new(terms: Terms) -> Self {
        Self {
            terms,
            sums: None,
            samples: 0,
            tokens: 0,
            steps: 0,
            grad_norm: None,
            norms: None,
            started: Instant::now(),
        }
    }

    /// Adds a micro-batch.
    pub fn add(&mut self, sums: Option<&Tensor>, samples: usize, tokens: usize) {
        self.samples += samples;
        self.tokens += tokens;
        if let Some(sums) = sums {
            self.sums = Some(self.sums.take().map_or_else(|| sums.shallow_clone(), |total| total + sums));
        }
    }

    /// Ends an optimiser step.
    pub fn end_step(&mut self, grad_norm: Tensor) {
        self.steps += 1;
        self.norms =
            Some(self.norms.take().map_or_else(|| grad_norm.shallow_clone(), |sum| sum + &grad_norm));
        self.grad_norm = Some(grad_norm);
    }

    /// Adds up the windows of all ranks.
    ///
    /// # Errors
    /// If another rank has failed.
    pub fn reduce(&mut self, group: &ProcessGroup) -> Result<(), GroupError> {
        if group.world_size() == 1 {
            return Ok(());
        }
        let count = self.terms.count() as i64;
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

    /// Whether all gradient norms since the last line were finite.
    pub fn is_finite(&self) -> bool {
        self.norms.as_ref().is_none_or(|norms| norms.double_value(&[]).is_finite())
    }

    /// The window's metrics, leaving it empty. The only place that reads tensors back.
    pub fn take(&mut self, step: usize, lr: f64, waited: Duration) -> Map<String, Value> {
        let elapsed = self.started.elapsed().as_secs_f64();
        let sums: Vec<f64> = self.sums.as_ref().map_or_else(|| vec![0.0; self.terms.count()], to_vec);
        let mut metrics = Map::from_iter([("step".to_string(), json!(step))]);
        metrics.append(&mut self.terms.metrics(&sums, self.samples));
        let own = json!({
            "lr": lr,
            "grad_norm": self.grad_norm.as_ref().map_or(0.0, |norm| norm.double_value(&[])),
            "samples_per_s": self.samples as f64 / elapsed,
            "tokens_per_s": self.tokens as f64 / elapsed,
            "step_s": elapsed / self.steps.max(1) as f64,
            "data_wait_s": waited.as_secs_f64(),
        });
        *self = Self::new(self.terms.clone());
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

/// Console and metrics.jsonl.
pub struct Report {
    metrics: Appender,
    total_steps: usize,
    /// Metrics shown beside the loss: short name and key.
    headline: &'static [(&'static str, &'static str)],
}

impl Report {
    /// Continues `dir/metrics.jsonl` behind step `step`: lines of steps that are run again are dropped.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn open(dir: &Path, step: usize, total_steps: usize, terms: &Terms) -> Result<Self, FileError> {
        let path: PathBuf = dir.join(METRICS_FILE);
        if path.is_file() {
            let mut kept = vec![];
            for line in Reader::open(&path)? {
                if let Line::Row(_, row) = line?
                    && row.get("step").and_then(Value::as_u64).is_some_and(|done| done <= step as u64)
                {
                    kept.push(row);
                }
            }
            atomic::replace(&path, |file| {
                for row in &kept {
                    serde_json::to_writer(&mut *file, row)?;
                    file.write_all(b"\n")?;
                }
                Ok(())
            })?;
        }
        fs::create_dir_all(dir).map_err(FileError::at("creating", dir))?;
        Ok(Self { metrics: Appender::open(&path)?, total_steps, headline: terms.headline() })
    }

    /// Writes one window.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn window(&mut self, metrics: &Map<String, Value>) -> Result<(), FileError> {
        let number = |key: &str| metrics.get(key).and_then(Value::as_f64).unwrap_or(0.0);
        let left = (self.total_steps as f64 - number("step")) * number("step_s");
        let terms = self.headline.iter().map(|(name, key)| format!("  {name} {:.3}", number(key)));
        tracing::info!(
            "step {}/{}  loss {:.4}{}  lr {:.2e}  grad {:.2}  {:.1} samples/s  wait {:.1} s  {} left",
            number("step"),
            self.total_steps,
            number("loss"),
            terms.collect::<String>(),
            number("lr"),
            number("grad_norm"),
            number("samples_per_s"),
            number("data_wait_s"),
            minutes(left),
        );
        self.metrics.append(metrics)
    }
}

fn minutes(seconds: f64) -> String {
    format!("{}:{:02} min", (seconds / 60.0) as u64, (seconds % 60.0) as u64)
}
