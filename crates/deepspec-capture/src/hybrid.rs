//! Hidden states that the target computes in the first epoch, while they are also written to a
//! cache.
//!
//! The cache stores samples in the order of the first epoch, so each sample that training reads is
//! the next to be written. A killed run keeps its finished shards. The next run recomputes the
//! unfinished shard in equal forwards and continues.

use std::sync::Arc;

use crate::cache::{Builder, Plan, PlannedSample, Reader, ShardWriter};

use crate::capture::bytes;
use crate::dataset::FinishedCache;
use crate::live::LiveStates;
use crate::online::SampleStates;
use crate::recorder::CacheRecorder;
use crate::stored::CachedStates;
use crate::{StatesError, TargetSpec};

/// Computes and writes states in the first epoch, then reads them from the cache.
pub struct Hybrid<'d> {
    recording: &'d CacheRecorder,
    phase: Phase<'d>,
    /// Samples per optimiser step.
    per_step: usize,
    /// Index in the plan of the sample that training reads next.
    place: usize,
}

enum Phase<'d> {
    First { online: Box<LiveStates>, recorder: Box<Recorder<'d>> },
    Later(CachedStates),
}

impl<'d> Hybrid<'d> {
    /// Starts or resumes the first epoch.
    pub(crate) fn start_first_epoch(
        recording: &'d CacheRecorder,
        online: LiveStates,
        source: &TargetSpec,
        per_step: usize,
    ) -> Result<Self, StatesError> {
        let builder = Builder::open(&recording.dir, &recording.plan, &source.identity)?;
        if let LiveStates::Served(served) = &online {
            builder.set_origin(&served.describe())?;
        }
        let phase = Phase::First {
            online: Box::new(online),
            recorder: Box::new(Recorder::new(builder, &recording.plan)?),
        };
        Ok(Self { recording, phase, per_step, place: 0 })
    }

    /// The program that computes states; `None` after the first epoch.
    pub(crate) fn live(&self) -> Option<&LiveStates> {
        match &self.phase {
            Phase::First { online, .. } => Some(online),
            Phase::Later(_) => None,
        }
    }

    /// Begins an optimiser step: records the samples of earlier steps, publishes a complete cache, and sets the step's samples.
    pub(crate) fn begin_step(&mut self, step: usize, samples: &[usize]) -> Result<(), StatesError> {
        if self.steps_per_epoch() <= step {
            self.finish_recording()?;
        }
        self.place = step * self.per_step;
        self.write_up_to(self.place)?;
        match &mut self.phase {
            Phase::First { online, .. } => {
                online
                    .begin_step(samples.iter().map(|&index| self.recording.sample(index).clone()).collect());
            }
            Phase::Later(cached) => cached.begin_step(samples),
        }
        Ok(())
    }

    /// Returns the states of the step's next sample; `None` after the last one.
    pub(crate) fn next_states(&mut self) -> Result<Option<SampleStates>, StatesError> {
        match &mut self.phase {
            Phase::First { online, recorder } => {
                let states = online.next_states()?;
                if let Some(states) = &states {
                    recorder.write_sample(self.place, states)?;
                    self.place += 1;
                }
                Ok(states)
            }
            Phase::Later(cached) => cached.next_states(),
        }
    }

    /// Ends a run of `steps` steps, and publishes the cache after at least one epoch.
    pub(crate) fn finish(&mut self, steps: usize) -> Result<(), StatesError> {
        if self.steps_per_epoch() <= steps {
            return self.finish_recording();
        }
        if let Phase::First { .. } = self.phase {
            let (dir, samples) = (self.recording.dir.display(), self.recording.plan.samples().len());
            let held = steps * self.per_step;
            tracing::info!("{dir} is no cache yet: {held} of {samples} samples were visited");
        }
        Ok(())
    }

    /// Number of complete steps per epoch. The remaining samples are captured at the end of the
    /// epoch.
    fn steps_per_epoch(&self) -> usize {
        self.recording.plan.samples().len() / self.per_step
    }

    /// Captures the missing samples, publishes the cache, and reads from it afterwards.
    fn finish_recording(&mut self) -> Result<(), StatesError> {
        self.write_up_to(self.recording.plan.samples().len())?;
        let read = || -> Result<Phase<'d>, StatesError> {
            let reader = Arc::new(Reader::open(&self.recording.dir)?);
            let rows = Some(Arc::clone(&self.recording.places));
            Ok(Phase::Later(CachedStates::new(FinishedCache { reader, rows, reads_taps: true })))
        };
        if let Phase::First { recorder, .. } = &mut self.phase
            && let Some(builder) = recorder.builder.take()
        {
            let manifest = builder.publish()?;
            let (dir, samples) = (self.recording.dir.display(), manifest.counts.samples);
            tracing::info!("{dir} is a cache of {samples} samples now; the target has done its work");
            self.phase = read()?;
        }
        Ok(())
    }

    /// Recomputes the samples before `end` that an earlier run used but whose shard it did not
    /// finish.
    fn write_up_to(&mut self, end: usize) -> Result<(), StatesError> {
        let samples = self.recording.plan.samples();
        while let Phase::First { online, recorder } = &mut self.phase
            && let Some(place) = recorder.next_place().filter(|&place| place < end)
        {
            let first = place / self.per_step * self.per_step;
            let step: &[PlannedSample] = &samples[first..(first + self.per_step).min(samples.len())];
            let runs = online.batch_ranges(step);
            let Some(run) = runs.into_iter().find(|run| run.contains(&(place - first))) else { break };
            for (place, states) in (first + run.start..).zip(online.run(&step[run])?) {
                recorder.write_sample(place, &states)?;
            }
        }
        Ok(())
    }
}

/// Writes states to the unfinished shards.
struct Recorder<'d> {
    plan: &'d Plan,
    /// `None` after publishing.
    builder: Option<Builder<'d>>,
    /// The current shard; `None` if all are finished.
    writer: Option<ShardWriter<'d>>,
    /// Index in the plan of the shard's first sample.
    first: usize,
}

impl<'d> Recorder<'d> {
    fn new(builder: Builder<'d>, plan: &'d Plan) -> Result<Self, StatesError> {
        let mut recorder = Self { plan, builder: Some(builder), writer: None, first: 0 };
        recorder.next_shard()?;
        Ok(recorder)
    }

    fn next_shard(&mut self) -> Result<(), StatesError> {
        let Some(builder) = &mut self.builder else { return Ok(()) };
        self.writer = builder.next_shard()?;
        if let Some(writer) = &self.writer {
            self.first = self.plan.shards()[writer.shard()].samples.start;
        }
        Ok(())
    }

    /// Index in the plan of the next sample to write; `None` if all are written.
    fn next_place(&self) -> Option<usize> {
        self.writer.as_ref().map(|writer| self.first + writer.pushed())
    }

    /// Writes the sample at `place`, unless its shard is finished already.
    fn write_sample(&mut self, place: usize, states: &SampleStates) -> Result<(), StatesError> {
        if self.next_place() != Some(place) {
            return Ok(());
        }
        let Some(mut writer) = self.writer.take() else { return Ok(()) };
        writer.push(&bytes(&states.taps), &bytes(&states.last))?;
        if writer.pushed() < writer.samples().len() {
            self.writer = Some(writer);
            return Ok(());
        }
        writer.finish()?;
        self.next_shard()
    }
}
