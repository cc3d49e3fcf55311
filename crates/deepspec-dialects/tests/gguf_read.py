"""What the gguf package reads of a file, beside the safetensors it was made from.

usage: gguf_read.py FILE.gguf CHECKPOINT.safetensors NAMES.json

NAMES says which tensor of the checkpoint each of the file's is, null for one of zeros. Prints the file's metadata as JSON.
"""

import json
import sys

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file

reader = GGUFReader(sys.argv[1])
weights, names = load_file(sys.argv[2]), json.load(open(sys.argv[3]))
found = {}
for tensor in reader.tensors:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    # Dimensions are told fastest first.
    shape = [int(size) for size in reversed(tensor.shape)]
    source = names.pop(tensor.name)
    expected = weights[source].float() if source else torch.zeros(shape)
    assert list(expected.shape) == shape, (tensor.name, shape, expected.shape)
    assert torch.equal(torch.from_numpy(values.copy()).view(shape), expected), tensor.name
    found[tensor.name] = tensor.tensor_type.name
assert not names, names
fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
json.dump({"fields": fields, "tensors": found}, sys.stdout)
