//! Blocks have the same bits in every batch. Short sequences together run through fused layers;
//! next to a sequence with a long KV cache they run operator by operator. The long one runs alone
//! in either way.

use std::path::Path;

use deepspec_drafters::{DSpark, DSparkProposer};
use deepspec_engine::Context;
use tch::{Device, Kind, Tensor};

/// Lengths of the KV caches in tokens: the last one is too long to be read in place.
const HISTORIES: [usize; 3] = [50, 9, 33_000];

/// The drafts of slots with these KV caches, and their states and logits: `[γ]`, `[γ, d]` and `[γ,
/// V]` for each.
fn drafts(slots: &[usize]) -> Vec<[Tensor; 3]> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/tiny-dspark");
    let model = DSpark::load_packed(&dir, Device::Cpu, Kind::Float).unwrap_or_else(|error| panic!("{error}"));
    let mut proposer = DSparkProposer::new(model, HISTORIES.len());
    let states = |slot: usize| {
        let values = deepspec_testkit::noise(slot as u64, HISTORIES[slot] * 3 * 192);
        Tensor::from_slice(&values).view([-1, 3 * 192])
    };
    let tokens = |slot: usize| Tensor::full([HISTORIES[slot] as i64], 7, (Kind::Int64, Device::Cpu));
    let joined = |of: &dyn Fn(usize) -> Tensor| {
        Tensor::cat(&slots.iter().map(|&slot| of(slot)).collect::<Vec<_>>(), 0)
    };
    let context = Context {
        captured_states: joined(&states),
        hidden: None,
        tokens: joined(&tokens),
        next: joined(&tokens),
        chunks: slots.iter().map(|&slot| (slot, HISTORIES[slot])).collect(),
    };
    let anchors: Vec<i64> = slots.iter().map(|&slot| 11 + slot as i64).collect();
    let (mut logits, mut tokens) = (vec![], vec![]);
    let drafting = proposer.forward(&context, slots, &Tensor::from_slice(&anchors), |_, row| {
        logits.push(row.copy());
        tokens.push(row.argmax(-1, false));
        row.argmax(-1, false)
    });
    let (logits, tokens) = (Tensor::stack(&logits, 1), Tensor::stack(&tokens, 1));
    let of = |row: i64| [&tokens, &drafting.hidden, &logits].map(|all| all.get(row));
    (0..slots.len() as i64).map(of).collect()
}

#[test]
#[cfg_attr(not(feature = "kernels"), ignore = "rows have the same bits in every batch with kernels only")]
fn blocks_have_the_same_bits_whatever_they_are_drafted_beside() {
    let _no_grad = tch::no_grad_guard();
    let short = drafts(&[0, 1]);
    let beside = drafts(&[2, 0, 1]);
    for (slot, together) in short.iter().enumerate() {
        let alone = drafts(&[slot]).remove(0);
        for (what, (alone, others)) in ["tokens", "states", "logits"]
            .iter()
            .zip(alone.iter().zip(together.iter().zip(&beside[slot + 1])))
        {
            assert!(alone.equal(others.0) && alone.equal(others.1), "{what} of slot {slot}");
        }
    }
    assert!(short[0][2].ne_tensor(&short[1][2]).any().int64_value(&[]) != 0, "both draft the same");
    let (alone, together) = (drafts(&[2]).remove(0), &beside[0]);
    assert!(alone.iter().zip(together).all(|(alone, together)| alone.equal(together)), "the long one");
}
