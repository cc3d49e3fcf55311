//! The forwards that fill a cache.

use deepspec_cache::{Builder, PlannedSample, ShardWriter};

use crate::capture::{Capture, bytes};
use crate::{StatesError, batches};

/// Captures the states of every shard that `builder` still lacks. `progress` is called for each sample that is written.
///
/// # Errors
/// States that are not finite, and I/O failures; finished shards stay and the build can be resumed.
pub fn fill(
    builder: &mut Builder,
    capture: &mut Capture,
    mut progress: impl FnMut(&PlannedSample),
) -> Result<(), StatesError> {
    while let Some(mut shard) = builder.next_shard()? {
        let samples = shard.samples();
        for run in batches(samples.iter().map(|sample| sample.input_ids.len()), capture.budget()) {
            push(&mut shard, &samples[run], capture, &mut progress)?;
        }
        shard.finish()?;
    }
    Ok(())
}

fn push(
    shard: &mut ShardWriter,
    batch: &[PlannedSample],
    capture: &mut Capture,
    progress: &mut impl FnMut(&PlannedSample),
) -> Result<(), StatesError> {
    let layout = shard.layout();
    let states = capture.run(batch, layout.last);
    let (taps, last) = (bytes(&states.taps), bytes(&states.last));
    let last_row = layout.hidden_size * layout.encoding.value_bytes();
    let (mut taps, mut last) = (taps.as_slice(), last.as_slice());
    for sample in batch {
        let (own_taps, other_taps) = taps.split_at(sample.input_ids.len() * layout.taps.len() * last_row);
        let (own_last, other_last) = last.split_at(sample.last_positions(layout.last).len() * last_row);
        shard.push(own_taps, own_last)?;
        (taps, last) = (other_taps, other_last);
        progress(sample);
    }
    Ok(())
}
