//! Checks before the first step that all ranks have equal code, recipe, data and weights.

use std::path::Path;

use crate::dist::ProcessGroup;
use anyhow::Context;
use deepspec_core::digest::Hasher;
use deepspec_core::{config, usage};
use deepspec_drafters::Recipe;
use deepspec_drafters::{TrainableDrafter, is_embed_or_head};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::Device;

use crate::checkpoint::without_data_locations;

/// Values of one rank that must be equal on all ranks.
#[derive(Serialize, Deserialize)]
struct RankInputs {
    version: String,
    recipe: Value,
    data: String,
    /// Name of the checkpoint's folder.
    checkpoint: Option<String>,
}

/// Compares code version, recipe, data set and checkpoint of all ranks.
///
/// # Errors
/// A usage error on all ranks that names the difference, or another rank's failure.
pub fn check_inputs(
    group: &ProcessGroup,
    recipe: &Recipe,
    data: &str,
    checkpoint: Option<&Path>,
) -> anyhow::Result<()> {
    let own = RankInputs {
        version: deepspec_core::VERSION.into(),
        recipe: without_data_locations(json!(recipe)),
        data: data.into(),
        checkpoint: checkpoint.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned()),
    };
    let views = group.all_gather("comparing what the ranks start from", &serde_json::to_vec(&own)?)?;
    let views: Vec<RankInputs> = views
        .iter()
        .map(|bytes| serde_json::from_slice(bytes).context("another rank runs other code"))
        .collect::<Result<_, _>>()?;
    for (rank, view) in views.iter().enumerate().skip(1) {
        if let Some(difference) = describe_difference(&views[0], view, rank) {
            usage!("the ranks cannot train together: {difference}");
        }
    }
    Ok(())
}

/// Compares the initial weights of all ranks. Training sums gradients but never weights, so a
/// difference would persist.
///
/// # Errors
/// A usage error on all ranks that names the differing ranks, or another rank's failure.
pub fn check_weights(group: &ProcessGroup, drafter: &dyn TrainableDrafter) -> anyhow::Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let own = drafter_digest(drafter);
    let all = group.all_gather("comparing the ranks' first weights", own.as_bytes())?;
    let differing: Vec<String> =
        (1..all.len()).filter(|&rank| all[rank] != all[0]).map(|rank| rank.to_string()).collect();
    if !differing.is_empty() {
        usage!(
            "the ranks cannot train together: the first weights of rank {} are not those of rank 0; let train.init_from name the same weights on \
             all machines, or, where processors of other kinds draw other fresh weights, a checkpoint that --init-only made on one of them",
            differing.join(", ")
        );
    }
    Ok(())
}

/// A digest of all tensors except the target's embedding and head, which are part of the data set's
/// digest.
fn drafter_digest(drafter: &dyn TrainableDrafter) -> String {
    let mut tensors = drafter.checkpoint();
    tensors.retain(|(name, _)| !is_embed_or_head(name));
    if !drafter.lora_base().is_empty() {
        // B is zero at first, so the merged weights do not depend on A.
        let matrices = drafter.parameters().iter();
        tensors.extend(matrices.map(|(name, matrix)| (name.clone(), matrix.shallow_clone())));
    }
    let mut hasher = Hasher::default();
    for (name, tensor) in tensors {
        let values = tensor.detach().to_device(Device::Cpu).contiguous();
        let mut bytes = vec![0; values.numel() * values.kind().elt_size_in_bytes()];
        values.copy_data_u8(&mut bytes, values.numel());
        hasher.update_part(name.as_bytes()).update_part(&bytes);
    }
    hasher.hex_digest()
}

fn describe_difference(leader: &RankInputs, view: &RankInputs, rank: usize) -> Option<String> {
    if view.version != leader.version {
        return Some(format!("rank {rank} runs version {}, rank 0 {}", view.version, leader.version));
    }
    let names = ("rank 0 has".to_string(), format!("rank {rank} has"));
    let keys = config::labelled_differences((&names.0, &leader.recipe), (&names.1, &view.recipe));
    if !keys.is_empty() {
        return Some(format!("their recipes differ in {}", keys.join(", ")));
    }
    if view.data != leader.data {
        return Some(format!(
            "rank {rank} has other samples, or another target's states, than rank 0; let data.states name the same data on all machines"
        ));
    }
    let step = |view: &RankInputs| view.checkpoint.clone().unwrap_or_else(|| "no checkpoint".into());
    (view.checkpoint != leader.checkpoint).then(|| {
        format!(
            "rank {rank} finds {} in logging.output_dir, rank 0 {}; let it be a folder that all machines share",
            step(view),
            step(leader)
        )
    })
}
