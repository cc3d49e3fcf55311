"""Logits, losses and gradients of converted xPress drafters in the speculators package.

usage: speculators_xpress.py (CHECKPOINT INPUTS.safetensors OUTPUTS.safetensors)...

Blocks start where INPUTS says: the package draws its anchors, so the draw is replaced. Calls of the refiner are recorded, and
the mask of its mixing is restored. The xPress of version 0.9 has the layers of DFlash only. On DFlash 2 it runs with the layers of
the same package's DFlash 2.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core as dflash
from speculators.models.dflash2.model_definitions import Qwen3DFlash2DecoderLayer
from speculators.models.xpress import XPressDraftModel

FROZEN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


class XPressOnDFlash2(XPressDraftModel):
    def _make_decoder_layer(self, config, layer_idx):
        sizes = {key: getattr(config, key) for key in ("block_size", "conv_kernel_size", "conv_group_size")}
        return Qwen3DFlash2DecoderLayer(config.transformer_layer_config, layer_idx, **sizes)


def run(checkpoint, inputs, outputs):
    config = SpeculatorModelConfig.from_pretrained(checkpoint)
    # The default attention is compiled for GPUs; the eager one is the same in plain operators.
    config.transformer_layer_config._attn_implementation = "eager"
    on_dflash2 = getattr(config, "xpress_backbone", "dflash") == "dflash2"
    kind = XPressOnDFlash2 if on_dflash2 else SpeculatorModel
    model = kind.from_pretrained(checkpoint, config=config).float()
    assert isinstance(model, XPressDraftModel) and not config.sample_from_anchor
    # `from_pretrained` leaves this buffer uninitialised: no checkpoint holds it, and it is computed before weights are loaded.
    shape = model.block_size, model.block_size
    model.refiner_head.causal_tril = torch.tril(torch.ones(shape))
    given = load_file(inputs)
    anchors = given["anchors"]
    dflash.select_anchors = lambda mask, count, size: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    seen, biases = [], []
    backbone, refine = model._backbone_forward, model.refiner_head.block_bias

    def recorded_backbone(*args, **kwargs):
        seen.append(backbone(*args, **kwargs))
        return seen[-1]

    def recorded_bias(*args, **kwargs):
        biases.append(refine(*args, **kwargs))
        return biases[-1]

    model._backbone_forward, model.refiner_head.block_bias = recorded_backbone, recorded_bias
    ids, length = given["input_ids"], given["input_ids"].shape[1]
    _, loss, metrics = model(
        given["taps"],
        ids,
        given["loss_mask"],
        given["last"],
        torch.zeros(1, length, dtype=torch.long),
        loss_config=resolve_loss_config('{"ce": 0.1, "tv": 0.9}', "eager"),
        gamma=4.0,
        max_anchors=len(anchors),
        consistency_weight=0.3,
        consistency_passes=config.num_jacobi_passes,
        base_anchor_weight=0.6,
        ce_from_data=True,
    )
    loss.backward()
    base = seen[0][1].view(len(anchors), model.block_size, -1)
    out = {"base": base, "rounds": torch.stack([base + bias for bias in biases[1:]]), "forced": base + biases[0]}
    out |= {name: value.reshape(1).float() for name, value in metrics.items() if name.endswith(("_sum", "_total"))}
    learns = {name: tensor for name, tensor in model.named_parameters() if name not in FROZEN}
    out |= {f"grad.{name}": tensor.grad for name, tensor in learns.items()}
    save_file({name: tensor.detach().contiguous() for name, tensor in out.items()}, outputs)


for at in range(1, len(sys.argv), 3):
    run(*sys.argv[at : at + 3])
