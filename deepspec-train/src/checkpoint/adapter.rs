//! LoRA's matrices of a checkpoint in the files of PEFT.

use std::path::Path;

use deepspec_core::atomic;
use deepspec_core::recipe::TrainRecipe;
use deepspec_drafters::TrainableDrafter;
use deepspec_models::save;
use serde_json::json;
use tch::{Kind, Tensor};

/// Folder of the files within a checkpoint. Engines read all safetensors files beside config.json, so it is a folder of its own.
pub const FOLDER: &str = "adapter";

/// Writes `adapter_config.json` and `adapter_model.safetensors` into the folder `adapter` of the checkpoint in `dir`.
///
/// # Errors
/// Any I/O failure, with the path.
pub fn write(dir: &Path, drafter: &dyn TrainableDrafter, train: &TrainRecipe) -> anyhow::Result<()> {
    let Some(lora) = &train.lora else { return Ok(()) };
    let folder = dir.join(FOLDER);
    atomic::create_dir(&folder)?;
    let base = drafter.lora_base();
    let modules: Vec<&str> = base.iter().map(|(name, _)| name.trim_end_matches(".weight")).collect();
    let config = json!({
        "peft_type": "LORA",
        "base_model_name_or_path": train.init_from,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
    });
    atomic::write_json(&folder.join("adapter_config.json"), &config)?;
    let matrices = drafter.parameters().iter();
    let matrices: Vec<(String, Tensor)> =
        matrices.map(|(name, tensor)| (format!("base_model.model.{name}"), tensor.shallow_clone())).collect();
    save(&folder.join("adapter_model.safetensors"), &matrices, Kind::Float)?;
    Ok(())
}
