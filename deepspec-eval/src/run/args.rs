//! Arguments of `run`, with the checks that need no files.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use deepspec_core::usage;
use deepspec_cost::policy::Policy;
use deepspec_datasets::suites::Domain;
use deepspec_drafters::Drafter;
use deepspec_engine::{DraftSampling, Sampling, VerifyRule};
use tch::Device;

use crate::results::Turns;

/// Maximum number of samples decoded at once.
const MAX_SEQUENCES: usize = 1 << 16;
/// Sequences per replica if `--replicas` is not given.
const DEFAULT_SEQUENCES_PER_REPLICA: usize = 8;
/// Maximum parameter count for several replicas by default. Larger models gain less from caches, and
/// each replica waits for memory by itself. With 16 slots on two cores, two replicas were 1.4 times as
/// fast as one engine with both threads at 6 M parameters. At 135 M parameters they were 0.86 times
/// as fast.
const MAX_REPLICA_PARAMETERS: usize = 33_000_000;

/// Arguments of `run`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder, GGUF file or hub id (owner/name, owner/name@revision) of the model whose answers are generated
    #[arg(long, value_name = "M")]
    pub target: String,
    /// Folder or hub id of a drafter checkpoint, or `none` for plain decoding, or `mtp` for the MTP layer in the target's own
    /// checkpoint. A smaller language model of the same tokenizer may be a folder, GGUF file or hub id. With --server only
    /// its name in the results
    #[arg(long, value_name = "D", required_unless_present = "server")]
    pub draft: Option<String>,
    /// Decode by the engine at this address, which serves the target with a drafter: vLLM, SGLang or llama.cpp. Figures are
    /// those of the engine. --target gives tokenizer, chat template and stop tokens, of any architecture. An API key is read
    /// from OPENAI_API_KEY
    #[arg(long, value_name = "URL")]
    pub server: Option<String>,
    /// Address of an engine that serves the same target without a drafter, for the speed-up over it
    #[arg(long, value_name = "URL", requires = "server")]
    pub baseline_server: Option<String>,
    /// Suite to score, or a JSONL file of rows like {"turns": ["…"]}; may be repeated, and adds to --domain
    #[arg(long = "suite", value_name = "NAME|FILE.jsonl")]
    pub suites: Vec<String>,
    /// Score the suites of a domain: the published ones that are there, else the smoke suite; may be repeated.
    /// Without --suite and --domain it is all domains
    #[arg(long = "domain", value_name = "DOMAIN", value_parser = domain_parser())]
    pub domains: Vec<Domain>,
    /// Folder of the suites' files
    #[arg(long, value_name = "DIR", default_value = "eval_datasets")]
    pub suites_dir: PathBuf,
    /// Score at most this many samples of each suite
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Divides the logits; 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    pub temperature: f64,
    /// Generate at most this many tokens per sample and turn
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub max_new_tokens: usize,
    /// Samples decoded at once, or requests to --server at once; changes speed and speed-up, not answers
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub max_num_seqs: usize,
    /// Engines side by side on the CPU, which share --max-num-seqs, one copy of the weights and the threads. Changes speed, not
    /// answers. By default models of at most 33 M values get one for every 8 sequences, and no more than there are threads
    #[arg(long, value_name = "N")]
    pub replicas: Option<usize>,
    /// Seeds of all random draws, by commas or by repeating the flag; every sample is answered once with each. The first one
    /// also decides which rows of a suite with more rows than published are scored
    #[arg(long = "seed", value_name = "SEED", value_delimiter = ',', default_values_t = [980_406])]
    pub seeds: Vec<u64>,
    /// Drafted tokens of a block to verify. Rules without costs: whole, all of them; fixed:K, at most K tokens; threshold:T, those
    /// before the first token of confidence below T. Rules by the --cost of a step: prefix, the tokens that pay;
    /// prefix-async, prefix with a budget that is two steps old
    #[arg(long, value_name = "S", default_value = "whole")]
    pub schedule: Policy,
    /// Short for --schedule threshold:T
    #[arg(long, value_name = "T", conflicts_with = "schedule")]
    pub confidence_threshold: Option<f64>,
    /// Time of a step by its tokens: a file that `deepspec-eval profile` or SGLang wrote, or a table (.csv)
    #[arg(long, value_name = "FILE")]
    pub cost: Option<PathBuf>,
    /// Divide the confidence logits by the temperatures that `deepspec-eval calibrate` found for this drafter
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Verify at most this many drafted tokens per cycle, or trees of this depth. Language models and assistants
    /// draft exactly this many (7 by default)
    #[arg(long, value_name = "N")]
    pub max_draft_tokens: Option<usize>,
    /// Choice of drafted tokens at temperatures above 0. Probabilistic samples from the drafter's distribution; greedy takes
    /// the likeliest token, as llama.cpp does, and vLLM by default. SGLang's rule depends on the drafter. Auto is by kind:
    /// probabilistic for DSpark with its Markov head, Domino, Eagle3, MTP-1, assistants and language models, greedy for the others
    /// and for trees. Answers follow the target's distribution either way
    #[arg(long, value_enum, value_name = "RULE", default_value_t = DraftSamplingArg::Auto)]
    pub draft_sampling: DraftSamplingArg,
    /// Rule that accepts drafted tokens. Token accepts token by token, as llama.cpp does, and vLLM and SGLang by default.
    /// Block accepts blocks as a whole, as vLLM does with `rejection_sample_method: block`, and SGLang with
    /// `--speculative-use-block-verification`. These are as many tokens or more, and no more with greedy drafts. Trees of the N
    /// likeliest paths are verified in one pass by tree:N. A node has at most 7 children, or W with tree:N:W. No release of vLLM,
    /// SGLang or llama.cpp verifies trees of block drafters. Answers follow the target's distribution under every rule
    #[arg(long, value_name = "RULE", default_value_t = VerifyRule::Token)]
    pub verify: VerifyRule,
    /// Also report the accepted length of the other --draft-sampling rule, from a second pass over the samples, above
    /// temperature 0
    #[arg(long, value_enum, value_name = "ON", default_value_t = Switch::On)]
    pub other_rule: Switch,
    /// Draft without the drafter's Markov head, to see what it contributes
    #[arg(long)]
    pub no_markov: bool,
    /// The chat template's `enable_thinking`
    #[arg(long, value_enum, value_name = "ON", default_value_t = Switch::Off)]
    pub thinking: Switch,
    /// Turns of a sample that are answered; the later ones follow the model's own answers
    #[arg(long, value_enum, default_value_t = Turns::First)]
    pub turns: Turns,
    /// System message before every prompt
    #[arg(long, value_name = "TEXT")]
    pub system_prompt: Option<String>,
    /// Where the models run: auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Dtype of the weights; auto is bfloat16 on GPUs that support it, else float32
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    pub dtype: Dtype,
    /// Do not decode the samples again without the drafter, and so measure no speed-up
    #[arg(long)]
    pub no_baseline: bool,
    /// Decode the share of worker i of n, from 0, of every suite's samples and leave the answers in the output folder. When all workers are done,
    /// the same command without --worker gathers them and writes the results
    #[arg(long, value_name = "I/N")]
    pub worker: Option<Worker>,
    /// The name of --worker in earlier versions, which counted from 1
    #[arg(long, hide = true, value_name = "I/N")]
    pub shard: Option<String>,
    /// Write a PyTorch profiler trace of five steps of the engine, after three warm-up steps, for chrome://tracing and ui.perfetto.dev.
    /// A file that exists is kept
    #[arg(long, value_name = "FILE")]
    pub torch_profile: Option<PathBuf>,
    /// Folder for results.json, report.md, report.html, plots, traces.parquet and outputs.jsonl. An evaluation that was
    /// interrupted goes on from the answers that are there
    #[arg(long, value_name = "D")]
    pub output_dir: PathBuf,
    /// Replace results that exist, and start again where an evaluation was interrupted
    #[arg(long)]
    pub overwrite: bool,
    /// Print results.json instead of tables
    #[arg(long)]
    pub json: bool,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// How drafted tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DraftSamplingArg {
    /// Default of the kind of drafter.
    Auto,
    /// Samples from the drafter's distribution.
    Probabilistic,
    /// Takes the likeliest token.
    Greedy,
}

impl DraftSamplingArg {
    /// The rule for `drafter`, or the default without one. The nodes of trees are the likeliest tokens.
    pub fn resolve(self, drafter: Option<&dyn Drafter>, verify: VerifyRule) -> DraftSampling {
        match self {
            Self::Auto if drafter.is_some() && verify.tree_budget().is_some() => DraftSampling::Greedy,
            Self::Auto => drafter.map(Drafter::draft_sampling).unwrap_or_default(),
            Self::Probabilistic => DraftSampling::Probabilistic,
            Self::Greedy => DraftSampling::Greedy,
        }
    }
}

/// Dtype of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Dtype {
    /// bfloat16 on GPUs that support it, else float32.
    Auto,
    /// 32-bit floating point.
    Float32,
    /// Brain floating point.
    Bfloat16,
}

/// Worker `index` of `count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worker {
    /// Index, counted from 0.
    pub index: usize,
    /// Number of workers, greater than `index`.
    pub count: usize,
}

impl FromStr for Worker {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        match numbers {
            Some((index, count)) if index < count => Ok(Self { index, count }),
            _ => Err("expected I/N with I from 0 to N-1, as in 0/4".into()),
        }
    }
}

impl fmt::Display for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

/// Parser of domain names; the help lists the domains that have published suites.
pub fn domain_parser() -> impl TypedValueParser<Value = Domain> {
    PossibleValuesParser::new(Domain::KNOWN.map(Domain::name)).try_map(|name| name.parse::<Domain>())
}

impl Args {
    /// The drafter's name; None for plain decoding.
    pub fn drafter_name(&self) -> Option<&str> {
        self.draft.as_deref().filter(|draft| *draft != "none")
    }

    /// Whether the drafter is the MTP layer in the target's own checkpoint.
    pub fn drafts_with_mtp_of_target(&self) -> bool {
        self.draft.as_deref() == Some("mtp") && self.server.is_none()
    }

    /// Folder to which the MTP layer of the target is written. Workers run at once, so each has its own.
    pub fn mtp_dir(&self) -> PathBuf {
        let name = self.worker.map_or_else(|| "mtp".into(), |worker| format!("mtp-{}", worker.index));
        self.output_dir.join(name)
    }

    /// Whether a second pass decodes the samples with the other draft-sampling rule (greedy or
    /// probabilistic). At temperature 0 the rules agree, and trees have no such rule, so there is no second pass.
    pub fn reports_other_rule(&self) -> bool {
        self.other_rule == Switch::On
            && !Sampling::new(self.temperature, 0).is_greedy()
            && self.verify.tree_budget().is_none()
    }

    /// The schedule that decides how much of each block is verified.
    pub fn policy(&self) -> Policy {
        self.confidence_threshold.map_or(self.schedule, Policy::Threshold)
    }

    /// Number of engines that share the sequences, for models of `values` parameters in all.
    ///
    /// # Errors
    /// A usage error if several replicas are requested on a GPU.
    pub fn replicas(&self, device: Device, threads: usize, values: usize) -> anyhow::Result<usize> {
        let is_cpu = device == Device::Cpu;
        Ok(match self.replicas {
            Some(replicas) if replicas > 1 && !is_cpu => {
                usage!("--replicas {replicas}: a GPU has one engine; replicas are for the CPU")
            }
            Some(replicas) => replicas,
            // A cost curve is of one engine that runs everything, and a profile records one engine.
            None if !is_cpu || self.policy().reads_cost() || self.torch_profile.is_some() => 1,
            None if values > MAX_REPLICA_PARAMETERS => 1,
            None => (self.max_num_seqs / DEFAULT_SEQUENCES_PER_REPLICA).clamp(1, threads.max(1)),
        })
    }

    /// Checks the arguments without reading any file.
    ///
    /// # Errors
    /// Usage errors of the arguments.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.server.is_some() {
            self.check_flags_of_server()?;
        }
        let counts = [
            ("--limit", self.limit),
            ("--max-new-tokens", Some(self.max_new_tokens)),
            ("--max-num-seqs", Some(self.max_num_seqs)),
            ("--replicas", self.replicas),
            ("--max-draft-tokens", self.max_draft_tokens),
        ];
        if let Some((flag, _)) = counts.iter().find(|(_, count)| *count == Some(0)) {
            usage!("{flag} must be at least 1");
        }
        if let Some(replicas) = self.replicas.filter(|&replicas| replicas > self.max_num_seqs) {
            usage!(
                "--replicas {replicas} for --max-num-seqs {}: every replica needs a sequence",
                self.max_num_seqs
            );
        }
        if let Some(replicas) = self.replicas.filter(|&replicas| replicas > 1 && self.policy().reads_cost()) {
            usage!(
                "--schedule {} weighs what one engine runs at once, not --replicas {replicas}; leave one of them out",
                self.policy()
            );
        }
        if let Some(replicas) = self.replicas.filter(|&replicas| replicas > 1 && self.torch_profile.is_some())
        {
            usage!(
                "--torch-profile records the steps of one engine, not of --replicas {replicas}; leave one of them out"
            );
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            usage!("--temperature must be 0 or a positive number, not {}", self.temperature);
        }
        if let Some(seed) =
            self.seeds.iter().enumerate().find_map(|(i, s)| self.seeds[..i].contains(s).then_some(s))
        {
            usage!("--seed {seed} is given twice; its answers would be the same");
        }
        if self.max_num_seqs > MAX_SEQUENCES {
            usage!("--max-num-seqs {}: expected at most {MAX_SEQUENCES}", self.max_num_seqs);
        }
        if let Some(threshold) =
            self.confidence_threshold.filter(|threshold| !(0.0..=1.0).contains(threshold))
        {
            usage!("--confidence-threshold must be between 0 and 1, not {threshold}");
        }
        self.check_drafting()?;
        if self.shard.is_some() {
            usage!(
                "--shard is called --worker now, as in regenerate and cache build: it counts from 0, so --shard 1/4 is --worker 0/4"
            );
        }
        if let Some(worker) = self.worker.filter(|_| self.overwrite) {
            usage!(
                "--overwrite with --worker {worker} would drop what the other workers decoded; empty the folder first"
            );
        }
        Ok(())
    }

    /// Refuses flags that an engine behind `--server` decides itself.
    fn check_flags_of_server(&self) -> anyhow::Result<()> {
        let of_this_program = [
            ("--dtype", self.dtype != Dtype::Auto),
            ("--device", self.device != "auto"),
            ("--schedule", self.schedule != Policy::Whole),
            ("--confidence-threshold", self.confidence_threshold.is_some()),
            ("--cost", self.cost.is_some()),
            ("--calibration", self.calibration.is_some()),
            ("--max-draft-tokens", self.max_draft_tokens.is_some()),
            ("--draft-sampling", self.draft_sampling != DraftSamplingArg::Auto),
            ("--verify", !self.verify.is_token()),
            ("--no-markov", self.no_markov),
            ("--replicas", self.replicas.is_some()),
            ("--worker", self.worker.is_some()),
            ("--torch-profile", self.torch_profile.is_some()),
        ];
        if let Some((flag, _)) = of_this_program.iter().find(|(_, given)| *given) {
            usage!(
                "{flag} is for decoding here, but --server decodes as its engine is started; leave {flag} out"
            );
        }
        if self.draft.as_deref() == Some("none") {
            usage!(
                "--draft none: --server decodes with the drafter that its engine has loaded; leave --draft out"
            );
        }
        if self.no_baseline && self.baseline_server.is_some() {
            usage!("--no-baseline measures no speed-up, --baseline-server does; leave one of them out");
        }
        Ok(())
    }

    /// Refuses flags of chains beside `--verify tree:N`.
    fn check_trees(&self) -> anyhow::Result<()> {
        if self.verify.tree_budget().is_none() {
            return Ok(());
        }
        let of_chains = [
            (
                "--draft-sampling probabilistic",
                self.draft_sampling == DraftSamplingArg::Probabilistic,
                "nodes are the drafter's likeliest tokens and not drawn",
            ),
            (
                "--confidence-threshold",
                self.confidence_threshold.is_some(),
                "confidences are about the tokens of one block",
            ),
            (
                "--schedule",
                self.schedule != Policy::Whole,
                "schedules cut blocks, and trees have a budget of nodes",
            ),
            ("--cost", self.cost.is_some(), "costs are of steps that verify blocks"),
            ("--calibration", self.calibration.is_some(), "trees read no confidences"),
        ];
        if let Some((flag, _, reason)) = of_chains.iter().find(|(_, given, _)| *given) {
            usage!("{flag} is not for --verify {}: {reason}; leave one of them out", self.verify);
        }
        Ok(())
    }

    /// Checks the flags of drafting and verification.
    fn check_drafting(&self) -> anyhow::Result<()> {
        let needs_drafter = [
            ("--confidence-threshold", self.confidence_threshold.is_some()),
            ("--schedule", self.schedule != Policy::Whole),
            ("--calibration", self.calibration.is_some()),
            ("--max-draft-tokens", self.max_draft_tokens.is_some()),
            ("--no-markov", self.no_markov),
            ("--draft-sampling", self.draft_sampling != DraftSamplingArg::Auto),
            ("--verify", !self.verify.is_token()),
        ];
        if let Some((flag, _)) =
            needs_drafter.iter().find(|(_, given)| *given && self.drafter_name().is_none())
        {
            usage!("{flag} needs a drafter, but --draft is none");
        }
        self.check_trees()?;
        match (self.policy(), &self.cost) {
            (Policy::Plain, _) => usage!("--schedule plain drafts nothing; --draft none measures that"),
            (policy, None) if policy.reads_cost() => usage!(
                "--schedule {policy} weighs tokens against the time they take: give --cost FILE, which `deepspec-eval profile` writes"
            ),
            (policy, Some(_)) if !policy.reads_cost() => usage!("--cost: --schedule {policy} reads no costs"),
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    fn args(more: &[&str]) -> Args {
        let needed = ["run", "--target", "t", "--draft", "d", "--output-dir", "/nowhere/at/all"];
        Command::parse_from(needed.iter().chain(more)).args
    }

    #[test]
    fn replicas_follow_from_sequences_threads_and_size() {
        let replicas =
            |more: &[&str], threads, values| args(more).replicas(Device::Cpu, threads, values).unwrap();
        assert_eq!(replicas(&[], 2, 6_000_000), 2);
        assert_eq!(replicas(&[], 16, 6_000_000), 2, "16 sequences are enough for two replicas");
        assert_eq!(replicas(&["--max-num-seqs", "40"], 4, 6_000_000), 4);
        assert_eq!(replicas(&["--max-num-seqs", "7"], 4, 6_000_000), 1);
        assert_eq!(replicas(&[], 2, 135_000_000), 1);
        assert_eq!(replicas(&["--torch-profile", "p.json"], 2, 6_000_000), 1);
        assert_eq!(replicas(&["--schedule", "prefix", "--cost", "c.json"], 2, 6_000_000), 1);
        assert_eq!(replicas(&["--replicas", "3"], 1, 135_000_000), 3);
        assert_eq!(args(&[]).replicas(Device::Cuda(0), 8, 6_000_000).unwrap(), 1);
        assert_eq!(args(&["--replicas", "1"]).replicas(Device::Cuda(0), 8, 6_000_000).unwrap(), 1);
    }

    #[test]
    fn replicas_that_cannot_be_are_refused() {
        let refused = |args: Args, words: &str| {
            let refusal = args.check().and_then(|()| args.replicas(Device::Cuda(0), 2, 0)).unwrap_err();
            assert!(refusal.to_string().contains(words), "{refusal}");
        };
        refused(args(&["--replicas", "0"]), "--replicas must be at least 1");
        refused(args(&["--replicas", "5", "--max-num-seqs", "4"]), "every replica needs a sequence");
        refused(args(&["--replicas", "2", "--torch-profile", "p.json"]), "one engine");
        refused(args(&["--replicas", "2", "--schedule", "prefix", "--cost", "c"]), "one engine");
        refused(args(&["--replicas", "2"]), "a GPU has one engine");
    }
}
