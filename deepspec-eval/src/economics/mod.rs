//! `economics`: computes the cost of a speculated token on an accelerator by batch and context, and
//! the best draft length.

mod config;
mod hybrid;

use std::path::{Path, PathBuf};

use deepspec_core::cli::{self, Verbosity};
use deepspec_core::{atomic, env, usage};
use deepspec_cost::economics::{DraftCost, Hardware, LoadPoint, Precision, Target};
use deepspec_hub::{HubError, model_dir};
use serde::Serialize;
use serde_json::Value;

use crate::explorer::{EXPLORER_FILE, Explorer};
use crate::plot::{Axis, Plot, SeriesStyle, draw_axes, draw_series, draw_title_and_legend};
use crate::report::{Block, Document, write_document};
use crate::table::Table;

/// Maximum number of drafted tokens.
const MAX_DRAFT_LENGTH: u32 = 64;

/// Most drafted tokens on the page with sliders.
const EXPLORER_DRAFT_LENGTH: usize = 16;

/// Arguments of `economics`.
#[derive(clap::Args)]
pub struct Args {
    /// A model's folder, GGUF file, config.json or hub id, or a description of its layers (.yaml; `economics --print-model` writes one to start from)
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
    /// The drafter of --draft-model drafts one token after the other. The config.json of Eagle3, MTP-1 and whole models implies this flag
    #[arg(long, requires = "draft_model")]
    sequential_draft: bool,
    /// Weights of the drafter, which are read once for a block (parallel drafters); instead of --draft-share
    #[arg(long, value_name = "N", conflicts_with = "draft_share")]
    draft_weights: Option<f64>,
    /// Share of a plain step that drafting a token costs, of drafters that run once per token. For those that draft a block at once (DSpark,
    /// DFlash, DFlash 2, Domino, xPress, P-EAGLE) give --draft-model or --draft-weights
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    draft_share: f64,
    /// Folder for economics.json, report.md, report.html, explorer.html (a page with sliders) and plots
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

/// Costs at one acceptance rate, context length and batch size.
#[derive(Debug, Clone, Copy, Serialize)]
struct CostPoint {
    acceptance: f64,
    context: u32,
    batch: u32,
    /// Number of drafted tokens with the highest throughput.
    best_length: u32,
    /// Throughput with `best_length` over that of plain decoding.
    speed_up: f64,
    /// Cost of one more verified token per request, divided by the cost of a token of plain decoding.
    marginal: f64,
    /// Tokens per second of plain decoding, over all requests.
    plain_tokens_per_second: f64,
}

#[derive(Serialize)]
struct CostMap<'a> {
    format: &'static str,
    format_version: u64,
    tool_version: &'static str,
    target: &'a Target,
    hardware: Hardware,
    draft: DraftCost,
    points: Vec<CostPoint>,
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
    let (target, _) = args.read_layers(&model, f64::from(args.expert_parallel))?;
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
            let (model, at_once) = args.read_layers(&local_model_path(path, verbosity)?, 1.0)?;
            DraftCost::Model { model, at_once: at_once && !args.sequential_draft }
        }
        (None, Some(weights)) => DraftCost::PerBlock { weights, precision: args.weights.into() },
        (None, None) => DraftCost::PerToken(args.draft_share),
    };
    let mut points = vec![];
    for &acceptance in &args.acceptance {
        for &context in &args.context_len {
            for &batch in &args.batch_size {
                let load = LoadPoint { requests: f64::from(batch), context: f64::from(context), acceptance };
                let (best_length, speed_up) =
                    target.best_draft_length(&hardware, &draft, load, MAX_DRAFT_LENGTH);
                points.push(CostPoint {
                    acceptance,
                    context,
                    batch,
                    best_length,
                    speed_up,
                    marginal: target.marginal_cost(&hardware, load, 1.0),
                    plain_tokens_per_second: load.requests
                        / target.step_seconds(&hardware, load.requests, 1.0, load.context),
                });
            }
        }
    }
    let map = CostMap {
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
        let others = ["report.md", "report.html", EXPLORER_FILE];
        crate::output::check_fresh(dir, "economics.json", &others, true)?;
        let is_whole = dir.join("report.html").is_file();
        if args.overwrite || !crate::output::is_already_written(&file, &map)? || !is_whole {
            atomic::create_dir(dir)?;
            write_document(dir, &args.document(&map)?)?;
            args.write_explorer(dir, &map)?;
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
            cli::wrap_paragraph("", 0, &args.assumptions(&map.draft)),
            table.render(),
            cli::wrap_paragraph(
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
    fn read_layers(&self, model: &Path, expert_parallel: f64) -> anyhow::Result<(Target, bool)> {
        let name = model.display();
        if is_layer_description(model) {
            return match serde_yaml::from_str(&atomic::read_text(model)?) {
                Ok(_) if expert_parallel != 1.0 => {
                    usage!("--expert-parallel: {name} says it itself, as `expert_parallel`")
                }
                Ok(target) => match Target::describe_invalid_value(&target) {
                    Some(problem) => usage!("{name}: {problem}"),
                    None => Ok((target, true)),
                },
                Err(error) => usage!("{name}: {error}"),
            };
        }
        let (file, json) = config_json(model)?;
        if let Some(key) = config::unread_keys(&json).first() {
            usage!(
                "{}: `{key}` speaks of layers that are not known here; describe them in a .yaml instead, which --print-model begins",
                file.display()
            );
        }
        match config::read_target(&json, self.weights.into(), expert_parallel) {
            Ok(target) => Ok((target, config::drafts_blocks(&json))),
            Err(problem) => usage!("{}: {problem}", file.display()),
        }
    }

    /// A row per acceptance and context, a column per batch.
    fn table(&self, points: &[CostPoint]) -> (Vec<String>, Vec<Vec<String>>) {
        let batches = self.batch_size.iter().map(|batch| format!("B = {batch}"));
        let header = ["α, context".to_string()].into_iter().chain(batches).collect();
        let cell = |point: &CostPoint| match point.best_length {
            0 => format!("plain ({:.2})", point.marginal),
            length => format!("{length}: {:.2} ({:.2})", point.speed_up, point.marginal),
        };
        let row = |row: &[CostPoint]| {
            let first = format!("{}, {}", row[0].acceptance, row[0].context);
            [first].into_iter().chain(row.iter().map(cell)).collect()
        };
        (header, points.chunks(self.batch_size.len()).map(row).collect())
    }

    /// The assumptions of the estimate, in a sentence.
    fn assumptions(&self, draft: &DraftCost) -> String {
        let drafting = match (draft, &self.draft_model) {
            (DraftCost::PerToken(share), _) => format!(
                "drafting a token costs {share} of a plain step, as of a drafter that runs once per token (--draft-share); for one that drafts \
                 whole blocks give --draft-model or --draft-weights"
            ),
            (DraftCost::PerBlock { weights, .. }, _) => {
                format!("drafting a block reads {weights:.3e} weights once (--draft-weights)")
            }
            (DraftCost::Model { at_once, .. }, model) => format!(
                "drafting is the roofline of {}, {}",
                model.as_deref().unwrap_or("the drafter"),
                if *at_once { "a whole block at once" } else { "one token after the other" }
            ),
        };
        format!("{} on {}; {drafting}.", self.model, self.hardware)
    }

    /// Writes the page with sliders, for the first context length and the middle acceptance.
    fn write_explorer(&self, dir: &Path, map: &CostMap<'_>) -> anyhow::Result<()> {
        let context = f64::from(self.context_len[0]);
        let acceptance = self.acceptance[self.acceptance.len() / 2];
        let most = self.batch_size.iter().copied().max().unwrap_or(1);
        let mut requests: Vec<f64> = std::iter::successors(Some(1_u32), |each| each.checked_mul(2))
            .take_while(|&each| each < most)
            .map(f64::from)
            .collect();
        requests.push(f64::from(most));
        let page = Explorer::new(
            requests,
            EXPLORER_DRAFT_LENGTH,
            vec![acceptance],
            |requests, length| map.target.step_seconds(&map.hardware, requests, 1.0 + length as f64, context),
            |requests, length| {
                map.target.draft_seconds(&map.hardware, &map.draft, requests, length as f64, context)
            },
        );
        let assumptions = self.assumptions(&map.draft);
        page.write(dir, &format!("{assumptions} A roofline at {context} tokens of context and an acceptance of {acceptance}; nothing is measured."))
    }

    fn document(&self, map: &CostMap<'_>) -> anyhow::Result<Document> {
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
        points: &[CostPoint],
        of: fn(&CostPoint) -> f64,
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
            let area = draw_title_and_legend(canvas, title, &keys)?;
            let x = Axis::log2_counts("requests decoded at once", f64::from(most));
            let mut chart = draw_axes(&area, x, Axis::linear(label, 0.0..highest, 7))?;
            for (index, row) in points.chunks(self.batch_size.len()).enumerate() {
                draw_series(
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
    if is_layer_description(&model) {
        usage!("--print-model: {} is a description already", args.model);
    }
    let (file, json) = config_json(&model)?;
    let target = match config::read_target(&json, args.weights.into(), f64::from(args.expert_parallel)) {
        Ok(target) => target,
        Err(problem) => usage!("{}: {problem}", file.display()),
    };
    let unread = config::unread_keys(&json)
        .into_iter()
        .map(|key| format!("# `{key}` of config.json is not read: change the layers that it speaks of.\n"));
    Ok(crate::output::print(&(unread.collect::<String>() + &serde_yaml::to_string(&target)?))?)
}

/// Path of a model: the given path, or the download of a hub id.
fn local_model_path(model: &str, verbosity: Verbosity) -> anyhow::Result<PathBuf> {
    let path = env::expand_home(model);
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
        // Its config.json, which is unpacked into a folder.
        return model_dir(model, None, verbosity).map_err(HubError::report);
    }
    if path.exists()
        || is_layer_description(&path)
        || path.extension().is_some_and(|extension| extension == "json")
    {
        return Ok(path);
    }
    model_dir(model, None, verbosity).map_err(HubError::report)
}

fn is_layer_description(model: &Path) -> bool {
    model.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// Context length in the model's config.json, if it is given.
fn context_limit(model: &Path) -> anyhow::Result<Option<u32>> {
    if is_layer_description(model) {
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
