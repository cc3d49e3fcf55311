//! Runs the target to fill the shards of a cache.

use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use crate::cache::{Builder, CacheError, Encoding, FinalStates, Layout, PlannedSample, ShardWriter};

use crate::capture::{Capture, HostCopy};
use crate::{StatesError, batches, windows};

/// Forwards' worth of tokens that are sorted by length together. Their states are held in memory
/// until they are written in order.
const WINDOW: usize = 4;
/// Most windows that wait for the disk; the next forward then waits.
const QUEUE: usize = 1;

/// Captures the states of every missing shard of `builder`. `progress` is called for each captured
/// sample.
///
/// Samples of similar length share a forward. A separate thread encodes and writes the states of
/// earlier forwards. The forwards of a shard depend only on its samples, so a resumed build repeats
/// those of an uninterrupted one.
///
/// # Errors
/// Fails on states that are not finite, and on I/O failures. Finished shards remain, and the build
/// can be resumed.
pub fn fill(
    builder: &mut Builder,
    capture: &mut Capture,
    mut progress: impl FnMut(&PlannedSample),
) -> Result<(), StatesError> {
    thread::scope(|scope| {
        let (sender, receiver) = sync_channel(QUEUE);
        let writer = scope.spawn(move || write(&receiver));
        // Sending fails only after the writer has stopped; the writer's error is then reported.
        let captured = (|| -> Result<(), StatesError> {
            while let Some(shard) = builder.next_shard()? {
                let (samples, layout) = (shard.samples(), shard.layout());
                if sender.send(Order::Begin(Box::new(shard))).is_err() {
                    return Ok(());
                }
                let lengths = samples.iter().map(|sample| sample.input_ids.len());
                for window in windows(lengths, WINDOW * capture.budget().tokens) {
                    let states = captured(&samples[window], capture, layout, &mut progress);
                    if sender.send(Order::Push(states)).is_err() {
                        return Ok(());
                    }
                }
                if sender.send(Order::Finish).is_err() {
                    return Ok(());
                }
            }
            Ok(())
        })();
        drop(sender);
        match writer.join() {
            Ok(written) => Ok(written.map_err(StatesError::from).and(captured)?),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// The next action of the writer thread.
enum Order<'p> {
    Begin(Box<ShardWriter<'p>>),
    /// Taps and final states of consecutive samples.
    Push(Vec<[Vec<u8>; 2]>),
    Finish,
}

fn write(orders: &Receiver<Order<'_>>) -> Result<(), CacheError> {
    let mut current = None;
    for order in orders {
        match (order, &mut current) {
            (Order::Begin(shard), current) => *current = Some(shard),
            (Order::Push(states), Some(shard)) => {
                states.iter().try_for_each(|[taps, last]| shard.push(taps, last))?;
            }
            (Order::Finish, current) => current.take().map_or(Ok(()), |shard| shard.finish())?,
            (Order::Push(_), None) => {}
        }
    }
    Ok(())
}

/// Captures the states of a window of samples and returns them in order. The forwards take samples
/// sorted by length.
fn captured(
    window: &[PlannedSample],
    capture: &mut Capture,
    layout: &Layout,
    progress: &mut impl FnMut(&PlannedSample),
) -> Vec<[Vec<u8>; 2]> {
    let mut order: Vec<usize> = (0..window.len()).collect();
    order.sort_by_key(|&index| window[index].input_ids.len());
    let sorted: Vec<PlannedSample> = order.iter().map(|&index| window[index].clone()).collect();
    let mut states = vec![[Vec::new(), Vec::new()]; window.len()];
    let mut keep = |run: Range<usize>, leaving: HostCopy| {
        let split = split(&sorted[run.clone()], leaving, layout);
        for (&index, own) in order[run].iter().zip(split) {
            states[index] = own;
            progress(&window[index]);
        }
    };
    // On a GPU, copies to the host overlap with the next batch. On the CPU nothing overlaps.
    let mut under_way: Option<(Range<usize>, HostCopy)> = None;
    for run in batches(sorted.iter().map(|sample| sample.input_ids.len()), capture.budget()) {
        let captured = capture.run(&sorted[run.clone()], layout.last);
        let leaving = capture.download(captured);
        if let Some((run, leaving)) = under_way.take() {
            keep(run, leaving);
        }
        if leaving.is_under_way() {
            under_way = Some((run, leaving));
        } else {
            keep(run, leaving);
        }
    }
    if let Some((run, leaving)) = under_way {
        keep(run, leaving);
    }
    states
}

/// Splits the states of a batch by sample.
fn split(batch: &[PlannedSample], leaving: HostCopy, layout: &Layout) -> Vec<[Vec<u8>; 2]> {
    let last: FinalStates = layout.last;
    let [taps, kept] = leaving.bytes();
    let row = layout.hidden_size * Encoding::Bf16.value_bytes();
    let (mut taps, mut kept) = (taps.as_slice(), kept.as_slice());
    let mut own = |sample: &PlannedSample| {
        let (own_taps, other_taps) = taps.split_at(sample.input_ids.len() * layout.taps.len() * row);
        let (own_kept, other_kept) = kept.split_at(sample.last_positions(last).len() * row);
        (taps, kept) = (other_taps, other_kept);
        [own_taps.to_vec(), own_kept.to_vec()]
    };
    batch.iter().map(&mut own).collect()
}
