"""Logits, losses and gradients of converted P-EAGLE drafters in the speculators package.

usage: speculators_peagle.py (CHECKPOINT INPUTS.safetensors OUTPUTS.safetensors)...

The package pairs token t + 1 with the states of token t. Its sampler runs with a fixed draw, and the rows that it returns are written.
The model gets the same rows in the order of the inputs.
"""

import sys
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.peagle import PEagleDraftModel, core
from speculators.models.peagle.data import generate_cod_sample_indices


def fixed_draw(count, **_):
    """Every second one, then the others."""
    order = torch.arange(count)
    return torch.cat((order[1::2], order[::2]))


def run(checkpoint, inputs, outputs):
    config = SpeculatorModelConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(checkpoint, config=config).float()
    assert isinstance(model, PEagleDraftModel)
    model.load_verifier_weights()
    # The given states are those after the target's final norm.
    model.verifier_norm = torch.nn.Identity()
    given = load_file(inputs)
    sampled = {}

    def given_rows(**kwargs):
        with mock.patch("torch.randperm", fixed_draw):
            sampled["sampled_anchors"], sampled["sampled_depths"] = generate_cod_sample_indices(**kwargs)
        return given["anchors"], given["depths"]

    core.generate_cod_sample_indices = given_rows
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
    depths = config.speculators_config.proposal_methods[0].speculative_tokens
    kwargs, _ = PEagleDraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", num_depths=depths
    )
    tokens = given["input_ids"][:, 1:]
    _, loss, metrics = model(
        given["taps"][:, :-1],
        tokens,
        torch.zeros_like(tokens),
        loss_mask=given["loss_mask"],
        verifier_last_hidden_states=given["last"][:, 1:],
        **kwargs,
    )
    loss.backward()
    accuracies = [metrics[f"position_{d}_acc_sum"] / metrics[f"position_{d}_acc_total"] for d in range(depths)]
    out = {"logits": seen[0][0], "loss": loss.reshape(1), "accuracy": torch.stack(accuracies)} | sampled
    frozen = ("embed_tokens.weight", "lm_head.weight")
    learns = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad and name not in frozen}
    out |= {f"grad.{name}": tensor.grad for name, tensor in learns.items()}
    save_file({name: tensor.detach().float().contiguous() for name, tensor in out.items()}, outputs)


for at in range(1, len(sys.argv), 3):
    run(*sys.argv[at : at + 3])
