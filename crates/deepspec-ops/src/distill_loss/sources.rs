//! Which of the target's states predict which rows' labels.

use tch::Tensor;

use super::span::Span;

/// The target's states that predict labels, each once: blocks that overlap share them.
#[derive(Clone, Copy)]
pub struct TeacherIndex<'a> {
    /// Which of them each row has, `[R]`; those of consecutive blocks are a range without gaps.
    pub of_rows: &'a [i64],
    /// The same where the rows are.
    pub there: &'a Tensor,
}

impl TeacherIndex<'_> {
    /// The range of those that some rows have: the first, and how many.
    pub(super) fn range(&self, span: &Span) -> (i64, i64) {
        let of_rows = &self.of_rows[span.first_row as usize..][..span.rows as usize];
        let (first, last) =
            of_rows.iter().fold((i64::MAX, 0), |(least, most), &of| (least.min(of), most.max(of)));
        (first, last + 1 - first)
    }

    /// Whether no two of some rows share one, and they come in order.
    pub(super) fn are_the_rows(&self, span: &Span) -> bool {
        let of_rows = &self.of_rows[span.first_row as usize..][..span.rows as usize];
        of_rows.windows(2).all(|pair| pair[1] == pair[0] + 1)
    }
}

/// The distinct values in order, and the index of each value among them.
pub fn distinct<T: Ord + Clone>(values: &[T]) -> (Vec<T>, Vec<i64>) {
    let mut distinct = values.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    let place = |value: &T| distinct.partition_point(|other| other < value) as i64;
    let places = values.iter().map(place).collect();
    (distinct, places)
}
