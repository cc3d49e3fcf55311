//! The drafter: decoder layers that read a token's embedding beside the state they continue.
//!
//! n columns of a step, N of step 0, H heads, G key/value heads, D head width.

use deepspec_models::nn::{AttentionSpec, Builder, DecoderLayer, Heads, LayerInput, Qkv, RmsNorm};
use deepspec_ops::range;
use tch::{Kind, Tensor};

use super::batch::{Eagle3Batch, Step, TttCall};
use super::config::Eagle3Config;
use crate::draft_model::DraftModel;

/// An Eagle3 drafter.
pub type Eagle3 = DraftModel<Eagle3Parts>;

/// Draft layers and the norm before the head.
pub struct Eagle3Parts {
    /// Layers whose attention reads the token's embedding beside the state.
    pub(super) layers: Vec<DecoderLayer>,
    norm: RmsNorm,
}

impl Eagle3Parts {
    /// Asks for the tensors in the order in which they are trained.
    pub(super) fn build(b: &Builder, config: &Eagle3Config) -> Self {
        let c = &config.decoder.model;
        let layers = c.layers.iter().enumerate();
        Self {
            layers: layers
                .map(|(i, spec)| DecoderLayer::with_embeddings(b, &format!("layers.{i}"), spec))
                .collect(),
            norm: RmsNorm::new(b, "norm", c.hidden_size, c.rms_norm_eps),
        }
    }
}

/// Keys and values that one layer made of the columns that are still needed.
#[derive(Default)]
pub(super) struct History {
    /// Of step 0, `[N, G, D]` each.
    context: Option<(Tensor, Tensor)>,
    /// Of every later step so far, `[n, G, D]` each.
    own: Vec<(Tensor, Tensor)>,
}

impl Eagle3 {
    /// Float32 logits `[.., V]` of states `[.., d]`.
    pub fn draft_logits(&self, states: &Tensor) -> Tensor {
        self.logits(&self.final_norm(states))
    }

    /// What the head reads of states `[.., d]`.
    pub(super) fn final_norm(&self, states: &Tensor) -> Tensor {
        self.parts.norm.forward(states)
    }

    /// Float32 logits `[.., V]` of normed states: the drafter's own after its norm, or the target's last ones.
    pub(super) fn logits(&self, normed: &Tensor) -> Tensor {
        self.vocabulary().logits(normed)
    }

    /// The states `[n, d]` after every step, before the final norm.
    pub fn states(&self, batch: &Eagle3Batch) -> Vec<Tensor> {
        let _range = range(c"forward");
        let mut histories: Vec<History> = self.parts.layers.iter().map(|_| History::default()).collect();
        let mut state = self.fuse(&batch.taps);
        let step = |step: &Step| {
            if let Some(kept) = &step.kept {
                state = state.index_select(0, kept);
                histories.iter_mut().for_each(|history| history.keep(kept));
            }
            let (token, rotations) = (self.embed(&step.tokens), self.rotations(&step.positions));
            for (i, (layer, history)) in self.parts.layers.iter().zip(&mut histories).enumerate() {
                let spec = &self.config().decoder.model.layers[i].attention;
                let input = LayerInput { x: &state, repeated: None, embeddings: Some(&token) };
                let mut attend = |qkv: &Qkv| {
                    history.push(qkv);
                    attend(spec, step, history, &qkv.q)
                };
                state = layer.forward(input, rotations.of(i), &mut attend, None);
            }
            state.shallow_clone()
        };
        batch.steps.iter().map(step).collect()
    }
}

impl History {
    fn keep(&mut self, kept: &Tensor) {
        for (k, v) in &mut self.own {
            (*k, *v) = (k.index_select(0, kept), v.index_select(0, kept));
        }
    }

    fn push(&mut self, qkv: &Qkv) {
        let made = (qkv.k.shallow_clone(), qkv.v.shallow_clone());
        match &self.context {
            None => self.context = Some(made),
            Some(_) => self.own.push(made),
        }
    }
}

/// `q [n, H, D]` to `[n, H·D]`: column i sees columns up to i of step 0, and itself at every later step.
fn attend(spec: &AttentionSpec, step: &Step, history: &History, q: &Tensor) -> Tensor {
    let Heads { query, key_value, dim } = spec.heads;
    let repeats = query / key_value;
    let Some((keys, values)) = &history.context else { return q.flatten(1, 2) };
    let piece = |piece: &TttCall| {
        let own = |t: &Tensor| t.narrow(0, piece.first, piece.rows);
        // What the piece sees of step 0, then its own columns of each later step: [1, G, K, D].
        let seen = |context: &Tensor, later: &dyn Fn(&(Tensor, Tensor)) -> Tensor| {
            let mut parts = vec![context.narrow(0, piece.first_key, piece.keys)];
            parts.extend(history.own.iter().map(|made| own(&later(made))));
            Tensor::cat(&parts, 0).transpose(0, 1).unsqueeze(0)
        };
        let (k, v) =
            (seen(keys, &|made| made.0.shallow_clone()), seen(values, &|made| made.1.shallow_clone()));
        // Heads that share keys become further queries: [1, G, repeats·rows, D].
        let q = own(q).view([piece.rows, key_value, repeats, dim]).permute([1, 2, 0, 3]);
        let q = q.reshape([1, key_value, repeats * piece.rows, dim]);
        let options = (Kind::Int64, q.device());
        let context = Tensor::arange(piece.keys, options).gt_tensor(&piece.columns.unsqueeze(1)); // [rows, keys]
        let others = Tensor::eye(piece.rows, options).eq(0).repeat([1, history.own.len() as i64]);
        let hidden = Tensor::cat(&[context, others], 1); // [rows, K]
        let mask =
            Tensor::zeros(hidden.size(), (q.kind(), q.device())).masked_fill(&hidden, f64::NEG_INFINITY);
        let mask = mask.repeat([repeats, 1]);
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, Some(&mask), 0.0, false, spec.scale, false);
        y.view([key_value, repeats, piece.rows, dim]).permute([2, 0, 1, 3]).reshape([piece.rows, query * dim])
    };
    Tensor::cat(&step.pieces.iter().map(piece).collect::<Vec<_>>(), 0)
}
