//! A DSpark training pass and a proposal at the size of the tiny recipe: `cargo bench -p
//! deepspec-drafters`. Measured with memory that returns to the system after every operator
//! (glibc's default), and with kept memory, as the programs run.

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, criterion_group, criterion_main};
use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, ConfidenceSettings, DSpark, DSparkConfig, DSparkObjective, DSparkProposer, DSparkSettings,
    DraftDecoder, LossDenominator, LossRecipe, MarkovKind, MarkovSettings, TrainSample,
};
use deepspec_engine::{Context, DraftRequest, Proposer, Sampling, SamplingBatch};
use deepspec_models::ModelConfig;
use tch::{Device, Kind, Tensor};

const TOKENS: i64 = 160;
const TAPS: i64 = 3;
const SLOTS: i64 = 16;

fn block() -> DSpark {
    let model = serde_json::json!({
        "model_type": "qwen3",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "vocab_size": 1024,
    });
    let model = model.as_object().cloned().unwrap_or_default();
    let model = ModelConfig::parse(Path::new("config.json"), model).expect("a Qwen3 config");
    let ends = Tensor::randn([model.vocab_size, model.hidden_size], (Kind::Float, Device::Cpu)) * 0.02;
    let config = DSparkConfig {
        decoder: DraftDecoder { model, taps: Tap::from_layer_ids([1, 3, 5]).unwrap(), num_target_layers: 6 },
        settings: DSparkSettings {
            blocks: BlockSpec {
                block_size: 7,
                slots: SlotTarget::AnchorPredicts,
                mask_token_id: 1023,
                causal: false,
                num_anchors: 24,
            },
            markov: Some(MarkovSettings { kind: MarkovKind::Vanilla, rank: 64 }),
            confidence: Some(ConfidenceSettings { with_markov: true }),
        },
    };
    DSpark::fresh(config, &ends, &ends, 1, Kind::Float)
}

fn samples() -> Vec<TrainSample> {
    let states = |width: i64| Tensor::randn([TOKENS, width], (Kind::Float, Device::Cpu));
    let sample = |seed: i64| TrainSample {
        input_ids: (0..TOKENS).map(|i| (i * 31 + seed) % 1000).collect(),
        loss_mask: (0..TOKENS).map(|i| i > 40).collect(),
        taps: states(TAPS * 192),
        last: states(192),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: (0..24).map(|i| 41 + 4 * i).collect(),
    };
    (0..4).map(sample).collect()
}

fn measure(criterion: &mut Criterion, memory: &str) {
    let block = block();
    for (_, parameter) in block.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    let samples = samples();
    let loss = LossRecipe { ce_alpha: 0.1, l1_alpha: 0.9, ..LossRecipe::NONE };
    let objective = DSparkObjective { loss, confidence_alpha: 1.0 };
    let mut group = criterion.benchmark_group(memory);
    group.sample_size(20);
    group.bench_function("training pass, 4 sequences", |bench| {
        bench.iter(|| {
            let batch =
                block.config().batch(&samples, 4.0, Device::Cpu, Kind::Float).expect("there are anchors");
            let _ = black_box(block.accumulate(&batch, &objective, LossDenominator(1000.0), None));
        });
    });
    let _guard = tch::no_grad_guard();
    let mut proposer = DSparkProposer::new(block, SLOTS as usize);
    let chunks: Vec<(usize, usize)> = (0..SLOTS as usize).map(|slot| (slot, 4)).collect();
    let context = Context {
        captured_states: Tensor::randn([4 * SLOTS, TAPS * 192], (Kind::Float, Device::Cpu)),
        hidden: None,
        tokens: Tensor::ones([4 * SLOTS], (Kind::Int64, Device::Cpu)),
        next: Tensor::ones([4 * SLOTS], (Kind::Int64, Device::Cpu)),
        chunks,
    };
    let slots: Vec<usize> = (0..SLOTS as usize).collect();
    let (anchors, uniforms) = (
        Tensor::ones([SLOTS], (Kind::Int64, Device::Cpu)),
        Tensor::rand([SLOTS, 7], (Kind::Double, Device::Cpu)),
    );
    let sampling = SamplingBatch::new(vec![Sampling::new(1.0, 1); SLOTS as usize], Device::Cpu);
    group.bench_function("proposal, 16 slots", |bench| {
        bench.iter(|| {
            slots.iter().for_each(|&slot| proposer.truncate(slot, 0));
            black_box(proposer.propose(&DraftRequest {
                context: &context,
                slots: &slots,
                anchors: &anchors,
                uniforms: &uniforms,
                sampling: &sampling,
            }))
        });
    });
    group.finish();
}

fn benches(criterion: &mut Criterion) {
    measure(criterion, "memory handed back");
    deepspec_ops::init_runtime();
    measure(criterion, "memory kept");
}

criterion_group!(all, benches);
criterion_main!(all);
