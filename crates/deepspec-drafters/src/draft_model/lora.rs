//! LoRA on a drafter (Hu et al. 2021, arXiv 2106.09685): `W + scale · B A` in place of a frozen weight W `[out, in]`.
//!
//! Modules and operators keep one plain weight tensor, into which [`LoraAdapters::merge`] writes the sum. After a backward pass,
//! [`LoraAdapters::backward`] passes its gradient on to A `[r, in]` and B `[out, r]`.

use deepspec_core::config::add_nearest_name;
use deepspec_core::recipe::LoraRecipe;
use deepspec_models::nn::{Builder, Init, StateDict};
use deepspec_ops::{grad_or_zeros, take_gradient};
use tch::{Kind, Tensor};

/// Bytes per value while a weight's sum is written: the sum in float32, and whether the update is 0. On a CPU a
/// bfloat16 weight takes 4 more, which plans leave out.
pub(crate) const MERGE_BYTES: u64 = 4 + 1;

/// End of the name of a linear layer's weight.
const WEIGHT: &str = ".weight";

/// Trained matrices beside the frozen weights of a model. They are float32 in a model of any dtype.
pub struct LoraAdapters {
    scale: f64,
    targets: Vec<Target>,
    /// A and B of each target, in turn: `NAME.lora_A.weight` and `NAME.lora_B.weight`.
    parameters: Vec<(String, Tensor)>,
}

/// A linear layer with its matrices.
struct Target {
    /// Name of the weight.
    name: String,
    /// The model's weight, `[out, in]`, which holds the sum.
    weight: Tensor,
    /// The frozen weight W.
    base: Tensor,
    /// `[r, in]`.
    a: Tensor,
    /// `[out, r]`.
    b: Tensor,
}

impl LoraAdapters {
    /// Adapters of these weights `[out, in]`, whose values are the base. A is random and B is zero, as in PEFT.
    pub fn new(lora: &LoraRecipe, weights: &[(String, Tensor)], seed: u64) -> Self {
        let rank = lora.r as i64;
        let mut parameters = vec![];
        let targets = weights.iter().map(|(name, weight)| {
            let (module, shape) = (module_name(name), weight.size());
            let builder = Builder::random_init(seed, 0.0, weight.device(), Kind::Float);
            let mut parameter = |matrix, shape: [i64; 2], init| {
                let name = format!("{module}.{matrix}{WEIGHT}");
                let tensor = builder.get(&name, &shape, init).set_requires_grad(true);
                parameters.push((name, tensor.shallow_clone()));
                tensor
            };
            let a = parameter("lora_A", [rank, shape[1]], Init::KaimingUniform);
            let b = parameter("lora_B", [shape[0], rank], Init::Zeros);
            let base = weight.detach().copy();
            Target { name: name.clone(), weight: weight.set_requires_grad(true), base, a, b }
        });
        let targets = targets.collect();
        Self { scale: lora.scale(), targets, parameters }
    }

    /// The trained matrices by name.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        &self.parameters
    }

    /// The frozen weights by name; they share storage.
    pub fn base(&self) -> Vec<(String, Tensor)> {
        self.targets.iter().map(|target| (target.name.clone(), target.base.shallow_clone())).collect()
    }

    /// Makes the model's present weights the base, rounded to bfloat16, the dtype of checkpoints. So a resumed run has equal values.
    pub fn take_base(&self) {
        let _guard = tch::no_grad_guard();
        for Target { weight, base, .. } in &self.targets {
            base.shallow_clone().copy_(&weight.to_kind(Kind::BFloat16));
        }
    }

    /// Writes the sums into the model's weights, in place: [`MERGE_BYTES`] are taken for each value of one
    /// weight at a time. A weight whose update is 0 keeps every bit.
    pub fn merge(&self) {
        let _guard = tch::no_grad_guard();
        for Target { weight, base, a, b, .. } in &self.targets {
            let mut update = b.matmul(a).g_mul_scalar_(self.scale);
            let is_zero = update.eq(0.0);
            let mut weight = weight.shallow_clone();
            weight.copy_(&update.g_add_(base));
            drop(update);
            // −0 + 0 is 0, so the base is taken where nothing is added.
            weight.copy_(&base.where_self(&is_zero, &weight));
        }
    }

    /// Takes the gradients G of the model's weights after a backward pass, and adds `scale · Bᵀ G` to that of A and `scale · G Aᵀ` to that
    /// of B.
    pub fn backward(&self) {
        let _guard = tch::no_grad_guard();
        for Target { weight, a, b, .. } in &self.targets {
            if let Some(gradient) = take_gradient(weight) {
                let gradient = gradient.to_kind(Kind::Float);
                let _ = grad_or_zeros(a).g_add_(&(b.tr().matmul(&gradient) * self.scale));
                let _ = grad_or_zeros(b).g_add_(&(gradient.matmul(&a.tr()) * self.scale));
            }
        }
    }
}

/// Names of the weights that `lora` targets, among the parameters of `model`.
///
/// # Errors
/// The entry of `target_modules` that names no linear layer, with the names that exist.
pub fn target_weights(lora: &LoraRecipe, model: &StateDict) -> Result<Vec<String>, String> {
    let weights: Vec<&String> = model.linear.iter().filter(|name| name.ends_with(WEIGHT)).collect();
    for target in lora.target_modules.iter().flatten() {
        let only = LoraRecipe { target_modules: Some(vec![target.clone()]), ..lora.clone() };
        if !weights.iter().any(|name| only.is_target(module_name(name))) {
            let mut known: Vec<String> = vec![];
            for name in weights.iter().map(|name| format!("`{}`", short_name(module_name(name)))) {
                if !known.contains(&name) {
                    known.push(name);
                }
            }
            let known = known.join(", ");
            let problem = format!(
                "the drafter has no linear layer `{target}`; expected some of {known}, or longer ends of their names"
            );
            return Err(add_nearest_name(target, &problem));
        }
    }
    Ok(weights.into_iter().filter(|name| lora.is_target(module_name(name))).cloned().collect())
}

/// Name of the linear layer that a weight belongs to.
fn module_name(weight: &str) -> &str {
    weight.strip_suffix(WEIGHT).unwrap_or(weight)
}

/// The last part of a module's name; the whole name if that part is a number.
fn short_name(module: &str) -> &str {
    let last = module.rsplit('.').next().unwrap_or(module);
    if last.bytes().all(|byte| byte.is_ascii_digit()) { module } else { last }
}
