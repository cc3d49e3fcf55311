//! Time and peak memory of a whole DSpark train step beside a straightforward PyTorch step (`step.py`), in the same run, on the
//! CPU in float32 with one thread: `DEEPSPEC_TEST_PYTHON=python OMP_NUM_THREADS=1 cargo bench --bench step`.
//!
//! d = 256, 2 layers, V = 32768, r = 256, 64 anchors, γ = 7, 512 tokens. Time is the median of the thread's time on a core. Memory is
//! the peak resident size of a step above the loaded state: model and moments, but no gradients.

#![expect(clippy::print_stdout, reason = "its figures")]

use std::fs;
use std::path::Path;
use std::process::Command;

use deepspec_core::{Slots, Tap};
use deepspec_dist::ProcessGroup;
use deepspec_drafters::{
    AnchoredBlocks, Block, BlockConfig, Confidence, DraftDecoder, LossAlphas, Markov, MarkovKind, Normaliser,
    TrainSample,
};
use deepspec_models::ModelConfig;
use deepspec_train::optimizer::AdamW;
use tch::{Device, Kind, Tensor};

const TOKENS: i64 = 512;
const TAPS: i64 = 5;
const ANCHORS: usize = 64;
const GAMMA: usize = 7;
/// Processes of each kind, in turn, and steps timed in each.
const PROCESSES: usize = 3;
const STEPS: usize = 7;

fn block() -> Block {
    let model = serde_json::json!({
        "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32768,
    });
    let model = model.as_object().cloned().unwrap_or_default();
    let model = ModelConfig::parse(Path::new("config.json"), model).expect("a Qwen3 config");
    let end = || Tensor::randn([model.vocab_size, model.hidden_size], (Kind::Float, Device::Cpu)) * 0.02;
    let (embed, head) = (end(), end());
    let config = BlockConfig {
        decoder: DraftDecoder { model, taps: Tap::from_layer_ids(0..TAPS).unwrap(), num_target_layers: 8 },
        blocks: AnchoredBlocks {
            block_size: GAMMA,
            slots: Slots::AnchorPredicts,
            mask_token_id: 3,
            num_anchors: ANCHORS,
        },
        markov: Some(Markov { kind: MarkovKind::Vanilla, rank: 256 }),
        confidence: Some(Confidence { with_markov: true }),
    };
    Block::fresh(config, &embed, &head, 1, Kind::Float).expect("fresh weights need no file")
}

fn sample() -> TrainSample {
    let states = |width: i64| Tensor::randn([TOKENS, width], (Kind::Float, Device::Cpu));
    TrainSample {
        input_ids: (0..TOKENS).map(|i| i * 31 % 32768).collect(),
        loss_mask: vec![true; TOKENS as usize],
        taps: states(TAPS * 256),
        last: states(256),
        last_positions: (0..TOKENS as u32).collect(),
        anchors: (0..ANCHORS).map(|i| 7 * i + 40).collect(),
    }
}

/// A figure of /proc/self/status in MB.
fn status(key: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("the key is there");
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<f64>().expect("a number of kB") * 1024.0 / 1e6
}

/// Milliseconds that this thread has spent on a core.
fn on_core() -> f64 {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds") / 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures our step in this process and prints peak and time, and of the time the forward and backward.
fn measure() {
    tch::manual_seed(1);
    let (block, alone) = (block(), ProcessGroup::alone());
    let mut optimizer = AdamW::new(block.parameters(), 0.0, 1.0);
    // Writes the moments once, as a restored run does, so that their pages belong to the loaded state.
    let state = optimizer.state(&alone).expect("alone");
    let part = |name: &str| state.iter().find(|(n, _)| n == name).map(|(_, tensor)| tensor.copy());
    optimizer.restore(0, |name, _| part(name).ok_or(())).expect("it is its own state");
    drop(state);
    // Not before: memory that making the weights left behind would be kept, and used without being counted.
    deepspec_native::prepare_process();
    let alphas = LossAlphas { ce: 0.1, l1: 0.9, confidence: 1.0, ..LossAlphas::default() };
    let mut step = || {
        let batch = block.config().batch(&[sample()], 4.0, Device::Cpu, Kind::Float).expect("anchors");
        let before = on_core();
        let _ = block.accumulate(&batch, &alphas, Normaliser(1000.0));
        let pass = on_core() - before;
        let _ = optimizer.step(6e-4, &alone).expect("alone");
        pass
    };
    fs::write("/proc/self/clear_refs", "5").expect("Linux");
    let loaded = status("VmRSS:");
    step();
    let peak = status("VmHWM:") - loaded;
    let times: Vec<(f64, f64)> = (0..STEPS)
        .map(|_| {
            let before = on_core();
            let pass = step();
            (on_core() - before, pass)
        })
        .collect();
    let [whole, pass] =
        [times.iter().map(|t| t.0).collect(), times.iter().map(|t| t.1).collect()].map(median);
    println!("{peak} {whole} {pass}");
}

fn run(command: &mut Command) -> Vec<f64> {
    let output = command.env("OMP_NUM_THREADS", "1").output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let figures: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(figures.len() >= 2, "{text}{}", String::from_utf8_lossy(&output.stderr));
    figures
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("measure") {
        return measure();
    }
    let python = std::env::var("DEEPSPEC_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/step.py");
    let program = std::env::current_exe().expect("a running program has a path");
    let (mut theirs, mut ours) = (vec![], vec![]);
    for _ in 0..PROCESSES {
        theirs.push(run(Command::new(&python).arg(&script)));
        ours.push(run(Command::new(&program).arg("measure")));
    }
    let column = |runs: &[Vec<f64>], i: usize| median(runs.iter().map(|run| run[i]).collect());
    let (theirs, ours) = ([0, 1].map(|i| column(&theirs, i)), [0, 1, 2].map(|i| column(&ours, i)));
    println!("d = 256, 2 layers, V = 32768, 64 anchors, γ = 7, 512 tokens, float32, one thread");
    println!("  PyTorch      {:7.1} MB  {:7.1} ms", theirs[0], theirs[1]);
    println!(
        "  deepspec     {:7.1} MB  {:7.1} ms, of them forward and backward {:.1} ms",
        ours[0], ours[1], ours[2]
    );
    println!("  ratio        {:6.2}      {:6.2}", ours[0] / theirs[0], ours[1] / theirs[1]);
}
