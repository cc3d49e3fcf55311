"""Quantises a model, and de-quantises it with packages of others.

usage: quantised_targets.py PLAIN OUT SCHEME...

PLAIN is the folder of a float32 model. OUT/SCHEME/quantised becomes the folder of the quantised one, and
OUT/SCHEME/expected that of a float32 model with the weights which compressed-tensors or transformers compute from the
former.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FLOAT8_MAX = 448.0


def float8(weight, block):
    """float8 numbers and the scales of blocks, of which the last ones may be smaller."""
    rows, columns = weight.shape
    scales = torch.tensor(
        [
            [weight[i : i + block[0], j : j + block[1]].abs().max() / FLOAT8_MAX for j in range(0, columns, block[1])]
            for i in range(0, rows, block[0])
        ]
    )
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    return (weight / spread).to(torch.float8_e4m3fn), scales


def every_float8(rows, columns):
    """All numbers of the format but NaN."""
    numbers = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
    return numbers.repeat(rows * columns // len(numbers) + 1)[: rows * columns].view(torch.float8_e4m3fn).view(rows, columns)


def by_transformers(numbers, scales):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32)


def fp8(config, weights, *, block, scale, peer=by_transformers, name="weight_scale_inv", extra=()):
    """`quant_method: fp8`. A `block` of None has a scale per tensor, or per row if `scale` makes no scalar of it."""
    stored, expected = {}, {}
    for module, weight in weights.items():
        rows, columns = weight.shape
        numbers, scales = float8(weight, block or (rows, columns))
        if module.endswith("v_proj"):
            numbers = every_float8(rows, columns)
        stored[f"{module}.weight"], stored[f"{module}.{name}"] = numbers, scale(scales).contiguous()
        for other in extra:
            stored[f"{module}.{other}"] = torch.ones(())
        expected[f"{module}.weight"] = peer(numbers, stored[f"{module}.{name}"])
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static" if extra else "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head"],
    }
    if block:
        config["quantization_config"]["weight_block_size"] = list(block)
    return stored, expected


def fp8_rows(config, weights):
    stored, expected = {}, {}
    for module, weight in weights.items():
        numbers, scales = float8(weight, (1, weight.shape[1]))
        stored[f"{module}.weight"], stored[f"{module}.weight_scale"] = numbers, scales
        expected[f"{module}.weight"] = by_transformers(numbers, scales)
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return stored, expected


def fp8_uneven(config, weights):
    """Blocks that divide neither rows nor columns."""
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

    block = (24, 20)
    peer = FP8BlockDequantizer(weight_block_size=block, dtype=torch.float32)._create_dequantized_weight
    return fp8(config, weights, block=block, scale=lambda scales: scales, peer=peer)


SCHEMES = {
    "fp8 blocks": lambda *model: fp8(*model, block=(16, 8), scale=lambda scales: scales),
    "fp8 blocks, bfloat16 scales": lambda *model: fp8(*model, block=(16, 8), scale=torch.Tensor.bfloat16),
    "fp8 blocks, float8 scales": lambda *model: fp8(
        *model, block=(16, 8), scale=lambda scales: scales.to(torch.float8_e8m0fnu)
    ),
    "fp8 uneven blocks": fp8_uneven,
    "fp8 tensors": lambda *model: fp8(*model, block=None, scale=torch.Tensor.squeeze, name="weight_scale"),
    "fp8 tensors, static inputs": lambda *model: fp8(
        *model, block=None, scale=torch.Tensor.squeeze, extra=("activation_scale",)
    ),
    "fp8 rows": fp8_rows,
}
# Schemes that quantise the head, too.
WITH_HEAD = ("fp8 rows",)


def write(scheme, plain, out):
    tensors = load_file(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    quantised, expected = out / scheme / "quantised", out / scheme / "expected"
    quantised.mkdir(parents=True)
    expected.mkdir()
    (expected / "config.json").write_text(json.dumps(config))
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    modules += ["lm_head"] if scheme in WITH_HEAD else []
    weights = {module: tensors.pop(f"{module}.weight") for module in modules}
    stored, values = SCHEMES[scheme](config, weights)
    (quantised / "config.json").write_text(json.dumps(config))
    assert values.keys() == {f"{module}.weight" for module in modules}
    save_file(tensors | {name: tensor.contiguous() for name, tensor in stored.items()}, quantised / "model.safetensors")
    save_file(tensors | {name: value.float().contiguous() for name, value in values.items()}, expected / "model.safetensors")


for scheme in sys.argv[3:]:
    write(scheme, Path(sys.argv[1]), Path(sys.argv[2]))
