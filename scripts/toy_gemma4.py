#!/usr/bin/env python3
"""Trains a toy Gemma 4 for the table of assistants in docs/ablations.md.

    scripts/toy_gemma4.py ANSWERS OUT [--epochs 4]     ANSWERS: answers.jsonl of scripts/demo.sh; OUT: the folder of the model

Needs torch and transformers 5. The model has the toy target's tokenizer, sizes and texts. Its layers are those of
Gemma 4 12B: some have windows, and full layers have keys that are also the values.
"""

import argparse
import json
import os
import random
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma4UnifiedTextConfig

TOY = Path(__file__).resolve().parent.parent / "assets" / "tiny-target"
ROWS, RATE = 8, 3e-3


def config():
    toy = json.loads((TOY / "config.json").read_text())
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    return Gemma4UnifiedTextConfig(
        **{key: toy[key] for key in (*same, "num_key_value_heads", "bos_token_id", "eos_token_id", "pad_token_id")},
        layer_types=["sliding_attention", "full_attention"] * (toy["num_hidden_layers"] // 2),
        sliding_window=64,
        global_head_dim=96,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
        max_position_embeddings=toy["max_position_embeddings"],
    )


def samples(answers):
    """Token ids of a prompt and its answer, and the length of the prompt."""
    for line in answers.read_text().splitlines():
        turns = json.loads(line)["conversations"]
        for turn in turns:
            if "prompt_token_ids" in turn:
                yield turn["prompt_token_ids"] + turn["token_ids"], len(turn["prompt_token_ids"])


def loss_of(model, rows):
    longest = max(len(ids) for ids, _ in rows)
    tokens, labels = (torch.full((len(rows), longest), fill) for fill in (0, -100))
    for row, (ids, prompt) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, prompt : len(ids)] = torch.tensor(ids[prompt:])
    logits = model(tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists; remove it or name another folder")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    data = list(samples(args.answers))
    steps = args.epochs * len(data) // ROWS
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.05)
    draws = random.Random(0)
    for step in range(steps):
        loss = loss_of(model, draws.sample(data, ROWS))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    partial = args.out.with_name(args.out.name + ".partial")
    model.save_pretrained(partial)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TOY / name, partial)
    os.rename(partial, args.out)


if __name__ == "__main__":
    main()
