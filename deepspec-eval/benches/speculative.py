"""A straightforward speculative decoding loop in PyTorch and transformers: the baseline of `deepspec-eval run`.

One sample at a time, as the reference decodes: the target is transformers' Qwen3 with its DynamicCache, the drafter DSpark or
DFlash out of transformers' Qwen3 parts. Prompts come as lines {"id": ..., "prompt": [token ids]}, so that nothing here depends on
tokenizer or template. The first prompt is decoded once untimed; the clock then runs over all of them, prefill included.
"""

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

GREEDY_BELOW = 1e-5
FLOOR = 1e-8  # of a draft probability that divides, and of the residual's mass
SEED = 980406


class Attention(nn.Module):
    """Queries from the block alone; keys and values from the cached context, the new context rows and the block."""

    def __init__(self, config, index):
        super().__init__()
        self.index, self.head_dim = index, config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, block, context, cos, sin, cache):
        heads = lambda x: x.view(1, x.shape[1], -1, self.head_dim)
        both = torch.cat([context, block], 1)
        q = self.q_norm(heads(self.q_proj(block))).transpose(1, 2)
        k = self.k_norm(heads(self.k_proj(both))).transpose(1, 2)
        v = heads(self.v_proj(both)).transpose(1, 2)
        length = block.shape[1]
        q, _ = apply_rotary_pos_emb(q, q, cos[:, -length:], sin[:, -length:])
        _, k = apply_rotary_pos_emb(k, k, cos, sin)
        k, v = cache.update(k, v, self.index)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # the block sees everything: no mask
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, index), Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, block, context, cos, sin, cache):
        block = block + self.self_attn(self.input_layernorm(block), context, cos, sin, cache)
        return block + self.mlp(self.post_attention_layernorm(block))


class MarkovHead(nn.Module):
    """The vanilla head: a low-rank bias of the logits by the token before."""

    def __init__(self, config):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def forward(self, token):
        return self.markov_w2(self.markov_w1(token))


class Drafter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.block_size, self.mask_token_id, self.taps = config.block_size, config.mask_token_id, config.target_layer_ids
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(self.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None

    @classmethod
    def load(cls, folder):
        config = Qwen3Config.from_pretrained(folder)
        if "Qwen3DSparkModel" not in config.architectures:
            raise SystemExit(f"{folder}: {config.architectures} instead of a Qwen3DSparkModel")
        if config.markov_rank and config.markov_head_type != "vanilla":
            raise SystemExit(f"{folder}: a {config.markov_head_type} Markov head; only the vanilla one is written here")
        model = cls(config)
        weights = load_file(Path(folder) / "model.safetensors")
        # At confidence threshold 0 nobody asks the confidence head.
        model.load_state_dict({name: w for name, w in weights.items() if not name.startswith("confidence_head.")})
        return model.float().eval()

    def forward(self, anchor, target_hidden, cache):
        """Base logits of the block after `anchor` [1]; appends the rows of `target_hidden` [1, new, m·d] to the cache."""
        tokens = torch.full((1, self.block_size), self.mask_token_id)
        tokens[0, 0] = anchor
        block, context = self.embed_tokens(tokens), self.hidden_norm(self.fc(target_hidden))
        seen = cache.get_seq_length()
        positions = torch.arange(seen, seen + context.shape[1] + self.block_size)[None]
        cos, sin = self.rotary_emb(block, positions)
        for layer in self.layers:
            block = layer(block, context, cos, sin, cache)
        cache.crop(-self.block_size)  # what stays is the context
        return self.lm_head(self.norm(block))[0]

    def propose(self, anchor, target_hidden, cache, temperature):
        """Draft tokens [γ] and, when sampling, the distributions [γ, V] they were drawn from."""
        tokens, probs, token = [], [], anchor
        for logits in self(anchor, target_hidden, cache).split(1):
            if self.markov_head is not None:
                logits = logits + self.markov_head(token)
            token, p = draw(logits, temperature)
            tokens.append(token)
            probs.append(p)
        return torch.cat(tokens), None if probs[0] is None else torch.cat(probs)


def draw(logits, temperature):
    """A token [1] of logits [1, V], and the distribution it came from unless it is the likeliest."""
    if temperature < GREEDY_BELOW:
        return logits.argmax(-1), None
    probs = torch.softmax(logits / temperature, -1)
    return torch.multinomial(probs, 1)[0], probs


def verify(logits, draft, draft_probs, temperature):
    """How many of the draft tokens [γ] the target's logits [γ+1, V] accept, and the target's own token [1] after them."""
    gamma = len(draft)
    if draft_probs is None:
        best = logits.argmax(-1)
        accepted = int((best[:gamma] == draft).long().cumprod(0).sum())
        return accepted, best[accepted : accepted + 1]
    probs = torch.softmax(logits / temperature, -1)
    ratio = probs[:gamma].gather(1, draft[:, None]) / draft_probs.gather(1, draft[:, None]).clamp_min(FLOOR)
    accepted = int((torch.rand(gamma) < ratio[:, 0]).long().cumprod(0).sum())
    p = probs[accepted]
    if accepted < gamma:
        residual = (p - draft_probs[accepted]).clamp_min(0)
        p = residual if residual.sum() > FLOOR else p
    return accepted, torch.multinomial(p, 1)


def generate(target, drafter, prompt, stop, max_new_tokens, temperature):
    """The new tokens, and how many each cycle committed: accepted ones and the target's own, or up to an accepted stop token."""
    # hidden_states[0] is the embedding's output, so layer L's is [L + 1].
    taps = lambda states: torch.cat([states[layer + 1] for layer in drafter.taps], -1)
    cache, draft_cache = DynamicCache(), DynamicCache()
    out = target(torch.tensor([prompt]), past_key_values=cache, output_hidden_states=True, logits_to_keep=1)
    hidden = taps(out.hidden_states)
    anchor, _ = draw(out.logits[0], temperature)
    new, committed = anchor.tolist(), []

    # The reference's loop: one more cycle when exactly max_new_tokens are out.
    while new[-1] not in stop and len(new) <= max_new_tokens:
        draft, draft_probs = drafter.propose(anchor, hidden, draft_cache, temperature)
        out = target(torch.cat([anchor, draft])[None], past_key_values=cache, output_hidden_states=True)
        accepted, anchor = verify(out.logits[0], draft, draft_probs, temperature)
        cycle = draft[:accepted].tolist() + anchor.tolist()
        ends = [at for at, token in enumerate(cycle) if token in stop]
        cycle = cycle[: ends[0] + 1] if ends else cycle
        new += cycle
        committed.append(len(cycle))
        if accepted < len(draft):
            cache.crop(accepted - len(draft))
        hidden = taps(out.hidden_states)[:, : accepted + 1]
    return new[:max_new_tokens], committed


def stop_tokens(target):
    """Stop ids of generation_config.json, else of config.json."""
    ids = target.generation_config.eos_token_id
    ids = target.config.eos_token_id if ids is None else ids
    return set(ids) if isinstance(ids, list) else {ids}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder of a Qwen3 model")
    parser.add_argument("--draft", required=True, help="folder of a DSpark or DFlash checkpoint")
    parser.add_argument("--prompts", required=True, help='lines {"id": ..., "prompt": [token ids]}')
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--limit", type=int, help="decode at most this many prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print all figures and the output tokens as JSON")
    return parser.parse_args()


@torch.inference_mode()
def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    drafter = Drafter.load(args.draft)
    if max(drafter.taps) + 1 >= target.config.num_hidden_layers:
        raise SystemExit("the drafter taps the target's last layer, whose raw output transformers does not hand out")
    stop = stop_tokens(target)
    with open(args.prompts) as lines:
        rows = [json.loads(line) for line in islice(lines, args.limit)]

    run = lambda row: generate(target, drafter, row["prompt"], stop, args.max_new_tokens, args.temperature)
    run(rows[0])
    start = time.perf_counter()
    results = [run(row) for row in rows]
    seconds = time.perf_counter() - start

    tokens = sum(len(new) for new, _ in results)
    cycles = sum(len(committed) for _, committed in results)
    report = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "cycles": cycles,
        "accepted_length": sum(sum(committed) for _, committed in results) / cycles if cycles else None,
    }
    if args.json:
        outputs = {row["id"]: new for row, (new, _) in zip(rows, results)}
        print(json.dumps({**report, "outputs": outputs}))
    else:
        print("\n".join(f"{name} {value}" for name, value in report.items()))


if __name__ == "__main__":
    main()
