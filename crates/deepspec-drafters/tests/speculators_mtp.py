"""Logits, losses and gradients of converted MTP-1 drafters in the speculators package.

usage: speculators_mtp.py (CHECKPOINT INPUTS.safetensors OUTPUTS.safetensors)...
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.mtp import MTPDraftModel


def run(checkpoint, inputs, outputs):
    config = SpeculatorModelConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "eager"
    config.transformer_layer_config._experts_implementation = "eager"
    model = SpeculatorModel.from_pretrained(checkpoint, config=config).float()
    assert isinstance(model, MTPDraftModel) and config.num_nextn_predict_layers == 1
    given = load_file(inputs)
    train_kwargs, _ = MTPDraftModel.get_trainer_kwargs(num_speculative_steps=config.num_speculative_steps)
    out = {}
    # One pass whose losses are those of the mask, and one per mask that has gradients.
    for name in ("uneven", "even"):
        model.zero_grad()
        logits, loss, metrics = model(
            given["input_ids"], given["last"], loss_mask=given[f"{name}_mask"], **train_kwargs
        )
        weights = train_kwargs["step_weights"]
        out[f"{name}_losses"] = torch.stack([metrics[f"loss_step_{k}"] / weight for k, weight in enumerate(weights)])
        out[f"{name}_loss"] = loss.detach().reshape(1)
        loss.backward()
    out["logits"] = torch.stack([of_step[0] for of_step in logits])
    frozen = ("embed_tokens.weight", "lm_head.weight")
    learns = {name: tensor for name, tensor in model.named_parameters() if name not in frozen}
    out |= {f"grad.{name}": tensor.grad for name, tensor in learns.items()}
    # The layer whose output is the state: as speculators' data pipeline numbers it.
    out["target_layer_ids"] = torch.tensor(model.target_layer_ids)
    save_file({name: tensor.detach().contiguous() for name, tensor in out.items()}, outputs)


for at in range(1, len(sys.argv), 3):
    run(*sys.argv[at : at + 3])
