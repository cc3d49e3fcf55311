"""Writes a small DeepSeek-V4 that holds its drafter, in the released layout, and what the drafter computes in float64.

usage: dspark_v4_release.py FOLDER OUTPUTS.safetensors

Attention and the shared expert are float8 (e4m3) with a scale per 128 rows and columns, routed experts are float4 (e2m1)
with a scale per 32 columns, two numbers to a byte. Scales are powers of two (e8m0). Of the target's layers two
tensors are there.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file

from dspark_v4 import block_states, heads

WIDTH, VOCAB, STAGES, BLOCK, TOKENS, RANK = 160, 96, 3, 5, 40, 12
TAPS = [1, 3]
SETTINGS = {
    "num_attention_heads": 4,
    "head_dim": 48,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "o_lora_rank": 20,
    "o_groups": 2,
    "sliding_window": 16,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
}
FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)

random = torch.Generator().manual_seed(4)
stored, own = {}, {}


def normal(*shape):
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def scales(*shape):
    """Bytes of powers of two from 2^-4 to 2^-2, and their values."""
    exponents = torch.randint(123, 126, shape, generator=random)
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu), 2.0 ** (exponents.double() - 127)


def plain(name, ours, values, dtype):
    stored[name] = values.to(dtype)
    own[ours] = stored[name].double()


def float8(name, ours, rows, columns):
    numbers = normal(rows, columns).to(torch.float8_e4m3fn)
    grid, factors = scales(-(-rows // 128), -(-columns // 128))
    stored[f"{name}.weight"], stored[f"{name}.scale"] = numbers, grid
    whole = factors.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    own[f"{ours}.weight"] = numbers.double() * whole


def float4(name, ours, rows, columns):
    codes = torch.randint(0, 16, (rows, columns), generator=random)
    grid, factors = scales(rows, columns // 32)
    # DeepSeek stores the bytes as int8. Unsigned ones are read, too.
    kind = torch.uint8 if name.startswith("mtp.1.") else torch.int8
    stored[f"{name}.weight"] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(kind)
    stored[f"{name}.scale"] = grid
    own[f"{ours}.weight"] = FLOAT4[codes] * factors.repeat_interleave(32, 1)


def norm(name, ours, size):
    plain(f"{name}.weight", f"{ours}.weight", 1 + 0.3 * normal(size), torch.bfloat16)


def stage(index):
    s, theirs, ours = SETTINGS, f"mtp.{index}", f"layers.{index}"
    queries, ranks = s["num_attention_heads"] * s["head_dim"], s["o_groups"] * s["o_lora_rank"]
    projections = {
        "wq_a": (s["q_lora_rank"], WIDTH),
        "wq_b": (queries, s["q_lora_rank"]),
        "wkv": (s["head_dim"], WIDTH),
        "wo_a": (ranks, queries // s["o_groups"]),
        "wo_b": (WIDTH, ranks),
    }
    for part, shape in projections.items():
        float8(f"{theirs}.attn.{part}", f"{ours}.attn.{part}", *shape)
    for part, size in [("attn.q_norm", s["q_lora_rank"]), ("attn.kv_norm", s["head_dim"]), ("attn_norm", WIDTH), ("ffn_norm", WIDTH)]:
        norm(f"{theirs}.{part}", f"{ours}.{part}", size)
    single = {"attn.attn_sink": normal(s["num_attention_heads"]), "ffn.gate.bias": 0.3 * normal(s["n_routed_experts"])}
    m = s["hc_mult"]
    for part in ["attn", "ffn"]:
        single[f"hc_{part}_fn"] = 0.1 * normal(m * (m + 2), m * WIDTH)
        single[f"hc_{part}_base"] = normal(m * (m + 2))
        single[f"hc_{part}_scale"] = 0.5 + 0.1 * normal(3)
    for part, values in single.items():
        plain(f"{theirs}.{part}", f"{ours}.{part}", values, torch.float32)
    gate = 0.1 * normal(s["n_routed_experts"], WIDTH)
    plain(f"{theirs}.ffn.gate.weight", f"{ours}.ffn.gate.weight", gate, torch.bfloat16)
    experts = [(f"experts.{e}", float4) for e in range(s["n_routed_experts"])] + [("shared_experts", float8)]
    inner = s["moe_intermediate_size"]
    for name, write in experts:
        for part, shape in [("w1", (inner, WIDTH)), ("w3", (inner, WIDTH)), ("w2", (WIDTH, inner))]:
            write(f"{theirs}.ffn.{name}.{part}", f"{ours}.ffn.{name}.{part}", *shape)


def main(folder, outputs):
    for index in range(STAGES):
        stage(index)
    float8("mtp.0.main_proj", "fc", WIDTH, len(TAPS) * WIDTH)
    norm("mtp.0.main_norm", "hidden_norm", WIDTH)
    norm("mtp.2.norm", "norm", WIDTH)
    m, bf16 = SETTINGS["hc_mult"], torch.bfloat16
    plain("mtp.2.hc_head_fn", "hc_head_fn", 0.1 * normal(m, m * WIDTH), torch.float32)
    plain("mtp.2.hc_head_base", "hc_head_base", normal(m), torch.float32)
    plain("mtp.2.hc_head_scale", "hc_head_scale", 0.5 + 0.1 * normal(1), torch.float32)
    for part in ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]:
        plain(f"mtp.2.{part}", part, 0.3 * normal(VOCAB, RANK), bf16)
    plain("mtp.2.confidence_head.proj.weight", "confidence_head.proj.weight", 0.1 * normal(1, WIDTH + RANK), bf16)
    plain("embed.weight", "embed", normal(VOCAB, WIDTH), bf16)
    plain("head.weight", "lm_head", 0.1 * normal(VOCAB, WIDTH), bf16)
    stored["layers.0.attn.wq_a.weight"] = torch.zeros(8, 8).to(torch.float8_e4m3fn)
    stored["layers.0.ffn.gate.bias"] = torch.zeros(8)
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "num_nextn_predict_layers": 1,  # as released, although there are three stages
        "dspark_block_size": BLOCK,
        "dspark_noise_token_id": 3,
        "dspark_target_layer_ids": TAPS,
        "dspark_markov_rank": RANK,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        **SETTINGS,
    }
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, os.path.join(folder, "model.safetensors"))
    given = {
        "input_ids": torch.randint(0, VOCAB, (TOKENS,), generator=random),
        "taps": normal(TOKENS, len(TAPS) * WIDTH),
        "anchors": torch.tensor([3, 9, 30]),
    }
    ends = {"embed": own.pop("embed"), "lm_head": own.pop("lm_head")}
    ours = {"stage_config": SETTINGS, "block_size": BLOCK, "mask_token_id": 3, "num_hidden_layers": STAGES}
    states = block_states(ours, own, given | ends, {})
    logits, confidence = heads(ours, own, given | ends, states)
    save_file({"states": states, "logits": logits, "confidence": confidence, **given}, outputs)


main(*sys.argv[1:])
