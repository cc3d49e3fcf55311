//! Weights of compressed-tensors, which llm-compressor writes: float8, int8, and int4 or int8 packed into words.

use regex::Regex;
use safetensors::Dtype;
use serde_json::Value;

use crate::quantised::TARGET_REMEDY;
use crate::quantised::fp8::{WEIGHT, present, read_block};
use crate::quantised::matrix::{Axis, Packing, SCALES, StoredMatrix, matrix_shape};
use crate::quantised::tensor::{QuantisedTensor, ZeroPoints};
use crate::{CheckpointError, Fields, Tensors, torch_dtype_name};

/// Ending of packed weights.
const PACKED_WEIGHT: &str = ".weight_packed";
/// Endings of tensors that quantise the inputs of a module.
const INPUT_TENSORS: [&str; 2] = [".input_scale", ".input_zero_point"];
/// The format whose numbers are packed into int32 words.
const PACK_FORMAT: &str = "pack-quantized";
/// Formats that are read.
const FORMATS: [&str; 4] = [PACK_FORMAT, "int-quantized", "float-quantized", "naive-quantized"];

/// Settings of `quant_method: compressed-tensors`.
#[derive(Debug)]
pub(crate) struct CompressedTensors {
    groups: Vec<Group>,
}

/// One of `config_groups`: modules with one scheme.
#[derive(Debug)]
struct Group {
    name: String,
    targets: Vec<Target>,
    /// Whether numbers are packed into words.
    is_packed: bool,
    /// Whether numbers are float8, not integers.
    is_float: bool,
    /// Bits per number.
    bits: u32,
    strategy: Strategy,
    /// Whether zero points are stored.
    has_zero_points: bool,
    /// Whether columns may belong to any group.
    is_ordered: bool,
}

/// The modules that a group is meant for.
#[derive(Debug)]
enum Target {
    /// A module's name, or its class.
    Name(String),
    /// Names of modules from their beginning on.
    Pattern(Regex),
}

/// The weights that share a scale.
#[derive(Debug, Clone, Copy)]
enum Strategy {
    /// All.
    Tensor,
    /// A row.
    Channel,
    /// This many columns of a row.
    Group(usize),
    /// This many rows and columns.
    Block([usize; 2]),
}

impl CompressedTensors {
    /// Reads `quantization_config`.
    ///
    /// # Errors
    /// If a key is malformed or has a value that is not read.
    pub fn read(fields: &Fields) -> Result<Self, CheckpointError> {
        fields.require_text_if_present("quantization_status", "compressed")?;
        if let Some(sparsity) = fields.object("sparsity_config")? {
            sparsity.require_text_if_present("format", "dense")?;
        }
        let transforms = fields.object("transform_config")?.map(|config| config.object("config_groups"));
        if transforms.transpose()?.flatten().is_some_and(|groups| !groups.map.is_empty()) {
            let problem = format!("transforms of activations are not computed; {TARGET_REMEDY}");
            return Err(fields.error("transform_config", problem));
        }
        let all = fields.required_object("config_groups")?;
        let mut groups = vec![];
        for name in all.map.keys() {
            let group = all.required_object(name)?;
            if let Some(weights) = group.object("weights")? {
                groups.push(Group::read(name, fields, &group, &weights)?);
            }
        }
        // A single group is that of all quantised modules.
        if groups.len() > 1 {
            for group in &mut groups {
                group.targets = read_targets(&all.required_object(&group.name)?)?;
            }
        }
        Ok(Self { groups })
    }

    /// The quantised weight whose numbers are the tensor `name`, and the plain weight's name; None if the tensor is no such
    /// thing.
    ///
    /// # Errors
    /// If other tensors of the module are missing, or do not fit.
    pub fn find(
        &self,
        tensors: &Tensors,
        name: &str,
    ) -> Result<Option<(String, QuantisedTensor)>, CheckpointError> {
        let facts = tensors.required_metadata(name)?;
        let packed = name.strip_suffix(PACKED_WEIGHT);
        let plain = name.strip_suffix(WEIGHT).filter(|_| matches!(facts.dtype, Dtype::F8_E4M3 | Dtype::I8));
        let Some(module) = packed.or(plain) else { return Ok(None) };
        let group = self.group_of(module).ok_or_else(|| {
            tensors.error(name, "none of `config_groups` targets this module, whose weight is quantised")
        })?;
        if group.is_packed != packed.is_some() {
            let (group, state) = (&group.name, if group.is_packed { "packed" } else { "not packed" });
            return Err(tensors.error(name, format!("the weights of `config_groups.{group}` are {state}")));
        }
        Ok(Some((format!("{module}{WEIGHT}"), group.weight(tensors, name, module)?)))
    }

    /// The group of a module: by its name, else by its class.
    fn group_of(&self, module: &str) -> Option<&Group> {
        if let [group] = &self.groups[..] {
            return Some(group);
        }
        let class = if module.ends_with("embed_tokens") { "Embedding" } else { "Linear" };
        let with =
            |fits: &dyn Fn(&Target) -> bool| self.groups.iter().find(|group| group.targets.iter().any(fits));
        with(&|target| match target {
            Target::Name(name) => name == module,
            Target::Pattern(pattern) => pattern.is_match(module),
        })
        .or_else(|| with(&|target| matches!(target, Target::Name(name) if name == class)))
    }
}

/// Reads `targets` of a group.
fn read_targets(group: &Fields) -> Result<Vec<Target>, CheckpointError> {
    let read = |target: &str| match target.strip_prefix("re:") {
        None => Ok(Target::Name(target.into())),
        Some(pattern) => Regex::new(&format!("^(?:{pattern})")).map(Target::Pattern).map_err(|_| {
            group.error(
                "targets",
                format!("\"{target}\" is no regular expression that is read; {TARGET_REMEDY}"),
            )
        }),
    };
    group.texts("targets")?.unwrap_or_default().into_iter().map(read).collect()
}

impl Group {
    fn read(name: &str, outer: &Fields, group: &Fields, weights: &Fields) -> Result<Self, CheckpointError> {
        let is_own = group.text("format")?.is_some();
        let fields = if is_own { group } else { outer };
        let format = fields.text("format")?;
        let format = fields.required("format", format)?;
        if !FORMATS.contains(&format) {
            let known = FORMATS.join(", ");
            return Err(
                fields.error("format", format!("\"{format}\" is not read, {known} are; {TARGET_REMEDY}"))
            );
        }
        if group.object("output_activations")?.is_some() {
            let problem = format!("quantised outputs are not computed; {TARGET_REMEDY}");
            return Err(group.error("output_activations", problem));
        }
        weights.refuse_if_on("dynamic", "scales of weights are stored; expected false")?;
        let is_packed = format == PACK_FORMAT;
        let is_float = match weights.text("type")?.unwrap_or("int") {
            "int" => false,
            "float" if !is_packed => true,
            other => {
                let problem =
                    format!("\"{other}\" of {format} is not read; expected \"int\" or, unpacked, \"float\"");
                return Err(weights.error("type", problem));
            }
        };
        let bits = weights.size("num_bits")?.unwrap_or(8);
        let known: &[u32] = if is_float { &[8] } else { &[4, 8] };
        if !known.contains(&bits) {
            let expected = known.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ");
            return Err(weights.error("num_bits", format!("{bits} is not read; expected {expected}")));
        }
        let is_ordered =
            matches!(weights.map.get("actorder").and_then(Value::as_str), Some("group" | "dynamic"));
        let has_zero_points = !weights.flag("symmetric")?.unwrap_or(true);
        if has_zero_points && is_float {
            return Err(weights.error("symmetric", "float8 weights have no zero points; expected true"));
        }
        let strategy = read_strategy(weights)?;
        Ok(Self {
            name: name.into(),
            targets: vec![],
            is_packed,
            is_float,
            bits,
            strategy,
            has_zero_points,
            is_ordered,
        })
    }

    /// The weight of a module, whose numbers are the tensor `name`.
    fn weight(
        &self,
        tensors: &Tensors,
        name: &str,
        module: &str,
    ) -> Result<QuantisedTensor, CheckpointError> {
        let packing = |axis| Packing { bits: self.bits, axis, is_interleaved: false };
        let numbers = if self.is_packed {
            let shape = read_shape(tensors, &format!("{module}.weight_shape"))?;
            StoredMatrix::packed(tensors, name.into(), shape, packing(Axis::Columns))?
        } else {
            let dtype = if self.is_float { Dtype::F8_E4M3 } else { Dtype::I8 };
            StoredMatrix::new(tensors, name.into(), matrix_shape(tensors, name)?, &[dtype])?
        };
        let [rows, columns] = numbers.shape;
        let block = match self.strategy {
            Strategy::Tensor => [rows, columns],
            Strategy::Channel => [1, columns],
            Strategy::Group(size) if columns % size != 0 => {
                let problem = format!("`group_size` {size} does not divide its {columns} columns");
                return Err(tensors.error(name, problem));
            }
            Strategy::Group(size) => [1, size],
            Strategy::Block(block) => block,
        };
        let grid = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let scales = StoredMatrix::new(tensors, format!("{module}.weight_scale"), grid, &SCALES)?;
        // Packed numbers and zero points are stored without a sign.
        let middle = if self.is_packed { (1 << (self.bits - 1)) as f32 } else { 0.0 };
        let zero_points = format!("{module}.weight_zero_point");
        let zero_points = if !self.has_zero_points {
            ZeroPoints::Constant(middle)
        } else {
            let matrix = if self.is_packed {
                StoredMatrix::packed(tensors, zero_points, grid, packing(Axis::Rows))?
            } else {
                StoredMatrix::new(tensors, zero_points, grid, &[Dtype::I8])?
            };
            ZeroPoints::Stored { matrix, added: 0.0 }
        };
        let group_index = format!("{module}.weight_g_idx");
        let group_index = (self.is_ordered || tensors.get(&group_index).is_some()).then_some(group_index);
        let group_index =
            group_index.map(|name| StoredMatrix::new(tensors, name, [columns, 1], &[Dtype::I32]));
        let mut unused = present(tensors, module, &INPUT_TENSORS);
        if self.is_packed {
            unused.push(format!("{module}.weight_shape"));
        }
        Ok(QuantisedTensor {
            numbers,
            block,
            scales,
            zero_points,
            group_index: group_index.transpose()?,
            unused,
        })
    }
}

/// Reads `strategy` and the sizes that belong to it.
fn read_strategy(weights: &Fields) -> Result<Strategy, CheckpointError> {
    // A size of -1 is that of a whole row.
    let is_row = weights.number("group_size")? == Some(-1.0);
    let size = if is_row { None } else { weights.size::<u32>("group_size")? };
    let strategy = weights.text("strategy")?;
    match (strategy, size) {
        (Some("tensor"), _) => Ok(Strategy::Tensor),
        (Some("channel"), _) => Ok(Strategy::Channel),
        (None, None) => Ok(if is_row { Strategy::Channel } else { Strategy::Tensor }),
        (Some("group") | None, Some(size)) => Ok(Strategy::Group(size as usize)),
        (Some("group"), None) => Err(weights.error("group_size", "expected the columns of a group")),
        (Some("block"), _) => {
            let block = read_block(weights, "block_structure")?;
            Ok(Strategy::Block(weights.required("block_structure", block)?))
        }
        (Some(other), _) => {
            let problem =
                format!("\"{other}\" is not read; tensor, channel, group and block are; {TARGET_REMEDY}");
            Err(weights.error("strategy", problem))
        }
    }
}

/// Rows and columns of a packed weight, the two integers of the tensor `name`.
fn read_shape(tensors: &Tensors, name: &str) -> Result<[usize; 2], CheckpointError> {
    let found = tensors.required_metadata(name)?;
    let bytes = if found.dtype == Dtype::I64 { tensors.stored_bytes(name)? } else { vec![] };
    let sizes: Vec<i64> = bytes.as_chunks::<8>().0.iter().map(|&size| i64::from_le_bytes(size)).collect();
    match sizes[..] {
        [rows, columns] if rows > 0 && columns > 0 => Ok([rows as usize, columns as usize]),
        _ => {
            let found = if bytes.is_empty() { torch_dtype_name(found.dtype) } else { format!("{sizes:?}") };
            Err(tensors
                .error(name, format!("expected the weight's rows and columns in int64, found {found}")))
        }
    }
}
