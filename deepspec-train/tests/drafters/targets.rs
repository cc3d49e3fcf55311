//! Drafters for targets of other families than the toy's.

use std::fs;
use std::path::Path;

use deepspec_capture::ForwardLimits;
use deepspec_models::{ModelConfig, Weights};
use deepspec_testkit::golden::arrays;
use deepspec_testkit::tiny;
use serde_json::{Value, json};
use tch::{Device, Kind};

use crate::common::decoding::{greedy, loads};
use crate::common::{self, Bench};
use crate::{DFLASH, EAGLE3, XPRESS, config, last_metrics, set, step};

/// DSpark and Eagle3 for a Gemma 4 target that computes its hidden states during training.
#[test]
fn gemma4_targets_have_drafters() {
    let bench = Bench::new();
    let gemma = bench.path("gemma");
    fs::create_dir(&gemma).unwrap();
    tiny::gemma4(&gemma, 512);
    let target = format!("target.model={}", gemma.display());
    let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
    let common = [
        target.as_str(),
        input.as_str(),
        "target.layer_ids=[1, 3]",
        "data.states=online",
        "data.chat_template=gemma4",
        "data.max_length=512",
        "train.max_train_steps=4",
    ];
    for (drafter, class) in
        [("drafter.dspark.mask_token_id=4", "Gemma4DSparkModel"), (EAGLE3, "Gemma4Eagle3Model")]
    {
        bench.succeeds(&[set(&[&common[..], &[drafter]].concat()), vec!["--overwrite"]].concat());
        let saved = config(&bench, 4);
        assert_eq!(saved["architectures"], json!([class]));
        assert_eq!(
            (&saved["model_type"], &saved["target_model_type"]),
            (&json!("gemma4_text"), &json!("gemma4_unified"))
        );
        assert!(arrays(&step(&bench, 4).join("model.safetensors")).contains_key("layers.0.layer_scalar"));
        loads(&bench);
    }
}

/// With a chat format from the recipe or the template's own marks, and with the accepted length
/// measured during training. Drafting changes no token.
#[test]
fn llama_targets_have_drafters() {
    let bench = Bench::new();
    let llama = bench.path("llama");
    fs::create_dir(&llama).unwrap();
    tiny::llama(&llama);
    let target = format!("target.model={}", llama.display());
    let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
    let suites = format!("suites_dir: '{}'", common::workspace().join("eval_datasets").display());
    let eval = format!("eval={{{suites}, suites: [smoke-math], limit: 2, max_new_tokens: 8}}");
    let template = fs::read_to_string(llama.join("chat_template.jinja")).unwrap();
    let answer = "{{- ns.answer.lstrip('\\n') -}}";
    assert!(template.contains(answer));
    let tagged = format!("{{%- generation -%}}{answer}{{%- endgeneration -%}}");
    fs::write(llama.join("chat_template.jinja"), template.replace(answer, &tagged)).unwrap();
    let common = [
        target.as_str(),
        input.as_str(),
        "target.layer_ids=[embedding, 1]",
        "data.states=online",
        "train.max_train_steps=4",
        "logging.eval_every=4",
        eval.as_str(),
    ];
    let dspark = "drafter.dspark.num_anchors=6";
    let marks = "data.chat_template={name: mine, assistant_header: \"<|im_start|>assistant\\n\", end_of_turn: \"<|im_end|>\\n\"}";
    let own = "data.chat_template=generation";
    // Block drafters have the Qwen3 layers that engines run, although the target is a Llama.
    for (drafter, class, model_type, rules) in [
        (dspark, "Qwen3DSparkModel", "qwen3", marks),
        (dspark, "Qwen3DSparkModel", "qwen3", own),
        (DFLASH, "Qwen3DSparkModel", "qwen3", marks),
        (XPRESS, "Qwen3XPressModel", "qwen3", marks),
        (EAGLE3, "LlamaEagle3Model", "llama", own),
    ] {
        bench.succeeds(&[set(&[&common[..], &[drafter, rules]].concat()), vec!["--overwrite"]].concat());
        let tau = last_metrics(&bench)["eval"]["tau"].as_f64().unwrap();
        assert!(tau >= 1.0, "{tau}");
        let saved = config(&bench, 4);
        assert_eq!(
            (&saved["architectures"], &saved["model_type"], &saved["rope_scaling"]["rope_type"]),
            (&json!([class]), &json!(model_type), &json!("llama3"))
        );
        let tensors = arrays(&step(&bench, 4).join("model.safetensors"));
        assert!(tensors.contains_key("layers.0.self_attn.q_proj.weight"));
        assert_eq!(tensors.contains_key("layers.0.self_attn.q_norm.weight"), model_type == "qwen3");
        let (plain, drafted) = (greedy(&llama, None), greedy(&llama, Some(loads(&bench))));
        assert_eq!(plain, drafted, "{class}");
    }
}

/// The plan counts weights, KV cache, and recurrent states of a target that runs beside the trainer. The longest sample is not known here,
/// so that some length has to give the plan's figure.
fn check_target_memory(dir: &Path, plan: &Value) {
    let config = ModelConfig::load(dir).unwrap();
    let weights = Weights::open_target(dir, "a test", Device::Cpu, Kind::Float).unwrap().value_count() * 4;
    let planned = plan["memory"]["target"].as_u64().unwrap() as usize;
    let bytes = |tokens: usize| {
        let sequences = ForwardLimits::new(tokens, Device::Cpu).sequences;
        let states = config.linear_attention_bytes(sequences, Kind::Float);
        (weights + 4 * config.kv_cache_numel(sequences, tokens), states)
    };
    let is_planned = |tokens: usize| bytes(tokens).0 + bytes(tokens).1 == planned;
    assert!((1..=512).any(is_planned), "{planned} of {}", dir.display());
    let has_states = config.linear_attention_bytes(1, Kind::Float) > 0;
    assert!(
        !has_states || (1..=512).all(|tokens| bytes(tokens).0 != planned),
        "{planned} of {}",
        dir.display()
    );
}

/// Targets of families whose own layers no engine runs in a drafter. Block drafters have layers of Qwen3, others those
/// of Llama. Drafting changes no token.
#[test]
fn targets_of_other_families_have_drafters_that_engines_run() {
    for family in tiny::OTHER_FAMILIES {
        let bench = Bench::new();
        let dir = bench.path(family);
        fs::create_dir(&dir).unwrap();
        tiny::target(&dir, family);
        let target = format!("target.model={}", dir.display());
        let input = format!("data.input=['{}']", bench.path("rows.jsonl").display());
        let marks = "data.chat_template={name: mine, assistant_header: \"<|im_start|>assistant\\n\", end_of_turn: \"<|im_end|>\\n\"}";
        let common = [
            target.as_str(),
            input.as_str(),
            marks,
            "target.layer_ids=[embedding, 1]",
            "data.states=online",
            "train.max_train_steps=4",
        ];
        let plain = greedy(&dir, None);
        for (drafter, class, model_type) in [
            ("drafter.dspark.num_anchors=6", "Qwen3DSparkModel", "qwen3"),
            (EAGLE3, "LlamaEagle3Model", "llama"),
        ] {
            let changes = set(&[&common[..], &[drafter]].concat());
            let plan = bench.run(&[&changes[..], &["--plan", "--json"]].concat());
            assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
            check_target_memory(&dir, &serde_json::from_slice(&plan.stdout).unwrap());
            bench.succeeds(&[&changes[..], &["--overwrite"]].concat());
            assert!(bench.losses().iter().all(|loss| loss.is_finite()));
            let saved = config(&bench, 4);
            assert_eq!(
                (&saved["architectures"], &saved["model_type"]),
                (&json!([class]), &json!(model_type)),
                "{family}"
            );
            // Engines give no factor to a drafter's embeddings and logits.
            for key in ["embedding_multiplier", "logits_scaling", "text_config"] {
                assert!(saved.get(key).is_none(), "{family}: {key}");
            }
            assert_eq!(plain, greedy(&dir, Some(loads(&bench))), "{family}: {class}");
        }
    }
}
