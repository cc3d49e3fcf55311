#!/usr/bin/env python3
"""The table that scripts/real.sh ends with, in Markdown.

usage: table.py OUTPUT_DIR DRAFTER...

Reads eval-DRAFTER, llama-DRAFTER.jsonl and llama-plain.jsonl of OUTPUT_DIR, and vllm-*.jsonl where they are.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import json
import math
import os
import random

folder, *drafters = sys.argv[1:]
RESAMPLES = 2000


def rows(engine, drafter):
    """What an engine answered, None if it was not asked: each answer's tokens, cycles and seconds, and whether it is the evaluation's."""
    path = os.path.join(folder, f"{engine}-{drafter}.jsonl")
    if not os.path.exists(path):
        return None
    with open(os.path.join(folder, f"eval-{drafter if drafter != 'plain' else drafters[0]}", "outputs.jsonl")) as file:
        here = {(row["suite"], row["id"]): row["token_ids"] for row in map(json.loads, file) if row["turn"] == 0}
    found = []
    with open(path) as file:
        for row in map(json.loads, file):
            ids, own = row["token_ids"], here[row["suite"], row["id"]]
            # llama.cpp leaves out the token that ends an answer, but counts it.
            tokens = len(ids) + row.get("ended", False)
            found.append({
                "suite": row["suite"], "tokens": tokens, "same": tokens == len(own) and ids == own[: len(ids)],
                "cycles": row["cycles"] if "cycles" in row else len(row["accepted"] or []),
                "decoded": row.get("decoded", len(ids)), "seconds": row["seconds"],
            })
    return found


def length(samples):
    """Accepted length: tokens behind the first one by cycles."""
    cycles = sum(row["cycles"] for row in samples)
    return (sum(row["tokens"] for row in samples) - len(samples)) / cycles if cycles else None


def poisson(dice):
    """How often a prompt is in a resample: Poisson of mean 1, as in the evaluation's own intervals."""
    count, product = 0, dice.random()
    while product > math.exp(-1):
        count, product = count + 1, product * dice.random()
    return count


def interval(samples):
    """95 % of what resamples of the prompts give."""
    dice = random.Random(1)
    with_cycles = [row for row in samples if row["cycles"]]
    drawn = ([row for row in with_cycles for _ in range(poisson(dice))] for _ in range(RESAMPLES))
    found = sorted(length(rows) for rows in drawn if rows)
    return {"low": found[len(found) // 40], "high": found[len(found) - len(found) // 40 - 1]} if found else None


def cell(value, between):
    if value is None:
        return "–"
    return f"{value:.2f} ({between['low']:.2f} … {between['high']:.2f})" if between else f"{value:.2f}"


results = {}
for drafter in drafters:
    with open(os.path.join(folder, f"eval-{drafter}", "results.json")) as file:
        results[drafter] = json.load(file)
engines = [engine for engine in ("llama", "vllm") if any(rows(engine, drafter) for drafter in drafters)]
titles = {"llama": "llama.cpp", "vllm": "vLLM"}
how = {
    "llama": "llama.cpp, one request on one thread, decoding alone",
    "vllm": "vLLM, float32, 16 requests on all cores, prompts included; with drafters Triton's interpreter runs its kernels, many times slower than compiled ones",
}
header = ["suite", "prompts"]
for drafter in drafters:
    header += [f"{drafter}, deepspec-eval"] + [f"{drafter}, {titles[engine]}" for engine in engines]
print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
means = {}
first = results[drafters[0]]["suites"]
for place, suite in enumerate(first):
    cells = [suite["name"], str(suite["counts"]["samples"])]
    for drafter in drafters:
        metrics = results[drafter]["suites"][place]["metrics"]
        cells.append(cell(metrics["accepted_length"], metrics["accepted_length_interval"]))
        means.setdefault((drafter, "here"), []).append(metrics["accepted_length"])
        for engine in engines:
            samples = [row for row in rows(engine, drafter) or [] if row["suite"] == suite["name"]]
            found = length(samples) if samples else None
            cells.append(cell(found, interval(samples) if samples else None))
            means.setdefault((drafter, engine), []).append(found)
    print("| " + " | ".join(cells) + " |")
mean = lambda values: f"{sum(values) / len(values):.2f}" if values and None not in values else "–"
cells = ["mean", ""]
for drafter in drafters:
    cells += [mean(means[drafter, "here"])] + [mean(means[drafter, engine]) for engine in engines]
print("| " + " | ".join(cells) + " |\n")

print("| tokens/s | plain | " + " | ".join(drafters) + " |\n|---|---|" + "---|" * len(drafters))
for engine in engines:
    speeds = []
    for name in ["plain", *drafters]:
        samples = rows(engine, name)
        speeds.append(sum(row["decoded"] for row in samples) / sum(row["seconds"] for row in samples) if samples else None)
    print(f"| {how[engine]} | " + " | ".join("–" if speed is None else f"{speed:.1f}" for speed in speeds) + " |")
print()
for engine in engines:
    for drafter in drafters:
        samples = rows(engine, drafter)
        if samples:
            same = sum(row["same"] for row in samples)
            print(f"{titles[engine]}, {drafter}: {same} of {len(samples)} answers are those of the evaluation, token for token.")
if "vllm" in engines:
    print("vLLM's norm of keys is mended for CPUs (scripts/vllm_cpu); as it comes, fewer drafted tokens are accepted there.")
print("The evaluation counts a cycle that runs past the limit of tokens, as the reference does; llama.cpp does not begin one for a single last token.")
