//! Compression ratio of lossless compression on real bfloat16 states, and its read speed.
//!
//! ```sh
//! DEEPSPEC_CACHE=DIR cargo bench -p deepspec-cache --bench compress
//! ```
//! Writes the samples of a bf16 cache as bf16z, and reads them with one and with two threads from a
//! warm page cache. It reports the first epoch, which verifies checksums, and the best of the later
//! epochs. Rates are per second of CPU time.

mod common;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread;

use common::{cpu_seconds, load};
use deepspec_capture::cache::{Builder, CacheError, Encoding, Layout, Plan, PlannedSample, Reader};

const EPOCHS: usize = 5;

fn main() -> io::Result<()> {
    let mut out = io::stdout();
    let Some(dir) = std::env::var_os("DEEPSPEC_CACHE").map(PathBuf::from) else {
        return writeln!(out, "DEEPSPEC_CACHE names no cache");
    };
    let plain = Reader::open(&dir).map_err(io::Error::other)?;
    let packed = tempfile::tempdir()?;
    let began = cpu_seconds();
    write_compressed(&plain, packed.path()).map_err(io::Error::other)?;
    let seconds = cpu_seconds() - began;
    let reader = Reader::open(packed.path()).map_err(io::Error::other)?;
    let bytes = |reader: &Reader| reader.manifest().shards.iter().map(|shard| shard.bytes).sum::<u64>();
    let (before, after) = (bytes(&plain), bytes(&reader));
    writeln!(
        out,
        "{} samples: {after} of {before} bytes, {:.1} % saved, written at {:.2} GB/s; load {}",
        plain.len(),
        100.0 - after as f64 / before as f64 * 100.0,
        before as f64 / seconds / 1e9,
        load()
    )?;
    for threads in [1, 2] {
        let reader = Reader::open(packed.path()).map_err(io::Error::other)?;
        let rates: Vec<f64> = (0..EPOCHS).map(|_| epoch(&reader, threads)).collect();
        let later = rates[1..].iter().copied().fold(0.0, f64::max);
        writeln!(
            out,
            "{threads} threads: first epoch {:.2} GB/s, later {later:.2}; load {}",
            rates[0],
            load()
        )?;
    }
    Ok(())
}

fn write_compressed(plain: &Reader, to: &Path) -> Result<(), CacheError> {
    let samples = (0..plain.len()).map(|index| {
        let sample = plain.sample(index)?;
        let (id, input_ids) = (sample.id.to_string(), sample.input_ids.to_vec());
        Ok(PlannedSample { id, input_ids, spans: sample.spans.to_vec() })
    });
    let layout = Layout { encoding: Encoding::Bf16z, ..plain.layout().clone() };
    let plan = Plan::new(samples.collect::<Result<_, CacheError>>()?, layout, plain.manifest().shard_bytes)?;
    let mut builder = Builder::open(to, &plan, &plain.manifest().identity)?;
    let mut next = 0..plain.len();
    while let Some(mut writer) = builder.next_shard()? {
        for index in next.by_ref().take(writer.samples().len()) {
            let [taps, last] = plain.sample(index)?.states()?;
            writer.push(&taps, &last)?;
        }
        writer.finish()?;
    }
    builder.publish()?;
    Ok(())
}

/// Gigabytes of bfloat16 per second that `threads` threads read together.
fn epoch(reader: &Reader, threads: usize) -> f64 {
    let share = |thread: usize| {
        let (mut bytes, mut taps, mut last, began) = (0, Vec::new(), Vec::new(), cpu_seconds());
        for index in (thread..reader.len()).step_by(threads) {
            let sizes = reader.state_bytes(index).expect("a sample");
            taps.resize(sizes[0], 0);
            last.resize(sizes[1], 0);
            reader.read_into(index, &mut taps, &mut last).expect("states");
            bytes += sizes[0] + sizes[1];
        }
        bytes as f64 / (cpu_seconds() - began) / 1e9
    };
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || share(thread))).collect();
        running.into_iter().map(|thread| thread.join().expect("a thread that reads")).sum()
    })
}
