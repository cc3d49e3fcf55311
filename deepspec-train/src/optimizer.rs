//! AdamW (Loshchilov & Hutter 2019) on float32 masters of working weights of any kind.

use tch::{Kind, Tensor};

const BETAS: (f64, f64) = (0.9, 0.999);
const EPS: f64 = 1e-8;
/// Added to the norm before dividing by it.
const CLIP_EPS: f64 = 1e-6;

/// One parameter's state.
struct Slot {
    name: String,
    parameter: Tensor,
    /// The parameter itself where that is float32.
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    /// Float32 sum of the gradients of the step so far, where the parameter's own kind would round it.
    sum: Option<Tensor>,
}

/// AdamW with decoupled weight decay and global-norm clipping.
pub struct AdamW {
    slots: Vec<Slot>,
    weight_decay: f64,
    max_grad_norm: f64,
    steps: i64,
}

impl AdamW {
    /// Takes charge of the named parameters, which begin to require gradients.
    pub fn new(parameters: &[(String, Tensor)], weight_decay: f64, max_grad_norm: f64) -> Self {
        let slots = parameters
            .iter()
            .map(|(name, parameter)| {
                let parameter = parameter.set_requires_grad(true);
                let master = parameter.detach().to_kind(Kind::Float);
                let (exp_avg, exp_avg_sq) = (master.zeros_like(), master.zeros_like());
                Slot { name: name.clone(), parameter, master, exp_avg, exp_avg_sq, sum: None }
            })
            .collect();
        Self { slots, weight_decay, max_grad_norm, steps: 0 }
    }

    /// Number of trainable weights.
    pub fn weights(&self) -> usize {
        self.slots.iter().map(|slot| slot.master.numel()).sum()
    }

    /// Takes in the gradients of one micro-batch; to be called after every backward.
    pub fn accumulate(&mut self) {
        let _guard = tch::no_grad_guard();
        for slot in self.slots.iter_mut().filter(|slot| slot.parameter.kind() != Kind::Float) {
            let gradient = slot.parameter.grad();
            if gradient.defined() {
                let gradient = gradient.to_kind(Kind::Float);
                slot.sum =
                    Some(slot.sum.take().map_or_else(|| gradient.shallow_clone(), |sum| sum + &gradient));
                slot.parameter.zero_grad();
            }
        }
    }

    /// Clips the gradients to the global norm, updates masters and working weights, clears the gradients.
    /// Returns the norm before clipping, a float64 scalar that is not read here.
    pub fn step(&mut self, lr: f64) -> Tensor {
        let _guard = tch::no_grad_guard();
        self.accumulate();
        let gradients: Vec<Tensor> = self.slots.iter_mut().map(Slot::take_gradient).collect();
        let (norm, coefficient) = clip(&gradients, self.max_grad_norm);
        self.steps += 1;
        let correction1 = 1.0 - BETAS.0.powf(self.steps as f64);
        let correction2 = 1.0 - BETAS.1.powf(self.steps as f64);
        for (slot, gradient) in self.slots.iter_mut().zip(gradients) {
            let gradient = gradient * &coefficient;
            if self.weight_decay != 0.0 {
                let _ = slot.master.g_mul_scalar_(1.0 - lr * self.weight_decay);
            }
            let _ = slot.exp_avg.lerp_(&gradient, 1.0 - BETAS.0);
            let _ = slot.exp_avg_sq.g_mul_scalar_(BETAS.1).g_add_(&(gradient.square() * (1.0 - BETAS.1)));
            let denominator = slot.exp_avg_sq.sqrt() / correction2.sqrt() + EPS;
            let _ = slot.master.g_add_(&(&slot.exp_avg / denominator * (-lr / correction1)));
            slot.publish();
        }
        norm
    }

    /// Masters and moments by name (`master.`, `exp_avg.`, `exp_avg_sq.` + parameter), float32.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let parts = |slot: &Slot| {
            [("master", &slot.master), ("exp_avg", &slot.exp_avg), ("exp_avg_sq", &slot.exp_avg_sq)]
                .map(|(part, tensor)| (format!("{part}.{}", slot.name), tensor.shallow_clone()))
        };
        self.slots.iter().flat_map(parts).collect()
    }

    /// Puts back a saved state; `read(name, shape)` fetches one tensor of it.
    ///
    /// # Errors
    /// The first that `read` returns.
    pub fn restore<E>(
        &mut self,
        steps: i64,
        read: impl Fn(&str, &[i64]) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        let _guard = tch::no_grad_guard();
        self.steps = steps;
        for slot in &mut self.slots {
            let shape = slot.master.size();
            for (part, tensor) in [
                ("master", &mut slot.master),
                ("exp_avg", &mut slot.exp_avg),
                ("exp_avg_sq", &mut slot.exp_avg_sq),
            ] {
                tensor.copy_(&read(&format!("{part}.{}", slot.name), &shape)?);
            }
            slot.publish();
        }
        Ok(())
    }
}

impl Slot {
    /// The step's gradient in float32, zeros where no loss reached the parameter.
    fn take_gradient(&mut self) -> Tensor {
        if let Some(sum) = self.sum.take() {
            return sum;
        }
        let gradient = self.parameter.grad();
        if gradient.defined() { gradient.to_kind(Kind::Float) } else { self.master.zeros_like() }
    }

    /// Copies the master into the working weights and clears the gradient.
    fn publish(&mut self) {
        if self.parameter.kind() != Kind::Float {
            self.parameter.copy_(&self.master);
        }
        self.parameter.zero_grad();
    }
}

/// The global norm of the gradients, in float32 whatever the weights' kind, and the factor min(1, max/(norm + 1e-6)).
pub fn clip(gradients: &[Tensor], max_norm: f64) -> (Tensor, Tensor) {
    let squares: Vec<Tensor> =
        gradients.iter().map(|gradient| gradient.to_kind(Kind::Float).square().sum(Kind::Double)).collect();
    let norm = Tensor::stack(&squares, 0).sum(Kind::Double).sqrt();
    let coefficient = ((&norm + CLIP_EPS).reciprocal() * max_norm).clamp_max(1.0).to_kind(Kind::Float);
    (norm, coefficient)
}
