//! `serve --draft` gives the same answers with speculative decoding.

use std::fs;
use std::path::Path;

use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, DSpark, DSparkConfig, DSparkSettings, DraftDecoder, MarkovKind, MarkovSettings,
};
use deepspec_models::{ModelConfig, load_embed_and_head, save};
use deepspec_testkit::noise;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::http::{Http, ask};
use crate::process::{Server, text, tiny};

/// An untrained block drafter with the target's embeddings: it is nearly always wrong.
fn untrained(dir: &Path) {
    let target = ModelConfig::load(tiny().as_ref()).unwrap();
    let config = DSparkConfig {
        decoder: DraftDecoder {
            model: target.draft_decoder(&[None; 1]).unwrap(),
            taps: Tap::from_layer_ids([-1, 2, 5]).unwrap(),
            num_target_layers: target.layers.len(),
        },
        settings: DSparkSettings {
            blocks: BlockSpec {
                block_size: 4,
                slots: SlotTarget::AnchorPredicts,
                mask_token_id: target.vocab_size - 1,
                causal: false,
                num_anchors: 16,
            },
            markov: Some(MarkovSettings { kind: MarkovKind::Vanilla, rank: 16 }),
            confidence: None,
        },
    };
    let (embed, head) = load_embed_and_head(tiny().as_ref(), &target, Device::Cpu, Kind::Float).unwrap();
    let json = serde_json::to_string(&config.to_json()).unwrap();
    let block = DSpark::fresh(config, &embed, &head, 1, Kind::Float);
    save(&dir.join("model.safetensors"), &block.checkpoint(), Kind::BFloat16).unwrap();
    fs::write(dir.join("config.json"), json).unwrap();
}

/// The target with noisy weights as a drafting language model: it is often right.
pub fn noisy_twin(dir: &Path) {
    for (name, bytes) in deepspec_testkit::folder::files(tiny().as_ref()) {
        fs::write(dir.join(name), bytes).unwrap();
    }
    let path = dir.join("model.safetensors");
    let disturbed = |(seed, (name, tensor)): (usize, (String, Tensor))| {
        let tensor = tensor.to_kind(Kind::Float);
        let random = Tensor::from_slice(&noise(seed as u64, tensor.numel())).view_as(&tensor);
        (name, &tensor * (1.0 + 0.1 * random))
    };
    let tensors: Vec<(String, Tensor)> =
        Tensor::read_safetensors(&path).unwrap().into_iter().enumerate().map(disturbed).collect();
    fs::remove_file(&path).unwrap();
    save(&path, &tensors, Kind::BFloat16).unwrap();
}

fn requests() -> Vec<Value> {
    let prompts = [
        "Dorothea has 11 postcards. Sebastian has 14 more than Dorothea. What is the total number of postcards?",
        "Hello?",
        "Write a function that adds two numbers.",
        "What is 3 + 4?",
    ];
    let mut requests: Vec<Value> = prompts.iter().map(|prompt| ask(prompt, 48)).collect();
    let mut thinking = ask(prompts[0], 70);
    thinking["chat_template_kwargs"] = json!({});
    let mut endless = ask(prompts[1], 60);
    endless["ignore_eos"] = json!(true);
    let mut stopped = ask(prompts[2], 48);
    stopped["stop"] = json!(["return", "\n\n"]);
    requests.extend([thinking, endless, stopped]);
    requests
}

/// The text of a streamed answer, and its finish reason.
fn streamed(http: &Http, server: &Server, body: &Value) -> (String, Value) {
    let mut said = (String::new(), Value::Null);
    for chunk in http.stream(&server.url, body.clone()) {
        let Ok(chunk) = serde_json::from_str::<Value>(&chunk) else { continue };
        let choice = &chunk["choices"][0];
        said.0.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        if !choice["finish_reason"].is_null() {
            said.1 = choice["finish_reason"].clone();
        }
    }
    said
}

#[test]
fn drafted_answers_are_the_targets_own() {
    let (http, requests) = (Http::new(), requests());
    let plain = Server::start(&[]);
    let expected: Vec<Value> = requests.iter().map(|body| http.complete(&plain.url, body)).collect();
    let drafters: [fn(&Path); 2] = [untrained, noisy_twin];
    for write in drafters {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let server = Server::start(&["--max-num-seqs", "3", "--draft", &text(dir.path())]);
        let together = http.complete_together(&server.url, &requests);
        for ((body, expected), together) in requests.iter().zip(&expected).zip(&together) {
            let alone = http.complete(&server.url, body);
            for found in [together, &alone] {
                assert_eq!((&found["choices"], &found["usage"]), (&expected["choices"], &expected["usage"]));
            }
            let choice = &expected["choices"][0];
            let (text, finish) = streamed(&http, &server, body);
            assert_eq!(
                (json!(text), &finish),
                (choice["message"]["content"].clone(), &choice["finish_reason"])
            );
        }
    }
}
