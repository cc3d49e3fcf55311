//! States of vLLM are our own in float32, for every family.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use deepspec_capture::served::{ServedLimits, VllmServer, http_client};
use deepspec_core::Tap;
use deepspec_engine::{ModelInput, Target as _};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_testkit::skip::{python, vllm_python};
use safetensors::SafeTensors;
use tch::{Device, Kind, Tensor};

use crate::common::target_dir;
use crate::server::Server;
use crate::states::{Bench, INTERPRETED, PLAIN};

/// Models of all families, with random weights. Windows are shorter than some prompts. Gated DeltaNet has the only head
/// size that vLLM takes on a CPU, and one head, because Triton's interpreter is slow.
const RANDOM_MODEL: &str = r#"
import shutil, sys, torch, transformers
from transformers import AutoModelForCausalLM
kind, tiny, out = sys.argv[1:]
common = dict(vocab_size=1024, hidden_size=192, intermediate_size=256, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
              head_dim=32, max_position_embeddings=2048, bos_token_id=1018, eos_token_id=1020, pad_token_id=1018, tie_word_embeddings=False)
half = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
hybrid = dict(layer_types=["linear_attention", "full_attention"] * 3, full_attention_interval=2, linear_num_key_heads=1,
              linear_num_value_heads=1, linear_key_head_dim=128, linear_value_head_dim=128)
name, own = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", dict(sliding_window=64)),
    "granite": ("GraniteConfig", dict(embedding_multiplier=6.0, attention_multiplier=0.15, residual_multiplier=0.4, logits_scaling=4.0)),
    "phi3": ("Phi3Config", dict(rope_parameters=half)),
    "gemma3_text": ("Gemma3TextConfig", dict(sliding_window=64, query_pre_attn_scalar=32)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1,
                                         norm_topk_prob=True, mlp_only_layers=[])),
    "gpt_oss": ("GptOssConfig", dict(intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=64)),
    "qwen3_5_text": ("Qwen3_5TextConfig", hybrid),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
                                                      shared_expert_intermediate_size=64, **hybrid)),
}[kind]
torch.manual_seed(0)
config = getattr(transformers, name)(**{**common, **own})
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0, 0.06)
        elif "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif name.endswith("bias") or "sinks" in name:
            parameter.normal_(0, 0.3)
model.save_pretrained(out)
for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
    shutil.copy(f"{tiny}/{file}", out)
"#;

/// Largest difference of two programs' states, relative to the greatest value of a layer.
const CLOSE: f64 = 1e-5;
/// Layers of the recipe, and the last one. vLLM counts from the embedding.
const TAPS: [i64; 4] = [0, 2, 4, 5];

/// Writes a random model with this `model_type` to the folder `model`.
pub fn write_random_model(python: &str, kind: &str, model: &Path) {
    let made =
        Command::new(python).args(["-c", RANDOM_MODEL, kind]).arg(target_dir()).arg(model).output().unwrap();
    assert!(made.status.success(), "{kind}: {}", String::from_utf8_lossy(&made.stderr));
}

/// The states of a server for prompts, in float32 `[tokens, layers, hidden]`.
fn served(server: &Server, folder: &Path, prompts: &[Vec<i32>]) -> Vec<Tensor> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limits = ServedLimits::default();
    let client = Arc::new(VllmServer::new(&http_client(&limits).unwrap(), &server.url, folder, limits));
    let info = runtime.block_on(client.probe(0)).unwrap();
    let states = prompts.iter().map(|ids| {
        let answer = runtime.block_on(client.request(&info, ids)).unwrap();
        let file = SafeTensors::deserialize(&answer.file).unwrap();
        let states = file.tensor("hidden_states").unwrap();
        assert_eq!(states.dtype(), safetensors::Dtype::F32);
        let shape: Vec<i64> = states.shape().iter().map(|&size| size as i64).collect();
        Tensor::from_data_size(states.data(), &shape, Kind::Float)
    });
    states.collect()
}

/// Compares the states of a random model of this `model_type`.
fn check(kind: &str) {
    let (Some(vllm), Some(peers)) = (vllm_python(), python("transformers")) else { return };
    let _no_grad = tch::no_grad_guard();
    let is_hybrid = kind.starts_with("qwen3_5");
    // The interpreter is slow. Prompts of hybrids begin differently: states behind a cached prefix are not compared.
    let (longest, shift) = if is_hybrid { (90, 1) } else { (300, 0) };
    let prompt = |length: i32| (0..length).map(|place| 3 + (place * 37 + shift * length) % 1000).collect();
    let prompts: Vec<Vec<i32>> = [longest, 7, 65].map(prompt).to_vec();
    let models = tempfile::tempdir().unwrap();
    let model = models.path().join(kind);
    write_random_model(&peers, kind, &model);
    let bench = Bench::new("dspark", &model, 8);
    // Gated DeltaNet runs by Triton's kernels.
    let server = bench.start_vllm(&vllm, if is_hybrid { INTERPRETED } else { PLAIN });
    let served = served(&server, &bench.path("states"), &prompts);
    drop(server);
    let taps = Tap::from_layer_ids(TAPS).unwrap();
    let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, taps };
    let mut target = TargetModel::load(&model, &options).unwrap();
    for (ids, served) in prompts.iter().zip(&served) {
        let tokens = Tensor::from_slice(ids).to_kind(Kind::Int64);
        let own = target.forward(&ModelInput { chunks: &[(0, ids.len())], tokens }).captured_states;
        target.truncate(0, 0);
        let own = own.view_as(served);
        for (place, layer) in TAPS.into_iter().enumerate() {
            let [own, served] = [&own, served].map(|states| states.select(1, place as i64));
            let most = own.abs().max().double_value(&[]);
            let off = (&own - served).abs().max().double_value(&[]);
            eprintln!("{kind}, {} tokens, layer {layer}: up to {most:.1}, off by {off:.1e}", ids.len());
            assert!(off <= CLOSE * most, "{kind}, layer {layer}: {off} of {most}");
        }
    }
}

/// Families that vLLM's build for CPUs runs in float32. Prompts of Qwen3.5 need the patch in `scripts/vllm_cpu` for it.
macro_rules! float32_states {
    ($($kind:ident)*) => {
        mod float32_states {
            $(#[test] fn $kind() { super::check(stringify!($kind)); })*
        }
    };
}
float32_states! { qwen2 mistral granite phi3 qwen3 gemma3_text qwen3_moe gpt_oss qwen3_5_text qwen3_5_moe_text }
