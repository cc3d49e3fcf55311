//! AdamW (Loshchilov & Hutter 2019) with float32 master weights; the model's weights may have any
//! dtype.

use crate::dist::{GroupError, ProcessGroup};
use deepspec_ops::{AdamWSettings, AdamWTensors, adamw, square_sum, take_gradient};
use tch::{Device, Kind, Tensor};

use crate::sync::{self, GradientBuckets};

const BETAS: (f64, f64) = (0.9, 0.999);
const EPS: f64 = 1e-8;
/// Added to the norm before the division.
const CLIP_EPS: f64 = 1e-6;
/// Name prefixes of a parameter's saved tensors.
const STATE_TENSOR_NAMES: [&str; 3] = ["master", "exp_avg", "exp_avg_sq"];

/// One parameter with its gradient and optimiser state.
struct ParamSlot {
    name: String,
    parameter: Tensor,
    /// The rank that updates the parameter if the optimiser state is sharded.
    owner: usize,
    /// `None` if another rank owns it.
    state: Option<AdamWState>,
    /// Float32 sum of the step's gradients; used if the parameter's dtype would round the sum.
    sum: Option<Tensor>,
    /// Whether the step's gradient was handed to the all-reduce already.
    is_taken: bool,
}

/// Optimiser state of a parameter, in float32.
struct AdamWState {
    /// Master weights; the parameter itself if that is float32.
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
}

/// AdamW with decoupled weight decay and global-norm clipping.
pub struct AdamW {
    slots: Vec<ParamSlot>,
    weight_decay: f64,
    max_grad_norm: f64,
    steps: i64,
    is_sharded: bool,
    sums: GradientBuckets,
}

impl AdamW {
    /// Creates the optimiser of the named parameters and sets `requires_grad` on them.
    pub fn new(parameters: &[(String, Tensor)], weight_decay: f64, max_grad_norm: f64) -> Self {
        Self::new_sharded(parameters, weight_decay, max_grad_norm, (0, 1))
    }

    /// Like [`AdamW::new`] for rank r of n, `(r, n)`, with sharded optimiser state. Each rank keeps
    /// masters and moments of its share and broadcasts its updated weights.
    pub fn new_sharded(
        parameters: &[(String, Tensor)],
        weight_decay: f64,
        max_grad_norm: f64,
        (rank, ranks): (usize, usize),
    ) -> Self {
        let sizes: Vec<usize> = parameters.iter().map(|(_, parameter)| parameter.numel()).collect();
        let slots: Vec<ParamSlot> = parameters
            .iter()
            .zip(sync::assign_owners(&sizes, ranks))
            .map(|((name, parameter), owner)| {
                let parameter = parameter.set_requires_grad(true);
                let state = (owner == rank).then(|| {
                    let master = parameter.detach().to_kind(Kind::Float);
                    AdamWState { exp_avg: master.zeros_like(), exp_avg_sq: master.zeros_like(), master }
                });
                ParamSlot { name: name.clone(), parameter, owner, state, sum: None, is_taken: false }
            })
            .collect();
        let sums = GradientBuckets::new(&names_and_sizes(&slots), &[]);
        Self { slots, weight_decay, max_grad_norm, steps: 0, is_sharded: ranks > 1, sums }
    }

    /// Orders the gradient buckets by `stages`, which are prefixes of parameter names.
    /// [`AdamW::start_all_reduce`] reduces those of early stages first.
    #[must_use]
    pub fn with_stages(mut self, stages: &[String]) -> Self {
        self.sums = GradientBuckets::new(&names_and_sizes(&self.slots), stages);
        self
    }

    /// Number of trainable weights.
    pub fn trainable_weight_count(&self) -> usize {
        self.slots.iter().map(|slot| slot.parameter.numel()).sum()
    }

    /// Adds the gradients of one micro-batch to the step's sum. Call it after every backward.
    pub fn accumulate(&mut self) {
        let _guard = tch::no_grad_guard();
        self.slots.iter_mut().filter(|slot| !slot.is_taken).for_each(ParamSlot::accumulate);
    }

    /// Whether [`AdamW::start_all_reduce`] can reduce any bucket before the backward ends.
    pub fn can_reduce_early(&self) -> bool {
        self.sums.can_start_early()
    }

    /// Starts the all-reduce of the gradients of the first `stages` stages, which must be final for
    /// this step. Ranks may start at different times, or leave it to [`AdamW::step`].
    ///
    /// # Errors
    /// Fails if another rank has failed.
    pub fn start_all_reduce(&mut self, stages: usize, group: &ProcessGroup) -> Result<(), GroupError> {
        let _guard = tch::no_grad_guard();
        let Self { slots, sums, .. } = self;
        sums.start(stages, group, |index| slots[index].take_gradient())
    }

    /// Sums the gradients over all ranks, clips them to the global norm, updates masters and
    /// weights, and clears the gradients. Returns the norm before clipping as a float64 scalar,
    /// without waiting for the device.
    ///
    /// # Errors
    /// Fails if another rank has failed.
    pub fn step(&mut self, lr: f64, group: &ProcessGroup) -> Result<Tensor, GroupError> {
        let _guard = tch::no_grad_guard();
        let Self { slots, sums, .. } = self;
        let mut gradients: Vec<Tensor> = match group.world_size() {
            1 => slots.iter_mut().map(ParamSlot::take_gradient).collect(),
            _ => sums.finish(group, |index| slots[index].take_gradient())?,
        };
        let (norm, divisor) = grad_norm_and_divisor(&gradients, self.max_grad_norm);
        self.steps += 1;
        let settings = AdamWSettings {
            lr,
            beta1: BETAS.0,
            beta2: BETAS.1,
            weight_decay: self.weight_decay,
            eps: EPS,
            step: self.steps as f64,
        };
        let owned = self.slots.iter_mut().zip(&mut gradients);
        let mut tensors: Vec<AdamWTensors<'_>> = owned
            .filter_map(|(slot, gradient)| {
                let AdamWState { master: weights, exp_avg, exp_avg_sq } = slot.state.as_mut()?;
                Some(AdamWTensors { weights, gradient, exp_avg, exp_avg_sq })
            })
            .collect();
        adamw(&mut tensors, &divisor, settings);
        self.slots.iter_mut().for_each(ParamSlot::copy_to_parameter);
        self.slots.iter_mut().zip(&gradients).for_each(|(slot, gradient)| slot.clear_gradient(gradient));
        if self.is_sharded {
            let owned: Vec<(usize, &Tensor)> =
                self.slots.iter().map(|slot| (slot.owner, &slot.parameter)).collect();
            sync::broadcast_from_owners(group, &owned)?;
        }
        Ok(norm)
    }

    /// Returns float32 masters and moments by name (`master.`, `exp_avg.`, `exp_avg_sq.` +
    /// parameter). All ranks must call it; rank 0 gets all tensors, and other ranks get an empty
    /// list.
    ///
    /// # Errors
    /// Fails if another rank has failed.
    pub fn state(&self, group: &ProcessGroup) -> Result<Vec<(String, Tensor)>, GroupError> {
        let _guard = tch::no_grad_guard();
        let mut all = vec![];
        for slot in &self.slots {
            let own = slot.state.as_ref().map(AdamWState::tensors);
            for (index, part) in STATE_TENSOR_NAMES.into_iter().enumerate() {
                let own = own.map(|parts| parts[index].shallow_clone());
                let tensor = if self.is_sharded {
                    let received = || Tensor::empty(slot.parameter.size(), slot.float_options());
                    let mut tensor = own.unwrap_or_else(received);
                    group.broadcast("collecting the optimiser's state", &mut tensor, slot.owner)?;
                    // The tensors move to the CPU, because the complete optimiser state does not
                    // fit on the GPU in addition to the model.
                    Some(tensor.to_device(Device::Cpu))
                } else {
                    own
                };
                all.extend(
                    tensor
                        .filter(|_| group.is_leader())
                        .map(|tensor| (format!("{part}.{}", slot.name), tensor)),
                );
            }
        }
        Ok(all)
    }

    /// Loads a saved state, or this rank's share of it; `read(name, shape)` reads one tensor.
    ///
    /// # Errors
    /// Returns the first error of `read`.
    pub fn restore<E>(
        &mut self,
        steps: i64,
        read: impl Fn(&str, &[i64]) -> Result<Tensor, E>,
    ) -> Result<(), E> {
        let _guard = tch::no_grad_guard();
        self.steps = steps;
        for slot in &mut self.slots {
            let shape = slot.parameter.size();
            let read = |part: &str| read(&format!("{part}.{}", slot.name), &shape);
            match &mut slot.state {
                Some(state) => {
                    for (part, tensor) in STATE_TENSOR_NAMES.into_iter().zip(state.tensors_mut()) {
                        tensor.copy_(&read(part)?);
                    }
                    slot.copy_to_parameter();
                }
                None => slot.parameter.copy_(&read(STATE_TENSOR_NAMES[0])?),
            }
        }
        Ok(())
    }
}

impl AdamWState {
    /// In the order of [`STATE_TENSOR_NAMES`].
    fn tensors(&self) -> [&Tensor; 3] {
        [&self.master, &self.exp_avg, &self.exp_avg_sq]
    }

    fn tensors_mut(&mut self) -> [&mut Tensor; 3] {
        [&mut self.master, &mut self.exp_avg, &mut self.exp_avg_sq]
    }
}

impl ParamSlot {
    /// Adds the gradient of a micro-batch to the float32 sum, unless the parameter itself is
    /// float32.
    fn accumulate(&mut self) {
        if self.parameter.kind() == Kind::Float {
            return;
        }
        let Some(gradient) = take_gradient(&self.parameter) else { return };
        match &mut self.sum {
            // In place: this needs no second sum, and on a GPU no float32 copy of the gradient.
            Some(sum) => drop(sum.g_add_(&gradient)),
            None => self.sum = Some(gradient.to_kind(Kind::Float)),
        }
    }

    /// Clears the parameter's gradient after the optimiser step has used it.
    fn clear_gradient(&mut self, used: &Tensor) {
        let gradient = self.parameter.grad();
        // The fused CPU update sets the gradient to zero itself.
        let is_zero = self.state.is_some()
            && gradient.defined()
            && gradient.device() == Device::Cpu
            && gradient.data_ptr() == used.data_ptr();
        if !is_zero {
            self.parameter.zero_grad();
        }
        self.is_taken = false;
    }

    /// Returns the step's gradient in float32; zeros if the loss did not reach the parameter.
    fn take_gradient(&mut self) -> Tensor {
        self.accumulate();
        self.is_taken = true;
        if let Some(sum) = self.sum.take() {
            return sum.contiguous();
        }
        let gradient = self.parameter.grad();
        if gradient.defined() {
            gradient.to_kind(Kind::Float).contiguous()
        } else {
            Tensor::zeros(self.parameter.size(), self.float_options())
        }
    }

    /// Float32 on the parameter's device.
    fn float_options(&self) -> (Kind, Device) {
        (Kind::Float, self.parameter.device())
    }

    /// Copies the master weights into the parameter.
    fn copy_to_parameter(&mut self) {
        if let Some(state) = self.state.as_ref().filter(|_| self.parameter.kind() != Kind::Float) {
            self.parameter.copy_(&state.master);
        }
    }
}

/// Names and sizes of the parameters.
fn names_and_sizes(slots: &[ParamSlot]) -> Vec<(&str, usize)> {
    slots.iter().map(|slot| (slot.name.as_str(), slot.parameter.numel())).collect()
}

/// Returns the global norm of the gradients as a float64 scalar, and the float32 divisor max(1,
/// (norm + 1e-6)/max) that clips them.
pub fn grad_norm_and_divisor(gradients: &[Tensor], max_norm: f64) -> (Tensor, Tensor) {
    let squares: Vec<Tensor> =
        gradients.iter().map(|gradient| square_sum(&gradient.to_kind(Kind::Float))).collect();
    let norm = Tensor::stack(&squares, 0).sum(Kind::Double).sqrt();
    let divisor = ((&norm + CLIP_EPS) / max_norm).clamp_min(1.0).to_kind(Kind::Float);
    (norm, divisor)
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use crate::dist::RendezvousServer;
    use deepspec_core::recipe::DistBackend;

    use super::*;

    const STEPS: usize = 2;
    const MICRO_BATCHES: usize = 3;

    /// Whether the gradient is cleared: zeros for float32, undefined for other dtypes, which keep
    /// their sum elsewhere.
    fn has_no_gradient(parameter: &Tensor) -> bool {
        let gradient = parameter.grad();
        match parameter.kind() {
            Kind::Float => gradient.abs().max().double_value(&[]) == 0.0,
            _ => !gradient.defined(),
        }
    }

    /// Trains two ranks for some steps in `kind` and returns the weights. If `early`, rank 0 starts
    /// its sums during its last backward. If `is_sharded`, each rank updates its own share. Checks
    /// that each step clears its gradients.
    fn learned(kind: Kind, early: bool, is_sharded: bool) -> Vec<Tensor> {
        const PATIENCE: Duration = Duration::from_secs(120);
        let shapes = [("fc", [4_i64, 3]), ("layers.0.q", [5, 2]), ("layers.1.q", [3, 3])];
        let host = RendezvousServer::open(2, PATIENCE).unwrap();
        let places: Vec<_> = (0..2).map(|rank| host.child_env(rank, 2)).collect();
        let train = |place| {
            let group = ProcessGroup::connect(place, Device::Cpu, DistBackend::Auto, PATIENCE).unwrap();
            let values = |seed: i64, shape: &[i64]| {
                let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu));
                (numbers * 0.37 + seed as f64).sin().view(shape).to_kind(kind)
            };
            let named = shapes.map(|(name, shape)| (name.to_string(), values(1, &shape)));
            let stages = ["layers.1.", "layers.0."].map(String::from);
            let share = if is_sharded { (group.rank(), 2) } else { (0, 1) };
            let mut optimizer = AdamW::new_sharded(&named, 0.01, 1.0, share);
            optimizer.sums =
                GradientBuckets::with_buckets(&names_and_sizes(&optimizer.slots), &stages, (1, 9));
            for step in 0..STEPS {
                for micro_batch in 0..MICRO_BATCHES {
                    let is_last = micro_batch + 1 == MICRO_BATCHES;
                    let seed = (step * MICRO_BATCHES + micro_batch) * 2 + group.rank();
                    for (stage, (_, parameter)) in named.iter().rev().enumerate() {
                        (parameter * values(seed as i64, &parameter.size())).sum(Kind::Float).backward();
                        if is_last && early && group.rank() == 0 && stage < stages.len() {
                            optimizer.start_all_reduce(stage + 1, &group).unwrap();
                        }
                    }
                    optimizer.accumulate();
                }
                let _ = optimizer.step(0.1, &group).unwrap();
                for (name, parameter) in &named {
                    assert!(has_no_gradient(parameter), "gradient of {name} after step {step}");
                }
            }
            named.into_iter().map(|(_, parameter)| parameter.detach().copy()).collect()
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = places.iter().map(|place| scope.spawn(move || train(place))).collect();
            let mut learned: Vec<Vec<Tensor>> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            assert_eq!(learned[0], learned[1]);
            learned.remove(0)
        })
    }

    #[test]
    fn sums_that_begin_early_and_shares_change_no_bit() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let expected = learned(kind, false, false);
            for (early, is_sharded) in [(true, false), (true, true), (false, true)] {
                assert_eq!(learned(kind, early, is_sharded), expected, "{kind:?}, {early}, {is_sharded}");
            }
        }
    }

    /// A gradient that is not cleared would be added to the next step's gradient.
    #[test]
    fn a_step_alone_leaves_nothing_of_its_gradients() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let named =
                ["used", "unused"].map(|name| (name.to_string(), Tensor::ones([3, 2], (kind, Device::Cpu))));
            let mut optimizer = AdamW::new(&named, 0.0, 1.0);
            for _ in 0..STEPS {
                (&named[0].1 * 2.0).sum(kind).backward();
                optimizer.accumulate();
                let norm = optimizer.step(0.1, &ProcessGroup::single_process()).unwrap();
                assert!((norm.double_value(&[]) - 24f64.sqrt()).abs() < 1e-6, "{kind:?}");
                assert!(has_no_gradient(&named[0].1), "{kind:?}");
                assert!(!named[1].1.grad().defined(), "{kind:?}");
            }
        }
    }
}
