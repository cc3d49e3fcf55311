//! Time and peak memory of the closed-form objective and of the same formulas with autograd
//! (`tests/common/slow.rs`). Runs on the CPU in float32: `OMP_NUM_THREADS=1 cargo bench -p
//! deepspec-drafters --bench objective`.
//!
//! Each variant runs in its own process, in turn, with the allocator set up as in the programs.
//! Time is the median of the thread's CPU time. Memory is the peak resident size of a first pass
//! minus the size before it, so that gradients of the weights count. In the large case these
//! gradients exist before.

#![expect(clippy::print_stdout, reason = "its figures")]

#[path = "../tests/common/slow.rs"]
mod slow;

use std::fs;
use std::path::Path;
use std::process::Command;

use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockBatch, BlockSpec, ConfidenceSettings, DSpark, DSparkConfig, DSparkObjective, DSparkSettings,
    DraftDecoder, LossDenominator, LossRecipe, MarkovKind, MarkovSettings, TrainSample,
};
use deepspec_models::ModelConfig;
use tch::{Device, Kind, Tensor};

const OBJECTIVE: DSparkObjective = DSparkObjective {
    loss: LossRecipe { ce_alpha: 0.1, l1_alpha: 0.9, ..LossRecipe::NONE },
    confidence_alpha: 1.0,
};
const NORMALISER: LossDenominator = LossDenominator(1000.0);
const WIDTH: i64 = 256;
const GAMMA: usize = 7;
/// Processes per variant, and passes timed in each.
const PROCESSES: usize = 3;
const PASSES: usize = 5;

fn block(vocab: i64) -> DSpark {
    let model = serde_json::json!({
        "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": vocab,
    });
    let model = model.as_object().cloned().unwrap_or_default();
    let model = ModelConfig::parse(Path::new("config.json"), model).expect("a Qwen3 config");
    let ends = Tensor::randn([vocab, WIDTH], (Kind::Float, Device::Cpu)) * 0.05;
    let config = DSparkConfig {
        decoder: DraftDecoder { model, taps: Tap::from_layer_ids([1]).unwrap(), num_target_layers: 2 },
        settings: DSparkSettings {
            blocks: BlockSpec {
                block_size: GAMMA,
                slots: SlotTarget::AnchorPredicts,
                mask_token_id: 3,
                causal: false,
                num_anchors: 512,
            },
            markov: Some(MarkovSettings { kind: MarkovKind::Vanilla, rank: WIDTH }),
            confidence: Some(ConfidenceSettings { with_markov: true }),
        },
    };
    let block = DSpark::fresh(config, &ends, &ends, 1, Kind::Float);
    for (_, parameter) in block.parameters() {
        let _ = parameter.set_requires_grad(true);
    }
    block
}

/// One sequence with `anchors` blocks; all slots are supervised.
fn batch(block: &DSpark, anchors: usize) -> BlockBatch {
    let length = (anchors + GAMMA) as i64;
    let states = || Tensor::randn([length, WIDTH], (Kind::Float, Device::Cpu));
    let sample = TrainSample {
        input_ids: (0..length).map(|i| i * 31 % block.config().decoder.model.vocab_size).collect(),
        loss_mask: vec![true; length as usize],
        taps: states(),
        last: states(),
        last_positions: (0..length as u32).collect(),
        anchors: (0..anchors).collect(),
    };
    block.config().batch(&[sample], 4.0, Device::Cpu, Kind::Float).expect("there are anchors")
}

fn pass(block: &DSpark, batch: &BlockBatch, variant: &str) {
    match variant {
        "autograd" => slow::objective(block, batch, &OBJECTIVE, NORMALISER).0.backward(),
        _ => drop(block.accumulate(batch, &OBJECTIVE, NORMALISER, None)),
    }
}

/// A value of /proc/self/status in MB.
fn status(key: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("the key is there");
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<f64>().expect("a number of kB") * 1024.0 / 1e6
}

/// Peak of the resident size minus the current one.
fn peak(work: impl FnOnce()) -> f64 {
    fs::write("/proc/self/clear_refs", "5").expect("Linux");
    let before = status("VmRSS:");
    work();
    status("VmHWM:") - before
}

/// CPU time of this thread in milliseconds.
fn on_core() -> f64 {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds") / 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Sets the allocator up as the programs do. Called after the weights exist: otherwise memory freed
/// while creating them would be reused without being counted.
fn prepare() {
    deepspec_ops::init_runtime();
}

/// Measures one variant in this process and prints `peak time`.
fn child(variant: &str) {
    tch::manual_seed(1);
    if variant == "large" {
        let block = block(151_936);
        prepare();
        pass(&block, &batch(&block, 1), variant);
        let batch = batch(&block, 512);
        println!("{} 0", peak(|| pass(&block, &batch, variant)));
        return;
    }
    let block = block(32_768);
    let batch = batch(&block, 64);
    prepare();
    let peak = peak(|| pass(&block, &batch, variant));
    let time = || {
        let before = on_core();
        pass(&block, &batch, variant);
        on_core() - before
    };
    println!("{peak} {}", median((0..PASSES).map(|_| time()).collect()));
}

fn run(variant: &str) -> (f64, f64) {
    let program = std::env::current_exe().expect("a running program has a path");
    let output = Command::new(program).args(["measure", variant]).output().expect("it starts again");
    let text = String::from_utf8_lossy(&output.stdout);
    let figures: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match figures[..] {
        [peak, time] => (peak, time),
        _ => panic!("{variant}: {text}{}", String::from_utf8_lossy(&output.stderr)),
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, command, variant] = &arguments[..]
        && command == "measure"
    {
        return child(variant);
    }
    let (mut slow, mut fast) = (vec![], vec![]);
    for _ in 0..PROCESSES {
        slow.push(run("autograd"));
        fast.push(run("closed form"));
    }
    let of = |runs: &[(f64, f64)]| {
        (median(runs.iter().map(|run| run.0).collect()), median(runs.iter().map(|run| run.1).collect()))
    };
    let (slow, fast) = (of(&slow), of(&fast));
    println!("448 rows, V = 32768, d = r = 256, float32; peak with the gradients of the weights");
    for (name, (peak, time)) in [("autograd", slow), ("closed form", fast)] {
        println!("  {name:<12} {peak:7.1} MB  {time:7.1} ms");
    }
    println!("  {:<12} {:6.2}×     {:6.2}×", "ratio", slow.0 / fast.0, slow.1 / fast.1);
    println!("3584 rows, V = 151936: {:.1} MB above weights and gradients", run("large").0);
}
