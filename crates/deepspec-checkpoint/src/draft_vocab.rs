//! Reduced vocabularies of drafters: the target's tokens that a drafter can draft.
//!
//! Checkpoints store two maps, as EAGLE-3 does. `d2t [Vd]` int64 is the offset from a draft id to the target's id:
//! target id = i + d2t\[i\]. `t2d [V]` says for each of the target's ids whether it can be drafted.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use deepspec_core::atomic;
use safetensors::tensor::{Dtype, TensorView};

use crate::write::{TensorSource, TensorToWrite};
use crate::{CheckpointError, Tensors};

/// Name of the offsets from draft ids to the target's ids.
pub const D2T: &str = "d2t";
/// Name of the flags of the target's ids that can be drafted.
pub const T2D: &str = "t2d";

/// The target's tokens that a drafter can draft. Draft id i stands for the i-th of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftVocab {
    /// The target's id of each draft id.
    tokens: Vec<i64>,
    /// Vocabulary size V of the target.
    vocab_size: usize,
}

impl DraftVocab {
    /// The `size` most frequent tokens, ascending, where `counts[t]` is how often token t occurs. Of equally frequent
    /// tokens, the lower ids come first. None if `size` is 0 or above the number of tokens.
    pub fn most_frequent(counts: &[u64], size: usize) -> Option<Self> {
        let mut ids: Vec<usize> = (0..counts.len()).collect();
        ids.sort_by_key(|&id| (std::cmp::Reverse(counts[id]), id));
        let mut tokens: Vec<i64> = ids.get(..size)?.iter().map(|&id| id as i64).collect();
        tokens.sort_unstable();
        (size > 0).then_some(Self { tokens, vocab_size: counts.len() })
    }

    /// Reads the tensor `d2t` of a checkpoint, for a target with `vocab_size` tokens.
    ///
    /// # Errors
    /// [`CheckpointError::Tensor`] if the tensor is missing, of another type, or does not map to distinct ids below
    /// `vocab_size`.
    pub fn of_tensors(tensors: &Tensors, vocab_size: usize) -> Result<Self, CheckpointError> {
        let facts =
            tensors.get(D2T).ok_or_else(|| tensors.error(D2T, "missing; a reduced vocabulary needs it"))?;
        if facts.dtype != Dtype::I64 || facts.shape.len() != 1 {
            let problem = format!("expected a list of int64, found {:?} of {:?}", facts.shape, facts.dtype);
            return Err(tensors.error(D2T, problem));
        }
        let bytes = tensors.bytes(D2T)?;
        let offsets =
            bytes.chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap_or_default()));
        let tokens: Vec<i64> =
            (0..).zip(offsets).map(|(id, offset): (i64, i64)| id.saturating_add(offset)).collect();
        let outside = tokens.iter().position(|token| !(0..vocab_size as i64).contains(token));
        let mut seen = BTreeSet::new();
        let repeated = tokens.iter().position(|token| !seen.insert(*token));
        if let Some(id) = outside {
            let problem =
                format!("draft id {id} stands for token {}; the target has {vocab_size} tokens", tokens[id]);
            return Err(tensors.error(D2T, problem));
        }
        if let Some(id) = repeated {
            let problem = format!("draft id {id} stands for token {}, as an earlier one does", tokens[id]);
            return Err(tensors.error(D2T, problem));
        }
        if tokens.is_empty() {
            return Err(tensors.error(D2T, "it is empty"));
        }
        Ok(Self { tokens, vocab_size })
    }

    /// Reads a file that [`Self::write`] wrote, or another safetensors file with `d2t` and `t2d`.
    ///
    /// # Errors
    /// If the file is no safetensors file, lacks a tensor, or one of them contradicts the other.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        let tensors = Tensors::open_file(path)?;
        let Some(facts) = tensors.get(T2D) else {
            return Err(tensors.error(T2D, "missing; `deepspec-data draft-vocab` writes a file with it"));
        };
        let vocab_size = facts.shape.iter().product();
        let vocab = Self::of_tensors(&tensors, vocab_size)?;
        if tensors.bytes(T2D)? != vocab.flags() {
            return Err(tensors.error(T2D, "it does not name the tokens of `d2t`"));
        }
        Ok(vocab)
    }

    /// Writes `d2t` and `t2d` as a safetensors file, atomically.
    ///
    /// # Errors
    /// Any I/O failure, with the path.
    pub fn write(&self, path: &Path) -> Result<(), CheckpointError> {
        let problem = |problem: String| CheckpointError::NotADrafter { path: path.to_path_buf(), problem };
        let maps = self.maps();
        let views: Result<Vec<_>, _> = maps
            .iter()
            .map(|(name, dtype, length, bytes)| {
                let view = TensorView::new(*dtype, vec![*length], bytes);
                view.map(|view| (*name, view)).map_err(|error| problem(error.to_string()))
            })
            .collect();
        let bytes = safetensors::serialize(views?, None).map_err(|error| problem(error.to_string()))?;
        Ok(atomic::replace(path, |file| file.write_all(&bytes))?)
    }

    /// The two maps as tensors to write.
    pub(crate) fn tensors(&self) -> Vec<TensorToWrite<'static>> {
        let tensor = |(name, dtype, length, bytes): (&str, _, _, _)| TensorToWrite {
            name: name.into(),
            dtype,
            shape: vec![length],
            source: TensorSource::Bytes(bytes),
        };
        self.maps().into_iter().map(tensor).collect()
    }

    /// Name, dtype, length and bytes of both maps.
    fn maps(&self) -> [(&'static str, Dtype, usize, Vec<u8>); 2] {
        let offsets = self.offsets().iter().flat_map(|offset| offset.to_le_bytes()).collect();
        [(D2T, Dtype::I64, self.tokens.len(), offsets), (T2D, Dtype::BOOL, self.vocab_size, self.flags())]
    }

    /// The target's id of each draft id.
    pub fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    /// Vocabulary size V of the target.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Offsets from draft ids to the target's ids: `d2t`.
    pub fn offsets(&self) -> Vec<i64> {
        (0..).zip(&self.tokens).map(|(id, token): (i64, _)| token - id).collect()
    }

    /// A byte for each of the target's ids, 1 if it can be drafted: `t2d`.
    fn flags(&self) -> Vec<u8> {
        let known: BTreeSet<i64> = self.tokens.iter().copied().collect();
        (0..self.vocab_size as i64).map(|id| u8::from(known.contains(&id))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_tokens_are_kept_in_the_order_of_their_ids() {
        let vocab = DraftVocab::most_frequent(&[0, 7, 3, 3, 9, 0], 3).unwrap();
        assert_eq!(vocab.tokens(), [1, 2, 4], "of tokens 2 and 3, the lower id is kept");
        assert_eq!(vocab.offsets(), [1, 1, 2]);
        assert_eq!(vocab.flags(), [0, 1, 1, 0, 1, 0]);
        assert_eq!(DraftVocab::most_frequent(&[1, 2], 3), None);
        assert_eq!(DraftVocab::most_frequent(&[1, 2], 0), None);
    }

    #[test]
    fn a_written_file_is_read_back_and_a_wrong_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vocab.safetensors");
        let vocab = DraftVocab::most_frequent(&[5, 1, 4, 2, 3], 3).unwrap();
        vocab.write(&path).unwrap();
        assert_eq!(DraftVocab::read(&path).unwrap(), vocab);

        let offsets = |offsets: [i64; 3]| {
            let bytes: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
            let maps = [(D2T, Dtype::I64, 3, bytes), (T2D, Dtype::BOOL, 5, vocab.flags())];
            let views = maps.iter().map(|(name, dtype, len, bytes)| {
                (*name, TensorView::new(*dtype, vec![*len], bytes).unwrap())
            });
            std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
            DraftVocab::read(&path).unwrap_err().to_string()
        };
        assert!(offsets([0, 1, 9]).contains("token 11"), "outside of the target's vocabulary");
        assert!(offsets([1, 0, 0]).contains("an earlier one"), "token 1 twice");
        assert!(offsets([0, 0, 0]).contains("t2d"), "t2d names other tokens");
    }
}
