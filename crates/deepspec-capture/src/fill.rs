//! Runs the target to fill the shards of a cache.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use crate::cache::{Builder, CacheError, Encoding, FinalStates, Layout, PlannedSample, ShardWriter};

use crate::capture::{Capture, HostCopy, bytes};
use crate::served::{AnswerStatesReader, ServedTarget};
use crate::{SampleStates, StatesError, split_by_tokens, split_into_batches};

/// Length of a window, in forwards with the maximum number of tokens. Samples of a window are
/// sorted by length together. Their states stay in memory until they are written in order.
const WINDOW_FORWARDS: usize = 4;
/// Maximum number of windows that wait for the disk; the next forward then waits.
const MAX_QUEUED_WINDOWS: usize = 1;
/// Maximum number of samples from servers that wait for the disk.
const MAX_QUEUED_SAMPLES: usize = 32;
/// Tokens of submitted samples, in multiples of the servers' tokens in flight.
const QUEUED_CAPACITIES: usize = 2;

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
pub fn fill_shards(
    builder: &mut Builder,
    capture: &mut Capture,
    mut progress: impl FnMut(&PlannedSample),
) -> Result<(), StatesError> {
    with_writer(MAX_QUEUED_WINDOWS, |writer| {
        while let Some(shard) = builder.next_shard()? {
            let (samples, layout) = (shard.samples(), shard.layout());
            if writer.send(WriterCommand::Begin(Box::new(shard))).is_err() {
                return Ok(());
            }
            let lengths = samples.iter().map(|sample| sample.input_ids.len());
            for window in split_by_tokens(lengths, WINDOW_FORWARDS * capture.forward_limits().tokens) {
                let states = capture_window(&samples[window], capture, layout, &mut progress);
                if writer.send(WriterCommand::Push(states)).is_err() {
                    return Ok(());
                }
            }
            if writer.send(WriterCommand::Finish).is_err() {
                return Ok(());
            }
        }
        Ok(())
    })
}

/// Runs `capture` beside a thread that executes its commands, of which `queued` may wait. Sending
/// fails only after that thread has stopped; its error is then returned.
fn with_writer<'p>(
    queued: usize,
    capture: impl FnOnce(&SyncSender<WriterCommand<'p>>) -> Result<(), StatesError>,
) -> Result<(), StatesError> {
    thread::scope(|scope| {
        let (sender, receiver) = sync_channel(queued);
        let writer = scope.spawn(move || run_writer(&receiver));
        let captured = capture(&sender);
        drop(sender);
        match writer.join() {
            Ok(written) => Ok(written.map_err(StatesError::from).and(captured)?),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// As [`fill_shards`], with states from servers. Requests of the next shards begin before a shard is
/// complete.
///
/// # Errors
/// As [`fill_shards`], and if the servers return no usable states.
pub fn fill_shards_from_servers(
    builder: &mut Builder,
    target: &mut ServedTarget,
    mut progress: impl FnMut(&PlannedSample),
) -> Result<(), StatesError> {
    with_writer(MAX_QUEUED_SAMPLES, |writer| request_shards(builder, target, writer, &mut progress))
}

/// As [`fill_shards`], with the states that vLLM returned with the answers.
///
/// # Errors
/// As [`fill_shards`], and if a file of states cannot be read or is not one of the recipe's target.
pub fn fill_shards_from_answers(
    builder: &mut Builder,
    answers: &AnswerStatesReader,
    mut progress: impl FnMut(&PlannedSample),
) -> Result<(), StatesError> {
    with_writer(MAX_QUEUED_SAMPLES, |writer| {
        while let Some(shard) = builder.next_shard()? {
            let samples = shard.samples();
            if writer.send(WriterCommand::Begin(Box::new(shard))).is_err() {
                return Ok(());
            }
            for sample in samples {
                let states = answers.read(sample)?;
                if writer.send(WriterCommand::push_one(&states)).is_err() {
                    return Ok(());
                }
                progress(sample);
            }
            if writer.send(WriterCommand::Finish).is_err() {
                return Ok(());
            }
        }
        Ok(())
    })
}

/// Requests the samples of all missing shards in order, and sends their states to the writer.
fn request_shards<'p>(
    builder: &mut Builder<'p>,
    target: &mut ServedTarget,
    writer: &SyncSender<WriterCommand<'p>>,
    progress: &mut impl FnMut(&PlannedSample),
) -> Result<(), StatesError> {
    let (mut unsent, mut shards) = ([].iter(), VecDeque::new());
    let (mut sent, mut queued): (VecDeque<&PlannedSample>, usize) = (VecDeque::new(), 0);
    let (most, mut left) = (QUEUED_CAPACITIES * target.capacity(), 0);
    loop {
        while queued < most {
            let Some(sample) = unsent.next() else {
                let Some(shard) = builder.next_shard()? else { break };
                unsent = shard.samples().iter();
                shards.push_back(shard);
                continue;
            };
            queued += sample.input_ids.len();
            target.submit(sample.clone());
            sent.push_back(sample);
        }
        let Some(states) = target.next_states()? else { return Ok(()) };
        let Some(sample) = sent.pop_front() else { return Ok(()) };
        let mut commands = Vec::with_capacity(3);
        if left == 0
            && let Some(shard) = shards.pop_front()
        {
            left = shard.samples().len();
            commands.push(WriterCommand::Begin(Box::new(shard)));
        }
        commands.push(WriterCommand::push_one(&states));
        left -= 1;
        if left == 0 {
            commands.push(WriterCommand::Finish);
        }
        for command in commands {
            if writer.send(command).is_err() {
                return Ok(());
            }
        }
        queued -= sample.input_ids.len();
        progress(sample);
    }
}

/// The next action of the writer thread.
enum WriterCommand<'p> {
    Begin(Box<ShardWriter<'p>>),
    /// Taps and final states of consecutive samples.
    Push(Vec<[Vec<u8>; 2]>),
    Finish,
}

impl WriterCommand<'_> {
    /// Writes the states of one sample.
    fn push_one(states: &SampleStates) -> Self {
        Self::Push(vec![[bytes(&states.taps), bytes(&states.last)]])
    }
}

fn run_writer(orders: &Receiver<WriterCommand<'_>>) -> Result<(), CacheError> {
    let mut current = None;
    for order in orders {
        match (order, &mut current) {
            (WriterCommand::Begin(shard), current) => *current = Some(shard),
            (WriterCommand::Push(states), Some(shard)) => {
                states.iter().try_for_each(|[taps, last]| shard.push(taps, last))?;
            }
            (WriterCommand::Finish, current) => current.take().map_or(Ok(()), |shard| shard.finish())?,
            (WriterCommand::Push(_), None) => {}
        }
    }
    Ok(())
}

/// Captures the states of a window of samples and returns them in order. The forwards take samples
/// sorted by length.
fn capture_window(
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
        let split = split_by_sample(&sorted[run.clone()], leaving, layout);
        for (&index, own) in order[run].iter().zip(split) {
            states[index] = own;
            progress(&window[index]);
        }
    };
    // On a GPU, copies to the host overlap with the next batch. On the CPU nothing overlaps.
    let mut under_way: Option<(Range<usize>, HostCopy)> = None;
    for run in
        split_into_batches(sorted.iter().map(|sample| sample.input_ids.len()), capture.forward_limits())
    {
        let captured = capture.run(&sorted[run.clone()], layout.last);
        let leaving = capture.download(captured);
        if let Some((run, leaving)) = under_way.take() {
            keep(run, leaving);
        }
        if leaving.is_in_flight() {
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
fn split_by_sample(batch: &[PlannedSample], leaving: HostCopy, layout: &Layout) -> Vec<[Vec<u8>; 2]> {
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
