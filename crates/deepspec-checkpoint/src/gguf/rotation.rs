//! The order of a head's rows in queries and keys.
//!
//! Values that turn together stand half a head apart in transformers' models, and beside each other in those of llama.cpp whose rotation is
//! "normal".

/// Rows of `heads` heads that lie in pairs, as two halves of each head.
pub(crate) fn halves(values: &[u8], heads: usize, rows: usize) -> Vec<u8> {
    ordered(values, heads, rows, |place, dim| 2 * (place % (dim / 2)) + place / (dim / 2))
}

/// `rows` rows of `heads` heads that lie in two halves each, in pairs: what llama.cpp makes of Llama's queries and keys.
pub fn pairs(values: &[u8], heads: usize, rows: usize) -> Vec<u8> {
    ordered(values, heads, rows, |place, dim| place / 2 + place % 2 * (dim / 2))
}

/// Each head's rows anew: `from(place, dim)` is the row that comes to `place` of `dim`.
fn ordered(values: &[u8], heads: usize, rows: usize, from: impl Fn(usize, usize) -> usize) -> Vec<u8> {
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
    use super::{halves, pairs};

    #[test]
    fn pairs_are_halves_told_apart() {
        // Two heads of four rows, two bytes each.
        let rows: Vec<u8> = (0..16).collect();
        assert_eq!(pairs(&rows, 2, 8), [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]);
        let many: Vec<u8> = (0..96).collect();
        assert_eq!(halves(&pairs(&many, 2, 16), 2, 16), many);
        assert_eq!(pairs(&halves(&many, 4, 32), 4, 32), many);
    }
}
