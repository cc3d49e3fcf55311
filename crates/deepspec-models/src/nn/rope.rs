//! Rotary position embedding (Su et al. 2021), angles in float32 whatever the model's kind.

use std::f64::consts::TAU;

use tch::{Device, Kind, Tensor};

use super::spec::{LayerSpec, RopeSpec, Scaling, Yarn};

/// Values that libtorch's element-wise operators take at a time: two vectors of the widest processors.
const ROWS: i64 = 32;

/// The rotary embeddings of a stack of layers, one for each kind of layer.
pub struct Ropes {
    ropes: Vec<Rope>,
    /// Which of them each layer uses.
    of_layer: Vec<usize>,
}

/// What N positions turn by, in every layer.
pub struct Rotations<'a> {
    distinct: Vec<Rotation>,
    of_layer: &'a [usize],
}

impl Ropes {
    /// Those of `layers` on `device`.
    pub fn new(layers: &[LayerSpec], device: Device) -> Self {
        let mut specs: Vec<&RopeSpec> = vec![];
        let of_layer = layers
            .iter()
            .map(|layer| {
                specs.iter().position(|spec| **spec == layer.rope).unwrap_or_else(|| {
                    specs.push(&layer.rope);
                    specs.len() - 1
                })
            })
            .collect();
        Self { ropes: specs.into_iter().map(|spec| Rope::new(spec, device)).collect(), of_layer }
    }

    /// The rotations of integer positions `[N]`.
    pub fn at(&self, positions: &Tensor, kind: Kind) -> Rotations<'_> {
        Rotations {
            distinct: self.ropes.iter().map(|rope| rope.at(positions, kind)).collect(),
            of_layer: &self.of_layer,
        }
    }
}

impl Rotations<'_> {
    /// That of one layer.
    pub fn of(&self, layer: usize) -> &Rotation {
        &self.distinct[self.of_layer[layer]]
    }
}

/// Inverse frequencies of one head width.
struct Rope {
    inv_freq: Tensor, // [D/2] float32
    attention_factor: f64,
}

/// Cosines and sines of N positions, `[N, 1, D/2]`.
pub struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// The frequencies of `spec` on `device`.
    fn new(spec: &RopeSpec, device: Device) -> Self {
        let plain = plain(spec, device);
        let inv_freq = match spec.scaling {
            Scaling::None => plain,
            Scaling::Proportional { planes, factor } => {
                let _ = plain.narrow(0, planes, spec.head_dim / 2 - planes).zero_();
                plain / factor
            }
            Scaling::Linear { factor } => plain / factor,
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let turns = &plain * (original / TAU);
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                blend(&plain, factor, &kept)
            }
            Scaling::Yarn(yarn) => {
                let (first, last) = ramp(spec, yarn);
                let planes = Tensor::arange(spec.head_dim / 2, (Kind::Float, device));
                let slowed = ((planes - first) / (last - first)).clamp(0.0, 1.0);
                blend(&plain, yarn.factor, &(1.0 - slowed))
            }
        };
        let attention_factor = match spec.scaling {
            Scaling::Yarn(yarn) => yarn.attention_factor,
            _ => 1.0,
        };
        Self { inv_freq, attention_factor }
    }

    /// The rotation of integer positions `[N]`.
    fn at(&self, positions: &Tensor, kind: Kind) -> Rotation {
        let rows = positions.size()[0];
        let positions = whole(positions);
        let angles = positions.to_kind(Kind::Float).unsqueeze(1) * &self.inv_freq; // [N, D/2]
        let scaled = |x: Tensor| (x * self.attention_factor).to_kind(kind).unsqueeze(1).narrow(0, 0, rows);
        Rotation { cos: scaled(angles.cos()), sin: scaled(angles.sin()) }
    }
}

/// On the CPU, positions in whole multiples of [`ROWS`]: libtorch's cosines of what fills no vector of the processor differ in the last
/// bit from those of what does, and which rows those are must not depend on how many there are.
fn whole(positions: &Tensor) -> Tensor {
    let missing = (-positions.size()[0]).rem_euclid(ROWS);
    match positions.device() {
        Device::Cpu if missing > 0 => positions.constant_pad_nd([0, missing]),
        _ => positions.shallow_clone(),
    }
}

/// θ^(−2i/D) for i < D/2.
fn plain(spec: &RopeSpec, device: Device) -> Tensor {
    let dim = spec.head_dim;
    let exponent = Tensor::arange_start_step(0, dim, 2, (Kind::Float, device)) / dim as f64;
    Tensor::pow_scalar(spec.theta, &exponent).reciprocal()
}

/// `kept` of each plain frequency and the rest of the one divided by `factor`.
fn blend(plain: &Tensor, factor: f64, kept: &Tensor) -> Tensor {
    plain * kept + (plain / factor) * (1.0 - kept)
}

/// The planes at which YaRN begins to divide and from which it divides fully.
fn ramp(spec: &RopeSpec, yarn: Yarn) -> (f64, f64) {
    let dim = spec.head_dim as f64;
    // The plane, as a real number, that turns so often within the original length.
    let plane = |turns: f64| dim * (yarn.original / (turns * TAU)).ln() / (2.0 * spec.theta.ln());
    let (mut first, mut last) = (plane(yarn.beta_fast), plane(yarn.beta_slow));
    if yarn.truncate {
        (first, last) = (first.floor(), last.ceil());
    }
    (first, last) = (first.max(0.0), last.min(dim - 1.0));
    // A ramp of no width is a step.
    (first, if first == last { last + 0.001 } else { last })
}

impl Rotation {
    /// Rotates `x [N, heads, D]`, whose halves are the two coordinates of each plane.
    pub fn rotate(&self, x: &Tensor) -> Tensor {
        if let Some(rotated) = deepspec_native::rotate(x, &self.cos, &self.sin) {
            return rotated;
        }
        let half = x.size()[2] / 2;
        let (a, b) = (x.narrow(2, 0, half), x.narrow(2, half, half));
        Tensor::cat(&[&a * &self.cos - &b * &self.sin, b * &self.cos + a * &self.sin], 2)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::Value;

    use super::*;
    use crate::ModelConfig;

    /// Frequencies that transformers computes from the same settings; `tests/rope/make.py` wrote them.
    #[test]
    fn scaled_frequencies_are_those_of_transformers() {
        let cases: Vec<Value> = serde_json::from_str(include_str!("../../tests/rope/scaled.json")).unwrap();
        assert!(cases.len() > 10);
        for case in cases {
            let raw = case["config"].as_object().cloned().unwrap();
            let config = ModelConfig::parse(Path::new("config.json"), raw).unwrap();
            let expected = case["layers"].as_array().unwrap();
            assert_eq!(config.layers.len(), expected.len());
            for (layer, expected) in config.layers.iter().zip(expected) {
                let rope = Rope::new(&layer.rope, Device::Cpu);
                let found: Vec<f64> = Vec::try_from(rope.inv_freq.to_kind(Kind::Double)).unwrap();
                let wanted: Vec<f64> =
                    expected["inv_freq"].as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect();
                let close = |(found, wanted): (&f64, &f64)| (found - wanted).abs() <= 3e-7 * wanted;
                assert!(
                    found.len() == wanted.len() && found.iter().zip(&wanted).all(close),
                    "{}: {found:?}, expected {wanted:?}",
                    case["name"]
                );
                let factor = expected["attention_factor"].as_f64().unwrap();
                assert!((rope.attention_factor - factor).abs() <= 1e-12 * factor, "{}", case["name"]);
            }
        }
    }

    /// Distances of one token stay distinct a million tokens in, also for a bfloat16 model.
    #[test]
    fn angles_are_float32_in_every_kind() {
        let spec = RopeSpec { theta: 1e6, head_dim: 32, scaling: Scaling::None };
        let rope = Rope::new(&spec, Device::Cpu);
        for kind in [Kind::Float, Kind::BFloat16] {
            let positions = Tensor::from_slice(&[1_000_000_i64, 1_000_001]);
            let cos = rope.at(&positions, kind).cos.to_kind(Kind::Double);
            for (row, position) in [(0, 1e6_f64), (1, 1_000_001.0)] {
                let found = cos.double_value(&[row, 0, 0]);
                assert!((found - position.cos()).abs() < 4e-3, "{kind:?}: {found}");
            }
        }
    }
}
