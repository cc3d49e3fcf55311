//! Names of a quantised module's tensors, and settings that several methods have.

use crate::{CheckpointError, Fields, Tensors};

/// Ending of a plain weight, and of unpacked numbers.
pub(crate) const WEIGHT: &str = ".weight";

/// Names of the tensors of a module that are there, of those with these endings.
pub(crate) fn present(tensors: &Tensors, module: &str, endings: &[&str]) -> Vec<String> {
    let names = endings.iter().map(|ending| format!("{module}{ending}"));
    names.filter(|name| tensors.get(name).is_some()).collect()
}

/// Two positive numbers, rows and columns of a block.
///
/// # Errors
/// If the value is something else.
pub(crate) fn read_block(fields: &Fields, key: &str) -> Result<Option<[usize; 2]>, CheckpointError> {
    match fields.integers(key)?.as_deref() {
        None => Ok(None),
        Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok(Some([rows as usize, columns as usize])),
        Some(found) => {
            Err(fields
                .error(key, format!("expected two positive numbers, rows and columns, found {found:?}")))
        }
    }
}

/// Checks that the bits per number, the value of `key`, are among `known`.
///
/// # Errors
/// If they are others.
pub(crate) fn check_bits(
    fields: &Fields,
    key: &str,
    bits: u32,
    known: &[u32],
) -> Result<u32, CheckpointError> {
    if known.contains(&bits) {
        return Ok(bits);
    }
    let expected = known.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ");
    Err(fields.error(key, format!("{bits} is not read; expected {expected}; {}", super::TARGET_REMEDY)))
}
