"""Quantises a model, and de-quantises it with packages of others.

usage: quantised_targets.py PLAIN OUT SCHEME...

PLAIN is the folder of a float32 model. OUT/SCHEME/quantised becomes the folder of the quantised one, and
OUT/SCHEME/expected that of a float32 model with the weights which compressed-tensors, transformers or AutoRound
compute from the former.
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


def scale_ranges(weight, args):
    """Least and greatest weights per scale of compressed-tensors, in the shape of the scales."""
    rows, columns = weight.shape
    match args.strategy:
        case "tensor":
            return weight.amin().view(1), weight.amax().view(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "group" | "tensor_group":
            groups = weight.view(rows, -1, args.group_size)
            return groups.amin(-1), groups.amax(-1)
        case "block":
            height, width = args.block_structure
            blocks = weight.view(rows // height, height, columns // width, width)
            return blocks.amin((1, 3)), blocks.amax((1, 3))


def compressed(config, weights, *groups, scale_dtype=torch.float32, ordered=False):
    """`quant_method: compressed-tensors`. A group has its targets, its format and the settings of its weights."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from compressed_tensors.utils.match import match_name

    schemes = {
        f"group_{place}": QuantizationScheme(targets=targets, format=form, weights=QuantizationArgs(**args))
        for place, (targets, form, args) in enumerate(groups)
    }
    stored, expected = {}, {}
    for module, weight in weights.items():
        named = [scheme for scheme in schemes.values() if any(match_name(module, target) for target in scheme.targets)]
        scheme = (named or [scheme for scheme in schemes.values() if "Linear" in scheme.targets])[0]
        compressor, weight = BaseCompressor.get_value_from_registry(scheme.format), weight.to(scale_dtype)
        is_nvfp4 = scheme.format == "nvfp4-pack-quantized"
        own = {"weight_global_scale": generate_gparam(weight.amin(), weight.amax())} if is_nvfp4 else {}
        scales, zero_points = calculate_qparams(
            *scale_ranges(weight, scheme.weights), scheme.weights, global_scale=own.get("weight_global_scale")
        )
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zero_points, **own}
        state = compressor.compress(state, scheme)
        value = nvfp4_values(state, scheme) if is_nvfp4 else compressor.decompress(state, scheme)["weight"]
        # MXFP4 is exact in bfloat16, too.
        assert value.dtype == scale_dtype or scheme.format == "mxfp4-pack-quantized"
        if ordered:
            value = reorder(state, scheme.weights)
        stored |= {f"{module}.{name}": tensor for name, tensor in state.items()}
        expected[f"{module}.weight"] = value
    formats = {form for _, form, _ in groups}
    settings = QuantizationConfig(
        config_groups=schemes,
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    config["quantization_config"] = json.loads(settings.model_dump_json())
    if ordered:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return stored, expected


def nvfp4_values(state, scheme):
    """The values in float32, to which the compressor's own, in bfloat16, are rounded."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, half = state["weight_packed"].shape
    numbers = unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * half, dtype=torch.float32)
    value = dequantize(
        x_q=numbers,
        scale=state["weight_scale"].float(),
        args=scheme.weights,
        global_scale=state["weight_global_scale"],
        dtype=torch.float32,
    )
    rounded = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
    assert torch.equal(value.bfloat16(), rounded)
    return value


def reorder(state, args):
    """Gives every column a random group. The values are computed here, because compressed-tensors has removed this order."""
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    rows, columns = shape = state["weight_shape"].tolist()
    groups = state["weight_scale"].shape[1]
    index = torch.arange(columns, dtype=torch.int32) // args.group_size
    index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(3))]
    state["weight_g_idx"] = index
    numbers = unpack_from_int32(state["weight_packed"], args.num_bits, shape)
    zero_points = unpack_from_int32(state["weight_zero_point"], args.num_bits, (rows, groups), packed_dim=0)
    return (numbers - zero_points[:, index]).float() * state["weight_scale"][:, index]


def packed(bits, strategy, **args):
    return ["Linear"], "pack-quantized", {"num_bits": bits, "strategy": strategy, **args}


def int8(strategy, **args):
    return ["Linear"], "int-quantized", {"num_bits": 8, "strategy": strategy, **args}


def compressed_float8(strategy, **args):
    return ["Linear"], "float-quantized", {"num_bits": 8, "type": "float", "strategy": strategy, **args}


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
# One scheme for attention, by the names of its modules, and others for two kinds of other modules.
SEVERAL_GROUPS = (
    (["re:.*self_attn.*"], *packed(4, "group", group_size=8, symmetric=False)[1:]),
    compressed_float8("channel"),
    (["model.layers.1.mlp.up_proj", "re:.*down_proj$"], *int8("channel")[1:]),
)

def integers(weight, bits, group_size):
    """Scales and zero points per group of columns, and the integers of a weight."""
    groups = weight.view(weight.shape[0], -1, group_size)
    least, greatest = groups.amin(-1), groups.amax(-1)
    scales = ((greatest - least) / (2**bits - 1)).half()
    zero_points = (-least / scales).round().int().clamp(0, 2**bits - 1)
    spread = [each.repeat_interleave(group_size, 1) for each in (scales, zero_points)]
    return scales, zero_points, ((weight / spread[0]).round().int() + spread[1]).clamp(0, 2**bits - 1)


def awq(config, weights, group_size):
    """`quant_method: awq`, unpacked by compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    def pack(numbers):
        words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= numbers[:, column::8].long() << 4 * place
        return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)

    stored, expected = {}, {}
    for module, weight in weights.items():
        size = weight.shape[1] if group_size == -1 else group_size
        scales, zero_points, numbers = integers(weight, 4, size)
        stored[f"{module}.qweight"], stored[f"{module}.scales"] = pack(numbers.T), scales.T
        stored[f"{module}.qzeros"] = pack(zero_points.T)
        converter = AutoAWQConverter(group_size=size, ignore=())
        own = {name: tensor for name, tensor in stored.items() if name.startswith(f"{module}.")}
        state = {name.rpartition(".")[2]: tensor for name, tensor in converter.process(own).items()}
        state["weight_scale"] = state["weight_scale"].float()
        scheme = converter._build_quant_config().config_groups["config_group_0"]
        value = BaseCompressor.get_value_from_registry("pack-quantized").decompress(state, scheme)["weight"]
        assert (value - weight).abs().max() < scales.max()
        expected[f"{module}.weight"] = value
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    return stored, expected


def draw_zero_points(words, bits, random, *, lowered):
    """Fills words with random numbers. `lowered` ones are zero points less one: their greatest stands for none."""
    words.zero_()
    for place in range(0, 32, bits):
        numbers = torch.randint(2**bits - lowered, words.shape, generator=random)
        words |= (numbers << place).to(torch.int64).bitwise_and(0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def gptq(config, weights, *, bits, group_size, form="gptq", ordered=False):
    """`quant_method: gptq`, packed and unpacked by AutoRound. `ordered` then shuffles the columns."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
    from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32

    layer_class = {"gptq": qlinear_torch_zp, "gptq_v2": qlinear_torch}[form].QuantLinear
    random = torch.Generator().manual_seed(5)
    stored, expected = {}, {}
    for module, weight in weights.items():
        rows, columns = weight.shape
        layer = layer_class(bits, group_size, columns, rows, bias=False)
        layer.device = "cpu"  # `pack` of one of the classes asks for it.
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = weight
        scales, zero_points, _ = integers(weight, bits, layer.group_size)
        layer.pack(linear, scales.float(), zero_points.float(), device="cpu")
        if module.endswith("v_proj"):
            draw_zero_points(layer.qzeros, bits, random, lowered=form == "gptq")
        state = layer.state_dict()
        layer.scales = layer.scales.float()
        value = layer(torch.eye(columns)).T
        if ordered:
            order = torch.randperm(columns, generator=random)
            numbers = unpack_from_int32(state["qweight"], bits, (columns, rows), packed_dim=0)
            state["qweight"] = pack_to_int32(numbers[order], bits, packed_dim=0)
            state["g_idx"], value = (order // layer.group_size).int(), value[:, order]
        stored |= {f"{module}.{name}": tensor for name, tensor in state.items()}
        expected[f"{module}.weight"] = value
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": ordered,
        "sym": False,
        "checkpoint_format": form,
        # As published GPTQ checkpoints of Qwen3.5: one module without settings of its own, others left out.
        "dynamic": {"lm_head": {}, "-:.*visual.*": {}},
    }
    return stored, expected


def mxfp4(config, tensors):
    """`quant_method: mxfp4` of gpt-oss, by transformers. The experts are random ones of 64 channels."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(7)
    config["intermediate_size"] = 64
    stored, expected = {}, {}
    for name in [name for name in tensors if ".experts." in name]:
        experts, *shape = tensors.pop(name).shape
        inputs = 64 if "down_proj" in name else config["hidden_size"]
        outputs = 128 if "gate_up_proj" in name else config["hidden_size"]
        if name.endswith("_bias"):
            stored[name] = expected[name] = torch.randn(experts, outputs, generator=random)
            continue
        numbers = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), generator=random, dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = numbers, scales
        expected[name] = convert_moe_packed_tensors(numbers, scales)
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    return stored, expected


SCHEMES = {
    "compressed mxfp4": lambda *model: compressed(*model, (["Linear"], "mxfp4-pack-quantized", MXFP4)),
    "compressed nvfp4": lambda *model: compressed(*model, (["Linear"], "nvfp4-pack-quantized", NVFP4)),
    "awq": lambda *model: awq(*model, 16),
    "awq rows": lambda *model: awq(*model, -1),
    "gptq int4": lambda *model: gptq(*model, bits=4, group_size=16),
    "gptq int4 rows": lambda *model: gptq(*model, bits=4, group_size=-1),
    "gptq int4 in order": lambda *model: gptq(*model, bits=4, group_size=8, ordered=True),
    "gptq int8": lambda *model: gptq(*model, bits=8, group_size=16),
    "gptq int8 in order": lambda *model: gptq(*model, bits=8, group_size=8, ordered=True),
    "gptq_v2 int4": lambda *model: gptq(*model, bits=4, group_size=16, form="gptq_v2"),
    "gptq_v2 int8 in order": lambda *model: gptq(*model, bits=8, group_size=8, form="gptq_v2", ordered=True),
    "compressed float8 tensors": lambda *model: compressed(*model, compressed_float8("tensor")),
    "compressed float8 channels": lambda *model: compressed(*model, compressed_float8("channel")),
    "compressed float8 blocks": lambda *model: compressed(*model, compressed_float8("block", block_structure=[16, 8])),
    "compressed int8 channels": lambda *model: compressed(*model, int8("channel")),
    "compressed int8 channels, asymmetric": lambda *model: compressed(*model, int8("channel", symmetric=False)),
    "compressed int8 tensors, asymmetric": lambda *model: compressed(*model, int8("tensor", symmetric=False)),
    "packed int4 groups": lambda *model: compressed(*model, packed(4, "group", group_size=8)),
    "packed int4 groups, asymmetric": lambda *model: compressed(*model, packed(4, "group", group_size=8, symmetric=False)),
    "packed int4 channels": lambda *model: compressed(*model, packed(4, "channel")),
    "packed int4 channels, asymmetric": lambda *model: compressed(*model, packed(4, "channel", symmetric=False)),
    "packed int8 groups": lambda *model: compressed(*model, packed(8, "group", group_size=16)),
    "packed int8 groups, asymmetric": lambda *model: compressed(
        *model, packed(8, "group", group_size=16, symmetric=False)
    ),
    "packed int4 groups in order": lambda *model: compressed(
        *model, packed(4, "group", group_size=8, symmetric=False), ordered=True
    ),
    "packed int4 groups, asymmetric, in bfloat16": lambda *model: compressed(
        *model, packed(4, "group", group_size=8, symmetric=False), scale_dtype=torch.bfloat16
    ),
    "compressed float8 channels in bfloat16": lambda *model: compressed(
        *model, compressed_float8("channel"), scale_dtype=torch.bfloat16
    ),
    "several groups": lambda *model: compressed(*model, *SEVERAL_GROUPS),
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
WITH_HEAD = ("fp8 rows", "packed int8 groups, asymmetric", "awq")


# Endings of the weights that are quantised. Published Qwen3.5 checkpoints leave the gates of linear attention plain.
QUANTISED = ("_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight")


def split_experts(tensors):
    """Stores the stacked experts of Qwen3.5-MoE one by one, as its quantised checkpoints do."""
    for name in [name for name in tensors if name.endswith(".experts.gate_up_proj")]:
        prefix = name.removesuffix("gate_up_proj")
        for expert, (gate_up, down) in enumerate(zip(tensors.pop(name), tensors.pop(f"{prefix}down_proj"))):
            parts = dict(zip(("gate", "up", "down"), (*gate_up.chunk(2), down)))
            tensors |= {f"{prefix}{expert}.{part}_proj.weight": weight for part, weight in parts.items()}


def write(scheme, plain, out):
    tensors = load_file(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    quantised, expected = out / scheme / "quantised", out / scheme / "expected"
    quantised.mkdir(parents=True)
    expected.mkdir()
    if scheme == "mxfp4":
        stored, values = mxfp4(config, tensors)
    else:
        split_experts(tensors)
        modules = [name.removesuffix(".weight") for name in tensors if name.endswith(QUANTISED)]
        modules += ["lm_head"] if scheme in WITH_HEAD else []
        weights = {module: tensors.pop(f"{module}.weight") for module in modules}
        stored, values = SCHEMES[scheme](config, weights)
        assert values.keys() == {f"{module}.weight" for module in modules}
    (quantised / "config.json").write_text(json.dumps(config))
    del config["quantization_config"]
    (expected / "config.json").write_text(json.dumps(config))
    save_file(tensors | {name: tensor.contiguous() for name, tensor in stored.items()}, quantised / "model.safetensors")
    save_file(tensors | {name: value.float().contiguous() for name, value in values.items()}, expected / "model.safetensors")


for scheme in sys.argv[3:]:
    write(scheme, Path(sys.argv[1]), Path(sys.argv[2]))
