//! A toy target and a toy drafter. Their distributions depend on the whole prefix, so the exact law
//! of short outputs can be computed. A prefix is encoded as a number: 1, then one digit in base V
//! per token.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod law;

use std::collections::BTreeMap;

use deepspec_core::rng::{Purpose, Stream};
use deepspec_engine::{
    DraftRequest, ModelInput, ModelOutput, Proposal, Proposer, SamplingBatch, Target, TreeBudget, TreeTarget,
    grow_tree,
};
use deepspec_ops::DraftTree;
use tch::{Device, Kind, Tensor};

pub const V: i64 = 4;
pub const GAMMA: usize = 3;
pub const PROMPT: [i64; 2] = [2, 1];

pub fn extended(prefix: i64, token: i64) -> i64 {
    prefix * V + token
}

pub fn prompt_prefix() -> i64 {
    PROMPT.iter().fold(1, |prefix, &token| extended(prefix, token))
}

/// The target's logits after a prefix.
pub fn target_logits(prefix: i64) -> [f32; V as usize] {
    let stream = Stream::new(1, "target");
    std::array::from_fn(|v| (3.0 * stream.uniform(prefix as u64, Purpose::Init, v as u64)) as f32)
}

/// The drafter's logits: the target's logits plus noise, which makes it overconfident.
pub fn draft_logits(prefix: i64) -> [f32; V as usize] {
    let (right, stream) = (target_logits(prefix), Stream::new(2, "draft"));
    std::array::from_fn(|v| right[v] + 2.0 * stream.uniform(prefix as u64, Purpose::Init, v as u64) as f32)
}

pub fn logits_of(prefixes: impl Iterator<Item = i64>, law: fn(i64) -> [f32; V as usize]) -> Tensor {
    let logits: Vec<f32> = prefixes.flat_map(law).collect();
    Tensor::from_slice(&logits).view([-1, V])
}

pub fn prefixes(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.to_kind(Kind::Int64).reshape([-1])).unwrap()
}

/// Stores the prefix after every token of every slot, and returns it as hidden state and as tap.
pub struct ToyTarget {
    pub slots: Vec<Vec<i64>>,
}

impl ToyTarget {
    pub fn new(slots: usize) -> Self {
        Self { slots: vec![vec![]; slots] }
    }
}

impl Target for ToyTarget {
    fn forward(&mut self, feed: &ModelInput) -> ModelOutput {
        let mut tokens = prefixes(&feed.tokens).into_iter();
        let mut rows = vec![];
        for &(slot, count) in feed.chunks {
            for token in tokens.by_ref().take(count) {
                let prefix = extended(self.slots[slot].last().copied().unwrap_or(1), token);
                self.slots[slot].push(prefix);
                rows.push(prefix);
            }
        }
        let hidden = Tensor::from_slice(&rows).unsqueeze(1);
        ModelOutput { captured_states: hidden.copy(), hidden }
    }

    fn logits(&self, hidden: &Tensor) -> Tensor {
        logits_of(prefixes(hidden).into_iter(), target_logits)
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.slots[slot].truncate(len);
    }

    fn vocab_size(&self) -> usize {
        V as usize
    }

    fn device(&self) -> Device {
        Device::Cpu
    }

    fn as_tree_target(&mut self) -> Option<&mut dyn TreeTarget> {
        Some(self)
    }
}

impl TreeTarget for ToyTarget {
    fn forward_trees(&mut self, input: &ModelInput, trees: &[DraftTree]) -> ModelOutput {
        let mut tokens = prefixes(&input.tokens).into_iter();
        let mut rows = vec![];
        for (&(slot, count), tree) in input.chunks.iter().zip(trees) {
            let first = rows.len();
            for (row, token) in tokens.by_ref().take(count).enumerate() {
                let before = match row {
                    0 => self.slots[slot].last().copied().unwrap_or(1),
                    _ => rows[first + tree.parents()[row - 1]],
                };
                rows.push(extended(before, token));
            }
            assert_eq!(rows.len() - first, 1 + tree.len());
            self.slots[slot].extend(&rows[first..]);
        }
        let hidden = Tensor::from_slice(&rows).unsqueeze(1);
        ModelOutput { captured_states: hidden.copy(), hidden }
    }

    fn keep_rows(&mut self, slot: usize, past_len: usize, runs: &[(i64, i64)]) {
        let rows = self.slots[slot].split_off(past_len);
        let kept = runs.iter().flat_map(|&(first, count)| &rows[first as usize..(first + count) as usize]);
        self.slots[slot].extend(kept);
    }
}

/// Knows each slot's committed prefix from the captured states alone. It checks that the final
/// states belong to the same tokens.
pub struct ToyDrafter {
    slots: Vec<i64>,
    /// The prefixes that it has received.
    taken: Vec<Vec<i64>>,
    /// The prefix that the next state of each slot must have, given the announced next token.
    announced: Vec<Option<i64>>,
}

impl ToyDrafter {
    pub fn new(slots: usize) -> Self {
        Self { slots: vec![1; slots], taken: vec![vec![]; slots], announced: vec![None; slots] }
    }
}

impl Proposer for ToyDrafter {
    fn draft_len(&self) -> usize {
        GAMMA
    }

    fn reads_hidden(&self) -> bool {
        true
    }

    fn propose(&mut self, request: &DraftRequest) -> Proposal {
        propose(self.take_context(request), request.uniforms, request.sampling)
    }

    fn tree_refusal(&self) -> Option<&'static str> {
        None
    }

    fn propose_trees(
        &mut self,
        request: &DraftRequest,
        budget: TreeBudget,
        max_depth: usize,
    ) -> Vec<DraftTree> {
        let starts = self.take_context(request).into_iter().enumerate();
        let depth = max_depth.min(GAMMA);
        starts
            .map(|(row, start)| grow(start, budget, depth, request.sampling.ranking_temperature(row)))
            .collect()
    }

    fn truncate(&mut self, slot: usize, len: usize) {
        self.taken[slot].truncate(len);
        self.slots[slot] = self.taken[slot].last().copied().unwrap_or(1);
        self.announced[slot] = None;
    }
}

impl ToyDrafter {
    /// Reads the context, and returns the prefix up to each slot's anchor.
    fn take_context(&mut self, request: &DraftRequest) -> Vec<i64> {
        let DraftRequest { context, slots, anchors, .. } = *request;
        if !context.chunks.is_empty() {
            assert_eq!(context.hidden.as_ref(), Some(&context.captured_states));
            let mut rows = prefixes(&context.captured_states).into_iter();
            let mut followers = prefixes(&context.next).into_iter();
            for &(slot, count) in &context.chunks {
                for (prefix, follower) in rows.by_ref().take(count).zip(followers.by_ref()) {
                    assert!(self.announced[slot].is_none_or(|announced| announced == prefix));
                    self.announced[slot] = Some(extended(prefix, follower));
                    assert_eq!(
                        prefix / V,
                        self.slots[slot],
                        "a state is missing, doubled or of a rejected token"
                    );
                    self.slots[slot] = prefix;
                    self.taken[slot].push(prefix);
                }
            }
        }
        let committed = slots.iter().map(|&slot| self.slots[slot]);
        let starts: Vec<i64> =
            committed.zip(prefixes(anchors)).map(|(prefix, anchor)| extended(prefix, anchor)).collect();
        for (&slot, &start) in slots.iter().zip(&starts) {
            assert!(
                self.announced[slot].is_none_or(|announced| announced == start),
                "the anchor is not what was said to follow"
            );
        }
        starts
    }
}

/// The tree behind a prefix, by the drafter's own distributions along every path.
pub fn grow(start: i64, budget: TreeBudget, depth: usize, temperature: f64) -> DraftTree {
    let mut rows = BTreeMap::new();
    grow_tree(budget, depth, |row| {
        let prefix = row.token.map_or(start, |token| extended(rows[&row.parent], token));
        rows.insert(row.row, prefix);
        ranked_tokens(prefix, temperature)
    })
}

/// The drafter's tokens behind a prefix, the likeliest first, and their log probabilities.
fn ranked_tokens(prefix: i64, temperature: f64) -> Vec<(i64, f64)> {
    let logits = draft_logits(prefix).map(|logit| f64::from(logit) / temperature);
    let total = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
    let mut ranked: Vec<(i64, f64)> = (0..).zip(logits.map(|logit| logit - total)).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    ranked
}

pub fn propose(mut prefixes_now: Vec<i64>, uniforms: &Tensor, sampling: &SamplingBatch) -> Proposal {
    let (mut draws, mut confidence) = (vec![], vec![]);
    for k in 0..GAMMA as i64 {
        let logits = logits_of(prefixes_now.iter().copied(), draft_logits);
        let (drawn, distribution) = sampling.sample(&logits, &uniforms.select(1, k));
        // Depends on the tokens before this one, never on the token itself.
        let sure = |&prefix: &i64| Stream::new(3, "sure").uniform(prefix as u64, Purpose::Init, 0) as f32;
        confidence.push(Tensor::from_slice(&prefixes_now.iter().map(sure).collect::<Vec<_>>()));
        for (prefix, token) in prefixes_now.iter_mut().zip(prefixes(&drawn)) {
            *prefix = extended(*prefix, token);
        }
        draws.push((drawn, distribution));
    }
    Proposal::stack(draws, Some(Tensor::stack(&confidence, 1).logit(None)))
}
