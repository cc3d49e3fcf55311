//! Time and peak memory of a whole DSpark train step, compared with a step of the reference's own
//! modules (`reference.py`), not compiled. The reference runs with its own attention, which nothing
//! fuses on a CPU, and with PyTorch's fused attention. In float32 with one thread:
//! ```sh
//! DEEPSPEC_REFERENCE=CLONE_OF_DEEPSPEC DEEPSPEC_TEST_PYTHON=python cargo bench -p deepspec-train --bench step [-- NAME…]
//! ```
//! Sizes are in `SHAPES`; names select some of them. Tokens repeat as the words of a text do.
//! Values that drafts after the same token share are computed only once here; the `distinct`
//! shapes show the times without any repeated token. Memory is the peak resident size of a first
//! step minus the loaded state: code, model and moments, but no gradients. Then the two processes
//! take turns, step by step, because other load on the processor comes and goes. Times are medians
//! of the thread's CPU time, without making the data. A ratio of times is the median ratio of
//! neighbouring steps.

#![expect(clippy::print_stdout, reason = "its figures")]

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use deepspec_core::{SlotTarget, Tap};
use deepspec_drafters::{
    BlockSpec, ConfidenceSettings, DSpark, DSparkConfig, DSparkObjective, DSparkSettings, DraftDecoder,
    LossDenominator, LossRecipe, MarkovKind, MarkovSettings, TrainSample, anchor_candidates,
};
use deepspec_models::ModelConfig;
use deepspec_train::dist::ProcessGroup;
use deepspec_train::optimizer::AdamW;
use deepspec_train::schedule::AnchorDraws;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

/// Model and micro-batch of a step.
#[derive(Clone, Copy, Serialize)]
struct Shape {
    name: &'static str,
    hidden: i64,
    inner: i64,
    layers: i64,
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
    vocab: i64,
    rank: i64,
    taps: i64,
    block: usize,
    anchors: usize,
    samples: usize,
    tokens: usize,
    /// Whether no token occurs twice in a step.
    distinct: bool,
    /// Timed steps per process, after one step whose memory is measured.
    #[serde(skip)]
    steps: usize,
    /// Anchors of the reference's step, if it does not have the memory for as many as ours.
    #[serde(skip)]
    reference_anchors: usize,
}

/// The arguments of the reference.
#[derive(Serialize)]
struct Described {
    #[serde(flatten)]
    shape: Shape,
    text: Vec<i64>,
}

const MEDIUM: Shape = Shape {
    name: "medium",
    hidden: 256,
    inner: 768,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    vocab: 32_768,
    rank: 256,
    taps: 5,
    block: 7,
    anchors: 64,
    samples: 1,
    tokens: 512,
    distinct: false,
    steps: 20,
    reference_anchors: 64,
};

/// assets/tiny-target with configs/tiny/dspark.yaml.
const DEMO: Shape = Shape {
    name: "demo",
    hidden: 192,
    inner: 512,
    layers: 2,
    heads: 6,
    kv_heads: 2,
    head_dim: 48,
    vocab: 1024,
    rank: 64,
    taps: 3,
    block: 7,
    anchors: 24,
    samples: 4,
    tokens: 128,
    distinct: false,
    steps: 60,
    reference_anchors: 24,
};

const SHAPES: [Shape; 5] = [
    DEMO,
    Shape { name: "demo-distinct", distinct: true, ..DEMO },
    MEDIUM,
    Shape { name: "medium-distinct", distinct: true, ..MEDIUM },
    // Vocabulary, anchors and length of configs/dspark/qwen3_4b.yaml. The reference needs 11 GB for
    // 256 anchors with fused attention, next to our own idle process.
    Shape {
        name: "large",
        hidden: 1024,
        inner: 3072,
        layers: 2,
        heads: 8,
        kv_heads: 4,
        head_dim: 128,
        vocab: 151_936,
        rank: 256,
        taps: 5,
        block: 7,
        anchors: 512,
        samples: 1,
        tokens: 4096,
        distinct: false,
        steps: 1,
        reference_anchors: 256,
    },
];

/// The prompts of the smoke suites, cut into pieces of three to four characters, numbered in the
/// order of their first occurrence. Pieces repeat about as often as tokens of a real tokenizer. The
/// drafts of 64 blocks in 512 pieces follow some 310 pieces, of which 43 % are distinct. For as
/// many tokens of Qwen3's tokenizer it is 41 % in these prompts. In the long prompts of Arena-Hard,
/// LiveCodeBench, SWE-bench and LBPP it is 32 to 49 %.
fn text() -> Vec<i64> {
    let suites = ["math", "code", "chat"].map(|suite| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../eval_datasets");
        fs::read_to_string(root.join(format!("smoke-{suite}.jsonl"))).expect("a suite of the repository")
    });
    let rows = suites.iter().flat_map(|suite| suite.lines());
    let prompts = rows.map(|row| {
        let row: serde_json::Value = serde_json::from_str(row).expect("a row of JSON");
        let turns = row["turns"].as_array().expect("prompts").iter().map(|turn| turn.as_str().expect("text"));
        turns.collect::<Vec<_>>().join(" ")
    });
    let mut numbers = std::collections::HashMap::new();
    pieces(&prompts.collect::<Vec<_>>().join("\n"))
        .into_iter()
        .map(|piece| {
            let next = numbers.len() as i64;
            *numbers.entry(piece).or_insert(next)
        })
        .collect()
}

/// Cuts a text into pieces: up to five letters, or another character, with a preceding space if
/// there is one.
fn pieces(text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = vec![];
    let mut letters = 0; // of the last piece, which may get more
    for sign in text.chars() {
        let is_letter = sign.is_ascii_alphabetic();
        let goes_on = match pieces.last() {
            Some(last) => last == " " && sign != '\n' || is_letter && (1..5).contains(&letters),
            None => false,
        };
        match pieces.last_mut() {
            Some(last) if goes_on => last.push(sign),
            _ => pieces.push(sign.into()),
        }
        letters = match is_letter {
            true if goes_on => letters + 1,
            true => 1,
            false => 0,
        };
    }
    pieces
}

impl Shape {
    /// Tokens of a sample, given its number among the samples of all steps.
    fn ids(&self, text: &[i64], number: usize) -> Vec<i64> {
        let at = |place: usize| {
            if self.distinct { place as i64 } else { text[place % text.len()] }
        };
        // The samples of a step are consecutive in the text, and so are the steps.
        let sample = if self.distinct { number % self.samples } else { number };
        (0..self.tokens).map(|place| at(sample * self.tokens + place) * 31 % self.vocab).collect()
    }

    fn model(&self) -> DSpark {
        let model = serde_json::json!({
            "model_type": "qwen3", "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocab,
        });
        let model = model.as_object().cloned().unwrap_or_default();
        let model = ModelConfig::parse(Path::new("config.json"), model).expect("a Qwen3 config");
        let end = || Tensor::randn([self.vocab, self.hidden], (Kind::Float, Device::Cpu)) * 0.02;
        let (embed, head) = (end(), end());
        let config = DSparkConfig {
            decoder: DraftDecoder {
                model,
                taps: Tap::from_layer_ids(0..self.taps).unwrap(),
                num_target_layers: 16,
            },
            settings: DSparkSettings {
                blocks: BlockSpec {
                    block_size: self.block,
                    slots: SlotTarget::AnchorPredicts,
                    mask_token_id: 3,
                    causal: false,
                    num_anchors: self.anchors,
                },
                markov: Some(MarkovSettings { kind: MarkovKind::Vanilla, rank: self.rank }),
                confidence: Some(ConfidenceSettings { with_markov: true }),
            },
        };
        DSpark::fresh(config, &embed, &head, 1, Kind::Float)
    }

    /// Sample number `index` of a step, with the anchors that the trainer would sample.
    fn sample(&self, text: &[i64], step: usize, index: usize) -> TrainSample {
        let states = |width: i64| Tensor::randn([self.tokens as i64, width], (Kind::Float, Device::Cpu));
        let loss_mask = vec![true; self.tokens];
        TrainSample {
            input_ids: self.ids(text, step * self.samples + index),
            taps: states(self.taps * self.hidden),
            last: states(self.hidden),
            last_positions: (0..self.tokens as u32).collect(),
            anchors: AnchorDraws { seed: 1, epoch: step, id: &index.to_string() }.choose(
                &anchor_candidates(&loss_mask),
                self.anchors,
                0,
            ),
            loss_mask,
        }
    }
}

/// A value of /proc/self/status in MB.
fn status(key: &str) -> f64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("the key is there");
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<f64>().expect("a number of kB") * 1024.0 / 1e6
}

/// Reads all file mappings into memory, so that page faults on them are not counted.
fn read_code() {
    let maps = fs::read_to_string("/proc/self/maps").expect("Linux");
    let memory = fs::File::open("/proc/self/mem").expect("Linux");
    let code = |line: &&str| {
        let mut words = line.split_whitespace().skip(1);
        let rights = words.next().is_some_and(|rights| rights.starts_with("r-"));
        rights && words.nth(2).is_some_and(|inode| inode != "0")
    };
    for line in maps.lines().filter(code) {
        let (first, rest) = line.split_once('-').expect("a range");
        let [first, end] = [first, rest.split(' ').next().unwrap_or(rest)]
            .map(|at| u64::from_str_radix(at, 16).expect("hex"));
        // A mapping may extend beyond the end of its file.
        (first..end).step_by(4096).for_each(|page| drop(memory.read_at(&mut [0], page)));
    }
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

/// Prints one number on its own line and flushes it to the reader.
fn say(figure: f64) {
    println!("{figure}");
    std::io::stdout().flush().expect("someone reads");
}

/// Measures our step in this process. Prints its peak memory, and then the time of one step for
/// each line on standard input.
fn measure(shape: &Shape) {
    tch::manual_seed(1);
    let (block, alone) = (shape.model(), ProcessGroup::single_process());
    let mut optimizer = AdamW::new(block.parameters(), 0.0, 1.0);
    // Writes the moments once, as a resumed run does, so that their pages belong to the loaded
    // state.
    let state = optimizer.state(&alone).expect("alone");
    let part = |name: &str| state.iter().find(|(n, _)| n == name).map(|(_, tensor)| tensor.copy());
    optimizer.restore(0, |name, _| part(name).ok_or(())).expect("it is its own state");
    drop(state);
    let text = text();
    // Called only now: otherwise memory freed while creating the weights would be reused without
    // being counted.
    deepspec_ops::init_runtime();
    let loss = LossRecipe { ce_alpha: 0.1, l1_alpha: 0.9, ..LossRecipe::NONE };
    let objective = DSparkObjective { loss, confidence_alpha: 1.0 };
    // Milliseconds of step number `number`, without making its data.
    let mut step = |number: usize| {
        let samples = (0..shape.samples).map(|index| shape.sample(&text, number, index));
        let samples: Vec<TrainSample> = samples.collect();
        let before = on_core();
        let batch = block.config().batch(&samples, 4.0, Device::Cpu, Kind::Float).expect("anchors");
        drop(samples);
        let _ = block.accumulate(&batch, &objective, LossDenominator(1000.0), None);
        let _ = optimizer.step(6e-4, &alone).expect("alone");
        on_core() - before
    };
    read_code();
    fs::write("/proc/self/clear_refs", "5").expect("Linux");
    let loaded = status("VmRSS:");
    step(0);
    say(status("VmHWM:") - loaded);
    for (number, line) in (1..).zip(std::io::stdin().lines()) {
        line.expect("text");
        say(step(number));
    }
}

/// A process that measures steps.
struct Steps {
    child: Child,
    figures: BufReader<ChildStdout>,
    /// Peak of its first step in MB.
    peak: f64,
    times: Vec<f64>,
}

impl Steps {
    /// Starts it and waits for its first step.
    fn of(command: &mut Command) -> Self {
        let command = command.envs([("OMP_NUM_THREADS", "1"), ("PYTHONWARNINGS", "ignore")]);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let figures = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut steps = Self { child, figures, peak: 0.0, times: vec![] };
        steps.peak = steps.figure();
        steps
    }

    fn figure(&mut self) -> f64 {
        let mut line = String::new();
        self.figures.read_line(&mut line).expect("text");
        let found = line.trim().parse();
        found
            .unwrap_or_else(|_| panic!("{line:?} instead of a figure; it ended with {:?}", self.child.wait()))
    }

    /// Runs one more step in the process.
    fn step(&mut self) {
        let input = self.child.stdin.as_mut().expect("it is piped");
        input.write_all(b"\n").expect("it waits for lines");
        let time = self.figure();
        self.times.push(time);
    }

    /// Peak in MB and time in ms.
    fn figures(&self) -> String {
        format!("{:8.1} MB  {:8.1} ms", self.peak, median(self.times.clone()))
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn compare(shape: &Shape, python: &str) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/reference.py");
    let program = std::env::current_exe().expect("a running program has a path");
    let described = tempfile::NamedTempFile::new().expect("a place for the shape");
    let theirs = Described { shape: Shape { anchors: shape.reference_anchors, ..*shape }, text: text() };
    serde_json::to_writer(&described, &theirs).expect("plain numbers");
    let Shape { name, hidden, layers, vocab, block, anchors, samples, tokens, .. } = *shape;
    println!(
        "{name}: d = {hidden}, {layers} layers, V = {vocab}, {samples} × {anchors} anchors, γ = {block}, {tokens} tokens, float32, one thread"
    );
    for (kind, more) in [("un-fused", None), ("fused", Some("sdpa"))] {
        let mut ours = Steps::of(Command::new(&program).args(["measure", name]));
        let mut reference = Steps::of(Command::new(python).arg(&script).arg(described.path()).args(more));
        for _ in 0..shape.steps {
            ours.step();
            reference.step();
        }
        let ratios = ours.times.iter().zip(&reference.times).map(|(ours, theirs)| ours / theirs);
        println!("  deepspec                       {}", ours.figures());
        println!(
            "  reference, attention {kind:<8}  {}   ratios {:.2} and {:.3} ({} anchors)",
            reference.figures(),
            ours.peak / reference.peak,
            median(ratios.collect()),
            shape.reference_anchors
        );
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let chosen = |shape: &&Shape| words.iter().any(|word| word == shape.name);
    if words.first().is_some_and(|word| word == "measure") {
        return SHAPES.iter().filter(chosen).for_each(measure);
    }
    assert!(std::env::var_os("DEEPSPEC_REFERENCE").is_some(), "DEEPSPEC_REFERENCE: a clone of DeepSpec");
    let python = std::env::var("DEEPSPEC_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let all = SHAPES.iter().filter(|shape| words.is_empty() || chosen(shape));
    all.for_each(|shape| compare(shape, &python));
}
