//! Training of Gemma 4's assistants: losses and gradients are those of transformers, which loads what is written.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::assert_close;
use deepspec_core::Tap;
use deepspec_drafters::{
    Drafter, DrafterOptions, DrafterPlan, LossDenominator, TrainSample, TrainableDrafter, load_drafter,
    load_recipe, plan_drafter,
};
use deepspec_engine::{
    Completion, DraftSampling, Engine, EngineOptions, ModelInput, Request, Sampling, Target, VerifyRule,
};
use deepspec_models::{ModelConfig, TargetModel, TargetOptions, load_embed_and_head, save};
use deepspec_ops::{AdamWSettings, AdamWTensors, adamw};
use deepspec_testkit::{skip, tiny};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

const STEPS: usize = 3;
/// Shorter than the texts.
const WINDOW: usize = 9;
const TAPS: [i64; 2] = [1, 2];
const GRADIENT: f64 = 5e-4;

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path.join("config.json")).unwrap()).unwrap()
}

fn write(path: &Path, config: &Value) {
    fs::write(path.join("config.json"), config.to_string()).unwrap();
}

/// A target in `target` and its assistant in `assistant`, both with a short window.
fn models() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (name, make) in [("target", tiny::gemma4 as fn(&Path, usize)), ("assistant", tiny::gemma4_assistant)]
    {
        let dir = root.path().join(name);
        fs::create_dir(&dir).unwrap();
        make(&dir, 512);
        let mut config = read(&dir);
        config["text_config"]["sliding_window"] = json!(WINDOW);
        write(&dir, &config);
    }
    root
}

/// The recipe of an assistant with the sizes of that in `assistant`.
fn recipe(root: &Path) -> PathBuf {
    let text = &read(&root.join("assistant"))["text_config"];
    let size = |key: &str| text[key].as_u64().unwrap();
    let drafter = json!({"gemma4_assistant": {
        "num_speculative_steps": STEPS, "step_weight_beta": 0.6, "hidden_size": size("hidden_size"),
        "intermediate_size": size("intermediate_size"), "num_attention_heads": size("num_attention_heads"),
        "layer_types": text["layer_types"],
    }});
    let recipe = json!({
        "name": "t", "target": {"model": "nowhere", "layer_ids": TAPS}, "drafter": drafter,
        "data": {"states": {"cache": "nowhere"}, "chat_template": "gemma4"},
    });
    let path = root.join("recipe.yaml");
    fs::write(&path, recipe.to_string()).unwrap();
    path
}

fn plan(root: &Path, changes: &[&str]) -> Result<Box<dyn DrafterPlan>, String> {
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    let recipe = load_recipe(&recipe(root), &changes).map_err(|error| error.to_string())?;
    let target = ModelConfig::load(&root.join("target")).unwrap();
    plan_drafter(&recipe, &target).map_err(|error| error.to_string())
}

/// A drafter of the plan with the target's layers.
fn build(root: &Path, plan: &dyn DrafterPlan, kind: Kind) -> Box<dyn TrainableDrafter> {
    let dir = root.join("target");
    let config = ModelConfig::load(&dir).unwrap();
    let (embed, head) = load_embed_and_head(&dir, &config, Device::Cpu, kind).unwrap();
    let drafter = plan.build(&embed, &head, 5, kind);
    drafter.load_target(&dir).unwrap();
    drafter.parameters().iter().for_each(|(_, parameter)| drop(parameter.set_requires_grad(true)));
    drafter
}

fn target(root: &Path, slots: usize) -> TargetModel {
    let taps = TAPS.map(|layer| Tap::Layer(layer as u32)).to_vec();
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots, taps };
    TargetModel::load(&root.join("target"), &options).unwrap()
}

/// A text with the states of the target.
fn sample(target: &mut TargetModel, input_ids: Vec<i64>, loss_mask: Vec<bool>) -> TrainSample {
    let _guard = tch::no_grad_guard();
    let tokens = Tensor::from_slice(&input_ids);
    let made = target.forward(&ModelInput { chunks: &[(0, input_ids.len())], tokens });
    target.truncate(0, 0);
    TrainSample {
        last_positions: (0..input_ids.len() as u32).collect(),
        taps: made.captured_states,
        last: made.hidden,
        anchors: vec![],
        input_ids,
        loss_mask,
    }
}

/// Two texts. The second one is learned from in part.
fn samples(root: &Path) -> Vec<TrainSample> {
    let mut target = target(root, 1);
    let masks: [Vec<bool>; 2] =
        [(0..26).map(|at| at > 3).collect(), (0..17).map(|at| at % 3 == 0 && at != 15).collect()];
    let texts = masks.into_iter().zip([5, 77]).map(|(loss_mask, seed)| {
        let input_ids = (0..loss_mask.len() as i64).map(|i| (i * i * 7 + 13 * i + seed) % 600).collect();
        sample(&mut target, input_ids, loss_mask)
    });
    texts.collect()
}

fn gradients(drafter: &dyn TrainableDrafter) -> BTreeMap<String, Tensor> {
    let all = drafter.parameters().iter().map(|(name, parameter)| (name.clone(), parameter.grad()));
    all.filter(|(_, gradient)| gradient.defined()).collect()
}

/// Config of an assistant for a target of the plain class, in a folder of its own, and names and shapes of its tensors.
fn plain_assistant(root: &Path) -> (PathBuf, BTreeMap<String, Vec<i64>>) {
    let mut config = read(&root.join("target"));
    config["model_type"] = json!("gemma4");
    config["text_config"]["model_type"] = json!("gemma4_text");
    config["text_config"]["hidden_size_per_layer_input"] = json!(0);
    let target = ModelConfig::parse(Path::new("config.json"), config.as_object().unwrap().clone()).unwrap();
    let plan = plan_drafter(&load_recipe(&recipe(root), &[]).unwrap(), &target).unwrap();
    let embed = Tensor::zeros([target.vocab_size, target.hidden_size], (Kind::Float, Device::Cpu));
    let drafter = plan.build(&embed, &embed, 0, Kind::Float);
    let dir = root.join("plain");
    fs::create_dir(&dir).unwrap();
    write(&dir, &Value::Object(drafter.config_json()));
    assert_eq!(read(&dir)["architectures"], json!(["Gemma4AssistantForCausalLM"]));
    (dir, drafter.checkpoint().into_iter().map(|(name, tensor)| (name, tensor.size())).collect())
}

#[test]
fn transformers_computes_the_same_losses_and_gradients_with_what_is_written() {
    let Some(python) = skip::python("transformers") else { return };
    let root = models();
    let (root, plan) = (root.path(), plan(root.path(), &[]).unwrap());
    let drafter = build(root, plan.as_ref(), Kind::Float);
    assert_eq!(drafter.load_pretrained(&root.join("assistant")).unwrap(), Vec::<String>::new());
    let samples = samples(root);
    let parts = samples.iter().map(|sample| plan.loss_denominator_part(&sample.loss_mask, &[]));
    let denominator: f64 = parts.sum();
    let sums = drafter.accumulate(&samples, LossDenominator(denominator), 0.0, None).unwrap();
    let sums: Vec<f64> = Vec::try_from(sums).unwrap();
    let metrics = (plan.metric_defs().compute)(&sums, samples.len());

    let written = root.join("written");
    fs::create_dir(&written).unwrap();
    save(&written.join("model.safetensors"), &drafter.checkpoint(), Kind::Float).unwrap();
    write(&written, &Value::Object(drafter.config_json()));
    // The target caps its logits, and the assistant does not.
    let cap = |dir: &Path| read(dir)["text_config"]["final_logit_softcapping"].clone();
    assert!(cap(&root.join("target")).is_number() && cap(&written).is_null());
    let (plain, shapes) = plain_assistant(root);
    let weights = [1.0, 0.6, 0.36].map(|power| power / 1.96);
    let texts = samples
        .iter()
        .map(|sample| json!({"input_ids": sample.input_ids, "loss_mask": sample.loss_mask}))
        .collect::<Vec<_>>();
    let case = json!({"samples": texts, "step_weights": weights, "denominator": denominator, "other": plain});
    let [case_file, found] = ["case.json", "gradients.safetensors"].map(|name| root.join(name));
    fs::write(&case_file, case.to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/assistant_training.py");
    let args = [script, root.join("target"), written, case_file, found.clone()];
    let run = Command::new(python).args(args).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let told: Value = serde_json::from_slice(&run.stdout).unwrap();

    let step_loss = metrics["step_loss"].as_array().unwrap();
    let counts = metrics["valid_tokens"].as_array().unwrap();
    assert_eq!(step_loss.len(), STEPS);
    let mut loss = 0.0;
    for (step, (mean, count)) in step_loss.iter().zip(counts).enumerate() {
        let (sum, count) = (told["entropies"][step].as_f64().unwrap(), count.as_f64().unwrap());
        let (mean, expected) = (mean.as_f64().unwrap(), sum / count);
        assert!((mean - expected).abs() < 1e-5 * expected, "step {step}: {mean} for {expected}");
        loss += weights[step] * sum / denominator;
    }
    assert!((metrics["loss"].as_f64().unwrap() - loss).abs() < 1e-5 * loss, "{metrics:?} for {loss}");

    let expected: BTreeMap<String, Tensor> = Tensor::read_safetensors(&found).unwrap().into_iter().collect();
    let own = gradients(drafter.as_ref());
    assert_eq!(own.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    assert_eq!(own.len(), drafter.parameters().len());
    for (name, expected) in &expected {
        let largest = expected.abs().max().double_value(&[]);
        assert!(largest > 0.0, "{name} learns nothing");
        assert_close(name, &own[name], expected, GRADIENT * largest);
    }
    let theirs: BTreeMap<String, Vec<i64>> = serde_json::from_value(told["other"].clone()).unwrap();
    assert_eq!(theirs, shapes);
}

/// Samples that share a pass, and passes of their own, give the same gradients. A frozen head has none.
#[test]
fn gradients_add_up_over_passes_and_frozen_parts_have_none() {
    let root = models();
    let (root, samples) = (root.path(), samples(root.path()));
    let of_kind = |changes: &[&str], passes: &[&[TrainSample]], kind| {
        let plan = plan(root, changes).unwrap();
        let drafter = build(root, plan.as_ref(), kind);
        drafter.load_pretrained(&root.join("assistant")).unwrap();
        for samples in passes {
            let _ = drafter.accumulate(samples, LossDenominator(20.0), 0.0, None).unwrap();
        }
        (gradients(drafter.as_ref()), plan.num_parameters())
    };
    let of = |changes: &[&str], passes: &[&[TrainSample]]| of_kind(changes, passes, Kind::Float);
    let (whole, counts) = of(&[], &[&samples]);
    let (narrow, _) = of_kind(&[], &[&samples], Kind::BFloat16);
    let (split, _) = of(&[], &[&samples[..1], &samples[1..]]);
    for (name, gradient) in &whole {
        let largest = gradient.abs().max().double_value(&[]);
        assert_close(name, &split[name], gradient, 1e-5 * largest);
        let error = (narrow[name].to_kind(Kind::Float) - gradient).norm() / gradient.norm();
        assert!(error.double_value(&[]) < 0.1, "{name} in bfloat16: {error}");
    }
    let init = format!("train.init_from={}", root.join("assistant").display());
    let (kept, fewer) = of(&[&init, "train.freeze=[head, norm]"], &[&samples]);
    let head = "model.embed_tokens.weight";
    assert_eq!(kept.len() + 2, whole.len());
    assert!(!kept.contains_key(head) && !kept.contains_key("model.norm.weight"));
    assert_eq!(counts.trainable, fewer.trainable + whole[head].numel() + whole["model.norm.weight"].numel());
    for (name, gradient) in &kept {
        assert_eq!(gradient, &whole[name], "{name}");
    }
    let (adapted, lora) = of(&[&init, "train.lora={r: 2}"], &[&samples]);
    assert!(lora.has_lora && lora.frozen == counts.trainable);
    assert!(adapted.contains_key("post_projection.lora_B.weight"), "{:?}", adapted.keys());
    assert!(!adapted.keys().any(|name| name.contains("embed_tokens")));
}

#[test]
fn mistakes_are_named() {
    let root = models();
    let wrong = |change: &str, hints: &[&str]| {
        let told = plan(root.path(), &[change]).err().unwrap_or_else(|| panic!("{change} is accepted"));
        assert!(hints.iter().all(|hint| told.contains(hint)), "{told}");
    };
    wrong("target.layer_ids=[1, 3]", &["`target.layer_ids`: [1, 3]; an assistant", "reads [1, 2]"]);
    wrong("target.layer_ids=[]", &["`target.layer_ids`", "reads layers of the target"]);
    let key = |key: &str| format!("drafter.gemma4_assistant.{key}");
    let named = |own: &str, value: &str, hint: &str| {
        let (change, name) = (format!("{}={value}", key(own)), format!("`{}`", key(own)));
        wrong(&change, &[&name, hint]);
    };
    named("num_speculative_steps", "0", "must be at least 1");
    named("num_speculative_steps", "65", "65 is not between 1 and 64");
    named("step_weight_beta", "1.5", "1.5 is not in (0, 1]");
    named("hidden_size", "0", "must be at least 1");
    named("num_attention_heads", "3", "3 is no multiple of the target's 2 key/value heads");
    named("layer_types", "[full_attention]", "layers of sliding_attention and of full_attention");
    named("layer_types", "[full_attention, sliding_attention]", "make the last one full_attention");
    named("hiden_size", "3", "did you mean `hidden_size`?");
    wrong("train.recompute=true", &["`train.recompute`: an assistant of Gemma 4 keeps what its layers make"]);

    let start = |edit: fn(&mut Value), hint: &str| {
        let dir = root.path().join("assistant");
        let kept = read(&dir);
        let mut config = kept.clone();
        edit(&mut config);
        write(&dir, &config);
        let plan = plan(root.path(), &[]);
        write(&dir, &kept);
        let drafter = build(root.path(), plan.unwrap().as_ref(), Kind::Float);
        write(&dir, &config);
        let told = drafter.load_pretrained(&dir).unwrap_err().to_string();
        write(&dir, &kept);
        assert!(told.contains(hint), "{told}");
    };
    start(
        |config| config["tie_word_embeddings"] = json!(false),
        "tie_word_embeddings false there, true here",
    );
    start(|config| config["use_ordered_embeddings"] = json!(true), "use_ordered_embeddings");
    start(|config| config["backbone_hidden_size"] = json!(48), "backbone_hidden_size 48 there, 32 here");
    start(|config| config["architectures"] = json!(["Qwen3MTPModel"]), "train.init_from");
    let other = json!({"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50});
    let target = ModelConfig::parse(Path::new("config.json"), other.as_object().unwrap().clone()).unwrap();
    let told = plan_drafter(&load_recipe(&recipe(root.path()), &[]).unwrap(), &target).err().unwrap();
    assert!(
        told.to_string()
            .contains("`target.model`: assistants are for targets of Gemma 4, and this one is of Qwen3"),
        "{told}"
    );
}

/// Greedy answers to some prompts, with any drafter.
fn answers(root: &Path, drafter: Option<Box<dyn Drafter>>) -> Vec<Completion> {
    let options = EngineOptions {
        slots: 3,
        context: 128,
        max_draft_tokens: Some(STEPS),
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
        counts_overrun: false,
    };
    let request = |number: i64| Request {
        id: number.to_string(),
        prompt: (0..12).map(|i| (37 * i + 101 * number) % 600).collect(),
        sampling: Sampling::new(0.0, 1),
        max_new_tokens: 30,
        stop_ids: vec![],
    };
    Engine::new(target(root, 3), drafter, options).run((0..3).map(request).collect(), |_| {}).unwrap()
}

/// Committed tokens per cycle.
fn accepted_length(answers: &[Completion]) -> f64 {
    let cycles = answers.iter().map(|answer| answer.cycles.len()).sum::<usize>();
    answers.iter().map(|answer| answer.tokens.len()).sum::<usize>() as f64 / cycles as f64
}

fn optimise(drafter: &dyn TrainableDrafter, samples: &[TrainSample], denominator: f64, steps: usize) {
    let zeros = || drafter.parameters().iter().map(|(_, tensor)| tensor.zeros_like()).collect::<Vec<_>>();
    let (mut first, mut second) = (zeros(), zeros());
    for step in 1..=steps {
        let _ = drafter.accumulate(samples, LossDenominator(denominator), 0.0, None).unwrap();
        let _guard = tch::no_grad_guard();
        let mut weights: Vec<Tensor> =
            drafter.parameters().iter().map(|(_, tensor)| tensor.detach()).collect();
        let mut gradients: Vec<Tensor> =
            drafter.parameters().iter().map(|(_, tensor)| tensor.grad().copy()).collect();
        let moments = first.iter_mut().zip(&mut second);
        let mut tensors: Vec<AdamWTensors> = weights
            .iter_mut()
            .zip(&mut gradients)
            .zip(moments)
            .map(|((weights, gradient), (exp_avg, exp_avg_sq))| AdamWTensors {
                weights,
                gradient,
                exp_avg,
                exp_avg_sq,
            })
            .collect();
        let (lr, weight_decay, step) = (3e-3, 0.0, step as f64);
        let settings = AdamWSettings { lr, beta1: 0.9, beta2: 0.99, weight_decay, eps: 1e-8, step };
        adamw(&mut tensors, &Tensor::from(1.0_f32), settings);
        for (_, tensor) in drafter.parameters() {
            tensor.shallow_clone().zero_grad();
        }
    }
}

/// The trained assistant, the one that is read back from its checkpoint, and no drafter give the same answers.
#[test]
fn an_assistant_that_learns_answers_by_heart_has_more_drafts_accepted() {
    let root = models();
    let (root, plan) = (root.path(), plan(root.path(), &[]).unwrap());
    let plain = answers(root, None);
    let tokens = |answers: &[Completion]| -> Vec<Vec<i64>> {
        answers.iter().map(|answer| answer.tokens.clone()).collect()
    };
    let mut model = target(root, 1);
    let learned: Vec<TrainSample> = plain
        .iter()
        .enumerate()
        .map(|(number, answer)| {
            let prompt = (0..12).map(|i| (37 * i + 101 * number as i64) % 600);
            let ids: Vec<i64> = prompt.chain(answer.tokens.iter().copied()).collect();
            let mask = (0..ids.len()).map(|at| at >= 12).collect();
            sample(&mut model, ids, mask)
        })
        .collect();
    let drafter = build(root, plan.as_ref(), Kind::Float);
    drafter.load_pretrained(&root.join("assistant")).unwrap();
    let before = answers(root, Some(drafter.inference_drafter(3)));
    let parts = learned.iter().map(|sample| plan.loss_denominator_part(&sample.loss_mask, &[]));
    optimise(drafter.as_ref(), &learned, parts.sum(), 30);
    let after = answers(root, Some(drafter.inference_drafter(3)));

    let written = root.join("written");
    fs::create_dir(&written).unwrap();
    save(&written.join("model.safetensors"), &drafter.checkpoint(), Kind::Float).unwrap();
    write(&written, &Value::Object(drafter.config_json()));
    let dir = Some(root.join("target"));
    let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 3, target: dir };
    let again = answers(root, Some(load_drafter(&written, &options).unwrap()));
    for with_drafts in [&before, &after, &again] {
        assert_eq!(tokens(with_drafts), tokens(&plain));
    }
    let cycles =
        |answers: &[Completion]| -> Vec<usize> { answers.iter().map(|answer| answer.cycles.len()).collect() };
    assert_eq!(cycles(&again), cycles(&after), "a checkpoint holds the whole assistant");
    let [before, after] = [&before, &after].map(|answers| accepted_length(answers));
    assert!(after > before + 1.0, "{before} before, {after} after");
}
