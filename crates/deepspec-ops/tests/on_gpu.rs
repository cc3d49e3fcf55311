//! Tests this crate's own GPU kernels. They run in a separate program, in which no code asks for
//! GPUs before libtorch's CUDA part is loaded. With DEEPSPEC_TEST_DEVICE=cuda the kernels are
//! compared with the formulas; without a GPU there are no kernels.

use std::sync::OnceLock;

use deepspec_ops::RmsNormParams;
use deepspec_ops::kernels::{
    KvChunk, KvWindow, LogitRows, ProjectedHeads, decode_attention, decode_gated_product, decode_product,
    has_decode_kernels, rotate, silu_times,
};
use tch::{Device, Kind, Tensor};

fn test_device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let name = || std::env::var("DEEPSPEC_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    *DEVICE.get_or_init(|| deepspec_ops::parse_device(&name()).unwrap())
}

fn logits_of(rows: i64, vocab: i64, step: f64) -> Tensor {
    let angles = Tensor::arange(rows * vocab, (Kind::Double, Device::Cpu)) * step;
    (angles.sin().view([rows, vocab]) * 6.0).to_kind(Kind::BFloat16)
}

fn values(shape: &[i64], step: f64) -> Tensor {
    let count = shape.iter().product::<i64>();
    let angles = Tensor::arange(count, (Kind::Double, Device::Cpu)) * step;
    ((angles.sin() * 37.0).sin() * 0.7).view(shape).to_kind(Kind::BFloat16)
}

fn assert_near(found: &Tensor, exact: &Tensor, what: &str) {
    let found = found.to_device(Device::Cpu).to_kind(Kind::Double);
    let off = (found - exact).abs().max().double_value(&[]);
    assert!(off <= 0.012 * exact.abs().max().double_value(&[]), "{what}: off by {off}");
}

/// On a GPU, a layer of a few rows matches the formulas in float64; elsewhere there are no kernels.
#[test]
fn a_layer_of_a_few_rows_is_that_of_the_formulas() {
    for window in [None, Some(150)] {
        compare_layer([6, 2, 64], [5, 200, 0], window);
        // KV caches that span several blocks of keys, blocks with more keys, and chunks that cross
        // a block boundary.
        compare_layer([8, 1, 128], [2100, 0, 8500], window);
        compare_layer([2, 2, 128], [40, 2046, 1], window);
    }
}

fn compare_layer([query, group, dim]: [i64; 3], past: [usize; 3], window: Option<usize>) {
    let capacity = past.into_iter().max().unwrap_or(0) as i64 + 16;
    let (width, inner, eps) = (256, 320, 1e-6);
    let device = test_device();
    if device == Device::Cpu {
        assert!(!has_decode_kernels(&values(&[1], 1.0), width, inner, dim, query / group));
        return;
    }
    let there = |of: &Tensor| of.to_device(device);
    assert!(has_decode_kernels(&there(&values(&[1], 1.0)), width, inner, dim, query / group));
    let exact = |of: &Tensor| of.to_kind(Kind::Double);
    let rounded = |of: &Tensor| of.to_kind(Kind::BFloat16).to_kind(Kind::Double);
    let norm = |x: &Tensor, gain: &Tensor| {
        let mean = x.square().mean_dim([-1].as_slice(), true, Kind::Double);
        rounded(&(x * (mean + eps).rsqrt() * exact(gain)))
    };
    let (gain, head_gain) = (values(&[width], 0.3) + 1.0, values(&[dim], 0.9) + 1.0);
    let [w1, w2, w3] = [(query * dim, 0.11), (group * dim, 0.17), (group * dim, 0.19)]
        .map(|(outputs, step)| values(&[outputs, width], step));
    let [gate, up] = [0.23, 0.29].map(|step| values(&[inner, width], step));
    let rows: i64 = 8;
    let lens = [3_usize, 4, 1];
    let x = values(&[rows, width], 0.41);
    let [cosines, sines] = [0.7, 1.1].map(|step| values(&[rows, 1, dim / 2], step));
    let pool = [0.37, 0.53].map(|step| values(&[3, capacity, group, dim], step));
    let pools = [there(&pool[0]).copy(), there(&pool[1]).copy()];
    let device_x = there(&x);
    let qkv = decode_product(
        &device_x,
        Some(RmsNormParams { weights: &there(&gain), eps }),
        &[&there(&w1), &there(&w2), &there(&w3)],
        None,
    );
    let normed = norm(&exact(&x), &gain);
    let products = [&w1, &w2, &w3].map(|w| normed.matmul(&exact(w).tr()));
    assert_near(&qkv, &Tensor::cat(&products, 1), "queries, keys and values");
    let alone = decode_product(
        &device_x.narrow(0, 0, 1),
        Some(RmsNormParams { weights: &there(&gain), eps }),
        &[&there(&w1), &there(&w2), &there(&w3)],
        None,
    );
    assert!(alone.equal(&qkv.narrow(0, 0, 1)), "a lone row has other bits");

    let mut first = 0;
    let chunks: Vec<KvChunk> = (0..3)
        .map(|i| {
            first += lens[i];
            let (row, past_len, len) = (2 - i, past[i], lens[i]);
            KvChunk { pool: [&pools[0], &pools[1]], row, past_len, len, first: first - len }
        })
        .collect();
    let device_gain = there(&head_gain);
    let head_norm = RmsNormParams { weights: &device_gain, eps };
    let angles = [&there(&cosines), &there(&sines)];
    let heads = ProjectedHeads { query, key_value: group, dim, gains: Some([head_norm; 2]), angles };
    let view = KvWindow { scale: 0.3, window, sees_chunk: false };
    let found = decode_attention(&qkv, &heads, &chunks, view);
    let products = exact(&qkv.to_device(Device::Cpu));
    let turned = |of: &Tensor, heads: i64| {
        let x = norm(&of.view([rows, heads, dim]), &head_gain);
        let (a, b) = (x.narrow(2, 0, dim / 2), x.narrow(2, dim / 2, dim / 2));
        let (c, s) = (exact(&cosines), exact(&sines));
        rounded(&Tensor::cat(&[&a * &c - &b * &s, &b * &c + &a * &s], 2))
    };
    let q = turned(&products.narrow(1, 0, query * dim), query);
    let k = turned(&products.narrow(1, query * dim, group * dim), group);
    let v = products.narrow(1, (query + group) * dim, group * dim).view([rows, group, dim]);
    let mut outputs = vec![];
    for chunk in &chunks {
        let all = |pool: &Tensor, new: &Tensor| {
            let before = exact(&pool.get(chunk.row as i64)).narrow(0, 0, chunk.past_len as i64);
            Tensor::cat(&[before, new.narrow(0, chunk.first as i64, chunk.len as i64)], 0)
        };
        let (keys, values) = (all(&pool[0], &k), all(&pool[1], &v));
        for (pool, expected) in pools.iter().zip([&keys, &values]) {
            let stored = pool.get(chunk.row as i64).narrow(0, 0, expected.size()[0]);
            assert_near(&stored, expected, "a history");
        }
        for i in 0..chunk.len {
            let position = chunk.past_len + i;
            let from = window.map_or(0, |window| (position + 1).saturating_sub(window)) as i64;
            let seen = |of: &Tensor| {
                of.narrow(0, from, position as i64 + 1 - from)
                    .repeat_interleave_self_int(query / group, 1, None)
                    .transpose(0, 1)
            };
            let mine = q.get((chunk.first + i) as i64).unsqueeze(1); // [H, 1, D]
            let scores = mine.matmul(&seen(&keys).transpose(1, 2)) * 0.3;
            outputs.push(scores.softmax(-1, Kind::Double).matmul(&seen(&values)).flatten(0, 2));
        }
    }
    assert_near(&found, &Tensor::stack(&outputs, 0), "attention");
    let of_first = angles.map(|of| of.narrow(0, 0, lens[0] as i64));
    let heads = ProjectedHeads { angles: [&of_first[0], &of_first[1]], ..heads };
    let alone = decode_attention(&qkv.narrow(0, 0, lens[0] as i64), &heads, &chunks[..1], view);
    assert!(alone.equal(&found.narrow(0, 0, lens[0] as i64)), "a lone chunk has other bits");

    let opened = decode_gated_product(
        &device_x,
        RmsNormParams { weights: &there(&gain), eps },
        &there(&gate),
        &there(&up),
    );
    for rows in [1, 2, 3] {
        let gain = RmsNormParams { weights: &there(&gain), eps };
        let alone = decode_gated_product(&device_x.narrow(0, 0, rows), gain, &there(&gate), &there(&up));
        assert!(alone.equal(&opened.narrow(0, 0, rows)), "{rows} rows have other bits");
    }
    let [left, right] = [&gate, &up].map(|w| normed.matmul(&exact(w).tr()));
    assert_near(&opened, &(left.silu() * right), "a gated product");
    let down = values(&[width, inner], 0.31);
    let closed = decode_product(&opened, None, &[&there(&down)], Some(&device_x));
    let opened = exact(&opened.to_device(Device::Cpu));
    assert_near(&closed, &(opened.matmul(&exact(&down).tr()) + exact(&x)), "what closes a layer");
}

/// On a GPU, the distances of bfloat16 logits match float64 computations on the same numbers;
/// elsewhere there are no kernels.
#[test]
fn logits_on_a_gpu_are_measured_where_they_lie() {
    let device = test_device();
    let labels = Tensor::from_slice(&[3_i64, 0, 36, 7, 7]);
    let source = Tensor::from_slice(&[0_i64, 0, 2, 1, 1]);
    // Vocabularies that are and are not a multiple of the vector size.
    for (vocab, cap, has_bias, shares) in [
        (4096, None, true, true),
        (4099, None, false, false),
        (1000, Some(3.0), true, true),
        (37, Some(2.0), false, false),
    ] {
        let of = |rows, step| logits_of(rows, vocab, step);
        let (base, bias, target) = (of(5, 0.37), of(5, 0.11), of(if shares { 3 } else { 5 }, 1.3));
        let there = [&base, &bias, &target, &labels, &source].map(|of| of.to_device(device).copy());
        let logits = || LogitRows {
            base: &there[0],
            bias: has_bias.then_some(&there[1]),
            target: &there[2],
            source_of_row: shares.then_some(&there[4]),
            labels: &there[3],
            cap,
        };
        let Some(measured) = logits().measure() else {
            assert_eq!(device, Device::Cpu, "no kernels on the GPU");
            continue;
        };
        let exact = |of: &Tensor| of.to_kind(Kind::Double);
        let bent = |of: &Tensor| cap.map_or_else(|| exact(of), |cap| (exact(of) / cap).tanh() * cap);
        let draft = bent(&base) + if has_bias { exact(&bias) } else { exact(&bias).zeros_like() };
        let theirs = if shares { bent(&target).index_select(0, &source) } else { bent(&target) };
        let (p, t) = (draft.softmax(-1, Kind::Double), theirs.softmax(-1, Kind::Double));
        let (log_p, log_t) = (draft.log_softmax(-1, Kind::Double), theirs.log_softmax(-1, Kind::Double));
        let sum = |of: Tensor| of.sum_dim_intlist(-1, true, Kind::Double);
        let found = measured.distances();
        let (soft, kl) = found.soft.unwrap();
        let host = |of: &Tensor| of.to_device(Device::Cpu);
        let expected = [
            (found.ce, -log_p.gather(1, &labels.unsqueeze(1), false), "ce"),
            (found.l1, sum((&p - &t).abs()), "l1"),
            (found.overlap, sum(p.minimum(&t)), "overlap"),
            (soft, -sum(&t * &log_p), "soft"),
            (kl, sum(&t * (&log_t - &log_p)), "kl"),
            (
                measured.agreement(),
                draft.argmax(-1, true).eq_tensor(&theirs.argmax(-1, true)).to_kind(Kind::Double),
                "agreement",
            ),
        ];
        for (found, exact, what) in &expected {
            let off = (host(found).to_kind(Kind::Double) - exact).abs().max().double_value(&[]);
            assert!(
                off <= 2e-5 * exact.abs().max().double_value(&[]).max(1.0),
                "{what} of {vocab}: off by {off}"
            );
        }
        let factors = Tensor::from_slice(&[0.5f32, 0.25, 2.0]).repeat([5, 1]);
        logits().backward(&measured, &factors.to_device(device));
        let sign = (&p - &t).sign();
        let label = Tensor::zeros_like(&p).scatter_value(1, &labels.unsqueeze(1), 1.0);
        let along = &sign - sum(&p * &sign);
        let by_logit = (&p - label) * 0.5 + (&p - &t) * 0.25 + &p * along * 2.0;
        let by_base = match cap {
            Some(cap) => &by_logit * (1.0 - (exact(&base) / cap).tanh().square()),
            None => by_logit.shallow_clone(),
        };
        let near = |found: &Tensor, exact: &Tensor, what| {
            let off = (host(found).to_kind(Kind::Double) - exact).abs().max().double_value(&[]);
            // Half a unit of bfloat16, plus a sign that rounding may flip where both probabilities
            // are equal.
            assert!(off <= 0.005 * exact.abs().max().double_value(&[]), "{what} of {vocab}: off by {off}");
        };
        if has_bias {
            near(&there[1], &by_logit, "slope by the bias");
        }
        if cap.is_some() || !has_bias {
            near(&there[0], &by_base, "slope by the base");
        } else {
            assert_eq!(host(&there[0]), base, "the base is not written");
        }
    }
}

/// Values and gradients of rotations and gates.
#[test]
fn rotations_and_gates_are_those_of_the_formulas() {
    let device = test_device();
    let learned = |shape: &[i64], step: f64| values(shape, step).to_device(device).set_requires_grad(true);
    let (x, gate, up) = (learned(&[5, 3, 64], 0.3), learned(&[5, 40], 0.7), learned(&[5, 40], 0.9));
    let [cosines, sines] = [0.7, 1.1].map(|step| values(&[5, 1, 32], step).to_device(device));
    let (turned, opened) = (rotate(&x, &cosines, &sines), silu_times(&gate, &up));
    let (Some(turned), Some(opened)) = (turned, opened) else {
        assert_eq!(device, Device::Cpu, "no kernels on the GPU");
        return;
    };
    let slopes = [values(&[5, 3, 64], 0.2), values(&[5, 40], 0.4)];
    for (found, slope) in [&turned, &opened].into_iter().zip(&slopes) {
        (found * slope.to_device(device)).sum(Kind::Float).backward();
    }
    let exact = |of: &Tensor| {
        let of = of.detach().to_device(Device::Cpu).to_kind(Kind::Double);
        of.set_requires_grad(true)
    };
    let (exact_x, exact_gate, exact_up) = (exact(&x), exact(&gate), exact(&up));
    let (a, b) = (exact_x.narrow(2, 0, 32), exact_x.narrow(2, 32, 32));
    let [c, s] = [&cosines, &sines].map(|of| exact(of).detach());
    let expected = Tensor::cat(&[&a * &c - &b * &s, b * &c + a * &s], 2);
    let expected_gate = exact_gate.silu() * &exact_up;
    for (expected, slope) in [&expected, &expected_gate].into_iter().zip(&slopes) {
        (expected * slope.to_kind(Kind::Double)).sum(Kind::Double).backward();
    }
    assert_near(&turned.detach(), &expected.detach(), "rotated");
    assert_near(&opened.detach(), &expected_gate.detach(), "gated");
    for (found, expected) in [(&x, &exact_x), (&gate, &exact_gate), (&up, &exact_up)] {
        assert_near(&found.grad(), &expected.grad(), "a gradient");
    }
}
