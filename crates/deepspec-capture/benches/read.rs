//! How fast samples reach the caller's memory in shuffled order, from a warm page cache. Compared
//! with a plain memory copy and with Python's memory maps.
//!
//! ```sh
//! DEEPSPEC_TEST_PYTHON=PYTHON cargo bench -p deepspec-cache --bench read
//! ```
//! The interpreter needs numpy, pyarrow and torch; without them its column is left out. Rates are
//! per second of CPU time: the median of seven rounds in which all candidates take turns.

mod common;

use std::hint::black_box;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

use common::{cpu_seconds, load};
use deepspec_capture::cache::{
    Builder, Encoding, FinalStates, Identity, Layout, Plan, PlannedSample, Reader,
};
use deepspec_core::Tap;

const TAPS: usize = 5;
const HIDDEN: usize = 512;
/// Bytes of one token: five taps and its last state.
const TOKEN: usize = (TAPS + 1) * HIDDEN * 2;
const CACHE_BYTES: usize = 384 << 20;
const ROUNDS: usize = 7;

const SCRIPT: &str = r#"
import json, pathlib, random, sys, time
import numpy, pyarrow.parquet, torch
cache, taps, hidden = pathlib.Path(sys.argv[1]), 5, 512
torch.set_num_threads(1)
maps = []
for entry in json.loads((cache / "manifest.json").read_text())["shards"]:
    data = numpy.memmap(cache / entry["file"], dtype=numpy.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    maps.append((data, start, start + entry["rows"] * taps * hidden * 2))
rows = [tuple(row.values()) for row in pyarrow.parquet.read_table(cache / "samples.parquet", columns=["shard", "first_row", "first_last_row", "length"]).to_pylist()]
longest = max(row[3] for row in rows)
into, into_last = torch.empty(longest, taps * hidden, dtype=torch.bfloat16), torch.empty(longest, hidden, dtype=torch.bfloat16)
def tensor(data, start, rows, width):
    return torch.frombuffer(data[start:start + rows * width * 2], dtype=torch.bfloat16).view(rows, width)
random.seed(1)
random.shuffle(rows)
rates = []
import warnings
warnings.simplefilter("ignore")
for _ in range(7):
    began = time.thread_time()
    for shard, row, last_row, length in rows:
        data, first, first_last = maps[shard]
        into[:length].copy_(tensor(data, first + row * taps * hidden * 2, length, taps * hidden))
        into_last[:length].copy_(tensor(data, first_last + last_row * hidden * 2, length, hidden))
    rates.append(len(rows) / (time.thread_time() - began))
print(sorted(rates)[len(rates) // 2])
"#;

fn main() -> io::Result<()> {
    let mut out = io::stdout();
    for tokens in [5, 50, 5000] {
        for encoding in Encoding::ALL {
            let dir = tempfile::tempdir()?;
            let samples = CACHE_BYTES / TOKEN / tokens;
            build(dir.path(), samples, tokens, encoding);
            let (first, later, copy) = measure(dir.path(), tokens);
            let gb = |rate: f64| rate * (tokens * TOKEN) as f64 / 1e9;
            write!(
                out,
                "{:>8.0} kB as {encoding}: first epoch {first:>8.0} samples/s, {:>5.2} GB/s; later {later:>8.0}, {:>5.2}; memcpy {copy:>8.0}, {:>5.2}; first/memcpy {:.0} %, later/memcpy {:.0} %; load {}",
                (tokens * TOKEN) as f64 / 1e3,
                gb(first),
                gb(later),
                gb(copy),
                first / copy * 100.0,
                later / copy * 100.0,
                load()
            )?;
            match (encoding, python(dir.path())) {
                (Encoding::Bf16, Some(rate)) => writeln!(out, "; Python {rate:>8.0}, {:>5.2}", gb(rate))?,
                _ => writeln!(out)?,
            }
        }
    }
    Ok(())
}

fn build(dir: &Path, samples: usize, tokens: usize, encoding: Encoding) {
    let taps: Vec<Tap> = (0..TAPS as u32).map(Tap::Layer).collect();
    let layout = Layout { taps: taps.clone(), hidden_size: HIDDEN, last: FinalStates::All, encoding };
    let identity = Identity {
        model_type: "bench".into(),
        target_config: String::new(),
        target_weights: String::new(),
        tokenizer: String::new(),
        template: String::new(),
        chat_template: "none".into(),
        system_prompt: None,
        taps,
        max_length: tokens,
        hidden_size: HIDDEN,
        vocab_size: 10,
    };
    let sample = |index: usize| PlannedSample {
        id: index.to_string(),
        input_ids: vec![1; tokens],
        spans: vec![(0, tokens as u32)],
    };
    let plan = Plan::new((0..samples).map(sample).collect(), layout, 64 << 20).expect("a plan");
    let mut state = 1_u32;
    let mut values = |count: usize| -> Vec<u8> {
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            0x3C00 + (state >> 16) as u16 % 0x400
        };
        (0..count).flat_map(|_| value().to_le_bytes()).collect()
    };
    let (taps, last) = (values(tokens * TAPS * HIDDEN), values(tokens * HIDDEN));
    let mut builder = Builder::open(dir, &plan, &identity).expect("a builder");
    while let Some(mut writer) = builder.next_shard().expect("a shard") {
        for _ in writer.samples() {
            writer.push(&taps, &last).expect("room");
        }
        writer.finish().expect("a finished shard");
    }
    builder.publish().expect("a cache");
}

/// Samples per second of a first epoch, of later epochs, and of memory copies of the same size.
fn measure(dir: &Path, tokens: usize) -> (f64, f64, f64) {
    let order = |len: usize| (0..len).map(move |index| (index * 7919 + 13) % len);
    let (mut taps, mut last) = (vec![1; tokens * TAPS * HIDDEN * 2], vec![1; tokens * HIDDEN * 2]);
    let mut rates = [const { Vec::new() }; 3];
    let (size, source) = (tokens * TOKEN, vec![7_u8; CACHE_BYTES]);
    for _ in 0..ROUNDS {
        let reader = Reader::open(dir).expect("a cache");
        let len = reader.len();
        let mut epoch = || {
            let began = cpu_seconds();
            for index in order(len) {
                reader.read_into(index, &mut taps, &mut last).expect("a sample");
                black_box((&taps, &last));
            }
            len as f64 / (cpu_seconds() - began)
        };
        rates[0].push(epoch());
        rates[1].push(epoch());
        // Measured alternately, so that other work on the machine slows both.
        let began = cpu_seconds();
        for index in order(len) {
            let (own_taps, own_last) = source[index * size..(index + 1) * size].split_at(taps.len());
            taps.copy_from_slice(own_taps);
            last.copy_from_slice(own_last);
            black_box((&taps, &last));
        }
        rates[2].push(len as f64 / (cpu_seconds() - began));
    }
    let [first, later, copy] = rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[ROUNDS / 2]
    });
    (first, later, copy)
}

fn python(dir: &Path) -> Option<f64> {
    let python = std::env::var("DEEPSPEC_TEST_PYTHON").ok()?;
    let output = Command::new(python).args(["-W", "ignore", "-c", SCRIPT]).arg(dir).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}
