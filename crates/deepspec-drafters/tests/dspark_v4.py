"""DSpark of DeepSeek-V4 in float64, by its formulas: logits, confidence, losses and gradients.

usage: dspark_v4.py (CONFIG.json WEIGHTS.safetensors INPUTS.safetensors OUTPUTS.safetensors)...

Weights have the names of this project. Per stage: latent attention with sinks over a window of the context and the whole
block, a mixture of experts, and hyper-connections around both. Positions of a block are those from its anchor on.
dspark_v4_transformers.py compares the stages with transformers' modules.
"""

import json
import math
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file


def rms(x, eps, weight=None):
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rotate(x, positions, settings, sign=1):
    """Multiplies neighbouring pairs of the last dims, as complex numbers, by exp(± i·position·frequency). x is [rows, .., D]."""
    dim = settings["qk_rope_head_dim"]
    frequencies = settings["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = sign * positions.double()[:, None] * frequencies
    turn = torch.polar(torch.ones_like(angles), angles)
    turn = turn.reshape(len(positions), *[1] * (x.dim() - 2), dim // 2)
    kept, turned = x[..., :-dim], x[..., -dim:]
    pairs = torch.view_as_complex(turned.reshape(*turned.shape[:-1], dim // 2, 2).contiguous())
    return torch.cat([kept, torch.view_as_real(pairs * turn).flatten(-2)], -1)


def mixing(logits, settings):
    """A 4 × 4 matrix per row: softmax of the rows, then rows and columns are divided by their sums in turn."""
    eps = settings["hc_eps"]
    matrix = torch.softmax(logits, 2) + eps
    for step in range(settings["hc_sinkhorn_iters"]):
        if step > 0:
            matrix = matrix / (matrix.sum(2, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(1, keepdim=True) + eps)
    return matrix


def connect(streams, weights, name, settings, sublayer):
    """A hyper-connection. streams are [rows, m, d]."""
    rows, m, _ = streams.shape
    out = rms(streams.reshape(rows, -1), settings["rms_norm_eps"]) @ weights[f"{name}_fn"].T
    scale, base = weights[f"{name}_scale"], weights[f"{name}_base"]
    pre = torch.sigmoid(out[:, :m] * scale[0] + base[:m]) + settings["hc_eps"]
    post = 2 * torch.sigmoid(out[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = mixing((out[:, 2 * m :] * scale[2] + base[2 * m :]).reshape(rows, m, m), settings)
    written = sublayer(torch.einsum("nm,nmd->nd", pre, streams))
    return torch.einsum("nj,nd->njd", post, written) + torch.einsum("nij,nid->njd", comb, streams)


def collapse(streams, weights, settings):
    """The hidden states [rows, d] that the heads read from the streams [rows, m, d]."""
    out = rms(streams.reshape(len(streams), -1), settings["rms_norm_eps"]) @ weights["hc_head_fn"].T
    shares = torch.sigmoid(out * weights["hc_head_scale"] + weights["hc_head_base"]) + settings["hc_eps"]
    return torch.einsum("nm,nmd->nd", shares, streams)


def expert(x, weights, name, limit, seen):
    gate, up = x @ weights[f"{name}.w1.weight"].T, x @ weights[f"{name}.w3.weight"].T
    if limit > 0:
        seen["limited"] = seen.get("limited", 0) + int((gate > limit).sum() + (up.abs() > limit).sum())
        gate, up = torch.clamp(gate, max=limit), torch.clamp(up, -limit, limit)
    return (gate * torch.sigmoid(gate) * up) @ weights[f"{name}.w2.weight"].T


def routes(x, weights, name, settings):
    """Per row of x, the weights of its experts by their index."""
    scores = torch.sqrt(torch.log1p(torch.exp(x @ weights[f"{name}.gate.weight"].T)))
    for own in scores:
        chosen = torch.argsort(-(own + weights[f"{name}.gate.bias"]))[: settings["num_experts_per_tok"]].tolist()
        total = sum(own[e] for e in chosen)
        yield {e: settings["routed_scaling_factor"] * own[e] / total for e in chosen}


def mixture(x, weights, name, settings, seen):
    rows = []
    for row, shares in zip(x, routes(x, weights, name, settings)):
        seen.setdefault("experts", set()).update(shares)
        parts = [
            share * expert(row[None], weights, f"{name}.experts.{e}", settings["swiglu_limit"], seen)[0]
            for e, share in shares.items()
        ]
        rows.append(sum(parts))
    shared = expert(x, weights, f"{name}.shared_experts", settings["swiglu_limit"], seen)
    return torch.stack(rows) + shared


def latents(x, positions, weights, name, settings):
    kv = rms(x @ weights[f"{name}.wkv.weight"].T, settings["rms_norm_eps"], weights[f"{name}.kv_norm.weight"])
    return rotate(kv, positions, settings)


def attention(x, positions, context, anchor, weights, name, settings):
    """One block x [B, d] behind the latents of its context [anchor, D]."""
    heads, dim, groups = (settings[key] for key in ["num_attention_heads", "head_dim", "o_groups"])
    eps = settings["rms_norm_eps"]
    low = rms(x @ weights[f"{name}.wq_a.weight"].T, eps, weights[f"{name}.q_norm.weight"])
    q = rms((low @ weights[f"{name}.wq_b.weight"].T).reshape(-1, heads, dim), eps)
    q = rotate(q, positions, settings)
    first = max(0, anchor - settings["sliding_window"])
    kv = torch.cat([context[first:anchor], latents(x, positions, weights, name, settings)])
    scores = torch.exp(torch.einsum("bhd,kd->bhk", q, kv) / math.sqrt(dim))
    sink = torch.exp(weights[f"{name}.attn_sink"])[:, None]
    shares = scores / (scores.sum(-1, keepdim=True) + sink)
    out = rotate(torch.einsum("bhk,kd->bhd", shares, kv), positions, settings, -1)
    out = out.reshape(len(x), groups, -1)
    wo_a = weights[f"{name}.wo_a.weight"].reshape(groups, -1, out.shape[-1])
    return torch.einsum("bgi,gri->bgr", out, wo_a).reshape(len(x), -1) @ weights[f"{name}.wo_b.weight"].T


def run_stage(streams, positions, kv, anchor, weights, name, settings, seen):
    """The streams [B, m, d] of a block behind a stage. kv are the latents of the context, [anchor or more, D]."""
    norm = lambda x, part: rms(x, settings["rms_norm_eps"], weights[f"{name}.{part}.weight"])
    attend = lambda x: attention(norm(x, "attn_norm"), positions, kv, anchor, weights, f"{name}.attn", settings)
    feed = lambda x: mixture(norm(x, "ffn_norm"), weights, f"{name}.ffn", settings, seen)
    streams = connect(streams, weights, f"{name}.hc_attn", settings, attend)
    return connect(streams, weights, f"{name}.hc_ffn", settings, feed)


def block_states(config, weights, given, seen):
    """States of all blocks before the final norm, [A, B, d]."""
    settings, size = config["stage_config"], config["block_size"]
    context = rms(given["taps"] @ weights["fc.weight"].T, settings["rms_norm_eps"], weights["hidden_norm.weight"])
    everywhere = torch.arange(len(context))
    all_states = []
    for anchor in given["anchors"].tolist():
        tokens = [given["input_ids"][anchor].item()] + [config["mask_token_id"]] * (size - 1)
        positions = torch.arange(anchor, anchor + size)
        streams = given["embed"][tokens][:, None].repeat(1, settings["hc_mult"], 1)
        for stage in range(config["num_hidden_layers"]):
            name = f"layers.{stage}"
            kv = latents(context, everywhere, weights, f"{name}.attn", settings)
            streams = run_stage(streams, positions, kv, anchor, weights, name, settings, seen)
        all_states.append(collapse(streams, weights, settings))
    return torch.stack(all_states)


def heads(config, weights, given, states):
    """Logits [A, B, V] and confidence logits [A, B] with the true previous tokens."""
    ids, size = given["input_ids"], config["block_size"]
    at = given["anchors"][:, None] + torch.arange(size)
    e = weights["markov_head.markov_w1.weight"][ids[at.clamp(max=len(ids) - 1)]]
    normed = rms(states, config["stage_config"]["rms_norm_eps"], weights["norm.weight"])
    logits = normed @ given["lm_head"].T + e @ weights["markov_head.markov_w2.weight"].T
    confidence = torch.cat([states, e], -1) @ weights["confidence_head.proj.weight"][0]
    return logits, confidence


def losses(config, given, logits, confidence):
    """Weighted sums of cross entropy, L1 distance and confidence loss, and the sum of the weights."""
    ids, mask = given["input_ids"], given["loss_mask"]
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
    for block, anchor in enumerate(given["anchors"].tolist()):
        for k in range(config["block_size"]):
            if anchor + k + 1 >= len(ids) or not mask[anchor + k + 1]:
                break
            weight = math.exp(-k / given["decay_gamma"].item())
            p = torch.softmax(logits[block, k], -1)
            t = torch.softmax(given["lm_head"] @ given["last"][anchor + k], -1)
            l1 = (p - t).abs().sum()
            accepted = (1 - l1 / 2).clamp(0, 1).detach()
            c = confidence[block, k]
            bce = -(accepted * F.logsigmoid(c) + (1 - accepted) * F.logsigmoid(-c))
            parts = [-torch.log(p[ids[anchor + k + 1]]), l1, bce, torch.ones(())]
            sums = [total + weight * part for total, part in zip(sums, parts)]
    return sums


def load(path):
    double = lambda t: t.double() if t.is_floating_point() else t
    return {name: double(tensor) for name, tensor in load_file(path).items()}


def main(config, weights, inputs, outputs):
    config, weights, given = json.load(open(config)), load(weights), load(inputs)
    given |= {"embed": weights.pop("embed_tokens.weight"), "lm_head": weights.pop("lm_head.weight")}
    trained = {name: tensor.requires_grad_() for name, tensor in weights.items() if not name.endswith("gate.bias")}
    seen = {}
    states = block_states(config, weights, given, seen)
    logits, confidence = heads(config, weights, given, states)
    out = {"states": states, "logits": logits, "confidence": confidence}
    ce, l1, bce, total = losses(config, given, logits, confidence)
    out |= {"ce": ce, "l1": l1, "bce": bce, "weight": total}
    a, b, c = given["alphas"].tolist()
    ((a * ce + b * l1 + c * bce) / (total + 1e-6)).backward()
    zeros = lambda tensor: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    out |= {f"grad.{name}": zeros(tensor) for name, tensor in trained.items()}
    out["limited"] = torch.tensor(seen.get("limited", 0))
    out["experts"] = torch.tensor(sorted(seen["experts"]))
    save_file({name: tensor.detach().contiguous() for name, tensor in out.items()}, outputs)


if __name__ == "__main__":
    for at in range(1, len(sys.argv), 4):
        main(*sys.argv[at : at + 4])
