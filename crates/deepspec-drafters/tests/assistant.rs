//! Assistants of Gemma 4: their drafts beside transformers', the losslessness of what they draft for, and mistakes.

use std::fs;
use std::path::Path;
use std::process::Command;

use deepspec_drafters::{Drafter, DrafterOptions, load_drafter, tree_refusal};
use deepspec_engine::{
    Completion, Context, DraftRequest, DraftSampling, Engine, EngineOptions, ModelInput, Proposal, Request,
    Sampling, SamplingBatch, Target, VerifyRule,
};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_testkit::{skip, tiny};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

const GAMMA: usize = 4;
/// Longer than the sliding window.
const LONG: usize = 350;

/// A target in `target` and its assistant in `assistant`.
fn models() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (name, write) in [("target", tiny::gemma4 as fn(&Path, usize)), ("assistant", tiny::gemma4_assistant)]
    {
        let dir = root.path().join(name);
        fs::create_dir(&dir).unwrap();
        write(&dir, 512);
    }
    root
}

fn load(root: &Path, slots: usize) -> (TargetModel, Box<dyn Drafter>) {
    let (target, device, kind) = (root.join("target"), Device::Cpu, Kind::Float);
    let options = DrafterOptions { device, kind, slots, target: Some(target.clone()) };
    let mut drafter =
        load_drafter(&root.join("assistant"), &options).unwrap_or_else(|error| panic!("{error}"));
    drafter.set_draft_len(GAMMA);
    let taps = drafter.taps().to_vec();
    let target = TargetModel::load(&target, &TargetOptions { device, kind, slots, taps }).unwrap();
    drafter.check_fits(target.config()).unwrap();
    (target, drafter)
}

fn refusal(root: &Path, target: Option<&str>) -> String {
    let target = target.map(|name| root.join(name));
    let options = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target };
    load_drafter(&root.join("assistant"), &options).err().expect("it is refused").to_string()
}

fn prompt(tokens: usize) -> Vec<i64> {
    (0..tokens as i64).map(|i| (i * i * 7 + 13 * i + 5) % 600).collect()
}

/// Runs these tokens of the target, and returns them as context for the drafter. The next token of the last row is the anchor.
fn context(target: &mut TargetModel, chunks: &[(usize, &[i64])], anchors: &[i64]) -> Context {
    let sizes: Vec<(usize, usize)> = chunks.iter().map(|(slot, tokens)| (*slot, tokens.len())).collect();
    let all: Vec<i64> = chunks.iter().flat_map(|(_, tokens)| tokens.iter().copied()).collect();
    let next = chunks.iter().zip(anchors);
    let next: Vec<i64> =
        next.flat_map(|((_, tokens), anchor)| tokens[1..].iter().copied().chain([*anchor])).collect();
    let output = target.forward(&ModelInput { chunks: &sizes, tokens: Tensor::from_slice(&all) });
    Context {
        captured_states: output.captured_states,
        hidden: Some(output.hidden),
        tokens: Tensor::from_slice(&all),
        next: Tensor::from_slice(&next),
        chunks: sizes,
    }
}

fn no_context(target: &TargetModel) -> Context {
    let empty = |width| Tensor::zeros([0, width], (Kind::Float, Device::Cpu));
    let (width, tokens) = (target.config().hidden_size, Tensor::zeros([0], (Kind::Int64, Device::Cpu)));
    Context {
        captured_states: empty(2 * width),
        hidden: Some(empty(width)),
        next: tokens.shallow_clone(),
        tokens,
        chunks: vec![],
    }
}

/// A proposal at temperature 1 for the slots 2 and 0.
fn propose(drafter: &mut dyn Drafter, context: &Context, anchors: &[i64]) -> Proposal {
    let sampling = SamplingBatch::new(vec![Sampling::new(1.0, 1); 2], Device::Cpu);
    let uniforms = Tensor::from_slice(&[0.1, 0.8, 0.5, 0.3, 0.9, 0.2, 0.6, 0.4]).view([2, GAMMA as i64]);
    let anchors = Tensor::from_slice(anchors);
    drafter.propose(&DraftRequest {
        context,
        slots: &[2, 0],
        anchors: &anchors,
        uniforms: &uniforms,
        sampling: &sampling,
    })
}

/// Probabilities in transformers of the tokens of these proposals, `[rows, V]`. A row's prompt and anchor are given.
fn expected(python: &str, root: &Path, rows: &[(&[i64], i64, &Proposal, i64)]) -> Tensor {
    let case = |&(prompt, anchor, proposal, row): &(&[i64], i64, &Proposal, i64)| {
        let tokens = Vec::<i64>::try_from(proposal.tokens.get(row)).unwrap();
        json!({"prompt": prompt, "anchor": anchor, "tokens": tokens})
    };
    let cases = root.join("cases.json");
    fs::write(&cases, json!(rows.iter().map(case).collect::<Vec<_>>()).to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/assistant.py");
    let [target, assistant] = ["target", "assistant"].map(|name| root.join(name));
    let run = Command::new(python).arg(script).args([&target, &assistant, &cases]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let told: Value = serde_json::from_slice(&run.stdout).unwrap();
    let numbers = |value: &Value| value.as_array().unwrap().iter().map(|p| p.as_f64().unwrap()).collect();
    let rows = told.as_array().unwrap().iter().flat_map(|case| case.as_array().unwrap());
    Tensor::from_slice2(&rows.map(numbers).collect::<Vec<Vec<f64>>>())
}

/// Texts arrive in parts, beside another one, and go on behind accepted drafts.
#[test]
fn transformers_drafts_with_the_same_probabilities() {
    let Some(python) = skip::python("transformers") else { return };
    let _guard = tch::no_grad_guard();
    let root = models();
    let (mut target, mut drafter) = load(root.path(), 3);
    let (long, short) = (prompt(LONG), prompt(23));
    let first = context(&mut target, &[(0, &short[..20]), (2, &long[..9])], &[short[20], long[9]]);
    let early = propose(drafter.as_mut(), &first, &[long[9], short[20]]);
    let rest = context(&mut target, &[(2, &long[9..]), (0, &short[20..])], &[17, 200]);
    let middle = propose(drafter.as_mut(), &rest, &[17, 200]);
    let none = no_context(&target);
    let again = propose(drafter.as_mut(), &none, &[17, 200]);
    assert_eq!(again.probs, middle.probs, "a proposal leaves nothing behind");
    // Two drafts of the long text are accepted, none of the short one.
    let accepted = [17, middle.tokens.int64_value(&[0, 0]), middle.tokens.int64_value(&[0, 1])];
    let more = context(&mut target, &[(0, &[200]), (2, &accepted)], &[31, 32]);
    let late = propose(drafter.as_mut(), &more, &[32, 31]);

    let whole = |text: &[i64], more: &[i64]| [text, more].concat();
    let [long_late, short_late] = [whole(&long, &accepted), whole(&short, &[200])];
    let rows: [(&[i64], i64, &Proposal, i64); 6] = [
        (&long[..9], long[9], &early, 0),
        (&short[..20], short[20], &early, 1),
        (&long, 17, &middle, 0),
        (&short, 200, &middle, 1),
        (&long_late, 32, &late, 0),
        (&short_late, 31, &late, 1),
    ];
    let expected = expected(&python, root.path(), &rows);
    let found = [early, middle, late].map(|proposal| proposal.probs.unwrap().flatten(0, 1));
    let found = Tensor::cat(&found, 0).to_kind(Kind::Double);
    let (error, largest) = ((&found - &expected).abs().max(), expected.max());
    let (error, largest) = (error.double_value(&[]), largest.double_value(&[]));
    assert!(largest > 0.02, "nothing is predicted: {largest}");
    assert!(error < 1e-5 * largest, "{error:e} of {largest:e}");
}

/// The engine drops contexts for which there is no memory.
#[test]
fn a_slot_without_a_context_is_drafted_for() {
    let _guard = tch::no_grad_guard();
    let root = models();
    let (mut target, mut drafter) = load(root.path(), 3);
    let none = no_context(&target);
    let proposal = propose(drafter.as_mut(), &none, &[5, 6]);
    assert_eq!(proposal.tokens.size(), [2, GAMMA as i64]);
    let texts = [prompt(12), prompt(7)];
    let all = context(&mut target, &[(2, &texts[0]), (0, &texts[1])], &[5, 6]);
    let late = propose(drafter.as_mut(), &all, &[5, 6]);
    let (_, mut other) = load(root.path(), 3);
    assert_eq!(late.probs, propose(other.as_mut(), &all, &[5, 6]).probs);
}

/// As tools that save a fine-tuned model may write it.
#[test]
fn a_head_of_its_own_is_read() {
    let _guard = tch::no_grad_guard();
    let root = models();
    let dir = root.path().join("assistant");
    let (path, weights) = (dir.join("config.json"), dir.join("model.safetensors"));
    let mut target = load(root.path(), 3).0;
    let all = context(&mut target, &[(2, &prompt(9)), (0, &prompt(8))], &[5, 6]);
    let tied = propose(load(root.path(), 3).1.as_mut(), &all, &[5, 6]);

    let mut tensors = Tensor::read_safetensors(&weights).unwrap();
    let name =
        |name: &str, tensors: &[(String, Tensor)]| tensors.iter().position(|(own, _)| own == name).unwrap();
    let embedding = name("model.embed_tokens.weight", &tensors);
    tensors.push(("lm_head.weight".into(), tensors[embedding].1.shallow_clone()));
    tensors[embedding].1 = tensors[embedding].1.zeros_like();
    deepspec_models::save(&weights, &tensors, Kind::Float).unwrap();
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config["tie_word_embeddings"] = json!(false);
    fs::write(&path, config.to_string()).unwrap();
    let own = propose(load(root.path(), 3).1.as_mut(), &all, &[5, 6]);
    assert_eq!(own.probs, tied.probs);
    tensors.pop();
    deepspec_models::save(&weights, &tensors, Kind::Float).unwrap();
    assert!(refusal(root.path(), Some("target")).contains("lm_head.weight"));
}

fn decode(root: &Path, drafts: bool, slots: usize, temperature: f64) -> Vec<Completion> {
    let (target, drafter) = load(root, slots);
    let options = EngineOptions {
        slots,
        context: 512,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
        counts_overrun: false,
    };
    let request = |i: usize| Request {
        id: i.to_string(),
        prompt: prompt(1 + 70 * i),
        sampling: Sampling::new(temperature, 5),
        max_new_tokens: 20 + i,
        stop_ids: vec![620],
    };
    Engine::new(target, drafts.then_some(drafter), options)
        .run((0..6).map(request).collect(), |_| {})
        .unwrap()
}

#[test]
fn an_assistant_changes_no_token_at_temperature_0() {
    let root = models();
    let tokens = |completions: &[Completion]| -> Vec<Vec<i64>> {
        completions.iter().map(|completion| completion.tokens.clone()).collect()
    };
    let drafted = decode(root.path(), true, 3, 0.0);
    assert_eq!(tokens(&drafted), tokens(&decode(root.path(), false, 3, 0.0)));
    let proposed: u32 = drafted.iter().flat_map(|done| &done.cycles).map(|cycle| cycle.proposed).sum();
    assert!(proposed > 100, "{proposed}");
}

#[test]
fn proposals_do_not_depend_on_slots() {
    let root = models();
    let cycles = |slots| -> Vec<_> {
        decode(root.path(), true, slots, 1.0).into_iter().map(|done| (done.tokens, done.cycles)).collect()
    };
    let one = cycles(1);
    assert_eq!(one, cycles(2));
    assert_eq!(one, cycles(6));
}

#[test]
fn another_target_and_unknown_settings_are_refused_by_name() {
    let root = models();
    assert!(tree_refusal(&root.path().join("assistant")).unwrap().is_some());
    assert!(refusal(root.path(), None).contains("is read beside its target"));
    let other = root.path().join("other");
    fs::create_dir(&other).unwrap();
    tiny::llama(&other);
    let told = refusal(root.path(), Some("other"));
    assert!(told.contains("it is one of Gemma 4, the target is Llama"), "{told}");
    let path = root.path().join("assistant/config.json");
    let config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let with = |edit: fn(&mut Value)| {
        let mut config = config.clone();
        edit(&mut config);
        fs::write(&path, config.to_string()).unwrap();
        refusal(root.path(), Some("target"))
    };
    let told = with(|config| config["use_ordered_embeddings"] = json!(true));
    assert!(told.contains("use_ordered_embeddings") && told.contains("E2B"), "{told}");
    let told = with(|config| config["text_config"]["num_kv_shared_layers"] = json!(2));
    assert!(told.contains("text_config.num_kv_shared_layers") && told.contains("all 3 layers"), "{told}");
    let told = with(|config| config["text_config"]["layer_types"] = json!(["full_attention"]));
    assert!(told.contains("layer_types"), "{told}");
    let told = with(|config| config["text_config"]["sliding_window"] = json!(64));
    assert!(told.contains("sliding_window 300, the assistant was trained for 64"), "{told}");
    let told = with(|config| config["text_config"]["layer_types"] = json!(vec!["full_attention"; 3]));
    assert!(told.contains("model.layers.0.self_attn.q_proj.weight"), "{told}");
    let told = with(|config| {
        config["text_config"]["per_layer_config"] =
            json!({"1": {"num_key_value_heads": 4}, "2": {"head_dim": 64}});
    });
    assert!(told.contains("in some layers of sliding_attention"), "{told}");
    let told = with(|config| config["backbone_hidden_size"] = Value::Null);
    assert!(told.contains("backbone_hidden_size"), "{told}");
}
