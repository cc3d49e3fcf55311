//! Growth of drafted trees.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::fmt;
use std::str::FromStr;

use deepspec_ops::DraftTree;
use tch::{Kind, Tensor};

/// Children of a node, unless the budget names another number; JetSpec (arXiv:2606.18394) takes as many.
const DEFAULT_WIDTH: usize = 7;
/// Most nodes of a tree. A tree runs in one pass of the target, and its mask has a column for every row.
pub const MAX_TREE_NODES: usize = 1024;

/// Limits of a drafted tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeBudget {
    /// Most nodes, from 1 to [`MAX_TREE_NODES`].
    pub nodes: usize,
    /// Most children of a node, at least 1.
    pub width: usize,
}

impl TreeBudget {
    /// A budget of `nodes` with the default width.
    pub fn new(nodes: usize) -> Self {
        Self { nodes, width: DEFAULT_WIDTH }
    }
}

impl FromStr for TreeBudget {
    type Err = String;

    /// Parses `N` or `N:W`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (nodes, width) = text.split_once(':').map_or((text, None), |(n, w)| (n, Some(w)));
        let count = |text: &str, most: usize| text.parse().ok().filter(|count| (1..=most).contains(count));
        let Some(nodes) = count(nodes, MAX_TREE_NODES) else {
            return Err(format!("expected tree:N with N from 1 to {MAX_TREE_NODES} nodes, not \"{nodes}\""));
        };
        match width {
            None => Ok(Self::new(nodes)),
            Some(width) => match count(width, MAX_TREE_NODES) {
                Some(width) => Ok(Self { nodes, width }),
                None => Err(format!(
                    "expected tree:N:W with W from 1 to {MAX_TREE_NODES} children of a node, not \"{width}\""
                )),
            },
        }
    }
}

impl fmt::Display for TreeBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.width {
            DEFAULT_WIDTH => write!(f, "{}", self.nodes),
            width => write!(f, "{}:{width}", self.nodes),
        }
    }
}

/// A row of a growing tree: the anchor, or a node that was just added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrownRow {
    /// Number of the row; see [`DraftTree`].
    pub row: usize,
    /// Row of the parent; 0 for the anchor.
    pub parent: usize,
    /// Token of the node; None for the anchor.
    pub token: Option<i64>,
    /// Tokens behind the anchor up to the row, which is the slot that drafts its children.
    pub depth: usize,
}

/// A node that may be added.
struct Candidate {
    /// Cumulative log probability of the path.
    score: f64,
    /// Order in which candidates were found.
    number: usize,
    parent: usize,
    token: i64,
}

impl Ord for Candidate {
    /// The larger score is greater. If scores are equal, the earlier candidate is greater.
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.number.cmp(&self.number))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

/// Grows a tree best first: the next node is the one whose path has the largest cumulative log probability, until the budget is spent.
///
/// `children` returns tokens and log probabilities behind a row, the likeliest first. It is called at most once for every row above
/// `max_depth`, in the order of the rows, and not for the node that spends the budget. Only its first `budget.width` entries count, and
/// only finite ones. The result does not depend on chance.
pub fn grow_tree(
    budget: TreeBudget,
    max_depth: usize,
    mut children: impl FnMut(GrownRow) -> Vec<(i64, f64)>,
) -> DraftTree {
    let (mut tree, mut heap, mut scores, mut found) = (DraftTree::default(), BinaryHeap::new(), vec![0.0], 0);
    let mut newest = GrownRow { row: 0, parent: 0, token: None, depth: 0 };
    while tree.len() < budget.nodes {
        if newest.depth < max_depth {
            let parent = newest.row;
            for (token, log_prob) in children(newest).into_iter().take(budget.width) {
                if log_prob.is_finite() {
                    heap.push(Candidate { score: scores[parent] + log_prob, number: found, parent, token });
                    found += 1;
                }
            }
        }
        let Some(Candidate { score, parent, token, .. }) = heap.pop() else { break };
        let row = tree.add(parent, token);
        scores.push(score);
        newest = GrownRow { row, parent, token: Some(token), depth: tree.depths()[row - 1] };
    }
    tree
}

/// The likeliest tokens of every row of float32 `logits [n, V]`, and their log probabilities at `temperature`, the likeliest first. The first
/// is the argmax, which a greedy chain drafts, also where logits are equal.
pub fn likeliest_tokens(logits: &Tensor, temperature: f64, width: usize) -> Vec<Vec<(i64, f64)>> {
    let log_probs = (logits / temperature).log_softmax(-1, Kind::Float);
    let width = (width as i64).min(logits.size()[1]);
    let (values, tokens) = log_probs.topk(width, -1, true, true);
    let best = deepspec_ops::argmax(logits).unsqueeze(1); // [n, 1]
    let best_values = log_probs.gather(1, &best, false);
    let host = |values: &[Tensor]| {
        let values: Vec<Tensor> = values.iter().map(|values| values.to_kind(Kind::Double)).collect();
        super::engine::to_host(&Tensor::cat(&values, 1))
    };
    let columns = 2 * (width as usize + 1);
    host(&[best, tokens, best_values, values])
        .chunks(columns)
        .map(|row| {
            let (tokens, values) = row.split_at(columns / 2);
            let pairs = tokens.iter().zip(values).map(|(&token, &value)| (token as i64, value));
            let best = tokens[0] as i64;
            let others = pairs.clone().skip(1).filter(|&(token, _)| token != best);
            pairs.clone().take(1).chain(others).take(width as usize).collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Log probabilities of the tokens 0, 1, 2 … behind any path.
    fn grown(budget: TreeBudget, depth: usize, probs: &[f64]) -> DraftTree {
        grow_tree(budget, depth, |_| (0..).zip(probs.iter().map(|p| p.ln())).collect())
    }

    #[test]
    fn the_likeliest_paths_are_taken_first() {
        // Paths by probability: 0 (.6), 00 (.36), 1 (.3), 000 (.216), 01 and 10 (.18).
        let tree = grown(TreeBudget::new(5), 3, &[0.6, 0.3, 0.1]);
        assert_eq!(tree.tokens(), [0, 0, 1, 0, 1]);
        assert_eq!(tree.parents(), [0, 1, 0, 2, 1]);
        assert_eq!(tree.depths(), [1, 2, 1, 3, 2]);
    }

    #[test]
    fn budget_width_and_depth_are_kept() {
        let tree = grown(TreeBudget { nodes: 100, width: 2 }, 3, &[0.5, 0.3, 0.2]);
        assert_eq!((tree.len(), tree.max_depth()), (2 + 4 + 8, 3));
        assert_eq!(grown(TreeBudget { nodes: 7, width: 1 }, 4, &[0.5, 0.3]).depths(), [1, 2, 3, 4]);
        assert_eq!(grown(TreeBudget { nodes: 2, width: 1 }, 4, &[0.5, 0.3]).depths(), [1, 2]);
        assert_eq!(grown(TreeBudget::new(9), 3, &[1.0, 0.0, f64::NAN]).depths(), [1, 2, 3]);
        assert!(grown(TreeBudget::new(9), 0, &[1.0]).is_empty());
    }

    #[test]
    fn rows_are_scored_once_and_in_order() {
        let mut rows = vec![];
        let tree = grow_tree(TreeBudget::new(6), 2, |row| {
            rows.push(row);
            vec![(7, -0.1), (8, -0.2)]
        });
        assert_eq!(rows[0], GrownRow { row: 0, parent: 0, token: None, depth: 0 });
        let expected: Vec<usize> = (0..6).filter(|&row| row == 0 || tree.depths()[row - 1] < 2).collect();
        assert_eq!(rows.iter().map(|row| row.row).collect::<Vec<_>>(), expected);
        for row in &rows[1..] {
            assert_eq!(row.token, Some(tree.tokens()[row.row - 1]));
            assert_eq!(row.parent, tree.parents()[row.row - 1]);
        }
        // The node that spends the budget needs no children.
        let mut scored = vec![];
        grow_tree(TreeBudget::new(2), 3, |row| {
            scored.push(row.row);
            vec![(7, -0.1)]
        });
        assert_eq!(scored, [0, 1]);
    }

    #[test]
    fn the_first_of_the_likeliest_is_the_argmax() {
        let logits = Tensor::from_slice(&[1.0f32, 3.0, 2.0, 3.0, 0.0, 5.0, 5.0, 5.0]).view([2, 4]);
        let found = likeliest_tokens(&logits, 0.5, 3);
        assert_eq!(found[0].iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3, 2]);
        assert_eq!((found[1][0].0, found[1].len()), (1, 3));
        let total: f64 = [2.0f64, 6.0, 4.0, 6.0].iter().map(|logit| logit.exp()).sum();
        assert!((found[0][2].1 - (4.0 - total.ln())).abs() < 1e-6, "{:?}", found[0]);
        assert_eq!(likeliest_tokens(&logits, 1.0, 9)[0].len(), 4);
    }

    #[test]
    fn budgets_are_read_as_they_are_written() {
        for text in ["1", "64", "64:3", "1024:1"] {
            assert_eq!(text.parse::<TreeBudget>().unwrap().to_string(), text);
        }
        for text in ["", "0", "1025", "x", "8:", "8:0", "8:3:1", "-1"] {
            assert!(text.parse::<TreeBudget>().unwrap_err().contains("expected tree:N"), "{text}");
        }
    }
}
