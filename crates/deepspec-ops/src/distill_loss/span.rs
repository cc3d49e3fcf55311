//! Ranges of rows and blocks.

use tch::Tensor;

use super::inputs::SupervisedRows;

/// Consecutive blocks and their rows.
#[derive(Clone, Copy)]
pub struct BlockSpan {
    pub(super) first_block: usize,
    pub(super) blocks: usize,
    pub(super) first_row: i64,
    pub(super) rows: i64,
}

impl BlockSpan {
    /// Rows of `tensor` in this range.
    pub fn slice_rows(&self, tensor: &Tensor) -> Tensor {
        tensor.narrow(0, self.first_row, self.rows)
    }

    /// Slot of each row, block · γ + position, counted from the first block of this range.
    pub(super) fn slots_of_rows(&self, rows: &SupervisedRows) -> Tensor {
        self.slice_rows(rows.slot_index) - self.first_block as i64 * rows.gamma
    }
}

/// Groups of whole blocks with at most `most` rows, but at least one block.
pub(super) fn split_into_spans(counts: &[usize], most: i64) -> Vec<BlockSpan> {
    let mut spans: Vec<BlockSpan> = vec![];
    let mut next = BlockSpan { first_block: 0, blocks: 0, first_row: 0, rows: 0 };
    for &count in counts {
        let count = count as i64;
        if next.blocks > 0 && next.rows + count > most {
            spans.push(next);
            let (first_block, first_row) = (next.first_block + next.blocks, next.first_row + next.rows);
            next = BlockSpan { first_block, blocks: 0, first_row, rows: 0 };
        }
        next.blocks += 1;
        next.rows += count;
    }
    spans.push(next);
    spans.retain(|span| span.rows > 0);
    spans
}
