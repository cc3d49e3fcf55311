//! Recipes with the settings of every kind of drafter: defaults, ranges, and errors with their line
//! and full key.

use std::path::Path;

use deepspec_checkpoint::DraftVocab;
use deepspec_core::config;
use deepspec_drafters::{Convolution, DrafterSpec, Recipe, load_recipe, plan_drafter};
use deepspec_models::ModelConfig;

const MINIMAL: &str = "
name: tiny
target: {model: assets/tiny-target, layer_ids: [embedding, 1, 3]}
drafter:
  dspark:
    block_size: 7
    num_draft_layers: 2
    mask_token_id: 5
    markov: {type: vanilla, rank: 32}
    confidence: {with_markov: true}
data: {states: {cache: runs/cache}, chat_template: qwen}
";

fn read(text: &str, overrides: &[&str]) -> Result<Recipe, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("recipe.yaml");
    std::fs::write(&path, text).unwrap();
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    deepspec_drafters::load_recipe(&path, &overrides).map_err(|error| error.to_string())
}

/// The recipe written next to a checkpoint contains all settings and has the same meaning.
#[test]
fn defaults_are_filled_in_and_survive_a_round_trip() {
    let recipe = read(MINIMAL, &[]).unwrap();
    let settings = &serde_json::to_value(&recipe.drafter).unwrap()["dspark"];
    assert_eq!((&settings["num_anchors"], &settings["confidence"]["alpha"]), (&512.into(), &1.0.into()));
    assert_eq!(read(&config::to_yaml(&recipe).unwrap(), &[]).unwrap(), recipe);
    assert_eq!(read(MINIMAL, &["drafter.dspark.num_anchors=512"]).unwrap(), recipe);
}

#[test]
fn mistakes_are_named_with_their_line_and_whole_key() {
    let wrong = |change: &str, hint: &str| {
        let error = read(MINIMAL, &[change]).unwrap_err();
        assert!(error.contains(hint), "{change}: {error}");
    };
    let line = read(&MINIMAL.replace("num_draft_layers: 2", "num_draft_layers: 0"), &[]).unwrap_err();
    assert!(line.contains("recipe.yaml:7: `drafter.dspark.num_draft_layers`: must be at least 1"), "{line}");
    let typo = read(&MINIMAL.replace("block_size", "blok_size"), &[]).unwrap_err();
    assert!(typo.contains("recipe.yaml:6: `drafter.dspark.blok_size`"), "{typo}");
    wrong("drafter.dspark.blok_size=3", "did you mean `block_size`?");
    let kind = read(&MINIMAL.replace("dspark:", "dspork:"), &[]).unwrap_err();
    assert!(kind.contains("recipe.yaml:5: `drafter.dspork`: no drafter is called `dspork`"), "{kind}");
    assert!(
        kind.contains(
            "expected one of `dspark`, `dflash`, `dflash2`, `domino`, `xpress`, `dspark_v4`, `eagle3`, `peagle`, `mtp`, `gemma4_assistant`; did you mean `dspark`?"
        ),
        "{kind}"
    );
    wrong("drafter.dspark.markov.rank=0", "leave `markov` out");
    wrong(
        "drafter.dspark.loss={ce_alpha: 0.1, kl_alpha: -1}",
        "`drafter.dspark.loss.kl_alpha`: -1 is no number from 0",
    );
    wrong("drafter.dspark.loss={decay_gamma: 3}", "`drafter.dspark.loss`: all weights are 0");
    wrong(
        "drafter.dspark.loss={ce_alpha: 1, dpace: {smoothing: 0}}",
        "`drafter.dspark.loss.dpace.smoothing`",
    );
    wrong(
        "drafter.dspark.loss={l1_alpha: 1, dpace: {}}",
        "`drafter.dspark.loss.dpace`: it weighs the cross entropy",
    );
    wrong(
        "drafter.dspark.loss={ce_alpha: 1, until_first_error: true, dpace: {}}",
        "`drafter.dspark.loss.until_first_error`: `dpace` weighs positions too",
    );
    wrong(
        "drafter.dspark.loss={l1_alpha: 1, until_first_error: true}",
        "`drafter.dspark.loss.until_first_error`: it weighs the cross entropy",
    );
    wrong("drafter.dspark.loss={block_verification: {alpha: 0}}", "`drafter.dspark.loss`: all weights are 0");
    wrong(
        "drafter.dspark.loss={block_verification: {beta: -1}}",
        "`drafter.dspark.loss.block_verification.beta`",
    );
    wrong("drafter.dspark.loss={block_verification: {gamma: 1}}", "unknown field `gamma`");
    wrong("drafter.dspark.loss={lk: {type: hybird}}", "hybird");
    wrong("drafter.dspark.loss={lk: {type: hybrid, eta: -1}}", "`drafter.dspark.loss.lk.eta`");
    let dflash = MINIMAL.replace("dspark:", "dflash:");
    assert!(read(&dflash, &[]).unwrap_err().contains("use `dspark`"));
    wrong("drafter.dspark.layer_types=[full_attention]", "1 types for 2 draft layers");
    wrong(
        "drafter.dspark.layer_types=[full_attention, sliding_attention]",
        "`drafter.dspark.sliding_window`: missing",
    );
    wrong("drafter.dspark.layer_types=[full_attention, windowed]", "sliding_attention");
    let windows = |changes: &[&str]| {
        let recipe = read(MINIMAL, changes).unwrap();
        let (DrafterSpec::DSpark(block) | DrafterSpec::DFlash(block)) = recipe.drafter else {
            panic!("a block drafter");
        };
        block.layers().windows()
    };
    assert_eq!(windows(&[]), [None, None]);
    assert_eq!(windows(&["drafter.dspark.sliding_window=9"]), [Some(9), Some(9)]);
    let mixed = "drafter.dspark.layer_types=[sliding_attention, full_attention]";
    assert_eq!(windows(&["drafter.dspark.sliding_window=9", mixed]), [Some(9), None]);
    let eagle3 = "drafter={eagle3: {ttt_length: 0}}";
    wrong(eagle3, "`drafter.eagle3.ttt_length`: must be at least 1");
    wrong("drafter={eagle3: {step_loss_decay: 1.5}}", "not in (0, 1]");
    wrong("drafter={eagle3: {supervise: all}}", "shifted");
    wrong("target.layer_ids=[]", "`target.layer_ids`: DSpark reads layers of the target");
}

#[test]
fn xpress_has_its_authors_defaults() {
    let block = "block_size: 16, num_draft_layers: 5, mask_token_id: 5";
    let text = format!(
        "name: t\ntarget: {{model: assets/tiny-target, layer_ids: [1, 3]}}\ndrafter: {{xpress: {{{block}}}}}\n\
         data: {{states: {{cache: runs/cache}}, chat_template: qwen}}\n"
    );
    let recipe = read(&text, &[]).unwrap();
    let expected = serde_json::json!({"xpress": {
        "block_size": 16, "num_draft_layers": 5, "mask_token_id": 5, "num_anchors": 512,
        "refiner": {"rank": 256, "mlp_ratio": 2, "num_passes": 6},
        "consistency": {"alpha": 0.3, "passes": 3}, "base_alpha": 0.6,
    }});
    assert_eq!(serde_json::to_value(&recipe.drafter).unwrap(), expected);
    let DrafterSpec::XPress(own) = &recipe.drafter else { panic!("xPress") };
    // 0.9 times the total variation, which is half of the L1 norm.
    assert_eq!((own.loss().ce_alpha, own.loss().l1_alpha, own.loss().decay_gamma), (0.1, 0.45, 4.0));
    assert_eq!(read(&config::to_yaml(&recipe).unwrap(), &[]).unwrap(), recipe);
    assert_eq!(own.convolution(), None);
    let on_dflash2 = |more: &[&str]| {
        let recipe = read(&text, &[&["drafter.xpress.backbone=dflash2"], more].concat()).unwrap();
        assert_eq!(read(&config::to_yaml(&recipe).unwrap(), &[]).unwrap(), recipe);
        let DrafterSpec::XPress(own) = recipe.drafter else { panic!("xPress") };
        own.convolution()
    };
    assert_eq!(on_dflash2(&[]), Some(Convolution::default()));
    let three_taps = Some(Convolution { kernel_size: 3, ..Convolution::default() });
    assert_eq!(on_dflash2(&["drafter.xpress.convolution={kernel_size: 3}"]), three_taps);
    let wrong = |change: &str, hint: &str| {
        let error = read(&text, &[&format!("drafter.xpress.{change}")]).unwrap_err();
        assert!(error.contains(hint), "{change}: {error}");
    };
    wrong("block_size=1", "`drafter.xpress.block_size`: must be at least 2");
    wrong("base_alpha=-1", "`drafter.xpress.base_alpha`: -1 is no number from 0");
    wrong("consistency.alpha=.inf", "`drafter.xpress.consistency.alpha`");
    wrong("consistency.passes=65", "`drafter.xpress.consistency.passes`: 65 is not between 0 and 64");
    wrong("consistency.rounds=2", "`drafter.xpress.consistency.rounds`");
    wrong("slots=fill_in", "`drafter.xpress.slots`");
    wrong("backbone=domino", "unknown variant `domino`, expected `dflash` or `dflash2`");
    wrong("convolution={}", "`drafter.xpress.convolution`: only the backbone dflash2 has convolutions");
    wrong("loss={decay_gamma: 3}", "`drafter.xpress.loss`: all weights are 0");
}

#[test]
fn domino_has_the_published_sizes_and_names_its_mistakes() {
    let domino = "name: t\ntarget: {model: assets/tiny-target, layer_ids: [1]}\n\
                  drafter: {domino: {block_size: 16, num_draft_layers: 5, mask_token_id: 7}}\n\
                  data: {states: {cache: runs/cache}, chat_template: qwen}\n";
    let recipe = read(domino, &[]).unwrap();
    let expected = serde_json::json!({"domino": {
        "block_size": 16, "slots": "anchor_predicts", "num_draft_layers": 5, "mask_token_id": 7, "num_anchors": 512,
        "gru": {"hidden_size": 1024, "rank": 256}, "lambda_base": {"start": 1.0, "decay_ratio": 1.0},
    }});
    assert_eq!(serde_json::to_value(&recipe.drafter).unwrap(), expected);
    let DrafterSpec::Domino(own) = &recipe.drafter else { panic!("a Domino") };
    assert_eq!((own.loss().ce_alpha, own.loss().decay_gamma), (1.0, 7.0));
    assert_eq!(read(&config::to_yaml(&recipe).unwrap(), &[]).unwrap(), recipe);
    let wrong = |change: &str, hint: &str| {
        let error = read(domino, &[change]).unwrap_err();
        assert!(error.contains(hint), "{change}: {error}");
    };
    wrong("drafter.domino.lambda_base.start=1.5", "`drafter.domino.lambda_base.start`: 1.5 is not in [0, 1]");
    wrong(
        "drafter.domino.lambda_base.decay_ratio=0",
        "`drafter.domino.lambda_base.decay_ratio`: 0 is not in (0, 1]",
    );
    wrong("drafter.domino.num_anchors=0", "`drafter.domino.num_anchors`: must be at least 1");
    wrong("drafter.domino.loss={decay_gamma: 7}", "`drafter.domino.loss`: all weights are 0");
    wrong("drafter.domino.gru.hidden=8", "`drafter.domino.gru.hidden`");
    wrong("drafter.domino.causal=true", "`drafter.domino.causal`");
}

#[test]
fn p_eagle_has_the_published_settings_and_names_its_mistakes() {
    let peagle = "name: t\ntarget: {model: assets/tiny-target, layer_ids: [1]}\n\
                  drafter: {peagle: {mask_token_id: 7}}\ndata: {states: {cache: runs/cache}, chat_template: qwen}\n";
    let recipe = read(peagle, &[]).unwrap();
    let expected = serde_json::json!({"peagle": {
        "num_draft_layers": 4, "num_depths": 8, "mask_token_id": 7, "down_sample_ratio": 0.7,
        "down_sample_ratio_min": 0.2, "segments": 1,
    }});
    assert_eq!(serde_json::to_value(&recipe.drafter).unwrap(), expected);
    assert_eq!(recipe.drafter.mask_token_id(), Some(7));
    assert_eq!(read(&config::to_yaml(&recipe).unwrap(), &[]).unwrap(), recipe);
    let wrong = |change: &str, hint: &str| {
        let error = read(peagle, &[change]).unwrap_err();
        assert!(error.contains(hint), "{change}: {error}");
    };
    wrong("drafter.peagle.num_depths=1", "`drafter.peagle.num_depths`: must be at least 2");
    wrong("drafter.peagle.segments=0", "`drafter.peagle.segments`: must be at least 1");
    wrong("drafter.peagle.segments=2000", "`drafter.peagle.segments`: 2000 is above 1024");
    wrong("drafter.peagle.down_sample_ratio=0", "`drafter.peagle.down_sample_ratio`: 0 is not in (0, 1]");
    wrong(
        "drafter.peagle.down_sample_ratio_min=1.5",
        "`drafter.peagle.down_sample_ratio_min`: 1.5 is not in (0, 1]",
    );
    wrong("drafter.peagle.ttt_length=7", "`drafter.peagle.ttt_length`");
    wrong("target.layer_ids=[]", "`target.layer_ids`: P-EAGLE reads layers of the target");
    let error = read(peagle, &["train.freeze=[heads]", "train.init_from=there"]).unwrap_err();
    assert!(error.contains("expected some of `fusion`, `mask_hidden`, `layers`, `norm`"), "{error}");
}

/// MTP-1 reads no layers, so that a recipe names none.
#[test]
fn mtp_1_needs_no_layer_ids() {
    let mtp = "name: t\ntarget: {model: assets/tiny-target}\ndrafter: {mtp: {}}\n\
               data: {states: {cache: runs/cache}, chat_template: qwen}\n";
    let recipe = read(mtp, &[]).unwrap();
    assert!(recipe.target.layer_ids.is_empty());
    let expected = serde_json::json!({"mtp": {"num_speculative_steps": 3, "step_weight_beta": 0.6}});
    assert_eq!(serde_json::to_value(&recipe.drafter).unwrap(), expected);
    assert_eq!(read(&config::to_yaml(&recipe).unwrap(), &["target.layer_ids=[]"]).unwrap(), recipe);
    let wrong = |change: &str, hint: &str| {
        let error = read(mtp, &[change]).unwrap_err();
        assert!(error.contains(hint), "{change}: {error}");
    };
    wrong("target.layer_ids=[1]", "`target.layer_ids`: MTP-1 reads the target's final states and no layers");
    wrong("drafter.mtp.num_speculative_steps=0", "`drafter.mtp.num_speculative_steps`: must be at least 1");
    wrong("drafter.mtp.step_weight_beta=0", "`drafter.mtp.step_weight_beta`: 0 is not in (0, 1]");
    wrong("drafter.mtp.num_steps=2", "`drafter.mtp.num_steps`");
}

/// Recipes of variants: file, sibling, suffix of the name, kind of drafter, the only setting that differs, and the further trained
/// weights.
const VARIANTS: [(&str, &str, &str, &str, &str, u64); 6] = [
    // A sink for each of 32 heads in 5 layers, and of 6 heads in 2 layers.
    ("dspark_sinks/qwen3_4b", "dspark/qwen3_4b", "sinks", "dspark", "attention_sinks=true", 5 * 32),
    ("tiny/dspark_sinks", "tiny/dspark", "sinks", "dspark", "attention_sinks=true", 2 * 6),
    // Two convolutions of two sides and two taps in each layer, whose groups have 16 channels.
    (
        "xpress/qwen3_4b_dflash2",
        "xpress/qwen3_4b",
        "dflash2",
        "xpress",
        "backbone=dflash2",
        5 * 2 * 4 * (2560 + 160 * 2560),
    ),
    (
        "tiny/xpress_dflash2",
        "tiny/xpress",
        "dflash2",
        "xpress",
        "backbone=dflash2",
        2 * 2 * 4 * (192 + 12 * 192),
    ),
    // The head of a reduced vocabulary is frozen, like the target's.
    ("eagle3/qwen3_4b_draft_vocab", "eagle3/qwen3_4b", "draft_vocab", "eagle3", DRAFT_VOCAB, 0),
    ("peagle/qwen3_4b_draft_vocab", "peagle/qwen3_4b", "draft_vocab", "peagle", DRAFT_VOCAB, 0),
];
const DRAFT_VOCAB: &str = "draft_vocab=runs/qwen3_4b/draft_vocab.safetensors";

#[test]
fn variants_differ_from_their_siblings_in_the_variant_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("draft_vocab.safetensors");
    DraftVocab::most_frequent(&[1; 151_936], 32_000).unwrap().write(&path).unwrap();
    for (file, sibling, suffix, kind, setting, more) in VARIANTS {
        let load = |name: &str, changes: &[String]| {
            load_recipe(&root.join(format!("configs/{name}.yaml")), changes).unwrap()
        };
        let mut expected = load(sibling, &[format!("drafter.{kind}.{setting}")]);
        expected.name += &format!("_{suffix}");
        assert_eq!(load(file, &[]), expected);

        let target = match file.starts_with("tiny/") {
            true => root.join("assets/tiny-target/config.json"),
            false => root.join("configs/shapes/qwen3_4b.json"),
        };
        let raw = serde_json::from_slice(&std::fs::read(&target).unwrap()).unwrap();
        let target = ModelConfig::parse(&target, raw).unwrap();
        let is_reduced = suffix == "draft_vocab";
        let at_path = is_reduced.then(|| format!("drafter.{kind}.draft_vocab={}", path.display()));
        let plan = plan_drafter(&load(file, at_path.as_slice()), &target).unwrap();
        let plain = plan_drafter(&load(sibling, &[]), &target).unwrap();
        let weights = [&plan, &plain].map(|plan| plan.num_parameters().trainable as u64);
        assert_eq!(weights[0], weights[1] + more, "{file}");
        assert_eq!(plan.own_head_rows(), is_reduced.then_some(32_000), "{file}");
    }
}
