"""A model folder as a GGUF, written with the gguf package.

usage: gguf_write.py MODEL TYPE OUT.gguf EXPECTED.safetensors

Matrices are of TYPE. EXPECTED gets the values that the file then holds, under the folder's names and in its order.
"""

import json
import math
import os
import sys

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, dequantize, quantize
from safetensors.torch import load_file, save_file

folder, name, out, expected = sys.argv[1:]
kind = GGMLQuantizationType[name]
config = json.load(open(os.path.join(folder, "config.json")))
weights = load_file(os.path.join(folder, "model.safetensors"))
arch = config["model_type"]
heads, groups, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))

writer = GGUFWriter(out, arch)
writer.add_block_count(config["num_hidden_layers"])
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(heads)
writer.add_head_count_kv(groups)
writer.add_key_length(dim)
writer.add_value_length(dim)
writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
theta = config.get("rope_theta", 10000.0)
writer.add_rope_freq_base(theta)
scaling = config.get("rope_scaling")
if scaling and scaling["rope_type"] == "yarn":
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if "beta_fast" in scaling:
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
    if "extrapolation_factor" in scaling:
        writer.add_rope_scaling_yarn_ext_factor(scaling["extrapolation_factor"])
    if "attention_factor" in scaling:
        writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
    if "factor_of_all_models" in scaling:
        writer.add_rope_scaling_attn_factors(scaling["factor_of_all_models"])
elif scaling:
    low, high, original = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    factors = []
    for plane in range(dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * plane / dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))

text = json.load(open(os.path.join(folder, "tokenizer.json")))
tokens, types = [f"[PAD{id}]" for id in range(config["vocab_size"])], [5] * config["vocab_size"]
for token, id in text["model"]["vocab"].items():
    tokens[id], types[id] = token, 1
for token in text["added_tokens"]:
    tokens[token["id"]], types[token["id"]] = token["content"], 3 if token["special"] else 4
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("qwen2")
writer.add_token_list(tokens)
writer.add_token_types(types)
writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in text["model"]["merges"]])
eos = config["eos_token_id"]
eos = eos if isinstance(eos, list) else [eos]
writer.add_eos_token_id(eos[0])
if len(eos) > 1:
    writer.add_eot_token_id(eos[1])
template = os.path.join(folder, "chat_template.jinja")
if os.path.exists(template):
    writer.add_chat_template(open(template).read())
else:
    writer.add_chat_template(json.load(open(os.path.join(folder, "tokenizer_config.json")))["chat_template"])

LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def in_pairs(values, heads):
    rows, width = values.shape
    return values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


held = {}
for name, tensor in weights.items():
    values = tensor.float().numpy()
    if name in ENDS:
        theirs = ENDS[name]
    else:
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        theirs = f"blk.{layer}.{LAYER[part]}.weight"
    if values.ndim == 1:
        writer.add_tensor(theirs, values)
        held[name] = torch.from_numpy(values)
        continue
    # Rows are stored whole, so that packing them does not depend on their order.
    held[name] = torch.from_numpy(dequantize(quantize(values, kind), kind).astype(np.float32).reshape(values.shape).copy())
    paired = heads if "q_proj" in name else groups if "k_proj" in name else None
    if arch == "llama" and paired:
        values = np.ascontiguousarray(in_pairs(values, paired))
    writer.add_tensor(theirs, quantize(values, kind), raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
save_file(held, expected)
