//! Published accepted lengths of the released drafters (DSpark paper, table 1: temperature 1,
//! blocks of 7).

/// Suites of the columns of [`PUBLISHED_TAU`].
const SUITES: [&str; 9] = [
    "gsm8k",
    "math500",
    "aime25",
    "mbpp",
    "humaneval",
    "livecodebench",
    "mt-bench",
    "alpaca",
    "arena-hard-v2",
];

/// Target and drafter in the hub id, and τ of every suite.
const PUBLISHED_TAU: [(&str, &str, [f64; 9]); 12] = [
    ("qwen3_4b", "eagle3", [5.14, 4.62, 3.92, 3.69, 4.16, 3.77, 2.39, 2.26, 2.55]),
    ("qwen3_4b", "dflash", [5.40, 4.85, 4.15, 4.40, 4.74, 4.18, 3.07, 2.96, 2.83]),
    ("qwen3_4b", "dspark", [6.11, 5.70, 4.89, 5.13, 5.38, 4.86, 3.64, 3.54, 3.29]),
    ("qwen3_8b", "eagle3", [5.30, 4.77, 3.91, 3.96, 4.33, 4.17, 2.66, 2.54, 2.54]),
    ("qwen3_8b", "dflash", [5.33, 4.91, 4.07, 4.36, 4.64, 4.39, 3.11, 2.98, 2.81]),
    ("qwen3_8b", "dspark", [6.17, 5.78, 5.01, 5.16, 5.52, 5.17, 3.72, 3.58, 3.21]),
    ("qwen3_14b", "eagle3", [5.24, 4.60, 3.71, 3.81, 4.14, 4.01, 2.62, 2.47, 2.48]),
    ("qwen3_14b", "dflash", [5.41, 4.84, 3.98, 4.44, 4.59, 4.33, 3.10, 2.94, 2.72]),
    ("qwen3_14b", "dspark", [6.21, 5.74, 4.94, 5.26, 5.43, 5.02, 3.70, 3.58, 3.13]),
    ("gemma4_12b", "eagle3", [5.87, 5.46, 4.83, 4.72, 5.37, 4.16, 3.19, 3.06, 2.72]),
    ("gemma4_12b", "dflash", [5.45, 5.04, 4.22, 4.39, 4.95, 3.70, 2.98, 2.84, 2.59]),
    ("gemma4_12b", "dspark", [6.05, 5.78, 5.12, 5.11, 5.64, 4.51, 3.49, 3.35, 2.92]),
];

/// The published τ of a drafter, by suite.
#[derive(Debug, Clone, Copy)]
pub struct PublishedLengths(&'static [f64; 9]);

impl PublishedLengths {
    /// The row of the released checkpoint with this hub id, for any revision.
    pub fn for_drafter(hub_id: &str) -> Option<Self> {
        let name = hub_id.split('@').next()?.strip_prefix("deepseek-ai/")?;
        let named = |target: &str, drafter: &str| match drafter {
            "eagle3" => format!("eagle3_{target}_ttt7"),
            block => format!("{block}_{target}_block7"),
        };
        PUBLISHED_TAU
            .iter()
            .find(|(target, drafter, _)| named(target, drafter) == name)
            .map(|(_, _, row)| Self(row))
    }

    /// τ of a suite.
    pub fn tau_of_suite(self, name: &str) -> Option<f64> {
        SUITES.iter().position(|suite| *suite == name).map(|at| self.0[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_checkpoints_are_known_by_their_ids() {
        let of =
            |id: &str, suite: &str| PublishedLengths::for_drafter(id).and_then(|row| row.tau_of_suite(suite));
        assert_eq!(of("deepseek-ai/dspark_qwen3_4b_block7", "gsm8k"), Some(6.11));
        assert_eq!(of("deepseek-ai/eagle3_gemma4_12b_ttt7@main", "arena-hard-v2"), Some(2.72));
        assert_eq!(of("deepseek-ai/dflash_qwen3_14b_block7", "livecodebench"), Some(4.33));
        assert_eq!(of("deepseek-ai/dflash_qwen3_14b_block7", "aime24"), None);
        assert_eq!(of("somebody/dspark_qwen3_4b_block7", "gsm8k"), None);
        assert_eq!(of("deepseek-ai/eagle3_qwen3_4b_block7", "gsm8k"), None);
    }
}
