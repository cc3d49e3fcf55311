//! Facts about a decoder layer. Families state them, layers and caches read them; nothing here knows a family's name.

use deepspec_ops::{Activation, AttentionSpec};

/// Where a layer's values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// A projection of their own.
    Projected,
    /// A projection of their own, RMS-normed per head without weights.
    Normed,
    /// What the key projection gives, before norm and rotation, RMS-normed per head without weights.
    SharesKey,
}

/// Where a layer's norms stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and before the MLP.
    Pre,
    /// Before and after both.
    Sandwich,
}

/// How rotary frequencies depart from `θ^(−2i/D)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaling {
    /// Not at all.
    None,
    /// Only the first `planes` of the D/2 planes turn; all angles are divided by `factor`.
    Proportional {
        /// Planes that turn.
        planes: i64,
        /// Divisor.
        factor: f64,
    },
    /// All angles are divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Slow planes are divided by `factor`, fast ones are kept, and those between are blended by their wavelength (Llama 3).
    Llama3 {
        /// Divisor of the slow planes.
        factor: f64,
        /// Planes that turn fewer times than this within `original` tokens are slow.
        low_freq_factor: f64,
        /// Planes that turn more often than this are fast.
        high_freq_factor: f64,
        /// Tokens the model was first trained for.
        original: f64,
    },
    /// The same idea with a ramp over the plane's number (Peng et al. 2023).
    Yarn(Yarn),
}

/// YaRN's numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Divisor of the slow planes.
    pub factor: f64,
    /// Factor on cosines and sines.
    pub attention_factor: f64,
    /// Turns within `original` tokens from which a plane is kept.
    pub beta_fast: f64,
    /// Turns up to which a plane is divided by `factor`.
    pub beta_slow: f64,
    /// Tokens the model was first trained for.
    pub original: f64,
    /// Whether the ends of the ramp are whole plane numbers.
    pub truncate: bool,
}

/// The rotary embedding of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// θ, base of the angles.
    pub theta: f64,
    /// D.
    pub head_dim: i64,
    /// Departure from the plain frequencies.
    pub scaling: Scaling,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// d, width of the residual stream.
    pub hidden_size: i64,
    /// Width inside the MLP.
    pub intermediate_size: i64,
    /// Heads, scale and window.
    pub attention: AttentionSpec,
    /// Rotary embedding of queries and keys.
    pub rope: RopeSpec,
    /// Where the values come from.
    pub value: Value,
    /// Where the norms stand.
    pub norms: Norms,
    /// Whether queries and keys are RMS-normed per head.
    pub qk_norm: bool,
    /// ε of all of them.
    pub eps: f64,
    /// The MLP's gate.
    pub activation: Activation,
    /// Whether the layer's output is multiplied by a stored number.
    pub scaled: bool,
}
