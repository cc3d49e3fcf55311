#!/usr/bin/env python3
"""Runs every step at the size of a real target: a Qwen3 of 0.6 B random weights, with the real Qwen3 tokenizer.

usage: real-size.py TOKENIZERS [PARENT]

TOKENIZERS is the folder that scripts/tokenizers.sh makes. All files go to a new folder in PARENT (runs), which is
removed at the end. The target has V = 151,936, a tied head and bfloat16 weights in three files. It answers prompts, and
its states are cached. Each drafter is trained for three steps, evaluated and converted for engines.

At the end stands the peak memory of every process, and for training the memory that `--plan` estimated. A peak of more
than 5 % above the estimate is a failure. Needs numpy and the built binaries.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import json
import os
import shutil
import subprocess
import tempfile
import time

import numpy as np

tokenizers, *rest = sys.argv[1:]
parent = rest[0] if rest else "runs"
os.makedirs(parent, exist_ok=True)
folder = tempfile.TemporaryDirectory(prefix="real-size-", dir=parent)
out = folder.name
target = os.path.join(out, "target")
LAYERS, WIDTH, INNER, VOCAB, HEADS, GROUPS, DIM = 28, 1024, 3072, 151_936, 16, 8, 128
FILES = 3
GIB = 1 << 30
binaries = os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "release")


def write_target():
    os.makedirs(target)
    tensors = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        put = lambda name, *shape: tensors.update({f"model.layers.{layer}.{name}.weight": shape})
        for part, rows in ("q", HEADS), ("k", GROUPS), ("v", GROUPS):
            put(f"self_attn.{part}_proj", rows * DIM, WIDTH)
        put("self_attn.o_proj", WIDTH, HEADS * DIM)
        for part in "q", "k":
            put(f"self_attn.{part}_norm", DIM)
        for part in "gate", "up":
            put(f"mlp.{part}_proj", INNER, WIDTH)
        put("mlp.down_proj", WIDTH, INNER)
        put("input_layernorm", WIDTH)
        put("post_attention_layernorm", WIDTH)
    dice = np.random.default_rng(7)
    names, where = list(tensors), {}
    for number in range(FILES):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        own = names[number * len(names) // FILES : (number + 1) * len(names) // FILES]
        header, at = {}, 0
        for name in own:
            size = 2 * int(np.prod(tensors[name]))
            header[name] = {"dtype": "BF16", "shape": tensors[name], "data_offsets": [at, at + size]}
            where[name], at = file, at + size
        text = json.dumps(header).encode()
        with open(os.path.join(target, file), "wb") as data:
            data.write(len(text).to_bytes(8, "little") + text)
            for name in own:
                shape = tensors[name]
                values = np.ones(shape, np.float32) if len(shape) == 1 else 0.02 * dice.standard_normal(shape, np.float32)
                data.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    index = {"metadata": {"total_size": sum(2 * int(np.prod(shape)) for shape in tensors.values())}, "weight_map": where}
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": DIM,
        "vocab_size": VOCAB, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True, "eos_token_id": 151645, "dtype": "bfloat16",
    }
    for name, content in ("model.safetensors.index.json", index), ("config.json", config):
        with open(os.path.join(target, name), "w") as file:
            json.dump(content, file)
    for name in os.listdir(os.path.join(tokenizers, "qwen3")):
        shutil.copy(os.path.join(tokenizers, "qwen3", name), target)


table = []


def run(what, *command, planned=None):
    """Runs a binary, notes how long it took and how much memory it held at its peak, and gives what it printed."""
    print(f"== {what}", file=sys.stderr)
    began = time.monotonic()
    process = subprocess.Popen([os.path.join(binaries, command[0]), *command[1:]], stdout=subprocess.PIPE, text=True)
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"real-size: {what}: {' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    table.append((what, time.monotonic() - began, used.ru_maxrss * 1024, planned))
    return printed


def recipe(name, drafter):
    """A recipe file."""
    path = os.path.join(out, name + ".yaml")
    content = {
        "name": name, "seed": 1, "target": {"model": target, "layer_ids": [1, 13, 25]}, "drafter": drafter,
        "data": {"states": {"cache": os.path.join(out, "cache")}, "chat_template": "qwen", "system_prompt": "", "max_length": 512},
        "train": {
            "precision": "bf16", "local_batch_size": 1, "global_batch_size": 1, "max_train_steps": 3, "lr": 1e-3, "warmup_ratio": 0.04,
        },
        "logging": {"logging_steps": 1, "checkpointing_steps": 3, "output_dir": os.path.join(out, "checkpoints")},
    }
    with open(path, "w") as file:
        json.dump(content, file)
    return path


# A token of Qwen3 that no text has, as the reference's recipes take it.
block = {"block_size": 7, "num_draft_layers": 2, "mask_token_id": 151669, "num_anchors": 32}
drafters = {
    "dspark": {"dspark": {**block, "markov": {"type": "vanilla", "rank": 256}, "confidence": {"with_markov": True, "alpha": 1.0},
                          "loss": {"ce_alpha": 0.1, "l1_alpha": 0.9, "decay_gamma": 4.0}}},
    "dflash": {"dflash": {**block, "loss": {"ce_alpha": 1.0, "l1_alpha": 0.0, "decay_gamma": 4.0}}},
    "dflash2": {"dflash2": block},
    "eagle3": {"eagle3": {"num_draft_layers": 1, "ttt_length": 4}},
}

# In a process of its own: what this one has held counts as held by those that it starts.
if not (writer := os.fork()):
    failed = 1
    try:
        write_target()
        failed = 0
    finally:
        os._exit(failed)
if os.waitpid(writer, 0)[1]:
    sys.exit("real-size: the target could not be written")
prompts, answers = os.path.join(out, "prompts.jsonl"), os.path.join(out, "answers.jsonl")
run("split", "deepspec-data", "split", "--quiet", "--dataset", "assets/real-prompts.jsonl", "--sample-size", "7", "--test-size", "0.2",
    "--train-output", prompts, "--eval-output", os.path.join(out, "held.jsonl"))
run("regenerate", "deepspec-data", "regenerate", "--quiet", "--local-model", target, "--model", "size", "--input", prompts, "--output", answers,
    "--max-tokens", "24", "--temperature", "0", "--max-model-len", "512")
recipes = {name: recipe(name, drafter) for name, drafter in drafters.items()}
run("cache build", "deepspec-data", "cache", "build", "--quiet", "--config", recipes["dspark"], "--input", answers, "--output-dir",
    os.path.join(out, "cache"))
for name, file in recipes.items():
    plan = json.loads(run(f"{name}: plan", "deepspec-train", "--quiet", "--config", file, "--plan", "--json"))
    planned = plan["memory_total"]
    run(f"{name}: 3 steps", "deepspec-train", "--quiet", "--config", file, planned=planned)
    checkpoint = os.path.join(out, "checkpoints", name, "step_3")
    run(f"{name}: evaluation", "deepspec-eval", "run", "--quiet", "--target", target, "--draft", checkpoint, "--suites-dir", "eval_datasets", "--suite",
        "smoke-chat", "--limit", "2", "--max-new-tokens", "12", "--max-num-seqs", "2", "--no-baseline", "--output-dir", os.path.join(out, "eval-" + name))
    # Eagle3 with Qwen3 layers is not known to llama.cpp.
    for engine in ["vllm", "gguf"][: 1 if name == "eagle3" else 2]:
        run(f"{name}: --to {engine}", "deepspec-eval", "checkpoint", "convert", "--quiet", "--from", checkpoint, "--to", engine, "--target", target,
            "--output-dir", os.path.join(out, f"{engine}-{name}"))

print("| step | seconds | peak memory, GiB | planned, GiB |\n|---|---|---|---|")
beyond = []
for what, seconds, peak, planned in table:
    told = "" if planned is None else f"{planned / GIB:.2f}"
    print(f"| {what} | {seconds:.0f} | {peak / GIB:.2f} | {told} |")
    if planned is not None and peak > 1.05 * planned:
        beyond.append(what)
if beyond:
    sys.exit(f"real-size: more memory than planned: {', '.join(beyond)}")
