//! Cosines and sines of rotary positions. Their angles are float32, whatever the model's dtype.

use std::cell::{OnceCell, RefCell};
use std::f64::consts::TAU;

use tch::{Device, Kind, Tensor};

use super::spec::{RopeSpec, Scaling, Yarn};

/// Number of values that libtorch's element-wise operators process at a time: two vectors of the widest
/// processors.
const VECTOR_VALUES: i64 = 32;
/// Maximum number of values whose cosines libtorch computes on one thread.
const SINGLE_THREAD_VALUES: i64 = 2048;
/// Maximum number of positions with cached rotations. They take 8 MB for a head width of 128.
pub(super) const MAX_CACHED_POSITIONS: i64 = 1 << 14;
/// Number of positions that the CPU caches at first.
const MIN_CACHED_POSITIONS: i64 = 1 << 10;

/// A rotary embedding: the inverse frequencies of one head width.
pub struct Rope {
    spec: RopeSpec,
    device: Device,
    /// `[D/2]` float32, computed when first needed: a config may ask for heads that its weights do not have.
    inv_freq: OnceCell<Tensor>,
    /// Cached rotations of positions 0, 1, 2, …, extended on demand.
    kept: RefCell<Option<Rotation>>,
}

/// Cosines and sines of N positions, `[N, 1, D/2]`.
pub struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// The embedding of `spec` on `device`.
    pub fn new(spec: &RopeSpec, device: Device) -> Self {
        Self { spec: *spec, device, inv_freq: OnceCell::new(), kept: RefCell::new(None) }
    }

    /// θ^(−2i/D) after scaling, `[D/2]` float32.
    pub fn inverse_frequencies(&self) -> &Tensor {
        self.inv_freq.get_or_init(|| scaled_frequencies(&self.spec, self.device))
    }

    /// Factor on cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match self.spec.scaling {
            Scaling::Yarn(yarn) => yarn.attention_factor,
            _ => 1.0,
        }
    }

    /// The rotation of integer positions `[N]`. The CPU caches rotations of positions below
    /// `MAX_CACHED_POSITIONS`.
    pub fn at(&self, positions: &Tensor, kind: Kind) -> Rotation {
        if positions.device() != Device::Cpu || positions.numel() == 0 {
            return self.compute_piece(positions, kind);
        }
        let (least, most) = positions.aminmax(None::<i64>, false);
        let (least, most) = (least.int64_value(&[]), most.int64_value(&[]));
        if least < 0 || most >= MAX_CACHED_POSITIONS {
            return self.compute_in_pieces(positions, kind);
        }
        self.at_positions_below(most + 1, positions, kind)
    }

    /// The rotation of positions below `end`, by index from the cached table if `end` is at most
    /// `MAX_CACHED_POSITIONS`.
    pub fn at_positions_below(&self, end: i64, positions: &Tensor, kind: Kind) -> Rotation {
        if end > MAX_CACHED_POSITIONS {
            return self.at(positions, kind);
        }
        let mut kept = self.kept.borrow_mut();
        let whole = kept.take().filter(|kept| kept.cos.kind() == kind && end <= kept.cos.size()[0]);
        // A GPU gets the whole table at once. Otherwise growth would free a table that streams may still read.
        let first =
            if positions.device() == Device::Cpu { MIN_CACHED_POSITIONS } else { MAX_CACHED_POSITIONS };
        let whole = whole.unwrap_or_else(|| self.compute_table(end.max(first), kind));
        let picked = |of: &Tensor| of.index_select(0, positions);
        let rotation = Rotation { cos: picked(&whole.cos), sin: picked(&whole.sin) };
        *kept = Some(whole);
        rotation
    }

    /// Rotations of at least `length` positions, from 0.
    fn compute_table(&self, length: i64, kind: Kind) -> Rotation {
        let length = (length as u64).next_power_of_two() as i64;
        let device = self.device;
        let positions = Tensor::arange(length, (Kind::Int64, device));
        if device == Device::Cpu {
            self.compute_in_pieces(&positions, kind)
        } else {
            self.compute_piece(&positions, kind)
        }
    }

    /// Computes the rotation of integer positions `[N]` on the CPU, N > 0, without the cache.
    ///
    /// Each piece fills whole vectors of the processor, and libtorch does not share a piece among threads. Cosines of values that fill no
    /// vector differ in the last bit. Such values are at the end of a tensor and of each thread's share. With pieces, the rotation of a
    /// position does not depend on the other positions.
    fn compute_in_pieces(&self, positions: &Tensor, kind: Kind) -> Rotation {
        let (rows, width) = (positions.size()[0], (self.inverse_frequencies().numel() as i64).max(1));
        // This many rows fill whole vectors.
        let whole = VECTOR_VALUES / gcd(width, VECTOR_VALUES);
        let most = (SINGLE_THREAD_VALUES / width / whole * whole).max(whole);
        let missing = (-rows).rem_euclid(whole);
        let padded = positions.constant_pad_nd([0, missing]);
        let firsts = (0..rows + missing).step_by(most as usize);
        let pieces: Vec<Rotation> = firsts
            .map(|first| self.compute_piece(&padded.narrow(0, first, most.min(rows + missing - first)), kind))
            .collect();
        let all = |of: fn(&Rotation) -> &Tensor| match pieces.as_slice() {
            [only] => of(only).narrow(0, 0, rows),
            several => Tensor::cat(&several.iter().map(of).collect::<Vec<_>>(), 0).narrow(0, 0, rows),
        };
        Rotation { cos: all(|piece| &piece.cos), sin: all(|piece| &piece.sin) }
    }

    /// Computes the rotation of integer positions `[N]` in one piece.
    fn compute_piece(&self, positions: &Tensor, kind: Kind) -> Rotation {
        let angles = positions.to_kind(Kind::Float).unsqueeze(1) * self.inverse_frequencies(); // [N, D/2]
        let scaled = |x: Tensor| (x * self.attention_factor()).to_kind(kind).unsqueeze(1);
        Rotation { cos: scaled(angles.cos()), sin: scaled(angles.sin()) }
    }
}

/// The greatest common divisor.
fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// θ^(−2i/D) after scaling, for i < D/2.
fn scaled_frequencies(spec: &RopeSpec, device: Device) -> Tensor {
    let plain = unscaled_frequencies(spec, device);
    match spec.scaling {
        Scaling::None => plain,
        Scaling::Proportional { planes, factor } => {
            let _ = plain.narrow(0, planes, spec.head_dim / 2 - planes).zero_();
            plain / factor
        }
        Scaling::Linear { factor } => plain / factor,
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
            let turns = &plain * (original / TAU);
            let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            blend_frequencies(&plain, factor, &kept)
        }
        Scaling::Yarn(yarn) => {
            let (first, last) = yarn_ramp_planes(spec, yarn);
            let planes = Tensor::arange(spec.head_dim / 2, (Kind::Float, device));
            let slowed = ((planes - first) / (last - first)).clamp(0.0, 1.0);
            blend_frequencies(&plain, yarn.factor, &(1.0 - slowed))
        }
    }
}

/// θ^(−2i/D) for i < D/2.
fn unscaled_frequencies(spec: &RopeSpec, device: Device) -> Tensor {
    let dim = spec.head_dim;
    let exponent = Tensor::arange_start_step(0, dim, 2, (Kind::Float, device)) / dim as f64;
    Tensor::pow_scalar(spec.theta, &exponent).reciprocal()
}

/// Returns `kept · plain + (1 − kept) · plain / factor`, per frequency.
fn blend_frequencies(plain: &Tensor, factor: f64, kept: &Tensor) -> Tensor {
    plain * kept + (plain / factor) * (1.0 - kept)
}

/// Plane indices where YaRN's ramp starts and ends. Frequencies before the ramp do not change, and frequencies after it are divided by
/// `factor`.
fn yarn_ramp_planes(spec: &RopeSpec, yarn: Yarn) -> (f64, f64) {
    let dim = spec.head_dim as f64;
    // Index of the plane, as a real number, that turns `turns` times within the original length.
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
    /// Cosines and sines.
    pub fn cos_sin(&self) -> [&Tensor; 2] {
        [&self.cos, &self.sin]
    }

    /// Rotates `x [N, heads, D]`; value `i` and value `i + D/2` of a head are one pair. If heads are wider
    /// than D, their first D channels rotate.
    pub fn rotate(&self, x: &Tensor) -> Tensor {
        let (rotated, width) = (2 * self.cos.size()[2], x.size()[2]);
        if rotated == width {
            return super::rope(x, &self.cos, &self.sin);
        }
        let first = x.narrow(2, 0, rotated).contiguous();
        let first = super::rope(&first, &self.cos, &self.sin);
        Tensor::cat(&[first, x.narrow(2, rotated, width - rotated)], 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A position's rotation has the same bits, whichever other positions are requested and however many threads
    /// run.
    #[test]
    fn positions_keep_their_bits() {
        let _no_grad = tch::no_grad_guard();
        let threads = tch::get_num_threads();
        for head_dim in [32, 48, 256, 512] {
            let spec = RopeSpec { theta: 1e4, head_dim, scaling: Scaling::None };
            for kind in [Kind::Float, Kind::BFloat16] {
                let rope = Rope::new(&spec, Device::Cpu);
                let at = |positions: &[i64]| rope.at(&Tensor::from_slice(positions), kind);
                tch::set_num_threads(1);
                let alone = at(&[7, 1000]);
                // Positions that extend the cache, many positions, and positions beyond the cache.
                for (threads, count, last) in [
                    (1, 1, 3),
                    (1, 2, 5000),
                    (3, 40, MAX_CACHED_POSITIONS - 1),
                    (3, 101, MAX_CACHED_POSITIONS),
                    (5, 777, 1_000_000),
                ] {
                    tch::set_num_threads(threads);
                    let mut positions = vec![last; count];
                    positions.extend([7, 1000]);
                    let beside = at(&positions);
                    for (alone, beside) in [(&alone.cos, &beside.cos), (&alone.sin, &beside.sin)] {
                        let found = beside.narrow(0, count as i64, 2);
                        assert!(alone.equal(&found), "{head_dim}, {kind:?}, beside {count} × {last}");
                    }
                }
                assert_eq!(rope.at(&Tensor::zeros([0], (Kind::Int64, Device::Cpu)), kind).cos.size()[0], 0);
            }
        }
        tch::set_num_threads(threads);
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
