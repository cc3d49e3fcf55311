//! The doctor's report: measurements, the likeliest cause, and advice.

use std::fmt::Write;
use std::path::Path;

use deepspec_checkpoint::{Engine, Risk, Target, risks};
use deepspec_drafters::open_checkpoint;
use deepspec_models::ModelError;
use serde::Serialize;

use super::decode::PromptRun;
use super::score::Rise;

/// The least rise of the accepted length that counts, absolute and relative to the accepted drafted
/// tokens.
const MIN_RISE: f64 = 0.1;
const MIN_RELATIVE_RISE: f64 = 0.2;
/// Trials within this difference are ties. The report names the first of them, because trials are
/// in the order of how common their causes are.
const TIE_MARGIN: f64 = 0.05;
/// A smaller rise, down to [`TIE_MARGIN`], counts if the overlap of the distributions rises by this
/// many standard errors. If layer ids are off by one, some drafters lose little accepted length,
/// but lose it on nearly every prompt.
const CLEAR_RISE_STD_ERRORS: f64 = 3.0;
/// Two accepted lengths from decoding differ clearly if they are this many standard errors apart.
const CLEAR_DECODED_STD_ERRORS: f64 = 3.0;

/// Causes of a low accepted length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The drafter was trained for another target.
    Target,
    /// The drafter's token ids mean other tokens.
    Vocabulary,
    /// The drafter's embedding or LM head differs from the target's.
    #[serde(rename = "ends")]
    EmbedAndHead,
    /// The drafter reads layers that it was not trained on.
    Taps,
    /// The last layer's hidden state is read on the wrong side of the final norm.
    FinalNorm,
    /// The mask token differs from that of training.
    MaskToken,
    /// The slots of a block predict other positions than in training.
    Slots,
    /// The slots of a block see others than in training.
    BlockMask,
    /// The RoPE settings differ from those of training.
    Rope,
    /// Thinking or the system message differs from training.
    Template,
    /// The confidence head is miscalibrated.
    Confidence,
}

impl Cause {
    fn description(self) -> &'static str {
        match self {
            Self::Target => "another target",
            Self::Vocabulary => "another vocabulary",
            Self::EmbedAndHead => "embedding or head not the target's",
            Self::Taps => "wrong target layers",
            Self::FinalNorm => "state before or after the final norm",
            Self::MaskToken => "wrong mask token",
            Self::Slots => "other slot convention",
            Self::BlockMask => "other attention within a block",
            Self::Rope => "other RoPE settings",
            Self::Template => "prompts unlike those of training",
            Self::Confidence => "confidence head off its mark",
        }
    }

    fn advice(self) -> &'static str {
        match self {
            Self::Target => "name the target that the drafter was trained for",
            Self::Vocabulary => "the drafter was trained with another tokenizer; name that model's target",
            Self::EmbedAndHead => {
                "copy the target's embedding and head into the checkpoint, or name the target it was trained for"
            }
            Self::Taps => "correct target_layer_ids in its config.json",
            Self::FinalNorm => {
                "its trainer captured the normed state, which this project's taps never are; train it on raw states, or without \
                 the last layer"
            }
            Self::MaskToken => "correct mask_token_id in its config.json",
            Self::Slots => {
                "name the other convention in its config.json: sample_from_anchor false for z-lab's (slot k predicts anchor+k), true \
                 or nothing for the other"
            }
            Self::BlockMask => {
                "say in its config.json which slots a slot sees: is_causal true for those before it, false for its whole block"
            }
            Self::Rope => "give its config.json the target's RoPE settings",
            Self::Template => "evaluate as it was trained, or regenerate and train on prompts like these",
            Self::Confidence => {
                "calibrate it before a confidence threshold is used; without one it does no harm"
            }
        }
    }
}

/// An observation that needed no trial.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The cause that it points to.
    pub cause: Cause,
    /// The observation, in numbers.
    pub evidence: String,
}

/// A trial: the accepted length with one setting changed.
#[derive(Debug, Clone, Serialize)]
pub struct Trial {
    /// The cause if the change helps.
    pub cause: Cause,
    /// Description of the change.
    pub what: String,
    /// Accepted length without the change.
    pub before: f64,
    /// Accepted length with the change.
    pub after: f64,
    /// Rise with its standard error. None if the two lengths were not measured on the same blocks.
    pub rise: Option<Rise>,
}

impl Trial {
    fn gain(&self) -> f64 {
        self.after - self.before
    }

    /// Whether the rise is larger than noise.
    fn is_significant(&self) -> bool {
        let clear = self.rise.is_some_and(|rise| rise.overlap > CLEAR_RISE_STD_ERRORS * rise.error);
        self.gain() > MIN_RISE.max(MIN_RELATIVE_RISE * (self.before - 1.0))
            || (clear && self.gain() > TIE_MARGIN)
    }
}

/// Everything that the doctor found.
#[derive(Debug, Default, Serialize)]
pub struct Diagnosis {
    /// τ of decoding.
    pub accepted_length: Option<f64>,
    /// Number of cycles that τ is a mean over.
    pub cycles: usize,
    /// Chat template options of the prompts.
    pub asked: String,
    /// τ estimated from teacher-forced acceptances.
    pub estimated: Option<f64>,
    /// Teacher-forced acceptance at each position.
    pub accept: Vec<f64>,
    /// Observations.
    pub findings: Vec<Finding>,
    /// Trials.
    pub trials: Vec<Trial>,
    /// The likeliest cause. None if no cause was found.
    pub cause: Option<Cause>,
    /// The conclusion in words.
    pub verdict: String,
    /// Advice on the cause.
    pub advice: String,
    /// How an engine would read the checkpoint.
    pub serving: Option<ServingReport>,
    notes: Vec<String>,
}

/// An engine's reading of the checkpoint.
#[derive(Debug, Serialize)]
pub struct ServingReport {
    engine: Engine,
    risks: Vec<Risk>,
    /// The expected accepted length in the engine if it reads all settings correctly.
    pub expected: Option<f64>,
}

impl ServingReport {
    /// Compares the checkpoint with what `engine` reads; `name` is the target's name.
    ///
    /// # Errors
    /// Fails if the checkpoint or the target is broken.
    pub fn check_engine(engine: Engine, draft: &Path, target: &Path, name: &str) -> anyhow::Result<Self> {
        let checkpoint = open_checkpoint(draft).map_err(super::super::report)?;
        let target = Target::open(target, name).map_err(super::super::report)?;
        Ok(Self { engine, risks: risks(&checkpoint, engine, &target), expected: None })
    }

    fn render(&self, text: &mut String) {
        for Risk { subject, problem, remedy } in &self.risks {
            let _ = writeln!(text, "{}: {subject}: {problem}\n  -> {remedy}", self.engine);
        }
        if let Some(expected) = self.expected {
            let _ = writeln!(
                text,
                "{}: expect an accepted length of {expected:.2} on such prompts at this temperature, where the likeliest token is \
                 drafted; much less means that something is misread",
                self.engine
            );
        }
    }
}

impl Diagnosis {
    /// The report on a drafter that does not fit the target.
    pub fn for_misfit(evidence: String) -> Self {
        let is_vocabulary = evidence.contains("vocab_size");
        let cause = if is_vocabulary { Cause::Vocabulary } else { Cause::Target };
        let mut report =
            Self { findings: vec![Finding { cause, evidence: evidence.clone() }], ..Self::default() };
        report.set_cause(cause, evidence);
        report
    }

    /// The report on a checkpoint layout with which DeepSpec cannot decode.
    pub fn for_unread_layout(why: &ModelError) -> Self {
        let advice = "what an engine makes of its files stands below; for an accepted length examine the checkpoint that it was made of, or what `convert --to reference` makes of it";
        Self { verdict: format!("not decoded with: {why}"), advice: advice.into(), ..Self::default() }
    }

    /// Records the run with the user's options.
    pub fn record_run(&mut self, base: &PromptRun) {
        self.accepted_length = Some(base.accepted_length().0);
        self.cycles = base.cycles.len();
        self.asked = base.prompt_options.description();
    }

    /// Compares a run with other options. It counts as a trial only if it is clearly better.
    pub fn compare(&mut self, base: &PromptRun, other: &PromptRun) {
        let ((before, error), (after, other_error)) = (base.accepted_length(), other.accepted_length());
        let clear = after - before > CLEAR_DECODED_STD_ERRORS * error.hypot(other_error);
        let what = format!(
            "{} instead of {}",
            other.prompt_options.description(),
            base.prompt_options.description()
        );
        if clear {
            self.trials.push(Trial { cause: Cause::Template, what, before, after, rise: None });
        } else {
            self.add_note(&format!("{what}: accepted length {after:.2}, not clearly above {before:.2}"));
        }
    }

    /// Adds a remark on the numbers.
    pub fn add_note(&mut self, text: &str) {
        self.notes.push(text.into());
    }

    /// Names the likeliest cause: first a permuted vocabulary, because it explains all other
    /// findings, then the trial with the largest rise, then a wrong embedding or head, then the
    /// confidence.
    pub fn conclude(&mut self, is_permuted: bool) {
        if is_permuted {
            let evidence = self.evidence(Cause::Vocabulary);
            return self.set_cause(Cause::Vocabulary, evidence);
        }
        let counted = || self.trials.iter().filter(|trial| trial.is_significant());
        let most = counted().map(Trial::gain).fold(0.0, f64::max);
        let likeliest = counted().find(|trial| trial.gain() >= most - TIE_MARGIN);
        if let Some(Trial { cause, what, before, after, .. }) = likeliest.cloned() {
            return self.set_cause(
                cause,
                format!("with {what} the accepted length is {after:.2} instead of {before:.2}"),
            );
        }
        if let Some(cause) = [Cause::EmbedAndHead, Cause::Confidence]
            .into_iter()
            .find(|&cause| !self.evidence(cause).is_empty())
        {
            let evidence = self.evidence(cause);
            return self.set_cause(cause, evidence);
        }
        self.verdict = "no misuse was found: nothing that was tried raises the accepted length".into();
        self.advice = "if it is low all the same, the drafter has learned too little, or these prompts are unlike its training".into();
    }

    /// The evidence for a cause.
    fn evidence(&self, cause: Cause) -> String {
        let found = self.findings.iter().filter(|finding| finding.cause == cause);
        found.map(|finding| finding.evidence.as_str()).collect::<Vec<_>>().join("; ")
    }

    fn set_cause(&mut self, cause: Cause, evidence: String) {
        self.cause = Some(cause);
        self.verdict = format!("{}: {evidence}", cause.description());
        self.advice = cause.advice().into();
    }

    /// The report as text.
    pub fn render(&self) -> String {
        let mut text = String::new();
        if let Some(length) = self.accepted_length {
            let _ =
                writeln!(text, "accepted length {length:.2} over {} cycles ({})", self.cycles, self.asked);
        }
        if let Some(estimated) = self.estimated {
            let accept: Vec<String> = self.accept.iter().map(|accept| format!("{accept:.2}")).collect();
            let _ =
                writeln!(text, "teacher-forced {estimated:.2}, acceptance by position {}", accept.join(" "));
        }
        for Finding { cause, evidence } in &self.findings {
            let _ = writeln!(text, "found: {}: {evidence}", cause.description());
        }
        for trial in &self.trials {
            let mark = if trial.is_significant() { "+" } else { " " };
            let _ = writeln!(text, "{mark} {:.2} -> {:.2}  {}", trial.before, trial.after, trial.what);
        }
        for note in &self.notes {
            let _ = writeln!(text, "  {note}");
        }
        let _ =
            writeln!(text, "likeliest cause: {}", if self.cause.is_some() { &self.verdict } else { "none" });
        if self.cause.is_none() {
            let _ = writeln!(text, "{}", self.verdict);
        }
        let _ = writeln!(text, "advice: {}", self.advice);
        if let Some(serving) = &self.serving {
            serving.render(&mut text);
        }
        text
    }
}
