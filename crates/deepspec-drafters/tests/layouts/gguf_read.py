"""Compares GGUF files, as the gguf package reads them, with the safetensors that they were made from.

usage: gguf_read.py [FILE.gguf CHECKPOINT.safetensors NAMES.json]...

NAMES maps each tensor of the file to one of the checkpoint. null is a tensor of zeros. {"of", "pairs"} has the rows of so many heads in pairs. {"stack"} has
the matrices of these names. {"config"} has the factors by which transformers stretches the rotation of this config. Prints the metadata of each file as a JSON
list. The attn_factor of a file is compared with transformers' factor on cosines and sines.
"""

import json
import sys

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors.torch import load_file

def expected_of(source, shape, weights, reader):
    if source is None:
        return torch.zeros(shape)
    if isinstance(source, str):
        return weights[source].float()
    if "token_ids" in source:
        offsets = weights[source["token_ids"]]
        return torch.arange(len(offsets)) + offsets
    if "stack" in source:
        return torch.stack([weights[name].float() for name in source["stack"]])
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


def check(file, checkpoint, names):
    """Compares all tensors of a file, and returns its metadata."""
    reader, weights = GGUFReader(file), load_file(checkpoint)
    names, found = json.load(open(names)), {}
    for tensor in reader.tensors:
        ids = tensor.tensor_type == GGMLQuantizationType.I64
        values = tensor.data if ids else dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        # Dimensions are told fastest first.
        shape = [int(size) for size in reversed(tensor.shape)]
        expected = expected_of(names.pop(tensor.name), shape, weights, reader)
        assert list(expected.shape) == shape, (tensor.name, shape, expected.shape)
        values = torch.from_numpy(values.copy()).view(shape)
        # Factors are computed, all else is copied.
        same = torch.allclose(values, expected, rtol=1e-6, atol=0) if "rope" in tensor.name else torch.equal(values, expected)
        assert same, tensor.name
        found[tensor.name] = tensor.tensor_type.name
    assert not names, names
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return {"fields": fields, "tensors": found}


json.dump([check(*paths) for paths in zip(*[iter(sys.argv[1:])] * 3)], sys.stdout)
