//! Sources of parameters: a checkpoint, random numbers, or another model.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use deepspec_core::rng::{Purpose, Stream};
use deepspec_ops::{HOST, PackedWeight};
use tch::{Device, Kind, Tensor};

use super::Weight;
use crate::{ModelError, Weights};

/// Initialization of a random parameter.
#[derive(Debug, Clone, Copy)]
pub enum Init {
    /// N(0, initializer_range²).
    Normal,
    /// N(0, 1).
    StandardNormal,
    /// All ones, for norms.
    Ones,
    /// All zeros, for biases.
    Zeros,
    /// U(−1/√n, 1/√n) for matrices of n columns, as PyTorch initialises linear layers (`kaiming_uniform_` with a = √5).
    KaimingUniform,
    /// This value everywhere.
    Constant(f64),
    /// Ones in the first row of each matrix `[K, d]` and zeros below: a convolution that is the identity.
    Identity,
}

enum ParameterSource<'a> {
    Checkpoint(&'a Weights),
    Fresh { seed: u64, std: f64, device: Device, kind: Kind },
    Shared(SharedTensors<'a>),
    Outline,
}

/// Creates a model's parameters by checkpoint name, and records them in order.
pub struct Builder<'a> {
    source: ParameterSource<'a>,
    /// Whether the weights of linear layers are packed for inference.
    packs: bool,
    named: RefCell<StateDict>,
    /// First error of reading a tensor of the checkpoint.
    error: RefCell<Option<ModelError>>,
}

/// Tensors by checkpoint name, in the order of the requests; they share storage with the model.
#[derive(Default)]
pub struct StateDict {
    /// Trained tensors.
    pub parameters: Vec<(String, Tensor)>,
    /// Tensors that are stored but not trained.
    pub buffers: Vec<(String, Tensor)>,
    /// Weights that are packed for inference. They are neither in `parameters` nor in `buffers`.
    pub packed: Vec<(String, PackedWeight)>,
    /// Names of those that are weights of linear layers.
    pub linear: Vec<String>,
}

impl StateDict {
    /// All tensors as a checkpoint stores them; packed weights are copied.
    pub fn all_tensors(&self) -> Vec<(String, Tensor)> {
        let Self { parameters, buffers, packed, .. } = self.share();
        let unpacked = packed.into_iter().map(|(name, weight)| (name, weight.unpacked()));
        parameters.into_iter().chain(buffers).chain(unpacked).collect()
    }

    /// Shares the tensors; nothing is copied.
    pub fn share(&self) -> Self {
        let share = |of: &[(String, Tensor)]| {
            of.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
        };
        let packed = self.packed.iter().map(|(name, weight)| (name.clone(), weight.share())).collect();
        let (parameters, buffers) = (share(&self.parameters), share(&self.buffers));
        Self { parameters, buffers, packed, linear: self.linear.clone() }
    }
}

/// Tensors of another model by name; a mixture of experts has tens of thousands.
struct SharedTensors<'a> {
    plain: HashMap<&'a str, &'a Tensor>,
    packed: HashMap<&'a str, &'a PackedWeight>,
}

impl<'a> SharedTensors<'a> {
    fn new(model: &'a StateDict) -> Self {
        let plain = model.parameters.iter().chain(&model.buffers);
        Self {
            plain: plain.map(|(name, tensor)| (name.as_str(), tensor)).collect(),
            packed: model.packed.iter().map(|(name, weight)| (name.as_str(), weight)).collect(),
        }
    }

    fn tensor(&self, name: &str, shape: &[i64]) -> Tensor {
        let found = self.plain.get(name).filter(|tensor| tensor.size() == shape);
        found.map_or_else(
            || panic!("the other model has no `{name}` of shape {shape:?}"),
            |tensor| tensor.shallow_clone(),
        )
    }

    fn packed(&self, name: &str, shape: &[i64; 2]) -> Option<PackedWeight> {
        self.packed.get(name).filter(|weight| weight.size() == *shape).map(|weight| weight.share())
    }
}

impl<'a> Builder<'a> {
    /// Reads parameters from a checkpoint.
    pub fn from_checkpoint(weights: &'a Weights) -> Self {
        Self::new(ParameterSource::Checkpoint(weights))
    }

    /// Initialises new parameters. Normal ones have standard deviation `std`; their values depend on `seed` and the parameter's name and
    /// shape alone.
    pub fn random_init(seed: u64, std: f64, device: Device, kind: Kind) -> Self {
        Self::new(ParameterSource::Fresh { seed, std, device, kind })
    }

    /// Creates parameters for their shapes only. Their memory is never touched.
    pub fn meta() -> Self {
        Self::new(ParameterSource::Outline)
    }

    /// Returns the parameters of another model instead of new ones. The two models share storage.
    ///
    /// # Panics
    /// If the other model lacks a parameter, or has it in another shape.
    pub fn from_state_dict(named: &'a StateDict) -> Self {
        Self::new(ParameterSource::Shared(SharedTensors::new(named)))
    }

    /// Whether the parameters never change: weights are packed for inference.
    pub(super) fn is_for_inference(&self) -> bool {
        self.packs
    }

    fn new(source: ParameterSource<'a>) -> Self {
        Self { source, packs: false, named: RefCell::default(), error: RefCell::default() }
    }

    /// Packs the weights of linear layers, for inference.
    pub fn with_packing(self) -> Self {
        Self { packs: true, ..self }
    }

    /// The parameter `name` of the given shape.
    pub fn get(&self, name: &str, shape: &[i64], init: Init) -> Tensor {
        let tensor = self.read_tensor(name, shape, init);
        self.named.borrow_mut().parameters.push((name.to_string(), tensor.shallow_clone()));
        tensor
    }

    /// As [`Builder::get`], in float32 whatever the dtype of the other parameters.
    pub(super) fn get_float32(&self, name: &str, shape: &[i64], init: Init) -> Tensor {
        let tensor = match self.source {
            ParameterSource::Checkpoint(weights) => {
                self.read_checkpoint(shape, || weights.get_float32(name, shape))
            }
            _ => self.read_tensor(name, shape, init).to_kind(Kind::Float),
        };
        self.named.borrow_mut().parameters.push((name.to_string(), tensor.shallow_clone()));
        tensor
    }

    /// The checkpoint's tensor `name` of the given shape, which holds several parameters; see [`Builder::given_weight`]. None
    /// for other sources, and after an error.
    pub(super) fn whole(&self, name: &str, shape: &[i64]) -> Option<Tensor> {
        let ParameterSource::Checkpoint(weights) = self.source else { return None };
        let tensor = self.read_checkpoint(shape, || weights.get(name, shape));
        self.error.borrow().is_none().then_some(tensor)
    }

    /// As [`Builder::whole`]; None, too, if the checkpoint has no such tensor.
    pub(super) fn whole_if_present(&self, name: &str, shape: &[i64]) -> Option<Tensor> {
        let ParameterSource::Checkpoint(weights) = self.source else { return None };
        weights.contains(name).then(|| self.whole(name, shape)).flatten()
    }

    /// The weight of a linear layer that is part of a tensor from [`Builder::whole`], recorded as `name`.
    pub(super) fn given_weight(&self, name: &str, part: Tensor) -> Weight {
        let part = Weight::Stored(part);
        self.record_weight(name, if self.packs { part.pack() } else { part })
    }

    /// A parameter that is part of a tensor from [`Builder::whole`], recorded as `name`.
    pub(super) fn given(&self, name: &str, part: Tensor) -> Tensor {
        self.named.borrow_mut().parameters.push((name.to_string(), part.shallow_clone()));
        part
    }

    /// The weight `[output, input]` of a linear layer.
    pub fn linear_weight(&self, name: &str, shape: &[i64; 2], init: Init) -> Weight {
        let shared =
            if let ParameterSource::Shared(model) = &self.source { model.packed(name, shape) } else { None };
        let weight = match shared {
            Some(packed) => Weight::Packed(packed),
            // Packing copies the current values of a model in training.
            None if self.packs && self.error.borrow().is_none() => {
                Weight::Stored(self.read_tensor(name, shape, init).detach()).pack()
            }
            None => Weight::Stored(self.read_tensor(name, shape, init)),
        };
        self.record_weight(name, weight)
    }

    fn record_weight(&self, name: &str, weight: Weight) -> Weight {
        let (name, named) = (name.to_string(), &mut *self.named.borrow_mut());
        named.linear.push(name.clone());
        match &weight {
            Weight::Stored(stored) => named.parameters.push((name, stored.shallow_clone())),
            Weight::Packed(packed) => named.packed.push((name, packed.share())),
        }
        weight
    }

    /// The tensor `name` of the given shape, which is stored but not trained.
    pub fn buffer(&self, name: &str, shape: &[i64], init: Init) -> Tensor {
        let tensor = self.read_tensor(name, shape, init);
        self.named.borrow_mut().buffers.push((name.to_string(), tensor.shallow_clone()));
        tensor
    }

    fn read_tensor(&self, name: &str, shape: &[i64], init: Init) -> Tensor {
        match &self.source {
            ParameterSource::Checkpoint(weights) => self.read_checkpoint(shape, || weights.get(name, shape)),
            ParameterSource::Shared(model) => model.tensor(name, shape),
            ParameterSource::Outline => Tensor::empty(shape, (Kind::BFloat16, HOST)),
            &ParameterSource::Fresh { seed, std, device, kind } => match init {
                Init::Ones => Tensor::ones(shape, (kind, device)),
                Init::Zeros => Tensor::zeros(shape, (kind, device)),
                Init::Constant(value) => Tensor::full(shape, value, (kind, device)),
                Init::Identity => {
                    let kernel = Tensor::zeros(shape, (kind, device));
                    let _ = kernel.narrow(-2, 0, 1).fill_(1.0);
                    kernel
                }
                Init::KaimingUniform => {
                    let bound = shape.last().map_or(1.0, |&columns| 1.0 / (columns as f64).sqrt());
                    let drawn = seeded(|| Tensor::rand(shape, (Kind::Float, HOST)), own_seed(seed, name));
                    ((drawn * 2.0 - 1.0) * bound).to_kind(kind).to_device(device)
                }
                Init::Normal | Init::StandardNormal => {
                    let std = if let Init::Normal = init { std } else { 1.0 };
                    let drawn = seeded(|| Tensor::randn(shape, (Kind::Float, HOST)), own_seed(seed, name));
                    (drawn * std).to_kind(kind).to_device(device)
                }
            },
        }
    }

    /// Reads a tensor of the checkpoint. After the first error, it reads nothing and returns empty tensors,
    /// because a broken config may ask for shapes that exceed memory.
    fn read_checkpoint(&self, shape: &[i64], read: impl FnOnce() -> Result<Tensor, ModelError>) -> Tensor {
        let mut error = self.error.borrow_mut();
        if error.is_none() {
            match read() {
                Ok(tensor) => return tensor,
                Err(found) => *error = Some(found),
            }
        }
        Tensor::empty(vec![0; shape.len()], (Kind::BFloat16, HOST))
    }

    /// Takes all tensors that were created since the last call.
    pub fn take_state_dict(&self) -> StateDict {
        self.named.take()
    }

    /// Checks that the checkpoint had all requested tensors.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub fn check(&self) -> Result<(), ModelError> {
        self.error.take().map_or(Ok(()), Err)
    }
}

/// Seed of a parameter's values.
fn own_seed(seed: u64, name: &str) -> i64 {
    Stream::new(seed, name).bits(0, Purpose::Init, 0) as i64
}

/// Random numbers that the seed alone decides.
fn seeded(draw: impl FnOnce() -> Tensor, seed: i64) -> Tensor {
    // libtorch has one generator for all threads, so no other thread may draw between seeding and drawing.
    static GENERATOR: Mutex<()> = Mutex::new(());
    let _alone = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(seed);
    draw()
}
