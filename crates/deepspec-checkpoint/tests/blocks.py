"""Random blocks of every type, and the values that the gguf package makes of them.

usage: blocks.py OUT.gguf VALUES.bin TYPE...

Writes a tensor of 4 rows per type, called as the type is, and their float32 values one after the other.
"""

import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize

# Where blocks hold float16 numbers; everything else may be any byte.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
ROWS, BLOCKS = 4, 16

out, values, *names = sys.argv[1:]
random = np.random.default_rng(7)
writer, expected = GGUFWriter(out, "test"), []
for name in names:
    kind = GGMLQuantizationType[name]
    length, size = GGML_QUANT_SIZES[kind]
    count = ROWS * BLOCKS * (256 // length)
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    scales = {"F32": (), "BF16": (), "F16": (0,)}.get(name, HALVES.get(name, (0,)))
    for at in scales:
        blocks[:, at : at + 2] = random.normal(0, 0.1, (count, 1)).astype(np.float16).view(np.uint8)
    if name == "F32":
        blocks = random.normal(size=(count, 1)).astype(np.float32).view(np.uint8)
    if name == "BF16":
        blocks[:, 1] &= 0x3F
    data = blocks.reshape(ROWS, -1)
    expected.append(np.ascontiguousarray(dequantize(data, kind), dtype=np.float32))
    writer.add_tensor(name, data, raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
with open(values, "wb") as file:
    for each in expected:
        file.write(each.tobytes())
