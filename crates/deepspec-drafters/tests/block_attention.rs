//! Compares attention without a mask with attention with a mask: values and all gradients.

mod common;
#[path = "common/dense_attention.rs"]
mod dense_attention;

use common::device;
use deepspec_models::nn::{AttentionSpec, Heads, Qkv};
use deepspec_ops::kv_attention::MaskKind;
use deepspec_ops::{BlockAttention, BlockShape, SequenceAnchors};
use dense_attention::dense_attention;
use tch::{Device, Kind, Tensor};

struct Case {
    heads: Heads,
    window: Option<usize>,
    shape: BlockShape,
    anchors: Vec<usize>,
    tokens: i64,
}

impl Case {
    /// Output and gradients of queries, keys and values of blocks and context, with attention
    /// computed by `attend`.
    fn run(
        &self,
        kind: Kind,
        attend: impl Fn(&AttentionSpec, &Qkv, &Tensor, &Tensor) -> Tensor,
    ) -> Vec<Tensor> {
        let Heads { query, key_value, dim } = self.heads;
        let spec = AttentionSpec {
            heads: self.heads,
            scale: (dim as f64).powf(-0.5),
            window: self.window,
            sinks: false,
        };
        let rows = (self.anchors.len() * self.shape.size) as i64;
        let values = |seed: f64, shape: [i64; 3]| {
            let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
            let values = ((numbers * 0.731 + seed).sin() * 37.0).sin() * 1.5;
            values.view(shape).to_kind(kind).to_device(device()).set_requires_grad(true)
        };
        let block = Qkv {
            q: values(0.1, [rows, query, dim]),
            k: values(0.2, [rows, key_value, dim]),
            v: values(0.3, [rows, key_value, dim]),
            sinks: None,
        };
        let [k, v] = [0.4, 0.5].map(|seed| values(seed, [self.tokens, key_value, dim]));
        let y = attend(&spec, &block, &k, &v);
        let slope = values(0.6, [rows, query, dim]).view([rows, query * dim]).detach();
        (&y * slope).sum(Kind::Float).backward();
        let gradients = [&block.q, &block.k, &block.v, &k, &v].map(Tensor::grad);
        [y.detach()].into_iter().chain(gradients).map(|found| found.to_kind(Kind::Double)).collect()
    }

    fn merged(&self, kind: Kind) -> Vec<Tensor> {
        let positions: Vec<i64> = self.anchors.iter().map(|&anchor| anchor as i64).collect();
        let positions = Tensor::from_slice(&positions).to_device(device());
        self.run(kind, |spec, block, k, v| {
            let (anchors, positions) = (self.anchors.clone(), positions.shallow_clone());
            let span = SequenceAnchors { tokens: self.tokens, anchors, positions };
            BlockAttention::new(spec, self.shape, &[span], kind).forward(block, k, v)
        })
    }

    fn dense(&self) -> Vec<Tensor> {
        let positions: Vec<i64> = self.anchors.iter().map(|&anchor| anchor as i64).collect();
        let positions = Tensor::from_slice(&positions).to_device(device());
        self.run(Kind::Double, |spec, block, k, v| dense_attention(spec, self.shape, &positions, block, k, v))
    }
}

const NAMES: [&str; 6] =
    ["output", "slope of q", "slope of own k", "slope of own v", "slope of k", "slope of v"];

/// Largest difference, relative to the largest value.
fn distances(case: &Case, kind: Kind) -> Vec<f64> {
    let of = |tensor: &Tensor| tensor.abs().max().double_value(&[]);
    let pairs = case.merged(kind).into_iter().zip(case.dense());
    pairs.map(|(found, expected)| of(&(found - &expected)) / of(&expected).max(1e-3)).collect()
}

fn cases() -> Vec<Case> {
    let many: Vec<usize> = (0..75).map(|i| i * i * 7 % 5 + 3 * i).collect();
    let mut cases = vec![];
    for heads in [
        Heads { query: 4, key_value: 4, dim: 16 },
        Heads { query: 6, key_value: 2, dim: 48 },
        Heads { query: 4, key_value: 1, dim: 256 },
    ] {
        for window in [None, Some(1), Some(3), Some(7), Some(40), Some(120), Some(1000)] {
            let case = |anchors: &[usize], tokens| {
                let anchors = anchors.to_vec();
                Case { heads, window, shape: BlockShape { size: 7, mask: MaskKind::Block }, anchors, tokens }
            };
            let causal = BlockShape { size: 7, mask: MaskKind::Causal };
            // A slot that sees itself alone has no slope of q to compare with.
            if window != Some(1) {
                cases.push(Case { shape: causal, ..case(&many, 240) });
            }
            // Three tiles, the last of them not full. With a window of 120, the keys that all
            // blocks of a tile see lie between keys that only some see. Then one block without
            // context, and blocks that are far apart.
            cases.extend([case(&many, 240), case(&[0], 3), case(&[0, 1, 150], 200)]);
            // Unordered anchors, some of them isolated.
            cases.push(case(&[900, 3, 640, 644, 0, 899, 320, 70, 71, 898], 901));
        }
    }
    cases
}

#[test]
fn it_is_that_of_a_mask_over_all_keys() {
    for case in cases() {
        for (name, distance) in NAMES.iter().zip(distances(&case, Kind::Float)) {
            let Case { heads, window, anchors, shape, .. } = &case;
            assert!(
                distance < 5e-6,
                "{name}: {distance:e}, {heads:?}, {shape:?}, window {window:?}, {} blocks",
                anchors.len()
            );
        }
    }
}

#[test]
fn in_bfloat16_it_is_as_close_as_bfloat16_can_be() {
    for case in cases() {
        for (name, distance) in NAMES.iter().zip(distances(&case, Kind::BFloat16)) {
            let Case { heads, window, .. } = &case;
            assert!(distance < 0.03, "{name}: {distance:e}, {heads:?}, window {window:?}");
        }
    }
}

/// Sequences do not see each other; on the CPU a sequence has the same bits in a batch as alone.
#[test]
fn sequences_ride_together_as_they_do_alone() {
    let heads = Heads { query: 4, key_value: 2, dim: 32 };
    let spec = AttentionSpec { heads, scale: 0.2, window: None, sinks: false };
    let (size, spans) = (3, [(50, vec![4_usize, 9, 40]), (400, vec![0, 300, 310, 311, 399])]);
    for kind in [Kind::Float, Kind::BFloat16] {
        let run = |spans: &[&(i64, Vec<usize>)], of: [usize; 2]| {
            let rows: i64 = spans.iter().map(|(_, anchors)| (anchors.len() * size) as i64).sum();
            let tokens: i64 = spans.iter().map(|(tokens, _)| tokens).sum();
            // A slice of the values of the whole batch.
            let values = |seed: f64, heads: i64, all: i64, first: usize, count: i64| {
                let numbers = Tensor::arange(all * heads * 32, (Kind::Double, Device::Cpu));
                let all = ((numbers * 0.731 + seed).sin() * 37.0).sin().view([all, heads, 32]);
                let part = all.narrow(0, first as i64, count).to_kind(kind).to_device(device()).copy();
                part.set_requires_grad(true)
            };
            let [first_row, first_token] = of;
            let of_rows = |seed, heads| values(seed, heads, 24, first_row, rows);
            let block = Qkv { q: of_rows(0.1, 4), k: of_rows(0.2, 2), v: of_rows(0.3, 2), sinks: None };
            let [k, v] = [0.4, 0.5].map(|seed| values(seed, 2, 450, first_token, tokens));
            let spans: Vec<SequenceAnchors> = spans
                .iter()
                .map(|(tokens, anchors)| {
                    let positions: Vec<i64> = anchors.iter().map(|&anchor| anchor as i64).collect();
                    let positions = Tensor::from_slice(&positions).to_device(device());
                    SequenceAnchors { tokens: *tokens, anchors: anchors.clone(), positions }
                })
                .collect();
            let y = BlockAttention::new(&spec, BlockShape { size, mask: MaskKind::Block }, &spans, kind)
                .forward(&block, &k, &v);
            (&y * y.detach().cos()).sum(Kind::Float).backward();
            let gradients = [&block.q, &block.k, &block.v, &k, &v].map(Tensor::grad);
            [y.detach()].into_iter().chain(gradients).collect::<Vec<_>>()
        };
        let together = run(&[&spans[0], &spans[1]], [0, 0]);
        let alone = [run(&[&spans[0]], [0, 0]), run(&[&spans[1]], [9, 50])];
        for (i, (name, together)) in NAMES.iter().zip(&together).enumerate() {
            let alone = Tensor::cat(&[&alone[0][i], &alone[1][i]], 0);
            let off = (together - &alone).abs().max().double_value(&[]);
            let allowed = match (device(), kind) {
                (Device::Cpu, _) => 0.0,
                (_, Kind::Float) => 1e-5,
                _ => 0.01,
            };
            assert!(off <= allowed, "{name} in {kind:?}: off by {off}");
        }
    }
}
