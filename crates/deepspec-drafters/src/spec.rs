//! Drafter section of a recipe, of any kind.

use deepspec_core::Tap;
use deepspec_core::config::{ConfigError, Document, add_nearest_name};
use deepspec_core::recipe::DrafterRecipe;
use deepspec_models::ModelConfig;
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::registration::RecipeSection;
use crate::registry::drafter_title;
use crate::{
    AssistantRecipe, ConfigIssue, DFlash2Recipe, DSparkRecipe, DSparkV4Recipe, DominoRecipe, DrafterPlan,
    Eagle3Recipe, MtpRecipe, PEagleRecipe, XPressRecipe, assistant, dflash2, domino, dspark, dspark_v4,
    eagle3, mtp, peagle, xpress,
};

/// A recipe whose drafter section is parsed.
pub type Recipe = deepspec_core::recipe::Recipe<DrafterSpec>;

/// Drafter section of a recipe, by kind.
#[derive(Debug, Clone, PartialEq)]
pub enum DrafterSpec {
    /// `dspark`.
    DSpark(DSparkRecipe),
    /// `dflash`.
    DFlash(DSparkRecipe),
    /// `dflash2`.
    DFlash2(DFlash2Recipe),
    /// `domino`.
    Domino(DominoRecipe),
    /// `xpress`.
    XPress(XPressRecipe),
    /// `dspark_v4`.
    DSparkV4(DSparkV4Recipe),
    /// `eagle3`.
    Eagle3(Eagle3Recipe),
    /// `peagle`.
    PEagle(PEagleRecipe),
    /// `mtp`.
    Mtp(MtpRecipe),
    /// `gemma4_assistant`.
    Gemma4Assistant(AssistantRecipe),
}

/// Names of the kinds in recipes.
const KIND_NAMES: [&str; 10] = [
    "dspark",
    "dflash",
    "dflash2",
    "domino",
    "xpress",
    "dspark_v4",
    "eagle3",
    "peagle",
    "mtp",
    "gemma4_assistant",
];

impl DrafterSpec {
    /// Reads and checks the drafter section of a recipe.
    ///
    /// # Errors
    /// An unknown kind, or a setting that is unknown, missing or wrong, with file and line.
    pub fn read(document: &Document, drafter: &DrafterRecipe) -> Result<Self, ConfigError> {
        let kind = drafter.kind.as_str();
        let section = RecipeSection { document, kind };
        match kind {
            "dspark" => dspark::read_dspark(&section).map(Self::DSpark),
            "dflash" => dspark::read_dflash(&section).map(Self::DFlash),
            "dflash2" => dflash2::read_recipe(&section).map(Self::DFlash2),
            "domino" => domino::read_recipe(&section).map(Self::Domino),
            "xpress" => xpress::read_recipe(&section).map(Self::XPress),
            "dspark_v4" => dspark_v4::read_recipe(&section).map(Self::DSparkV4),
            "eagle3" => eagle3::read_recipe(&section).map(Self::Eagle3),
            "peagle" => peagle::read_recipe(&section).map(Self::PEagle),
            "mtp" => mtp::read_recipe(&section).map(Self::Mtp),
            "gemma4_assistant" => assistant::read_recipe(&section).map(Self::Gemma4Assistant),
            _ => {
                let names = KIND_NAMES.map(|name| format!("`{name}`")).join(", ");
                let problem = format!("no drafter is called `{kind}`; expected one of {names}");
                Err(document.error(&format!("drafter.{kind}"), add_nearest_name(kind, &problem)))
            }
        }
    }

    /// Name of the kind in recipes.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::DSpark(_) => "dspark",
            Self::DFlash(_) => "dflash",
            Self::DFlash2(_) => "dflash2",
            Self::Domino(_) => "domino",
            Self::XPress(_) => "xpress",
            Self::DSparkV4(_) => "dspark_v4",
            Self::Eagle3(_) => "eagle3",
            Self::PEagle(_) => "peagle",
            Self::Mtp(_) => "mtp",
            Self::Gemma4Assistant(_) => "gemma4_assistant",
        }
    }

    /// Mask token of a drafter that has one.
    pub fn mask_token_id(&self) -> Option<i64> {
        match self {
            Self::DSpark(block) | Self::DFlash(block) => Some(block.mask_token_id),
            Self::DFlash2(recipe) => Some(recipe.mask_token_id),
            Self::Domino(recipe) => Some(recipe.mask_token_id),
            Self::XPress(recipe) => Some(recipe.mask_token_id),
            Self::DSparkV4(recipe) => Some(recipe.mask_token_id),
            Self::PEagle(recipe) => Some(recipe.mask_token_id),
            Self::Eagle3(_) | Self::Mtp(_) | Self::Gemma4Assistant(_) => None,
        }
    }

    /// Whether the drafter computes with weights of the target's layers, and not with their states alone.
    pub fn reads_target_layers(&self) -> bool {
        matches!(self, Self::Gemma4Assistant(_))
    }

    /// Checks that the recipe captures target layers exactly if the drafter reads them.
    ///
    /// # Errors
    /// The problem with `target.layer_ids`.
    pub(crate) fn check_layer_ids(&self, layer_ids: &[Tap]) -> Result<(), String> {
        let reads_layers = !matches!(self, Self::Mtp(_));
        let title = drafter_title(self.kind());
        match layer_ids.is_empty() {
            true if reads_layers => Err(format!("{title} reads layers of the target; expected at least one")),
            false if !reads_layers => {
                Err(format!("{title} reads the target's final states and no layers; leave it out"))
            }
            _ => Ok(()),
        }
    }

    /// Builds the plan of the recipe's drafter for this target.
    pub(crate) fn build_plan(
        &self,
        recipe: &Recipe,
        target: &ModelConfig,
    ) -> Result<Box<dyn DrafterPlan>, ConfigIssue> {
        match self {
            Self::DSpark(block) => dspark::build_plan(block, dspark::DSPARK_LOSS, recipe, target),
            Self::DFlash(block) => dspark::build_plan(block, dspark::DFLASH_LOSS, recipe, target),
            Self::DFlash2(own) => dflash2::build_plan(own, recipe, target),
            Self::Domino(own) => domino::build_plan(own, recipe, target),
            Self::XPress(own) => xpress::build_plan(own, recipe, target),
            Self::DSparkV4(own) => dspark_v4::build_plan(own, recipe, target),
            Self::Eagle3(own) => eagle3::build_plan(own, recipe, target),
            Self::PEagle(own) => peagle::build_plan(own, recipe, target),
            Self::Mtp(own) => mtp::build_plan(own, recipe, target),
            Self::Gemma4Assistant(own) => assistant::build_plan(own, recipe, target),
        }
    }
}

impl Serialize for DrafterSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let settings = match self {
            Self::DSpark(settings) | Self::DFlash(settings) => json!(settings),
            Self::DFlash2(settings) => json!(settings),
            Self::Domino(settings) => json!(settings),
            Self::XPress(settings) => json!(settings),
            Self::DSparkV4(settings) => json!(settings),
            Self::Eagle3(settings) => json!(settings),
            Self::PEagle(settings) => json!(settings),
            Self::Mtp(settings) => json!(settings),
            Self::Gemma4Assistant(settings) => json!(settings),
        };
        serializer.collect_map([(self.kind(), settings)])
    }
}
