//! Settings of rotary embeddings.

use std::fmt;

/// Scaling of rotary frequencies, relative to `θ^(−2i/D)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaling {
    /// No scaling.
    None,
    /// Only the first `planes` of the D/2 planes rotate. All frequencies are divided by `factor`.
    Proportional {
        /// Planes that turn.
        planes: i64,
        /// Divisor.
        factor: f64,
    },
    /// All frequencies are divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Low frequencies are divided by `factor`, and high frequencies do not change. Frequencies between them are
    /// blended by wavelength (Llama 3).
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
    /// YaRN (Peng et al. 2023): mixes interpolated and original frequencies. The mix is a linear ramp over the
    /// dimension pairs.
    Yarn(Yarn),
}

/// The setting as in `rope_parameters` of a config.json.
impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "rope_type default"),
            Self::Proportional { planes, factor } => {
                write!(f, "rope_type proportional, factor {factor}, {planes} rotated planes")
            }
            Self::Linear { factor } => write!(f, "rope_type linear, factor {factor}"),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original } => write!(
                f,
                "rope_type llama3, factor {factor}, low_freq_factor {low_freq_factor}, \
                 high_freq_factor {high_freq_factor}, original_max_position_embeddings {original}"
            ),
            Self::Yarn(Yarn { factor, attention_factor, beta_fast, beta_slow, original, truncate }) => {
                write!(
                    f,
                    "rope_type yarn, factor {factor}, attention_factor {attention_factor}, beta_fast {beta_fast}, \
                 beta_slow {beta_slow}, original_max_position_embeddings {original}, truncate {truncate}"
                )
            }
        }
    }
}

/// Parameters of YaRN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Divisor of the slow planes.
    pub factor: f64,
    /// Factor on cosines and sines.
    pub attention_factor: f64,
    /// Planes that turn at least this often within `original` tokens keep their frequency.
    pub beta_fast: f64,
    /// Planes that turn at most this often have their frequency divided by `factor`.
    pub beta_slow: f64,
    /// Tokens the model was first trained for.
    pub original: f64,
    /// Whether the ends of the ramp are whole plane numbers.
    pub truncate: bool,
}

/// The rotary embedding of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// θ, base of the frequencies.
    pub theta: f64,
    /// D, or the number of channels that rotate, from the first one, where that is a part of a head.
    pub head_dim: i64,
    /// Scaling of the frequencies.
    pub scaling: Scaling,
}

impl fmt::Display for RopeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rope_theta {}, head_dim {}, {}", self.theta, self.head_dim, self.scaling)
    }
}
