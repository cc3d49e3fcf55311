#!/usr/bin/env python3
"""Rounds the matrices of a model's layers to integers of a few bits, as quantised folders hold them.

usage: round_folder.py MODEL OUT [BITS [GROUP_SIZE]]        by default 4 bits in groups of 32 inputs

Each group of inputs of a row has one scale, its greatest value over that of the integers. OUT holds the rounded values
in float32, as an engine has them after it de-quantised them. Embedding, head and norms stay as they are.
The script prints how far the matrices moved. It needs a Python with torch and safetensors.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import os
import shutil

import torch
from safetensors.torch import load_file, save_file

model, out, *rest = sys.argv[1:]
bits, group = [int(value) for value in rest] + [4, 32][len(rest) :]
partial = out + ".partial"
shutil.copytree(model, partial, ignore=shutil.ignore_patterns("*.safetensors"))
tensors = load_file(os.path.join(model, "model.safetensors"))
most, moved, whole = 2 ** (bits - 1) - 1, 0.0, 0.0
for name, tensor in tensors.items():
    tensors[name] = values = tensor.float()
    if ".layers." not in name or values.dim() != 2:
        continue
    groups = values.view(values.shape[0], -1, group)
    scale = groups.abs().amax(-1, keepdim=True) / most
    rounded = (groups / scale).nan_to_num().round().clamp(-most - 1, most) * scale
    tensors[name] = rounded.view_as(values).contiguous()
    moved += (rounded - groups).square().sum().item()
    whole += groups.square().sum().item()
save_file(tensors, os.path.join(partial, "model.safetensors"), metadata={"format": "pt"})
os.rename(partial, out)
print(f"rounded: the matrices moved by {(moved / whole) ** 0.5:.1%} of their norm")
