#!/usr/bin/env python3
"""Compares drafters, heads, depths and block sizes on the toy target and prints the tables of docs/ablations.md.

    scripts/ablations.py [--demo runs/demo] [--jobs N]      by default as many runs at once as there are cores

Uses the cache that scripts/demo.sh leaves in its folder. A run that is already there is not repeated, so a killed script goes
on where it stopped. Every run trains on one thread and is evaluated on the 144 held-out smoke prompts at temperature 1.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (1, 2, 3)
RATES = ("2.5e-3", "5e-3", "1e-2")
LENGTHS = (250, 500, 1000, 2000)
SHORT = 500
DRAFTERS = ("dspark", "dflash", "eagle3")
# Two-sided 95 % quantile of Student's t with len(SEEDS) - 1 = 2 degrees of freedom.
T_QUANTILE = 4.303
BLOCK = "drafter.dspark"
VARIANTS = {
    "recipe (2 layers, γ 7, vanilla r 64)": [],
    "no Markov head": [f"{BLOCK}.markov=null", f"{BLOCK}.confidence.with_markov=false"],
    "gated head": [f"{BLOCK}.markov.type=gated"],
    "rnn head": [f"{BLOCK}.markov.type=rnn"],
    "1 layer": [f"{BLOCK}.num_draft_layers=1"],
    "3 layers": [f"{BLOCK}.num_draft_layers=3"],
    "γ 4": [f"{BLOCK}.block_size=4"],
    "γ 8": [f"{BLOCK}.block_size=8"],
    "γ 16": [f"{BLOCK}.block_size=16"],
}


class Bench:
    """Trains and evaluates, each run once."""

    def __init__(self, demo, jobs):
        self.demo, self.out = demo, demo / "ablations"
        self.out.mkdir(parents=True, exist_ok=True)
        self.pool = ThreadPoolExecutor(jobs)
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

    def submit(self, drafter, seed, steps, rate, sets=(), label="recipe"):
        name = f"{drafter}-{label}-steps{steps}-lr{rate}-seed{seed}".replace(" ", "_")
        return self.pool.submit(self.run, name, drafter, seed, steps, rate, sets)

    def run(self, name, drafter, seed, steps, rate, sets):
        results = self.out / f"{name}.eval" / "results.json"
        if not results.is_file():
            overrides = [
                f"data.states.cache={self.demo}/cache",
                f"logging.output_dir={self.out}",
                f"name={name}",
                f"seed={seed}",
                f"train.max_train_steps={steps}",
                f"train.lr={rate}",
                *sets,
            ]
            flags = itertools.chain.from_iterable(("--set", each) for each in overrides)
            self.call("deepspec-train", "--quiet", "--config", f"configs/tiny/{drafter}.yaml", *flags)
            suites = [f"--suite=smoke-{domain}" for domain in ("math", "code", "chat")]
            self.call(
                "deepspec-eval", "run", "--quiet", "--no-baseline", "--target", "assets/tiny-target", *suites,
                "--draft", self.out / name / "step_latest", "--max-new-tokens", "256", "--output-dir", results.parent,
            )
            print(f"{name}: τ {accepted_length(results):.3f}", file=sys.stderr)
        return Run(accepted_length(results), training_seconds(self.out / name))

    def call(self, binary, *args):
        command = [ROOT / "target" / "release" / binary, *args]
        done = subprocess.run(command, cwd=ROOT, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")


class Run:
    """Macro accepted length and seconds of training."""

    def __init__(self, tau, seconds):
        self.tau, self.seconds = tau, seconds


def accepted_length(results):
    suites = json.loads(results.read_text())["suites"]
    return sum(suite["metrics"]["accepted_length"] for suite in suites) / len(suites)


def training_seconds(folder):
    """Time in steps, as the log has it: loading and saving are not in it."""
    windows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before = [0, *(window["step"] for window in windows)]
    return sum(window["step_s"] * (window["step"] - last) for window, last in zip(windows, before))


def mean(values):
    return sum(values) / len(values)


def interval(values):
    """Half width of the 95 % interval of a mean."""
    centre = mean(values)
    deviation = math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))
    return T_QUANTILE * deviation / math.sqrt(len(values))


def collect(futures):
    return {key: [future.result() for future in runs] for key, runs in futures.items()}


def best_rates(bench):
    """The best of the same learning rates for each drafter, at SHORT steps over all seeds."""
    futures = {
        (drafter, rate): [bench.submit(drafter, seed, SHORT, rate) for seed in SEEDS]
        for drafter in DRAFTERS
        for rate in RATES
    }
    taus = {key: [run.tau for run in runs] for key, runs in collect(futures).items()}
    best = {drafter: max(RATES, key=lambda rate: mean(taus[drafter, rate])) for drafter in DRAFTERS}
    lines = [
        f"## Learning rates\n\nMean accepted length after {SHORT} steps over {len(SEEDS)} seeds; the best of each row is used below.\n",
        "| drafter | " + " | ".join(RATES) + " |",
        "|---|" + "---|" * len(RATES),
    ]
    for drafter in DRAFTERS:
        cells = (f"{mean(taus[drafter, rate]):.2f}" for rate in RATES)
        cells = (f"**{cell}**" if rate == best[drafter] else cell for cell, rate in zip(cells, RATES))
        lines.append(f"| {drafter} | " + " | ".join(cells) + " |")
    return best, lines


def by_length(bench, best):
    """Accepted length as training lengthens, with paired intervals."""
    futures = {
        (drafter, steps): [bench.submit(drafter, seed, steps, best[drafter]) for seed in SEEDS]
        for steps in LENGTHS
        for drafter in DRAFTERS
    }
    runs = collect(futures)
    lines = [
        "## Drafters as training lengthens\n",
        f"Mean over {len(SEEDS)} seeds; differences are paired by seed, ± is the half width of the 95 % interval (Student's t).\n",
        "| steps | DSpark τ | DFlash τ | Eagle3 τ | DSpark − DFlash | DSpark ÷ DFlash | DSpark − Eagle3 | seconds DSpark / DFlash / Eagle3 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for steps in LENGTHS:
        tau = {drafter: [run.tau for run in runs[drafter, steps]] for drafter in DRAFTERS}
        seconds = [mean([run.seconds for run in runs[drafter, steps]]) for drafter in DRAFTERS]

        def difference(other):
            pairs = [a - b for a, b in zip(tau["dspark"], tau[other])]
            return f"{mean(pairs):+.2f} ± {interval(pairs):.2f}"

        lines.append(
            f"| {steps} | "
            + " | ".join(f"{mean(tau[drafter]):.2f}" for drafter in DRAFTERS)
            + f" | {difference('dflash')} | {mean(tau['dspark']) / mean(tau['dflash']) - 1:+.0%} | {difference('eagle3')} | "
            + " / ".join(f"{each:.0f}" for each in seconds)
            + " |"
        )
    return lines


def variants(bench, best):
    """One change of the DSpark recipe at a time."""
    rate = best["dspark"]
    futures = {
        label: [bench.submit("dspark", seed, SHORT, rate, sets, label if sets else "recipe") for seed in SEEDS]
        for label, sets in VARIANTS.items()
    }
    runs = collect(futures)
    base = [run.tau for run in next(iter(runs.values()))]
    lines = [
        f"## One change at a time\n\nDSpark, {SHORT} steps, learning rate {rate}, {len(SEEDS)} seeds; differences from the first row are paired by seed.\n",
        "| variant | τ | difference | seconds |",
        "|---|---|---|---|",
    ]
    for label, of in runs.items():
        tau, pairs = [run.tau for run in of], [run.tau - b for run, b in zip(of, base)]
        change = f"{mean(pairs):+.2f} ± {interval(pairs):.2f}" if VARIANTS[label] else ""
        lines.append(f"| {label} | {mean(tau):.2f} | {change} | {mean([run.seconds for run in of]):.0f} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if not (ROOT / args.demo / "cache" / "manifest.json").is_file():
        sys.exit(f"{args.demo}/cache is no cache; run scripts/demo.sh {args.demo} first")
    bench = Bench(args.demo, args.jobs)
    best, rates = best_rates(bench)
    sections = [rates, by_length(bench, best), variants(bench, best)]
    print("\n\n".join("\n".join(section) for section in sections))


if __name__ == "__main__":
    main()
