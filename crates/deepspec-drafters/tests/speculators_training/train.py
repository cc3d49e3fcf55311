"""Logits, losses and gradients of converted drafters in the speculators package.

usage: train.py (CHECKPOINT INPUTS.safetensors OUTPUTS.safetensors)...

Blocks start where INPUTS says: the package draws its anchors, so the draw is replaced. Calls of heads are recorded. Options that
version 0.9 lacks are made of what it has:

- Causal blocks: its layers with a window see only the slots up to their own. The window is longer than the text.
- Attention sinks: its layers call the attention of transformers' gpt-oss.
- xPress on DFlash 2: xPress with the layers of its DFlash 2. The mask of the refiner's mixing is restored.

Eagle3 has steps in place of blocks. Its token t + 1 stands beside the states of token t, and predicts token t + 2.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core as dflash
from speculators.models.dflash2.model_definitions import Qwen3DFlash2DecoderLayer
from speculators.models.dspark import DSparkDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.xpress import XPressDraftModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

FROZEN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
WITH_SINKS = "eager_with_sinks"


class XPressOnDFlash2(XPressDraftModel):
    def _make_decoder_layer(self, config, layer_idx):
        sizes = {key: getattr(config, key) for key in ("block_size", "conv_kernel_size", "conv_group_size")}
        return Qwen3DFlash2DecoderLayer(config.transformer_layer_config, layer_idx, **sizes)


def load(checkpoint, given):
    config = SpeculatorModelConfig.from_pretrained(checkpoint)
    decoder = config.transformer_layer_config
    # The default attention is compiled for GPUs; the eager one is the same in plain operators.
    decoder._attn_implementation = "eager"
    if "causal" in given:
        decoder.layer_types = ["sliding_attention"] * decoder.num_hidden_layers
        decoder.sliding_window = 10 * given["input_ids"].shape[1]
        assert not config.sliding_window_non_causal
    on_dflash2 = getattr(config, "xpress_backbone", "dflash") == "dflash2"
    model = (XPressOnDFlash2 if on_dflash2 else SpeculatorModel).from_pretrained(checkpoint, config=config).float()
    if isinstance(model, XPressDraftModel):
        assert not config.sample_from_anchor
        # `from_pretrained` leaves this buffer uninitialised: no checkpoint holds it, and it is computed before weights are loaded.
        model.refiner_head.causal_tril = torch.tril(torch.ones(model.block_size, model.block_size))
    if "sinks" in given:
        ALL_ATTENTION_FUNCTIONS[WITH_SINKS] = eager_attention_forward
        for layer, sinks in zip(model.layers, given["sinks"], strict=True):
            # The first name is this project's, which the gradient has in the outputs; the second one is that of gpt-oss.
            layer.self_attn.attention_sink_bias = torch.nn.Parameter(sinks.clone())
            layer.self_attn.sinks = layer.self_attn.attention_sink_bias
            layer.self_attn.config._attn_implementation = WITH_SINKS
    return model


def objective(model):
    """The losses of this kind of drafter."""
    if not isinstance(model, XPressDraftModel):
        losses = {"loss_config": resolve_loss_config("kl_div", "eager")}
        has_heads = isinstance(model, DSparkDraftModel)
        return losses | ({"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]} if has_heads else {})
    return {
        "loss_config": resolve_loss_config('{"ce": 0.1, "tv": 0.9}', "eager"),
        "consistency_weight": 0.3,
        "consistency_passes": model.config.num_jacobi_passes,
        "base_anchor_weight": 0.6,
        "ce_from_data": True,
    }


def recorded(function, calls):
    def call(*args, **kwargs):
        calls.append(function(*args, **kwargs))
        return calls[-1]

    return call


def train_blocks(model, given):
    """Loss, metrics, and logits of blocks at the given anchors."""
    anchors = given["anchors"]
    dflash.select_anchors = lambda mask, count, size: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    seen, biases = [], []
    model._backbone_forward = recorded(model._backbone_forward, seen)
    for name in ("markov_head", "refiner_head"):
        if (head := getattr(model, name, None)) is not None:
            head.block_bias = recorded(head.block_bias, biases)
    _, loss, metrics = model(
        given["taps"],
        given["input_ids"],
        given["loss_mask"],
        given["last"],
        torch.zeros_like(given["input_ids"]),
        gamma=4.0,
        max_anchors=len(anchors),
        **objective(model),
    )
    base = seen[0][1].view(len(anchors), model.block_size, -1)
    return loss, metrics, {"base": base, "biased": torch.stack([base + bias for bias in biases] or [base])}


def train_steps(model, given):
    """Loss, metrics, and logits of Eagle3's steps, with the mean entropy of the target's distributions."""
    kwargs, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation="eager",
        ttt_steps=model.config.speculators_config.proposal_methods[0].speculative_tokens,
        ttt_step_loss_decay=0.8,
    )
    logits, targets = [], []
    model.lm_head.forward = recorded(model.lm_head.forward, logits)
    model.verifier_lm_head.forward = recorded(model.verifier_lm_head.forward, targets)
    tokens = given["input_ids"][:, 1:]
    # The package masks by the token that is read, the inputs by the predicted one.
    mask = torch.nn.functional.pad(given["loss_mask"][:, 2:], (0, 1))
    _, loss, metrics = model(
        given["taps"][:, :-1],
        tokens,
        torch.zeros_like(tokens),
        loss_mask=mask,
        verifier_last_hidden_states=given["last"][:, 1:],
        **kwargs,
    )
    entropies = torch.distributions.Categorical(logits=targets[0]).entropy()
    entropy = (entropies * mask).sum() / mask.sum()
    return loss, metrics, {"logits": torch.cat(logits), "entropy": entropy.reshape(1)}


def run(checkpoint, inputs, outputs):
    given = load_file(inputs)
    model = load(checkpoint, given)
    train = train_steps if isinstance(model, Eagle3DraftModel) else train_blocks
    loss, metrics, out = train(model, given)
    loss.backward()
    out |= {name: value.reshape(1).float() for name, value in metrics.items() if name.endswith(("_sum", "_total"))}
    learns = {name: tensor for name, tensor in model.named_parameters() if name not in FROZEN}
    out |= {f"grad.{name}": tensor.grad for name, tensor in learns.items()}
    save_file({name: tensor.detach().contiguous() for name, tensor in out.items()}, outputs)


for at in range(1, len(sys.argv), 3):
    run(*sys.argv[at : at + 3])
