//! Rotary position embedding (Su et al. 2021), angles in float32 whatever the model's kind.

use tch::{Device, Kind, Tensor};

/// Inverse frequencies of one head width.
pub struct Rope {
    inv_freq: Tensor, // [D/2] float32
}

/// Cosines and sines of N positions, `[N, 1, D/2]`.
pub struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// θ^(−2i/D) for i < D/2.
    pub fn new(theta: f64, head_dim: i64, device: Device) -> Self {
        let exponent = Tensor::arange_start_step(0, head_dim, 2, (Kind::Float, device)) / head_dim as f64;
        Self { inv_freq: Tensor::pow_scalar(theta, &exponent).reciprocal() }
    }

    /// The rotation of integer positions `[N]`.
    pub fn at(&self, positions: &Tensor, kind: Kind) -> Rotation {
        let angles = positions.to_kind(Kind::Float).unsqueeze(1) * &self.inv_freq; // [N, D/2]
        Rotation {
            cos: angles.cos().to_kind(kind).unsqueeze(1),
            sin: angles.sin().to_kind(kind).unsqueeze(1),
        }
    }
}

impl Rotation {
    /// Rotates `x [N, heads, D]`, whose halves are the two coordinates of each plane.
    pub fn rotate(&self, x: &Tensor) -> Tensor {
        let half = x.size()[2] / 2;
        let (a, b) = (x.narrow(2, 0, half), x.narrow(2, half, half));
        Tensor::cat(&[&a * &self.cos - &b * &self.sin, b * &self.cos + a * &self.sin], 2)
    }
}
