//! Checks the model against the figures of the article.

use super::*;

/// The accelerator of the article.
fn b200() -> Hardware {
    ACCELERATORS[0].1
}

/// DeepSeek-V4-Flash's attention with the article's values.
fn latent(compression: f64) -> Attention {
    Attention::Latent {
        heads: 64.0,
        latent: 512.0,
        rope: 64.0,
        kv_bytes: 1.0,
        query_bytes: 2.0,
        compression,
        top: f64::INFINITY,
        index: 0.0,
        index_heads: 0.0,
    }
}

/// A layer of the article's charts, which leave out the bytes of attention's queries.
fn article() -> Target {
    Target {
        layers: vec![Layer {
            count: 1.0,
            projections: 107e6,
            projection_precision: Precision::Fp8,
            attention: Attention::Latent {
                heads: 64.0,
                latent: 512.0,
                rope: 64.0,
                kv_bytes: 1.0,
                query_bytes: 0.0,
                compression: 1.0,
                top: f64::INFINITY,
                index: 0.0,
                index_heads: 0.0,
            },
            feed_forward: FeedForward::Experts { weights: 25.2e6, experts: 256.0, active: 6.0, shared: 1.0 },
            feed_forward_precision: Precision::Fp4,
        }],
        head: 0.0,
        head_precision: Precision::Bf16,
        hidden: 0.0,
        expert_parallel: 1.0,
    }
}

/// The smallest whole number for which `holds` is true.
fn from_where(holds: impl Fn(f64) -> bool) -> f64 {
    (1..10_000_000).map(f64::from).find(|&at| holds(at)).unwrap()
}

#[test]
fn ridges_are_the_published_ones() {
    let ridges = [Precision::Bf16, Precision::Fp8, Precision::Fp4]
        .map(|kind| kind.peak_operations(&b200()) / b200().bandwidth);
    assert_eq!(ridges.map(f64::round), [281.0, 563.0, 1125.0]);
}

#[test]
fn intensities_of_latent_attention_are_the_published_ones() {
    for (context, expected) in [
        (512.0, [193.0, 322.0, 484.0, 645.0]),
        (1024.0, [215.0, 387.0, 645.0, 967.0]),
        (8192.0, [238.0, 469.0, 910.0, 1719.0]),
        (16384.0, [240.0, 476.0, 938.0, 1820.0]),
        (1048576.0, [242.0, 483.0, 967.0, 1932.0]),
    ] {
        let found =
            [1.0, 2.0, 4.0, 8.0].map(|queries| latent(1.0).work(queries, context).intensity().round());
        assert_eq!(found, expected, "{context}");
    }
}

#[test]
fn crossovers_of_attention_are_the_published_ones() {
    let ridge = b200().bf16 / b200().bandwidth;
    // T = m_c · 281 / f, where operations take as long as reading a long context.
    let at = (1..1000).map(|i| f64::from(i) / 100.0).find(|&t| latent(1.0).work(t, 1e12).intensity() > ridge);
    assert!((at.unwrap() - 1.16).abs() < 0.015, "{at:?}");
    let heavily = from_where(|context| latent(128.0).work(2.0, context).intensity() > ridge);
    assert!((44_000.0..47_000.0).contains(&heavily), "about 45k tokens, not {heavily}");
    let work = latent(1.0).work(1.0, 1.0);
    assert_eq!((work.operations, work.bytes), (139_264.0, 576.0 + 73_728.0));
    assert_eq!(mla_expansion_break_even(512.0, 128.0, 128.0).round(), 171.0, "published: past about 170");
    // An indexer with 64 heads, without the selected vectors.
    let indexer = Attention::Latent {
        heads: 0.0,
        latent: 512.0,
        rope: 64.0,
        kv_bytes: 0.0,
        query_bytes: 0.0,
        compression: 1.0,
        top: 512.0,
        index: 128.0,
        index_heads: 64.0,
    };
    assert_eq!(indexer.work(3.0, 1e5).intensity(), 3.0 * 128.0);
    // Llama 3 70B: eight query heads per key head.
    let grouped = Attention::Grouped {
        heads: 64.0,
        kv_heads: 8.0,
        head_dim: 128.0,
        kv_bytes: 2.0,
        window: f64::INFINITY,
    };
    for queries in [1.0, 2.0, 4.0] {
        assert!((grouped.work(queries, 1e9).intensity() / (8.0 * queries) - 1.0).abs() < 1e-3);
    }
    // Qwen3.5-4B: 32 states of 128 x 128 values in float32, which are 2 MiB.
    let linear = Attention::Linear { heads: 32.0, key_dim: 128.0, value_dim: 128.0, state_bytes: 4.0 };
    let state = f64::from(2 << 20);
    assert_eq!(linear.work(1.0, 10.0), Work { operations: 7.0 * state / 4.0, bytes: 2.0 * state });
    assert_eq!(linear.work(4.0, 1e6).bytes, 5.0 * state);
}

#[test]
fn experts_are_touched_as_published() {
    let (experts, active): (f64, f64) = (256.0, 6.0);
    assert_eq!((experts / active).round(), 43.0);
    let layer = article().layers[0].feed_forward;
    assert!((layer.marginal_cost(1.0) - 0.85).abs() < 0.005, "{}", layer.marginal_cost(1.0));
    assert_eq!(FeedForward::Dense { weights: 1.0 }.marginal_cost(9.0), 0.0);
    assert!((experts_touched(experts, active, 1.0) - active).abs() < 1e-9);
    // E/k tokens activate all but a share 1/e of the experts.
    let untouched = 1.0 - experts_touched(experts, active, experts / active) / experts;
    assert!((untouched - (-1f64).exp()).abs() < 0.01, "{untouched}");
    let slope = |tokens: f64| {
        experts_touched(experts, active, tokens + 0.5) - experts_touched(experts, active, tokens - 0.5)
    };
    assert!((slope(20.0) / experts_touched_by_another(experts, active, 20.0) - 1.0).abs() < 1e-3);
}

#[test]
fn knees_of_the_feed_forward_part_are_the_published_ones() {
    let fp4 = b200().fp4 / b200().bandwidth;
    let bytes = Precision::Fp4.bytes();
    let experts = article().layers[0].feed_forward;
    let knee = from_where(|tokens| experts.work(tokens, bytes).intensity() > fp4);
    assert!((10_900.0..11_000.0).contains(&knee), "about 10,950, not {knee}");
    let dense = FeedForward::Dense { weights: 1e6 };
    let slope = experts.work(1e6, bytes).intensity() / dense.work(1e6, bytes).intensity();
    assert!((slope / (7.0 / 257.0) - 1.0).abs() < 1e-9, "(k + 1) / (E + 1) once every expert is touched");
    assert_eq!(
        from_where(|tokens| dense.work(tokens, bytes).intensity() > fp4).round(),
        299.0,
        "published: about 298"
    );
    let fp8 = b200().fp8 / b200().bandwidth;
    assert_eq!(from_where(|tokens| dense.work(tokens, 1.0).intensity() > fp8), 282.0, "published: about 281");
}

/// The article prints no best lengths. It says that few requests speculate, some do not, and many
/// do again.
#[test]
fn the_best_length_has_a_gutter_between_few_and_many_requests() {
    let best = |requests: f64| {
        let load = LoadPoint { requests, context: 4096.0, acceptance: 0.75 };
        article().best_draft_length(&b200(), &DraftCost::PerToken(0.1), load, 64)
    };
    assert!(best(1.0).0 > 0);
    assert_eq!([4.0, 8.0, 12.0].map(|requests| best(requests).0), [0; 3]);
    let (length, gain) = best(64.0);
    assert!(length >= 3 && gain > 1.5, "{length}, {gain}");
    assert_eq!(best(10_000.0).0, 0, "everything computes");
}

#[test]
fn what_is_free_is_taken_and_what_is_not_costs() {
    let dense = Target {
        layers: vec![Layer {
            feed_forward: FeedForward::Dense { weights: 176e6 },
            feed_forward_precision: Precision::Bf16,
            projection_precision: Precision::Bf16,
            ..article().layers[0].clone()
        }],
        ..article()
    };
    let load = LoadPoint { requests: 1.0, context: 1.0, acceptance: 0.9 };
    assert!(dense.marginal_cost(&b200(), load, 1.0) < 0.01, "one request's weights are read anyway");
    let many = LoadPoint { requests: 4096.0, ..load };
    assert!((dense.marginal_cost(&b200(), many, 1.0) - 1.0).abs() < 0.05);
    let block = DraftCost::PerBlock { weights: 0.0, precision: Precision::Bf16 };
    let (length, gain) = dense.best_draft_length(&b200(), &block, load, 16);
    assert_eq!(length, 16);
    assert!((gain / expected_committed_tokens(0.9, 16.0) - 1.0).abs() < 0.05);
    assert_eq!((expected_committed_tokens(1.0, 3.0), expected_committed_tokens(0.0, 3.0)), (4.0, 1.0));
}

#[test]
fn accelerators_divide_tokens_and_experts_and_read_all_other_weights() {
    // Every part takes one second per operation, or per byte.
    let slow = |operations: f64, bandwidth: f64| Hardware {
        bandwidth,
        bf16: operations,
        fp8: operations,
        fp4: operations,
        link: 1.0,
    };
    let layer = |feed_forward| Layer {
        count: 1.0,
        projections: 3.0,
        projection_precision: Precision::Fp8,
        attention: Attention::Grouped {
            heads: 1.0,
            kv_heads: 1.0,
            head_dim: 1.0,
            kv_bytes: 1.0,
            window: f64::INFINITY,
        },
        feed_forward,
        feed_forward_precision: Precision::Fp8,
    };
    let experts = FeedForward::Experts { weights: 5.0, experts: 8.0, active: 2.0, shared: 1.0 };
    let of = |feed_forward, devices| Target {
        layers: vec![layer(feed_forward)],
        head: 7.0,
        head_precision: Precision::Fp8,
        hidden: 0.0,
        expert_parallel: devices,
    };
    let seconds = |target: &Target, hardware: &Hardware| target.step_seconds(hardware, 16.0, 1.0, 10.0);
    let [computing, reading] = [slow(1.0, f64::INFINITY), slow(f64::INFINITY, 1.0)];
    // Each accelerator has 4 of 16 tokens: their projections, attention to 10 tokens, experts and
    // head.
    let own = 4.0 * (2.0 * 3.0 + 4.0 * 10.0 + 2.0 * 3.0 * 5.0 + 2.0 * 7.0);
    assert!((seconds(&of(experts, 4.0), &computing) - own).abs() < 1e-9);
    let dense = FeedForward::Dense { weights: 5.0 };
    let own = 4.0 * (2.0 * 3.0 + 4.0 * 10.0 + 2.0 * 5.0 + 2.0 * 7.0);
    assert!((seconds(&of(dense, 4.0), &computing) - own).abs() < 1e-9, "dense layers too");
    // It reads a quarter of the experts that 16 tokens activate, the shared expert, and all other
    // weights.
    let history = 4.0 * (2.0 * 10.0 + 4.0);
    let read = 3.0 + history + 5.0 * (experts_touched(8.0, 2.0, 16.0) / 4.0 + 1.0) + 7.0;
    assert!((seconds(&of(experts, 4.0), &reading) - read).abs() < 1e-9);
    assert!((seconds(&of(dense, 4.0), &reading) - (3.0 + history + 5.0 + 7.0)).abs() < 1e-9);
    // Each token goes to two experts, three quarters of them on other accelerators: 11 values of 16
    // bits, out and back.
    let linked = Target { hidden: 11.0, ..of(experts, 4.0) };
    let hardware = Hardware { link: 2.0, ..computing };
    let sent = seconds(&linked, &hardware) - seconds(&of(experts, 4.0), &hardware);
    assert!((sent - 2.0 * 4.0 * 2.0 * (2.0 * 11.0) * 0.75 / 2.0).abs() < 1e-9, "{sent}");
    let dense_linked = Target { hidden: 11.0, ..of(dense, 4.0) };
    assert_eq!(seconds(&dense_linked, &hardware), seconds(&of(dense, 4.0), &hardware), "nothing to send");
    // Each accelerator drafts for its own requests with a whole copy of the drafter.
    let drafting = |draft: &DraftCost| of(experts, 4.0).draft_seconds(&computing, draft, 16.0, 2.0, 10.0);
    let block = DraftCost::PerBlock { weights: 9.0, precision: Precision::Fp8 };
    assert_eq!(drafting(&block), 2.0 * 9.0 * 4.0 * 2.0);
    let model = of(dense, 1.0);
    let [at_once, in_turn] =
        [true, false].map(|at_once| drafting(&DraftCost::Model { model: model.clone(), at_once }));
    assert_eq!(at_once, model.step_seconds(&computing, 4.0, 2.0, 10.0));
    assert_eq!(in_turn, 2.0 * model.step_seconds(&computing, 4.0, 1.0, 10.0));
}

#[test]
fn windows_and_indexers_bound_what_is_read() {
    let grouped =
        |window| Attention::Grouped { heads: 4.0, kv_heads: 2.0, head_dim: 8.0, kv_bytes: 2.0, window };
    let read = |window| grouped(window).work(3.0, 100.0);
    assert_eq!(read(10.0).operations, 4.0 * 4.0 * 8.0 * 3.0 * 10.0);
    assert_eq!(read(1000.0).bytes - read(10.0).bytes, 2.0 * 2.0 * 8.0 * 2.0 * 90.0, "queries cost the same");
    // 100 tokens are stored as 50 vectors. The indexer reads the keys of all and selects 20 per
    // query.
    let picked = |top| Attention::Latent {
        heads: 4.0,
        latent: 6.0,
        rope: 2.0,
        kv_bytes: 1.0,
        query_bytes: 0.0,
        compression: 2.0,
        top,
        index: 5.0,
        index_heads: 3.0,
    };
    let work = picked(20.0).work(3.0, 100.0);
    assert_eq!(work.operations, 2.0 * 4.0 * (2.0 * 6.0 + 2.0) * 3.0 * 20.0 + 2.0 * 3.0 * 5.0 * 3.0 * 50.0);
    assert_eq!(work.bytes, 8.0 * 20.0 + 5.0 * 50.0);
    assert_eq!(
        picked(512.0).work(3.0, 100.0).bytes,
        8.0 * 50.0 + 5.0 * 50.0,
        "fewer are stored than it may pick"
    );
}
