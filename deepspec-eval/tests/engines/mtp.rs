//! Targets with an MTP-1 drafter in their own checkpoint, as `checkpoint merge-mtp` writes them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use deepspec_testkit::skip::{Kind as Skipped, python, skip, vllm_python};
use tempfile::TempDir;

use crate::common::training::{Lessons, MTP_DRAFTS, smoke, write_mtp_drafter};
use crate::common::{answers, deepspec_eval, repository};
use crate::families::write_random_model;
use crate::llama_cpp::{Llama, agrees_with, llama_server};
use crate::vllm::vllm_answers;
use crate::{ANSWER, FEWER, accepted};

/// llama.cpp's converter of targets. The toy's vocabulary is not in its list of known pre-tokenizers.
const CONVERTER: &str = r#"
import sys
sys.path.insert(0, sys.argv[1])
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
import convert_hf_to_gguf
sys.argv = ["convert_hf_to_gguf.py", sys.argv[2], "--outtype", "f32", "--outfile", sys.argv[3]]
convert_hf_to_gguf.main()
"#;

/// A random hybrid of Qwen3.5 with a drafter that has learned most of its greedy answers.
fn merged_target(peers: &str) -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let [target, drafter, merged] = ["target", "drafter", "merged"].map(|name| root.path().join(name));
    write_random_model(peers, "qwen3_5_text", &target);
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

#[test]
fn llama_cpp_drafts_with_a_merged_mtp_layer_cycle_by_cycle() {
    let (Some(server), Some(peers)) = (llama_server(), python("transformers")) else { return };
    let Some(converter) = env::var_os("DEEPSPEC_LLAMA_CONVERTER").map(PathBuf::from) else {
        return skip(Skipped::Long, "it needs llama.cpp's converter: scripts/test.sh --engines");
    };
    let (root, merged) = merged_target(&peers);
    let file = root.path().join("merged.gguf");
    let mut command = Command::new(&peers);
    command.args(["-c", CONVERTER]).args([converter.parent().unwrap(), &merged, &file]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let count = MTP_DRAFTS.to_string();
    let file = file.to_str().unwrap();
    let llama =
        Llama::start(&server, &["--model", file, "--spec-type", "draft-mtp", "--spec-draft-n-max", &count]);
    // Logits of the random target are close to each other.
    agrees_with(&llama, &merged, Path::new("mtp"), FEWER, 3);
}

/// vLLM's build for CPUs computes hybrids in bfloat16, in which two programs round differently. Cycles are compared up to the first
/// token that differs.
#[test]
fn vllm_drafts_with_a_merged_mtp_layer_cycle_by_cycle() {
    const TOKENS: usize = 32;
    let (Some(vllm), Some(peers)) = (vllm_python(), python("transformers")) else { return };
    let (root, merged) = merged_target(&peers);
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
