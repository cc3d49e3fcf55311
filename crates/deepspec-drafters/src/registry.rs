//! Registry of the kinds of drafters, and functions that load recipes and checkpoints of any kind.

use std::path::Path;

use deepspec_checkpoint::{
    Checkpoint, CheckpointError, CheckpointFormat, Fields, Incompatibility, KnownDrafters, MergedTarget,
    Reader, Target, Tensors, find_unsupported_setting, names_bundled_drafter, unsupported_layout_message,
};
use deepspec_core::cli::UsageError;
use deepspec_core::config::{ConfigError, Document, add_nearest_name};
use deepspec_core::recipe::DrafterRecipe;
use deepspec_models::config::read_json;
use deepspec_models::{ModelConfig, ModelError, families};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::registration::{CheckpointKind, DrafterKindInfo};
use crate::{
    Drafter, DrafterOptions, DrafterPlan, DrafterSpec, Recipe, assistant, causal, dflash2, domino, dspark,
    dspark_v4, eagle3, mtp, peagle, xpress,
};

/// All kinds of drafters, in the order of messages.
const DRAFTER_KINDS: [&DrafterKindInfo; 11] = [
    &dspark::DSPARK_INFO,
    &dspark::DFLASH_INFO,
    &dflash2::DFLASH2_INFO,
    &domino::DOMINO_INFO,
    &xpress::XPRESS_INFO,
    &dspark_v4::DSPARK_V4_INFO,
    &eagle3::EAGLE3_INFO,
    &peagle::PEAGLE_INFO,
    &mtp::MTP_INFO,
    &assistant::ASSISTANT_INFO,
    &causal::CAUSAL_INFO,
];

/// Reads and checks a recipe including its drafter section, with `key=value` overrides, and fills in defaults.
///
/// # Errors
/// See [`ConfigError`].
pub fn load_recipe(path: &Path, overrides: &[String]) -> Result<Recipe, ConfigError> {
    let document = Document::load(path, overrides)?;
    let recipe = deepspec_core::recipe::Recipe::read(&document)?;
    let drafter = DrafterSpec::read(&document, &recipe.drafter)?;
    let layer_ids = &recipe.target.layer_ids;
    drafter.check_layer_ids(layer_ids).map_err(|problem| document.error("target.layer_ids", problem))?;
    let recipe = recipe.with_drafter(drafter);
    frozen_prefixes(&recipe).map_err(|problem| document.error("train.freeze", problem))?;
    Ok(recipe)
}

/// Reads the recipe that training wrote beside a checkpoint, in this version or an earlier one, as JSON.
///
/// Settings that the writing version lacked get their defaults. A drafter section that this version cannot read is returned unchanged.
///
/// # Errors
/// See [`ConfigError`].
pub fn load_saved_recipe(path: &Path) -> Result<Value, ConfigError> {
    let document = Document::load(path, &[])?;
    let recipe: deepspec_core::recipe::Recipe<DrafterRecipe> = document.read()?;
    Ok(match DrafterSpec::read(&document, &recipe.drafter) {
        Ok(drafter) => json!(recipe.with_drafter(drafter)),
        Err(_) => json!(recipe),
    })
}

/// JSON schema of recipes.
pub fn recipe_schema() -> Value {
    let mut schemas = SchemaGenerator::default();
    let kinds: Map<String, Value> = DRAFTER_KINDS
        .iter()
        .filter_map(|kind| Some((kind.name.to_string(), (kind.settings?)(&mut schemas).to_value())))
        .collect();
    let mut schema =
        schemas.into_root_schema_for::<deepspec_core::recipe::Recipe<DrafterRecipe>>().to_value();
    schema["$defs"][&*DrafterRecipe::schema_name()]["properties"] = kinds.into();
    schema
}

/// Prefixes of the parameters that the recipe freezes. The error names the invalid entry of `train.freeze`.
fn frozen_prefixes(recipe: &Recipe) -> Result<Vec<&'static str>, String> {
    let kind = DRAFTER_KINDS.into_iter().find(|kind| kind.name == recipe.drafter.kind());
    let groups = kind.map_or(&[][..], |kind| kind.param_groups);
    let mut prefixes = vec![];
    for name in &recipe.train.freeze {
        let Some(group) = groups.iter().find(|group| group.name == name) else {
            let known = groups.iter().map(|group| format!("`{}`", group.name)).collect::<Vec<_>>().join(", ");
            let title = drafter_title(recipe.drafter.kind());
            return Err(add_nearest_name(
                name,
                &format!("{title} has no part `{name}`; expected some of {known}"),
            ));
        };
        prefixes.extend(group.prefixes);
    }
    Ok(prefixes)
}

/// Builds the plan of the recipe's drafter for this target.
///
/// # Errors
/// [`ModelError::Mismatch`] naming the key that does not fit.
pub fn plan_drafter(recipe: &Recipe, target: &ModelConfig) -> Result<Box<dyn DrafterPlan>, ModelError> {
    let kind = recipe.drafter.kind();
    let mismatch = |text: String| ModelError::Mismatch(UsageError(text));
    let mut plan = recipe.drafter.build_plan(recipe, target).map_err(|(key, problem)| {
        let section = if key.starts_with("target.") { String::new() } else { format!("drafter.{kind}.") };
        mismatch(format!("`{section}{key}`: {problem}"))
    })?;
    let wrong_freeze = |problem| mismatch(format!("`train.freeze`: {problem}"));
    plan.freeze(frozen_prefixes(recipe).map_err(wrong_freeze)?);
    if recipe.train.recompute && !plan.enable_recompute() {
        let problem = format!("{} keeps what its layers make; leave it out", drafter_title(kind));
        return Err(mismatch(format!("`train.recompute`: {problem}")));
    }
    if let Some(lora) = &recipe.train.lora {
        let wrong_target = |problem| mismatch(format!("`train.lora.target_modules`: {problem}"));
        plan.set_lora(lora.clone()).map_err(wrong_target)?;
    }
    if plan.num_parameters().trainable == 0 {
        return Err(wrong_freeze("nothing is left that could learn".into()));
    }
    Ok(plan)
}

/// Name of a kind in messages.
pub fn drafter_title(kind: &str) -> &str {
    DRAFTER_KINDS.iter().find(|known| known.name == kind).map_or(kind, |known| known.title)
}

/// Finds the kind of the checkpoint in `dir` by its class in config.json. Fails if no known kind has it.
pub fn find_checkpoint_kind(dir: &Path) -> Result<&'static CheckpointKind, ModelError> {
    let (path, map) = read_json(dir)?;
    let fields = Fields::new(&path, &map);
    let found = map.get("architectures").and_then(|list| list.get(0)).and_then(|name| name.as_str());
    let foreign = || Tensors::open(dir).ok().and_then(|tensors| unsupported_layout_message(&map, &tensors));
    let named = find_kind_by_class(found);
    if named.is_some_and(|known| known.are_language_models) {
        Tensors::open(dir)?;
    }
    // The class of EAGLE's original drafters is that of a language model.
    let known = named.filter(|known| !known.are_language_models || foreign().is_none());
    Ok(known.ok_or_else(|| {
        match open_checkpoint(dir) {
            Ok(checkpoint) => {
                if let Some(advice) = checkpoint.conversion_advice() {
                    let found = found.unwrap_or("no class");
                    return fields.error("architectures", format!("{found} is not read: {advice}"));
                }
            }
            // A target's checkpoint whose drafter is not read says so.
            Err(error) if names_bundled_drafter(&map) => return error,
            Err(_) => {}
        }
        if let Some(problem) = foreign() {
            return fields.error("architectures", problem);
        }
        let names = all_checkpoint_kinds().flat_map(|known| (known.classes)()).collect::<Vec<_>>().join(", ");
        let found = found
            .map_or_else(|| "no class is named".into(), |found| format!("\"{found}\" is no known drafter"));
        fields.error("architectures", format!("{found}; expected one of {names}"))
    })?)
}

/// Checks that the folder is a complete drafter checkpoint of a known kind, in a layout that can be loaded.
///
/// # Errors
/// The problem, and its remedy.
pub fn check_layout(dir: &Path) -> Result<(), ModelError> {
    find_complete_checkpoint_kind(dir).map(|_| ())
}

/// [`find_checkpoint_kind`], which also fails for unsupported attention, and for a folder without embedding and LM head.
pub(crate) fn find_complete_checkpoint_kind(dir: &Path) -> Result<&'static CheckpointKind, ModelError> {
    let known = find_checkpoint_kind(dir)?;
    let (path, map) = read_json(dir)?;
    if let Some(layouts) = known.layouts {
        check_attention(&path, &map, layouts.has_block_options())?;
    }
    let for_engines = open_checkpoint(dir).ok().filter(Checkpoint::lacks_embed_and_head);
    match for_engines.and_then(|checkpoint| checkpoint.conversion_advice()) {
        Some(advice) => {
            let problem = format!("the folder is not read: {advice}");
            Err(Fields::new(&path, &map).error("architectures", problem).into())
        }
        None => Ok(known),
    }
}

/// Fails if config.json asks for attention that is not supported, such as another `attention_mode`.
fn check_attention(
    path: &Path,
    map: &Map<String, Value>,
    has_block_options: bool,
) -> Result<(), CheckpointError> {
    let unsupported = find_unsupported_setting(map, has_block_options);
    unsupported
        .map_or(Ok(()), |Incompatibility { key, reason }| Err(Fields::new(path, map).error(&key, reason)))
}

/// Plans a copy of the target's checkpoint whose tensors `mtp.*` are those of the drafter `source`, as engines load it.
///
/// # Errors
/// If no engine loads drafters of the kind from there, or the drafter does not fit the target.
pub fn merge_mtp<'a>(source: &'a Checkpoint, target: &Target) -> Result<MergedTarget<'a>, ModelError> {
    match source.drafter().kind.name() {
        name if name == dspark_v4::DSPARK_V4_INFO.name => dspark_v4::merge(source, target),
        _ => mtp::merge(source, target),
    }
}

/// Opens the drafter checkpoint in `dir`, in the layout of any known tool.
///
/// # Errors
/// If it is no drafter of a known layout and kind, or a file or a key of it is broken.
pub fn open_checkpoint(dir: &Path) -> Result<Checkpoint, CheckpointError> {
    if let Ok((path, map)) = read_json(dir) {
        let fields = Fields::new(&path, &map);
        let known = find_kind_by_class(fields.architecture().ok().flatten());
        if let Some(known) = known.filter(|known| !known.are_language_models && known.layouts.is_none()) {
            let problem =
                format!("{}; `deepspec-eval run` evaluates it, and it is not converted", known.description);
            return Err(fields.error("architectures", problem));
        }
    }
    let kinds: Vec<_> =
        DRAFTER_KINDS.into_iter().filter_map(|kind| kind.checkpoints.as_ref()?.layouts).collect();
    let families: Vec<_> =
        families().filter(|family| family.has_drafters()).map(|family| family.decoder).collect();
    let mut checkpoint = Checkpoint::open(dir, KnownDrafters { kinds: &kinds, families: &families })?;
    if checkpoint.format() == CheckpointFormat::Reference
        && let Err(error) = check_reference_config(dir)
    {
        let (key, reason) = match error {
            ModelError::Config { key, problem, .. } => (key, problem),
            error => ("config.json".into(), error.to_string()),
        };
        checkpoint.set_unsupported(key, reason);
    }
    Ok(checkpoint)
}

/// Checks config.json with the checks that loading makes, so that all commands report the same problem.
fn check_reference_config(dir: &Path) -> Result<(), ModelError> {
    let (path, map) = read_json(dir)?;
    let found = map.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let Some(known) = find_kind_by_class(found) else { return Ok(()) };
    check_attention(&path, &map, known.layouts.is_some_and(Reader::has_block_options))?;
    (known.check)(dir)
}

fn all_checkpoint_kinds() -> impl Iterator<Item = &'static CheckpointKind> {
    DRAFTER_KINDS.into_iter().filter_map(|kind| kind.checkpoints.as_ref())
}

/// Finds the kind whose checkpoints have this class.
fn find_kind_by_class(class: Option<&str>) -> Option<&'static CheckpointKind> {
    let class = class?;
    all_checkpoint_kinds().find(|known| (known.classes)().iter().any(|known| known == class))
}

/// Loads the drafter checkpoint in `dir`.
///
/// # Errors
/// If the folder is no drafter checkpoint of a known kind, or its tensors do not fit its config.
pub fn load_drafter(dir: &Path, options: &DrafterOptions) -> Result<Box<dyn Drafter>, ModelError> {
    (find_complete_checkpoint_kind(dir)?.load)(dir, options)
}

/// Why the drafter in `dir` grows no trees, as a clause; None if it grows them. Reads no weights.
///
/// # Errors
/// If the folder is no drafter checkpoint of a known kind.
pub fn tree_refusal(dir: &Path) -> Result<Option<&'static str>, ModelError> {
    Ok(find_complete_checkpoint_kind(dir)?.tree_refusal)
}

/// Whether the checkpoint in `dir` is a causal language model with its own tokenizer.
///
/// # Errors
/// If the folder is no drafter checkpoint of a known kind.
pub fn is_language_model(dir: &Path) -> Result<bool, ModelError> {
    Ok(find_complete_checkpoint_kind(dir)?.are_language_models)
}
