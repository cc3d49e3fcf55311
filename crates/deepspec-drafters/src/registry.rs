//! Which kinds of drafters there are: a line each.

use std::path::Path;

use deepspec_checkpoint::{
    Checkpoint, CheckpointError, CheckpointFormat, Fields, Known, Tensors, unsupported_attention,
    unsupported_layout,
};
use deepspec_core::cli::UsageError;
use deepspec_core::config::{ConfigError, Document, with_nearest};
use deepspec_core::recipe::DrafterRecipe;
use deepspec_models::config::read_json;
use deepspec_models::{ModelConfig, ModelError, families};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::registration::{Checkpoints, DrafterKindInfo};
use crate::{Drafter, DrafterOptions, DrafterPlan, DrafterSpec, Recipe, causal, dflash2, dspark, eagle3};

/// All kinds, in the order in which messages name them.
const KINDS: [&DrafterKindInfo; 5] =
    [&dspark::DSPARK, &dspark::DFLASH, &dflash2::KIND, &eagle3::KIND, &causal::KIND];

/// Reads and checks a recipe with its drafter, with `key=value` overrides. Defaults of the drafter's settings are filled in.
///
/// # Errors
/// See [`ConfigError`].
pub fn load_recipe(path: &Path, overrides: &[String]) -> Result<Recipe, ConfigError> {
    let document = Document::open(path, overrides)?;
    let recipe = deepspec_core::recipe::Recipe::read(&document)?;
    let drafter = DrafterSpec::read(&document, &recipe.drafter)?;
    let recipe = recipe.with_drafter(drafter);
    frozen(&recipe).map_err(|problem| document.error("train.freeze", problem))?;
    Ok(recipe)
}

/// Reads the recipe that training wrote beside a checkpoint, in this version or an earlier one, as JSON.
///
/// Settings that did not exist in that version have their defaults. A drafter that this version cannot read stays as it is.
///
/// # Errors
/// See [`ConfigError`].
pub fn load_saved_recipe(path: &Path) -> Result<Value, ConfigError> {
    let document = Document::open(path, &[])?;
    let recipe: deepspec_core::recipe::Recipe<DrafterRecipe> = document.read()?;
    Ok(match DrafterSpec::read(&document, &recipe.drafter) {
        Ok(drafter) => json!(recipe.with_drafter(drafter)),
        Err(_) => json!(recipe),
    })
}

/// The JSON schema of recipes.
pub fn recipe_schema() -> Value {
    let mut schemas = SchemaGenerator::default();
    let kinds: Map<String, Value> = KINDS
        .iter()
        .filter_map(|kind| Some((kind.name.to_string(), (kind.settings?)(&mut schemas).to_value())))
        .collect();
    let mut schema =
        schemas.into_root_schema_for::<deepspec_core::recipe::Recipe<DrafterRecipe>>().to_value();
    schema["$defs"][&*DrafterRecipe::schema_name()]["properties"] = kinds.into();
    schema
}

/// Beginnings of the names of the parameters that a recipe freezes; the error is what is wrong with its list.
fn frozen(recipe: &Recipe) -> Result<Vec<&'static str>, String> {
    let kind = KINDS.into_iter().find(|kind| kind.name == recipe.drafter.kind());
    let parts = kind.map_or(&[][..], |kind| kind.parts);
    let mut prefixes = vec![];
    for name in &recipe.train.freeze {
        let Some(part) = parts.iter().find(|part| part.name == name) else {
            let known = parts.iter().map(|part| format!("`{}`", part.name)).collect::<Vec<_>>().join(", ");
            let title = title(recipe.drafter.kind());
            return Err(with_nearest(
                name,
                &format!("{title} has no part `{name}`; expected some of {known}"),
            ));
        };
        prefixes.extend(part.prefixes);
    }
    Ok(prefixes)
}

/// The drafter of a recipe from [`load_recipe`], fitted to its target.
///
/// # Errors
/// [`ModelError::Mismatch`] naming the key that does not fit.
pub fn plan(recipe: &Recipe, target: &ModelConfig) -> Result<Box<dyn DrafterPlan>, ModelError> {
    let kind = recipe.drafter.kind();
    let mismatch = |text: String| ModelError::Mismatch(UsageError(text));
    let mut plan = recipe
        .drafter
        .fit(recipe, target)
        .map_err(|(key, problem)| mismatch(format!("`drafter.{kind}.{key}`: {problem}")))?;
    let wrong_freeze = |problem| mismatch(format!("`train.freeze`: {problem}"));
    plan.freeze(frozen(recipe).map_err(wrong_freeze)?);
    if recipe.train.recompute && !plan.recompute() {
        let problem = format!("{} keeps what its layers make; leave it out", title(kind));
        return Err(mismatch(format!("`train.recompute`: {problem}")));
    }
    if plan.weights().trained == 0 {
        return Err(wrong_freeze("nothing is left that could learn".into()));
    }
    Ok(plan)
}

/// The name of a kind for people.
pub fn title(kind: &str) -> &str {
    KINDS.iter().find(|known| known.name == kind).map_or(kind, |known| known.title)
}

/// Kind of the checkpoint in `dir`, by the class that its config names.
///
/// # Errors
/// If the folder is no drafter checkpoint of a known kind.
pub fn checkpoints_like(dir: &Path) -> Result<&'static Checkpoints, ModelError> {
    let (path, map) = read_json(dir)?;
    let fields = Fields::new(&path, &map);
    let found = map.get("architectures").and_then(|list| list.get(0)).and_then(|name| name.as_str());
    let foreign = || Tensors::open(dir).ok().and_then(|tensors| unsupported_layout(&map, &tensors));
    let named = of_class(found);
    if named.is_some_and(|known| known.are_language_models) {
        Tensors::open(dir)?;
    }
    // EAGLE's own drafters name the class of a language model.
    let known = named.filter(|known| !known.are_language_models || foreign().is_none());
    Ok(known.ok_or_else(|| {
        if let Some(advice) = open_checkpoint(dir).ok().and_then(|checkpoint| checkpoint.advice()) {
            let found = found.unwrap_or("no class");
            return fields.error("architectures", format!("{found} is not read: {advice}"));
        }
        if let Some(problem) = foreign() {
            return fields.error("architectures", problem);
        }
        let names = all_checkpoints().flat_map(|known| (known.classes)()).collect::<Vec<_>>().join(", ");
        let found = found
            .map_or_else(|| "no class is named".into(), |found| format!("\"{found}\" is no known drafter"));
        fields.error("architectures", format!("{found}; expected one of {names}"))
    })?)
}

/// Checks that the folder is a drafter checkpoint of a known kind, in the layout that is read here, with all that drafting takes.
///
/// # Errors
/// If it is not, with what to do about it.
pub fn check_layout(dir: &Path) -> Result<(), ModelError> {
    whole_checkpoints_like(dir).map(|_| ())
}

/// [`checkpoints_like`], of a folder that holds all that drafting takes.
fn whole_checkpoints_like(dir: &Path) -> Result<&'static Checkpoints, ModelError> {
    let known = checkpoints_like(dir)?;
    let (path, map) = read_json(dir)?;
    if known.layouts.is_some() {
        check_attention(&path, &map)?;
    }
    let for_engines = open_checkpoint(dir).ok().filter(Checkpoint::lacks_embed_and_head);
    match for_engines.and_then(|checkpoint| checkpoint.advice()) {
        Some(advice) => {
            let problem = format!("the folder is not read: {advice}");
            Err(Fields::new(&path, &map).error("architectures", problem).into())
        }
        None => Ok(known),
    }
}

/// Refuses attention within a block that is not computed here.
fn check_attention(path: &Path, map: &Map<String, Value>) -> Result<(), CheckpointError> {
    let wrong = unsupported_attention(map);
    wrong.map_or(Ok(()), |(key, problem)| Err(Fields::new(path, map).error(&key, problem)))
}

/// Opens the drafter checkpoint in `dir`, in the layout of any tool that is known.
///
/// # Errors
/// If it is no drafter of a known layout and kind, or a file or a key of it is broken.
pub fn open_checkpoint(dir: &Path) -> Result<Checkpoint, CheckpointError> {
    let kinds: Vec<_> = KINDS.into_iter().filter_map(|kind| kind.checkpoints.as_ref()?.layouts).collect();
    let families: Vec<_> = families().map(|family| family.decoder).collect();
    let mut checkpoint = Checkpoint::open(dir, Known { kinds: &kinds, families: &families })?;
    if checkpoint.format() == CheckpointFormat::Reference
        && let Err(error) = check_reference(dir)
    {
        let (key, reason) = match error {
            ModelError::Config { key, problem, .. } => (key, problem),
            error => ("config.json".into(), error.to_string()),
        };
        checkpoint.set_unsupported(key, reason);
    }
    Ok(checkpoint)
}

/// Checks the config.json of the layout that is loaded, as loading does: whatever looks at a checkpoint then says the same.
fn check_reference(dir: &Path) -> Result<(), ModelError> {
    let (path, map) = read_json(dir)?;
    check_attention(&path, &map)?;
    let found = map.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    of_class(found).map_or(Ok(()), |known| (known.check)(dir))
}

fn all_checkpoints() -> impl Iterator<Item = &'static Checkpoints> {
    KINDS.into_iter().filter_map(|kind| kind.checkpoints.as_ref())
}

/// The checkpoints of the kind that names this class its own.
fn of_class(class: Option<&str>) -> Option<&'static Checkpoints> {
    let class = class?;
    all_checkpoints().find(|known| (known.classes)().iter().any(|known| known == class))
}

/// Loads the drafter checkpoint in `dir`.
///
/// # Errors
/// If the folder is no drafter checkpoint of a known kind, or its tensors do not fit its config.
pub fn load(dir: &Path, options: &DrafterOptions) -> Result<Box<dyn Drafter>, ModelError> {
    (whole_checkpoints_like(dir)?.load)(dir, options)
}

/// Whether the checkpoint in `dir` is a language model in its own right, whose ids mean what its own tokenizer says.
///
/// # Errors
/// If the folder is no drafter checkpoint of a known kind.
pub fn is_language_model(dir: &Path) -> Result<bool, ModelError> {
    Ok(whole_checkpoints_like(dir)?.are_language_models)
}
