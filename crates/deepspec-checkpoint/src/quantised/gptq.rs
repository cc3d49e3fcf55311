//! Weights of GPTQ and AWQ: transposed integers of a few bits, packed into int32 words.
//!
//! For a weight `[out, in]`, groups of `in` and b bits, GPTQ stores `qweight [in·b/32, out]`, `qzeros [groups, out·b/32]`,
//! `scales [groups, out]` and `g_idx [in]`. AWQ packs `qweight [in, out·b/32]` along the other dimension, and interleaves the
//! numbers of a word.

use serde_json::{Map, Value};

use crate::quantised::TARGET_REMEDY;
use crate::quantised::matrix::{Axis, Packing, SCALES, StoredMatrix, matrix_shape};
use crate::quantised::module::{WEIGHT, check_bits};
use crate::quantised::tensor::{GroupIndex, QuantisedMatrix, QuantisedTensor, ZeroPoints};
use crate::{CheckpointError, Fields, Tensors};

/// Ending of the packed numbers.
const NUMBERS: &str = ".qweight";
/// The other format of GPTQ, which stores zero points themselves. The usual one stores them less one.
const GPTQ_V2: &str = "gptq_v2";

/// Settings of `quant_method: gptq` and `quant_method: awq`.
#[derive(Debug)]
pub(crate) struct Gptq {
    /// Bits per number.
    bits: u32,
    /// Columns of a group; None for whole rows.
    group_size: Option<usize>,
    /// Whether the layout is that of AWQ.
    is_awq: bool,
    /// Whether zero points are stored less one.
    has_lowered_zero_points: bool,
    /// Whether columns were quantised in activation order (`desc_act`), so that each module needs `g_idx`.
    has_activation_order: bool,
}

impl Gptq {
    /// Reads `quantization_config` of GPTQ.
    ///
    /// # Errors
    /// If a key is malformed or has a value that is not read.
    pub fn read_gptq(fields: &Fields) -> Result<Self, CheckpointError> {
        let bits = read_bits(fields, &["bits"], &[4, 8])?;
        let format = read_format(fields, &["checkpoint_format", "format"], &["gptq", GPTQ_V2])?;
        fields.require_text_if_present("pack_dtype", "int32")?;
        let problem = format!("the layout of Marlin is not read; {TARGET_REMEDY}");
        fields.refuse_if_on("is_marlin_format", &problem)?;
        // Modules that are left out have no settings, and neither have those with an empty object, as in
        // Qwen3.5.
        let modules = fields.object("dynamic")?;
        let has_none =
            |rule: &str, own: &Value| rule.starts_with("-:") || own.as_object().is_some_and(Map::is_empty);
        let mut modules = modules.iter().flat_map(|rules| rules.map.iter());
        if let Some((rule, _)) = modules.find(|(rule, own)| !has_none(rule, own)) {
            let problem = format!("\"{rule}\": settings of single modules are not read; {TARGET_REMEDY}");
            return Err(fields.error("dynamic", problem));
        }
        for key in ["adapter", "rotation"] {
            if fields.map.get(key).is_some_and(|value| !value.is_null()) {
                return Err(fields.error(key, format!("it is not read; {TARGET_REMEDY}")));
            }
        }
        Ok(Self {
            bits,
            group_size: read_group_size(fields, &["group_size"])?,
            is_awq: false,
            has_lowered_zero_points: format.as_deref() != Some(GPTQ_V2),
            has_activation_order: fields.flag("desc_act")?.unwrap_or(false),
        })
    }

    /// Reads `quantization_config` of AWQ.
    ///
    /// # Errors
    /// If a key is malformed or has a value that is not read.
    pub fn read_awq(fields: &Fields) -> Result<Self, CheckpointError> {
        let bits = read_bits(fields, &["bits", "w_bit"], &[4])?;
        read_format(fields, &["version", "format"], &["gemm"])?;
        if fields.text("backend")? == Some("llm-awq") {
            return Err(fields.error("backend", format!("\"llm-awq\" is not read; {TARGET_REMEDY}")));
        }
        let group_size = read_group_size(fields, &["group_size", "q_group_size"])?;
        Ok(Self {
            bits,
            group_size,
            is_awq: true,
            has_lowered_zero_points: false,
            has_activation_order: false,
        })
    }

    /// The quantised weight whose numbers are the tensor `name`, and the plain weight's name. None for every other tensor:
    /// plain weights, scales, zero points, biases.
    ///
    /// # Errors
    /// If other tensors of the module are missing, or do not fit.
    pub fn find(
        &self,
        tensors: &Tensors,
        name: &str,
    ) -> Result<Option<(String, QuantisedTensor)>, CheckpointError> {
        let Some(module) = name.strip_suffix(NUMBERS) else { return Ok(None) };
        let [first, second] = matrix_shape(tensors, name)?;
        let per_word = (u32::BITS / self.bits) as usize;
        let [inputs, outputs] =
            if self.is_awq { [first, second * per_word] } else { [first * per_word, second] };
        let packing =
            |axis| Packing { bits: self.bits, axis, is_interleaved: self.is_awq, is_lowered: false };
        let axis = if self.is_awq { Axis::Columns } else { Axis::Rows };
        let numbers = StoredMatrix::packed(tensors, name.into(), [inputs, outputs], packing(axis))?;
        let group_size = self.group_size.unwrap_or(inputs);
        if inputs % group_size != 0 {
            let problem = format!("`group_size` {group_size} does not divide its {inputs} inputs");
            return Err(tensors.error(name, problem));
        }
        let grid = [inputs / group_size, outputs];
        let scales = StoredMatrix::new(tensors, format!("{module}.scales"), grid, &SCALES)?;
        let lowered = Packing { is_lowered: self.has_lowered_zero_points, ..packing(Axis::Columns) };
        let zero_points = StoredMatrix::packed(tensors, format!("{module}.qzeros"), grid, lowered)?;
        let index = format!("{module}.g_idx");
        let has_index = self.has_activation_order || tensors.get(&index).is_some();
        let index = has_index.then(|| GroupIndex::new(tensors, index, inputs));
        let weight = QuantisedMatrix {
            numbers: numbers.transposed(),
            block: [1, group_size],
            scales: scales.transposed(),
            zero_points: ZeroPoints::Stored(zero_points.transposed()),
            group_index: index.transpose()?,
            unused: vec![],
        };
        Ok(Some((format!("{module}{WEIGHT}"), QuantisedTensor::Matrix(weight))))
    }
}

/// The first of `keys` that is there; the first one if none is.
fn present_key<'a>(fields: &Fields, keys: &[&'a str]) -> &'a str {
    keys.iter().find(|key| fields.map.get(**key).is_some_and(|value| !value.is_null())).unwrap_or(&keys[0])
}

/// The bits per number, one of `known`.
fn read_bits(fields: &Fields, keys: &[&str], known: &[u32]) -> Result<u32, CheckpointError> {
    let key = present_key(fields, keys);
    let bits = fields.required_size(key)?;
    check_bits(fields, key, bits, known)
}

/// The format in lower case, one of `known`; None without the keys.
fn read_format(fields: &Fields, keys: &[&str], known: &[&str]) -> Result<Option<String>, CheckpointError> {
    let key = present_key(fields, keys);
    let format = fields.text(key)?.map(str::to_lowercase);
    match format.as_deref().filter(|format| !known.contains(format)) {
        None => Ok(format),
        Some(other) => {
            let known = known.join(" or ");
            Err(fields.error(key, format!("\"{other}\" is not read; expected {known}; {TARGET_REMEDY}")))
        }
    }
}

/// The columns of a group; None for -1, whole rows.
fn read_group_size(fields: &Fields, keys: &[&str]) -> Result<Option<usize>, CheckpointError> {
    let key = present_key(fields, keys);
    if fields.number(key)? == Some(-1.0) {
        return Ok(None);
    }
    Ok(Some(fields.required_size::<u32>(key)? as usize))
}
