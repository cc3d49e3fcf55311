//! `economics`: what a speculated token costs on an accelerator by batch and context, and how far to speculate.

mod config;

use std::fs;
use std::path::{Path, PathBuf};

use deepspec_core::{atomic, usage};
use deepspec_schedule::economics::{Draft, HARDWARE, Hardware, Load, Precision, Target};
use serde::Serialize;

use crate::plot::{Axis, Plot, SeriesStyle, chart, heading, series};
use crate::report::{Block, Document, write_document};
use crate::table::Table;

/// Drafted tokens at most.
const MOST: u32 = 64;

/// Which target where, and what is drafted.
#[derive(clap::Args)]
pub struct Args {
    /// A model's folder or config.json, or a description of its layers (.yaml; `economics --print-model` writes one to start from)
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Accelerator: b200, h200, h100, a100, mi300x or l40s, or a file (.yaml) with `bandwidth`, `bf16`, `fp8`, `fp4` and `link` per second
    #[arg(long, default_value = "h100", value_name = "NAME|FILE")]
    hardware: String,
    /// What the weights of a config.json are stored as
    #[arg(long, value_enum, default_value_t = Stored::Bf16)]
    weights: Stored,
    /// Accelerators that share the experts of each layer
    #[arg(long, default_value_t = 1, value_name = "N")]
    expert_parallel: u32,
    /// Requests decoded at once, by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512])]
    batch: Vec<u32>,
    /// Tokens of their contexts, by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1024, 8192, 65536])]
    context: Vec<u32>,
    /// Probability that a drafted token is accepted given those before it, by commas
    #[arg(long, value_name = "P", value_delimiter = ',', default_values_t = [0.6, 0.75, 0.9])]
    acceptance: Vec<f64>,
    /// Weights of the drafter, which are read once for a block (parallel drafters); instead of --draft-share
    #[arg(long, value_name = "N", conflicts_with = "draft_share")]
    draft_weights: Option<f64>,
    /// Share of a plain step that drafting a token costs (drafters that run once per token)
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    draft_share: f64,
    /// Folder for economics.json, report.md, report.html and plots
    #[arg(long, value_name = "D")]
    output_dir: Option<PathBuf>,
    /// Replace what exists
    #[arg(long)]
    overwrite: bool,
    /// Print the description of the model's layers as YAML, and nothing else
    #[arg(long)]
    print_model: bool,
    /// Print economics.json instead of tables
    #[arg(long)]
    json: bool,
}

/// What weights are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Stored {
    /// 16 bits.
    Bf16,
    /// 8 bits.
    Fp8,
    /// 4 bits with scales.
    Fp4,
}

impl From<Stored> for Precision {
    fn from(stored: Stored) -> Self {
        match stored {
            Stored::Bf16 => Self::Bf16,
            Stored::Fp8 => Self::Fp8,
            Stored::Fp4 => Self::Fp4,
        }
    }
}

/// A place of the map.
#[derive(Debug, Clone, Copy, Serialize)]
struct Point {
    acceptance: f64,
    context: u32,
    batch: u32,
    /// The number of drafted tokens that is fastest.
    best_length: u32,
    /// Throughput with it over plain decoding.
    speed_up: f64,
    /// What one more verified token per request costs beside a token of plain decoding.
    marginal: f64,
    /// Tokens per second of plain decoding, of all requests.
    plain_tokens_per_second: f64,
}

#[derive(Serialize)]
struct Map<'a> {
    format: &'static str,
    format_version: u64,
    tool_version: &'static str,
    target: &'a Target,
    hardware: Hardware,
    draft: Draft,
    points: Vec<Point>,
}

/// Runs the command.
///
/// # Errors
/// Usage errors: no such model or accelerator, a config that leaves something open. An unwritable output.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let target = args.target()?;
    if args.print_model {
        return Ok(crate::output::print(&serde_yaml::to_string(&target)?)?);
    }
    let hardware = hardware(&args.hardware)?;
    let positive = |counts: &[u32]| !counts.is_empty() && !counts.contains(&0);
    if !positive(&args.batch) || !positive(&args.context) || args.expert_parallel == 0 {
        usage!("--batch, --context and --expert-parallel must be at least 1");
    }
    if let Some(share) = args.acceptance.iter().find(|share| !(0.0..=1.0).contains(*share)) {
        usage!("--acceptance {share}: expected a probability");
    }
    let cost = args.draft_weights.unwrap_or(args.draft_share);
    if !(cost.is_finite() && cost >= 0.0) {
        usage!("--draft-weights and --draft-share must be at least 0");
    }
    let draft = match args.draft_weights {
        Some(weights) => Draft::PerBlock { weights, precision: args.weights.into() },
        None => Draft::PerToken(args.draft_share),
    };
    let mut points = vec![];
    for &acceptance in &args.acceptance {
        for &context in &args.context {
            for &batch in &args.batch {
                let load = Load { requests: f64::from(batch), context: f64::from(context), acceptance };
                let (best_length, speed_up) = target.best_length(&hardware, draft, load, MOST);
                points.push(Point {
                    acceptance,
                    context,
                    batch,
                    best_length,
                    speed_up,
                    marginal: target.marginal(&hardware, load, 1.0),
                    plain_tokens_per_second: load.requests
                        / target.step_seconds(&hardware, load.requests, 1.0, load.context),
                });
            }
        }
    }
    let map = Map {
        format: "deepspec-economics",
        format_version: 1,
        tool_version: deepspec_core::VERSION,
        target: &target,
        hardware,
        draft,
        points,
    };
    if let Some(dir) = &args.output_dir {
        let file = dir.join("economics.json");
        crate::output::check_fresh(dir, "economics.json", &["report.md", "report.html"], args.overwrite)?;
        atomic::create_dir(dir)?;
        write_document(dir, &args.document(&map.points)?)?;
        atomic::write_json(&file, &map)?;
    }
    let text = if args.json {
        serde_json::to_string_pretty(&map)? + "\n"
    } else {
        let (header, rows) = args.table(&map.points);
        let mut table = Table::new(header);
        rows.into_iter().for_each(|row| table.row(row));
        table.render()
            + "Each cell: drafted tokens that are fastest, and throughput over plain decoding; in brackets what one more verified\n\
            token costs, where a token of plain decoding costs 1. A roofline, nothing measured.\n"
    };
    Ok(crate::output::print(&text)?)
}

impl Args {
    fn target(&self) -> anyhow::Result<Target> {
        let name = self.model.display();
        if self.model.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
            return match serde_yaml::from_str(&atomic::read_text(&self.model)?) {
                Ok(_) if self.expert_parallel != 1 => {
                    usage!("--expert-parallel: {name} says it itself, as `expert_parallel`")
                }
                Ok(target) => match Target::problem(&target) {
                    Some(problem) => usage!("{name}: {problem}"),
                    None => Ok(target),
                },
                Err(error) => usage!("{name}: {error}"),
            };
        }
        let file = if self.model.is_dir() { self.model.join("config.json") } else { self.model.clone() };
        if !file.is_file() {
            usage!(
                "{} does not exist; give a model's folder, its config.json, or a description (.yaml)",
                file.display()
            );
        }
        let read = serde_json::from_str(&atomic::read_text(&file)?).map_err(|error| error.to_string());
        match read
            .and_then(|json| config::target(&json, self.weights.into(), f64::from(self.expert_parallel)))
        {
            Ok(target) => Ok(target),
            Err(problem) => usage!("{}: {problem}", file.display()),
        }
    }

    /// A row per acceptance and context, a column per batch.
    fn table(&self, points: &[Point]) -> (Vec<String>, Vec<Vec<String>>) {
        let batches = self.batch.iter().map(|batch| format!("B = {batch}"));
        let header = ["α, context".to_string()].into_iter().chain(batches).collect();
        let cell = |point: &Point| match point.best_length {
            0 => format!("plain ({:.2})", point.marginal),
            length => format!("{length}: {:.2} ({:.2})", point.speed_up, point.marginal),
        };
        let row = |row: &[Point]| {
            let first = format!("{}, {}", row[0].acceptance, row[0].context);
            [first].into_iter().chain(row.iter().map(cell)).collect()
        };
        (header, points.chunks(self.batch.len()).map(row).collect())
    }

    fn document(&self, points: &[Point]) -> anyhow::Result<Document> {
        let (header, rows) = self.table(points);
        let words = format!(
            "{} on {}. Each cell: drafted tokens that are fastest, throughput over plain decoding, and in brackets what one more verified token \
             costs, where a token of plain decoding costs 1. A roofline, nothing measured.",
            self.model.display(),
            self.hardware
        );
        let blocks = vec![
            Block::Paragraph(words),
            Block::Table(header, rows),
            Block::Heading("Speed-up of the best length"),
            Block::Plot(
                "speed-up",
                self.plot(
                    "Speed-up of the best length, by requests",
                    "throughput over plain",
                    points,
                    |point| point.speed_up,
                )?,
            ),
            Block::Heading("Cost of another token"),
            Block::Plot(
                "marginal",
                self.plot(
                    "What one more verified token costs, by requests",
                    "tokens of plain decoding",
                    points,
                    |point| point.marginal,
                )?,
            ),
        ];
        Ok(Document { title: "What speculation costs".into(), blocks })
    }

    fn plot(
        &self,
        title: &'static str,
        label: &'static str,
        points: &[Point],
        of: fn(&Point) -> f64,
    ) -> anyhow::Result<Plot> {
        let names: Vec<String> = points
            .chunks(self.batch.len())
            .map(|row| format!("α {}, {}", row[0].acceptance, row[0].context))
            .collect();
        let keys: Vec<_> =
            names.iter().enumerate().map(|(index, name)| (name.as_str(), SeriesStyle::nth(index))).collect();
        let log = |batch: u32| f64::from(batch).log2();
        let most = self.batch.iter().copied().max().unwrap_or(1);
        let highest = points.iter().map(of).fold(1.0, f64::max) * 1.05;
        Plot::draw(title, (240 + 110 * keys.len() as u32, 360), |canvas| {
            let area = heading(canvas, title, &keys)?;
            let x = Axis::doublings("log2 of requests decoded at once", f64::from(most));
            let mut chart = chart(&area, x, Axis::values(label, 0.0..highest, 7))?;
            for (index, row) in points.chunks(self.batch.len()).enumerate() {
                series(
                    &mut chart,
                    row.iter().map(|point| (log(point.batch), of(point))),
                    SeriesStyle::nth(index),
                )?;
            }
            Ok(())
        })
    }
}

fn hardware(name: &str) -> anyhow::Result<Hardware> {
    if let Some((_, known)) = HARDWARE.iter().find(|(known, _)| *known == name) {
        return Ok(*known);
    }
    let names = HARDWARE.map(|(name, _)| name).join(", ");
    match fs::read_to_string(Path::new(name)) {
        Ok(text) => match serde_yaml::from_str(&text) {
            Ok(hardware) => match Hardware::problem(&hardware) {
                Some(problem) => usage!("--hardware {name}: {problem}"),
                None => Ok(hardware),
            },
            Err(error) => usage!("--hardware {name}: {error}"),
        },
        Err(error) => usage!("--hardware {name}: neither one of {names} nor a file ({error})"),
    }
}
