//! Model of DSpark of DeepSeek-V4: stages, heads, and training's forward pass.
//!
//! A block `[anchor, mask, …]` runs through all stages at once, in m residual streams. The captured states of the target are the
//! context of every stage. The confidence head reads the hidden states before the final norm, the LM head those behind it.

use deepspec_engine::DraftSampling;
use deepspec_models::nn::{Builder, RmsNorm};
use deepspec_ops::range;
use tch::{Kind, Tensor};

use super::attention::{LatentAttention, PairRotation};
use super::experts::StageExperts;
use super::hyper_connections::{HyperConnection, StreamReader};
use super::settings::{DSparkV4Config, StageSettings};
use crate::block_common::{BlockBatch, BlockDrafter, BlockSpec, PrefixState, SlotInputs, add_bias};
use crate::draft_model::DraftModel;
use crate::dspark::{ConfidenceHead, MarkovHead, MarkovKind, MarkovSettings};

/// A DSpark drafter of DeepSeek-V4.
pub type DSparkV4 = DraftModel<DSparkV4Modules>;

/// A layer of the drafter.
pub struct Stage {
    pub(super) attention: LatentAttention,
    attn_norm: RmsNorm,
    ffn_norm: RmsNorm,
    experts: StageExperts,
    hc_attn: HyperConnection,
    hc_ffn: HyperConnection,
}

impl Stage {
    fn new(b: &Builder, name: &str, hidden: i64, settings: &StageSettings) -> Self {
        let within = |part: &str| format!("{name}.{part}");
        let norm = |part: &str| RmsNorm::new(b, &within(part), hidden, settings.rms_norm_eps);
        Self {
            hc_attn: HyperConnection::new(b, &within("hc_attn"), hidden, settings),
            attn_norm: norm("attn_norm"),
            attention: LatentAttention::new(b, &within("attn"), hidden, settings),
            hc_ffn: HyperConnection::new(b, &within("hc_ffn"), hidden, settings),
            ffn_norm: norm("ffn_norm"),
            experts: StageExperts::new(b, &within("ffn"), hidden, settings),
        }
    }

    /// The next streams of whole blocks, `[N, m, d]` to `[N, m, d]`. `attend` as in [`LatentAttention::forward`].
    pub fn forward(
        &self,
        streams: &Tensor,
        rotation: &PairRotation,
        attend: impl FnOnce(&Tensor, &Tensor) -> Tensor,
    ) -> Tensor {
        let streams = self
            .hc_attn
            .forward(streams, |x| self.attention.forward(&self.attn_norm.forward(x), rotation, attend));
        self.hc_ffn.forward(&streams, |x| self.experts.forward(&self.ffn_norm.forward(x)))
    }
}

/// Modules of DSpark of DeepSeek-V4. `fc` of [`DraftModel`] is its `main_proj`.
pub struct DSparkV4Modules {
    hidden_norm: RmsNorm,
    pub(super) stages: Vec<Stage>,
    hc_head: StreamReader,
    norm: RmsNorm,
    pub(super) markov: MarkovHead,
    confidence: ConfidenceHead,
    /// Whether the Markov bias is added to the logits. Drafting only; `predict` always adds the bias.
    use_markov_bias: bool,
}

impl DSparkV4Modules {
    /// Requests the parameters from the builder, in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &DSparkV4Config) -> Self {
        let (model, settings) = (config.model(), &config.settings);
        let (hidden, stages, rank) = (model.hidden_size, &settings.stages, settings.markov_rank);
        let norm = |name: &str| RmsNorm::new(b, name, hidden, stages.rms_norm_eps);
        let markov = MarkovSettings { kind: MarkovKind::Vanilla, rank };
        Self {
            hidden_norm: norm("hidden_norm"),
            stages: (0..model.layers.len())
                .map(|i| Stage::new(b, &format!("layers.{i}"), hidden, stages))
                .collect(),
            hc_head: StreamReader::head(b, hidden, stages),
            norm: norm("norm"),
            markov: MarkovHead::new(b, markov, model.vocab_size, hidden),
            confidence: ConfidenceHead::without_bias(b, hidden, rank),
            use_markov_bias: true,
        }
    }
}

impl DSparkV4 {
    /// Projects captured states `[T, t·d]` to the context `[T, d]`, which all stages read.
    pub(super) fn context_states(&self, taps: &Tensor) -> Tensor {
        self.modules.hidden_norm.forward(&self.fuse(taps))
    }

    /// Embeddings of tokens `[N]` as streams, `[N, m, d]`.
    pub(super) fn initial_streams(&self, tokens: &Tensor) -> Tensor {
        let embeddings = self.embed(tokens);
        let [rows, width] = [0, 1].map(|dim| embeddings.size()[dim]);
        embeddings.unsqueeze(1).expand([rows, self.stage_settings().hc_mult, width], false)
    }

    /// Hidden states `[S, B, d]` of the last stage's streams `[S·B, m, d]`, before the final norm.
    pub(super) fn read_streams(&self, streams: &Tensor) -> Tensor {
        let size = self.config().settings.blocks.block_size as i64;
        self.modules.hc_head.read(streams).unflatten(0, [-1, size])
    }

    pub(super) fn stage_settings(&self) -> &StageSettings {
        &self.config().settings.stages
    }

    /// Hidden states `[A, B, d]` of all blocks, before the final norm.
    pub fn block_states(&self, batch: &BlockBatch) -> Tensor {
        let _range = range(c"forward");
        let settings = self.stage_settings();
        let size = self.config().settings.blocks.block_size as i64;
        let (rows, exist) = batch.window_rows(settings.sliding_window);
        let (blocks, rows) = (rows.size()[0], rows.flatten(0, 1));
        // A block's own latents are always visible.
        let own = Tensor::zeros([blocks, size], (Kind::Bool, rows.device()));
        let hidden = Tensor::cat(&[exist.logical_not(), own], 1);
        let context = self.context_states(&batch.taps);
        let of_context = PairRotation::new(&batch.context_positions, settings);
        let of_blocks = PairRotation::new(&batch.block_positions, settings);
        let mut streams = self.initial_streams(&batch.block_tokens.reshape([-1]));
        for stage in &self.modules.stages {
            let context = stage.attention.latents(&context, &of_context); // [T, D]
            streams = stage.forward(&streams, &of_blocks, |queries, own| {
                let by_block = |all: &Tensor, rows: i64| all.unflatten(0, [blocks, rows]);
                let window = by_block(&context.index_select(0, &rows), settings.sliding_window);
                let latents = Tensor::cat(&[window, by_block(own, size)], 1);
                stage.attention.attend(&by_block(queries, size), &latents, Some(&hidden)).flatten(0, 1)
            });
        }
        self.read_streams(&streams)
    }
}

impl BlockDrafter for DSparkV4Modules {
    fn block_spec(config: &DSparkV4Config) -> &BlockSpec {
        &config.settings.blocks
    }

    fn has_confidence_head(_: &DSparkV4Config) -> bool {
        true
    }

    fn draft_sampling(&self) -> DraftSampling {
        match self.use_markov_bias {
            true => DraftSampling::Probabilistic,
            false => DraftSampling::Greedy,
        }
    }

    fn disable_markov_bias(&mut self) -> bool {
        self.use_markov_bias = false;
        true
    }

    fn reads_prefix(&self) -> bool {
        self.use_markov_bias
    }

    fn head_states(model: &DSparkV4, hidden: &Tensor) -> Tensor {
        model.modules.norm.forward(hidden)
    }

    fn step(model: &DSparkV4, slot: SlotInputs, state: &mut PrefixState) -> (Tensor, Option<Tensor>) {
        let (logits, e) = model.modules.markov.step(slot, state, model.modules.use_markov_bias);
        (logits, Some(e))
    }

    fn teacher_forced_features(
        model: &DSparkV4,
        hidden: &Tensor,
        previous: &Tensor,
    ) -> Option<(Tensor, Tensor)> {
        Some(model.modules.markov.teacher_forced(hidden, previous))
    }

    fn teacher_forced_logits(model: &DSparkV4, hidden: &Tensor, features: Option<&Tensor>) -> Tensor {
        let base = model.base_logits(hidden);
        match features {
            Some(features) => add_bias(base, features, model.modules.markov.w2()),
            None => base,
        }
    }

    /// `hidden` are states before the final norm.
    fn confidence_logits(model: &DSparkV4, hidden: &Tensor, embeddings: Option<&Tensor>) -> Option<Tensor> {
        Some(model.modules.confidence.forward(hidden, embeddings).to_kind(Kind::Float))
    }
}
