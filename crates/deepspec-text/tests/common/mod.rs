//! Compares loss masks with transformers' masks.

use deepspec_text::ChatTokenizer;

/// Whether a mask is the peer's but for the turns in which nothing is said: the peer learns their ends, and here they teach nothing. `marks`
/// are texts within a mask by which nothing is said.
pub fn alike(
    tokenizer: &ChatTokenizer,
    ids: &[i64],
    own: &[bool],
    theirs: &[bool],
    markers: &[&str],
) -> bool {
    let mut start = 0;
    own.len() == theirs.len()
        && theirs.chunk_by(|a, b| a == b).all(|run| {
            let place = start..start + run.len();
            start = place.end;
            let is_silent = || {
                let said = tokenizer.decode(&ids[place.clone()], true).unwrap();
                markers.iter().fold(said, |said, mark| said.replace(mark, "")).trim().is_empty()
            };
            own[place.clone()] == *run || (own[place.clone()].iter().all(|learnt| !learnt) && is_silent())
        })
}
