//! The row order of query and key heads.
//!
//! RoPE rotates pairs of dimensions. In transformers the two rows of a pair are half a head apart.
//! In llama.cpp's models with "normal" RoPE they are adjacent.

/// Reorders the rows of each head from adjacent pairs to two halves.
pub(crate) fn to_half_split(values: &[u8], heads: usize, rows: usize) -> Vec<u8> {
    reorder_rows(values, heads, rows, |place, dim| 2 * (place % (dim / 2)) + place / (dim / 2))
}

/// Reorders the rows of each head from two halves to adjacent pairs, as llama.cpp does with Llama's
/// queries and keys.
pub fn to_interleaved(values: &[u8], heads: usize, rows: usize) -> Vec<u8> {
    reorder_rows(values, heads, rows, |place, dim| place / 2 + place % 2 * (dim / 2))
}

/// Reorders each head's rows: the new row `place` of `dim` is the old row `from(place, dim)`.
fn reorder_rows(values: &[u8], heads: usize, rows: usize, from: impl Fn(usize, usize) -> usize) -> Vec<u8> {
    let (dim, width) = (rows / heads, values.len() / rows.max(1));
    let mut ordered = Vec::with_capacity(values.len());
    for head in values.chunks_exact((dim * width).max(1)) {
        for row in (0..dim).map(|place| from(place, dim)) {
            ordered.extend(&head[row * width..(row + 1) * width]);
        }
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::{to_half_split, to_interleaved};

    #[test]
    fn pairs_are_halves_told_apart() {
        // Two heads of four rows of two bytes.
        let rows: Vec<u8> = (0..16).collect();
        assert_eq!(to_interleaved(&rows, 2, 8), [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]);
        let many: Vec<u8> = (0..96).collect();
        assert_eq!(to_half_split(&to_interleaved(&many, 2, 16), 2, 16), many);
        assert_eq!(to_interleaved(&to_half_split(&many, 4, 32), 4, 32), many);
    }
}
