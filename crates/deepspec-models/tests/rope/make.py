"""Writes scaled.json: what transformers makes of RoPE settings in their spellings.

    python make.py scaled.json          (transformers 5.17.0, torch 2.11.0)
"""

import json
import sys

from transformers import Gemma4UnifiedTextConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedTextRotaryEmbedding

SIZES = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3,
         "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64}
QWEN3 = {
    "yarn, older spelling": {
        "rope_theta": 1e6, "max_position_embeddings": 40960,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "yarn, named by type": {
        "max_position_embeddings": 131072,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}},
    "yarn, newer spelling with every setting": {
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0,
                            "original_max_position_embeddings": 512, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn, attention factor": {
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 1.5,
                            "original_max_position_embeddings": 512}},
    "yarn, original length left out": {
        "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0}},
    "yarn, original length outside and factor null": {
        "max_position_embeddings": 4096, "original_max_position_embeddings": 512, "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096}},
    "yarn, a ramp of no width": {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "beta_fast": 4.0, "beta_slow": 4.0,
                            "original_max_position_embeddings": 32, "truncate": False}},
    "linear": {"max_position_embeddings": 4096, "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "max_position_embeddings": 4096, "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 256}},
}
GEMMA4 = {
    "released": None,
    "scaled": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.3, "factor": 8.0},
        "sliding_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}},
    "linear": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        "sliding_attention": {"rope_type": "proportional", "rope_theta": 1e4}},
}


def numbers(inv_freq, attention_factor):
    return {"inv_freq": inv_freq.double().tolist(), "attention_factor": float(attention_factor)}


cases = []
for name, settings in QWEN3.items():
    raw = {"model_type": "qwen3", **SIZES, **settings}
    config = Qwen3Config.from_dict(json.loads(json.dumps(raw)))
    made = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    cases.append({"name": f"qwen3: {name}", "config": raw, "layers": [numbers(*made)] * 2})
for name, settings in GEMMA4.items():
    raw = {"model_type": "gemma4_unified_text", **SIZES, "global_head_dim": 64, "max_position_embeddings": 1024,
           "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": settings}
    config = Gemma4UnifiedTextConfig.from_dict(json.loads(json.dumps(raw)))
    rotary = Gemma4UnifiedTextRotaryEmbedding(config)
    layers = [numbers(getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"))
              for kind in config.layer_types]
    cases.append({"name": f"gemma4: {name}", "config": raw, "layers": layers})
with open(sys.argv[1], "w") as file:
    json.dump(cases, file, separators=(",", ":"))
    file.write("\n")
