//! Renders a simulation as tables and plots.

use std::path::Path;

use anyhow::Result;
use deepspec_cost::policy::Policy;

use super::host::HostOverhead;
use super::served::weighs_costs;
use super::{Crossover, ReplayResult, ScheduleCurve, Simulation};
use crate::plot::{
    Axis, Plot, SeriesStyle, draw_axes, draw_point_labels, draw_series, draw_title_and_legend,
};
use crate::report::write_plot;
use crate::table::Table;

/// Tables of throughput, and recommended settings.
pub fn render(simulation: &Simulation, concurrency: &[usize]) -> String {
    let mut text = format!(
        "tokens/s by sequences decoded at once, from {} recorded blocks\n\n",
        simulation.recorded_cycles
    );
    let header =
        |first: &str| [vec![first.into()], concurrency.iter().map(usize::to_string).collect()].concat();
    let mut table = Table::new(header("schedule"));
    for curve in &simulation.schedule_curves {
        let cells = curve.outcomes.iter().map(|outcome| format!("{:.0}", outcome.throughput()));
        table.row([vec![curve.schedule.to_string()], cells.collect()].concat());
    }
    if let Some(prefix) = simulation.schedule_curves.iter().find(|curve| curve.schedule == Policy::Prefix) {
        table.add_rule();
        let mut row = |what: &str, of: fn(&ReplayResult) -> f64| {
            let cells = prefix.outcomes.iter().map(|outcome| format!("{:.2}", of(outcome)));
            table.row([vec![what.into()], cells.collect()].concat());
        };
        row("prefix: τ", ReplayResult::accepted_length);
        row("prefix: wasted", ReplayResult::wasted_share);
        row("prefix: steps that draft", ReplayResult::drafting_share);
    }
    if !simulation.miscalibrated.is_empty() {
        table.add_rule();
    }
    for ScheduleCurve { schedule, sharpness, outcomes } in &simulation.miscalibrated {
        let cells = outcomes.iter().map(|outcome| format!("{:.0}", outcome.throughput()));
        table.row([vec![format!("{schedule}, logits × {sharpness}")], cells.collect()].concat());
    }
    text += &table.render();
    text += "\n";
    for advice in &simulation.advice {
        let fixed = match advice.fixed {
            0 => "plain decoding".to_string(),
            tokens => format!("{tokens} tokens ({:.2} × plain)", advice.fixed_over_plain),
        };
        text += &format!(
            "at {}: {} ({:.2} × plain); of fixed lengths {fixed}\n",
            advice.concurrency, advice.best, advice.over_plain
        );
    }
    for Crossover { schedule, from } in &simulation.crossovers {
        text += &match from {
            Some(at) => format!("{schedule} is slower than plain decoding from {at} sequences on\n"),
            None => format!("{schedule} is never slower than plain decoding here\n"),
        };
    }
    if !simulation.served.is_empty() {
        let HostOverhead { factor, step, choice, token } = simulation.host;
        let weighing = match (weighs_costs(&simulation.served), choice > 0.0) {
            (true, _) => format!("{:.2} ms more where the schedule weighs costs", 1e3 * choice),
            (false, true) => {
                format!("{:.2} ms more where the schedule weighs costs, as you say", 1e3 * choice)
            }
            (false, false) => "what weighing costs takes was not measured and counts for nothing".into(),
        };
        text += &format!(
            "by what servers did, steps take {factor:.2} × their costs and {:.2} ms, and a token {:.3} ms; {weighing}\n\
             what is foretold for them is {:.1} % off at most\n",
            1e3 * step,
            1e3 * token,
            1e2 * simulation.served_off.unwrap_or_default(),
        );
    }
    if let Some(from) = simulation.forecast_from {
        text += &format!(
            "from {from} sequences on whole blocks are larger batches than were measured: their times are a forecast\n"
        );
    }
    text
}

/// Plots of throughput over plain decoding, and of tokens/s per user against the total.
pub fn write_plots(dir: &Path, simulation: &Simulation, concurrency: &[usize]) -> Result<()> {
    let names: Vec<String> =
        simulation.schedule_curves.iter().map(|curve| curve.schedule.to_string()).collect();
    let keys: Vec<(&str, SeriesStyle)> =
        names.iter().enumerate().map(|(index, name)| (name.as_str(), SeriesStyle::nth(index))).collect();
    let throughputs =
        |curve: &ScheduleCurve| -> Vec<f64> { curve.outcomes.iter().map(ReplayResult::throughput).collect() };
    let plain = throughputs(&simulation.schedule_curves[0]);
    let highest = |values: &dyn Fn(&ScheduleCurve) -> Vec<f64>| {
        simulation.schedule_curves.iter().flat_map(values).fold(0.0, f64::max) * 1.05
    };
    let over = |curve: &ScheduleCurve| -> Vec<f64> {
        throughputs(curve).iter().zip(&plain).map(|(value, plain)| value / plain).collect()
    };
    let width = 240 + 100 * keys.len() as u32;
    let speed_ups = Plot::draw("Throughput by load", (width, 360), |canvas| {
        let area = draw_title_and_legend(
            canvas,
            "Throughput over plain decoding, by sequences decoded at once",
            &keys,
        )?;
        let most = concurrency.iter().copied().max().unwrap_or(1);
        let x = Axis::log2_counts("sequences decoded at once", most as f64);
        let mut chart = draw_axes(&area, x, Axis::linear("throughput over plain", 0.0..highest(&over), 7))?;
        for (index, curve) in simulation.schedule_curves.iter().enumerate() {
            let values = concurrency.iter().map(|&count| (count as f64).log2()).zip(over(curve));
            draw_series(&mut chart, values, SeriesStyle::nth(index))?;
        }
        Ok(())
    })?;
    let per_user = |curve: &ScheduleCurve| -> Vec<f64> {
        throughputs(curve).iter().zip(concurrency).map(|(value, &count)| value / count as f64).collect()
    };
    let frontier = Plot::draw("Frontier", (width, 360), |canvas| {
        let area = draw_title_and_legend(canvas, "Tokens/s of all against tokens/s of each, by load", &keys)?;
        let x = Axis::linear("tokens/s of each sequence", 0.0..highest(&per_user), 7);
        let mut chart = draw_axes(&area, x, Axis::linear("tokens/s of all", 0.0..highest(&throughputs), 7))?;
        for (index, curve) in simulation.schedule_curves.iter().enumerate() {
            draw_series(
                &mut chart,
                per_user(curve).into_iter().zip(throughputs(curve)),
                SeriesStyle::nth(index),
            )?;
            let at = per_user(curve).into_iter().zip(throughputs(curve)).zip(concurrency);
            draw_point_labels(&mut chart, at.map(|((x, y), count)| (x, y, count.to_string())))?;
        }
        Ok(())
    })?;
    for (name, plot) in [("throughput", speed_ups), ("frontier", frontier)] {
        write_plot(dir, name, &plot)?;
    }
    Ok(())
}
