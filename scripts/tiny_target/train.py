#!/usr/bin/env python3
"""Trains the embedded target, a toy Qwen3 with its own tokenizer, from scratch on a CPU.

    python scripts/tiny_target/train.py --output assets/tiny-target
"""
import argparse
import json
import math
import os
import random
import shutil
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on a busy machine spinning threads cost a factor of three
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import AddedToken
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from generate import training_rows

# Qwen's pre-tokenisation: single digits, and newline runs stay whole, so that the newlines that end
# the empty think block are the same tokens at the end of a prompt as before text.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END, START, STOP, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
ADDED = [(END, True), (START, True), (STOP, True), ("<think>", False), ("</think>", False), (MASK, True)]


def train_tokenizer(rows, vocab_size, max_token_length):
    """Byte-level BPE; short tokens only, so that longer words are several tokens each."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    texts = [m[key] for row in rows for m in row["messages"] for key in ("content", "reasoning_content") if key in m]
    tok.train_from_iterator(texts + ["system\n", "user\n", "assistant\n", "\n\n"] * 1000, trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED), max_token_length=max_token_length, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in ADDED])
    assert tok.get_vocab_size() == vocab_size
    template = (Path(__file__).parent / "chat_template.jinja").read_text()
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=STOP, pad_token=END, model_max_length=2048,
                                   clean_up_tokenization_spaces=False, chat_template=template)


def encode(tok, row):
    """Token ids of the whole conversation and the weight of each token in the loss."""
    text = tok.apply_chat_template(row["messages"], tokenize=False)
    ids = tok(text)["input_ids"]
    start, stop, think, unthink = (tok.convert_tokens_to_ids(t) for t in (START, STOP, "<think>", "</think>"))
    header = tok("assistant\n")["input_ids"]
    weights, i = [0.1] * len(ids), 0  # users are worth listening to, but it is the answers that are learnt
    while i < len(ids):
        if ids[i] == start and ids[i + 1 : i + 1 + len(header)] == header:
            i += 1 + len(header)
            # Not decided by the model: whether it thinks. The prompt gives the empty think block or
            # the model opens a real one; an earlier turn, shown without, teaches neither.
            if ids[i] != think:
                weights[i], i = 0.0, i + 1
            elif ids[i + 2] == unthink:
                weights[i : i + 4], i = [0.0] * 4, i + 4
            while ids[i] != stop:
                weights[i], i = 1.0, i + 1
            weights[i] = 1.0
        i += 1
    return ids, weights


def batches(encoded, tokens_per_batch, rng):
    """Shuffled batches of rows of similar length, without end."""
    while True:
        rng.shuffle(encoded)
        for lo in range(0, len(encoded), 2048):
            chunk, ready, batch = sorted(encoded[lo : lo + 2048], key=lambda r: len(r[0])), [], []
            for row in chunk:
                if (len(batch) + 1) * len(row[0]) > tokens_per_batch:
                    ready.append(batch)
                    batch = []
                batch.append(row)
            rng.shuffle(ready)
            yield from ready


def to_tensors(batch, pad):
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in batch])
    weights = torch.tensor([w + [0.0] * (width - len(w)) for _, w in batch])
    return ids, weights


def train(model, encoded, args, pad):
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(others, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98), fused=True)]
    data, begun, window = batches(encoded, args.batch_tokens, random.Random(args.seed)), time.time(), []
    for step in range(args.steps):
        lr = args.lr * min(1.0, (step + 1) / 60, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in (g for opt in optimizers for g in opt.param_groups):
            group["lr"] = lr
        ids, weights = to_tensors(next(data), pad)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        w = weights[:, 1:].flatten()
        loss = (losses * w).sum() / w.sum()
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in optimizers:
            opt.step()
        answer = w == 1.0
        window.append((losses.detach() * answer).sum().item() / max(answer.sum().item(), 1))
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            print(f"step {step + 1:5} lr {lr:.2e} answer loss {sum(window) / len(window):.4f} {time.time() - begun:.0f} s", flush=True)
            window = []


def check_prefix(tok, rows):
    """Every generation prompt without thinking is a token prefix of the full conversation."""
    for row in rows:
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in row["messages"]]
        prompt = tok.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=False)
        prompt, full = tok(prompt)["input_ids"], tok(tok.apply_chat_template(messages, tokenize=False))["input_ids"]
        assert full[: len(prompt)] == prompt, messages


README = """# Tiny target

A toy Qwen3 ({params:.2f} M parameters, {layers} layers, hidden size {hidden}, {vocab} tokens) on which the toolkit demonstrates
and tests itself. It speaks a small made-up language (arithmetic word problems, short Python helpers, templated chat) and
knows nothing else; it is of no use outside this repository.

It was trained from scratch on a CPU by `scripts/tiny_target/train.py` on conversations from the seeded generator
`scripts/tiny_target/generate.py` ({steps} steps of about {batch_tokens} tokens). Words are several tokens each by
construction, and the generator branches between phrases of several tokens, so that drafters have something to tell apart.
`<|mask|>` (id {mask}) never occurs in text: use it as a drafter's `mask_token_id`.

To train it again:

    pip install -r scripts/tiny_target/requirements.txt
    python scripts/tiny_target/train.py --output assets/tiny-target
"""


def amend(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2, ensure_ascii=False) + "\n")


def save(model, tok, args):
    """Writes aside, then moves file by file, so that a reader never sees half a model."""
    aside = args.output.with_name(args.output.name + ".new")
    shutil.rmtree(aside, ignore_errors=True)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, bos_token_id=tok.convert_tokens_to_ids(END),
        eos_token_id=[tok.convert_tokens_to_ids(STOP), tok.convert_tokens_to_ids(END)], pad_token_id=tok.convert_tokens_to_ids(END))
    model.to(torch.bfloat16).save_pretrained(aside)
    tok.save_pretrained(aside)
    (aside / "chat_template.jinja").write_text(tok.chat_template)
    amend(aside / "tokenizer_config.json", chat_template=tok.chat_template)
    amend(aside / "config.json", rope_theta=model.config.rope_parameters["rope_theta"])  # where older readers look for it
    c = model.config
    (aside / "README.md").write_text(README.format(
        params=model.num_parameters() / 1e6, layers=c.num_hidden_layers, hidden=c.hidden_size, vocab=c.vocab_size,
        mask=tok.convert_tokens_to_ids(MASK), steps=args.steps, batch_tokens=args.batch_tokens))
    args.output.mkdir(parents=True, exist_ok=True)
    for file in aside.iterdir():
        file.chmod(0o644)
        file.replace(args.output / file.name)
    aside.rmdir()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--output", type=Path, required=True)
    ap.add_argument("--steps", type=int, default=1600)
    ap.add_argument("--rows", type=int, default=60000, help="training conversations")
    ap.add_argument("--batch-tokens", type=int, default=2560)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--vocab-size", type=int, default=1024)
    ap.add_argument("--max-token-length", type=int, default=6)
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--log-every", type=int, default=50)
    ap.add_argument("--float32", dest="bf16", action="store_false", help="no bfloat16 autocast")
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    rows = training_rows(args.rows)
    tok = train_tokenizer(rows[:10000], args.vocab_size, args.max_token_length)
    check_prefix(tok, rows[:2000])
    encoded = [encode(tok, row) for row in rows]
    print(f"{len(rows)} rows, {sum(len(ids) for ids, _ in encoded)} tokens", flush=True)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=args.vocab_size, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=48, max_position_embeddings=2048, rope_theta=10000.0, tie_word_embeddings=True,
        bos_token_id=tok.convert_tokens_to_ids(END), eos_token_id=tok.convert_tokens_to_ids(STOP),
        pad_token_id=tok.convert_tokens_to_ids(END), attn_implementation="eager"))  # rows are short: eager is fastest
    train(model, encoded, args, tok.convert_tokens_to_ids(END))
    save(model, tok, args)


if __name__ == "__main__":
    main()
