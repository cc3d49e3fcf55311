//! Index from rows to target states.

use tch::Tensor;

use super::span::BlockSpan;

/// Index from rows to the target states that predict their labels. Overlapping blocks share states.
#[derive(Clone, Copy)]
pub struct TeacherIndex<'a> {
    /// State of each row, `[R]`. Consecutive blocks use a range without gaps.
    pub of_rows: &'a [i64],
    /// `of_rows` on the device of the rows.
    pub there: &'a Tensor,
}

impl TeacherIndex<'_> {
    /// Range of states that the rows of `span` use: the first state and the count.
    pub(super) fn state_range(&self, span: &BlockSpan) -> (i64, i64) {
        let of_rows = &self.of_rows[span.first_row as usize..][..span.rows as usize];
        let (first, last) =
            of_rows.iter().fold((i64::MAX, 0), |(least, most), &of| (least.min(of), most.max(of)));
        (first, last + 1 - first)
    }

    /// Whether the rows of `span` use consecutive states, one each.
    pub(super) fn has_consecutive_states(&self, span: &BlockSpan) -> bool {
        let of_rows = &self.of_rows[span.first_row as usize..][..span.rows as usize];
        of_rows.windows(2).all(|pair| pair[1] == pair[0] + 1)
    }
}

/// Sorted distinct values, and the index of each value among them.
pub fn unique_with_inverse<T: Ord + Clone>(values: &[T]) -> (Vec<T>, Vec<i64>) {
    let mut distinct = values.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let place = |value: &T| distinct.partition_point(|other| other < value) as i64;
    let places = values.iter().map(place).collect();
    (distinct, places)
}
