//! Forward and backward of the attention of 512 blocks over 4,096 tokens on one thread. Compares
//! attention without a mask, libtorch's fused attention with a mask, and separate matmuls. `cargo
//! bench -p deepspec-drafters --bench attention`; the peak memory of each is printed first.

#![expect(clippy::print_stdout, reason = "its figures")]

#[path = "../tests/common/dense_attention.rs"]
mod dense_attention;

use std::fs;

use criterion::{Criterion, criterion_group, criterion_main};
use deepspec_models::nn::{AttentionSpec, Heads, Qkv};
use deepspec_ops::kv_attention::MaskKind;
use deepspec_ops::{BlockAttention, BlockShape, SequenceAnchors};
use dense_attention::{dense_attention, seen};
use tch::{Device, Kind, Tensor};

const BLOCKS: i64 = 512;
const SIZE: i64 = 7;
const TOKENS: i64 = 4096;
const HEADS: Heads = Heads { query: 4, key_value: 2, dim: 64 };
const SHAPE: BlockShape = BlockShape { size: SIZE as usize, mask: MaskKind::Block };
const SPEC: AttentionSpec = AttentionSpec { heads: HEADS, scale: 0.125, window: None, sinks: false };

struct Inputs {
    block: Qkv,
    k: Tensor,
    v: Tensor,
    span: SequenceAnchors,
}

/// `blocks` blocks over a context of proportional length.
fn inputs(blocks: i64) -> Inputs {
    let values = |rows: i64, heads: i64| {
        Tensor::randn([rows, heads, HEADS.dim], (Kind::Float, Device::Cpu)).set_requires_grad(true)
    };
    let (rows, tokens) = (blocks * SIZE, blocks * TOKENS / BLOCKS);
    let anchors: Vec<usize> = (0..blocks).map(|i| (i * TOKENS / BLOCKS + i * i % 7) as usize).collect();
    let positions: Vec<i64> = anchors.iter().map(|&anchor| anchor as i64).collect();
    Inputs {
        block: Qkv {
            q: values(rows, HEADS.query),
            k: values(rows, HEADS.key_value),
            v: values(rows, HEADS.key_value),
            sinks: None,
        },
        k: values(tokens, HEADS.key_value),
        v: values(tokens, HEADS.key_value),
        span: SequenceAnchors { tokens, anchors, positions: Tensor::from_slice(&positions) },
    }
}

fn merged(inputs: &Inputs) {
    let plan = BlockAttention::new(&SPEC, SHAPE, std::slice::from_ref(&inputs.span), Kind::Float);
    plan.forward(&inputs.block, &inputs.k, &inputs.v).sum(Kind::Float).backward();
}

fn dense(inputs: &Inputs) {
    let y = dense_attention(&SPEC, SHAPE, &inputs.span.positions, &inputs.block, &inputs.k, &inputs.v);
    y.sum(Kind::Float).backward();
}

fn one_call(inputs: &Inputs) {
    let Inputs { block, k, v, span } = inputs;
    let [k, v, seen] = seen(&SPEC, SHAPE, &span.positions, block, k, v).map(|tensor| tensor.unsqueeze(0));
    let (q, seen) = (block.q.transpose(0, 1).unsqueeze(0), seen.unsqueeze(0));
    let y = Tensor::scaled_dot_product_attention(&q, &k, &v, Some(&seen), 0.0, false, SPEC.scale, false);
    y.sum(Kind::Float).backward();
}

/// Peak memory of the process during `work`, minus its memory before, in bytes.
fn held(work: impl Fn()) -> u64 {
    let kilobytes = |key: &str| -> u64 {
        let status = fs::read_to_string("/proc/self/status").expect("Linux");
        let line = status.lines().find(|line| line.starts_with(key)).expect("the kernel tells it");
        line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number")
    };
    fs::write("/proc/self/clear_refs", "5").expect("Linux");
    let before = kilobytes("VmRSS");
    work();
    (kilobytes("VmHWM") - before) * 1024
}

fn attention(c: &mut Criterion) {
    tch::set_num_threads(1);
    let (small, inputs) = (inputs(4), inputs(BLOCKS));
    let ways = [
        ("without a mask", merged as fn(&Inputs)),
        ("with a mask, one call", one_call),
        ("with a mask, product by product", dense),
    ];
    for (name, work) in ways {
        work(&small); // warms up libtorch's permanent allocations
        println!("{name}: {:.1} MB at most", held(|| work(&inputs)) as f64 / 1e6);
    }
    let mut group = c.benchmark_group("attention");
    group.sample_size(10);
    for (name, work) in ways {
        group.bench_function(name, |b| b.iter(|| work(&inputs)));
    }
    group.finish();
}

criterion_group!(benches, attention);
criterion_main!(benches);
