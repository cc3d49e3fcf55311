//! Writes settings for SGLang, vLLM and llama.cpp from a simulation.

use std::fmt::Write as _;
use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use anyhow::Result;
use deepspec_core::atomic::{self, FileError};
use deepspec_cost::cost::StepCost;
use serde_json::{Value, json};

use super::{Advice, Simulation};
use crate::results::DrafterIdentity;

/// Names of the files.
pub const ENGINE_FILES: [&str; 5] =
    ["engines.md", "sglang-cost.json", "sglang-sts.json", "vllm-batch-sizes.json", "vllm-adaptive.json"];

/// Removes the files of an earlier simulation.
///
/// # Errors
/// Fails if a file exists and cannot be removed.
pub fn remove_engine_files(dir: &Path) -> Result<()> {
    for path in ENGINE_FILES.map(|name| dir.join(name)) {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(FileError::at("removing", &path)(error).into());
            }
            _ => {}
        }
    }
    Ok(())
}

/// Writes SGLang's temperatures and costs, vLLM's settings, and a text with command lines.
pub fn write_engine_files(
    dir: &Path,
    simulation: &Simulation,
    cost: &StepCost,
    drafter: &DrafterIdentity,
    temperatures: Option<&[f64]>,
) -> Result<()> {
    let block = drafter.block_size;
    atomic::write_json(&dir.join("sglang-cost.json"), &sglang_cost_table(cost, simulation.context))?;
    let filled: Vec<f64> =
        (0..block).map(|k| temperatures.and_then(|t| t.get(k)).copied().unwrap_or(1.0)).collect();
    atomic::write_json(&dir.join("sglang-sts.json"), &json!({"temperatures": filled}))?;
    let ranges = vllm_batch_size_ranges(&simulation.advice);
    atomic::write_json(&dir.join("vllm-batch-sizes.json"), &ranges)?;
    atomic::write_json(
        &dir.join("vllm-adaptive.json"),
        &json!({"method": "dspark", "model": drafter.path, "num_speculative_tokens": block, "enable_adaptive_verification": true}),
    )?;
    let text = engines_markdown(dir, simulation, drafter, &ranges);
    atomic::replace(&dir.join("engines.md"), |file| file.write_all(text.as_bytes()))?;
    Ok(())
}

/// SGLang's cost table: a sum of a constant, a part by requests and a part by tokens. SGLang always
/// drafts, so that the part by requests includes drafting.
fn sglang_cost_table(cost: &StepCost, context: usize) -> Value {
    let most = cost.max_batch();
    let probes: Vec<usize> = std::iter::successors(Some(1), |&at| {
        // Each probe is about an eighth larger than the previous probe.
        Some(at + (at / 8).max(1)).filter(|&next| next < most)
    })
    .chain((most > 1).then_some(most))
    .collect();
    let verify = |tokens: usize| cost.curve(context).step_seconds(tokens);
    let of_requests = |requests: usize| cost.seconds(requests, 1, context, true) - verify(1);
    let first = of_requests(1);
    json!({
        "bias_seconds": verify(1) + first,
        "bs_probes": probes,
        "alpha_seconds": probes.iter().map(|&requests| of_requests(requests) - first).collect::<Vec<f64>>(),
        "m_probes": probes,
        "theta_seconds": probes.iter().map(|&tokens| verify(tokens) - verify(1)).collect::<Vec<f64>>(),
    })
}

/// vLLM's list of [first number of requests, last number, draft tokens]. A load between two
/// simulated loads uses the settings of the lower load.
fn vllm_batch_size_ranges(advice: &[Advice]) -> Vec<[usize; 3]> {
    let mut advice: Vec<&Advice> = advice.iter().collect();
    advice.sort_by_key(|advice| advice.concurrency);
    let mut ranges: Vec<[usize; 3]> = vec![];
    for (index, of) in advice.iter().enumerate() {
        let first = if index == 0 { 1 } else { of.concurrency };
        let last = advice.get(index + 1).map_or(of.concurrency, |next| next.concurrency - 1);
        match ranges.last_mut().filter(|range| range[2] == of.fixed) {
            Some(range) => range[1] = last,
            None => ranges.push([first, last, of.fixed]),
        }
    }
    ranges
}

fn engines_markdown(
    dir: &Path,
    simulation: &Simulation,
    drafter: &DrafterIdentity,
    ranges: &[[usize; 3]],
) -> String {
    let (dir, path, block) = (dir.display(), &drafter.path, drafter.block_size);
    let mut text = String::from("# Schedules for engines\n\n");
    let lowest = simulation.advice.iter().min_by_key(|advice| advice.concurrency);
    let _ = write!(
        text,
        "What follows was simulated from `{}` on the costs of `{}`: costs of another engine or machine ask for another schedule.\n\n\
         ## SGLang\n\n\
         Both files act with `SGLANG_RAGGED_VERIFY_MODE=compact` only; they are untested.\n\n\
         ```sh\nSGLANG_RAGGED_VERIFY_MODE=compact python3 -m sglang.launch_server --model-path TARGET --speculative-algorithm DSPARK \\\n  \
         --speculative-draft-model-path {path} --speculative-dspark-block-size {block} \\\n  \
         --speculative-dspark-sps-table-path {dir}/sglang-cost.json --speculative-dspark-confidence-sts-path {dir}/sglang-sts.json\n```\n\n\
         ## vLLM\n\n\
         A length by the number of requests; 0 drafts nothing. With `vllm-adaptive.json` in its place vLLM measures costs itself when it\n\
         starts, and needs CUDA graphs for it.\n\n\
         ```sh\nvllm serve TARGET --speculative-config '{}'\nvllm serve TARGET --speculative-config \"$(cat {dir}/vllm-adaptive.json)\"\n```\n\n\
         ## llama.cpp\n\n",
        simulation.results,
        simulation.cost,
        json!({
            "method": "dspark", "model": path, "num_speculative_tokens": block,
            "num_speculative_tokens_per_batch_size": ranges,
        }),
    );
    let tokens = lowest.map_or(0, |advice| advice.fixed);
    let llama = |flags: &str| {
        format!(
            "llama-server --model TARGET.gguf --model-draft DRAFT.gguf --spec-type draft-dspark {flags}\n"
        )
    };
    let fixed = llama(&format!("--spec-draft-n-max {tokens}"));
    // A threshold that is slower than plain decoding is not recommended.
    let threshold = lowest.and_then(|advice| advice.threshold.filter(|(_, gain)| *gain > 1.0));
    let (said, by_threshold) = threshold.map_or((String::new(), String::new()), |(threshold, gain)| {
        let said = format!(
            " By thresholds, of all {block} tokens, it was {gain:.2} × plain decoding here, with confidences as they were simulated."
        );
        (said, llama(&format!("--spec-draft-n-max {block} --spec-draft-p-min {threshold}")))
    });
    text += &if tokens == 0 {
        "Without `--model-draft`: at the lowest load plain decoding is fastest.\n".to_string()
    } else {
        format!(
            "It knows one length for all loads; this is the best at the lowest. `--spec-draft-p-min` compares each confidence by itself, as the\n\
             head gives it: fold a temperature in first (`calibrate --write-folded`).{said}\n\n```sh\n{fixed}{by_threshold}```\n"
        )
    };
    text
}
