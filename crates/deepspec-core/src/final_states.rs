//! Selects the token positions whose final hidden states a drafter is trained on.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Positions of a sample whose hidden state after the final norm is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinalStates {
    /// Positions p where token p−1 or p+1 is supervised, as supervised labels require.
    Supervised,
    /// Every position.
    All,
}

impl FinalStates {
    /// Positions whose states are stored for a sample with this loss mask, ascending.
    pub fn kept_positions(self, mask: &[bool]) -> Vec<u32> {
        let supervised = |p: Option<usize>| p.is_some_and(|p| mask.get(p) == Some(&true));
        let needed = |p: &usize| supervised(p.checked_sub(1)) || supervised(p.checked_add(1));
        (0..mask.len()).filter(|p| self == Self::All || needed(p)).map(|p| p as u32).collect()
    }

    /// Whether the stored positions include all positions that `needed` stores.
    pub fn covers(self, needed: Self) -> bool {
        self == Self::All || self == needed
    }
}

impl fmt::Display for FinalStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Supervised => "supervised",
            Self::All => "all",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervised_token_needs_the_states_beside_it() {
        let positions = |spans: &[(usize, usize)]| {
            let mut mask = vec![false; 8];
            spans.iter().for_each(|&(start, end)| mask[start..end].fill(true));
            FinalStates::Supervised.kept_positions(&mask)
        };
        assert_eq!(positions(&[(3, 4)]), [2, 4]);
        assert_eq!(positions(&[(2, 5)]), [1, 2, 3, 4, 5]);
        assert_eq!(positions(&[(0, 1), (7, 8)]), [1, 6]);
        assert!(positions(&[]).is_empty());
        assert_eq!(FinalStates::All.kept_positions(&[false; 3]), [0, 1, 2]);
        assert!(
            FinalStates::All.covers(FinalStates::Supervised)
                && !FinalStates::Supervised.covers(FinalStates::All)
        );
    }
}
