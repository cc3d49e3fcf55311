#!/usr/bin/env python3
"""Compares acceptance by confidence threshold, per domain: runs that cut their blocks there, and estimates of a whole run.

usage: thresholds.py OUTPUT_DIR [ARGUMENTS OF deepspec-eval run...]

Runs `deepspec-eval run` once with whole blocks and once for each threshold, into OUTPUT_DIR. Existing runs are not made
again. For each it prints the share of verified drafts that were accepted, by domain and over all, and tau. Columns
"estimated" come from the whole run's sweep. It cuts every recorded block, and does not know the blocks that would
follow.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import json
import pathlib
import subprocess

THRESHOLDS = [0.0, 0.2, 0.4, 0.6, 0.8, 0.9]
PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "target/release/deepspec-eval"


def results(out, threshold, arguments):
    folder = out / f"threshold-{threshold}"
    if not (folder / "results.json").exists():
        schedule = ["--schedule", f"threshold:{threshold}"] if threshold else []
        command = [PROGRAM, "run", "--quiet", "--no-baseline", *arguments, *schedule, "--output-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "results.json").read_text())


def measured(run, domain=None):
    return [suite["counts"] for suite in run["suites"] if domain in (None, suite["domain"])]


def estimated(whole, threshold, domain=None):
    points = [point for suite in whole["suites"] if domain in (None, suite["domain"]) for point in suite.get("sweep", [])]
    return [point for point in points if round(point["threshold"], 2) == threshold]


def share(counts):
    return sum(count["accepted"] for count in counts) / max(sum(count["proposed"] for count in counts), 1)


def tau(counts):
    return sum(count["committed"] for count in counts) / max(sum(count["cycles"] for count in counts), 1)


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    out, arguments = pathlib.Path(sys.argv[1]), sys.argv[2:]
    runs = {threshold: results(out, threshold, arguments) for threshold in THRESHOLDS}
    whole = runs[0.0]
    if not whole["confidence"]:
        sys.exit("thresholds: the drafter has no confidence head")
    if not any("sweep" in suite for suite in whole["suites"]):
        sys.exit(f"thresholds: {out}/threshold-0.0 says nothing suite by suite, an earlier version made it; remove it")
    domains = list(dict.fromkeys(suite["domain"] for suite in whole["suites"]))
    columns = [column for domain in domains for column in (f"{domain}: accepted", "estimated")]
    print("| threshold | " + " | ".join(columns) + " | all | estimated | τ | estimated |")
    print("|---" * (len(columns) + 5) + "|")
    for threshold, run in runs.items():
        parts = [(measured(run, domain), estimated(whole, threshold, domain)) for domain in domains]
        cut, sweep = measured(run), estimated(whole, threshold)
        shares = [share(counts) for part in parts for counts in part] + [share(cut), share(sweep)]
        lengths = [tau(cut), tau(sweep)]
        print(f"| {threshold} | " + " | ".join(f"{100 * cell:.1f} %" for cell in shares) + " | " + " | ".join(f"{length:.2f}" for length in lengths) + " |")


main()
