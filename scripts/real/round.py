#!/usr/bin/env python3
"""Rounds a model's Q4_1 matrices once more, to the values of Q4_0.

usage: round.py MODEL.gguf OUT.gguf

Q4_0 has one scale for 32 values, and no smallest one beside it. Its values are written as Q4_1, which holds them
exactly. Other tensors stay as they are. The result is another 4-bit model of these weights, rounded twice. The script
prints how far it moved.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import os
import shutil

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.quants import dequantize, quantize

model, out = sys.argv[1:]
partial = out + ".partial"
shutil.copyfile(model, partial)
moved, whole = 0.0, 0.0
for tensor in GGUFReader(partial, "r+").tensors:
    if tensor.tensor_type != Type.Q4_1:
        continue
    values = dequantize(tensor.data, Type.Q4_1)
    packed = quantize(values, Type.Q4_0)
    blocks = packed.reshape(-1, 18)
    # A block of Q4_0 is scale·(n − 8), one of Q4_1 scale·n + least.
    scale = blocks[:, :2].copy().view(np.float16)
    least = (-8 * scale.astype(np.float32)).astype(np.float16)
    tensor.data[...] = np.concatenate([blocks[:, :2], least.view(np.uint8), blocks[:, 2:]], axis=1).reshape(tensor.data.shape)
    rounded = dequantize(tensor.data, Type.Q4_1)
    assert np.array_equal(rounded, dequantize(packed, Type.Q4_0)), tensor.name
    moved += float(np.square(rounded - values).sum())
    whole += float(np.square(values).sum())
os.rename(partial, out)
print(f"rounded: the matrices moved by {(moved / whole) ** 0.5:.1%} of their norm")
