//! Numbers of experts in a config.json.

use deepspec_checkpoint::{Fields, MAX_EXPERTS};

use crate::ModelError;

/// E by the first of `count_keys` that is there, and k by `num_experts_per_tok`.
///
/// # Errors
/// If a number is missing, E is above [`MAX_EXPERTS`], or k above E.
pub(super) fn read_counts(fields: &Fields, count_keys: [&str; 2]) -> Result<(i64, i64), ModelError> {
    let [key, newer] = count_keys;
    let newer = fields.size::<i64>(newer)?;
    let count = fields.required(key, fields.size(key)?.or(newer))?;
    if count > MAX_EXPERTS {
        return Err(fields.error(key, format!("{count} is more than {MAX_EXPERTS}")).into());
    }
    let key = "num_experts_per_tok";
    let active = fields.required_size(key)?;
    if active > count {
        return Err(fields.error(key, format!("{active} of {count} experts")).into());
    }
    Ok((count, active))
}
