//! Renders a calibration as text.

use deepspec_cost::reliability::{PositionReliability, ReliabilityReport};

use super::file::{AlternativeFit, Calibration, EceBootstrap, EceUncertainty, HeldOutReport};
use crate::statistics::Interval;
use crate::table::{Table, number};

/// The temperatures by position, their effect on held-out prompts, and advice.
pub fn render(calibration: &Calibration) -> String {
    let held_out = &calibration.held_out;
    let bootstrap = held_out.bootstrap.as_ref();
    format!(
        "{}\nFitted to {} prompts, judged by {} others. Over all positions:\n\n{}\n{}{}\n",
        positions_table(calibration),
        calibration.fit_prompts,
        held_out.prompts,
        bootstrap.map(|bootstrap| errors_table(held_out, bootstrap)).unwrap_or_default(),
        alternatives_table(&calibration.alternatives),
        conclusion(bootstrap.and_then(|bootstrap| bootstrap.change))
    )
}

/// The table of fits by other methods.
fn alternatives_table(alternatives: &[AlternativeFit]) -> String {
    if alternatives.is_empty() {
        return String::new();
    }
    let header = ["fitted otherwise", "temperatures", "ECE", "less that of above"];
    let mut table = Table::new(header.map(String::from).to_vec());
    for other in alternatives {
        let found: Vec<f64> = other.temperatures.values().flatten().copied().collect();
        let bounds =
            [found.iter().copied().fold(f64::INFINITY, f64::min), found.iter().copied().fold(0.0, f64::max)];
        let temperatures = format!("{:.2} … {:.2}", bounds[0], bounds[1]);
        table.row(vec![
            other.method.clone(),
            temperatures,
            number(other.ece, 3),
            format_interval(other.change),
        ]);
    }
    table.render() + "\n"
}

fn positions_table(calibration: &Calibration) -> String {
    let HeldOutReport { before, after, .. } = &calibration.held_out;
    let header = ["position", "temperature", "blocks", "before", "after", "before", "after", "AUROC"];
    let mut table = Table::new(header.map(String::from).to_vec());
    for (columns, title) in [(3, ""), (2, "ECE"), (2, "Brier"), (1, "")] {
        table.add_title(columns, title);
    }
    let metrics = |position: &PositionReliability| position.metrics;
    for (k, (a, b)) in before.positions.iter().zip(&after.positions).enumerate() {
        let (before, after) = (metrics(a), metrics(b));
        table.row(vec![
            format!("@{}", k + 1),
            number(calibration.temperatures.get(k).copied(), 2),
            b.count.to_string(),
            number(before.map(|m| m.ece), 3),
            number(after.map(|m| m.ece), 3),
            number(before.map(|m| m.brier), 3),
            number(after.map(|m| m.brier), 3),
            number(after.and_then(|m| m.auroc), 3),
        ]);
    }
    table.add_rule();
    table.row(vec![
        "mean".into(),
        String::new(),
        after.positions.iter().map(|position| position.count).sum::<u64>().to_string(),
        number(before.summary.map(|m| m.ece), 3),
        number(after.summary.map(|m| m.ece), 3),
        number(before.summary.map(|m| m.brier), 3),
        number(after.summary.map(|m| m.brier), 3),
        number(after.summary.and_then(|m| m.auroc), 3),
    ]);
    table.render()
}

/// The table of mean errors, with their intervals and the errors that chance alone explains.
fn errors_table(held_out: &HeldOutReport, EceBootstrap { before, after, change }: &EceBootstrap) -> String {
    let header = ["", "ECE", "95 % interval", "blocks", "prompts"];
    let mut table = Table::new(header.map(String::from).to_vec());
    for (columns, title) in [(3, ""), (2, "by chance up to, among")] {
        table.add_title(columns, title);
    }
    let ece = |report: &ReliabilityReport| report.summary.map(|m| m.ece);
    let (raw, calibrated) = (ece(&held_out.before), ece(&held_out.after));
    let mut row = |name: &str, ece, bootstrap: &EceUncertainty, of_chance| {
        let bounds = [of_chance, Some(bootstrap.ece_of_chance)].map(|bound| number(bound, 3));
        let cells = [name.to_string(), number(ece, 3), format_interval(bootstrap.interval)];
        table.row(cells.into_iter().chain(bounds).collect());
    };
    row("before", raw, before, held_out.ece_of_chance_before);
    row("after", calibrated, after, Some(held_out.ece_of_chance));
    let difference = raw.zip(calibrated).map(|(before, after)| format!("{:+.3}", after - before));
    let cells = [
        "after less before".into(),
        difference.unwrap_or_default(),
        format_interval(*change),
        String::new(),
        String::new(),
    ];
    table.row(cells.to_vec());
    table.render()
}

fn format_interval(interval: Option<Interval>) -> String {
    interval.map_or_else(String::new, |Interval { low, high }| format!("{low:.3} … {high:.3}"))
}

/// Tells in one sentence whether the temperatures help on held-out prompts.
fn conclusion(change: Option<Interval>) -> &'static str {
    match change {
        Some(Interval { low, .. }) if low > 0.0 => {
            "The others do better without these temperatures: leave them out, or fit to more prompts."
        }
        Some(Interval { high, .. }) if high < 0.0 => "The others do better with these temperatures.",
        _ => "Whether the others do better with or without these temperatures, so few prompts cannot tell.",
    }
}

#[cfg(test)]
mod tests {
    use deepspec_cost::calibrate::Calibration as Temperatures;

    use super::*;
    use crate::calibration::{PromptBlocks, PromptHalf};
    use crate::confidence::ObservedBlock;

    /// The verdict on a temperature for a head whose confidence is σ(2.2) = 0.9, where `accepted`
    /// of ten blocks per prompt are accepted.
    fn told(temperature: f64, accepted: impl Fn(usize) -> usize) -> &'static str {
        let blocks = |prompt: usize| {
            let of = accepted(prompt);
            (0..10).map(|i| ObservedBlock { logits: vec![2.2], accepted: usize::from(i < of) }).collect()
        };
        let prompt = |i: usize| PromptBlocks { suite: "s".into(), sample: i.to_string(), blocks: blocks(i) };
        let side = PromptHalf { prompts: (0..50).map(prompt).collect() };
        let held_out = side.evaluate_held_out(1, &Temperatures::new(vec![temperature]).unwrap()).unwrap();
        conclusion(held_out.bootstrap.unwrap().change)
    }

    #[test]
    fn temperatures_that_do_harm_are_told() {
        // Nine of ten blocks of every prompt are accepted, as the head predicts.
        assert!(told(0.5, |_| 9).contains("better without these temperatures"));
        assert!(told(1.0, |_| 9).contains("cannot tell"));
        assert!(told(3.0, |_| 7).contains("better with these temperatures"));
        // Ten of ten blocks of every other prompt and eight of ten of the rest: 0.9 again. A few
        // more prompts of one kind would put the mean above or below either prediction.
        assert!(told(0.9, |i| 8 + 2 * (i % 2)).contains("cannot tell"));
    }
}
