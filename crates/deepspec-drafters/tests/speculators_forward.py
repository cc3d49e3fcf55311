"""The forward of converted drafters in the speculators package.

usage: speculators_forward.py (CHECKPOINT INPUTS.safetensors OUTPUTS.safetensors)...

Blocks start where INPUTS says: the package draws its anchors, so the draw is replaced. Nothing else of it is touched.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core as dflash


def block(model, given):
    anchors = given["anchors"]
    dflash.select_anchors = lambda mask, count, size: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    ids, length = given["input_ids"], given["input_ids"].shape[1]
    hidden, logits, _, _, places = model._backbone_forward(
        given["taps"],
        ids,
        torch.ones(1, length),
        given["last"],
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=len(anchors),
    )
    shape = (len(anchors), model.block_size, -1)
    hidden, logits = hidden.view(shape), logits.view(shape)
    out = {"hidden": hidden}
    head = getattr(model, "markov_head", None)
    if head is not None:
        previous = ids[0, places].view(len(anchors), model.block_size)
        embedding = head.prev_embeddings(previous)
        logits = logits + head.block_bias(prev_token_ids=previous, hidden_states=hidden, prev_emb=embedding)
    selector = getattr(model, "candidate_selector", None)
    if selector is not None:
        previous = model._predecessor_ids(ids, places).view(len(anchors), model.block_size)
        out["candidates"], out["scores"] = selector.select(logits, hidden, previous)
    if getattr(model, "confidence_head", None) is not None:
        features = torch.cat([hidden, embedding], -1) if model.config.confidence_head_with_markov else hidden
        out["confidence"] = model.confidence_head(features)
    return out | {"logits": logits}


def steps(model, given):
    """Eagle3's first steps: in step s, token i + 1 + s beside a state of position i, logits for token i + 2 + s."""
    seen = []
    layer = model.layers[0]
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out))
    ids, length = given["input_ids"][:, 1:], given["input_ids"].shape[1] - 1
    model(given["taps"][:, :-1], ids, torch.zeros(1, length, dtype=torch.long), ttt_steps=3)
    handle.remove()
    return {f"logits of step {step}": model.lm_head(model.norm(output)) for step, output in enumerate(seen)}


def run(checkpoint, inputs, outputs):
    config = SpeculatorModelConfig.from_pretrained(checkpoint)
    # The default attention is compiled for GPUs; the eager one is the same in plain operators.
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(checkpoint, config=config).float().eval()
    given = load_file(inputs)
    with torch.no_grad():
        out = block(model, given) if hasattr(model, "block_size") else steps(model, given)
    save_file({name: tensor.float().contiguous() for name, tensor in out.items()}, outputs)


for at in range(1, len(sys.argv), 3):
    run(*sys.argv[at : at + 3])
