#!/usr/bin/env python3
"""Prints the prompts that an evaluation asked, a line of JSON each with suite, id and prompt.

usage: asked.py EVALUATION SUITES

EVALUATION is a folder of `deepspec-eval run`, SUITES that of the suites' files.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import json
import os

evaluation, suites = sys.argv[1:]
known = {}


def prompts(suite):
    with open(os.path.join(suites, suite + ".jsonl")) as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return {str(row.get("id", place)): row["turns"][0] for place, row in enumerate(rows)}


with open(os.path.join(evaluation, "outputs.jsonl")) as file:
    for row in map(json.loads, file):
        if row["turn"] == 0:
            suite = row["suite"]
            known.setdefault(suite, prompts(suite))
            print(json.dumps({"suite": suite, "id": row["id"], "prompt": known[suite][row["id"]]}))
