#!/usr/bin/env python3
"""Acceptance by confidence threshold, per domain, from runs that really cut their blocks there, beside what the whole run foretells.

usage: thresholds.py OUTPUT_DIR [ARGUMENTS OF deepspec-eval run...]

Runs `deepspec-eval run` once with whole blocks and once for each threshold, into OUTPUT_DIR; runs that are there are not made again. Of each it
prints the share of verified drafts that were accepted, by domain and over all, and tau; "foretold" are they as the whole run's sweep estimates them, which cuts
every recorded block where it stands and knows nothing of the blocks that would follow.
"""

import json
import pathlib
import subprocess
import sys

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


def foretold(whole, threshold, domain=None):
    points = [point for suite in whole["suites"] if domain in (None, suite["domain"]) for point in suite.get("sweep", [])]
    return [point for point in points if round(point["threshold"], 2) == threshold]


def share(counts):
    return sum(count["accepted"] for count in counts) / max(sum(count["proposed"] for count in counts), 1)


def tau(counts):
    return sum(count["committed"] for count in counts) / max(sum(count["cycles"] for count in counts), 1)


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        sys.exit(2 if len(sys.argv) < 2 else 0)
    out, arguments = pathlib.Path(sys.argv[1]), sys.argv[2:]
    runs = {threshold: results(out, threshold, arguments) for threshold in THRESHOLDS}
    whole = runs[0.0]
    if not whole["confidence"]:
        sys.exit("thresholds: the drafter has no confidence head")
    if not any("sweep" in suite for suite in whole["suites"]):
        sys.exit(f"thresholds: {out}/threshold-0.0 says nothing suite by suite, an earlier version made it; remove it")
    domains = list(dict.fromkeys(suite["domain"] for suite in whole["suites"]))
    columns = [column for domain in domains for column in (f"{domain}: accepted", "foretold")]
    print("| threshold | " + " | ".join(columns) + " | all | foretold | τ | foretold |")
    print("|---" * (len(columns) + 5) + "|")
    for threshold, run in runs.items():
        parts = [(measured(run, domain), foretold(whole, threshold, domain)) for domain in domains]
        cut, sweep = measured(run), foretold(whole, threshold)
        shares = [share(counts) for part in parts for counts in part] + [share(cut), share(sweep)]
        lengths = [tau(cut), tau(sweep)]
        print(f"| {threshold} | " + " | ".join(f"{100 * cell:.1f} %" for cell in shares) + " | " + " | ".join(f"{length:.2f}" for length in lengths) + " |")


main()
