"""What the gguf package reads of a file, beside the safetensors it was made from.

usage: gguf_read.py FILE.gguf CHECKPOINT.safetensors NAMES.json

NAMES says which tensor of the checkpoint each of the file's is, null for one of zeros; {"of", "pairs"} is one with the rows of so many heads in pairs,
{"config"} what a factor a plane transformers stretches the rotation of this config by. Prints the file's metadata as JSON. Its attn_factor is compared with
transformers' factor on cosines and sines.
"""

import json
import sys

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors.torch import load_file

reader = GGUFReader(sys.argv[1])
weights, names = load_file(sys.argv[2]), json.load(open(sys.argv[3]))
found = {}


def expected_of(source, shape):
    if source is None:
        return torch.zeros(shape)
    if isinstance(source, str):
        return weights[source].float()
    if "token_ids" in source:
        offsets = weights[source["token_ids"]]
        return torch.arange(len(offsets)) + offsets
    if "pairs" in source:
        whole = weights[source["of"]].float()
        heads = whole.view(source["pairs"], 2, -1, whole.shape[-1])
        return heads.swapaxes(1, 2).reshape(whole.shape)
    # Here, because it takes seconds and most files need none of it.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**json.load(open(source["config"])))
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    stretched, attention_factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu")
    written = next((field.contents() for name, field in reader.fields.items() if name.endswith(".rope.scaling.attn_factor")), 1.0)
    assert abs(written - attention_factor) < 1e-6, (written, attention_factor)
    return plain / stretched


for tensor in reader.tensors:
    ids = tensor.tensor_type == GGMLQuantizationType.I64
    values = tensor.data if ids else dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    # Dimensions are told fastest first.
    shape = [int(size) for size in reversed(tensor.shape)]
    source = names.pop(tensor.name)
    expected = expected_of(source, shape)
    assert list(expected.shape) == shape, (tensor.name, shape, expected.shape)
    values = torch.from_numpy(values.copy()).view(shape)
    # Factors are computed, all else is copied.
    same = torch.allclose(values, expected, rtol=1e-6, atol=0) if "rope" in tensor.name else torch.equal(values, expected)
    assert same, tensor.name
    found[tensor.name] = tensor.tensor_type.name
assert not names, names
fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
json.dump({"fields": fields, "tensors": found}, sys.stdout)
