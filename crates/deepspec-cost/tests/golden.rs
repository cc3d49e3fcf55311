//! The reference's numbers (golden cases `confidence_metrics` and `scheduler`).

use deepspec_cost::calibrate::{
    Calibration, GridSearch, PositionFit, VerifiedProposal, fit_temperatures, log_spaced,
};
use deepspec_cost::curve::CostCurve;
use deepspec_cost::reliability::{Binning, Metrics, Reliability, ReliabilityReport};
use deepspec_cost::scheduler::{self, Schedule};
use deepspec_cost::survival::sigmoid_f32;
use deepspec_testkit::golden::{Array, Case, Values};
use serde_json::Value;

/// Tolerance for float32 sigmoids.
const METRICS: f64 = 1e-6;
/// Tolerance for float64 computations.
const EXACT: f64 = 1e-9;

#[track_caller]
fn close(actual: Option<f64>, expected: Option<f64>, tolerance: f64, what: &str) {
    let agree = match (actual, expected) {
        (Some(actual), Some(expected)) => (actual - expected).abs() <= tolerance * expected.abs().max(1.0),
        (None, None) => true,
        _ => false,
    };
    assert!(agree, "{what}: {actual:?}, expected {expected:?}");
}

fn size(value: &Value) -> usize {
    value.as_u64().expect("a count") as usize
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number")).collect()
}

fn rows(value: &Value) -> Vec<Vec<f64>> {
    value.as_array().expect("a list").iter().map(numbers).collect()
}

/// The names of the data sets: `a` for `a.confidence_logits`.
fn data_sets(case: &Case) -> Vec<String> {
    let inputs = case.json["inputs.safetensors"].as_object().expect("a table of inputs");
    inputs.keys().filter_map(|name| name.strip_suffix(".confidence_logits")).map(str::to_string).collect()
}

fn logits(array: &Array) -> Vec<&[f32]> {
    match &array.values {
        Values::Float(values) => values.chunks_exact(array.shape[1] as usize).collect(),
        other => panic!("expected float32 logits, found {other:?}"),
    }
}

/// The number of leading ones of every mask row, counted in its first `lengths[row]` columns.
fn accepted(mask: &Array, lengths: &[usize]) -> Vec<usize> {
    let values = mask.ints();
    let rows = values.chunks_exact(mask.shape[1] as usize).zip(lengths);
    rows.map(|(row, &len)| row[..len].iter().take_while(|&&bit| bit == 1).count()).collect()
}

fn check_metrics(
    actual: Option<&Metrics>,
    names: [&str; 5],
    expected: &dyn Fn(&str) -> Option<f64>,
    what: &str,
) {
    let of = |get: fn(&Metrics) -> Option<f64>| actual.and_then(get);
    let values = [
        of(|m| Some(m.ece)),
        of(|m| m.auroc),
        of(|m| Some(m.brier)),
        of(|m| Some(m.predicted_mean)),
        of(|m| Some(m.accepted_mean)),
    ];
    for (name, value) in names.into_iter().zip(values) {
        close(value, expected(name), METRICS, &format!("{what}.{name}"));
    }
}

fn check_report(case: &Case, set: &str, report: &ReliabilityReport) {
    let per_position = case.scalar(&format!("{set}.per_position")).as_array().expect("positions");
    assert_eq!(report.positions.len(), per_position.len());
    for (k, (actual, expected)) in report.positions.iter().zip(per_position).enumerate() {
        let what = format!("{set}[{k}]");
        let names = ["ece", "auc", "brier", "pred_mean", "target_mean"];
        check_metrics(actual.metrics.as_ref(), names, &|name| expected[name].as_f64(), &what);
        let tensor =
            |name: &str| Some(case.expected(&format!("{set}.{name}")).f64s()[k]).filter(|&v| v != -1.0);
        check_metrics(actual.metrics.as_ref(), names, &tensor, &what);
        assert_eq!(Some(actual.count as f64), expected["total_weight"].as_f64());

        let bins = expected["reliability"].as_array().expect("bins");
        let filled: Vec<_> = bins.iter().filter(|bin| bin["weight"].as_f64() > Some(0.0)).collect();
        assert_eq!(actual.bins.len(), filled.len(), "{what}");
        for (bin, expected) in actual.bins.iter().zip(filled) {
            assert_eq!(Some(bin.count as f64), expected["weight"].as_f64());
            close(Some(bin.low), expected["range"][0].as_f64(), EXACT, &what);
            close(Some(bin.high), expected["range"][1].as_f64(), EXACT, &what);
            close(Some(bin.predicted_mean), expected["avg_pred"].as_f64(), METRICS, &what);
            close(Some(bin.accepted_mean), expected["avg_target"].as_f64(), METRICS, &what);
        }
    }
    let summary = case.scalar(&format!("{set}.summary"));
    let names = ["ece_mean", "auc_mean", "brier_mean", "pred_mean", "target_mean"];
    check_metrics(report.summary.as_ref(), names, &|name| summary[name].as_f64(), set);
}

#[test]
fn golden_confidence_metrics() {
    let case = Case::load("confidence_metrics");
    let binning = Binning { coarse: size(case.hyper("coarse_bins")), fine: size(case.hyper("fine_bins")) };
    let positions = size(case.hyper("K"));
    for set in data_sets(&case) {
        let input = |name: &str| case.input(&format!("{set}.{name}"));
        let lengths: Vec<usize> = input("effective_length").ints().iter().map(|&len| len as usize).collect();
        let accepted = accepted(input("accept_prefix_mask"), &lengths);
        let empty = Reliability::with_binning(positions, binning).expect("bins");
        let (mut whole, mut parts) = (empty.clone(), vec![empty; 3]); // one stream, and three workers
        for (i, row) in logits(input("confidence_logits")).into_iter().enumerate() {
            let confidences: Vec<f64> =
                row[..lengths[i]].iter().map(|&x| f64::from(sigmoid_f32(x))).collect();
            whole.update(&confidences, accepted[i]).expect("a proposal");
            parts[i % 3].update(&confidences, accepted[i]).expect("a proposal");
        }
        let mut merged = parts.remove(0);
        parts.iter().for_each(|part| merged.merge(part).expect("the same shape"));
        check_report(&case, &set, &whole.finish());
        check_report(&case, &set, &merged.finish());
    }
}

#[test]
fn golden_temperature_scaling() {
    let case = Case::load("scheduler");
    let search = GridSearch { grid: case.expected("sts_grid").f64s(), bins: size(case.hyper("ece_bins")) };
    let positions = size(case.hyper("K"));
    for set in data_sets(&case) {
        let mask = case.input(&format!("{set}.accept_prefix_mask"));
        let accepted = accepted(mask, &vec![positions; mask.shape[0] as usize]);
        let logits = logits(case.input(&format!("{set}.confidence_logits")));
        let proposals: Vec<_> = logits
            .into_iter()
            .zip(accepted)
            .map(|(logits, accepted)| VerifiedProposal { logits, accepted })
            .collect();
        let fits = fit_temperatures(&proposals, positions, &search).expect("valid data");

        let column = |get: fn(&PositionFit) -> f64| fits.iter().map(move |fit| fit.as_ref().map(get));
        let check = |name: &str, get: fn(&PositionFit) -> f64| {
            let expected = case.expected(&format!("{set}.{name}")).f64s();
            assert_eq!(fits.len(), expected.len());
            for (actual, expected) in column(get).zip(expected) {
                close(actual, Some(expected), EXACT, &format!("{set}.{name}"));
            }
        };
        check("grid_index", |fit| fit.grid_index as f64);
        check("temperatures", |fit| fit.temperature);
        check("ece_before", |fit| fit.ece_before);
        check("ece_after", |fit| fit.ece_after);
        assert_eq!(
            Calibration::from_fits(&fits).temperatures(),
            column(|fit| fit.temperature).flatten().collect::<Vec<_>>()
        );
    }
}

#[test]
fn golden_temperature_grid() {
    let expected = Case::load("scheduler").expected("sts_grid").f64s();
    let grid = log_spaced(expected[0], expected[expected.len() - 1], expected.len());
    for (i, (&actual, &expected)) in grid.iter().zip(&expected).enumerate() {
        close(Some(actual), Some(expected), EXACT, &format!("grid[{i}]"));
    }
}

fn check_schedule(actual: &Schedule, expected: &Value, what: &str) {
    let lengths: Vec<usize> = expected["lengths"].as_array().expect("lengths").iter().map(size).collect();
    assert_eq!(actual.lengths, lengths, "{what}");
    assert_eq!(actual.batch, size(&expected["batch"]), "{what}");
    close(Some(actual.throughput), expected["theta"].as_f64(), EXACT, what);
    close(Some(actual.expected_tokens), expected["tau"].as_f64(), EXACT, what);
    if let Some(evaluated) = expected.get("evaluated") {
        assert_eq!(actual.evaluated, size(evaluated), "{what}");
        assert_eq!(Some(actual.stopped_early), expected["stopped_early"].as_bool(), "{what}");
    }
}

#[test]
fn golden_prefix_scheduler() {
    let case = Case::load("scheduler");
    let list = |name: &str| case.json[name].as_array().expect("cases").clone();
    for (i, one) in list("cases").iter().chain(&list("handmade_cases")).enumerate() {
        let what = one["name"].as_str().map_or_else(|| format!("case {i}"), str::to_string);
        let (confidences, curve) =
            (rows(&one["confidences"]), CostCurve::new(numbers(&one["sps"])).expect("rates"));
        let early = scheduler::prefix_lengths(&confidences, &curve).expect("valid data");
        check_schedule(&early, &one["expected"], &what);
        let global = scheduler::global_prefix_lengths(&confidences, &curve).expect("valid data");
        check_schedule(&global, &one["expected_without_early_stop"], &what);
        assert_eq!(
            scheduler::fill_budget(&confidences, global.budget()).expect("valid data"),
            global.lengths,
            "{what}"
        );
    }
}

/// Appendix A: one token drafted from q = (½, ½) whose value decides the next confidence. If it is
/// verified, the result follows p; otherwise the target draws from p itself. Choosing between the
/// two by the drawn value gives another distribution.
#[test]
fn golden_appendix_a() {
    let case = Case::load("scheduler");
    let p = numbers(&case.json["appendix_a_distribution"]["target"]);
    let first_token = |plan: &dyn Fn(&[Vec<f64>], &CostCurve) -> Schedule| {
        let handmade = case.json["handmade_cases"].as_array().expect("cases");
        let drawn = |name: &str| handmade.iter().find(|one| one["name"] == name).expect("an Appendix A case");
        let mut distribution = [0.0; 2];
        for (token, one) in ["appendix_a_case_1", "appendix_a_case_2"].map(drawn).into_iter().enumerate() {
            let curve = CostCurve::new(numbers(&one["sps"])).expect("rates");
            let verified = plan(&rows(&one["confidences"]), &curve).lengths[0] > 0;
            let accept = (p[token] / 0.5).min(1.0);
            for (output, share) in distribution.iter_mut().enumerate() {
                // A rejection moves all mass to the one token that the drafter proposes too rarely.
                let outcome = if output == token { accept } else { 1.0 - accept };
                *share += 0.5 * if verified { outcome } else { p[output] };
            }
        }
        distribution
    };
    let biased = numbers(&case.json["appendix_a_distribution"]["biased"]);
    let early = first_token(&|c, curve| scheduler::prefix_lengths(c, curve).expect("valid data"));
    let global = first_token(&|c, curve| scheduler::global_prefix_lengths(c, curve).expect("valid data"));
    for output in 0..2 {
        close(Some(early[output]), Some(p[output]), EXACT, "early stop");
        close(Some(global[output]), Some(biased[output]), EXACT, "global search");
    }
}
