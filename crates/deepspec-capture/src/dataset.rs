//! The samples that a drafter learns from, known before any of their states is there.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cache::{Counts, Encoding, MANIFEST_FILE, Plan, PlannedSample, Reader};
use deepspec_core::digest::Hasher;
use deepspec_core::recipe::{Recipe, States};
use deepspec_core::{env, jsonl};
use deepspec_text::{ChatTokenizer, trained_thinking};

use crate::samples::{SampleMeta, Samples, shared};
use crate::{RowCounts, StatesError, TargetSpec};

/// Hidden states per shard of a cache that training writes, in bytes. A resumed first epoch captures at most so much anew.
const SHARD_BYTES: u64 = 256 << 20;

/// Samples that [`Dataset::thinking`] looks at.
const LOOKED_AT: usize = 64;

/// The samples of a recipe. Sample i is the i-th that a cache of the same files holds.
pub struct Dataset {
    pub(crate) origin: Origin,
    counts: Counts,
    digest: String,
    report: Option<RowCounts>,
}

/// Where samples and states come from.
pub(crate) enum Origin {
    Cache(Stored),
    Online(Samples),
    Hybrid(Box<CacheRecorder>),
}

/// A finished cache, and which of its rows each sample is.
#[derive(Clone)]
pub(crate) struct Stored {
    pub reader: Arc<Reader>,
    /// `None` where sample i is row i.
    pub rows: Option<Arc<Vec<usize>>>,
}

/// A cache that the first epoch writes.
pub(crate) struct CacheRecorder {
    pub dir: PathBuf,
    /// The samples in the order in which the first epoch visits them: so the shards fill one after the other.
    pub plan: Plan,
    /// The place of each sample in the plan.
    pub places: Arc<Vec<usize>>,
}

impl Dataset {
    /// Opens the cache that `recipe` names and checks that it is of `source`, or tokenises the files that it names, once for
    /// all who ask for the same in `place`: a folder that may be shared. `first_epoch` gives the order in which so many samples are
    /// first visited, all of them.
    ///
    /// # Errors
    /// No cache, one of another source, or a damaged one; files that cannot be read or have no usable row; no place for what
    /// is tokenised.
    pub fn open(
        recipe: &Recipe,
        source: &TargetSpec,
        place: Option<&Path>,
        first_epoch: impl FnOnce(usize) -> Vec<usize>,
    ) -> Result<Self, StatesError> {
        if let States::Cache(dir) = &recipe.data.states {
            let stored = Stored::open(&env::expand_home(dir), source)?;
            let counts = stored.reader.manifest().counts.clone();
            return Ok(Self::new(Origin::Cache(stored), counts, None, source));
        }
        let files = recipe.inputs();
        if let Some(missing) = files.iter().find(|file| !file.is_file()) {
            let problem = format!("{}: no such file", missing.display());
            return Err(StatesError::Recipe { key: "data.input", problem });
        }
        if let Some(problem) = files.iter().find_map(|file| jsonl::check_lines(file).err()) {
            return Err(StatesError::Recipe { key: "data.input", problem });
        }
        let samples = shared(place.ok_or(StatesError::NoPlace)?, &files, source)?;
        let report = samples.report().clone();
        if report.kept == 0 {
            let names: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
            let problem = format!(
                "{}: no row can be used: {report}; an answer behind data.max_length ({}) is cut off, and fewer than 14 supervised tokens, two blocks of seven, are left out",
                names.join(", "),
                recipe.data.max_length
            );
            return Err(StatesError::Recipe { key: "data.input", problem });
        }
        let counts = Counts {
            samples: report.kept as u64,
            tokens: report.tokens,
            supervised_tokens: report.supervised_tokens,
        };
        let origin = match &recipe.data.states {
            States::Hybrid(dir) => {
                let dir = env::expand_home(dir);
                match dir.join(MANIFEST_FILE).exists() {
                    true => Origin::Cache(Stored::of_samples(&dir, &samples, source)?),
                    false => {
                        let order = first_epoch(samples.len());
                        Origin::Hybrid(Box::new(CacheRecorder::new(dir, &samples, order, source)?))
                    }
                }
            }
            _ => Origin::Online(samples),
        };
        Ok(Self::new(origin, counts, Some(report), source))
    }

    fn new(origin: Origin, counts: Counts, report: Option<RowCounts>, source: &TargetSpec) -> Self {
        let mut dataset = Self { origin, counts, digest: String::new(), report };
        dataset.digest = dataset.fingerprint(source);
        dataset
    }

    /// Samples.
    pub fn len(&self) -> usize {
        self.counts.samples as usize
    }

    /// Whether there are no samples, which [`Self::open`] refuses.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What is known of sample `index`, which is below [`Self::len`].
    pub fn facts(&self, index: usize) -> SampleMeta<'_> {
        match &self.origin {
            Origin::Cache(stored) => stored.facts(index),
            Origin::Online(samples) => samples.facts(index),
            Origin::Hybrid(recording) => SampleMeta::of(recording.sample(index)),
        }
    }

    /// Tokens of sample `index`, which is below [`Self::len`].
    pub fn length(&self, index: usize) -> usize {
        match &self.origin {
            Origin::Cache(stored) => stored.facts(index).input_ids.len(),
            Origin::Online(samples) => samples.length(index),
            Origin::Hybrid(recording) => recording.sample(index).input_ids.len(),
        }
    }

    /// Samples, tokens and supervised tokens.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Digest over the samples in their order, over what their states are bound to, and over how these are rounded, if they are: two
    /// data sets of one digest train alike, wherever their states come from.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether the first samples were answered with thinking on, as their prompts tell; `None` where they differ or do not
    /// tell.
    pub fn thinking(&self, tokenizer: &ChatTokenizer) -> Option<bool> {
        let thinking = |index: usize| {
            let ids: Vec<i64> = self.facts(index).input_ids.iter().map(|&id| id.into()).collect();
            trained_thinking(tokenizer, &ids).ok().flatten()
        };
        let first = (!self.is_empty()).then(|| thinking(0)).flatten()?;
        (1..self.len().min(LOOKED_AT)).all(|index| thinking(index) == Some(first)).then_some(first)
    }

    /// The encoding that rounds the states; `None` where they are those of the target, bit for bit.
    pub fn rounding(&self) -> Option<Encoding> {
        let stored = match &self.origin {
            Origin::Cache(stored) => Some(stored),
            Origin::Online(_) | Origin::Hybrid(_) => None,
        };
        stored.map(|stored| stored.reader.layout().encoding).filter(|encoding| encoding.rounds())
    }

    /// What became of the rows; `None` for a cache, whose build has said so.
    pub fn report(&self) -> Option<&RowCounts> {
        self.report.as_ref()
    }

    /// Tokens of the longest sample.
    pub fn longest(&self) -> usize {
        match &self.origin {
            Origin::Online(samples) => samples.longest(),
            _ => (0..self.len()).map(|index| self.length(index)).max().unwrap_or(0),
        }
    }

    /// Whether the target has to run.
    pub fn needs_target(&self) -> bool {
        match &self.origin {
            Origin::Cache(_) => false,
            Origin::Online(_) | Origin::Hybrid(_) => true,
        }
    }

    /// Bytes of the states on disk, now or when the first epoch is over; `None` where there are none.
    pub fn stored_bytes(&self) -> Option<u64> {
        match &self.origin {
            Origin::Cache(stored) => Some(stored.reader.manifest().bytes()),
            Origin::Online(_) => None,
            Origin::Hybrid(recording) => Some(recording.plan.bytes()),
        }
    }

    /// Bytes of tokens, spans and ids that lie in this process: all of them, but of a mapped file only its index and the pages
    /// that were read last.
    pub fn sample_bytes(&self) -> u64 {
        match &self.origin {
            Origin::Online(samples) => samples.mapped_bytes(),
            // Beside its tokens a sample takes an id, a span or a few, and their places.
            Origin::Cache(_) | Origin::Hybrid(_) => 4 * self.counts.tokens + 128 * self.counts.samples,
        }
    }

    fn fingerprint(&self, source: &TargetSpec) -> String {
        let mut hasher = Hasher::default();
        // An identity is plain data, which always has a JSON form.
        hasher.part(&serde_json::to_vec(&source.identity).unwrap_or_default());
        for facts in (0..self.len()).map(|index| self.facts(index)) {
            let ids: Vec<u8> = facts.input_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let bounds = facts.spans.iter().flat_map(|&(start, end)| [start, end]);
            let spans: Vec<u8> = bounds.flat_map(u32::to_le_bytes).collect();
            hasher.part(facts.id.as_bytes()).part(&ids).part(&spans);
        }
        if let Some(encoding) = self.rounding() {
            hasher.part(encoding.to_string().as_bytes());
        }
        hasher.hex()
    }
}

impl Stored {
    fn open(dir: &Path, source: &TargetSpec) -> Result<Self, StatesError> {
        if !dir.is_dir() {
            return Err(StatesError::NoCache { dir: dir.to_path_buf() });
        }
        let reader = Reader::open(dir)?;
        reader.require(&source.identity)?;
        let (kept, needed) = (reader.layout().last, source.final_states);
        if !kept.covers(needed) {
            return Err(StatesError::FinalStates { dir: dir.to_path_buf(), kept, needed });
        }
        Ok(Self { reader: Arc::new(reader), rows: None })
    }

    /// The cache in `dir` of just these samples, in whatever order it has them.
    fn of_samples(dir: &Path, samples: &Samples, source: &TargetSpec) -> Result<Self, StatesError> {
        let stored = Self::open(dir, source)?;
        let reader = &stored.reader;
        let by_id: HashMap<&str, usize> =
            (0..reader.len()).filter_map(|row| Some((reader.id(row)?, row))).collect();
        let row_of = |index: usize| {
            let sample = samples.facts(index);
            let row = by_id.get(&*sample.id).copied();
            let same = |row: &usize| stored.facts(*row) == sample;
            row.filter(same).ok_or_else(|| StatesError::OtherSamples {
                dir: dir.to_path_buf(),
                sample: sample.id.to_string(),
            })
        };
        let rows = (0..samples.len()).map(row_of).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { rows: Some(Arc::new(rows)), ..stored })
    }

    /// The cache's row of sample `index`.
    pub fn row(&self, index: usize) -> usize {
        self.rows.as_ref().map_or(index, |rows| rows[index])
    }

    fn facts(&self, index: usize) -> SampleMeta<'_> {
        let (reader, row) = (&self.reader, self.row(index));
        SampleMeta {
            id: Cow::Borrowed(reader.id(row).unwrap_or_default()),
            input_ids: Cow::Borrowed(reader.input_ids(row).unwrap_or_default()),
            spans: Cow::Borrowed(reader.spans(row).unwrap_or_default()),
        }
    }
}

impl CacheRecorder {
    fn new(
        dir: PathBuf,
        samples: &Samples,
        order: Vec<usize>,
        source: &TargetSpec,
    ) -> Result<Self, StatesError> {
        let mut places = vec![0; samples.len()];
        for (place, &sample) in order.iter().enumerate() {
            places[sample] = place;
        }
        let samples = order.into_iter().map(|index| samples.planned(index)).collect();
        let plan = Plan::new(samples, source.layout(source.final_states, Encoding::Bf16), SHARD_BYTES)?;
        Ok(Self { dir, plan, places: Arc::new(places) })
    }

    pub fn sample(&self, index: usize) -> &PlannedSample {
        &self.plan.samples()[self.places[index]]
    }
}
