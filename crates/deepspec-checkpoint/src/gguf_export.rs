//! Drafters as GGUF files for llama.cpp, following its sources of September 2026
//! (`src/models/{deepseek4,dflash,eagle3}.cpp`).

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::slice;

use crate::gguf::{LAYER_NAMES, ROPE_FACTORS, Tensor, TensorType, Tokenizer, Value, Writer, to_interleaved};
use deepspec_core::{VERSION, atomic};
use safetensors::Dtype;
use serde_json::Value as Json;

use crate::convert::{check_target_matches, with_target_settings};
use crate::draft_vocab::{D2T, DraftVocab};
use crate::fields::Fields;
use crate::kind::{GgufParts, ROPE_BASE_KEY};
use crate::numbers::cast;
use crate::shapes::{HEAD, Heads};
use crate::tensors::torch_dtype_name;
use crate::{Checkpoint, CheckpointError, Drafter, Target, folder, layouts, rope};

/// Name of this format in errors.
const FORMAT_NAME: &str = "gguf";

/// Tensor names that all drafters share; only block drafters have `hidden_norm`, and only drafters with a reduced
/// vocabulary have a head of their own.
const TENSOR_NAMES: [(&str, &str); 4] = [
    ("fc.weight", "fc.weight"),
    (HEAD, "output.weight"),
    ("hidden_norm.weight", "enc.output_norm.weight"),
    ("norm.weight", "output_norm.weight"),
];
/// Parts of the names of small matrices, which are float32 whatever type the others have.
const FLOAT32_MATRICES: [&str; 3] = ["conf_proj.", "hc_", "ffn_gate_inp."];

/// A drafter ready to be written as GGUF.
pub struct GgufExport<'a> {
    source: &'a Checkpoint,
    writer: Writer,
    /// Source of each tensor's values.
    tensors: Vec<ValueSource>,
    /// Whether llama.cpp has a name for the target's pre-tokenizer.
    pub has_known_pre_tokenizer: bool,
}

/// Source of a tensor's values.
enum ValueSource {
    Zeros,
    /// Bytes of computed values.
    Own(Vec<u8>),
    /// Values of these tensors of the checkpoint, one behind the other.
    Of(Vec<String>),
    /// Values of the named tensor of the checkpoint, and its number of heads. The rows of each head are reordered so
    /// that the two rows of a RoPE pair are adjacent.
    Paired(String, usize),
}

impl<'a> GgufExport<'a> {
    /// The name of the file.
    pub const FILE: &'static str = "model.gguf";

    /// Plans the conversion of `source` to GGUF, which takes embedding and LM head from a matching
    /// target. Matrices get the dtype `matrices`, by default the checkpoint's. All other tensors
    /// are float32.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Refused`] with the reason if llama.cpp cannot run the drafter.
    /// Returns other errors if the checkpoint or the target is broken.
    pub fn plan(
        source: &'a Checkpoint,
        target: &Target,
        matrices: Option<TensorType>,
    ) -> Result<Self, CheckpointError> {
        let drafter = with_target_settings(source, Some(target));
        let parts = drafter.reason_not_convertible().map_or_else(|| drafter.kind.gguf_parts(&drafter), Err);
        // The state behind the last layer of a DeepSeek-V4 is the one before its final norm, here and in llama.cpp.
        let ambiguous = match target.architectures() == [layouts::DEEPSEEK_V4] {
            true => None,
            false => drafter.ambiguous_layer_reason(),
        };
        let parts = parts.and_then(|parts| ambiguous.map_or(Ok(parts), Err));
        let parts = parts.map_err(|reason| source.refused_error(FORMAT_NAME, reason))?;
        let path = source.dir().join("config.json");
        let fields = Fields::new(&path, &drafter.decoder);
        let heads = Heads::of(&fields, &drafter)?;
        let is_own = |key: &str| parts.keys.iter().any(|(own, _)| *own == key);
        let rope = match parts.has_own_rope() {
            true => None,
            false => Some(rope::llama_cpp_rope(source, FORMAT_NAME)?),
        };
        if parts.interleaved_rope && !heads.dim.is_multiple_of(2) {
            return Err(source
                .refused_error(FORMAT_NAME, format!("heads of {} values do not turn in pairs", heads.dim)));
        }
        check_target_matches(source, &drafter, target, FORMAT_NAME)?;
        let matrices = matrices.unwrap_or_else(|| tensor_type_of(source.dtype()));
        let tokenizer = Tokenizer::read(target.dir(), drafter.vocab_size as usize)?;
        let has_known_pre_tokenizer = tokenizer.has_known_pre_tokenizer();

        let mut writer = Writer::default();
        let own = |key: &str| format!("{}.{key}", parts.architecture);
        writer.put("general.architecture", Value::Text(parts.architecture.into()));
        writer.put("general.description", Value::Text(format!("written by deepspec {VERSION}")));
        writer.put("general.file_type", Value::U32(matrices.file_type()));
        let of_decoder = decoder_metadata(&fields, &drafter, &heads)?.filter(|(key, _)| !is_own(key));
        writer.extend(of_decoder.map(|(key, value)| (own(key), value)));
        if let Some(rope) = &rope {
            writer.put(&own(ROPE_BASE_KEY), Value::F32(rope.theta as f32));
            if rope.attention_factor != 1.0 {
                writer.put(&own("rope.scaling.attn_factor"), Value::F32(rope.attention_factor as f32));
            }
        }
        let taps = drafter.aux_layer_ids().into_iter().map(|id| id as i32).collect();
        writer.put(&own("target_layers"), Value::Integers(taps));
        writer.extend(parts.keys.iter().map(|(key, value)| (own(key), value.clone())));
        writer.extend(tokenizer.into_entries());
        let special = target.special_ids().iter();
        writer.extend(special.map(|(name, id)| (format!("tokenizer.ggml.{name}_token_id"), Value::U32(*id))));
        if let Some(mask) = drafter.kind.mask_token_id() {
            writer.put("tokenizer.ggml.mask_token_id", Value::U32(mask as u32));
        }

        let (mut tensors, mut experts) = (vec![], BTreeMap::<String, BTreeMap<usize, String>>::new());
        for (name, facts) in source.tensors().iter() {
            if source.is_target_tensor(name) {
                continue;
            }
            let reference_name = source.format().to_reference_name(drafter.kind.as_ref(), name);
            let (reference_name, expert) = split_expert(&reference_name);
            let gguf_name = gguf_name(&reference_name, &parts)
                .ok_or_else(|| source.tensors().error(name, "llama.cpp has no tensor for it"))?;
            if let Some(expert) = expert {
                experts.entry(gguf_name).or_default().insert(expert, name.into());
                continue;
            }
            // llama.cpp computes with convolution kernels in float32.
            let is_matrix =
                facts.shape.len() == 2 && !FLOAT32_MATRICES.iter().any(|part| gguf_name.contains(part));
            let kind = if is_matrix { matrices } else { TensorType::F32 };
            let turning = [(".attn_q.weight", heads.query), (".attn_k.weight", heads.key_value)];
            let turning =
                turning.into_iter().find(|(end, _)| parts.interleaved_rope && gguf_name.ends_with(end));
            tensors.push(turning.map_or_else(
                || ValueSource::Of(vec![name.into()]),
                |(_, heads)| ValueSource::Paired(name.into(), heads as usize),
            ));
            writer.tensor(Tensor { name: gguf_name, kind, shape: facts.shape.clone() });
        }
        for (name, of_experts) in experts {
            let of_experts: Vec<String> = of_experts.into_values().collect();
            let matrix = &source.tensors().required_metadata(&of_experts[0])?.shape;
            let shape = [&[of_experts.len()], &matrix[..]].concat();
            writer.tensor(Tensor { name, kind: matrices, shape });
            tensors.push(ValueSource::Of(of_experts));
        }
        if let Some(factors) = rope.and_then(|rope| rope.factors) {
            let shape = vec![factors.len()];
            writer.tensor(Tensor { name: ROPE_FACTORS.into(), kind: TensorType::F32, shape });
            tensors.push(ValueSource::Own(
                factors.iter().flat_map(|&factor| (factor as f32).to_le_bytes()).collect(),
            ));
        }
        if drafter.has_reduced_vocab() {
            let vocab = DraftVocab::of_tensors(source.tensors(), drafter.vocab_size as usize)?;
            // llama.cpp reads the target's ids, and not offsets to them.
            let ids = vocab.tokens();
            writer.tensor(Tensor { name: D2T.into(), kind: TensorType::I64, shape: vec![ids.len()] });
            tensors.push(ValueSource::Own(ids.iter().flat_map(|id| id.to_le_bytes()).collect()));
        }
        for (name, shape) in parts.zeros {
            writer.tensor(Tensor { name: name.into(), kind: TensorType::F32, shape });
            tensors.push(ValueSource::Zeros);
        }
        Ok(Self { source, writer, tensors, has_known_pre_tokenizer })
    }

    /// Writes [`GgufExport::FILE`] into a new folder atomically. `overwrite` replaces an existing folder
    /// that contains only such a file.
    ///
    /// # Errors
    /// Fails if the folder exists and may not be replaced, on any I/O error, or if a
    /// tensor has a non-float dtype.
    pub fn write(&self, dir: &Path, overwrite: bool) -> Result<(), CheckpointError> {
        let data = |number, tensor: &Tensor| self.tensor_bytes(number, tensor).map_err(io::Error::other);
        folder::write_folder_atomically(
            dir,
            overwrite,
            |name| name == Self::FILE,
            |partial| Ok(atomic::replace(&partial.join(Self::FILE), |out| self.writer.write(out, data))?),
        )
    }

    fn tensor_bytes(&self, number: usize, tensor: &Tensor) -> Result<Vec<u8>, CheckpointError> {
        let (names, heads) = match &self.tensors[number] {
            ValueSource::Zeros => return Ok(vec![0; tensor.bytes()]),
            ValueSource::Own(bytes) => return Ok(bytes.clone()),
            ValueSource::Of(names) => (&names[..], None),
            ValueSource::Paired(name, heads) => (slice::from_ref(name), Some(*heads)),
        };
        let mut values = Vec::with_capacity(tensor.bytes());
        for name in names {
            values.extend(self.values(name, tensor.kind)?);
        }
        Ok(match heads {
            Some(heads) => to_interleaved(&values, heads, tensor.shape[0]),
            None => values,
        })
    }

    /// Values of a tensor of the checkpoint, as `kind`.
    fn values(&self, name: &str, kind: TensorType) -> Result<Vec<u8>, CheckpointError> {
        let tensors = self.source.tensors();
        let facts = tensors.get(name).ok_or_else(|| tensors.error(name, "missing"))?;
        let wanted = match kind {
            TensorType::F32 => Dtype::F32,
            TensorType::F16 => Dtype::F16,
            TensorType::Bf16 => Dtype::BF16,
            TensorType::I64 => Dtype::I64,
        };
        cast(tensors.bytes(name)?, facts.dtype, wanted).ok_or_else(|| {
            let [from, to] = [facts.dtype, wanted].map(torch_dtype_name);
            tensors.error(name, format!("{from} cannot be written as {to}"))
        })
    }
}

fn tensor_type_of(dtype: Dtype) -> TensorType {
    match dtype {
        Dtype::F32 => TensorType::F32,
        Dtype::F16 => TensorType::F16,
        _ => TensorType::Bf16,
    }
}

/// Metadata of the decoder layers, without that of rotary embeddings.
fn decoder_metadata(
    fields: &Fields,
    drafter: &Drafter,
    heads: &Heads,
) -> Result<impl Iterator<Item = (&'static str, Value)>, CheckpointError> {
    let eps = fields.required("rms_norm_eps", fields.map.get("rms_norm_eps").and_then(Json::as_f64))?;
    let sizes = [
        ("block_count", drafter.layers),
        ("context_length", fields.required_size("max_position_embeddings")?),
        ("embedding_length", drafter.hidden_size),
        ("feed_forward_length", fields.required_size("intermediate_size")?),
        ("attention.head_count", heads.query),
        ("attention.head_count_kv", heads.key_value),
        ("attention.key_length", heads.dim),
        ("attention.value_length", heads.dim),
    ];
    let sizes = sizes.map(|(key, size)| (key, Value::U32(size as u32)));
    let eps = ("attention.layer_norm_rms_epsilon", Value::F32(eps as f32));
    Ok(sizes.into_iter().chain([eps]))
}

/// A tensor's name without the number of its expert, and this number: `ffn.experts.3.w1.weight` is `ffn.experts.w1.weight` of expert 3.
fn split_expert(name: &str) -> (String, Option<usize>) {
    let found = name.split_once(".experts.").and_then(|(module, rest)| {
        let (expert, part) = rest.split_once('.')?;
        Some((format!("{module}.experts.{part}"), Some(expert.parse().ok()?)))
    });
    found.unwrap_or_else(|| (name.into(), None))
}

/// Name that llama.cpp gives to a tensor of the reference's format. None if llama.cpp has no such tensor.
fn gguf_name(reference_name: &str, parts: &GgufParts) -> Option<String> {
    let renamed = |name: &str, known: &[(&str, &str)], own: &[(&'static str, &'static str)]| {
        known.iter().chain(own).find(|(ours, _)| *ours == name).map(|(_, theirs)| theirs.to_string())
    };
    let Some(rest) = reference_name.strip_prefix("layers.") else {
        return renamed(reference_name, &TENSOR_NAMES, &parts.names);
    };
    let (layer, name) = rest.split_once('.')?;
    Some(format!("blk.{layer}.{}", renamed(name, &LAYER_NAMES, &parts.layer_names)?))
}
