#!/usr/bin/env python3
"""Trains drafters with and without a sliding window on contexts of 4,096 tokens, and tests them on up to 32,768.

    scripts/long-context.py --text BOOK [--demo runs/demo] [--output runs/long-context] [--seeds N] [--jobs N]
    scripts/long-context.py --text BOOK --lengths 4096 16384    32,768 tokens take ten minutes per drafter on a core

The target is the toy with a sliding window in all layers, so that it works at any length. Its prompts are those of the
toy behind a passage of BOOK, a plain text in the public domain. The last quarter of the book is for the test. Uses the
prompts in the folder that --demo names, as scripts/demo.sh leaves one. Needs the package tokenizers. An existing run is
not repeated, so a killed script goes on where it stopped.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ablations import accepted_length, spread

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / "target" / "release"
TOY = ROOT / "assets" / "tiny-target"
SUITES = ("smoke-math", "smoke-code", "smoke-chat")
# Tokens that a layer of the target sees.
TARGET_WINDOW = 512
TRAINED = 4096
LENGTHS = (4096, 8192, 16384, 32768)
DRAFTERS = {"full attention": None, "window of 512": 512, "window of 128": 128}
ROWS, STEPS = 320, 500
# Prompts of each suite, and tokens of an answer.
LIMIT, ANSWER = 8, 128
# Room for the question, its template and the answer.
RESERVED = 256


def run(*command, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([str(each) for each in command], env=environment, cwd=ROOT, capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


class Book:
    """Passages of a book, of so many tokens."""

    def __init__(self, file, tokenizer):
        from tokenizers import Tokenizer

        self.text = re.sub(r"\s+", " ", file.read_text())
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        sample = self.text[:200_000]
        self.characters_per_token = len(sample) / len(self.tokenizer.encode(sample).ids)

    def passage(self, tokens, part, chance):
        """A passage that begins within this part of the book: two fractions."""
        # With room for passages whose tokens are longer.
        size = int(tokens * self.characters_per_token * 1.3)
        first, last = int(part[0] * len(self.text)), int(part[1] * len(self.text)) - size
        if last <= first:
            sys.exit(f"the book is too short: {len(self.text)} characters, and a passage has {size}")
        start = chance.randint(first, last)
        encoded = self.tokenizer.encode(self.text[start : start + size])
        if len(encoded.ids) < tokens:
            sys.exit(f"{size} characters at {start} of the book are {len(encoded.ids)} tokens, fewer than {tokens}")
        return self.text[start : start + encoded.offsets[tokens - 1][1]]


def write(path, text):
    """Writes aside, then renames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".new")
    aside.write_text(text)
    aside.replace(path)


def windowed_target(out):
    """The toy with a window in all layers."""
    for file in TOY.iterdir():
        if not (out / file.name).exists():
            out.mkdir(parents=True, exist_ok=True)
            (out / file.name).symlink_to(file)
    config = json.loads((TOY / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config |= {"use_sliding_window": True, "sliding_window": TARGET_WINDOW, "max_window_layers": 0}
    config |= {"layer_types": ["sliding_attention"] * layers, "max_position_embeddings": 2 * max(LENGTHS)}
    (out / "config.json").unlink()
    write(out / "config.json", json.dumps(config))
    return out


def training_rows(demo, book):
    """Prompts of the demo behind passages of up to the trained length."""
    chance, rows = random.Random(1), []
    for line in (demo / "train.jsonl").read_text().splitlines()[:ROWS]:
        row = json.loads(line)
        user = next(message for message in row["conversations"] if message["role"] == "user")
        passage = book.passage(chance.randint(TRAINED // 4, TRAINED - 2 * RESERVED), (0, 0.75), chance)
        user["content"] = f"{passage}\n\n{user['content']}"
        rows.append(json.dumps(row))
    return "\n".join(rows) + "\n"


def suite_rows(suite, tokens, book):
    """Prompts of a suite behind passages of the rest of the book."""
    chance, rows = random.Random(f"{suite} {tokens}"), []
    for line in (ROOT / "eval_datasets" / f"{suite}.jsonl").read_text().splitlines()[:LIMIT]:
        question = json.loads(line)["turns"][0]
        rows.append(json.dumps({"turns": [f"{book.passage(tokens - RESERVED, (0.75, 1), chance)}\n\n{question}"]}))
    return "\n".join(rows) + "\n"


def cached_states(out, target):
    """The target's answers to the prompts, and its states."""
    if (out / "cache" / "manifest.json").is_file():
        return
    # A killed regeneration goes on.
    if not (out / "answered").is_file():
        log = (out / "serve.log").open("w+")
        serve = [BIN / "deepspec-data", "--quiet", "serve", "--model", target, "--port", "0", "--max-num-seqs", "8"]
        server = subprocess.Popen([*map(str, serve), "--max-model-len", str(TRAINED)], stderr=log, cwd=ROOT)
        try:
            while not (found := re.search(r"listening on (\S+)\n", (out / "serve.log").read_text())):
                if server.poll() is not None:
                    sys.exit((out / "serve.log").read_text())
                time.sleep(0.1)
            run(
                BIN / "deepspec-data", "regenerate", "--input", out / "train.jsonl", "--output", out / "answers.jsonl",
                "--model", target, "--server", found[1], "--concurrency", "16", "--temperature", "1.0",
                "--max-tokens", "160", "--seed", "1", "--disable-thinking",
            )
        finally:
            server.kill()
            server.wait()
        write(out / "answered", "")
    run(
        BIN / "deepspec-data", "cache", "build", *recipe(out, target),
        "--input", out / "answers.jsonl", "--output-dir", out / "cache",
    )


def recipe(out, target, *settings):
    settings = [
        f"target.model={target}",
        f"data.states.cache={out}/cache",
        f"data.max_length={TRAINED}",
        f"logging.output_dir={out}",
        *settings,
    ]
    return ["--config", "configs/tiny/dspark.yaml", *(word for each in settings for word in ("--set", each))]


def drafter(out, target, label, seed, lengths):
    """Trains a drafter; returns its accepted length by length of the context."""
    window = DRAFTERS[label]
    name = f"{'full' if window is None else f'window{window}'}-seed{seed}"
    settings = [f"name={name}", f"seed={seed}", f"train.max_train_steps={STEPS}"]
    settings += [] if window is None else [f"drafter.dspark.sliding_window={window}"]
    run(BIN / "deepspec-train", "--quiet", *recipe(out, target, *settings))
    taus = []
    for length in lengths:
        results = out / f"{name}.eval-{length}" / "results.json"
        if not results.is_file():
            suites = [f"--suite={out}/{suite}-{length}.jsonl" for suite in SUITES]
            run(
                BIN / "deepspec-eval", "run", "--quiet", "--no-baseline", "--target", target, *suites,
                "--draft", out / name / "step_latest", "--max-new-tokens", ANSWER, "--max-num-seqs", "2",
                "--output-dir", results.parent,
            )
        taus.append(accepted_length(results))
    print(f"{name}: {taus}", file=sys.stderr, flush=True)
    return taus


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a book in the public domain")
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--output", type=Path, default=Path("runs/long-context"))
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS, help="tokens of the test's prompts")
    parser.add_argument("--seeds", type=int, choices=[1, 3], default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    demo, out = (ROOT / path for path in (args.demo, args.output))
    # So that the server ends with the script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    book = Book(args.text, TOY / "tokenizer.json")
    target = windowed_target(out / "target")
    settings = json.dumps({"text": str(args.text.resolve()), "demo": str(demo)})
    kept = out / "settings.json"
    if kept.is_file() and kept.read_text() != settings:
        sys.exit(f"{out} holds runs with {kept.read_text()}, not with {settings}; name another --output")
    if not kept.is_file():
        for suite in SUITES:
            for length in LENGTHS:
                write(out / f"{suite}-{length}.jsonl", suite_rows(suite, length, book))
        write(out / "train.jsonl", training_rows(demo, book))
        write(kept, settings)
    cached_states(out, target)
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {
            label: [pool.submit(drafter, out, target, label, seed, args.lengths) for seed in range(1, args.seeds + 1)]
            for label in DRAFTERS
        }
    print("| DSpark | " + " | ".join(f"τ at {length // 1024}k" for length in args.lengths) + " |")
    print("|---|" + "---|" * len(args.lengths))
    for label, futures in runs.items():
        taus = [future.result() for future in futures]
        print(f"| {label} | " + " | ".join(spread([of[place] for of in taus]) for place in range(len(args.lengths))) + " |")


if __name__ == "__main__":
    main()
