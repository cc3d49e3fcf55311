//! Memory that the models leave for the KV cache.

use deepspec_engine::Target;
use deepspec_ops::kv_attention::MAX_SPARE_BYTES;

use crate::TargetModel;
use crate::nn::LayerSpec;

/// Maximum prompt tokens of a step.
const MAX_PROMPT_TOKENS: usize = 8192;
/// Tenths of the free memory that the KV cache may use. Allocators round up, and other programs allocate too.
const USABLE_TENTHS: u64 = 9;

/// Bytes that the KV caches of all sequences may use: free memory minus the peak of a step in each of `engines`
/// engines. A step verifies up to `drafted` tokens of each sequence. None if the device does not report its free memory.
pub fn kv_cache_budget(target: &TargetModel, drafted: usize, slots: usize, engines: usize) -> Option<u64> {
    let free = deepspec_ops::free_memory(target.device())?;
    let judged = slots.div_ceil(engines.max(1)) * (1 + drafted);
    let working = target.peak_forward_bytes(MAX_PROMPT_TOKENS + judged, judged);
    let has_cache = |layer: &&LayerSpec| layer.gated_delta.is_none();
    let layers = target.config().layers.iter().filter(has_cache).count() as u64;
    let kept = 2 * MAX_SPARE_BYTES as u64;
    let left = (free / 10 * USABLE_TENTHS).saturating_sub(engines as u64 * (working + kept));
    // A pool that grows holds one layer twice.
    Some(left / (layers + 1) * layers)
}

/// Whether sequences of one length fit into memory.
#[derive(Debug, PartialEq, Eq)]
pub enum MemoryFit {
    /// All sequences fit.
    All,
    /// At least one sequence fits, but not all.
    Fewer {
        /// Explanation for the log, without a period.
        told: String,
    },
    /// Not even one sequence fits.
    Shorter {
        /// Maximum tokens of one sequence.
        tokens: usize,
        /// Explanation for the log, without a period.
        told: String,
    },
}

/// Compares `slots` sequences of `context` tokens with `memory` bytes. `bytes` returns the bytes of a sequence
/// of a number of tokens.
pub fn check_memory_fit(
    slots: usize,
    context: usize,
    memory: u64,
    bytes: impl Fn(usize) -> u64,
) -> MemoryFit {
    let gigabytes = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
    let one = bytes(context);
    let all = one.saturating_mul(slots as u64);
    let told = |what: String, taken: u64, rest: String| {
        format!(
            "the caches of {what} of {context} tokens take {}, {} are free for them{rest}",
            gigabytes(taken),
            gigabytes(memory)
        )
    };
    if all <= memory {
        return MemoryFit::All;
    }
    if one <= memory {
        let rest = format!(": {} of this length run at once", memory / one.max(1));
        return MemoryFit::Fewer { told: told(format!("{slots} conversations"), all, rest) };
    }
    let (mut fits, mut exceeds) = (0, context);
    while exceeds - fits > 1 {
        let middle = fits + (exceeds - fits) / 2;
        if bytes(middle) <= memory { fits = middle } else { exceeds = middle }
    }
    MemoryFit::Shorter { tokens: fits, told: told("one conversation".into(), one, String::new()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_and_context_are_set_against_the_memory() {
        let bytes = |tokens: usize| tokens as u64 * 1_000_000;
        assert_eq!(check_memory_fit(4, 1000, 4_000_000_000, bytes), MemoryFit::All);
        let MemoryFit::Fewer { told } = check_memory_fit(4, 1000, 2_500_000_000, bytes) else {
            panic!("two have room")
        };
        assert_eq!(
            told,
            "the caches of 4 conversations of 1000 tokens take 4.00 GB, 2.50 GB are free for them: 2 of this length run at once"
        );
        let MemoryFit::Shorter { tokens, told } = check_memory_fit(4, 1000, 600_400_000, bytes) else {
            panic!("none has room")
        };
        assert_eq!(tokens, 600);
        assert!(told.contains("one conversation of 1000 tokens take 1.00 GB, 0.60 GB are free"), "{told}");
        assert!(matches!(check_memory_fit(1, 10, 0, bytes), MemoryFit::Shorter { tokens: 0, .. }));
    }
}
