//! Checks of the states that a server returns.

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tch::{Kind, Tensor};

/// Largest difference of log-probabilities for states in float32 and in 16 bits. Engines round
/// logits of 16-bit models to 16 bits.
const MAX_LOGPROB_DIFFERENCE: [f64; 2] = [5e-3, 0.35];

/// A file of states, as vLLM writes it.
pub struct StatesFile<'a> {
    file: SafeTensors<'a>,
    ids: Vec<i64>,
}

impl<'a> StatesFile<'a> {
    /// The file in `bytes`.
    ///
    /// # Errors
    /// If it is no safetensors file, or has no token ids.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| format!("the file of states: {error}"))?;
        let ids = {
            let tokens = tensor(&file, "token_ids")?;
            if tokens.dtype() != Dtype::I64 || tokens.shape().len() != 1 {
                let (dtype, shape) = (tokens.dtype(), tokens.shape());
                return Err(format!("`token_ids` is {dtype:?} {shape:?}, expected I64 of one dimension"));
            }
            let ids = tokens.data().chunks_exact(size_of::<i64>());
            ids.map(|id| i64::from_le_bytes(id.try_into().unwrap_or_default())).collect()
        };
        Ok(Self { file, ids })
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Its token ids.
    pub fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// Whether the file has exactly these tokens.
    pub fn has_tokens(&self, ids: &[i32]) -> bool {
        self.ids.iter().copied().eq(ids.iter().map(|&id| i64::from(id)))
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// If the file lacks it.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'a>, String> {
        tensor(&self.file, name)
    }

    /// The states `[N, slots, d]` in their dtype. `layer_ids` are those of the slots.
    ///
    /// # Errors
    /// The problem, if the file has other shapes, or states that are not finite, all zero in a row,
    /// or equal for two layers.
    pub fn states(&self, layer_ids: &[u32], hidden: usize) -> Result<Tensor, String> {
        let states = self.tensor("hidden_states")?;
        let expected = [self.len(), layer_ids.len(), hidden];
        if states.shape() != expected {
            return Err(format!(
                "`hidden_states` has shape {:?}, expected {expected:?} (tokens, layers {layer_ids:?}, hidden size); start the server with these layer ids",
                states.shape()
            ));
        }
        let kind = match states.dtype() {
            Dtype::F32 => Kind::Float,
            Dtype::BF16 => Kind::BFloat16,
            Dtype::F16 => Kind::Half,
            other => return Err(format!("`hidden_states` is {other:?}, expected F32, BF16 or F16")),
        };
        let shape = expected.map(|size| size as i64);
        let states = Tensor::from_data_size(states.data(), &shape, kind);
        check_values(&states, layer_ids)?;
        Ok(states)
    }

    /// Checks the states without a recipe: their number of tokens, and their values.
    ///
    /// # Errors
    /// As [`Self::states`].
    pub fn check_states(&self) -> Result<(), String> {
        let shape = self.tensor("hidden_states")?.shape().to_vec();
        let sizes = <[usize; 3]>::try_from(shape.as_slice()).ok().filter(|sizes| !sizes.contains(&0));
        let Some([_, slots, hidden]) = sizes else {
            return Err(format!(
                "`hidden_states` has shape {shape:?}, expected tokens, layers and hidden size"
            ));
        };
        // The first slot may be the embedding, which may be zero.
        let layer_ids: Vec<u32> = (0..slots as u32).collect();
        self.states(&layer_ids, hidden).map(drop)
    }
}

fn tensor<'a>(file: &SafeTensors<'a>, name: &str) -> Result<TensorView<'a>, String> {
    file.tensor(name).map_err(|error| format!("the file of states: {error}"))
}

fn check_values(states: &Tensor, layer_ids: &[u32]) -> Result<(), String> {
    if states.isfinite().all().int64_value(&[]) == 0 {
        return Err("`hidden_states` has NaN or infinite values".into());
    }
    // `[N, slots]`. The embedding of a token may be zero.
    let zero = states.abs().amax([-1], false).eq(0.0);
    for (slot, id) in layer_ids.iter().enumerate().filter(|(_, id)| **id > 0) {
        if zero.select(1, slot as i64).any().int64_value(&[]) != 0 {
            return Err(format!(
                "the states of layer id {id} are zero; vLLM 0.24 does that for hybrid models"
            ));
        }
        for (other, twin) in layer_ids[..slot].iter().enumerate() {
            if states.select(1, slot as i64) == states.select(1, other as i64) {
                return Err(format!(
                    "the states of layer ids {twin} and {id} are equal; the server extracts other layers"
                ));
            }
        }
    }
    Ok(())
}

/// Compares the log-probability of a sampled token that follows from the states with the server's.
/// `kind` is the dtype of the states.
///
/// # Errors
/// Both values, if they differ by more than rounding.
pub fn compare_log_prob(computed: f64, served: f64, kind: Kind) -> Result<(), String> {
    let limit = MAX_LOGPROB_DIFFERENCE[usize::from(kind != Kind::Float)];
    if (computed - served).abs() <= limit {
        return Ok(());
    }
    Err(format!(
        "the sampled token has log-probability {computed:.4} by the target's norm and head, {served:.4} by the server; it serves other weights, its last layer id is not that of the last layer, or the architecture scales its logits in a way that is unknown here"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: [i32; 3] = [5, 6, 7];

    /// A file of states `[3, 2, 4]` for [`IDS`] and layers 1 and 6.
    fn file(edit: impl FnOnce(&mut Vec<f32>), ids: &[i64], slots: usize) -> Vec<u8> {
        let mut values: Vec<f32> = (0..3 * slots * 4).map(|i| 1.0 + i as f32).collect();
        edit(&mut values);
        let values: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let states = TensorView::new(Dtype::F32, vec![3, slots, 4], &values).unwrap();
        let tokens = TensorView::new(Dtype::I64, vec![ids.len() / 8], &ids).unwrap();
        safetensors::serialize([("hidden_states", states), ("token_ids", tokens)], None).unwrap()
    }

    fn read(bytes: &[u8]) -> Result<Tensor, String> {
        StatesFile::parse(bytes)?.states(&[1, 6], 4)
    }

    fn problem(bytes: &[u8]) -> String {
        read(bytes).unwrap_err()
    }

    #[test]
    fn good_states_are_read() {
        let bytes = file(|_| (), &[5, 6, 7], 2);
        let states = read(&bytes).unwrap();
        let file = StatesFile::parse(&bytes).unwrap();
        assert!(file.has_tokens(&IDS) && !file.has_tokens(&[5, 6, 8]) && !file.has_tokens(&[5, 6]));
        assert_eq!(states.size(), [3, 2, 4]);
        assert_eq!(states.double_value(&[1, 0, 2]), 11.0);
    }

    #[test]
    fn every_fault_is_named() {
        assert!(problem(b"no file").contains("the file of states"));
        assert!(problem(&file(|_| (), &[5, 6], 2)).contains("[3, 2, 4], expected [2, 2, 4]"));
        assert!(problem(&file(|_| (), &[5, 6, 7], 3)).contains("[3, 3, 4], expected [3, 2, 4]"));
        assert!(problem(&file(|v| v[7] = f32::NAN, &[5, 6, 7], 2)).contains("NaN or infinite"));
        assert!(problem(&file(|v| v[4..8].fill(0.0), &[5, 6, 7], 2)).contains("layer id 6 are zero"));
        let equal = |values: &mut Vec<f32>| {
            for row in values.chunks_exact_mut(8) {
                row.copy_within(0..4, 4);
            }
        };
        assert!(problem(&file(equal, &[5, 6, 7], 2)).contains("layer ids 1 and 6 are equal"));
    }

    #[test]
    fn log_probabilities_may_differ_by_rounding_only() {
        assert!(compare_log_prob(-1.0, -1.001, Kind::Float).is_ok());
        assert!(compare_log_prob(-1.0, -1.1, Kind::BFloat16).is_ok());
        assert!(compare_log_prob(-1.0, -1.1, Kind::Float).unwrap_err().contains("-1.0000"));
        assert!(compare_log_prob(-1.0, f64::NAN, Kind::Float).is_err());
    }
}
