//! A server that behaves like vLLM with its hidden-states connector, and fails on demand.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use deepspec_core::Tap;
use deepspec_engine::{ModelInput, Target};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_testkit::server::{ReceivedRequest, Reply, Server};
use deepspec_text::{ChatTokenizer, Message, generation_prompt};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

/// Version that the fake reports.
const VERSION: &str = "0.32.0";
const MAX_MODEL_LEN: usize = 2048;
/// Most tokens of an answer to a chat.
const MAX_ANSWER: usize = 40;
/// Number of layers of the tiny target.
const LAYERS: u32 = 6;

/// A fault of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Writes the file some time after the answer, and holds the lock until then.
    Late(Duration),
    /// Releases the lock without a file, as on a full disk.
    NoFile,
    /// Resets the connection and leaves a file behind.
    Aborted,
    /// One layer too few.
    WrongSlots,
    /// Two equal layers.
    EqualSlots,
    /// A layer of zeros.
    ZeroSlot,
    /// The tokens of another prompt.
    OtherTokens,
    /// The second-to-last layer in place of the last.
    EarlyLayer,
    /// The log-probability of other weights.
    OtherProbability,
    /// A path outside the folder.
    OutsidePath,
    /// An answer to a chat without text.
    Empty,
    /// HTTP 400.
    Refused,
    /// HTTP 500.
    Error,
    /// Answers without the connector.
    NoConnector,
}

/// The state of a fake server.
pub struct FakeVllm {
    target: Mutex<TargetModel>,
    tokenizer: ChatTokenizer,
    folder: PathBuf,
    ids: Vec<u32>,
    faults: Box<dyn Fn(usize) -> Fault + Send + Sync>,
    writers: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl FakeVllm {
    /// Starts a server for the target in `model` with the given layer ids. `faults` returns the
    /// fault of the n-th completion request.
    pub fn start(
        model: &Path,
        folder: &Path,
        ids: &[u32],
        faults: impl Fn(usize) -> Fault + Send + Sync + 'static,
    ) -> (Server, Arc<Self>) {
        let taps: Vec<Tap> = (-1..i64::from(LAYERS)).filter_map(Tap::from_layer_id).collect();
        let options = TargetOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, taps };
        let target = Mutex::new(TargetModel::load(model, &options).unwrap());
        let tokenizer = ChatTokenizer::load(model).unwrap();
        fs::create_dir_all(folder).unwrap();
        let (folder, ids) = (folder.to_path_buf(), ids.to_vec());
        let fake = Arc::new(Self {
            target,
            tokenizer,
            folder,
            ids,
            faults: Box::new(faults),
            writers: Mutex::default(),
        });
        let shared = Arc::clone(&fake);
        let completions = Mutex::new(0);
        let models = json!([{"id": "tiny", "max_model_len": MAX_MODEL_LEN}]);
        let server = Server::start_with_models(models, move |request| match request.path.as_str() {
            "/version" => Reply::Json(json!({"version": VERSION})),
            "/v1/completions" | "/v1/chat/completions" => {
                let number = {
                    let mut completions = completions.lock().unwrap();
                    *completions += 1;
                    *completions - 1
                };
                match request.path.contains("chat") {
                    true => shared.chat(number, &request),
                    false => shared.complete(number, &request),
                }
            }
            other => Reply::Status(404, vec![], format!("no {other}")),
        });
        (server, fake)
    }

    /// Waits until all late files are written.
    pub fn finish_writes(&self) {
        self.writers.lock().unwrap().drain(..).for_each(|writer| writer.join().unwrap());
    }

    fn complete(&self, number: usize, request: &ReceivedRequest) -> Reply {
        let fault = (self.faults)(number);
        let prompt = &request.body["prompt"];
        let ids: Vec<i64> = prompt.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
        match fault {
            Fault::Refused => {
                return Reply::Status(
                    400,
                    vec![],
                    json!({"error": {"message": "the prompt is too long"}}).to_string(),
                );
            }
            Fault::Error => return Reply::Status(500, vec![], "internal".into()),
            _ => {}
        }
        let (states, sampled, log_prob) = self.forward(&ids, fault);
        let answer = json!({
            "choices": [{"prompt_token_ids": prompt, "token_ids": [sampled], "logprobs": {"token_logprobs": [log_prob]}}],
        });
        self.answer_with_file(number, fault, answer, &states, ids)
    }

    /// Answers a chat by the likeliest tokens. The file has the states of prompt and answer.
    fn chat(&self, number: usize, request: &ReceivedRequest) -> Reply {
        let fault = (self.faults)(number);
        if fault == Fault::Error {
            return Reply::Status(500, vec![], "internal".into());
        }
        assert_eq!(request.body["kv_transfer_params"], json!({"include_output_tokens": true}));
        let messages = request.body["messages"].as_array().unwrap().iter().cloned();
        let messages: Vec<Message> = messages.map(|message| Message::try_from(message).unwrap()).collect();
        let prompt = generation_prompt(&self.tokenizer, &messages, None, Some(false)).unwrap();
        let (mut ids, mut answer, mut log_probs) = (prompt.clone(), vec![], vec![]);
        let end = self.tokenizer.eos_token_id();
        let states = loop {
            let (states, sampled, log_prob) = self.forward(&ids, fault);
            answer.push(sampled);
            log_probs.push(json!({"logprob": log_prob}));
            if answer.len() == MAX_ANSWER || Some(sampled) == end {
                break states;
            }
            ids.push(sampled);
        };
        let finish = if answer.last().copied() == end { "stop" } else { "length" };
        let content = match fault {
            Fault::Empty => String::new(),
            _ => self.tokenizer.decode(&answer, true).unwrap(),
        };
        let reply = json!({
            "prompt_token_ids": prompt,
            "choices": [{
                "message": {"role": "assistant", "content": content}, "finish_reason": finish,
                "token_ids": answer, "logprobs": {"content": log_probs},
            }],
        });
        self.answer_with_file(number, fault, reply, &states, ids)
    }

    /// Writes the states of `ids` as the fault wants it, and names the file in the answer.
    fn answer_with_file(
        &self,
        number: usize,
        fault: Fault,
        mut answer: Value,
        states: &Tensor,
        ids: Vec<i64>,
    ) -> Reply {
        let name = format!("cmpl-{number}-0-{number:08x}.safetensors");
        let path = self.folder.join(&name);
        let lock_path = self.folder.join(format!("{name}.lock"));
        let lock = File::create(&lock_path).unwrap();
        lock.lock().unwrap();
        let tokens = if fault == Fault::OtherTokens { ids.iter().map(|id| id + 1).collect() } else { ids };
        let bytes = state_file(states, &tokens);
        let write = move |path: &Path| {
            fs::write(path.with_extension("tmp"), &bytes).unwrap();
            fs::rename(path.with_extension("tmp"), path).unwrap();
        };
        match fault {
            Fault::NoFile => drop(lock),
            Fault::Late(delay) => {
                let path = path.clone();
                let writer = thread::spawn(move || {
                    thread::sleep(delay);
                    write(&path);
                    drop(lock);
                });
                self.writers.lock().unwrap().push(writer);
            }
            _ => {
                write(&path);
                drop(lock);
            }
        }
        let path = match fault {
            Fault::OutsidePath => {
                fs::remove_file(&path).unwrap();
                fs::remove_file(&lock_path).unwrap();
                "/etc/states.safetensors".to_string()
            }
            _ => path.display().to_string(),
        };
        if fault != Fault::NoConnector {
            answer["kv_transfer_params"] = json!({"hidden_states_path": path});
        }
        match fault {
            Fault::Aborted => Reply::Reset,
            Fault::NoConnector => {
                fs::remove_file(self.folder.join(&name)).unwrap();
                fs::remove_file(&lock_path).unwrap();
                Reply::Json(answer)
            }
            _ => Reply::Json(answer),
        }
    }

    /// States `[N, slots, d]`, the most probable next token and its log-probability.
    fn forward(&self, ids: &[i64], fault: Fault) -> (Tensor, i64, f64) {
        let _no_grad = tch::no_grad_guard();
        let mut target = self.target.lock().unwrap();
        let (chunks, tokens) = ([(0, ids.len())], Tensor::from_slice(ids));
        let out = target.forward(&ModelInput { chunks: &chunks, tokens });
        target.truncate(0, 0);
        let logits = target.logits(&out.hidden.narrow(0, ids.len() as i64 - 1, 1)).get(0);
        let (log_prob, sampled) = logits.log_softmax(0, Kind::Float).max_dim(0, false);
        let all = out.captured_states.view([ids.len() as i64, i64::from(LAYERS) + 1, -1]);
        let mut slots: Vec<i64> = self.ids.iter().map(|&id| i64::from(id)).collect();
        let last = slots.len() - 1;
        match fault {
            Fault::WrongSlots => drop(slots.remove(0)),
            Fault::EqualSlots => slots[last - 1] = slots[last],
            Fault::EarlyLayer => slots[last] -= 2,
            _ => {}
        }
        let states = all.index_select(1, &Tensor::from_slice(&slots));
        if fault == Fault::ZeroSlot {
            let _ = states.select(1, last as i64).fill_(0.0);
        }
        let shift = if fault == Fault::OtherProbability { -0.5 } else { 0.0 };
        (states, sampled.int64_value(&[]), log_prob.double_value(&[]) + shift)
    }
}

fn state_file(states: &Tensor, ids: &[i64]) -> Vec<u8> {
    let shape: Vec<usize> = states.size().iter().map(|&size| size as usize).collect();
    let mut values = vec![0; states.numel() * 4];
    states.contiguous().copy_data_u8(&mut values, states.numel());
    let tokens: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let states = TensorView::new(Dtype::F32, shape, &values).unwrap();
    let tokens = TensorView::new(Dtype::I64, vec![ids.len()], &tokens).unwrap();
    safetensors::serialize([("hidden_states", states), ("token_ids", tokens)], None).unwrap()
}
