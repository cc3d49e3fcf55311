//! Renders results as text tables for the terminal.

use deepspec_core::cli;
use deepspec_drafters::EngineRule;
use deepspec_engine::{DraftSampling, Sampling, VerifyRule};

use crate::results::{
    ContextRange, FiguresSource, Metrics, Results, Served, Settings, SuiteResult, Timing, collapse_advice,
};
use crate::table::{Table, factor, number, range, rate};

/// Maximum number of positions for which unconditional and conditional rates are in one table.
const MAX_POSITIONS_SIDE_BY_SIDE: usize = 8;

/// Renders the run's settings, tables of lengths, speeds and positions, and notes.
pub fn render(results: &Results) -> String {
    let mut parts = vec![run_header(results), lengths_and_speeds_table(results).render()];
    parts.extend(lengths_by_draft_rule(results).map(|(names, rows)| text_table(names, rows)));
    parts.extend(lengths_by_context(results).map(|(names, rows)| text_table(names, rows)));
    parts.extend(position_tables(results).iter().map(Table::render));
    parts.push(notes(results).iter().map(|note| cli::wrap_paragraph("", 0, note) + "\n").collect());
    parts.join("\n")
}

fn text_table<const N: usize>(names: [&str; N], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new(names.map(String::from).to_vec());
    rows.into_iter().for_each(|row| table.row(row));
    table.render()
}

fn run_header(results: &Results) -> String {
    let Settings { temperature, slots, device, dtype, .. } = &results.settings;
    let seeds = results.settings.seed_list();
    let drafter = match &results.drafter {
        Some(drafter) => format!("drafter {} (drafts {} tokens)", drafter.path, drafter.block_size),
        None => "no drafter".into(),
    };
    if let Some(served) = &results.served {
        let slots = cli::count(*slots, "request");
        return format!(
            "target {}\n{drafter}\nserved by {} at {}\nfigures {}, verification {}\n\
             temperature {temperature}, {seeds}, {slots} at once\n",
            results.target.path,
            served.name(),
            served.url,
            served.figures.phrase(),
            served.verification
        );
    }
    format!(
        "target {}, {drafter}\ntemperature {temperature}, {seeds}, {} at once, {dtype} on {device}\n",
        results.target.path,
        cli::count(*slots, "sequence")
    )
}

/// Fills a table with rows of suites, domains and overall.
fn fill_table(table: &mut Table, results: &Results, cells: impl Fn(&Metrics, [String; 2]) -> Vec<String>) {
    let named = |name: String, cells: Vec<String>| std::iter::once(name).chain(cells).collect();
    for suite in &results.suites {
        let counts = [suite.counts.samples.to_string(), suite.counts.cycles.to_string()];
        table.row(named(suite.name.clone(), cells(&suite.metrics, counts)));
    }
    table.add_rule();
    for domain in &results.domains {
        table.row(named(domain.domain.to_string(), cells(&domain.metrics, Default::default())));
    }
    table.row(named("overall".into(), cells(&results.overall, Default::default())));
}

fn lengths_and_speeds_table(results: &Results) -> Table {
    let header = ["suite", "τ", "interval", "verify rate", "tokens/s", "speed-up", "answers", "cycles"];
    let mut table = Table::new(header.map(String::from).to_vec());
    fill_table(&mut table, results, |metrics, [samples, cycles]| {
        vec![
            number(metrics.accepted_length, 2),
            range(metrics.accepted_length_interval),
            number(metrics.verify_rate, 2),
            rate(metrics.tokens_per_s),
            factor(metrics.speed_up),
            samples,
            cycles,
        ]
    });
    table
}

fn position_tables(results: &Results) -> Vec<Table> {
    type Rates = fn(&Metrics) -> &Vec<Option<f64>>;
    let kinds: [(&str, Rates); 2] = [
        ("accepted at position", |metrics| &metrics.rates),
        ("accepted at position, given all before it", |metrics| &metrics.conditional_rates),
    ];
    let count = results.overall.rates.len();
    let build = |kinds: &[(&str, Rates)]| {
        let positions = kinds.iter().flat_map(|_| (1..=count).map(|k| format!("@{k}")));
        let mut table = Table::new(std::iter::once("suite".to_string()).chain(positions).collect());
        table.add_title(1, "");
        kinds.iter().for_each(|(title, _)| table.add_title(count, title));
        fill_table(&mut table, results, |metrics, _| {
            let values = kinds.iter().flat_map(|(_, rates)| {
                (0..count).map(|k| rates(metrics).get(k).copied().flatten()).collect::<Vec<_>>()
            });
            values.map(|value| number(value, 2)).collect()
        });
        table
    };
    match count {
        0 => vec![],
        1..=MAX_POSITIONS_SIDE_BY_SIDE => vec![build(&kinds)],
        _ => kinds.iter().map(|kind| build(std::slice::from_ref(kind))).collect(),
    }
}

/// Column names and rows of the accepted lengths under both rules, one row per suite and one
/// overall.
pub fn lengths_by_draft_rule(results: &Results) -> Option<([&'static str; 5], Vec<Vec<String>>)> {
    let other = results.other_rule.as_ref()?;
    let suites = results.suites.iter().zip(&other.suites).map(|(suite, other)| {
        (suite.name.as_str(), &suite.metrics, (other.accepted_length, other.accepted_length_interval))
    });
    let overall = ("overall", &results.overall, (other.accepted_length, other.accepted_length_interval));
    let rows = suites.chain([overall]).map(|(name, metrics, other)| {
        let run = (metrics.accepted_length, metrics.accepted_length_interval);
        let (drawn, likeliest) = match results.settings.draft_sampling {
            DraftSampling::Probabilistic => (run, other),
            DraftSampling::Greedy => (other, run),
        };
        let cells = [drawn, likeliest].map(|(length, interval)| [number(length, 2), range(interval)]);
        std::iter::once(name.to_string()).chain(cells.into_iter().flatten()).collect()
    });
    Some((["suite", "τ probabilistic", "95 % interval", "τ greedy", "95 % interval"], rows.collect()))
}

/// Column names and rows of the accepted lengths by the length of the context; None if each suite has one range of lengths.
pub fn lengths_by_context(results: &Results) -> Option<([&'static str; 5], Vec<Vec<String>>)> {
    let row = |suite: &str, range: &ContextRange| {
        let ContextRange { accepted_length, accepted_length_interval, cycles, .. } = range;
        vec![
            suite.to_string(),
            range.name(),
            number(*accepted_length, 2),
            self::range(*accepted_length_interval),
            cycles.to_string(),
        ]
    };
    let of_suite = |suite: &SuiteResult| -> Vec<_> {
        suite.context_lengths.iter().map(|range| row(&suite.name, range)).collect()
    };
    let rows: Vec<_> = results.suites.iter().flat_map(of_suite).collect();
    (!rows.is_empty()).then_some((["suite", "tokens before a cycle", "τ", "95 % interval", "cycles"], rows))
}

/// Sentences on how tokens were drafted and accepted, and on the engines that do so under each rule that the report has. None without a
/// drafter. None for blocks at temperature 0, where all their rules agree.
fn draft_rule_note(results: &Results) -> Option<String> {
    let settings = &results.settings;
    if results.served.is_some() || results.drafter.is_none() {
        return None;
    }
    if settings.verify.tree_budget().is_some() {
        return Some(tree_note(results));
    }
    if Sampling::new(settings.temperature, 0).is_greedy() {
        return None;
    }
    let (sampling, rule) = (settings.draft_sampling, settings.verify);
    let mut sentences = vec![format!(
        "Drafted tokens are {sampling} (--draft-sampling {}) and verified {} (--verify {rule}).",
        sampling_name(sampling),
        rule.phrase()
    )];
    if let Some(rules) = &results.engine_rules {
        sentences.push(engine_sentences(rules, sampling, rule));
        if results.other_rule.is_some() && !rules.is_empty() {
            let other = sampling.other();
            sentences.push(format!("Drafted tokens of τ {} are {other}.", sampling_name(other)));
            sentences.push(engine_sentences(rules, other, rule));
        }
    }
    if sampling == DraftSampling::Greedy && rule == VerifyRule::Block {
        sentences.push("Greedy drafts gain nothing by verification as a block.".into());
    }
    Some(sentences.join(" "))
}

/// The value of `--draft-sampling`.
fn sampling_name(sampling: DraftSampling) -> &'static str {
    match sampling {
        DraftSampling::Probabilistic => "probabilistic",
        DraftSampling::Greedy => "greedy",
    }
}

/// The engines that draft and verify in this way, and with which settings.
fn engine_sentences(rules: &[EngineRule], sampling: DraftSampling, verify: VerifyRule) -> String {
    let fitting = rules.iter().filter(|rule| (rule.draft_sampling, rule.verify) == (sampling, verify));
    let sentences = fitting.map(|EngineRule { engine, settings, .. }| {
        let settings: Vec<String> = settings.iter().map(|setting| format!("`{setting}`")).collect();
        match settings.is_empty() {
            true => format!("{engine} does so by default."),
            false => format!("{engine} does so with {}.", settings.join(" and ")),
        }
    });
    let sentences: Vec<String> = sentences.collect();
    match sentences.is_empty() {
        false => sentences.join(" "),
        true if rules.is_empty() => "No engine loads this drafter.".into(),
        true => "No engine that loads this drafter does so.".into(),
    }
}

/// Sentences on the verification of trees.
fn tree_note(results: &Results) -> String {
    let rule = results.settings.verify;
    let nodes: u64 = results.suites.iter().map(|suite| suite.counts.nodes).sum();
    let cycles: u64 = results.suites.iter().map(|suite| suite.counts.cycles).sum();
    format!(
        "Drafted tokens are verified {} (--verify {rule}), {:.1} nodes per cycle. Positions are depths; a \
         branch that ends counts as rejected there. No release of vLLM, SGLang or llama.cpp verifies trees of block drafters; \
         SGLang does so for EAGLE. This τ is a research figure and not one of serving, and speeds are those of an \
         unoptimised path.",
        rule.phrase(),
        nodes as f64 / cycles.max(1) as f64
    )
}

/// Notes on the figures of an engine.
fn served_notes(served: &Served, wall: f64) -> Vec<String> {
    let mut notes = vec![
        "τ is (tokens − answers) ÷ cycles: the prefill computes an answer's first token, and nothing behind its end counts."
            .to_string(),
        format!("Time: {wall:.1} s from the first request of a suite to its last answer."),
    ];
    if served.figures == FiguresSource::Counters {
        notes.push(
            "Acceptance by position comes from counters, which also count tokens behind an end.".into(),
        );
    }
    notes.extend(
        served
            .baseline
            .as_ref()
            .map(|baseline| format!("The speed-up is over {baseline}, without a drafter.")),
    );
    notes
}

/// Further notes, one sentence each.
pub fn notes(results: &Results) -> Vec<String> {
    let mut notes = vec![
        "Domains and overall are means over suites; intervals hold 95 % of 2000 bootstrap resamples of prompts."
            .to_string(),
    ];
    notes.extend(draft_rule_note(results));
    notes.extend(
        results.suites.iter().filter_map(|suite| collapse_advice(&suite.name, &suite.context_lengths)),
    );
    let sum = |part: fn(&Timing) -> f64| results.suites.iter().map(|suite| part(&suite.timing)).sum::<f64>();
    let wall = sum(|timing| timing.wall_s);
    let share = |part| 100.0 * sum(part) / wall.max(f64::MIN_POSITIVE);
    let (draft, verify, host) =
        (share(|timing| timing.draft_s), share(|timing| timing.verify_s), share(|timing| timing.host_s));
    match &results.served {
        Some(served) => notes.extend(served_notes(served, wall)),
        None => notes.push(format!(
            "Time: {wall:.1} s, of it {draft:.0} % drafting, {verify:.0} % target, {host:.0} % host."
        )),
    }
    let behind: u64 = results
        .suites
        .iter()
        .map(|suite| {
            let counts = &suite.counts;
            // The prefill computes an answer's first token, which belongs to no cycle.
            (counts.committed + counts.samples).saturating_sub(counts.output_tokens)
        })
        .sum();
    if behind > 0 {
        notes.push(format!(
            "τ counts whole blocks: {behind} committed tokens lie behind an answer's end or beyond --max-new-tokens ({}).",
            results.settings.max_new_tokens
        ));
    }
    let baseline: f64 = results
        .suites
        .iter()
        .filter_map(|suite| suite.baseline.as_ref())
        .map(|plain| plain.timing.wall_s)
        .sum();
    if baseline > 0.0 && results.served.is_none() {
        notes.push(format!("Plain decoding of the same samples took {baseline:.1} s."));
    }
    for suite in &results.suites {
        if suite.counts.cycles == 0 {
            notes.push(format!("{} had no cycle and is left out of the means.", suite.name));
        }
        if !suite.skipped.is_empty() {
            notes.push(format!(
                "{}: {} prompts were too long and are not scored.",
                suite.name,
                suite.skipped.len()
            ));
        }
        if suite.unasked > 0 {
            let (name, count) = (&suite.name, suite.unasked);
            notes.push(format!(
                "{name}: {count} turns were not asked, for the answer before them was cut or left no room."
            ));
        }
        if suite.shortened > 0 {
            let (name, count, asked) = (&suite.name, suite.shortened, results.settings.max_new_tokens);
            notes.push(format!(
                "{name}: the target had room for less than {asked} new tokens in {count} samples."
            ));
        }
    }
    notes
}
