//! The samples that a drafter trains on, without their hidden states.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use crate::cache::{CacheTotals, Encoding, MANIFEST_FILE, Reader};
use deepspec_core::digest::Hasher;
use deepspec_core::recipe::StatesStorage;
use deepspec_core::{env, jsonl};
use deepspec_drafters::Recipe;
use deepspec_text::{ChatTokenizer, detect_trained_thinking};

use crate::recorder::CacheRecorder;
use crate::samples::{SampleMeta, Samples, open_or_tokenise};
use crate::{RowCounts, StatesError, TargetSpec};

/// Number of samples that [`Dataset::thinking`] checks.
const THINKING_CHECK_SAMPLES: usize = 64;

/// The samples of a recipe. Sample i is the i-th of a cache built from equal files.
pub struct Dataset {
    pub(crate) origin: Origin,
    counts: CacheTotals,
    digest: String,
    report: Option<RowCounts>,
    /// Whether servers compute the states.
    is_served: bool,
}

/// Origin of samples and hidden states.
pub(crate) enum Origin {
    Cache(FinishedCache),
    Online(Samples),
    Hybrid(Box<CacheRecorder>),
}

/// A finished cache, and the index of each sample in it.
#[derive(Clone)]
pub(crate) struct FinishedCache {
    pub reader: Arc<Reader>,
    /// Index in the cache of each sample; `None` if both orders are equal.
    pub rows: Option<Arc<Vec<usize>>>,
    /// Whether the drafter reads the taps of the cache.
    pub reads_taps: bool,
}

impl Dataset {
    /// Opens the cache that `recipe` names and checks that it belongs to `source`. For a recipe
    /// with files, tokenises them into `place`, a folder that processes and runs share.
    /// `first_epoch` returns the order in which the first epoch visits that many samples.
    ///
    /// # Errors
    /// Fails if the cache is missing, damaged or of another source. Fails if files cannot be read
    /// or have no usable rows, and if there is no folder for tokenised samples.
    pub fn open(
        recipe: &Recipe,
        source: &TargetSpec,
        place: Option<&Path>,
        first_epoch: impl FnOnce(usize) -> Vec<usize>,
    ) -> Result<Self, StatesError> {
        if let StatesStorage::Cache(dir) = &recipe.data.states.storage {
            let stored = FinishedCache::open(&env::expand_home(dir), source)?;
            let counts = stored.reader.manifest().counts.clone();
            return Ok(Self::new(Origin::Cache(stored), counts, None, source, false));
        }
        let files = recipe.inputs();
        if let Some(missing) = files.iter().find(|file| !file.is_file()) {
            let problem = format!("{}: no such file", missing.display());
            return Err(StatesError::Recipe { key: "data.input", problem });
        }
        if let Some(problem) = files.iter().find_map(|file| jsonl::check_is_json_lines(file).err()) {
            return Err(StatesError::Recipe { key: "data.input", problem });
        }
        let samples = open_or_tokenise(place.ok_or(StatesError::NoPlace)?, &files, source)?;
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
        let counts = CacheTotals {
            samples: report.kept as u64,
            tokens: report.tokens,
            supervised_tokens: report.supervised_tokens,
        };
        let origin = match &recipe.data.states.storage {
            StatesStorage::Hybrid(dir) => {
                let dir = env::expand_home(dir);
                match dir.join(MANIFEST_FILE).exists() {
                    true => Origin::Cache(FinishedCache::open_matching(&dir, &samples, source)?),
                    false => {
                        let order = first_epoch(samples.len());
                        Origin::Hybrid(Box::new(CacheRecorder::new(dir, &samples, order, source)?))
                    }
                }
            }
            _ => Origin::Online(samples),
        };
        Ok(Self::new(origin, counts, Some(report), source, recipe.data.states.servers.is_some()))
    }

    fn new(
        origin: Origin,
        counts: CacheTotals,
        report: Option<RowCounts>,
        source: &TargetSpec,
        is_served: bool,
    ) -> Self {
        let mut dataset = Self { origin, counts, digest: String::new(), report, is_served };
        dataset.digest = dataset.compute_digest(source);
        dataset
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.counts.samples as usize
    }

    /// Whether there are no samples; [`Self::open`] rejects that.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Id, token ids and spans of sample `index`, which must be below [`Self::len`].
    pub fn meta(&self, index: usize) -> SampleMeta<'_> {
        match &self.origin {
            Origin::Cache(stored) => stored.meta(index),
            Origin::Online(samples) => samples.meta(index),
            Origin::Hybrid(recording) => SampleMeta::of(recording.sample(index)),
        }
    }

    /// Number of tokens in sample `index`, which must be below [`Self::len`].
    pub fn length(&self, index: usize) -> usize {
        match &self.origin {
            Origin::Cache(stored) => stored.meta(index).input_ids.len(),
            Origin::Online(samples) => samples.length(index),
            Origin::Hybrid(recording) => recording.sample(index).input_ids.len(),
        }
    }

    /// Number of samples, tokens and supervised tokens.
    pub fn counts(&self) -> &CacheTotals {
        &self.counts
    }

    /// Digest over the samples in order, the identity of their hidden states, and a lossy encoding
    /// if there is one. Data sets with equal digests train alike, wherever their states come from.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether the first samples were generated with thinking on, judged by their prompts. `None`
    /// if they differ or do not show it.
    pub fn thinking(&self, tokenizer: &ChatTokenizer) -> Option<bool> {
        let thinking = |index: usize| {
            let ids: Vec<i64> = self.meta(index).input_ids.iter().map(|&id| id.into()).collect();
            detect_trained_thinking(tokenizer, &ids).ok().flatten()
        };
        let first = (!self.is_empty()).then(|| thinking(0)).flatten()?;
        (1..self.len().min(THINKING_CHECK_SAMPLES))
            .all(|index| thinking(index) == Some(first))
            .then_some(first)
    }

    /// The encoding of the states if it is lossy; `None` if the states equal the target's bit for
    /// bit.
    pub fn lossy_encoding(&self) -> Option<Encoding> {
        let stored = match &self.origin {
            Origin::Cache(stored) => Some(stored),
            Origin::Online(_) | Origin::Hybrid(_) => None,
        };
        stored.map(|stored| stored.reader.layout().encoding).filter(|encoding| encoding.is_lossy())
    }

    /// Counts of used and unused rows; `None` for a cache, whose build reported them.
    pub fn report(&self) -> Option<&RowCounts> {
        self.report.as_ref()
    }

    /// Number of tokens in the longest sample.
    pub fn longest(&self) -> usize {
        match &self.origin {
            Origin::Online(samples) => samples.longest(),
            _ => (0..self.len()).map(|index| self.length(index)).max().unwrap_or(0),
        }
    }

    /// Whether the target has to run in this program during training.
    pub fn needs_target(&self) -> bool {
        self.computes_states() && !self.is_served
    }

    /// Whether states are computed during training, by the target in this program or by servers.
    pub fn computes_states(&self) -> bool {
        match &self.origin {
            Origin::Cache(_) => false,
            Origin::Online(_) | Origin::Hybrid(_) => true,
        }
    }

    /// Bytes of the states on disk, now or after the first epoch; `None` if they are not stored.
    pub fn stored_bytes(&self) -> Option<u64> {
        match &self.origin {
            Origin::Cache(stored) => Some(stored.reader.manifest().bytes()),
            Origin::Online(_) => None,
            Origin::Hybrid(recording) => Some(recording.plan.bytes()),
        }
    }

    /// Bytes of tokens, spans and ids in this process. For a mapped file, only its index and the
    /// recently read pages.
    pub fn sample_bytes(&self) -> u64 {
        match &self.origin {
            Origin::Online(samples) => samples.mapped_bytes(),
            // Besides its tokens, a sample has an id, a few spans, and their offsets.
            Origin::Cache(_) | Origin::Hybrid(_) => 4 * self.counts.tokens + 128 * self.counts.samples,
        }
    }

    fn compute_digest(&self, source: &TargetSpec) -> String {
        let mut hasher = Hasher::default();
        // An identity is plain data, which always serializes.
        hasher.update_part(&serde_json::to_vec(&source.identity).unwrap_or_default());
        for facts in (0..self.len()).map(|index| self.meta(index)) {
            let ids: Vec<u8> = facts.input_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let bounds = facts.spans.iter().flat_map(|&(start, end)| [start, end]);
            let spans: Vec<u8> = bounds.flat_map(u32::to_le_bytes).collect();
            hasher.update_part(facts.id.as_bytes()).update_part(&ids).update_part(&spans);
        }
        if let Some(encoding) = self.lossy_encoding() {
            hasher.update_part(encoding.to_string().as_bytes());
        }
        hasher.hex_digest()
    }
}

impl FinishedCache {
    fn open(dir: &Path, source: &TargetSpec) -> Result<Self, StatesError> {
        if !dir.is_dir() {
            return Err(StatesError::NoCache { dir: dir.to_path_buf() });
        }
        let reader = Reader::open(dir)?;
        let mut wanted = source.identity.clone();
        let reads_taps = !wanted.taps.is_empty();
        // A drafter that reads no layers takes the final states of any cache.
        if !reads_taps {
            wanted.taps.clone_from(&reader.manifest().identity.taps);
        }
        reader.check_identity(&wanted)?;
        let (kept, needed) = (reader.layout().last, source.final_states);
        if !kept.covers(needed) {
            return Err(StatesError::FinalStates { dir: dir.to_path_buf(), kept, needed });
        }
        if reader.manifest().no_last_token_states && source.reads_last_token_state {
            return Err(StatesError::LastTokenStates { dir: dir.to_path_buf() });
        }
        Ok(Self { reader: Arc::new(reader), rows: None, reads_taps })
    }

    /// Opens the cache in `dir`, which must have exactly these samples, in any order.
    fn open_matching(dir: &Path, samples: &Samples, source: &TargetSpec) -> Result<Self, StatesError> {
        let stored = Self::open(dir, source)?;
        let reader = &stored.reader;
        let by_id: HashMap<&str, usize> =
            (0..reader.len()).filter_map(|row| Some((reader.id(row)?, row))).collect();
        let row_of = |index: usize| {
            let sample = samples.meta(index);
            let row = by_id.get(&*sample.id).copied();
            let same = |row: &usize| stored.meta(*row) == sample;
            row.filter(same).ok_or_else(|| StatesError::OtherSamples {
                dir: dir.to_path_buf(),
                sample: sample.id.to_string(),
            })
        };
        let rows = (0..samples.len()).map(row_of).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { rows: Some(Arc::new(rows)), ..stored })
    }

    /// Index in the cache of sample `index`.
    pub fn cache_row(&self, index: usize) -> usize {
        self.rows.as_ref().map_or(index, |rows| rows[index])
    }

    fn meta(&self, index: usize) -> SampleMeta<'_> {
        let (reader, row) = (&self.reader, self.cache_row(index));
        SampleMeta {
            id: Cow::Borrowed(reader.id(row).unwrap_or_default()),
            input_ids: Cow::Borrowed(reader.input_ids(row).unwrap_or_default()),
            spans: Cow::Borrowed(reader.spans(row).unwrap_or_default()),
        }
    }
}
