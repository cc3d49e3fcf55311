//! Checks of the states that a server returns.

use safetensors::{Dtype, SafeTensors};
use tch::{Kind, Tensor};

/// Largest difference of log-probabilities for states in float32 and in 16 bits. Engines round
/// logits of 16-bit models to 16 bits.
const MAX_LOGPROB_DIFFERENCE: [f64; 2] = [5e-3, 0.35];

/// Reads the states `[N, slots, d]` of a file in their dtype. `ids` are the tokens of the request,
/// and `layer_ids` those of the slots.
///
/// # Errors
/// The problem, if the file is no safetensors file, has other tokens or shapes, or has states that
/// are not finite, all zero in a row, or equal for two layers.
pub fn read_states(bytes: &[u8], ids: &[i32], layer_ids: &[u32], hidden: usize) -> Result<Tensor, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| format!("the file of states: {error}"))?;
    let tensor = |name: &str| file.tensor(name).map_err(|error| format!("the file of states: {error}"));
    let (tokens, states) = (tensor("token_ids")?, tensor("hidden_states")?);
    let found = tokens.data().chunks_exact(size_of::<i64>());
    let found = found.map(|id| i64::from_le_bytes(id.try_into().unwrap_or_default()));
    if tokens.dtype() != Dtype::I64 || !found.eq(ids.iter().map(|&id| i64::from(id))) {
        return Err(format!(
            "`token_ids` {:?} {:?} of the file are not the {} tokens of the request",
            tokens.dtype(),
            tokens.shape(),
            ids.len()
        ));
    }
    let expected = [ids.len(), layer_ids.len(), hidden];
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
    use safetensors::tensor::TensorView;

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

    fn problem(bytes: &[u8]) -> String {
        read_states(bytes, &IDS, &[1, 6], 4).unwrap_err()
    }

    #[test]
    fn good_states_are_read() {
        let states = read_states(&file(|_| (), &[5, 6, 7], 2), &IDS, &[1, 6], 4).unwrap();
        assert_eq!(states.size(), [3, 2, 4]);
        assert_eq!(states.double_value(&[1, 0, 2]), 11.0);
    }

    #[test]
    fn every_fault_is_named() {
        assert!(problem(b"no file").contains("the file of states"));
        assert!(problem(&file(|_| (), &[5, 6, 8], 2)).contains("not the 3 tokens"));
        assert!(problem(&file(|_| (), &[5, 6], 2)).contains("not the 3 tokens"));
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
