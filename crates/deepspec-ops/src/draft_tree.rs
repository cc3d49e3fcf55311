//! A tree of drafted tokens behind a sequence's last committed token.

use tch::{Device, Kind, Tensor};

/// A tree of drafted tokens. Its root is the anchor, a sequence's last committed token.
///
/// A target runs the anchor and all nodes as one chunk of rows: row 0 is the anchor, and row i is node i − 1. Parents come before their
/// children. The children of a row have different tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DraftTree {
    /// Token of every node.
    tokens: Vec<i64>,
    /// Row of every node's parent.
    parents: Vec<usize>,
    /// Tokens of every node's path behind the anchor, itself included.
    depths: Vec<usize>,
}

/// The path of a tree that the target's tokens accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptedPath {
    /// Rows of the accepted nodes, from the anchor's child on. Rows increase.
    pub rows: Vec<usize>,
    /// The target's token behind the last accepted row.
    pub next: i64,
}

impl DraftTree {
    /// Adds a node below the row `parent`, and returns the node's row.
    ///
    /// # Panics
    /// If the tree has no such row, or if the row has a child with this token.
    pub fn add(&mut self, parent: usize, token: i64) -> usize {
        assert!(parent <= self.len(), "row {parent} of {}", self.len() + 1);
        assert!(self.child(parent, token).is_none(), "row {parent} has a child of token {token}");
        self.depths.push(self.row_depth(parent) + 1);
        self.tokens.push(token);
        self.parents.push(parent);
        self.len()
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the tree has no nodes.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens of the nodes.
    pub fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    /// Row of every node's parent.
    pub fn parents(&self) -> &[usize] {
        &self.parents
    }

    /// Depth of every node; the anchor's children have depth 1.
    pub fn depths(&self) -> &[usize] {
        &self.depths
    }

    /// Largest depth of a node; 0 without nodes.
    pub fn max_depth(&self) -> usize {
        self.depths.iter().copied().max().unwrap_or(0)
    }

    /// Depths of all rows, the anchor's 0 first.
    pub fn row_depths(&self) -> impl Iterator<Item = usize> + '_ {
        std::iter::once(0).chain(self.depths.iter().copied())
    }

    fn row_depth(&self, row: usize) -> usize {
        row.checked_sub(1).map_or(0, |node| self.depths[node])
    }

    /// Row of the child of `row` with this token.
    fn child(&self, row: usize, token: i64) -> Option<usize> {
        let is_child = |node: &usize| self.parents[*node] == row && self.tokens[*node] == token;
        (0..self.len()).find(is_child).map(|node| node + 1)
    }

    /// Which rows each row attends to, itself and its ancestors: `[1 + n, 1 + n]` bool on the CPU.
    pub fn ancestor_mask(&self) -> Tensor {
        let rows = self.len() + 1;
        let mut sees = vec![false; rows * rows];
        sees[0] = true;
        for (row, &parent) in (1..).zip(&self.parents) {
            // Parents come first, so that the parent's row is complete.
            sees.copy_within(parent * rows..(parent + 1) * rows, row * rows);
            sees[row * rows + row] = true;
        }
        Tensor::from_slice(&sees).view([rows as i64, rows as i64])
    }

    /// Verifies the tree. `drawn` are tokens from the target's distributions behind every row, or its likeliest tokens. A row's token
    /// is accepted if the row has a child of this token, and the child's token is next. The first token without a child is the last.
    ///
    /// Outputs have the target's distribution if tree and `drawn` are independent: each is a token of the target behind a committed prefix.
    /// This is the naive sampling of Miao et al. 2023 (SpecInfer, arXiv:2305.09781). For trees that do not depend on chance no rule
    /// accepts more often: a token is accepted with the whole probability that the target gives to the children.
    ///
    /// # Panics
    /// If `drawn` has fewer tokens than the tree has rows.
    pub fn accept(&self, drawn: &[i64]) -> AcceptedPath {
        let (mut rows, mut row) = (vec![], 0);
        while let Some(child) = self.child(row, drawn[row]) {
            rows.push(child);
            row = child;
        }
        AcceptedPath { rows, next: drawn[row] }
    }
}

/// The additive attention mask of a tree's rows, 0 or −∞: `[1 + n, keys]` of dtype `kind`. The keys are `past_len` tokens of the context,
/// the rows of the tree, and padding. A row sees the context, its ancestors and itself. A window is the number of tokens that a row sees
/// of its own path.
pub fn tree_attention_mask(
    tree: &DraftTree,
    past_len: usize,
    keys: usize,
    window: Option<usize>,
    kind: Kind,
    device: Device,
) -> Tensor {
    let (past, rows) = (past_len as i64, tree.len() as i64 + 1);
    let depths: Vec<i64> = tree.row_depths().map(|depth| depth as i64).collect();
    let positions = Tensor::from_slice(&depths).to_device(device) + past; // [1 + n]
    let padding = keys as i64 - past - rows;
    let seen = [
        Tensor::ones([rows, past], (Kind::Bool, device)),
        tree.ancestor_mask().to_device(device),
        Tensor::zeros([rows, padding], (Kind::Bool, device)),
    ];
    let mut seen = Tensor::cat(&seen, 1); // [1 + n, keys]
    if let Some(window) = window {
        let context = Tensor::arange(past, (Kind::Int64, device));
        let behind = Tensor::zeros([padding], (Kind::Int64, device));
        let key_positions = Tensor::cat(&[&context, &positions, &behind], 0);
        let first = (&positions - window as i64).unsqueeze(1);
        seen = seen.logical_and(&key_positions.gt_tensor(&first));
    }
    let hidden = seen.logical_not();
    Tensor::zeros([rows, keys as i64], (kind, device)).masked_fill(&hidden, f64::NEG_INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Anchor with children 5 and 6; 5 has the children 7 and 8, and 7 has the child 5.
    fn tree() -> DraftTree {
        let mut tree = DraftTree::default();
        for (parent, token) in [(0, 5), (0, 6), (1, 7), (1, 8), (3, 5)] {
            tree.add(parent, token);
        }
        tree
    }

    #[test]
    fn the_deepest_path_of_the_targets_tokens_is_accepted() {
        let accept = |drawn: [i64; 6]| tree().accept(&drawn);
        let path = |rows: &[usize], next| AcceptedPath { rows: rows.to_vec(), next };
        assert_eq!(accept([9, 7, 0, 5, 0, 0]), path(&[], 9));
        assert_eq!(accept([6, 7, 4, 5, 0, 0]), path(&[2], 4));
        assert_eq!(accept([5, 8, 0, 0, 7, 0]), path(&[1, 4], 7), "7 is a child of another row");
        assert_eq!(accept([5, 7, 0, 5, 0, 3]), path(&[1, 3, 5], 3));
        assert_eq!(DraftTree::default().accept(&[4]), path(&[], 4));
    }

    #[test]
    fn rows_see_their_paths_within_the_window() {
        let seen = |window: Option<usize>| {
            let mask = tree_attention_mask(&tree(), 2, 10, window, Kind::Float, Device::Cpu);
            let rows: Vec<Vec<f32>> = Vec::try_from(mask).unwrap();
            let seen = |row: &Vec<f32>| (0..10).filter(|&key| row[key] == 0.0).collect::<Vec<usize>>();
            rows.iter().map(seen).collect::<Vec<_>>()
        };
        let all: [&[usize]; 6] = [
            &[0, 1, 2],
            &[0, 1, 2, 3],
            &[0, 1, 2, 4],
            &[0, 1, 2, 3, 5],
            &[0, 1, 2, 3, 6],
            &[0, 1, 2, 3, 5, 7],
        ];
        assert_eq!(seen(None), all);
        let near: [&[usize]; 6] = [&[0, 1, 2], &[1, 2, 3], &[1, 2, 4], &[2, 3, 5], &[2, 3, 6], &[3, 5, 7]];
        assert_eq!(seen(Some(3)), near);
    }

    #[test]
    fn depths_count_from_the_anchor() {
        let tree = tree();
        assert_eq!((tree.depths(), tree.max_depth(), tree.len()), (&[1, 1, 2, 2, 3][..], 3, 5));
        assert_eq!(tree.row_depths().collect::<Vec<_>>(), [0, 1, 1, 2, 2, 3]);
    }
}
