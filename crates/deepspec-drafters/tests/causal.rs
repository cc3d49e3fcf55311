//! A causal language model as drafter: it never changes the output, whatever its weights and in any
//! batch, and it agrees with itself.

use std::fs;
use std::path::{Path, PathBuf};

use deepspec_drafters::{Drafter, DrafterOptions};
use deepspec_engine::{Completion, DraftSampling, Engine, EngineOptions, Request, Sampling, VerifyRule};
use deepspec_models::{TargetModel, TargetOptions};
use safetensors::SafeTensors;
use serde_json::Value;
use tch::{Device, Kind};

const GAMMA: usize = 4;

fn target_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-target")
}

/// The tiny target with another config.
fn variant(dir: &Path, edit: impl Fn(&mut Value)) {
    let read = |name: &str| fs::read(target_dir().join(name)).unwrap();
    let mut config: Value = serde_json::from_slice(&read("config.json")).unwrap();
    edit(&mut config);
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::write(dir.join("model.safetensors"), read("model.safetensors")).unwrap();
}

/// The tiny target without its last layer.
fn shallow(dir: &Path) {
    variant(dir, |config| {
        config["num_hidden_layers"] = 5.into();
        config["layer_types"].as_array_mut().unwrap().pop();
    });
    let whole = fs::read(dir.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&whole).unwrap();
    let kept = tensors.iter().filter(|(name, _)| !name.starts_with("model.layers.5."));
    fs::write(dir.join("model.safetensors"), safetensors::serialize(kept, None).unwrap()).unwrap();
}

fn load(draft: &Path, slots: usize) -> Box<dyn Drafter> {
    let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots, target: None };
    let mut drafter =
        deepspec_drafters::load_drafter(draft, &options).unwrap_or_else(|error| panic!("{error}"));
    drafter.set_draft_len(GAMMA);
    drafter
}

fn decode(draft: Option<&Path>, slots: usize, temperature: f64) -> Vec<Completion> {
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots, taps: vec![] };
    let target = TargetModel::load(&target_dir(), &options).unwrap_or_else(|error| panic!("{error}"));
    let drafter = draft.map(|draft| load(draft, slots));
    let options = EngineOptions {
        slots,
        context: 256,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
        counts_overrun: false,
    };
    let request = |i: usize| Request {
        id: i.to_string(),
        prompt: (0..5 + 7 * i as i64).map(|token| (token * 37 + 11 * i as i64) % 1000).collect(),
        sampling: Sampling::new(temperature, 5),
        max_new_tokens: 30 + i,
        stop_ids: vec![1020],
    };
    Engine::new(target, drafter, options).run((0..6).map(request).collect(), |_| {}).unwrap()
}

fn tokens(completions: &[Completion]) -> Vec<&[i64]> {
    completions.iter().map(|completion| completion.tokens.as_slice()).collect()
}

fn accepted(completions: &[Completion]) -> (u32, u32) {
    let cycles = || completions.iter().flat_map(|completion| &completion.cycles);
    (cycles().map(|cycle| cycle.accepted).sum(), cycles().map(|cycle| cycle.proposed).sum())
}

#[test]
fn a_model_is_right_about_itself() {
    for temperature in [0.0, 1.0] {
        let completions = decode(Some(&target_dir()), 4, temperature);
        let (accepted, proposed) = accepted(&completions);
        assert!(proposed > 20, "{proposed}");
        assert_eq!(accepted, proposed, "at temperature {temperature}");
        let mut cycles = completions.iter().flat_map(|completion| &completion.cycles);
        assert!(cycles.any(|cycle| (cycle.proposed, cycle.committed) == (GAMMA as u32, GAMMA as u32 + 1)));
    }
}

#[test]
fn another_model_changes_no_token_at_temperature_0() {
    let dir = tempfile::tempdir().unwrap();
    shallow(dir.path());
    let drafted = decode(Some(dir.path()), 3, 0.0);
    assert_eq!(tokens(&drafted), tokens(&decode(None, 3, 0.0)));
    let (accepted, proposed) = accepted(&drafted);
    assert!(0 < accepted && accepted < proposed, "{accepted} of {proposed}");
}

/// KV caches follow the committed tokens. With a rejected token left in one, or an accepted one
/// missing, drafts would depend on the number of slots and the order of refills.
#[test]
fn proposals_do_not_depend_on_slots() {
    let dir = tempfile::tempdir().unwrap();
    shallow(dir.path());
    let cycles = |slots| -> Vec<_> {
        decode(Some(dir.path()), slots, 1.0).into_iter().map(|done| (done.tokens, done.cycles)).collect()
    };
    let one = cycles(1);
    assert_eq!(one, cycles(2));
    assert_eq!(one, cycles(6));
}

/// Its states roll back within the last forward only, and a language model drafts in many.
#[test]
fn a_hybrid_is_refused_as_a_drafter() {
    let dir = tempfile::tempdir().unwrap();
    deepspec_testkit::tiny::target(dir.path(), "qwen3_5");
    let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
    let told = deepspec_drafters::load_drafter(dir.path(), &options).err().unwrap().to_string();
    assert!(told.contains("Qwen3.5 is a target here and no drafter"), "{told}");
}

#[test]
fn a_model_of_another_vocabulary_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = {
        variant(dir.path(), |config| config["vocab_size"] = 1000.into());
        let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
        match deepspec_drafters::load_drafter(dir.path(), &options) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("the embedding has 1024 rows"),
        }
    };
    assert!(error.contains("embed_tokens.weight") && error.contains("1000"), "{error}");

    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, taps: vec![] };
    let gemma = tempfile::tempdir().unwrap();
    deepspec_testkit::tiny::gemma4(gemma.path(), 64);
    let target = TargetModel::load(&target_dir(), &options).unwrap_or_else(|error| panic!("{error}"));
    let told = load(gemma.path(), 1).check_fits(target.config()).unwrap_err().to_string();
    assert!(told.contains("640") && told.contains("1024"), "{told}");
}
