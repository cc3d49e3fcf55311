//! Weights of compressed-tensors, which llm-compressor writes: float8, int8, int4 or int8 packed into words, MXFP4 and NVFP4.

use regex::Regex;
use safetensors::Dtype;
use serde_json::Value;

use crate::quantised::matrix::{Axis, Packing, SCALES, StoredMatrix, matrix_shape};
use crate::quantised::module::{WEIGHT, check_bits, present, read_block};
use crate::quantised::mxfp4::{self, Mxfp4Tensor};
use crate::quantised::nvfp4::{self, Nvfp4Tensor};
use crate::quantised::tensor::{GroupIndex, QuantisedMatrix, QuantisedTensor, ZeroPoints};
use crate::quantised::{Scope, TARGET_REMEDY};
use crate::{CheckpointError, Fields, Tensors, torch_dtype_name};

/// Ending of packed weights.
const PACKED_WEIGHT: &str = ".weight_packed";
/// Endings of tensors that quantise the inputs of a module.
const INPUT_TENSORS: [&str; 3] = [".input_scale", ".input_zero_point", ".input_global_scale"];
/// The format whose numbers are packed into int32 words.
const PACK_FORMAT: &str = "pack-quantized";
/// The format of float4 in blocks of 32 columns, two numbers per byte.
const MXFP4_FORMAT: &str = "mxfp4-pack-quantized";
/// The format of float4 in blocks of 16 columns, two numbers per byte, with a scale of the whole weight.
const NVFP4_FORMAT: &str = "nvfp4-pack-quantized";
/// Formats that are read.
const FORMATS: [&str; 6] =
    [PACK_FORMAT, "int-quantized", "float-quantized", "naive-quantized", MXFP4_FORMAT, NVFP4_FORMAT];

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
    /// The scheme, or why it is not read. An error concerns the modules of the group alone.
    scheme: Result<Scheme, String>,
}

/// How the modules of a group store their weights.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Scheme {
    /// Whether numbers are packed: integers into words, float4 into bytes.
    is_packed: bool,
    /// Whether numbers are float8, or float4 if packed, not integers.
    is_float: bool,
    /// Bits per number.
    bits: u32,
    strategy: Strategy,
    /// Whether zero points are stored.
    has_zero_points: bool,
    /// Whether columns were quantised in activation order (`actorder`), so that each module needs `weight_g_idx`.
    has_activation_order: bool,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// If a key is malformed or has a value that is not read. For [`Scope::Outer`], a group that is not read is an error of
    /// its modules.
    pub fn read(fields: &Fields, scope: Scope) -> Result<Self, CheckpointError> {
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
            let Some(weights) = group.object("weights")? else { continue };
            let scheme = match Scheme::read(fields, &group, &weights) {
                Err(error) if scope == Scope::Whole => return Err(error),
                scheme => scheme.map_err(|error| error.to_string()),
            };
            groups.push(Group { name: name.clone(), targets: vec![], scheme });
        }
        // A single group is that of all quantised modules.
        if groups.len() > 1 {
            for group in &mut groups {
                group.targets = read_targets(&all.required_object(&group.name)?)?;
            }
        }
        Ok(Self { groups })
    }

    /// The quantised weight whose numbers are the tensor `name`, and the plain weight's name. None for every other tensor:
    /// plain weights, scales, zero points, biases.
    ///
    /// # Errors
    /// If the module has no group, or two of different schemes. If other tensors of the module are missing, or do not fit.
    pub fn find(
        &self,
        tensors: &Tensors,
        name: &str,
    ) -> Result<Option<(String, QuantisedTensor)>, CheckpointError> {
        let facts = tensors.required_metadata(name)?;
        let packed = name.strip_suffix(PACKED_WEIGHT);
        let plain = name.strip_suffix(WEIGHT).filter(|_| matches!(facts.dtype, Dtype::F8_E4M3 | Dtype::I8));
        let Some(module) = packed.or(plain) else { return Ok(None) };
        let groups = self.groups_of(module);
        let group = groups.first().ok_or_else(|| {
            tensors.error(name, "none of `config_groups` targets this module, whose weight is quantised")
        })?;
        // Engines choose differently between groups.
        if let Some(other) = groups.iter().find(|other| other.scheme != group.scheme) {
            let (first, second) = (&group.name, &other.name);
            let problem = format!(
                "`config_groups.{first}` and `config_groups.{second}` both target this module, with different \
                 settings; name it in one of them only"
            );
            return Err(tensors.error(name, problem));
        }
        let scheme = group.scheme.as_ref().map_err(|problem| tensors.error(name, problem))?;
        if scheme.is_packed != packed.is_some() {
            let (group, state) = (&group.name, if scheme.is_packed { "packed" } else { "not packed" });
            return Err(tensors.error(name, format!("the weights of `config_groups.{group}` are {state}")));
        }
        Ok(Some((format!("{module}{WEIGHT}"), scheme.weight(tensors, name, module)?)))
    }

    /// The groups of a module: those that target its name, else those that target its class.
    fn groups_of(&self, module: &str) -> Vec<&Group> {
        if let [group] = &self.groups[..] {
            return vec![group];
        }
        let class = if module.ends_with("embed_tokens") { "Embedding" } else { "Linear" };
        let with = |fits: &dyn Fn(&Target) -> bool| -> Vec<&Group> {
            self.groups.iter().filter(|group| group.targets.iter().any(fits)).collect()
        };
        let named = with(&|target| match target {
            Target::Name(name) => name == module,
            Target::Pattern(pattern) => pattern.is_match(module),
        });
        if named.is_empty() {
            return with(&|target| matches!(target, Target::Name(name) if name == class));
        }
        named
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

impl Scheme {
    fn read(outer: &Fields, group: &Fields, weights: &Fields) -> Result<Self, CheckpointError> {
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
        let float4_block = match format {
            MXFP4_FORMAT => Some(mxfp4::BLOCK),
            NVFP4_FORMAT => Some(nvfp4::BLOCK),
            _ => None,
        };
        let is_float4 = float4_block.is_some();
        let is_packed = is_float4 || format == PACK_FORMAT;
        let is_float = match weights.text("type")?.unwrap_or("int") {
            "int" if !is_float4 => false,
            "float" if format != PACK_FORMAT => true,
            other => {
                let expected = if is_float4 { "\"float\"" } else { "\"int\" or, unpacked, \"float\"" };
                let problem = format!("\"{other}\" of {format} is not read; expected {expected}");
                return Err(weights.error("type", problem));
            }
        };
        let bits = weights.size("num_bits")?.unwrap_or(8);
        let known: &[u32] = match (is_float, is_packed) {
            (true, true) => &[4],
            (true, false) => &[8],
            (false, _) => &[4, 8],
        };
        let bits = check_bits(weights, "num_bits", bits, known)?;
        let has_activation_order =
            matches!(weights.map.get("actorder").and_then(Value::as_str), Some("group" | "dynamic"));
        let has_zero_points = !weights.flag("symmetric")?.unwrap_or(true);
        if has_zero_points && is_float {
            return Err(weights.error("symmetric", "float weights have no zero points; expected true"));
        }
        let strategy = match weights.text("strategy")? {
            Some("tensor_group") if format == NVFP4_FORMAT => {
                Strategy::Group(weights.required_size::<u32>("group_size")? as usize)
            }
            _ => read_strategy(weights)?,
        };
        if let Some(block) = float4_block.filter(|&block| strategy != Strategy::Group(block)) {
            let problem = format!("{format} has groups of {block} columns only; {TARGET_REMEDY}");
            return Err(weights.error("group_size", problem));
        }
        Ok(Self { is_packed, is_float, bits, strategy, has_zero_points, has_activation_order })
    }

    /// The weight of a module, whose numbers are the tensor `name`.
    fn weight(
        &self,
        tensors: &Tensors,
        name: &str,
        module: &str,
    ) -> Result<QuantisedTensor, CheckpointError> {
        if self.is_packed && self.is_float && self.strategy == Strategy::Group(nvfp4::BLOCK) {
            let unused = present(tensors, module, &INPUT_TENSORS);
            return Nvfp4Tensor::of_module(tensors, name, module, unused).map(QuantisedTensor::Nvfp4);
        }
        if self.is_packed && self.is_float {
            let scales = format!("{module}.weight_scale");
            return Mxfp4Tensor::matrix(tensors, name.into(), scales).map(QuantisedTensor::Mxfp4);
        }
        let packing = |axis| Packing { bits: self.bits, axis, is_interleaved: false, is_lowered: false };
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
            if tensors.get(&zero_points).is_some() {
                return Err(tensors.error(&zero_points, "`symmetric` is true; expected no zero points"));
            }
            ZeroPoints::Constant(middle)
        } else {
            let matrix = if self.is_packed {
                StoredMatrix::packed(tensors, zero_points, grid, packing(Axis::Rows))?
            } else {
                StoredMatrix::new(tensors, zero_points, grid, &[Dtype::I8])?
            };
            ZeroPoints::Stored(matrix)
        };
        let group_index = format!("{module}.weight_g_idx");
        let has_index = self.has_activation_order || tensors.get(&group_index).is_some();
        let group_index = has_index.then(|| GroupIndex::new(tensors, group_index, columns));
        let mut unused = present(tensors, module, &INPUT_TENSORS);
        if self.is_packed {
            unused.push(format!("{module}.weight_shape"));
        }
        Ok(QuantisedTensor::Matrix(QuantisedMatrix {
            numbers,
            block,
            scales,
            zero_points,
            group_index: group_index.transpose()?.map(GroupIndex::or_unset),
            unused,
        }))
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
            let key = "block_structure";
            // Older versions write "128x128".
            let block = match weights.map.get(key).and_then(Value::as_str).and_then(read_product) {
                Some(block) => Some(block),
                None => read_block(weights, key)?,
            };
            Ok(Strategy::Block(weights.required(key, block)?))
        }
        (Some(other), _) => {
            let problem =
                format!("\"{other}\" is not read; tensor, channel, group and block are; {TARGET_REMEDY}");
            Err(weights.error("strategy", problem))
        }
    }
}

/// Two positive numbers with an x between them.
fn read_product(text: &str) -> Option<[usize; 2]> {
    let (rows, columns) = text.split_once('x')?;
    let read = |number: &str| number.trim().parse::<u32>().ok().filter(|&size| size > 0);
    Some([read(rows)? as usize, read(columns)? as usize])
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
