//! Counts the work of the pipeline's stages from the sizes of target and drafter.
//!
//! Symbols: P prompt tokens, A answer tokens, C sequences decoded at once, τ accepted length.

use crate::economics::experts_touched;
use crate::estimate::Work;

/// Sizes of a decoder model that determine the work of its passes.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSize {
    /// Number of all weights.
    pub weights: f64,
    /// Weights of the embedding: vocabulary size times hidden size.
    pub embedding: f64,
    /// Whether the LM head is tied to the embedding.
    pub is_tied: bool,
    /// Attention of each layer.
    pub layers: Vec<AttentionSize>,
    /// Experts of its layers; None if all layers are dense.
    pub experts: Option<ExpertsSize>,
}

/// Experts of a model, equal in all layers that have them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsSize {
    /// Number of layers with experts.
    pub layers: f64,
    /// Weights of one expert.
    pub weights: f64,
    /// E, experts of a layer.
    pub count: f64,
    /// k, experts of a token.
    pub active: f64,
}

/// Sizes of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSize {
    /// Number of query heads.
    pub query_heads: usize,
    /// Number of key and value heads.
    pub key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Size of the sliding window, including the token itself; None for full attention.
    pub window: Option<usize>,
}

/// Requests to a model that decodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeLoad {
    /// Number of prompts.
    pub rows: f64,
    /// Prompt tokens P of each.
    pub prompt: f64,
    /// Answer tokens A of each.
    pub answer: f64,
    /// Number of sequences C decoded at once.
    pub concurrency: f64,
    /// Bytes per weight, and per value of the KV cache.
    pub value_bytes: f64,
}

/// Sizes of a drafter that determine the work of drafting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrafterSize {
    /// Number of drafted tokens γ.
    pub length: f64,
    /// Whether a whole block runs through the drafter at once, or one token after the other.
    pub at_once: bool,
    /// Weights that a drafted token runs through, without embedding and LM head.
    pub weights: f64,
}

/// Work of the target answering prompts by plain decoding. Prompts are prefilled within decoding
/// steps.
pub fn decode_work(target: &ModelSize, asked: DecodeLoad) -> Work {
    let DecodeLoad { rows, prompt, answer, concurrency, value_bytes } = asked;
    let head = head_operations(target);
    let (read, written) =
        (forward_operations(target, prompt, 0.0) + head, forward_operations(target, answer, prompt));
    let passes = rows * answer / concurrency;
    let history = kv_cache_reads(target, answer, prompt);
    Work {
        operations: rows * (read + written + answer * head),
        bytes: (passes * weights_per_pass(target, concurrency) + rows * history) * value_bytes,
        passes,
    }
}

/// Work of capturing hidden states in `passes` passes without logits; `lengths` has (number of
/// sequences, tokens of each).
pub fn capture_work(
    target: &ModelSize,
    lengths: impl IntoIterator<Item = (f64, f64)>,
    passes: f64,
    value_bytes: f64,
) -> Work {
    let (mut operations, mut all) = (0.0, 0.0);
    for (sequences, tokens) in lengths {
        operations += sequences * forward_operations(target, tokens, 0.0);
        all += sequences * tokens;
    }
    let per_pass = if passes > 0.0 { all / passes } else { 0.0 };
    Work { operations, bytes: passes * weights_per_pass(target, per_pass) * value_bytes, passes }
}

/// Work of speculative decoding by target and drafter: every cycle verifies γ + 1 tokens and
/// commits τ.
pub fn speculation_work(
    target: &ModelSize,
    drafting: DrafterSize,
    asked: DecodeLoad,
    accepted_length: f64,
) -> Work {
    let DecodeLoad { rows, prompt, answer, concurrency, value_bytes } = asked;
    let DrafterSize { length, weights, at_once } = drafting;
    let head = head_operations(target);
    let cycles = answer / accepted_length;
    let (verified, behind) = (length + 1.0, prompt + answer / 2.0);
    let verify = forward_operations(target, verified, behind) + verified * head;
    let draft = length * (2.0 * weights + head);
    let passes = rows * cycles / concurrency;
    let drafts = if at_once { 1.0 } else { length };
    let read = weights_per_pass(target, concurrency * verified) + drafts * (weights + head / 2.0);
    Work {
        operations: rows * (forward_operations(target, prompt, 0.0) + head + cycles * (verify + draft)),
        bytes: (passes * read + rows * cycles * kv_cache_reads(target, 1.0, behind)) * value_bytes,
        passes,
    }
}

/// Operations of a forward over `tokens` new tokens after `before` cached tokens, without logits.
fn forward_operations(target: &ModelSize, tokens: f64, before: f64) -> f64 {
    let ends = if target.is_tied { 1.0 } else { 2.0 };
    let idle = |experts: ExpertsSize| experts.layers * (experts.count - experts.active) * experts.weights;
    let layers = target.weights - ends * target.embedding - target.experts.map_or(0.0, idle);
    let attended = target.layers.iter().map(|layer| {
        // Attention scores, and their weighted sum of values.
        2.0 * 2.0
            * (layer.query_heads * layer.head_dim) as f64
            * attended_tokens(tokens, before, layer.window)
    });
    2.0 * layers * tokens + attended.sum::<f64>()
}

/// Number of weights that a pass over `tokens` tokens reads. An untied embedding is left out, because a pass reads only a
/// few of its rows. Experts count if uniform routing touches them.
fn weights_per_pass(target: &ModelSize, tokens: f64) -> f64 {
    let idle = |ExpertsSize { layers, weights, count, active }| {
        layers * (count - experts_touched(count, active, tokens)) * weights
    };
    target.weights - if target.is_tied { 0.0 } else { target.embedding } - target.experts.map_or(0.0, idle)
}

/// Operations of a token's logits.
fn head_operations(target: &ModelSize) -> f64 {
    2.0 * target.embedding
}

/// Total KV cache values that attention reads for `tokens` new tokens after `before` cached tokens.
fn kv_cache_reads(target: &ModelSize, tokens: f64, before: f64) -> f64 {
    let of = |layer: &AttentionSize| {
        2.0 * (layer.key_value_heads * layer.head_dim) as f64 * attended_tokens(tokens, before, layer.window)
    };
    target.layers.iter().map(of).sum()
}

/// Total number of tokens that `tokens` new tokens after `before` cached tokens attend to. Each
/// token also attends to itself.
fn attended_tokens(tokens: f64, before: f64, window: Option<usize>) -> f64 {
    let growing = |tokens: f64| tokens * before + tokens * (tokens + 1.0) / 2.0;
    match window.map(|window| window as f64) {
        Some(window) if window < before + tokens => {
            let partly = (window - before).clamp(0.0, tokens);
            growing(partly) + (tokens - partly) * window
        }
        _ => growing(tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hidden size 2560, 36 layers of 32 query and 8 key-value heads of 128 with an MLP of 9728,
    /// tied.
    fn qwen3_4b() -> ModelSize {
        let (hidden, layers, vocab) = (2560.0, 36, 151_936.0);
        let attention = 2.0 * hidden * 4096.0 + 2.0 * hidden * 1024.0 + 2.0 * 128.0;
        let layer = attention + 3.0 * hidden * 9728.0 + 2.0 * hidden;
        let size = AttentionSize { query_heads: 32, key_value_heads: 8, head_dim: 128, window: None };
        ModelSize {
            weights: vocab * hidden + f64::from(layers) * layer + hidden,
            embedding: vocab * hidden,
            is_tied: true,
            layers: vec![size; 36],
            experts: None,
        }
    }

    /// A token runs through k of E experts. A pass reads the experts of all its tokens, once each.
    #[test]
    fn idle_experts_are_neither_computed_nor_read() {
        let dense = qwen3_4b();
        let experts = ExpertsSize { layers: 12.0, weights: 5e6, count: 64.0, active: 4.0 };
        let mixture =
            ModelSize { weights: dense.weights + 12.0 * 64.0 * 5e6, experts: Some(experts), ..dense.clone() };
        let more = forward_operations(&mixture, 7.0, 0.0) - forward_operations(&dense, 7.0, 0.0);
        assert!((more / (2.0 * 7.0 * 12.0 * 4.0 * 5e6) - 1.0).abs() < 1e-9, "{more:e}");
        let read = |tokens: f64| weights_per_pass(&mixture, tokens) - weights_per_pass(&dense, tokens);
        assert!((read(1.0) / (12.0 * 4.0 * 5e6) - 1.0).abs() < 1e-9);
        // Two tokens share 4·4/64 of their experts.
        assert!((read(2.0) / (12.0 * 7.75 * 5e6) - 1.0).abs() < 1e-9);
        assert!((read(4096.0) / (12.0 * 64.0 * 5e6) - 1.0).abs() < 1e-9);
        let captured = capture_work(&mixture, [(1.0, 1.0), (1.0, 3.0)], 2.0, 1.0);
        assert!((captured.bytes / (2.0 * weights_per_pass(&mixture, 2.0)) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_forward_is_two_operations_a_weight_and_what_attention_adds() {
        // The layers of Qwen3-4B have 3.63 billion weights.
        let one = forward_operations(&qwen3_4b(), 1.0, 0.0);
        assert!((one / 2.0 / 3.633e9 - 1.0).abs() < 0.01, "{one:e}");
        // A token after 4,096 others attends in 36 layers with 32 heads of 128: 4·36·4,096
        // operations per token.
        let behind = forward_operations(&qwen3_4b(), 1.0, 4096.0) - one;
        assert_eq!(behind, 4.0 * 36.0 * 4096.0 * 4096.0);
    }

    #[test]
    fn what_is_seen_is_what_a_loop_counts() {
        for (tokens, before, window) in [
            (5, 0, None),
            (5, 3, Some(4)),
            (5, 9, Some(4)),
            (7, 2, Some(100)),
            (3, 0, Some(1)),
            (6, 4, Some(7)),
        ] {
            let slow: usize = (0..tokens).map(|i| (before + i + 1).min(window.unwrap_or(usize::MAX))).sum();
            assert_eq!(
                attended_tokens(tokens as f64, before as f64, window),
                slow as f64,
                "{tokens} {before} {window:?}"
            );
        }
    }

    #[test]
    fn decoding_in_one_go_or_two_is_the_same_arithmetic() {
        let target = qwen3_4b();
        let all = forward_operations(&target, 300.0, 0.0);
        let parts = forward_operations(&target, 100.0, 0.0) + forward_operations(&target, 200.0, 100.0);
        assert!((all / parts - 1.0).abs() < 1e-12);
        let asked =
            DecodeLoad { rows: 10.0, prompt: 100.0, answer: 200.0, concurrency: 5.0, value_bytes: 2.0 };
        let work = decode_work(&target, asked);
        assert_eq!(work.passes, 400.0);
        let captured = capture_work(&target, [(2.0, 300.0), (1.0, 100.0)], 5.0, 2.0);
        assert_eq!(captured.operations, 2.0 * all + forward_operations(&target, 100.0, 0.0));
        assert_eq!((captured.passes, captured.bytes), (5.0, 10.0 * target.weights));
        assert!((work.operations / (10.0 * (all + 201.0 * head_operations(&target))) - 1.0).abs() < 1e-12);
        // Every step reads all weights, and 36 layers cache 2 · 8 · 128 values per token.
        let history = 10.0 * 36.0 * 2048.0 * (200.0 * 100.0 + 200.0 * 201.0 / 2.0) * 2.0;
        assert!((work.bytes / (400.0 * 2.0 * target.weights + history) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_drafter_that_is_never_right_verifies_every_token() {
        let target = qwen3_4b();
        let asked = DecodeLoad { rows: 1.0, prompt: 10.0, answer: 100.0, concurrency: 1.0, value_bytes: 2.0 };
        let drafting = DrafterSize { length: 7.0, weights: 6e8, at_once: true };
        let [slow, fast] = [1.0, 4.0].map(|length| speculation_work(&target, drafting, asked, length));
        assert_eq!((slow.passes, fast.passes), (100.0, 25.0));
        assert!(slow.operations > 3.5 * fast.operations);
        // A sequential drafter is read once per token, including the head.
        let in_turn = speculation_work(&target, DrafterSize { at_once: false, ..drafting }, asked, 4.0);
        let again = 6.0 * 25.0 * (6e8 + 151_936.0 * 2560.0) * 2.0;
        assert!(((in_turn.bytes - fast.bytes) / again - 1.0).abs() < 1e-9);
        // At least eight tokens are verified for each committed one.
        assert!(slow.operations > 8.0 * decode_work(&target, asked).operations * 0.9);
    }
}
