"""A straightforward PyTorch train step of DSpark: the baseline of step.rs. Prints its peak memory in MB and its time in ms.

The loss is written as in the reference: whole [A * block, V] tensors, both softmaxes once for the L1 loss and once more for the
acceptance rate. Dense attention mask, float32, one thread, foreach AdamW.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

D, LAYERS, HEADS, KV, HEAD_DIM, INNER = 256, 2, 4, 2, 64, 768
VOCAB, RANK, TAPS, GAMMA, ANCHORS, TOKENS = 32768, 256, 5, 7, 64, 512
STEPS = 7


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def linear(inputs, outputs, bias=False):
    return nn.Linear(inputs, outputs, bias=bias)


def rotate(x, angles):
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = linear(D, HEADS * HEAD_DIM), linear(D, KV * HEAD_DIM), linear(D, KV * HEAD_DIM)
        self.o = linear(HEADS * HEAD_DIM, D)
        self.q_norm, self.k_norm = Norm(HEAD_DIM), Norm(HEAD_DIM)
        self.gate, self.up, self.down = linear(D, INNER), linear(D, INNER), linear(INNER, D)
        self.before, self.between = Norm(D), Norm(D)

    def forward(self, x, context, angles, mask):
        h = self.before(x)
        both = torch.cat([context, h], 0)
        heads = lambda y, n: y.view(-1, n, HEAD_DIM).transpose(0, 1)
        q = rotate(self.q_norm(heads(self.q(h), HEADS)), angles[TOKENS:])
        k = rotate(self.k_norm(heads(self.k(both), KV)), angles)
        v = heads(self.v(both), KV)
        k, v = (y.repeat_interleave(HEADS // KV, 0) for y in (k, v))
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        x = x + self.o(y.transpose(0, 1).flatten(1))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Drafter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, D), linear(D, VOCAB)
        self.embed.weight.requires_grad_(False)
        self.head.weight.requires_grad_(False)
        self.fc, self.hidden_norm, self.norm = linear(TAPS * D, D), Norm(D), Norm(D)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.w1, self.w2 = nn.Embedding(VOCAB, RANK), linear(RANK, VOCAB)
        self.confidence = linear(D + RANK, 1, bias=True)

    def forward(self, batch):
        context = self.hidden_norm(self.fc(batch["taps"]))
        x = self.embed(batch["block_tokens"])
        for layer in self.layers:
            x = layer(x, context, batch["angles"], batch["mask"])
        x = self.norm(x)
        e = self.w1(batch["previous"])
        logits = self.head(x) + self.w2(e)
        return logits, self.confidence(torch.cat([x, e], -1)).squeeze(-1)


def loss_of(model, batch):
    logits, confidence = model(batch)
    with torch.no_grad():
        teacher = model.head(batch["last"])
    weights, labels = batch["weights"], batch["labels"]
    ce = F.cross_entropy(logits.float(), labels, reduction="none")
    l1 = (torch.softmax(logits.float(), -1) - torch.softmax(teacher.float(), -1)).abs().sum(-1)
    with torch.no_grad():
        distance = (torch.softmax(logits.float(), -1) - torch.softmax(teacher.float(), -1)).abs().sum(-1)
        accept = (1 - 0.5 * distance).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(confidence.float(), accept, reduction="none")
    mean = lambda values: (values * weights).sum() / (weights.sum() + 1e-6)
    return 0.1 * mean(ce) + 0.9 * mean(l1) + mean(bce)


def make_batch():
    ids = torch.arange(TOKENS) * 31 % VOCAB
    anchors = torch.arange(ANCHORS) * 7 + 40
    slots = anchors[:, None] + torch.arange(GAMMA)
    block_tokens = torch.full((ANCHORS, GAMMA), 3)
    block_tokens[:, 0] = ids[anchors]
    positions = torch.cat([torch.arange(TOKENS), slots.flatten()]).float()
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    block = torch.arange(ANCHORS).repeat_interleave(GAMMA)
    sees_context = torch.arange(TOKENS)[None] < anchors[block][:, None]
    mask = torch.cat([sees_context, block[:, None] == block[None]], 1)
    return {
        "taps": torch.randn(TOKENS, TAPS * D),
        "last": torch.randn(TOKENS, D)[slots.flatten()],
        "block_tokens": block_tokens.flatten(),
        "previous": ids[slots.flatten()],
        "labels": ids[(slots + 1).flatten()],
        "weights": torch.exp(-torch.arange(GAMMA) / 4.0).repeat(ANCHORS),
        "angles": positions[:, None] * frequencies,
        "mask": mask,
    }


def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024 / 1e6


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Drafter()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=6e-4, weight_decay=0.0, foreach=True)

    def step():
        loss_of(model, make_batch()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # makes the moments, which belong to the loaded state
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    loaded = status("VmRSS")
    step()
    peak = status("VmHWM") - loaded
    times = []
    for _ in range(STEPS):
        start = time.thread_time()
        step()
        times.append((time.thread_time() - start) * 1e3)
    print(peak, statistics.median(times))


main()
