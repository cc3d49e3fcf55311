//! Conditional-drop (COD) sampling of P-EAGLE: which rows of each depth a training sequence has.
//!
//! A row (anchor, depth) stands at the position anchor + depth. Depth 0 has all positions. The rows of one anchor form a chain, because
//! a row of depth d is sampled only if the row of depth d − 1 is. `TrainSample::anchors` lists the chains' anchors, each once per depth
//! from 1 on.

use std::ops::Range;

use crate::ChoosePositions;

/// How many rows of each depth are sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DownSampling {
    /// Depths of training, K.
    pub depths: usize,
    /// The share of the supervised positions that have a row of depth d is this to the power of d.
    pub ratio: f64,
    /// Least share of the supervised positions that have a row of a depth.
    pub least_ratio: f64,
}

/// Whether position `i` predicts a supervised token: token i + 2.
pub fn is_supervised(loss_mask: &[bool], position: usize) -> bool {
    loss_mask.get(position + 2).copied().unwrap_or(false)
}

/// Positions that predict supervised tokens, ascending.
pub fn supervised_positions(loss_mask: &[bool]) -> impl Iterator<Item = usize> {
    let labels = loss_mask.iter().enumerate().skip(2);
    labels.filter_map(|(label, &is_supervised)| is_supervised.then_some(label - 2))
}

impl DownSampling {
    /// Samples the rows from depth 1 on, and returns their anchors, ascending.
    ///
    /// Depth d takes max(0, n − d) · max(ratio^d, least_ratio) of its candidates, rounded down, where n supervised positions exist.
    /// Candidates of depth 1 are the supervised positions behind position 0, which no anchor precedes. Candidates of a later depth
    /// are the supervised positions directly behind those of the depth before.
    pub fn sample(&self, loss_mask: &[bool], choose: ChoosePositions) -> Vec<usize> {
        let supervised = supervised_positions(loss_mask).count();
        let mut anchors = vec![];
        let mut candidates: Vec<usize> = supervised_positions(loss_mask).filter(|&at| at > 0).collect();
        for depth in 1..self.depths {
            let share = self.ratio.powi(depth as i32).max(self.least_ratio);
            let count = (supervised.saturating_sub(depth) as f64 * share) as usize;
            if count == 0 || candidates.is_empty() {
                break;
            }
            let chosen =
                if candidates.len() > count { choose(&candidates, count, depth) } else { candidates };
            anchors.extend(chosen.iter().map(|position| position - depth));
            candidates = chosen.iter().map(|at| at + 1).filter(|&at| is_supervised(loss_mask, at)).collect();
        }
        anchors.sort_unstable();
        anchors
    }
}

/// Anchor and length of each chain, from the sorted anchors of all rows behind depth 0.
pub fn chains(anchors: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    anchors.chunk_by(|a, b| a == b).map(|chain| (chain[0], chain.len()))
}

/// Anchors of one of `count` segments, whose losses a pass computes. All segments have about equally many rows behind depth 0. Together
/// they have every anchor once.
pub fn segment(anchors: &[usize], index: usize, count: usize) -> Range<usize> {
    let border = |index: usize| match index {
        0 => 0,
        index if index == count => usize::MAX,
        index => anchors.get(index * anchors.len() / count).copied().unwrap_or(usize::MAX),
    };
    border(index)..border(index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepspec_core::rng::{Purpose, Stream};

    const SAMPLING: DownSampling = DownSampling { depths: 5, ratio: 0.7, least_ratio: 0.2 };

    /// Rows (anchor, depth) from depth 1 on. Anchors are signed, as a wrong sampler may return −1.
    type Rows = Vec<(i64, i64)>;

    fn rows(anchors: &[usize]) -> Rows {
        chains(anchors)
            .flat_map(|(anchor, len)| (1..=len as i64).map(move |depth| (anchor as i64, depth)))
            .collect()
    }

    /// Why these rows are no sample of a sequence with this mask, which begins at `first` in a packed sequence.
    fn problem(rows: &Rows, loss_mask: &[bool], first: i64) -> Option<String> {
        rows.iter().find_map(|&(anchor, depth)| {
            let position = anchor + depth - first;
            if anchor < first {
                return Some(format!("depth {depth} at {position} has the anchor {anchor}"));
            }
            if !is_supervised(loss_mask, position as usize) {
                return Some(format!("depth {depth} at {position} predicts nothing that is supervised"));
            }
            let before = (anchor, depth - 1);
            (depth > 1 && !rows.contains(&before)).then(|| format!("{before:?} is missing"))
        })
    }

    /// Masks with supervised position 0, with gaps, and with an end that is not supervised.
    fn masks() -> Vec<Vec<bool>> {
        let stream = Stream::new(3, "masks");
        let random = |mask: u64| {
            (0..40).map(|token| stream.below(4, mask, Purpose::Split, token) > 0).collect::<Vec<_>>()
        };
        [vec![true; 30], (0..30).map(|token| token != 17 && token < 28).collect()]
            .into_iter()
            .chain((0..40).map(random))
            .collect()
    }

    fn draw(candidates: &[usize], count: usize, seed: u64, draw: usize) -> Vec<usize> {
        let mut chosen =
            Stream::new(seed, &format!("depth-{draw}")).choose(candidates, count, Purpose::Anchor);
        chosen.sort_unstable();
        chosen
    }

    #[test]
    fn rows_are_supervised_and_behind_their_anchors() {
        for (seed, mask) in masks().iter().enumerate() {
            let anchors = SAMPLING
                .sample(mask, &mut |candidates, count, depth| draw(candidates, count, seed as u64, depth));
            assert!(anchors.is_sorted() && !anchors.is_empty());
            assert_eq!(problem(&rows(&anchors), mask, 0), None, "{mask:?}");
        }
    }

    /// Samplers with known mistakes break the law that the test above checks.
    #[test]
    fn known_mistakes_of_samplers_are_found() {
        // A seed pool with position 0, as in releases of two tools.
        let mask = vec![true; 12];
        let with_zero: Rows = supervised_positions(&mask).map(|position| (position as i64 - 1, 1)).collect();
        assert_eq!(problem(&with_zero, &mask, 0).as_deref(), Some("depth 1 at 0 has the anchor -1"));
        // Candidates of depth 2 that stand before position 2.
        let too_early: Rows = (1..8).map(|at| (at - 1, 1)).chain((1..8).map(|at| (at - 2, 2))).collect();
        assert_eq!(problem(&too_early, &mask, 0).as_deref(), Some("depth 2 at 1 has the anchor -1"));
        // The first position of a document in a packed sequence, whose anchor is in the document before.
        assert_eq!(problem(&vec![(11, 1)], &mask, 12).as_deref(), Some("depth 1 at 0 has the anchor 11"));
        // A later depth without the filter of supervised positions.
        let gap: Vec<bool> = (0..12).map(|token| token != 6).collect();
        let unfiltered: Rows = vec![(2, 1), (2, 2)];
        let found = problem(&unfiltered, &gap, 0);
        assert_eq!(found.as_deref(), Some("depth 2 at 4 predicts nothing that is supervised"));
    }

    /// Sizes by the formula, and draws that differ between depths.
    #[test]
    fn each_depth_has_its_share() {
        // 100 supervised positions, of which position 0 has no anchor before it.
        let mask = vec![true; 102];
        let mut asked = vec![];
        let anchors = SAMPLING.sample(&mask, &mut |candidates, count, depth| {
            asked.push((depth, candidates.len(), count));
            draw(candidates, count, 1, depth)
        });
        let of_depth = |depth| rows(&anchors).iter().filter(|row| row.1 == depth).count();
        // 99 · 0.7, 98 · 0.49, 97 · 0.343, 96 · 0.2401, rounded down.
        assert_eq!([1, 2, 3, 4].map(of_depth), [69, 48, 33, 23]);
        assert_eq!((asked[0], asked.len()), ((1, 99, 69), 4));
        // A floor of the share, and a sequence that is too short for more depths.
        let floor = DownSampling { depths: 20, least_ratio: 0.6, ..SAMPLING };
        let first = floor.sample(&[true; 7], &mut |candidates, count, _| candidates[..count].to_vec());
        assert_eq!(first, [0, 0, 0, 1]);
    }

    #[test]
    fn segments_share_the_rows_and_cover_every_anchor() {
        let anchors = [2, 2, 2, 3, 5, 5, 8, 9, 9, 9, 9, 12];
        for count in 1..15 {
            let segments: Vec<Range<usize>> =
                (0..count).map(|index| segment(&anchors, index, count)).collect();
            assert!(
                (0..20)
                    .all(|anchor| { segments.iter().filter(|range| range.contains(&anchor)).count() == 1 })
            );
        }
        let sizes = [0, 1, 2].map(|index| {
            let range = segment(&anchors, index, 3);
            anchors.iter().filter(|anchor| range.contains(anchor)).count()
        });
        assert_eq!(sizes, [4, 3, 5]);
        assert_eq!((segment(&[], 0, 2), segment(&[], 1, 2)), (0..usize::MAX, usize::MAX..usize::MAX));
    }
}
