//! Verification of the toy's blocks by vLLM's kernels: they accept as many tokens as ours, of drafts with and without distributions, under
//! both rules.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;

use deepspec_drafters::{Drafter, DrafterOptions, load_drafter};
use deepspec_engine::{
    DraftRequest, DraftSampling, Engine, EngineOptions, ModelInput, ModelOutput, Proposal, Proposer, Request,
    Sampling, Target, VerifyRule,
};
use deepspec_models::{TargetModel, TargetOptions};
use deepspec_ops::{verify, verify_block};
use deepspec_testkit::skip::vllm_python;
use deepspec_text::{ChatTokenizer, Message, Role, generation_prompt};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::{repository, target_dir};
use crate::{FEWER, prompts};

/// Tokens of an answer.
const ANSWER_TOKENS: usize = 48;
/// Uniforms are multiples of 2^-24, which float32 holds exactly.
const UNIFORM_BITS: i32 = 24;

/// Logits of every verified block, and what was drafted.
#[derive(Default)]
struct Recorded {
    /// Logits `[γ+1, V]` of each block.
    logits: Vec<Tensor>,
    /// Distributions `[1, γ, V]` and tokens `[1, γ]` of each block.
    drafts: Vec<(Tensor, Tensor)>,
}

struct Recording<M> {
    model: M,
    recorded: Rc<RefCell<Recorded>>,
}

impl Target for Recording<TargetModel> {
    fn forward(&mut self, input: &ModelInput) -> ModelOutput {
        self.model.forward(input)
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        let logits = self.model.logits(hidden);
        // A prompt has one row.
        if logits.size()[0] > 1 {
            self.recorded.borrow_mut().logits.push(logits.copy());
        }
        logits
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.model.truncate(slot, len);
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn device(&self) -> Device {
        self.model.device()
    }
}

impl Proposer for Recording<Box<dyn Drafter>> {
    fn draft_len(&self) -> usize {
        self.model.draft_len()
    }

    fn reads_hidden(&self) -> bool {
        self.model.reads_hidden()
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let proposal = self.model.propose(request);
        if let Some(probs) = &proposal.probs {
            self.recorded.borrow_mut().drafts.push((probs.copy(), proposal.tokens.copy()));
        }
        proposal
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.model.truncate(slot, len);
    }
}

/// Answers prompts of the smoke suites at temperature 1, and records all blocks.
fn record(target: &Path, drafter: &Path) -> Recorded {
    let recorded = Rc::new(RefCell::new(Recorded::default()));
    let (device, kind, slots) = (Device::Cpu, Kind::Float, 1);
    let drafter = load_drafter(drafter, &DrafterOptions { device, kind, slots, target: None }).unwrap();
    let options = TargetOptions { device, kind, slots, taps: drafter.taps().to_vec() };
    let target_model = TargetModel::load(target, &options).unwrap();
    let tokenizer = ChatTokenizer::load(target).unwrap();
    let options = EngineOptions {
        slots,
        context: target_model.config().max_position_embeddings,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::Probabilistic,
        verify_rule: VerifyRule::Block,
        counts_overrun: false,
    };
    let target_model = Recording { model: target_model, recorded: recorded.clone() };
    let drafter = Recording { model: drafter, recorded: recorded.clone() };
    let asked = prompts(FEWER).into_iter().map(|((suite, id), prompt)| Request {
        id: format!("{suite}/{id}"),
        prompt: generation_prompt(&tokenizer, &[Message::new(Role::User, &prompt)], None, Some(false))
            .unwrap(),
        sampling: Sampling::new(1.0, 7),
        max_new_tokens: ANSWER_TOKENS,
        stop_ids: vec![],
    });
    Engine::new(target_model, Some(drafter), options).run(asked.collect(), |_| {}).unwrap();
    recorded.take()
}

fn list(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.to_kind(Kind::Int64).reshape([-1])).unwrap()
}

#[test]
fn vllm_accepts_as_many_tokens_of_the_same_blocks_under_both_rules() {
    let Some(python) = vllm_python() else { return };
    let _no_grad = tch::no_grad_guard();
    let root = tempfile::tempdir().unwrap();
    let Recorded { logits, drafts } = record(&target_dir(), &repository("assets/tiny-dspark"));
    let (q, tokens): (Vec<Tensor>, Vec<Tensor>) = drafts.into_iter().unzip();
    assert_eq!(logits.len(), q.len(), "one proposal per verified block");
    let logits = Tensor::stack(&logits, 0); // [N, γ+1, V]
    let (q, tokens) = (Tensor::cat(&q, 0), Tensor::cat(&tokens, 0));
    let (blocks, longest) = tokens.size2().unwrap();
    assert!(blocks > 100, "{blocks} blocks");
    // Blocks of every length from 1.
    let lens = Tensor::arange(blocks, (Kind::Int64, Device::Cpu)).remainder(longest) + 1;
    let steps = 1_i64 << UNIFORM_BITS;
    let codes =
        (Tensor::arange(blocks * longest, (Kind::Double, Device::Cpu)) * 0.618_033_988_749_895).frac();
    let codes = (codes * (steps - 1) as f64).to_kind(Kind::Int64).view([blocks, longest]) + 1;
    let uniforms = codes.to_kind(Kind::Double) / steps as f64;

    let file = root.path().join("blocks.safetensors");
    // Logarithms of zero are finite there: the kernels subtract them.
    let draft_logits = q.clamp_min(1e-30).log();
    let named = [
        ("logits", &logits),
        ("draft_logits", &draft_logits),
        ("tokens", &tokens),
        ("lens", &lens),
        ("codes", &codes),
    ];
    Tensor::write_safetensors(&named.map(|(name, tensor)| (name, tensor.contiguous())), &file).unwrap();
    let mut command = Command::new(python);
    // This process's libtorch differs from vLLM's.
    command.env_remove("LD_LIBRARY_PATH").arg(repository("scripts/vllm_verify.py")).arg(&file);
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let found: Value = serde_json::from_slice(&ran.stdout).unwrap();

    let p = logits.softmax(-1, Kind::Float);
    // The first blocks as if their tokens had been drafted greedily.
    let greedy = Proposal { tokens: tokens.narrow(0, 0, blocks / 4), probs: None, confidence: None };
    let greedy = greedy.draft_probs(longest, q.size()[2] as usize);
    let drafts = [("probabilistic", q), ("greedy", greedy)];
    let rules = [("standard", verify as fn(&_, &_, &_, &_, &_, &_) -> _), ("block", verify_block)];
    let mut lengths = vec![];
    for (drafted, q) in &drafts {
        for (name, rule) in rules {
            let [p, tokens, lens, uniforms] =
                [&p, &tokens, &lens, &uniforms].map(|of| of.narrow(0, 0, q.size()[0]));
            let accepted = list(&rule(&p, q, &tokens, &lens, &uniforms, &uniforms.select(1, 0)).accepted);
            assert_eq!(found[drafted][name], json!(accepted), "{drafted}, {name}");
            lengths.push(accepted);
        }
    }
    assert_ne!(lengths[0], lengths[1], "the blocks do not tell the rules apart");
    let _ = fs::remove_file(file);
}
