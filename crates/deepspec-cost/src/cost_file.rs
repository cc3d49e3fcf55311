//! Reads files of step costs: the format of `deepspec-eval profile`, both of SGLang's formats, and
//! CSV tables.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ScheduleError;
use crate::cost::StepCost;
use crate::curve::CostCurve;

/// Value of `format` in files of `deepspec-eval profile`.
pub const STEP_COST_FORMAT: &str = "deepspec-step-cost";
/// Value of `format_version` in files of `deepspec-eval profile`.
pub const STEP_COST_VERSION: u64 = 1;

/// Measured verification times at one context length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerifyCost {
    /// Context length of each request, in tokens.
    pub context: usize,
    /// Batch sizes in tokens, ascending.
    pub batch_tokens: Vec<usize>,
    /// Seconds of a step.
    pub seconds: Vec<f64>,
}

/// Measured times by number of requests.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RequestCost {
    /// Numbers of requests, ascending.
    pub requests: Vec<usize>,
    /// Seconds for each number of requests.
    pub seconds: Vec<f64>,
}

/// The part of a profile that costs are computed from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredCost {
    /// Verification times, one table per context, ascending.
    pub verify: Vec<VerifyCost>,
    /// Drafting times; empty without a drafter.
    #[serde(default)]
    pub draft: RequestCost,
    /// Additional seconds of a step by its number of requests, with or without drafting.
    #[serde(default)]
    pub requests: RequestCost,
    /// Plain-decoding steps of a target that captures no hidden states, one table per context,
    /// ascending. Empty without a drafter, and in files of earlier versions.
    #[serde(default)]
    pub plain: Vec<VerifyCost>,
    /// Seconds per prompt token.
    #[serde(default)]
    pub prefill_seconds_per_token: f64,
}

impl MeasuredCost {
    /// Converts the tables to costs.
    ///
    /// # Errors
    /// Fails if two lists differ in length, and as [`CostCurve::from_step_seconds`] and
    /// [`StepCost::new`].
    pub fn to_step_cost(&self) -> Result<StepCost, ScheduleError> {
        let curve = |table: &VerifyCost| {
            let points = zip_equal_lengths(&table.batch_tokens, &table.seconds, "batch_tokens and seconds")?;
            Ok((table.context, CostCurve::from_step_seconds(&points)?))
        };
        let curves =
            |tables: &[VerifyCost]| tables.iter().map(curve).collect::<Result<Vec<_>, ScheduleError>>();
        let draft = zip_equal_lengths(&self.draft.requests, &self.draft.seconds, "requests and seconds")?;
        let prefill = self.prefill_seconds_per_token;
        if !(prefill.is_finite() && prefill >= 0.0) {
            return Err(ScheduleError::Cost { batch: 1, value: prefill });
        }
        let requests =
            zip_equal_lengths(&self.requests.requests, &self.requests.seconds, "requests and seconds")?;
        let cost = StepCost::new(curves(&self.verify)?, draft)?.with_request_seconds(requests)?;
        Ok(cost.with_plain_decoding(curves(&self.plain)?)?.with_prefill_seconds(prefill))
    }
}

fn zip_equal_lengths(
    counts: &[usize],
    values: &[f64],
    what: &'static str,
) -> Result<Vec<(usize, f64)>, ScheduleError> {
    if counts.len() != values.len() {
        return Err(ScheduleError::Mismatch { what, left: counts.len(), right: values.len() });
    }
    Ok(counts.iter().copied().zip(values.iter().copied()).collect())
}

/// SGLang's cost file with steps per second by batch tokens.
#[derive(Deserialize)]
struct SglangStepRates {
    sample_batch_tokens: Vec<usize>,
    sample_steps_per_sec: Vec<f64>,
    max_batch_tokens: usize,
}

impl SglangStepRates {
    /// A batch has the rate of the largest sample that does not exceed it, or the first rate below
    /// the first sample.
    fn to_step_cost(&self) -> Result<StepCost, ScheduleError> {
        let samples = zip_equal_lengths(&self.sample_batch_tokens, &self.sample_steps_per_sec, "samples")?;
        let (Some(&(_, first)), Some(&(last, _))) = (samples.first(), samples.last()) else {
            return Err(ScheduleError::Empty { what: "sample_batch_tokens" });
        };
        if let Some(pair) = samples.windows(2).find(|pair| pair[1].0 <= pair[0].0) {
            return Err(ScheduleError::Order { batch: pair[1].0 });
        }
        if self.max_batch_tokens < last || self.max_batch_tokens > crate::curve::MAX_BATCH_TOKENS {
            return Err(ScheduleError::Order { batch: self.max_batch_tokens });
        }
        let rate = |batch: usize| {
            let at = samples.partition_point(|&(of, _)| of <= batch);
            at.checked_sub(1).map_or(first, |at| samples[at].1)
        };
        let curve = CostCurve::new((1..=self.max_batch_tokens).map(rate).collect())?;
        StepCost::new(vec![(1, curve)], vec![])
    }
}

/// SGLang's cost file with a sum of a constant, a part by requests and a part by tokens.
#[derive(Deserialize)]
struct SglangAdditiveCost {
    bias_seconds: f64,
    bs_probes: Vec<usize>,
    alpha_seconds: Vec<f64>,
    m_probes: Vec<usize>,
    theta_seconds: Vec<f64>,
}

impl SglangAdditiveCost {
    /// SGLang always drafts, so the part by requests holds with and without drafting. Its profiler
    /// rounds tokens to multiples of 64, so the first count may be 0, which is read as 1. Least
    /// squares may yield a negative part, which is read as 0.
    fn to_step_cost(&self) -> Result<StepCost, ScheduleError> {
        let tokens = zip_equal_lengths(&self.m_probes, &self.theta_seconds, "m_probes and theta_seconds")?;
        let points: Vec<_> =
            tokens.into_iter().map(|(batch, theta)| (batch.max(1), self.bias_seconds + theta)).collect();
        let requests =
            zip_equal_lengths(&self.bs_probes, &self.alpha_seconds, "bs_probes and alpha_seconds")?;
        let mut requests: Vec<_> =
            requests.into_iter().map(|(requests, alpha)| (requests, alpha.max(0.0))).collect();
        // The part by requests is constant past the last probe.
        if let Some(&(_, alpha)) = requests.last().filter(|(last, _)| *last < crate::curve::MAX_BATCH_TOKENS)
        {
            requests.push((crate::curve::MAX_BATCH_TOKENS, alpha));
        }
        StepCost::new(vec![(1, CostCurve::from_step_seconds(&points)?)], vec![])?
            .with_request_seconds(requests)
    }
}

/// Digests of the weights that the costs are for.
#[derive(Debug, Clone, Copy)]
pub struct WeightDigests<'a> {
    /// Digest of the target's weights.
    pub target: &'a str,
    /// Digest of the drafter's weights, if there is a drafter.
    pub drafter: Option<&'a str>,
}

/// Reads a file of costs. A `.csv` file is a table with the column `batch_tokens`, either `seconds`
/// or `steps_per_second`, and `context` for several contexts. Every other file is JSON.
///
/// # Errors
/// The problem, with the file's name.
pub fn read_step_cost(file: &Path) -> Result<StepCost, String> {
    Ok(parse_file(file)?.0)
}

/// Reads the costs of an engine with `slots` slots and these weights, with warnings if the file was
/// measured with other weights. Files of other tools have no digests to compare.
///
/// # Errors
/// As [`read_step_cost`], and if the largest batch has fewer tokens than slots.
pub fn read_step_cost_for(
    file: &Path,
    weights: WeightDigests,
    slots: usize,
) -> Result<(StepCost, Vec<String>), String> {
    let (cost, json) = parse_file(file)?;
    let (name, known) = (file.display(), cost.max_batch());
    if known < slots {
        return Err(format!(
            "{name} knows steps of up to {known} tokens, --max-num-seqs {slots} asks for one each; profile further"
        ));
    }
    let of = |whose: &str| json[whose]["weights_digest"].as_str();
    let mut told = vec![];
    if json["format"] == STEP_COST_FORMAT {
        if of("target") != Some(weights.target) {
            told.push(format!("{name} was measured with another target; its steps may cost more or less"));
        }
        match (of("drafter"), weights.drafter) {
            (None, Some(_)) => {
                told.push(format!("{name} was measured without a drafter: drafting counts as free"));
            }
            (Some(other), Some(drafter)) if other != drafter => {
                told.push(format!(
                    "{name} was measured with another drafter, whose blocks may cost more or less"
                ));
            }
            _ => {}
        }
    }
    Ok((cost, told))
}

/// The costs and the JSON of the file; null for a CSV table.
fn parse_file(file: &Path) -> Result<(StepCost, Value), String> {
    let name = file.display();
    let mut bytes = fs::read(file)
        .map_err(|error| format!("{name}: {error}; `deepspec-eval profile` writes such a file"))?;
    if bytes.starts_with(b"\xef\xbb\xbf") {
        bytes.drain(..3);
    }
    let csv = file.extension().is_some_and(|extension| extension == "csv");
    let read = if csv { from_csv(&bytes).map(|cost| (cost, Value::Null)) } else { from_json(&bytes) };
    read.map_err(|problem| format!("{name}: {problem}"))
}

fn from_json(bytes: &[u8]) -> Result<(StepCost, Value), String> {
    fn parsed<T: DeserializeOwned>(value: &Value) -> Result<T, String> {
        serde_path_to_error::deserialize(value).map_err(|error| match error.path().to_string().as_str() {
            "." => error.inner().to_string(),
            key => format!("`{key}`: {}", error.inner()),
        })
    }
    let value: Value = serde_json::from_slice(bytes).map_err(|error| {
        format!("no JSON ({error}); expected a file that `deepspec-eval profile` wrote, one of SGLang's, or a table named .csv")
    })?;
    let cost = if value.get("format").is_some_and(|format| format == STEP_COST_FORMAT) {
        if value["format_version"] != STEP_COST_VERSION {
            return Err(format!(
                "`format_version` is {}; this version reads {STEP_COST_VERSION}",
                value["format_version"]
            ));
        }
        parsed::<MeasuredCost>(&value)?.to_step_cost()
    } else if value.get("bias_seconds").is_some() {
        parsed::<SglangAdditiveCost>(&value)?.to_step_cost()
    } else if value.get("sample_batch_tokens").is_some() {
        parsed::<SglangStepRates>(&value)?.to_step_cost()
    } else {
        return Err(format!(
            "has neither `format`: \"{STEP_COST_FORMAT}\" nor SGLang's `bias_seconds` or `sample_batch_tokens`; `deepspec-eval profile` writes such a file"
        ));
    };
    Ok((cost.map_err(|error| error.to_string())?, value))
}

/// A row of a CSV table.
#[derive(Deserialize)]
struct CsvRow {
    context: Option<usize>,
    batch_tokens: usize,
    seconds: Option<f64>,
    steps_per_second: Option<f64>,
}

fn from_csv(bytes: &[u8]) -> Result<StepCost, String> {
    let mut contexts = BTreeMap::<usize, Vec<(usize, f64)>>::new();
    for row in csv::Reader::from_reader(bytes).deserialize() {
        let row: CsvRow = row.map_err(|error| error.to_string())?;
        let seconds = match (row.seconds, row.steps_per_second) {
            (Some(seconds), None) => seconds,
            (None, Some(rate)) if rate <= 0.0 => {
                return Err(format!(
                    "batch_tokens {}: `steps_per_second` is {rate}; expected a positive number",
                    row.batch_tokens
                ));
            }
            (None, Some(rate)) => 1.0 / rate,
            _ => {
                return Err(format!(
                    "batch_tokens {}: wants one of the columns `seconds` and `steps_per_second`",
                    row.batch_tokens
                ));
            }
        };
        contexts.entry(row.context.unwrap_or(1)).or_default().push((row.batch_tokens, seconds));
    }
    let curve = |(context, mut points): (usize, Vec<(usize, f64)>)| {
        points.sort_by_key(|&(batch, _)| batch);
        Ok((context, CostCurve::from_step_seconds(&points)?))
    };
    let curves: Result<Vec<_>, ScheduleError> = contexts.into_iter().map(curve).collect();
    curves.and_then(|curves| StepCost::new(curves, vec![])).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, text: &str) -> Result<StepCost, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(name);
        fs::write(&file, text).unwrap();
        read_step_cost(&file)
    }

    #[test]
    fn sglangs_rates_are_looked_up_as_there() {
        let text = r#"{"sample_batch_tokens": [8, 16, 32, 64], "sample_steps_per_sec": [1000.0, 950, 500, 480], "max_batch_tokens": 80}"#;
        let cost = of("a.json", text).unwrap();
        let rate = |batch| cost.curve(1).steps_per_second(batch);
        assert_eq!(
            [1, 7, 8, 31, 63, 65, 80, 81].map(rate),
            [1000.0, 1000.0, 1000.0, 950.0, 500.0, 480.0, 480.0, 0.0]
        );
        assert_eq!(cost.draft_seconds(9), 0.0);
    }

    #[test]
    fn sglangs_sums_are_interpolated_as_there() {
        let text = r#"{"bias_seconds": 0.1, "bs_probes": [128, 192, 256], "alpha_seconds": [0.0, 0.008, 0.016],
            "m_probes": [384, 512, 1024], "theta_seconds": [0.0, 0.02, 0.1]}"#;
        let cost = of("b.json", text).unwrap();
        assert!((cost.seconds(160, 448, 1, true) - 0.114).abs() < 1e-12);
        assert!((cost.seconds(64, 100, 1, true) - 0.1).abs() < 1e-12);
    }

    #[test]
    fn tables_have_one_curve_per_context() {
        let cost =
            of("c.csv", "context,batch_tokens,steps_per_second\n1000,4,5\n10,4,20\n10,1,40\n").unwrap();
        assert_eq!((cost.curve(20).step_seconds(1), cost.curve(900).step_seconds(2)), (0.025, 0.2));
        assert_eq!(of("c.csv", "batch_tokens,seconds\n1,0.5\n").unwrap().curve(7).step_seconds(1), 0.5);
        assert_eq!(cost.max_batch(), 4);
    }

    #[test]
    fn plain_decoding_costs_what_was_measured_of_it_and_else_what_steps_without_drafts_do() {
        let start = r#"{"format": "deepspec-step-cost", "format_version": 1, "verify": [{"context": 9, "batch_tokens": [1, 4],
            "seconds": [0.5, 0.5]}], "requests": {"requests": [1, 4], "seconds": [0, 0.25]}"#;
        assert_eq!(of("x.json", &format!("{start}}}")).unwrap().plain_seconds(4, 9), 0.75);
        let plain = r#""plain": [{"context": 9, "batch_tokens": [1, 4], "seconds": [0.25, 0.5]}]"#;
        let cost = of("x.json", &format!("{start}, {plain}}}")).unwrap();
        assert_eq!((cost.plain_seconds(4, 9), cost.seconds(4, 4, 9, false)), (0.5, 0.75));
    }

    #[test]
    fn files_that_are_none_are_refused_by_name() {
        for (name, text, words) in [
            ("x.json", "{", "x.json: no JSON (EOF"),
            ("x.json", "{}", "has neither `format`"),
            ("x.json", r#"{"bias_seconds": 1}"#, "missing field `bs_probes`"),
            (
                "x.json",
                r#"{"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1.0, 1], "max_batch_tokens": 2}"#,
                "1 is out of order",
            ),
            (
                "x.json",
                r#"{"sample_batch_tokens": [2], "sample_steps_per_sec": [], "max_batch_tokens": 2}"#,
                "1 samples on the left, 0 on the right",
            ),
            (
                "x.json",
                r#"{"sample_batch_tokens": [1], "sample_steps_per_sec": [1], "max_batch_tokens": 1e18}"#,
                "x.json: ",
            ),
            (
                "x.json",
                r#"{"format": "deepspec-step-cost", "format_version": 1, "verify": []}"#,
                "no cost curve",
            ),
            ("x.json", r#"{"format": "deepspec-step-cost", "format_version": 9}"#, "`format_version` is 9"),
            (
                "x.json",
                r#"{"format": "deepspec-step-cost", "format_version": 1, "verify": [{"context": "a"}]}"#,
                "`verify[0].context`: invalid type",
            ),
            (
                "x.json",
                r#"{"format": "deepspec-step-cost", "format_version": 1, "verify": [{"context": 1, "batch_tokens": [1],
                    "seconds": [1]}], "plain": [{"context": 1, "batch_tokens": [1], "seconds": []}]}"#,
                "1 batch_tokens and seconds on the left, 0 on the right",
            ),
            (
                "x.json",
                r#"{"format": "deepspec-step-cost", "format_version": 1, "verify": [{"context": 1, "batch_tokens": [1],
                    "seconds": [1]}], "draft": {"requests": [0], "seconds": [1]}}"#,
                "0 is out of order",
            ),
            ("x.csv", "batch_tokens,steps_per_second\n1,0\n", "`steps_per_second` is 0"),
            ("x.csv", "batch_tokens,seconds\n1,-1\n", "cost -1 of 1 tokens"),
            ("x.csv", "batch_tokens\n1\n", "wants one of the columns"),
            ("x.csv", "batch_tokens,seconds\nmany,1\n", "x.csv: "),
        ] {
            let told = of(name, text).unwrap_err();
            assert!(told.contains(words), "{text}: {told}");
        }
        assert!(read_step_cost(Path::new("absent.json")).unwrap_err().contains("absent.json: No such file"));
    }
}
