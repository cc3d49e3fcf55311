//! Losslessness on the tiny target: in any batch, drafting changes only the speed of answers.
//!
//! On some processors sums depend on the number of rows. Where two runs differ, the test recomputes
//! the decision and shows that it was a tie within 1e-4.

mod common;

use std::path::Path;
use std::sync::OnceLock;

use common::greedy::{
    TIE, assert_rare, changes_no_token, gap_of_best, generate, last_logits, parted, parting, prompt,
};
use common::{
    Answers, answers, repository, run_ok, target, write_bigram_drafter, write_domino, write_dspark_v4,
    write_eagle3, write_eagle3_with_vocab, write_mtp, write_peagle, write_xpress, write_xpress_with,
};
use deepspec_checkpoint::DraftVocab;
use deepspec_core::jsonl::{Line, Reader};
use deepspec_core::rng::{Purpose, Stream};
use deepspec_cost::planner::Planner;
use deepspec_cost::policy::Policy;
use deepspec_drafters::{Convolution, Drafter, DrafterOptions};
use deepspec_engine::{
    Completion, Cycle, DraftRequest, DraftSampling, Engine, EngineOptions, ModelInput, ModelOutput, Proposal,
    Proposer, Request, Sampling, SamplingBatch, Target, VerifyRule,
};
use deepspec_models::TargetModel;
use deepspec_text::ChatTokenizer;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

const SEED: u64 = 980_406;
/// Runs of [`changes_no_token`].
const CHAINS: [(usize, &[&str]); 1] = [(16, &[])];

/// A folder with a drafter that contains the target's bigrams.
fn drafter() -> &'static Path {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let corpus = dir.path().join("corpus");
        run_ok("none", &corpus, &["--seed", "7"]);
        write_bigram_drafter(dir.path(), answers(&corpus).values());
        dir
    });
    dir.path()
}

/// Variants of drafting, as arguments, and as the engine's options and policy. All of them run only
/// with `DEEPSPEC_TEST_FULL`.
fn variants() -> Vec<(Vec<&'static str>, EngineOptions, Policy)> {
    let whole = EngineOptions {
        slots: 1,
        context: 2048,
        max_draft_tokens: None,
        draft_sampling: DraftSampling::default(),
        verify_rule: VerifyRule::default(),
        counts_overrun: true,
    };
    let mut variants = vec![
        (vec![], whole, Policy::Whole),
        (vec!["--schedule", "threshold:0.5"], whole, Policy::Threshold(0.5)),
        (
            vec!["--max-draft-tokens", "2"],
            EngineOptions { max_draft_tokens: Some(2), ..whole },
            Policy::Whole,
        ),
    ];
    if std::env::var_os("DEEPSPEC_TEST_FULL").is_none() {
        variants.truncate(1);
    }
    variants
}

/// From one slot to many; the middle only with `DEEPSPEC_TEST_FULL`.
fn slots() -> &'static [usize] {
    if std::env::var_os("DEEPSPEC_TEST_FULL").is_some() { &[1, 4, 16] } else { &[1, 16] }
}

/// Prompts of each suite, unless all are asked for.
const FEW: [&str; 2] = ["--limit", "24"];

#[test]
fn at_temperature_0_drafting_changes_no_token() {
    let tokenizer = ChatTokenizer::load(&common::target_dir()).unwrap();
    let mut target = target(1, &[]);
    let few: &[&str] = if std::env::var_os("DEEPSPEC_TEST_FULL").is_some() { &[] } else { &FEW };
    let plain = generate(None, 1, "0", few);
    let (mut compared, mut ties) = (0, 0);
    let mut compare = |what: String, found: &Answers| {
        compared += plain.len();
        for id in parted(&plain, found) {
            let at = parting(&plain[id], &found[id]);
            let common = [prompt(&tokenizer, id), plain[id][..at].to_vec()].concat();
            let gap = gap_of_best(&last_logits(&mut target, &common, 1).get(0));
            assert!(
                gap < TIE,
                "{what}: {id} parts at token {at}, where the best two logits are {gap:.2e} apart"
            );
            ties += 1;
        }
    };
    compare("plain, 16 slots".into(), &generate(None, 16, "0", few));
    let lanes = [few, &["--replicas", "2"]].concat();
    compare("drafted, 2 lanes of 8 slots".into(), &generate(Some(drafter()), 16, "0", &lanes));
    for (args, ..) in variants() {
        let args = [few, &args[..]].concat();
        for &slots in slots() {
            compare(format!("{args:?}, {slots} slots"), &generate(Some(drafter()), slots, "0", &args));
        }
    }
    assert_rare(ties, compared);
}

/// The greedy test for Eagle3, whose KV caches are extended and rolled back differently.
#[test]
fn at_temperature_0_eagle3_changes_no_token() {
    let dir = tempfile::tempdir().unwrap();
    write_eagle3(dir.path());
    changes_no_token(dir.path(), &CHAINS);
}

/// The greedy test for Eagle3 with a reduced vocabulary, which cannot draft some of the answers' tokens.
#[test]
fn at_temperature_0_a_reduced_vocabulary_changes_no_token() {
    let dir = tempfile::tempdir().unwrap();
    let counts: Vec<u64> = (0..1024).map(|id| u64::from(id % 3 != 0)).collect();
    write_eagle3_with_vocab(dir.path(), DraftVocab::most_frequent(&counts, 500).as_ref());
    changes_no_token(dir.path(), &CHAINS);
}

/// The greedy test for MTP-1, which reads the target's final states.
#[test]
fn at_temperature_0_mtp_1_changes_no_token() {
    let dir = tempfile::tempdir().unwrap();
    write_mtp(dir.path());
    changes_no_token(dir.path(), &CHAINS);
}

/// The greedy test for P-EAGLE, whose masked rows share a pass with those of committed tokens.
#[test]
fn at_temperature_0_p_eagle_changes_no_token() {
    let dir = tempfile::tempdir().unwrap();
    write_peagle(dir.path());
    changes_no_token(dir.path(), &CHAINS);
}

/// The greedy test for Domino, whose logits depend on the tokens drafted before.
#[test]
fn at_temperature_0_domino_changes_no_token() {
    let dir = tempfile::tempdir().unwrap();
    write_domino(dir.path());
    changes_no_token(dir.path(), &CHAINS);
}

/// The greedy test for DFlash 2, whose slots fill in and whose candidates are chosen sequentially.
#[test]
fn at_temperature_0_dflash_2_changes_no_token() {
    changes_no_token(&repository("assets/tiny-dflash2"), &CHAINS);
}

/// The greedy test for xPress, which drafts all slots of a block at once, on the layers of DFlash and of DFlash 2.
#[test]
fn at_temperature_0_xpress_changes_no_token() {
    for convolution in [None, Some(Convolution::default())] {
        let dir = tempfile::tempdir().unwrap();
        write_xpress_with(dir.path(), convolution);
        changes_no_token(dir.path(), &CHAINS);
    }
}

/// The greedy test for DSpark of DeepSeek-V4, whose window is shorter than the texts.
#[test]
fn at_temperature_0_dspark_of_deepseek_v4_changes_no_token() {
    let dir = tempfile::tempdir().unwrap();
    write_dspark_v4(dir.path());
    changes_no_token(dir.path(), &CHAINS);
}

/// Every kind of drafter is shared by the engines, including the changes that a run makes to it.
#[test]
fn lanes_draft_as_one_engine_does() {
    let dir = tempfile::tempdir().unwrap();
    let [domino, dspark_v4, eagle3, mtp, peagle, xpress] =
        ["domino", "dspark_v4", "eagle3", "mtp", "peagle", "xpress"].map(|name| dir.path().join(name));
    write_domino(&domino);
    write_dspark_v4(&dspark_v4);
    write_eagle3(&eagle3);
    write_mtp(&mtp);
    write_peagle(&peagle);
    write_xpress(&xpress);
    let (language_model, dspark) = (common::target_dir(), repository("assets/tiny-dspark"));
    let dflash2 = repository("assets/tiny-dflash2");
    let drafters: [(&Path, &[&str]); 9] = [
        (&dspark, &["--no-markov"]),
        (&dflash2, &[]),
        (&domino, &[]),
        (&dspark_v4, &["--no-markov"]),
        (&xpress, &["--draft-sampling", "probabilistic"]),
        (&eagle3, &["--max-draft-tokens", "3"]),
        (&mtp, &["--max-draft-tokens", "2"]),
        (&peagle, &["--max-draft-tokens", "3", "--draft-sampling", "probabilistic"]),
        (&language_model, &["--max-draft-tokens", "4"]),
    ];
    for (drafter, own) in drafters {
        // One slot per engine, so that all engines run batches of one.
        let decoded = |lanes| {
            let dir = tempfile::tempdir().unwrap();
            let mut args =
                vec!["--no-baseline", "--temperature", "1", "--max-num-seqs", lanes, "--replicas", lanes];
            args.extend(["--domain", "math", "--limit", "7", "--max-new-tokens", "24"]);
            args.extend(own);
            run_ok(drafter.to_str().unwrap(), dir.path(), &args);
            let rows = Reader::open(&dir.path().join("outputs.jsonl")).unwrap();
            let rows = rows.map(|line| match line.unwrap() {
                Line::Row(_, fields) => Value::Object(fields),
                _ => panic!("a row"),
            });
            rows.collect::<Vec<_>>()
        };
        let one = decoded("1");
        assert_eq!(one.len(), 7);
        assert_eq!(one, decoded("3"), "{}", drafter.display());
    }
}

/// The recomputed logits are the decisive ones: their maximum is the generated token.
#[test]
fn greedy_answers_follow_the_recomputed_logits() {
    let tokenizer = ChatTokenizer::load(&common::target_dir()).unwrap();
    let mut target = target(1, &[]);
    let dir = tempfile::tempdir().unwrap();
    run_ok("none", dir.path(), &["--temperature", "0", "--limit", "4"]);
    for (id, tokens) in answers(dir.path()) {
        let (fed, prompt) = (&tokens[..tokens.len() - 1], prompt(&tokenizer, &id));
        let logits = last_logits(&mut target, &[&prompt, fed].concat(), tokens.len());
        for (at, token) in tokens.iter().enumerate() {
            let logits = logits.get(at as i64);
            let best = logits.argmax(-1, false).int64_value(&[]);
            assert!(best == *token || gap_of_best(&logits) < TIE, "{id}, token {at}");
        }
    }
}

#[test]
fn at_temperature_1_a_sample_does_not_depend_on_its_batch() {
    let (mut compared, mut ties) = (0, 0);
    let plain = generate(None, 1, "1", &FEW);
    let batched = generate(None, 16, "1", &FEW);
    for (args, options, policy) in variants() {
        let with_few = [&args[..], &FEW].concat();
        let alone = generate(Some(drafter()), 1, "1", &with_few);
        assert_ne!(
            alone, plain,
            "drafting draws other numbers, so equal answers mean that nothing was drafted"
        );
        for slots in &slots()[1..] {
            let together = generate(Some(drafter()), *slots, "1", &with_few);
            compared += alone.len();
            for id in parted(&alone, &together) {
                let at = parting(&alone[id], &together[id]);
                let margin = Replay::new(Some(drafter()), options, policy, id).margin_at(at);
                assert!(
                    margin < TIE,
                    "{args:?}, {slots} slots: {id} parts at token {at}, {margin:.2e} from a tie"
                );
                ties += 1;
            }
        }
    }
    compared += plain.len();
    for id in parted(&plain, &batched) {
        let at = parting(&plain[id], &batched[id]);
        let margin = Replay::new(None, variants()[0].1, Policy::Whole, id).margin_at(at);
        assert!(margin < TIE, "plain: {id} parts at token {at}, {margin:.2e} from a tie");
        ties += 1;
    }
    assert_rare(ties, compared);
}

/// Replays make the engine's decisions and find few ties. Only then does a tie explain a
/// difference.
#[test]
fn replayed_decisions_are_the_engines() {
    let id = "smoke-code/smoke-code-03";
    let alone = generate(Some(drafter()), 1, "1", &["--suite", "smoke-code", "--limit", "4"]);
    let replay = Replay::new(Some(drafter()), variants()[0].1, Policy::Whole, id);
    assert_eq!(replay.completion.tokens, alone[id]);
    let accepted: u32 = replay.completion.cycles.iter().map(|cycle| cycle.accepted).sum();
    assert!(accepted > 10, "the drafter is too bad to show anything: {accepted} tokens accepted");
    let margins: Vec<f64> = (0..replay.completion.tokens.len()).map(|at| replay.margin_at(at)).collect();
    let ties = margins.iter().filter(|&&margin| margin < TIE).count();
    assert!(5 * ties < margins.len(), "{ties} of {} decisions look like ties", margins.len());
}

/// Drafted tokens `[γ]`, their distributions `[γ, V]` and confidences `[γ]`.
struct Drafted {
    tokens: Tensor,
    probs: Tensor,
    confidence: Tensor,
}

/// One sample decoded alone, with the inputs of all its decisions.
struct Replay {
    completion: Completion,
    stream: Stream,
    sampling: Sampling,
    /// The target's logits of every step, the prompt's last first: `[1 + γ', V]`.
    logits: Vec<Tensor>,
    /// The drafted block of every cycle.
    blocks: Vec<Drafted>,
    policy: Policy,
}

impl Replay {
    fn new(draft: Option<&Path>, options: EngineOptions, policy: Policy, id: &str) -> Self {
        let dir = common::target_dir();
        let tokenizer = ChatTokenizer::load(&dir).unwrap();
        let load = DrafterOptions { device: Device::Cpu, kind: Kind::Float, slots: 1, target: None };
        let drafter = draft.map(|dir| deepspec_drafters::load_drafter(dir, &load).unwrap());
        let taps = drafter.as_ref().map_or(vec![], |drafter| drafter.taps().to_vec());
        let (logits, blocks) = (Shared::default(), Shared::default());
        let target = Recorded { inner: target(1, &taps), tape: logits.clone() };
        let drafter = drafter.map(|inner| Recorded { inner, tape: blocks.clone() });
        let sampling = Sampling::new(1.0, SEED);
        let prompt = prompt(&tokenizer, id);
        let request = Request {
            id: id.into(),
            sampling,
            max_new_tokens: 2048 - prompt.len(),
            prompt,
            stop_ids: deepspec_models::stop_ids(&dir, None).unwrap(),
        };
        let planner = Planner::new(policy, None).unwrap();
        let mut engine = Engine::new(target, drafter, options).with_planner(planner);
        let completion = engine.run(vec![request], |_| {}).unwrap().remove(0);
        let stream = Stream::new(SEED, id);
        let (logits, blocks) = (logits.take(), blocks.take());
        Self { completion, stream, sampling, logits, blocks, policy }
    }

    /// The probability margin by which the decisions for token `at` were made.
    fn margin_at(&self, at: usize) -> f64 {
        let mut end = 1;
        if at < end {
            let p = self.target_rows(0);
            return distance_to_border(&p.get(0), self.stream.uniform(0, Purpose::Target, 0));
        }
        for (index, cycle) in self.completion.cycles.iter().enumerate() {
            end += cycle.committed as usize;
            if at < end {
                return self.margin_of(index, cycle);
            }
        }
        panic!("token {at} lies behind the answer");
    }

    fn target_rows(&self, step: usize) -> Tensor {
        let logits = &self.logits[step];
        SamplingBatch::new(vec![self.sampling; logits.size()[0] as usize], Device::Cpu).distributions(logits)
    }

    /// A slow reimplementation of verification, one number at a time.
    fn margin_of(&self, index: usize, cycle: &Cycle) -> f64 {
        let step = index as u64 + 1;
        let p = self.target_rows(index + 1);
        let mut margins = vec![];
        let verified = p.size()[0] - 1;
        let mut accepted = 0;
        if let Some(Drafted { tokens, probs: q, confidence }) = self.blocks.get(index) {
            if let Policy::Threshold(threshold) = self.policy {
                margins.push((confidence - threshold).abs().min().double_value(&[]));
            }
            for k in 0..verified {
                margins
                    .push(distance_to_border(&q.get(k), self.stream.uniform(step, Purpose::Draft, k as u64)));
            }
            for k in 0..verified {
                let token = tokens.int64_value(&[k]);
                let ratio = p.double_value(&[k, token]) / q.double_value(&[k, token]);
                let u = self.stream.uniform(step, Purpose::Accept, k as u64);
                margins.push((u - ratio).abs());
                if u >= ratio {
                    break;
                }
                accepted += 1;
            }
        }
        let stopped = cycle.committed == cycle.accepted;
        assert!(
            stopped || accepted == cycle.accepted,
            "the replay accepts {accepted}, the engine {}",
            cycle.accepted
        );
        if !stopped {
            let k = i64::from(accepted);
            let weights = match self.blocks.get(index) {
                Some(drafted) if k < verified => (p.get(k) - drafted.probs.get(k)).clamp_min(0.0),
                _ => p.get(k),
            };
            margins.push(distance_to_border(&weights, self.stream.uniform(step, Purpose::Target, 0)));
        }
        margins.into_iter().fold(f64::INFINITY, f64::min)
    }
}

/// Distance of `u` · total to the nearest step of the cumulative weights.
fn distance_to_border(weights: &Tensor, u: f64) -> f64 {
    let cdf = weights.cumsum(-1, Kind::Double);
    let threshold = u * cdf.double_value(&[-1]);
    // Tokens of zero weight have no border, and neither has the last one, because u stays below 1.
    (cdf - threshold).abs().masked_select(&weights.gt(0.0)).min().double_value(&[])
}

/// A recording that model and test share.
type Shared<T> = std::rc::Rc<std::cell::RefCell<Vec<T>>>;

/// A model that records its outputs.
struct Recorded<M, T> {
    inner: M,
    tape: Shared<T>,
}

impl Target for Recorded<TargetModel, Tensor> {
    fn forward(&mut self, feed: &ModelInput) -> ModelOutput {
        self.inner.forward(feed)
    }
    fn logits(&self, hidden: &Tensor) -> Tensor {
        let logits = self.inner.logits(hidden);
        self.tape.borrow_mut().push(logits.copy());
        logits
    }
    fn truncate(&mut self, slot: usize, len: usize) {
        self.inner.truncate(slot, len);
    }
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }
    fn device(&self) -> Device {
        self.inner.device()
    }
}

impl Proposer for Recorded<Box<dyn Drafter>, Drafted> {
    fn draft_len(&self) -> usize {
        self.inner.draft_len()
    }
    fn ends_at_stop_tokens(&self) -> bool {
        self.inner.ends_at_stop_tokens()
    }
    fn reads_hidden(&self) -> bool {
        self.inner.reads_hidden()
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        let proposal = self.inner.propose(request);
        self.tape.borrow_mut().push(Drafted {
            tokens: proposal.tokens.get(0).copy(),
            probs: proposal.probs.as_ref().expect("drawn at a temperature").get(0).copy(),
            confidence: proposal.confidence.as_ref().unwrap().get(0).sigmoid(),
        });
        proposal
    }
    fn truncate(&mut self, slot: usize, len: usize) {
        self.inner.truncate(slot, len);
    }
}
