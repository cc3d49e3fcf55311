//! Hidden states that vLLM returned with its answers, as files in a folder.
//!
//! `regenerate --with-states` requests the states of prompt and answer in one request. It stores a
//! safetensors file for each row: `hidden_states` `[N, slots, d]` and `token_ids` `[N]` as vLLM
//! wrote them, `log_probs` `[A]` of the answer's tokens, and `last_token` `[1]`. The last token of an
//! answer never ran through the model, so N counts prompt and answer without it.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use deepspec_core::atomic::{self, FileError};
use deepspec_core::digest;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tch::Device;

use super::check::StatesFile;
use super::reader::{SampledToken, StatesReader};
use crate::cache::{MappedFile, PlannedSample};
use crate::{SampleStates, StatesError, TargetSpec};

const LOG_PROBS: &str = "log_probs";
const LAST_TOKEN: &str = "last_token";

/// An answer, and the file of states that the server wrote for it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ServedAnswer {
    /// The safetensors file.
    pub file: Vec<u8>,
    /// Tokens of the prompt.
    pub prompt: Vec<i64>,
    /// Generated tokens, at least one.
    pub answer: Vec<i64>,
    /// Log-probability of each generated token.
    pub log_probs: Vec<f64>,
}

impl ServedAnswer {
    /// Checks that the file has the tokens of the prompt and of the answer, without its last one, and
    /// plausible states of them.
    ///
    /// # Errors
    /// The problem.
    pub fn check(&self) -> Result<(), String> {
        let file = StatesFile::parse(&self.file)?;
        let fed = self.answer.len().saturating_sub(1);
        if !file.ids().iter().eq(self.prompt.iter().chain(&self.answer[..fed])) {
            return Err(format!(
                "`token_ids` of the file, {} of them, are not the {} tokens of the prompt and {fed} of the answer",
                file.len(),
                self.prompt.len()
            ));
        }
        if self.log_probs.len() != self.answer.len() {
            let (found, expected) = (self.log_probs.len(), self.answer.len());
            return Err(format!("{found} log-probabilities of {expected} tokens"));
        }
        file.check_states()
    }
}

/// A folder with the states of answered rows.
#[derive(Debug, Clone)]
pub struct AnswerStates {
    dir: PathBuf,
}

impl AnswerStates {
    /// The states in `dir`.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The file of row `id`. Its name is a digest, because ids may have any characters.
    fn path(&self, id: &str) -> PathBuf {
        self.path_of(digest::fingerprint(id.as_bytes()))
    }

    fn path_of(&self, fingerprint: u128) -> PathBuf {
        let name = format!("{fingerprint:032x}");
        self.dir.join(&name[..2]).join(format!("{name}.safetensors"))
    }

    /// Whether the folder has the states of the row whose id has this fingerprint.
    pub fn contains(&self, fingerprint: u128) -> bool {
        self.path_of(fingerprint).is_file()
    }

    /// Stores the states of row `id`, and replaces earlier ones.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn store(&self, id: &str, answer: &ServedAnswer) -> Result<(), FileError> {
        let path = self.path(id);
        let bytes = serialize(answer).map_err(|problem| {
            FileError::at("writing", &path)(io::Error::new(io::ErrorKind::InvalidData, problem))
        })?;
        if let Some(parent) = path.parent() {
            atomic::create_dir(parent)?;
        }
        atomic::replace(&path, |file| file.write_all(&bytes))
    }

    /// Cuts a row's sample behind its states, because a chat template may write more after the
    /// answer. The last token of the answer has no states. It stays as a label unless the drafter
    /// reads its states.
    ///
    /// # Errors
    /// The problem, if the row has no states, its tokens are others, or a supervised token lies
    /// behind them.
    pub fn fit(
        &self,
        mut sample: PlannedSample,
        reads_last_token_state: bool,
    ) -> Result<PlannedSample, String> {
        let path = self.path(&sample.id);
        // Mapped, so that only the pages of the token ids are read.
        let file = MappedFile::open(&path).map_err(|error| match error.source.kind() {
            io::ErrorKind::NotFound => format!(
                "row {:?} has no hidden states in {}; generate it anew with --with-states",
                sample.id,
                self.dir.display()
            ),
            _ => error.to_string(),
        })?;
        let file =
            StatesFile::parse(file.bytes()).map_err(|problem| format!("{}: {problem}", path.display()))?;
        let mut ids = file.ids().to_vec();
        let fed = ids.len();
        ids.extend(
            last_token(&file)
                .map_err(|problem| format!("{}: {problem}; generate the row anew", path.display()))?,
        );
        if let Some(place) = first_difference(&sample.input_ids, &ids) {
            return Err(format!(
                "row {:?}: token {place} is {}, and {} is of token {}; the row was edited, or its tokens are made from its text",
                sample.id,
                sample.input_ids[place],
                path.display(),
                ids[place]
            ));
        }
        let end_of_answer = ids.len();
        // A supervised span may end with tokens that the template writes behind the answer. A span of
        // its own behind the answer is another message.
        if let Some((start, _)) = sample.spans.last().filter(|(start, _)| *start as usize >= end_of_answer) {
            return Err(format!(
                "row {:?}: token {start} is supervised, and {} has the states of the first {fed}",
                sample.id,
                path.display()
            ));
        }
        let length = if reads_last_token_state { fed } else { end_of_answer };
        sample.input_ids.truncate(length);
        let length = sample.length();
        sample.spans.iter_mut().for_each(|(_, end)| *end = length.min(*end));
        sample.spans.retain(|(start, end)| start < end);
        Ok(sample)
    }
}

/// The file of an answer's states, with its log-probabilities.
fn serialize(answer: &ServedAnswer) -> Result<Vec<u8>, String> {
    let file = StatesFile::parse(&answer.file)?;
    let log_probs: Vec<u8> = answer.log_probs.iter().flat_map(|value| value.to_le_bytes()).collect();
    let log_probs = TensorView::new(Dtype::F64, vec![answer.log_probs.len()], &log_probs);
    let last = answer.answer.last().copied().unwrap_or_default().to_le_bytes();
    let last = TensorView::new(Dtype::I64, vec![1], &last);
    let tensors = [
        ("hidden_states", file.tensor("hidden_states")?),
        ("token_ids", file.tensor("token_ids")?),
        (LOG_PROBS, log_probs.map_err(|error| error.to_string())?),
        (LAST_TOKEN, last.map_err(|error| error.to_string())?),
    ];
    safetensors::serialize(tensors, None).map_err(|error| error.to_string())
}

/// The answer's last token, which has no states.
fn last_token(file: &StatesFile<'_>) -> Result<Option<i64>, String> {
    let token = file.tensor(LAST_TOKEN)?;
    Ok(token.data().try_into().ok().map(i64::from_le_bytes))
}

/// Index of the first token that differs, up to the end of the shorter list.
fn first_difference(own: &[i32], found: &[i64]) -> Option<usize> {
    own.iter().zip(found).position(|(&own, &found)| i64::from(own) != found)
}

/// Reads the states of answers in the layout of a recipe.
pub struct AnswerStatesReader {
    answers: AnswerStates,
    reader: StatesReader,
}

impl AnswerStatesReader {
    /// The reader of the recipe's folder; `device` applies the norm and the LM head.
    ///
    /// # Errors
    /// If the target's norm and head cannot be read.
    pub fn open(spec: &TargetSpec, answers: AnswerStates, device: Device) -> Result<Self, StatesError> {
        Ok(Self { answers, reader: StatesReader::open(spec, device)? })
    }

    /// Origin of the states, for the manifest of a cache.
    pub fn describe(&self) -> String {
        format!(
            "vLLM with the answers, layer ids {:?}, the last before the final norm, which was applied here",
            self.reader.layer_ids()
        )
    }

    /// The states of a sample, which [`AnswerStates::fit`] has cut. The first and the last answered
    /// token check them.
    ///
    /// # Errors
    /// If the file cannot be read, or its states are not those of the recipe's target and layers.
    pub fn read(&self, sample: &PlannedSample) -> Result<SampleStates, StatesError> {
        let path = self.answers.path(&sample.id);
        let bytes = fs::read(&path).map_err(FileError::at("reading", &path))?;
        self.read_file(sample, &bytes).map_err(|problem| {
            let problem = format!("row {:?}: {problem}; take the row out, or generate it anew", sample.id);
            StatesError::Samples { path, problem }
        })
    }

    fn read_file(&self, sample: &PlannedSample, bytes: &[u8]) -> Result<SampleStates, String> {
        let file = StatesFile::parse(bytes)?;
        if first_difference(&sample.input_ids, file.ids()).is_some() {
            return Err("its tokens are others".into());
        }
        let log_probs = file.tensor(LOG_PROBS)?;
        let log_probs: Vec<f64> = log_probs
            .data()
            .chunks_exact(size_of::<f64>())
            .map(|value| f64::from_le_bytes(value.try_into().unwrap_or_default()))
            .collect();
        // The last state predicts the last token of the answer.
        let Some(first) = (file.len() + 1).checked_sub(log_probs.len()).filter(|&first| first > 0) else {
            return Err(format!("`{LOG_PROBS}` has {} values for {} tokens", log_probs.len(), file.len()));
        };
        let sampled = [Some(0), log_probs.len().checked_sub(1)].into_iter().flatten().filter_map(|index| {
            let id = i64::from(*sample.input_ids.get(first + index)?);
            Some(SampledToken { position: first + index - 1, id, log_prob: *log_probs.get(index)? })
        });
        self.reader.read(sample, &file, &sampled.collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: [i64; 3] = [5, 6, 7];
    const ANSWER: [i64; 3] = [8, 9, 2];

    /// An answer of three tokens, with states of two values for two layers.
    fn answer() -> ServedAnswer {
        let states: Vec<u8> = (1..=20).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let fed = [5, 6, 7, 8, 9_i64];
        let ids: Vec<u8> = fed.iter().flat_map(|id| id.to_le_bytes()).collect();
        let states = TensorView::new(Dtype::F32, vec![5, 2, 2], &states).unwrap();
        let tokens = TensorView::new(Dtype::I64, vec![5], &ids).unwrap();
        let file = safetensors::serialize([("hidden_states", states), ("token_ids", tokens)], None).unwrap();
        ServedAnswer { file, prompt: PROMPT.into(), answer: ANSWER.into(), log_probs: vec![-0.5; 3] }
    }

    fn sample(id: &str, ids: &[i32], span: (u32, u32)) -> PlannedSample {
        PlannedSample { id: id.into(), input_ids: ids.to_vec(), spans: vec![span] }
    }

    #[test]
    fn a_file_belongs_to_its_prompt_and_answer() {
        assert_eq!(answer().check(), Ok(()));
        let problem = |edit: fn(&mut ServedAnswer)| {
            let mut answer = answer();
            edit(&mut answer);
            answer.check().unwrap_err()
        };
        assert!(problem(|answer| answer.prompt[0] = 4).contains("not the 3 tokens of the prompt and 2 of"));
        assert!(problem(|answer| answer.answer.push(3)).contains("`token_ids` of the file, 5 of them"));
        assert!(problem(|answer| answer.log_probs.truncate(2)).contains("2 log-probabilities of 3 tokens"));
        assert!(problem(|answer| answer.file.truncate(9)).contains("the file of states"));
        let end = |answer: &mut ServedAnswer, value: f32| {
            let at = answer.file.windows(4).rposition(|bytes| bytes == 20.0_f32.to_le_bytes()).unwrap();
            answer.file[at..at + 4].copy_from_slice(&value.to_le_bytes());
        };
        let mut broken = answer();
        end(&mut broken, f32::NAN);
        assert!(broken.check().unwrap_err().contains("NaN"));
    }

    #[test]
    fn samples_end_with_the_answer_or_with_its_last_state() {
        let dir = tempfile::tempdir().unwrap();
        let states = AnswerStates::new(dir.path().join("states"));
        states.store("row/1", &answer()).unwrap();
        // A line break follows the answer in the template.
        let whole = sample("row/1", &[5, 6, 7, 8, 9, 2, 13], (3, 6));
        let kept = states.fit(whole.clone(), false).unwrap();
        assert_eq!((kept.input_ids.as_slice(), &kept.spans[..]), (&[5, 6, 7, 8, 9, 2][..], &[(3, 6)][..]));
        let supervised = sample("row/1", &[5, 6, 7, 8, 9, 2, 13], (3, 7));
        assert_eq!(states.fit(supervised, false), Ok(kept));
        let cut = states.fit(whole, true).unwrap();
        assert_eq!((cut.input_ids.as_slice(), &cut.spans[..]), (&[5, 6, 7, 8, 9][..], &[(3, 5)][..]));
        // `data.max_length` may cut more.
        let short = states.fit(sample("row/1", &[5, 6, 7, 8], (3, 4)), false).unwrap();
        assert_eq!(short.input_ids.len(), 4);
    }

    #[test]
    fn rows_without_their_states_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let states = AnswerStates::new(dir.path().into());
        states.store("row", &answer()).unwrap();
        let problem = |sample: PlannedSample| states.fit(sample, false).unwrap_err();
        assert!(problem(sample("other", &[5], (0, 1))).contains("row \"other\" has no hidden states"));
        assert!(problem(sample("row", &[5, 6, 3, 8], (3, 4))).contains("token 2 is 3"));
        // An edit of the answer's end, too.
        assert!(problem(sample("row", &[5, 6, 7, 8, 9, 4], (3, 6))).contains("token 5 is 4"));
        let longer = sample("row", &[5, 6, 7, 8, 9, 2, 13, 14], (6, 8));
        assert!(problem(longer).contains("token 6 is supervised"));
    }
}
