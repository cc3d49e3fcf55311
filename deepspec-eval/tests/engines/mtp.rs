//! Targets with an MTP-1 drafter in their own checkpoint, as `checkpoint merge-mtp` writes them, and assistants of Gemma 4.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_checkpoint::gguf::GgufFile;
use deepspec_testkit::skip::{Kind as Skipped, python, skip, vllm_python};
use deepspec_testkit::tiny;
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};
use serde_json::{Value, json};
use tch::{Kind, Tensor};
use tempfile::TempDir;

use crate::common::training::{Lessons, MTP_DRAFTS, smoke, write_assistant, write_mtp_drafter};
use crate::common::{answers, deepspec_eval, repository};
use crate::families::write_random_model;
use crate::llama_cpp::{Llama, agrees_with, llama_server};
use crate::vllm::vllm_answers;
use crate::{ANSWER, FEWER, accepted};

/// llama.cpp's converter of targets. The toy's vocabulary is not in its list of known pre-tokenizers, and Gemma's is padded to the rows
/// of the embedding.
const CONVERTER: &str = r#"
import json, sys
sys.path.insert(0, sys.argv[1])
import convert_hf_to_gguf
from conversion import base

gguf = base.gguf
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
config = json.load(open(sys.argv[2] + "/config.json"))
rows = config.get("text_config", config)["vocab_size"]

def padded(name, value):
    add = getattr(gguf.GGUFWriter, name)
    setattr(gguf.GGUFWriter, name, lambda self, given: add(self, [*given, *(value(at) for at in range(len(given), rows))]))

padded("add_token_list", lambda at: f"[PAD{at}]".encode())
padded("add_token_scores", lambda at: -1e4)
padded("add_token_types", lambda at: gguf.TokenType.UNUSED)
sys.argv = ["convert_hf_to_gguf.py", sys.argv[2], "--outtype", "f32", "--outfile", sys.argv[3]]
convert_hf_to_gguf.main()
"#;

/// llama.cpp's converter and a Python for it.
struct Converter {
    python: String,
    script: PathBuf,
}

impl Converter {
    /// Converts the folder of a model; returns the file beside it.
    fn convert(&self, folder: &Path) -> String {
        let file = folder.with_extension("gguf");
        let mut command = Command::new(&self.python);
        command.args(["-c", CONVERTER]).args([self.script.parent().unwrap(), folder, &file]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        file.display().to_string()
    }
}

/// llama.cpp's server and its converter; None skips the test.
fn llama_cpp() -> Option<(PathBuf, Converter)> {
    let (server, python) = (llama_server()?, python("transformers")?);
    let script = env::var_os("DEEPSPEC_LLAMA_CONVERTER").map(PathBuf::from);
    if script.is_none() {
        skip(Skipped::Long, "it needs llama.cpp's converter: scripts/test.sh --engines");
    }
    Some((server, Converter { python, script: script? }))
}

/// Hybrids of Qwen3.5, dense and with experts.
const HYBRIDS: [&str; 2] = ["qwen3_5_text", "qwen3_5_moe_text"];

/// A random hybrid of this `model_type`, with a drafter that has learned most of its greedy answers.
fn merged_target(peers: &str, kind: &str) -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let [target, drafter, merged] = ["target", "drafter", "merged"].map(|name| root.path().join(name));
    write_random_model(peers, kind, &target);
    let lessons =
        Lessons { target: target.clone(), suites: smoke(), rows: 0..FEWER, tokens: ANSWER, thinking: false };
    write_mtp_drafter(&lessons, &drafter, 100);
    let folders = [("--draft", &drafter), ("--target", &target), ("--output-dir", &merged)];
    let mut args = vec!["checkpoint", "merge-mtp"];
    args.extend(folders.iter().flat_map(|(flag, folder)| [flag, folder.to_str().unwrap()]));
    let output = deepspec_eval(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (root, merged)
}

/// The MTP layer's own tensors in llama.cpp, below `blk.N.nextn`, and here, below `mtp`.
const MTP_NAMES: [(&str, &str); 4] = [
    ("eh_proj", "fc"),
    ("enorm", "pre_fc_norm_embedding"),
    ("hnorm", "pre_fc_norm_hidden"),
    ("shared_head_norm", "norm"),
];

/// The file's layer after the target's is the MTP layer of the merged checkpoint. Checkpoints of Qwen3.5 store the weights of norms
/// minus 1, and the converter adds 1.
fn holds_the_mtp_layer(file: &str, merged: &Path) {
    let (gguf, ours) = (
        GgufFile::open(Path::new(file)).unwrap(),
        Tensor::read_safetensors(merged.join("model.safetensors")).unwrap(),
    );
    let architecture = gguf.text("general.architecture").unwrap().unwrap();
    let count = |key: &str| gguf.count(&format!("{architecture}.{key}")).unwrap().unwrap();
    assert_eq!(count("nextn_predict_layers"), 1);
    let layer = count("block_count") - 1;
    for (theirs, name) in MTP_NAMES {
        let theirs = format!("blk.{layer}.nextn.{theirs}.weight");
        let (_, stored) = ours.iter().find(|(own, _)| *own == format!("mtp.{name}.weight")).unwrap();
        let stored = stored.to_kind(Kind::Float);
        let expected = if name == "fc" { stored } else { stored + 1.0 };
        let values = Tensor::from_data_size(&gguf.values(&theirs).unwrap(), &expected.size(), Kind::Float);
        assert!(values.equal(&expected), "{theirs}");
    }
}

#[test]
fn llama_cpp_drafts_with_a_merged_mtp_layer_cycle_by_cycle() {
    let Some((server, converter)) = llama_cpp() else { return };
    let count = MTP_DRAFTS.to_string();
    for kind in HYBRIDS {
        let (_root, merged) = merged_target(&converter.python, kind);
        let file = converter.convert(&merged);
        holds_the_mtp_layer(&file, &merged);
        let flags = ["--model", &file, "--spec-type", "draft-mtp", "--spec-draft-n-max", &count];
        let llama = Llama::start(&server, &flags);
        agrees_with(&|prompt| llama.answer(prompt), &merged, Path::new("mtp"), FEWER, 0);
    }
}

#[test]
fn llama_cpp_drafts_with_a_trained_assistant_cycle_by_cycle() {
    let Some((server, converter)) = llama_cpp() else { return };
    let root = tempfile::tempdir().unwrap();
    let [target, assistant] = ["target", "assistant"].map(|name| root.path().join(name));
    fs::create_dir(&target).unwrap();
    tiny::gemma4(&target, 512);
    // Published configs name all keys of transformers, and the converter asks for these.
    let config = target.join("config.json");
    let mut full: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    let keys = json!({"moe_intermediate_size": null, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}});
    full["text_config"].as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    fs::write(&config, full.to_string()).unwrap();
    let lessons =
        Lessons { target: target.clone(), suites: smoke(), rows: 0..FEWER, tokens: ANSWER, thinking: false };
    write_assistant(&lessons, &assistant, 100);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(target.join(file), assistant.join(file)).unwrap();
    }
    let [model, draft] = [&target, &assistant].map(|folder| converter.convert(folder));
    let flags = ["--model", &model, "--model-draft", &draft, "--spec-type", "draft-mtp"];
    let llama = Llama::start(&server, &[&flags[..], &["--spec-draft-n-max", "7"]].concat());
    let tokenizer = ChatTokenizer::load(&target).unwrap();
    let answer = |prompt: &str| {
        let prompt = [Message::new(Role::User, prompt)];
        llama.answer_ids(&generation_prompt(&tokenizer, &prompt, None, Some(false)).unwrap())
    };
    agrees_with(&answer, &target, &assistant, FEWER, 0);
}

/// vLLM's build for CPUs computes hybrids in bfloat16, in which two programs round differently. Cycles are compared up to the first
/// token that differs.
#[test]
fn vllm_drafts_with_a_merged_mtp_layer_cycle_by_cycle() {
    const TOKENS: usize = 32;
    let (Some(vllm), Some(peers)) = (vllm_python(), python("transformers")) else { return };
    let (root, merged) = merged_target(&peers, HYBRIDS[0]);
    let run = root.path().join("run");
    let (suites, limit, most) = (repository("eval_datasets"), FEWER.to_string(), TOKENS.to_string());
    let mut args = vec!["run", "--quiet", "--device", "cpu", "--dtype", "bfloat16", "--temperature", "0"];
    args.extend(["--target", merged.to_str().unwrap(), "--draft", "mtp", "--no-baseline"]);
    args.extend(["--suites-dir", suites.to_str().unwrap(), "--output-dir", run.to_str().unwrap()]);
    args.extend(["--limit", &limit, "--max-new-tokens", &most]);
    args.extend(["--suite", "smoke-math", "--suite", "smoke-code", "--suite", "smoke-chat"]);
    let output = deepspec_eval(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (own_answers, own_cycles) = (answers(&run), accepted(&run.join("traces.parquet")));

    let count = MTP_DRAFTS.to_string();
    let (mut compared, mut drafted) = (0, 0);
    for (key, (ids, cycles)) in vllm_answers(&vllm, &merged, &["mtp", "-", &count], FEWER, TOKENS) {
        let own = &own_answers[&format!("{}/{}", key.0, key.1)];
        let equal = own.iter().zip(&ids).take_while(|(own, theirs)| own == theirs).count();
        // The first token is the prefill's. A cycle that reaches the end may be cut.
        let mut tokens = 1;
        for (own, theirs) in own_cycles[&key].iter().zip(&cycles) {
            tokens += *own as usize + 1;
            if tokens > equal || tokens >= TOKENS {
                break;
            }
            assert_eq!(own, theirs, "{key:?}: {cycles:?} there, {:?} here", own_cycles[&key]);
            (compared, drafted) = (compared + 1, drafted + own);
        }
    }
    eprintln!("{compared} equal cycles with {drafted} accepted tokens");
    assert!(compared > 40 && drafted > 30, "{compared} cycles with {drafted} accepted tokens");
}
