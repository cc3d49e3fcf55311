//! `economics`: computes the cost of a speculated token on an accelerator by batch and context, and
//! the best draft length.

mod config;

use std::path::{Path, PathBuf};

use deepspec_core::cli::{self, Verbosity};
use deepspec_core::{atomic, env, usage};
use deepspec_cost::economics::{Draft, Hardware, Load, Precision, Target};
use deepspec_hub::{HubError, model_dir};
use serde::Serialize;
use serde_json::Value;

use crate::plot::{Axis, Plot, SeriesStyle, chart, heading, series};
use crate::report::{Block, Document, write_document};
use crate::table::Table;

/// Maximum number of drafted tokens.
const MOST: u32 = 64;

/// Arguments of `economics`.
#[derive(clap::Args)]
pub struct Args {
    /// A model's folder, config.json or hub id, or a description of its layers (.yaml; `economics --print-model` writes one to start from)
    #[arg(value_name = "MODEL")]
    model: String,
    /// Accelerator: b200, h200, h100, a100, mi300x or l40s, or a file (.yaml) with `bandwidth`, `bf16`, `fp8`, `fp4` and `link` per second
    #[arg(long, default_value = "h100", value_name = "NAME|FILE")]
    hardware: String,
    /// Storage format of the weights of a config.json
    #[arg(long, value_enum, default_value_t = WeightFormat::Bf16)]
    weights: WeightFormat,
    /// Accelerators that share the experts of each layer
    #[arg(long, default_value_t = 1, value_name = "N")]
    expert_parallel: u32,
    /// Sequences decoded at once, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 8, 64, 512])]
    batch_size: Vec<u32>,
    /// Tokens in the KV cache of each sequence, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1024, 8192, 65536])]
    context_len: Vec<u32>,
    /// Probability that a drafted token is accepted given those before it, by commas
    #[arg(long, value_name = "P", value_delimiter = ',', default_values_t = [0.6, 0.75, 0.9])]
    acceptance: Vec<f64>,
    /// A drafter's folder, config.json or hub id, or a description of its layers (.yaml), for its own roofline; instead of --draft-share
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["draft_share", "draft_weights"])]
    draft_model: Option<String>,
    /// The drafter of --draft-model drafts one token after the other. The config.json of Eagle3 and of whole models implies this flag
    #[arg(long, requires = "draft_model")]
    sequential_draft: bool,
    /// Weights of the drafter, which are read once for a block (parallel drafters); instead of --draft-share
    #[arg(long, value_name = "N", conflicts_with = "draft_share")]
    draft_weights: Option<f64>,
    /// Share of a plain step that drafting a token costs, of drafters that run once per token. For those that draft a block at once (DSpark,
    /// DFlash, DFlash 2) give --draft-model or --draft-weights
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

/// Storage format of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum WeightFormat {
    /// 16 bits.
    Bf16,
    /// 8 bits.
    Fp8,
    /// 4 bits with scales.
    Fp4,
}

impl From<WeightFormat> for Precision {
    fn from(stored: WeightFormat) -> Self {
        match stored {
            WeightFormat::Bf16 => Self::Bf16,
            WeightFormat::Fp8 => Self::Fp8,
            WeightFormat::Fp4 => Self::Fp4,
        }
    }
}

/// A point of the map.
#[derive(Debug, Clone, Copy, Serialize)]
struct Point {
    acceptance: f64,
    context: u32,
    batch: u32,
    /// Number of drafted tokens with the highest throughput.
    best_length: u32,
    /// Throughput with `best_length` over that of plain decoding.
    speed_up: f64,
    /// Cost of one more verified token per request, relative to a token of plain decoding.
    marginal: f64,
    /// Tokens per second of plain decoding, over all requests.
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
/// Usage errors: an unknown model or accelerator, or a config that lacks a value. Also fails if an
/// output cannot be written.
pub fn run(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    if args.expert_parallel == 0 {
        usage!("--expert-parallel must be at least 1");
    }
    if args.print_model {
        return print_model(args, verbosity);
    }
    let model = local_model_path(&args.model, verbosity)?;
    let (target, _) = args.described(&model, f64::from(args.expert_parallel))?;
    let limit = context_limit(&model)?;
    if let Some(context) =
        args.context_len.iter().find(|&&context| limit.is_some_and(|limit| context > limit))
    {
        tracing::warn!(
            "--context-len {context}: {} holds {} tokens (max_position_embeddings)",
            args.model,
            limit.unwrap_or_default()
        );
    }
    let hardware = match deepspec_cost::estimate::read_hardware(&args.hardware) {
        Ok(hardware) => hardware,
        Err(error) => usage!("{error}"),
    };
    let positive = |counts: &[u32]| !counts.is_empty() && !counts.contains(&0);
    if !positive(&args.batch_size) || !positive(&args.context_len) {
        usage!("--batch-size and --context-len must be at least 1");
    }
    if let Some(share) = args.acceptance.iter().find(|share| !(0.0..=1.0).contains(*share)) {
        usage!("--acceptance {share}: expected a probability");
    }
    let cost = args.draft_weights.unwrap_or(args.draft_share);
    if !(cost.is_finite() && cost >= 0.0) {
        usage!("--draft-weights and --draft-share must be at least 0");
    }
    let draft = match (&args.draft_model, args.draft_weights) {
        (Some(path), _) => {
            let (model, at_once) = args.described(&local_model_path(path, verbosity)?, 1.0)?;
            Draft::Model { model, at_once: at_once && !args.sequential_draft }
        }
        (None, Some(weights)) => Draft::PerBlock { weights, precision: args.weights.into() },
        (None, None) => Draft::PerToken(args.draft_share),
    };
    let mut points = vec![];
    for &acceptance in &args.acceptance {
        for &context in &args.context_len {
            for &batch in &args.batch_size {
                let load = Load { requests: f64::from(batch), context: f64::from(context), acceptance };
                let (best_length, speed_up) = target.best_length(&hardware, &draft, load, MOST);
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
        crate::output::check_fresh(dir, "economics.json", &["report.md", "report.html"], true)?;
        let is_whole = dir.join("report.html").is_file();
        if args.overwrite || !crate::output::is_there(&file, &map)? || !is_whole {
            atomic::create_dir(dir)?;
            write_document(dir, &args.document(&map)?)?;
            atomic::write_json(&file, &map)?;
        }
    }
    let text = if args.json {
        serde_json::to_string_pretty(&map)? + "\n"
    } else {
        let (header, rows) = args.table(&map.points);
        let mut table = Table::new(header);
        rows.into_iter().for_each(|row| table.row(row));
        format!(
            "{}\n\n{}\n{}\n",
            cli::wrapped("", 0, &args.assumptions(&map.draft)),
            table.render(),
            cli::wrapped(
                "",
                0,
                "Each cell: drafted tokens that are fastest, and throughput over plain decoding; in brackets what one more verified token \
                 costs, where a token of plain decoding costs 1. A roofline, nothing measured."
            )
        )
    };
    Ok(crate::output::print(&text)?)
}

impl Args {
    /// The layers from a folder, a config.json or a .yaml file, and whether whole blocks run
    /// through them at once.
    fn described(&self, model: &Path, expert_parallel: f64) -> anyhow::Result<(Target, bool)> {
        let name = model.display();
        if is_description(model) {
            return match serde_yaml::from_str(&atomic::read_text(model)?) {
                Ok(_) if expert_parallel != 1.0 => {
                    usage!("--expert-parallel: {name} says it itself, as `expert_parallel`")
                }
                Ok(target) => match Target::problem(&target) {
                    Some(problem) => usage!("{name}: {problem}"),
                    None => Ok((target, true)),
                },
                Err(error) => usage!("{name}: {error}"),
            };
        }
        let (file, json) = config_json(model)?;
        if let Some(key) = config::unread(&json).first() {
            usage!(
                "{}: `{key}` speaks of layers that are not known here; describe them in a .yaml instead, which --print-model begins",
                file.display()
            );
        }
        match config::target(&json, self.weights.into(), expert_parallel) {
            Ok(target) => Ok((target, config::drafts_blocks(&json))),
            Err(problem) => usage!("{}: {problem}", file.display()),
        }
    }

    /// A row per acceptance and context, a column per batch.
    fn table(&self, points: &[Point]) -> (Vec<String>, Vec<Vec<String>>) {
        let batches = self.batch_size.iter().map(|batch| format!("B = {batch}"));
        let header = ["α, context".to_string()].into_iter().chain(batches).collect();
        let cell = |point: &Point| match point.best_length {
            0 => format!("plain ({:.2})", point.marginal),
            length => format!("{length}: {:.2} ({:.2})", point.speed_up, point.marginal),
        };
        let row = |row: &[Point]| {
            let first = format!("{}, {}", row[0].acceptance, row[0].context);
            [first].into_iter().chain(row.iter().map(cell)).collect()
        };
        (header, points.chunks(self.batch_size.len()).map(row).collect())
    }

    /// The assumptions of the estimate, in a sentence.
    fn assumptions(&self, draft: &Draft) -> String {
        let drafting = match (draft, &self.draft_model) {
            (Draft::PerToken(share), _) => format!(
                "drafting a token costs {share} of a plain step, as of a drafter that runs once per token (--draft-share); for one that drafts \
                 whole blocks give --draft-model or --draft-weights"
            ),
            (Draft::PerBlock { weights, .. }, _) => {
                format!("drafting a block reads {weights:.3e} weights once (--draft-weights)")
            }
            (Draft::Model { at_once, .. }, model) => format!(
                "drafting is the roofline of {}, {}",
                model.as_deref().unwrap_or("the drafter"),
                if *at_once { "a whole block at once" } else { "one token after the other" }
            ),
        };
        format!("{} on {}; {drafting}.", self.model, self.hardware)
    }

    fn document(&self, map: &Map<'_>) -> anyhow::Result<Document> {
        let points = &map.points;
        let (header, rows) = self.table(points);
        let words = format!(
            "{} Each cell: drafted tokens that are fastest, throughput over plain decoding, and in brackets what one more verified token \
             costs, where a token of plain decoding costs 1. A roofline, nothing measured.",
            self.assumptions(&map.draft)
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
            .chunks(self.batch_size.len())
            .map(|row| format!("α {}, {}", row[0].acceptance, row[0].context))
            .collect();
        let keys: Vec<_> =
            names.iter().enumerate().map(|(index, name)| (name.as_str(), SeriesStyle::nth(index))).collect();
        let log = |batch: u32| f64::from(batch).log2();
        let most = self.batch_size.iter().copied().max().unwrap_or(1);
        let highest = points.iter().map(of).fold(1.0, f64::max) * 1.05;
        Plot::draw(title, (240 + 110 * keys.len() as u32, 360), |canvas| {
            let area = heading(canvas, title, &keys)?;
            let x = Axis::doublings("requests decoded at once", f64::from(most));
            let mut chart = chart(&area, x, Axis::values(label, 0.0..highest, 7))?;
            for (index, row) in points.chunks(self.batch_size.len()).enumerate() {
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

/// Prints the description of the model's layers, after comments on the keys that were not read.
fn print_model(args: &Args, verbosity: Verbosity) -> anyhow::Result<()> {
    let model = local_model_path(&args.model, verbosity)?;
    if is_description(&model) {
        usage!("--print-model: {} is a description already", args.model);
    }
    let (file, json) = config_json(&model)?;
    let target = match config::target(&json, args.weights.into(), f64::from(args.expert_parallel)) {
        Ok(target) => target,
        Err(problem) => usage!("{}: {problem}", file.display()),
    };
    let unread = config::unread(&json)
        .into_iter()
        .map(|key| format!("# `{key}` of config.json is not read: change the layers that it speaks of.\n"));
    Ok(crate::output::print(&(unread.collect::<String>() + &serde_yaml::to_string(&target)?))?)
}

/// Path of a model: the given path, or the download of a hub id.
fn local_model_path(model: &str, verbosity: Verbosity) -> anyhow::Result<PathBuf> {
    let path = env::expand_home(model);
    if path.exists() || is_description(&path) || path.extension().is_some_and(|extension| extension == "json")
    {
        return Ok(path);
    }
    model_dir(model, None, verbosity).map_err(HubError::report)
}

fn is_description(model: &Path) -> bool {
    model.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// Context length in the model's config.json, if it is given.
fn context_limit(model: &Path) -> anyhow::Result<Option<u32>> {
    if is_description(model) {
        return Ok(None);
    }
    let (_, json) = config_json(model)?;
    let limit =
        [&json, &json["text_config"]].into_iter().find_map(|of| of["max_position_embeddings"].as_u64());
    Ok(limit.and_then(|limit| u32::try_from(limit).ok()))
}

/// The config.json of a folder, or that file itself.
fn config_json(model: &Path) -> anyhow::Result<(PathBuf, Value)> {
    let file = if model.is_dir() { model.join("config.json") } else { model.to_path_buf() };
    if !file.is_file() {
        usage!(
            "{} does not exist; give a model's folder, its config.json, or a description (.yaml)",
            file.display()
        );
    }
    match serde_json::from_str(&atomic::read_text(&file)?) {
        Ok(json) => Ok((file, json)),
        Err(error) => usage!("{}: {error}", file.display()),
    }
}
