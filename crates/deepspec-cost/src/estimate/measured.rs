//! Reads work and time from the outputs of earlier runs.

use std::path::Path;

use deepspec_core::atomic;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::estimate::{
    DecodeLoad, DrafterSize, ModelSize, ScaleError, Stage, Work, decode_work, speculation_work,
};

/// Work of a stage on one device, and its measured time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredWork {
    /// Stage of the work.
    pub stage: Stage,
    /// Amount of work.
    pub work: Work,
    /// Measured seconds.
    pub seconds: f64,
}

impl MeasuredWork {
    fn describe_invalid_value(&self) -> Option<String> {
        let Self { seconds, .. } = *self;
        let wrong = !(seconds > 0.0 && seconds.is_finite());
        let problem = wrong.then(|| format!("`seconds` is {seconds}; expected a positive number"));
        problem.or_else(|| self.work.describe_invalid_value())
    }
}

/// Report of `regenerate`, beside its output.
#[derive(Deserialize)]
struct RegenerateReport {
    rows_answered: f64,
    prompt_tokens: f64,
    completion_tokens: f64,
    concurrency: f64,
    seconds: f64,
}

/// A suite in the results of `deepspec-eval run`.
#[derive(Deserialize)]
struct SuiteResult {
    prompt_tokens: f64,
    counts: DecodingCounts,
    timing: Timing,
}

#[derive(Deserialize)]
struct DecodingCounts {
    samples: f64,
    cycles: f64,
    committed: f64,
    output_tokens: f64,
}

#[derive(Deserialize)]
struct Timing {
    wall_s: f64,
}

/// Reads the output of `deepspec-train --bench --json`, `cache plan --measure --json`, `regenerate`
/// (its `*.report.json`) or `deepspec-eval run` (`results.json`). Answers and evaluations count as
/// work of `target`. Evaluations are ignored without `drafting`.
///
/// # Errors
/// Fails if the file cannot be read, has none of these formats, or has impossible values.
pub fn read_measured(
    path: &Path,
    target: &ModelSize,
    drafting: Option<DrafterSize>,
    value_bytes: f64,
) -> Result<Vec<MeasuredWork>, ScaleError> {
    let content = |problem: String| ScaleError::Content { path: path.into(), problem };
    let text = atomic::read_text(path)?;
    let json: Value =
        serde_json::from_str(&text).map_err(|error| content(format!("not valid JSON: {error}")))?;
    let measured = if let Some(work) = json.get("work") {
        from_json_value(work, "work").map_err(content)?
    } else if let Some(run) = json.get("this_run") {
        let run: RegenerateReport = from_json_value(run, "this_run").map_err(content)?;
        if run.rows_answered < 1.0 {
            return Err(content("the run answered no row; run it over some that have no answer yet".into()));
        }
        vec![measured_answers(&run, target, value_bytes)]
    } else if json["format"] == "deepspec-results" {
        let suites: Vec<SuiteResult> = from_json_value(&json["suites"], "suites").map_err(content)?;
        let slots: f64 = from_json_value(&json["settings"]["slots"], "settings.slots").map_err(content)?;
        if json["drafter"].is_null() {
            return Err(content("of plain decoding; expected results with a drafter".into()));
        }
        let whole = json["settings"]["schedule"].as_str().is_none_or(|schedule| schedule == "whole");
        if !whole || !json["settings"]["max_draft_tokens"].is_null() {
            return Err(content(
                "its blocks were cut (--schedule, --max-draft-tokens); expected whole ones".into(),
            ));
        }
        let evaluated = |drafting| {
            move |suite: &SuiteResult| measured_evaluation(suite, target, drafting, slots, value_bytes)
        };
        let of_drafter =
            |drafting| suites.iter().filter(|suite| suite.counts.cycles > 0.0).map(evaluated(drafting));
        drafting.map(|drafting| of_drafter(drafting).collect()).unwrap_or_default()
    } else {
        return Err(content(
            "says nothing of time; expected what `deepspec-train --bench --json`, `cache plan --measure --json`, `regenerate` or \
             `deepspec-eval run` wrote"
                .into(),
        ));
    };
    match measured.iter().find_map(MeasuredWork::describe_invalid_value) {
        Some(problem) => Err(content(problem)),
        None => Ok(measured),
    }
}

/// Work and time of the answers in a report of `regenerate`.
fn measured_answers(run: &RegenerateReport, target: &ModelSize, value_bytes: f64) -> MeasuredWork {
    let RegenerateReport { rows_answered: rows, prompt_tokens, completion_tokens, concurrency, seconds } =
        *run;
    // No more sequences are decoded at once than there are rows.
    let concurrency = concurrency.min(rows).max(1.0);
    let asked = DecodeLoad {
        rows,
        prompt: prompt_tokens / rows,
        answer: completion_tokens / rows,
        concurrency,
        value_bytes,
    };
    MeasuredWork { stage: Stage::Answers, work: decode_work(target, asked), seconds }
}

/// Work and time of a suite in the results of `deepspec-eval run`.
fn measured_evaluation(
    suite: &SuiteResult,
    target: &ModelSize,
    drafting: DrafterSize,
    slots: f64,
    value_bytes: f64,
) -> MeasuredWork {
    let SuiteResult {
        prompt_tokens,
        counts: DecodingCounts { samples, cycles, committed, output_tokens },
        timing,
    } = suite;
    let asked = DecodeLoad {
        rows: *samples,
        prompt: prompt_tokens / samples,
        answer: output_tokens / samples,
        concurrency: slots.min(*samples),
        value_bytes,
    };
    let work = speculation_work(target, drafting, asked, committed / cycles);
    MeasuredWork { stage: Stage::Evaluation, work, seconds: timing.wall_s }
}

fn from_json_value<T: DeserializeOwned>(json: &Value, key: &str) -> Result<T, String> {
    serde_path_to_error::deserialize(json).map_err(|error| match error.path().to_string().as_str() {
        "." => format!("`{key}`: {}", error.inner()),
        inner => format!("`{key}.{inner}`: {}", error.inner()),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;
    use crate::estimate::AttentionSize;

    fn target() -> ModelSize {
        let size = AttentionSize { query_heads: 4, key_value_heads: 2, head_dim: 16, window: None };
        let embedding = 500.0 * 64.0;
        let layers = vec![size; 2];
        ModelSize { weights: embedding + 62_000.0, embedding, is_tied: true, layers, experts: None }
    }

    fn read(text: &Value) -> Result<Vec<MeasuredWork>, String> {
        let dir = tempfile::tempdir().unwrap();
        let file: PathBuf = dir.path().join("told.json");
        fs::write(&file, text.to_string()).unwrap();
        let drafting = DrafterSize { length: 7.0, weights: 1000.0, at_once: true };
        read_measured(&file, &target(), Some(drafting), 4.0).map_err(|error| error.to_string())
    }

    #[test]
    fn reports_of_regenerate_are_answers() {
        let run = json!({"rows_answered": 10, "prompt_tokens": 300, "completion_tokens": 500, "concurrency": 32, "seconds": 2.5});
        let found = read(&json!({"this_run": run})).unwrap();
        // Ten sequences of 50 tokens at once, although 32 are allowed.
        let asked =
            DecodeLoad { rows: 10.0, prompt: 30.0, answer: 50.0, concurrency: 10.0, value_bytes: 4.0 };
        assert_eq!(
            found,
            [MeasuredWork { stage: Stage::Answers, work: decode_work(&target(), asked), seconds: 2.5 }]
        );
        assert_eq!(found[0].work.passes, 50.0);
        let mut none = run;
        none["rows_answered"] = json!(0);
        assert!(read(&json!({"this_run": none})).unwrap_err().contains("answered no row"));
    }

    #[test]
    fn results_are_evaluations_suite_by_suite() {
        let suite = json!({"prompt_tokens": 80, "counts": {"samples": 4, "cycles": 40, "committed": 120, "output_tokens": 124},
            "timing": {"wall_s": 3.0}});
        let mut results = json!({"format": "deepspec-results", "settings": {"slots": 2, "schedule": "whole"}, "drafter": {},
            "suites": [suite, suite]});
        let found = read(&results).unwrap();
        assert_eq!(found.len(), 2);
        // Four answers of 31 tokens at 3 tokens per cycle, two at once.
        assert!((found[0].work.passes - 4.0 * 31.0 / 3.0 / 2.0).abs() < 1e-9, "{found:?}");
        assert_eq!((found[0].stage, found[0].seconds), (Stage::Evaluation, 3.0));
        results["settings"]["schedule"] = json!("fixed:2");
        assert!(read(&results).unwrap_err().contains("its blocks were cut"));
        results["drafter"] = json!(null);
        assert!(read(&results).unwrap_err().contains("plain decoding"));
        assert!(read(&json!({"suites": []})).unwrap_err().contains("says nothing of time"));
    }
}
