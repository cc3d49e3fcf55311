//! The experts of a layer in checkpoints: three tensors of each expert, or two tensors that hold all experts.
//!
//! E experts have the width I and the hidden size d. Each expert's own tensors are `experts.3.gate_proj.weight [I, d]`,
//! `up_proj.weight [I, d]` and `down_proj.weight [d, I]`. Tensors of all experts are `experts.gate_up_proj [E, 2·I, d]` and
//! `experts.down_proj [E, d, I]`. By reports of their users, Qwen3.5 stores the experts of its MTP layer in the first form, and Qwen3.6
//! in the second. Drafters of this project have the first.

use std::collections::BTreeMap;

use crate::drafter::{Drafter, TensorShapes};
use crate::fields::Fields;
use crate::tensors::torch_dtype_name;
use crate::write::{TensorSource, TensorToWrite};
use crate::{CheckpointError, Tensors};

/// Config key of the number of experts of a layer.
pub const EXPERTS_KEY: &str = "num_experts";

/// Maximum number of experts. A larger number is a mistake in the config, and would exhaust memory.
pub const MAX_EXPERTS: i64 = 4096;

/// Tensors that hold all experts, with the projections of an expert that lie in them, one behind the other.
const STACKED: [(&str, &[&str]); 2] =
    [("gate_up_proj", &["gate_proj", "up_proj"]), ("down_proj", &["down_proj"])];

/// Name of the module that holds the experts.
const MODULE: &str = "experts";

/// Module and projections of a tensor that holds all experts; None for another tensor.
fn projections_of(name: &str) -> Option<(&str, &'static [&'static str])> {
    let (module, stacked) = name.rsplit_once('.')?;
    let (_, projections) = STACKED.into_iter().find(|(known, _)| *known == stacked)?;
    (module.rsplit('.').next() == Some(MODULE)).then_some((module, projections))
}

/// The tensor that would hold all experts, and the number of the expert and of the projection in it. None unless `name` is a weight of
/// one expert.
fn place_of(name: &str) -> Option<(String, (usize, usize))> {
    let (rest, projection) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    let (module, expert) = rest.rsplit_once('.')?;
    let expert = expert.parse().ok().filter(|_| module.rsplit('.').next() == Some(MODULE))?;
    STACKED.iter().find_map(|(stacked, projections)| {
        let place = projections.iter().position(|known| *known == projection)?;
        Some((format!("{module}.{stacked}"), (expert, place)))
    })
}

/// Whether a checkpoint with these tensors has three of each expert. If not, two tensors hold all of them. None without experts.
pub fn stores_each_expert<'n>(mut names: impl Iterator<Item = &'n str>) -> Option<bool> {
    names.find_map(|name| match place_of(name) {
        Some(_) => Some(true),
        None => projections_of(name).map(|_| false),
    })
}

/// Joins the items of each expert's tensors to one of the tensor that holds all. `join` takes the number of experts and the items in the
/// order in which they lie there. Items of other tensors stay. There must be every projection of every expert.
fn join_experts<T>(items: Vec<(String, T)>, join: impl Fn(usize, Vec<T>) -> T) -> Vec<(String, T)> {
    let (mut joined, mut stacks) = (vec![], BTreeMap::<String, BTreeMap<(usize, usize), T>>::new());
    for (name, item) in items {
        match place_of(&name) {
            Some((stacked, place)) => {
                stacks.entry(stacked).or_default().insert(place, item);
            }
            None => joined.push((name, item)),
        }
    }
    joined.extend(stacks.into_iter().map(|(name, parts)| {
        let experts = 1 + parts.keys().map(|(expert, _)| expert).max().unwrap_or(&0);
        (name, join(experts, parts.into_values().collect()))
    }));
    joined
}

/// Shape of a tensor that holds `count` matrices `[rows, columns]` of `experts` experts.
fn stacked_shape(experts: usize, count: usize, matrix: &[usize]) -> Vec<usize> {
    vec![experts, count / experts * matrix[0], matrix[1]]
}

/// Names and shapes of a checkpoint that stores all experts together, from those of one that stores each.
pub fn stack_shapes(shapes: TensorShapes) -> TensorShapes {
    join_experts(shapes, |experts, matrices| stacked_shape(experts, matrices.len(), &matrices[0]))
}

/// Joins the tensors of each expert to tensors that hold all experts. Tensors of `checkpoint` are complete and have the shapes that its
/// config asks for.
///
/// # Errors
/// If experts of one tensor have different dtypes.
pub fn stack_experts<'a>(
    tensors: Vec<TensorToWrite<'a>>,
    checkpoint: &Tensors,
) -> Result<Vec<TensorToWrite<'a>>, CheckpointError> {
    let mut firsts = BTreeMap::<String, &TensorToWrite>::new();
    for tensor in &tensors {
        let Some((stacked, _)) = place_of(&tensor.name) else { continue };
        let first = *firsts.entry(stacked).or_insert(tensor);
        if tensor.dtype != first.dtype {
            let [own, other] = [tensor.dtype, first.dtype].map(torch_dtype_name);
            let problem = format!(
                "its dtype is {own}, that of `{}` is {other}, and one tensor holds both; cast them to one dtype",
                first.name
            );
            return Err(checkpoint.error(&tensor.name, problem));
        }
    }
    let named = tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    let joined = join_experts(named, |experts, parts: Vec<TensorToWrite>| TensorToWrite {
        name: String::new(),
        dtype: parts[0].dtype,
        shape: stacked_shape(experts, parts.len(), &parts[0].shape),
        source: TensorSource::Joined(parts.into_iter().map(|part| part.source).collect()),
    });
    Ok(joined.into_iter().map(|(name, tensor)| TensorToWrite { name, ..tensor }).collect())
}

/// A copy of the tensor `stored` of another checkpoint under the name `name`. If it holds all experts, there is one for every projection
/// of every expert.
pub fn copy_by_expert<'a>(
    source: &'a Tensors,
    stored: &str,
    name: &str,
) -> Result<Vec<TensorToWrite<'a>>, CheckpointError> {
    let facts = source.required_metadata(stored)?;
    let dtype = facts.dtype;
    let stacked = projections_of(name).zip(<[usize; 3]>::try_from(&facts.shape[..]).ok());
    let Some(((module, projections), [experts, rows, columns])) =
        stacked.filter(|((_, projections), [_, rows, _])| rows % projections.len() == 0)
    else {
        let (shape, source) = (facts.shape.clone(), TensorSource::Copy(source, stored.into()));
        return Ok(vec![TensorToWrite { name: name.into(), dtype, shape, source }]);
    };
    let size = facts.bytes / (experts * projections.len()).max(1);
    let part = |(number, (expert, projection)): (usize, (usize, &&str))| TensorToWrite {
        name: format!("{module}.{expert}.{projection}.weight"),
        dtype,
        shape: vec![rows / projections.len(), columns],
        source: TensorSource::Part(source, stored.into(), number * size..(number + 1) * size),
    };
    let places =
        (0..experts).flat_map(|expert| projections.iter().map(move |projection| (expert, projection)));
    Ok(places.enumerate().map(part).collect())
}

/// Names and shapes of the weights below `mlp` of a layer with experts, as three of each expert, with the keys of Qwen3.5-MoE.
///
/// # Errors
/// If a size is missing or wrong.
pub fn expert_shapes(fields: &Fields, drafter: &Drafter) -> Result<TensorShapes, CheckpointError> {
    let d = drafter.hidden_size as usize;
    let count: i64 = fields.required_size(EXPERTS_KEY)?;
    if count > MAX_EXPERTS {
        return Err(fields.error(EXPERTS_KEY, format!("{count} is more than {MAX_EXPERTS}")));
    }
    let size = |key: &str| fields.required_size::<u64>(key).map(|size| size as usize);
    let (width, shared) = (size("moe_intermediate_size")?, size("shared_expert_intermediate_size")?);
    let count = count as usize;
    let routed = (0..count).flat_map(|expert| gated_mlp_shapes(&format!("{MODULE}.{expert}."), d, width));
    let mut shapes: TensorShapes = routed.chain(gated_mlp_shapes("shared_expert.", d, shared)).collect();
    shapes.push(("gate".into(), vec![count, d]));
    shapes.push(("shared_expert_gate".into(), vec![1, d]));
    Ok(shapes)
}

/// Names and shapes of the weights of a gated MLP of width `inner`.
pub fn gated_mlp_shapes(prefix: &str, d: usize, inner: usize) -> [(String, Vec<usize>); 3] {
    [("gate_proj", [inner, d]), ("up_proj", [inner, d]), ("down_proj", [d, inner])]
        .map(|(projection, shape)| (format!("{prefix}{projection}"), shape.to_vec()))
}
