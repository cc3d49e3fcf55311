//! RoPE settings of a config.json, in older and newer keys. Unknown kinds of scaling are errors.

use deepspec_checkpoint::Fields;

use crate::ModelError;
use crate::nn::{RopeSpec, Scaling, Yarn};

const DEFAULT_THETA: f64 = 10_000.0;
/// Default base of Gemma's full-attention layers.
const FULL_LAYER_THETA: f64 = 1_000_000.0;
/// Default `partial_rotary_factor` of Gemma 4's full-attention layers.
const FULL_ROTARY_FACTOR: f64 = 0.25;

/// Settings shared by all layers: in `rope_parameters` (newer), or in `rope_theta` and `rope_scaling`. Also gives the longest
/// sequence, which scaling beyond an explicit original length may extend past `trained_for`.
///
/// # Errors
/// If the type of scaling is unknown, or a setting is out of range.
pub fn shared_rope(
    fields: &Fields,
    head_dim: i64,
    trained_for: usize,
) -> Result<(RopeSpec, usize), ModelError> {
    let scaling = fields.object("rope_scaling")?;
    let newer = fields.object("rope_parameters")?;
    let theta = fields.number("rope_theta")?;
    let Some(settings) = scaling.filter(|scaling| !scaling.map.is_empty()).or(newer) else {
        let theta = require_positive(fields, "rope_theta", theta.unwrap_or(DEFAULT_THETA))?;
        return Ok((RopeSpec { theta, head_dim, scaling: Scaling::None }, trained_for));
    };
    let original = fields.number("original_max_position_embeddings")?;
    let truncate = settings.flag("truncate")?.unwrap_or(true);
    let reader = RopeReader { settings: &settings, trained_for, original, truncate };
    let spec = reader.read_spec(head_dim, theta.unwrap_or(DEFAULT_THETA))?;
    let explicit = original.or(settings.number("original_max_position_embeddings")?);
    let extended = match (spec.scaling, explicit) {
        // YaRN configs give only the original length, so it is multiplied by the factor.
        (Scaling::Yarn(Yarn { factor, .. }), Some(original)) => original * factor,
        // Llama 3 configs give the extended length in `max_position_embeddings`.
        _ => 0.0,
    };
    Ok((spec, trained_for.max(extended as usize)))
}

/// Settings per type of layer: in `rope_parameters`, or as bases in `rope_theta` (full layers) and `rope_local_base_freq`.
pub struct RopeByLayerType<'a> {
    fields: &'a Fields<'a>,
    parameters: Option<Fields<'a>>,
    /// Scaling of the full-attention layers in older keys, which Gemma 3 has.
    scaling: Option<Fields<'a>>,
    is_gemma3: bool,
    trained_for: usize,
}

impl<'a> RopeByLayerType<'a> {
    /// The settings of a Gemma 4 in `fields`.
    ///
    /// # Errors
    /// If `rope_parameters` is no object.
    pub fn new(fields: &'a Fields<'a>, trained_for: usize) -> Result<Self, ModelError> {
        let parameters = fields.object("rope_parameters")?;
        Ok(Self { parameters, scaling: None, is_gemma3: false, fields, trained_for })
    }

    /// The settings of a Gemma 3 in `fields`.
    ///
    /// # Errors
    /// If `rope_parameters` or `rope_scaling` is no object, or both are there.
    pub fn of_gemma3(fields: &'a Fields<'a>, trained_for: usize) -> Result<Self, ModelError> {
        let (parameters, scaling) = (fields.object("rope_parameters")?, fields.object("rope_scaling")?);
        if parameters.is_some() && scaling.is_some() {
            let problem = "rope_parameters is there, too; expected one of them";
            return Err(fields.error("rope_scaling", problem).into());
        }
        Ok(Self { parameters, scaling, is_gemma3: true, fields, trained_for })
    }

    /// Rotary settings of the full-attention layers.
    ///
    /// # Errors
    /// As [`shared_rope`].
    pub fn full(&self, head_dim: i64) -> Result<RopeSpec, ModelError> {
        match &self.parameters {
            Some(parameters) => self.for_layer_type(parameters, "full_attention", head_dim),
            None if self.is_gemma3 => {
                let theta = self.fields.number("rope_theta")?.unwrap_or(FULL_LAYER_THETA);
                match &self.scaling {
                    Some(settings) => self.reader(settings, true).read_spec(head_dim, theta),
                    None => {
                        let theta = require_positive(self.fields, "rope_theta", theta)?;
                        Ok(RopeSpec { theta, head_dim, scaling: Scaling::None })
                    }
                }
            }
            None => {
                let theta = self.fields.number("rope_theta")?.unwrap_or(FULL_LAYER_THETA);
                let part = self.fields.number("partial_rotary_factor")?.unwrap_or(FULL_ROTARY_FACTOR);
                let scaling = Scaling::Proportional { planes: rotated_planes(part, head_dim), factor: 1.0 };
                Ok(RopeSpec { theta: require_positive(self.fields, "rope_theta", theta)?, head_dim, scaling })
            }
        }
    }

    /// Rotary settings of the sliding-window layers.
    ///
    /// # Errors
    /// As [`shared_rope`].
    pub fn sliding(&self, head_dim: i64) -> Result<RopeSpec, ModelError> {
        match &self.parameters {
            Some(parameters) => self.for_layer_type(parameters, "sliding_attention", head_dim),
            None => {
                let theta = self.fields.number("rope_local_base_freq")?.unwrap_or(DEFAULT_THETA);
                let theta = require_positive(self.fields, "rope_local_base_freq", theta)?;
                Ok(RopeSpec { theta, head_dim, scaling: Scaling::None })
            }
        }
    }

    fn for_layer_type(
        &self,
        parameters: &Fields,
        layer_type: &str,
        head_dim: i64,
    ) -> Result<RopeSpec, ModelError> {
        let settings = parameters.required(layer_type, parameters.object(layer_type)?)?;
        // A Gemma 3 has a key and a default for each type.
        let (key, default) = match (self.is_gemma3, layer_type) {
            (true, "sliding_attention") => ("rope_local_base_freq", DEFAULT_THETA),
            (true, _) => ("rope_theta", FULL_LAYER_THETA),
            (false, _) => ("rope_theta", DEFAULT_THETA),
        };
        let theta = self.fields.number(key)?.unwrap_or(default);
        // Transformers reads `truncate` at the level of the layer types, not inside them.
        let truncate = parameters.flag("truncate")?.unwrap_or(true);
        self.reader(&settings, truncate).read_spec(head_dim, theta)
    }

    fn reader<'b>(&self, settings: &'b Fields<'b>, truncate: bool) -> RopeReader<'b> {
        RopeReader { settings, trained_for: self.trained_for, original: None, truncate }
    }
}

/// One object of RoPE settings.
struct RopeReader<'a> {
    settings: &'a Fields<'a>,
    trained_for: usize,
    /// Original length from outside the settings, which takes precedence.
    original: Option<f64>,
    /// Whether the ends of YaRN's ramp are whole numbers.
    truncate: bool,
}

impl RopeReader<'_> {
    fn read_spec(&self, head_dim: i64, theta: f64) -> Result<RopeSpec, ModelError> {
        let settings = self.settings;
        let theta =
            require_positive(settings, "rope_theta", settings.number("rope_theta")?.unwrap_or(theta))?;
        let kind = match settings.text("rope_type")? {
            Some(kind) => kind,
            None => settings.text("type")?.unwrap_or("default"),
        };
        let part = settings.number("partial_rotary_factor")?;
        if kind != "proportional" && kind != "default" && part.is_some_and(|part| part != 1.0) {
            let problem = format!("rotating a part of each head is not supported together with \"{kind}\"");
            return Err(settings.error("partial_rotary_factor", problem).into());
        }
        let scaling = match kind {
            "default" => Scaling::None,
            "proportional" => Scaling::Proportional {
                planes: rotated_planes(part.unwrap_or(1.0), head_dim),
                factor: require_positive(settings, "factor", settings.number("factor")?.unwrap_or(1.0))?,
            },
            "linear" => Scaling::Linear { factor: self.required_number("factor")? },
            "llama3" => Scaling::Llama3 {
                factor: self.required_number("factor")?,
                low_freq_factor: self.required_number("low_freq_factor")?,
                high_freq_factor: self.required_number("high_freq_factor")?,
                original: self.original_length()?,
            },
            "yarn" => Scaling::Yarn(self.read_yarn(theta)?),
            other => {
                let problem = format!(
                    "\"{other}\" is not supported; expected default, linear, llama3, yarn or proportional"
                );
                return Err(settings.error("rope_type", problem).into());
            }
        };
        Ok(RopeSpec { theta, head_dim, scaling })
    }

    fn read_yarn(&self, theta: f64) -> Result<Yarn, ModelError> {
        let settings = self.settings;
        if theta <= 1.0 {
            return Err(settings.error("rope_theta", format!("{theta}: yarn needs a base above 1")).into());
        }
        let original = self.original_length()?;
        // An explicit null means the ratio of the two lengths.
        let factor = match settings.map.get("factor") {
            Some(null) if null.is_null() => self.trained_for as f64 / original,
            _ => self.required_number("factor")?,
        };
        let number = |key: &str| settings.number(key);
        // Zero counts as absent, as it does in transformers.
        let given = |key: &str| number(key).map(|value| value.filter(|&value| value != 0.0));
        let attention_factor = match (number("attention_factor")?, given("mscale")?, given("mscale_all_dim")?)
        {
            (Some(factor), ..) => require_positive(settings, "attention_factor", factor)?,
            (None, Some(mscale), Some(all)) => yarn_mscale(factor, mscale) / yarn_mscale(factor, all),
            (None, ..) => default_attention_factor(factor),
        };
        Ok(Yarn {
            factor,
            attention_factor,
            beta_fast: require_positive(settings, "beta_fast", given("beta_fast")?.unwrap_or(32.0))?,
            beta_slow: require_positive(settings, "beta_slow", given("beta_slow")?.unwrap_or(1.0))?,
            original,
            truncate: self.truncate,
        })
    }

    fn required_number(&self, key: &str) -> Result<f64, ModelError> {
        require_positive(self.settings, key, self.settings.required(key, self.settings.number(key)?)?)
    }

    fn original_length(&self) -> Result<f64, ModelError> {
        let key = "original_max_position_embeddings";
        let inside = self.settings.number(key)?;
        require_positive(self.settings, key, self.original.or(inside).unwrap_or(self.trained_for as f64))
    }
}

/// Number of whole planes in the fraction `part` of a head.
fn rotated_planes(part: f64, head_dim: i64) -> i64 {
    (((part * head_dim as f64) / 2.0).floor() as i64).clamp(0, head_dim / 2)
}

/// `attention_factor` of YaRN in a config without this key.
pub fn default_attention_factor(factor: f64) -> f64 {
    yarn_mscale(factor, 1.0)
}

/// YaRN's correction of the attention's temperature, `0.1·m·ln(s) + 1`.
fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

fn require_positive(fields: &Fields, key: &str, value: f64) -> Result<f64, ModelError> {
    if value > 0.0 && value.is_finite() {
        return Ok(value);
    }
    Err(fields.error(key, format!("{value} is not a positive number")).into())
}

/// Number of the first channels of a head of `head_dim` that rotate, if `part` of them do (`partial_rotary_factor`).
///
/// # Errors
/// If it is no even number from 2 to `head_dim`.
pub(super) fn rotated_channels(fields: &Fields, part: f64, head_dim: i64) -> Result<i64, ModelError> {
    let rotated = (part * head_dim as f64) as i64;
    if (2..=head_dim).contains(&rotated) && rotated % 2 == 0 {
        return Ok(rotated);
    }
    let problem = format!("{part} of {head_dim} channels is no even number of them");
    Err(fields.error("partial_rotary_factor", problem).into())
}
