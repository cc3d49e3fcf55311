"""Compares the formulas of dspark_v4.py with transformers' modules of DeepSeek-V4, in float64.

usage: dspark_v4_transformers.py (CONFIG.json WEIGHTS.safetensors INPUTS.safetensors)...

A stage of the drafter is a layer of the target with another context. transformers loads the stages as such layers, by its own
table of DeepSeek's tensor names. Parts are compared one by one on random rows, then the states of all blocks. transformers has
no context projection, no window in front of a block, no Markov head and no confidence head.
"""

import json
import sys
from contextlib import contextmanager
from unittest.mock import patch

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

import dspark_v4 as twin

TOLERANCE = 1e-9
ROWS = 7


@contextmanager
def in_float64():
    """Within this, float32 is float64: transformers' norms, rotations and hyper-connections ask for float32 at any dtype."""
    wide = {"float32": torch.float64, "float": torch.float64}
    with patch.multiple(torch, **wide), patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def load_target(config, weights):
    """A target whose layers are the stages."""
    settings, stages = dict(config["stage_config"]), config["num_hidden_layers"]
    # A limit of 0 is none.
    settings["swiglu_limit"] = settings["swiglu_limit"] or float("inf")
    target = DeepseekV4Config(
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        num_hidden_layers=stages,
        layer_types=["sliding_attention"] * stages,
        mlp_layer_types=["moe"] * stages,
        attn_implementation="eager",
        experts_implementation="eager",
        **settings,
    )
    ends = {"embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"}
    own = ("layers.", "hc_head_", "norm.", *ends)
    state = {ends.get(name, name): tensor for name, tensor in weights.items() if name.startswith(own)}
    model, found = DeepseekV4ForCausalLM.from_pretrained(
        None, config=target, state_dict=state, dtype=torch.float64, output_loading_info=True
    )
    assert not any(found.values()), found
    assert all(tensor.dtype == torch.float64 for tensor in model.state_dict().values())
    return model.eval()


class Context:
    """In place of a cache: the keys of a block come behind the latents [K, D] of its context."""

    def __init__(self, latents):
        self.latents = latents

    def update(self, keys, values, layer):
        assert torch.equal(keys, values)
        seen = torch.cat([self.latents[None, None], keys], 2)
        return seen, seen


class Peer:
    """Stages by transformers' modules."""

    def __init__(self, config, weights):
        self.settings = config["stage_config"]
        self.target = load_target(config, weights).model

    def rotation(self, positions):
        return self.target.rotary_emb(torch.zeros(1, dtype=torch.float64), positions[None], layer_type="main")

    def latents(self, states, positions, layer):
        attention = self.target.layers[layer].self_attn
        kv = attention.kv_norm(attention.kv_proj(states))
        return apply_rotary_pos_emb(kv[None, None], *self.rotation(positions))[0, 0]

    def arguments(self, positions, kv, anchor):
        first = max(0, anchor - self.settings["sliding_window"])
        return {
            "position_embeddings": {"main": self.rotation(positions)},
            "position_ids": positions[None],
            # A block sees all of its context and of itself.
            "attention_mask": None,
            "past_key_values": Context(kv[first:anchor]),
        }

    def states(self, config, context, given):
        """As block_states of the formulas."""
        everywhere, blocks = torch.arange(len(context)), []
        for anchor in given["anchors"].tolist():
            tokens = torch.full([config["block_size"]], config["mask_token_id"])
            tokens[0] = given["input_ids"][anchor]
            positions = anchor + torch.arange(len(tokens))
            streams = self.target.embed_tokens(tokens)[None, :, None].expand(-1, -1, self.settings["hc_mult"], -1)
            for index, layer in enumerate(self.target.layers):
                kv = self.latents(context, everywhere, index)
                streams = layer(streams, **self.arguments(positions, kv, anchor))
            blocks.append(self.target.hc_head(streams)[0])
        return torch.stack(blocks)


def close(part, ours, theirs):
    assert ours.dtype == theirs.dtype == torch.float64, f"{part}: {ours.dtype} and {theirs.dtype}"
    assert ours.shape == theirs.shape, f"{part}: {ours.shape} and {theirs.shape}"
    size, difference = theirs.abs().max(), (ours - theirs).abs().max()
    assert size > 0 and difference <= TOLERANCE * size, f"{part} differs by {difference} from {size}"


def compare_parts(peer, config, weights):
    """Parts of every stage, on random rows behind a context of which the first rows are outside the window."""
    settings, width = config["stage_config"], config["hidden_size"]
    eps, m = settings["rms_norm_eps"], settings["hc_mult"]
    random = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    anchor = settings["sliding_window"] + 3
    positions = anchor + torch.arange(ROWS)
    for index, layer in enumerate(peer.target.layers):
        name, attention = f"layers.{index}", layer.self_attn
        x, written, context, streams = (normal(*size, width) for size in [[ROWS], [ROWS], [anchor], [ROWS, m]])
        norms = {"attn_norm": layer.input_layernorm, "ffn_norm": layer.post_attention_layernorm}
        for part, module in norms.items():
            close(part, twin.rms(x, eps, weights[f"{name}.{part}.weight"]), module(x))

        heads = normal(ROWS, settings["num_attention_heads"], settings["head_dim"])
        close("norm without weights", twin.rms(heads, eps), attention.q_b_norm(heads))
        cos, sin = peer.rotation(positions)
        for sign in [1, -1]:
            theirs = apply_rotary_pos_emb(heads[None], cos, sign * sin, unsqueeze_dim=2)[0]
            close(f"rotation of sign {sign}", twin.rotate(heads, positions, settings, sign), theirs)
        kv = twin.latents(context, torch.arange(anchor), weights, f"{name}.attn", settings)
        close("latents", kv, peer.latents(context, torch.arange(anchor), index))
        theirs, _ = attention(x[None], **peer.arguments(positions, kv, anchor))
        ours = twin.attention(x, positions, kv, anchor, weights, f"{name}.attn", settings)
        close("attention", ours, theirs[0])

        shares = torch.zeros(ROWS, settings["n_routed_experts"], dtype=torch.float64)
        for row, own in enumerate(twin.routes(x, weights, f"{name}.ffn", settings)):
            shares[row, list(own)] = torch.stack(list(own.values()))
        _, theirs, chosen = layer.mlp.gate(x)
        close("routes", shares, torch.zeros_like(shares).scatter(1, chosen, theirs))
        seen = {}
        ours = twin.expert(x, weights, f"{name}.ffn.shared_experts", settings["swiglu_limit"], seen)
        assert (seen.get("limited", 0) > 0) == (settings["swiglu_limit"] > 0), seen
        close("shared expert", ours, layer.mlp.shared_experts(x))
        close("mixture of experts", twin.mixture(x, weights, f"{name}.ffn", settings, seen), layer.mlp(x[None])[0])

        for part, module in {"hc_attn": layer.attn_hc, "hc_ffn": layer.ffn_hc}.items():
            post, comb, read = (of[0] for of in module(streams[None]))
            given = []
            sublayer = lambda rows: given.append(rows) or written
            ours = twin.connect(streams, weights, f"{name}.{part}", settings, sublayer)
            close(f"what {part} reads", given[0], read)
            close(part, ours, post[..., None] * written[:, None] + comb.transpose(1, 2) @ streams)
        theirs = layer(streams[None], **peer.arguments(positions, kv, anchor))[0]
        close("stage", twin.run_stage(streams, positions, kv, anchor, weights, name, settings, {}), theirs)
    close("collapse", twin.collapse(streams, weights, settings), peer.target.hc_head(streams[None])[0])
    close("norm", twin.rms(x, eps, weights["norm.weight"]), peer.target.norm(x))


def main(config, weights, inputs):
    config, weights, given = json.load(open(config)), twin.load(weights), twin.load(inputs)
    ours = twin.block_states(config, weights, given | {"embed": weights["embed_tokens.weight"]}, {})
    context = given["taps"] @ weights["fc.weight"].T
    context = twin.rms(context, config["stage_config"]["rms_norm_eps"], weights["hidden_norm.weight"])
    with in_float64():
        peer = Peer(config, weights)
        compare_parts(peer, config, weights)
        close("states", ours, peer.states(config, context, given))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    for at in range(1, len(sys.argv), 3):
        main(*sys.argv[at : at + 3])
