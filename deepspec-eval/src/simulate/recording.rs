//! Recorded answers of a run, block by block.

use std::collections::BTreeMap;
use std::path::Path;

use deepspec_core::usage;
use deepspec_cost::survival::sigmoid;

use crate::results::Results;
use crate::traces;

/// A block that was drafted and verified as a whole.
#[derive(Debug, Clone)]
pub struct RecordedBlock {
    /// Number of answer tokens before the block.
    pub start: usize,
    /// Confidences of the block's tokens that the run used, or 1 without a confidence head.
    pub confidences: Vec<f64>,
    /// Number of accepted tokens.
    pub accepted: usize,
    /// Whether the last accepted token ended the answer, without a bonus token.
    pub stopped: bool,
}

/// A recorded answer.
#[derive(Debug, Clone)]
pub struct RecordedAnswer {
    /// Number of prompt tokens, as the mean over the suite.
    pub prompt: usize,
    /// Number of answer tokens, including the first one from the prefill.
    pub tokens: usize,
    /// Blocks of the answer, in order.
    pub blocks: Vec<RecordedBlock>,
}

/// All answers of a run.
#[derive(Debug)]
pub struct Recording {
    /// Answers by suite, sample, seed and turn.
    pub answers: Vec<RecordedAnswer>,
    /// Block size γ.
    pub block: usize,
    /// Whether the drafter has a confidence head.
    pub confident: bool,
}

impl Recording {
    /// Reads the traces of a run that verified whole blocks. `temperatures` divide the confidence
    /// logits; without temperatures, the confidences of the run are used.
    ///
    /// # Errors
    /// Usage errors: no run in `dir`, or one that cut its blocks, verified them as a whole, or drafted nothing.
    pub fn read(dir: &Path, results: &Results, temperatures: Option<&[f64]>) -> anyhow::Result<Self> {
        results.settings.check_observed_tokens(dir)?;
        let prompt_of = |suite: &str| {
            let found = results.suites.iter().find(|found| found.name == suite);
            found.map_or(0, |found| (found.prompt_tokens / found.counts.samples.max(1)) as usize)
        };
        let mut answers: BTreeMap<(String, String, u64, u32), RecordedAnswer> = BTreeMap::new();
        let (mut block, mut confident) = (0, false);
        traces::read(dir, |trace| {
            let key = (trace.suite.to_string(), trace.sample.to_string(), trace.seed, trace.turn);
            let answer = answers.entry(key).or_insert_with(|| RecordedAnswer {
                prompt: prompt_of(trace.suite),
                tokens: 1,
                blocks: vec![],
            });
            let proposed = trace.proposed as usize;
            block = block.max(proposed);
            confident |= !trace.logits.is_empty();
            let calibrated = |(k, logit): (usize, &f32)| {
                sigmoid(f64::from(*logit) / temperatures.and_then(|t| t.get(k)).copied().unwrap_or(1.0))
            };
            let confidences = match (temperatures, trace.logits.is_empty()) {
                (_, true) => vec![1.0; proposed],
                (None, false) => trace.confidences.iter().map(|&c| f64::from(c)).collect(),
                (Some(_), false) => trace.logits.iter().enumerate().map(calibrated).collect(),
            };
            answer.blocks.push(RecordedBlock {
                start: answer.tokens,
                confidences,
                accepted: trace.accepted as usize,
                stopped: trace.committed == trace.accepted,
            });
            answer.tokens += trace.committed as usize;
        })?;
        // A trace's confidences end at an accepted stop token. The tokens after it are never
        // accepted, so placeholders fill the rest of the block.
        let mut answers: Vec<RecordedAnswer> = answers.into_values().collect();
        let blocks = answers.iter_mut().flat_map(|answer| &mut answer.blocks);
        blocks.for_each(|recorded| recorded.confidences.resize(block, 0.5));
        let whole = results.drafter.as_ref().map_or(0, |drafter| drafter.block_size);
        if block == 0 {
            usage!("{} drafted nothing; there is nothing to replay", dir.display());
        }
        if block < whole {
            usage!(
                "{} verified {block} tokens of each block at most, the drafter drafts {whole}: run it with whole blocks",
                dir.display()
            );
        }
        Ok(Self { answers, block, confident })
    }

    /// Mean context length of the blocks, in tokens.
    pub fn mean_context(&self) -> usize {
        let tokens: usize = self
            .answers
            .iter()
            .flat_map(|answer| answer.blocks.iter().map(|block| answer.prompt + block.start))
            .sum();
        tokens / self.block_count().max(1)
    }

    /// Acceptance of each position, given that all positions before it were accepted. Ends with the
    /// last position that any block reached.
    pub fn conditional_acceptance(&self) -> Vec<f64> {
        let blocks = || self.answers.iter().flat_map(|answer| &answer.blocks);
        let at_least = |accepted: usize| blocks().filter(|block| block.accepted >= accepted).count() as f64;
        let reached = (0..self.block).take_while(|&position| at_least(position) > 0.0);
        let rates: Vec<f64> = reached.map(|position| at_least(position + 1) / at_least(position)).collect();
        if rates.is_empty() { vec![0.0] } else { rates }
    }

    /// Number of recorded blocks.
    pub fn block_count(&self) -> usize {
        self.answers.iter().map(|answer| answer.blocks.len()).sum()
    }
}
