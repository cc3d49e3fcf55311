//! Shared by the tests: the built binary, the tiny target, and drafters that need no training.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod gguf;
pub mod greedy;
pub mod training;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int32Type};
use deepspec_checkpoint::DraftVocab;
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, ConfidenceSettings, Convolution, DSpark, DSparkConfig, DSparkSettings, DSparkV4,
    DSparkV4Config, DSparkV4Settings, Domino, DominoConfig, DominoSettings, DraftDecoder, Eagle3,
    Eagle3Config, Eagle3Norms, Eagle3Settings, GruSettings, MarkovKind, MarkovSettings, Mtp, MtpConfig,
    MtpSettings, PEagle, PEagleConfig, PEagleSettings, StageSettings, XPress, XPressConfig, XPressSettings,
};
use deepspec_models::{ModelConfig, TargetModel, TargetOptions, load_embed_and_head, save};
use deepspec_testkit::noise;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// A path relative to the repository's root.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

pub fn target_dir() -> PathBuf {
    repository("assets/tiny-target")
}

/// Runs the built binary on one thread.
pub fn deepspec_eval(args: &[&str]) -> Output {
    deepspec_eval_in(args, &[])
}

/// As [`deepspec_eval`], with these environment variables.
pub fn deepspec_eval_in(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepspec-eval"));
    command.envs(variables.iter().copied()).env("OMP_NUM_THREADS", "1").env_remove("RUST_LOG");
    command.args(args).output().unwrap()
}

/// `run` on the tiny target and our suites, with these additional arguments.
pub fn run(draft: &str, output_dir: &Path, args: &[&str]) -> Output {
    run_on(&target_dir(), draft, output_dir, args)
}

/// Another binary of the workspace.
pub fn program(name: &str) -> Command {
    Command::new(Path::new(env!("CARGO_BIN_EXE_deepspec-eval")).with_file_name(name))
}

/// JSONL of so many conversations, whose answers differ in length.
pub fn conversation_rows(count: usize) -> String {
    let row = |id: usize| {
        let answer = "The answer follows from what was said before. ".repeat(id + 1);
        let said =
            [json!({"role": "user", "content": "Hello?"}), json!({"role": "assistant", "content": answer})];
        json!({"id": id.to_string(), "conversations": said}).to_string() + "\n"
    };
    (0..count).map(row).collect()
}

/// Training rows of a run: the prompts of its rows, with the answers as they were generated.
pub fn answered_rows(output_dir: &Path) -> String {
    let read = |file: PathBuf| -> Vec<Value> {
        let text = fs::read_to_string(file).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let row = |answer: Value| {
        let suite = read(repository(&format!("eval_datasets/{}.jsonl", answer["suite"].as_str().unwrap())));
        let asked = suite.iter().find(|row| row["id"] == answer["id"]).unwrap();
        let said = json!([
            {"role": "user", "content": asked["turns"][0]},
            {"role": "assistant", "content": answer["text"], "token_ids": answer["token_ids"],
                "finish_reason": answer["finish"]},
        ]);
        json!({"id": answer["id"], "conversations": said}).to_string() + "\n"
    };
    read(output_dir.join("outputs.jsonl")).into_iter().map(row).collect()
}

/// As [`run`], with another target.
pub fn run_on(target: &Path, draft: &str, output_dir: &Path, args: &[&str]) -> Output {
    let suites = repository("eval_datasets");
    let mut all = vec!["run", "--quiet", "--device", "cpu", "--dtype", "float32"];
    all.extend(["--target", target.to_str().unwrap(), "--suites-dir", suites.to_str().unwrap()]);
    all.extend(["--draft", draft, "--output-dir", output_dir.to_str().unwrap()]);
    all.extend(args);
    deepspec_eval(&all)
}

/// As [`run`], which must succeed; returns its standard output.
pub fn run_ok(draft: &str, output_dir: &Path, args: &[&str]) -> String {
    let output = run(draft, output_dir, args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// `checkpoint convert` of a drafter of the tiny target, with these additional arguments.
pub fn convert(from: &Path, to: &str, output: &Path, more: &[&str]) -> Output {
    let target = target_dir();
    let mut args = vec!["checkpoint", "convert", "--to", to, "--target", target.to_str().unwrap()];
    args.extend(["--from", from.to_str().unwrap(), "--output-dir", output.to_str().unwrap()]);
    args.extend(more);
    deepspec_eval(&args)
}

/// Asserts this exit code and that the error message contains these words.
pub fn assert_refused(output: &Output, code: i32, words: &[&str]) {
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{told}");
    assert_eq!(told.trim().lines().filter(|line| line.contains("ERROR")).count(), 1, "{told}");
    assert!(words.iter().all(|word| told.contains(word)), "{words:?} not in: {told}");
}

/// Token ids of every answer in a run's `outputs.jsonl`, by `suite/row`.
pub type Answers = BTreeMap<String, Vec<i64>>;

pub fn answers(output_dir: &Path) -> Answers {
    let text = fs::read_to_string(output_dir.join("outputs.jsonl")).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    rows.map(|row| {
        let ids =
            row["token_ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect::<Vec<_>>();
        assert_eq!(row["tokens"], ids.len());
        (format!("{}/{}", row["suite"].as_str().unwrap(), row["id"].as_str().unwrap()), ids)
    })
    .collect()
}

pub fn results(output_dir: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(output_dir.join("results.json")).unwrap()).unwrap()
}

/// The tiny target in float32.
pub fn target(slots: usize, taps: &[Tap]) -> TargetModel {
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots, taps: taps.to_vec() };
    TargetModel::load(&target_dir(), &options).unwrap()
}

/// A DSpark drafter for the tiny target.
pub fn drafter_config() -> DSparkConfig {
    let target = ModelConfig::load(&target_dir()).unwrap();
    DSparkConfig {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None; 1]).unwrap(),
            taps: Tap::from_layer_ids([-1, 2, 5]).unwrap(),
            num_target_layers: target.layers.len(),
        },
        settings: DSparkSettings {
            blocks: BlockSpec {
                block_size: 5,
                slots: SlotTarget::AnchorPredicts,
                mask_token_id: target.vocab_size - 1,
                causal: false,
                num_anchors: 16,
            },
            markov: Some(MarkovSettings { kind: MarkovKind::Vanilla, rank: target.vocab_size }),
            confidence: Some(ConfidenceSettings { with_markov: true }),
        },
    }
}

/// Writes a checkpoint with fresh weights that `edit` changes.
pub fn write_drafter(dir: &Path, config: DSparkConfig, edit: impl Fn(&str, Tensor) -> Tensor) {
    fs::create_dir_all(dir).unwrap();
    let shape = [config.decoder.model.vocab_size, config.decoder.model.hidden_size];
    let config_json = serde_json::to_string(&config.to_json()).unwrap();
    let small = Tensor::from_slice(&noise(1, (shape[0] * shape[1]) as usize)).view(shape) * 0.02;
    let block = DSpark::fresh(config, &small, &small, 1, Kind::Float);
    let tensors: Vec<(String, Tensor)> =
        block.checkpoint().into_iter().map(|(name, tensor)| (name.clone(), edit(&name, tensor))).collect();
    save(&dir.join("model.safetensors"), &tensors, Kind::BFloat16).unwrap();
    fs::write(dir.join("config.json"), config_json).unwrap();
}

/// Writes an untrained Eagle3 drafter of two layers for the tiny target.
pub fn write_eagle3(dir: &Path) {
    write_eagle3_with_vocab(dir, None);
}

/// [`write_eagle3`] with a reduced vocabulary, if one is given.
pub fn write_eagle3_with_vocab(dir: &Path, draft_vocab: Option<&DraftVocab>) {
    let target = ModelConfig::load(&target_dir()).unwrap();
    let config = Eagle3Config {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None, None]).unwrap(),
            taps: Tap::from_layer_ids([0, 2, 5]).unwrap(),
            num_target_layers: target.layers.len(),
        },
        settings: Eagle3Settings {
            ttt_length: 4,
            step_loss_decay: 0.8,
            draft_vocab_size: draft_vocab.map(|vocab| vocab.tokens().len() as i64),
            ..Eagle3Settings::default()
        },
    };
    let (embed, head) = load_embed_and_head(&target_dir(), &target, Device::Cpu, Kind::Float).unwrap();
    let model = Eagle3::fresh_with_draft_vocab(config, (&embed, &head), draft_vocab, 1, Kind::Float);
    fs::create_dir_all(dir).unwrap();
    save(&dir.join("model.safetensors"), &model.checkpoint(), Kind::BFloat16).unwrap();
    let config = serde_json::to_string(&model.config().to_json()).unwrap();
    fs::write(dir.join("config.json"), config).unwrap();
}

/// Writes an untrained Domino drafter for the tiny target.
pub fn write_domino(dir: &Path) {
    let DSparkConfig { decoder, settings } = drafter_config();
    let gru = GruSettings { hidden_size: 24, rank: 16 };
    let config = DominoConfig { decoder, settings: DominoSettings { blocks: settings.blocks, gru } };
    let target = ModelConfig::load(&target_dir()).unwrap();
    let (embed, head) = load_embed_and_head(&target_dir(), &target, Device::Cpu, Kind::Float).unwrap();
    let model = Domino::fresh(config, &embed, &head, 1, Kind::Float);
    // A head that corrects much more than an untrained one does.
    for (name, parameter) in model.parameters() {
        if name.starts_with("prefix_gru.") || name.starts_with("embed_proj.") {
            let _ = tch::no_grad(|| parameter.shallow_clone().g_mul_scalar_(10.0));
        }
    }
    fs::create_dir_all(dir).unwrap();
    save(&dir.join("model.safetensors"), &model.checkpoint(), Kind::BFloat16).unwrap();
    let config = serde_json::to_string(&model.config().to_json()).unwrap();
    fs::write(dir.join("config.json"), config).unwrap();
}

/// Writes an untrained P-EAGLE drafter of two layers for the tiny target.
pub fn write_peagle(dir: &Path) {
    let target = ModelConfig::load(&target_dir()).unwrap();
    let config = PEagleConfig {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None, None]).unwrap(),
            taps: Tap::from_layer_ids([0, 2, 4]).unwrap(),
            num_target_layers: target.layers.len(),
        },
        settings: PEagleSettings {
            num_depths: 4,
            mask_token_id: 1023,
            draft_vocab_size: None,
            norms: Eagle3Norms::default(),
        },
    };
    let (embed, head) = load_embed_and_head(&target_dir(), &target, Device::Cpu, Kind::Float).unwrap();
    let model = PEagle::fresh(config, &embed, &head, 1, Kind::Float);
    fs::create_dir_all(dir).unwrap();
    save(&dir.join("model.safetensors"), &model.checkpoint(), Kind::BFloat16).unwrap();
    let config = serde_json::to_string(&model.config().to_json()).unwrap();
    fs::write(dir.join("config.json"), config).unwrap();
}

/// Writes an untrained MTP-1 drafter for the tiny target.
pub fn write_mtp(dir: &Path) {
    let target = ModelConfig::load(&target_dir()).unwrap();
    let config = MtpConfig {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None]).unwrap(),
            taps: vec![],
            num_target_layers: target.layers.len(),
        },
        settings: MtpSettings { num_speculative_steps: 3, step_weight_beta: 0.6 },
    };
    let (embed, head) = load_embed_and_head(&target_dir(), &target, Device::Cpu, Kind::Float).unwrap();
    let model = Mtp::fresh(config, &embed, &head, 1, Kind::Float);
    fs::create_dir_all(dir).unwrap();
    save(&dir.join("model.safetensors"), &model.checkpoint(), Kind::BFloat16).unwrap();
    let config = serde_json::to_string(&model.config().to_json()).unwrap();
    fs::write(dir.join("config.json"), config).unwrap();
}

/// Writes an untrained xPress drafter for the tiny target, on the layers of DFlash 2, whose refiner changes tokens.
pub fn write_xpress(dir: &Path) {
    write_xpress_with(dir, Some(Convolution::default()));
}

/// [`write_xpress`] with these convolutions; on the layers of DFlash without any.
pub fn write_xpress_with(dir: &Path, convolution: Option<Convolution>) {
    let target = ModelConfig::load(&target_dir()).unwrap();
    let config = XPressConfig {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None]).unwrap(),
            taps: Tap::from_layer_ids([0, 2, 4]).unwrap(),
            num_target_layers: target.layers.len(),
        },
        settings: XPressSettings {
            blocks: BlockSpec {
                block_size: 5,
                slots: SlotTarget::FillIn,
                mask_token_id: 1023,
                causal: false,
                num_anchors: 8,
            },
            rank: 16,
            mlp_ratio: 2,
            num_passes: 3,
            convolution,
        },
    };
    let (embed, head) = load_embed_and_head(&target_dir(), &target, Device::Cpu, Kind::Float).unwrap();
    let model = XPress::fresh(config, &embed, &head, 1, Kind::Float);
    for (seed, (name, parameter)) in model.parameters().iter().enumerate() {
        if name.starts_with("xpress_head.") {
            let values = Tensor::from_slice(&noise(seed as u64, parameter.numel())).view_as(parameter);
            let _ = parameter.shallow_clone().g_add_(&(values * 0.2));
        }
    }
    fs::create_dir_all(dir).unwrap();
    save(&dir.join("model.safetensors"), &model.checkpoint(), Kind::BFloat16).unwrap();
    let config = serde_json::to_string(&model.config().to_json()).unwrap();
    fs::write(dir.join("config.json"), config).unwrap();
}

/// Small stages of DSpark of DeepSeek-V4, with a window that texts are longer than.
pub fn small_stages() -> StageSettings {
    StageSettings {
        num_attention_heads: 4,
        head_dim: 32,
        qk_rope_head_dim: 16,
        q_lora_rank: 32,
        o_lora_rank: 16,
        o_groups: 2,
        sliding_window: 16,
        n_routed_experts: 4,
        num_experts_per_tok: 2,
        moe_intermediate_size: 32,
        hc_sinkhorn_iters: 4,
        ..StageSettings::default()
    }
}

/// Settings of a DSpark drafter of DeepSeek-V4 for the tiny target.
pub fn dspark_v4_settings() -> DSparkV4Settings {
    let blocks = BlockSpec {
        block_size: 5,
        slots: SlotTarget::AnchorPredicts,
        mask_token_id: 1023,
        causal: false,
        num_anchors: 24,
    };
    DSparkV4Settings { blocks, markov_rank: 16, stages: small_stages() }
}

/// Writes an untrained DSpark drafter of DeepSeek-V4 for the tiny target.
pub fn write_dspark_v4(dir: &Path) {
    let target = ModelConfig::load(&target_dir()).unwrap();
    let config = DSparkV4Config {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None]).unwrap(),
            taps: Tap::from_layer_ids([0, 2, 4]).unwrap(),
            num_target_layers: target.layers.len(),
        },
        settings: dspark_v4_settings(),
    };
    let (embed, head) = load_embed_and_head(&target_dir(), &target, Device::Cpu, Kind::Float).unwrap();
    let model = DSparkV4::fresh(config, &embed, &head, 1, Kind::Float);
    fs::create_dir_all(dir).unwrap();
    save(&dir.join("model.safetensors"), &model.checkpoint(), Kind::BFloat16).unwrap();
    let config = serde_json::to_string(&model.config().to_json()).unwrap();
    fs::write(dir.join("config.json"), config).unwrap();
}

/// Writes a drafter that is often right: its Markov head contains the bigrams of these texts. Its
/// backbone adds noise that depends on the context.
pub fn write_bigram_drafter<'a>(dir: &Path, texts: impl Iterator<Item = &'a Vec<i64>>) {
    write_confident_drafter(dir, texts, |_, tensor| tensor);
}

/// As [`write_bigram_drafter`], with a confidence head changed by `edit` (`weight` or `bias`, and
/// the tensor).
pub fn write_confident_drafter<'a>(
    dir: &Path,
    texts: impl Iterator<Item = &'a Vec<i64>>,
    edit: impl Fn(&str, Tensor) -> Tensor,
) {
    let config = drafter_config();
    let vocab = config.decoder.model.vocab_size;
    let counts = Tensor::full([vocab, vocab], 5e-4, (Kind::Float, Device::Cpu)); // [previous, next]
    for text in texts {
        let pair = |offset: i64| Tensor::from_slice(&text[offset as usize..text.len() - 1 + offset as usize]);
        let ones = Tensor::ones([text.len() as i64 - 1], (Kind::Float, Device::Cpu));
        let _ = counts.shallow_clone().index_put_(&[Some(pair(0)), Some(pair(1))], &ones, true);
    }
    let logits = counts.log();
    write_drafter(dir, config, |name, tensor| match name {
        "markov_head.markov_w1.weight" => Tensor::eye(vocab, (Kind::Float, Device::Cpu)),
        "markov_head.markov_w2.weight" => logits.transpose(0, 1).contiguous(), // [next, previous]
        _ => match name.strip_prefix("confidence_head.proj.") {
            Some(part) => edit(part, tensor),
            None => tensor,
        },
    });
}

/// A row of `traces.parquet`.
pub struct Trace {
    pub suite: String,
    pub sample: String,
    pub proposed: i32,
    pub accepted: i32,
    pub committed: i32,
    /// The number of confidences.
    pub confidences: i32,
    pub usable: i32,
}

/// Reads and checks the rows of a `traces.parquet`.
pub fn traces(path: &Path) -> Vec<Trace> {
    let reader =
        ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap().build().unwrap();
    let (mut rows, mut previous) = (vec![], None);
    for batch in reader {
        let batch = batch.unwrap();
        let column = |name: &str| batch.column_by_name(name).unwrap_or_else(|| panic!("no column {name}"));
        let integer = |name: &str, row: usize| column(name).as_primitive::<Int32Type>().value(row);
        for row in 0..batch.num_rows() {
            let confidences = column("confidences").as_list::<i32>().value(row);
            let confidences = confidences.as_primitive::<Float32Type>();
            assert!(confidences.values().iter().all(|c| (0.0..=1.0).contains(c)));
            let cycle = integer("cycle", row);
            assert!(cycle == 0 || Some(cycle - 1) == previous);
            previous = Some(cycle);
            assert!(!column("sample").as_string::<i32>().value(row).is_empty());
            rows.push(Trace {
                sample: column("sample").as_string::<i32>().value(row).into(),
                suite: column("suite").as_string::<i32>().value(row).into(),
                proposed: integer("proposed", row),
                accepted: integer("accepted", row),
                committed: integer("committed", row),
                confidences: confidences.len() as i32,
                usable: integer("usable", row),
            });
        }
    }
    rows
}
