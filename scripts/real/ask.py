#!/usr/bin/env python3
"""Asks llama-server what an evaluation asked, and counts cycles and seconds.

usage: ask.py URL EVALUATION SUITES MAX_TOKENS OUT.jsonl

EVALUATION is a folder of `deepspec-eval run`, SUITES that of the suites' files. Answers are the likeliest ones, one at a time. A line goes to OUT for
each; lines that are there already are not asked again.
"""

import json
import os
import sys
import urllib.request

url, evaluation, suites, most, out = sys.argv[1:]


def post(path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def drafts():
    """Drafts since the server was started: its cycles, if it has a drafter."""
    with urllib.request.urlopen(url + "/metrics") as response:
        for line in response.read().decode().splitlines():
            if line.startswith("llamacpp:spec_decode_num_drafts_total "):
                return int(float(line.split()[1]))
    return 0


def prompts(suite):
    with open(os.path.join(suites, suite + ".jsonl")) as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return {str(row.get("id", place)): row["turns"][0] for place, row in enumerate(rows)}


done = set()
if os.path.exists(out):
    with open(out) as file:
        done = {(row["suite"], row["id"]) for row in map(json.loads, file)}
with open(os.path.join(evaluation, "outputs.jsonl")) as file:
    asked = [row for row in map(json.loads, file) if row["turn"] == 0 and (row["suite"], row["id"]) not in done]
known = {}
with open(out, "a") as file:
    for number, row in enumerate(asked, 1):
        suite = row["suite"]
        known.setdefault(suite, prompts(suite))
        messages = {"messages": [{"role": "user", "content": known[suite][row["id"]]}]}
        before = drafts()
        answer = post("/completion", {
            "prompt": post("/apply-template", messages)["prompt"], "n_predict": int(most), "temperature": 0,
            "return_tokens": True, "cache_prompt": False,
        })
        ids, timings = answer["tokens"], answer["timings"]
        # The token that ends an answer is among its tokens here and not there.
        tokens = len(ids) + (answer["stop_type"] == "eos" and ids == row["token_ids"][: len(ids)] and len(ids) < row["tokens"])
        file.write(json.dumps({
            "suite": suite, "id": row["id"], "tokens": tokens, "cycles": drafts() - before,
            "same": ids == row["token_ids"][: len(ids)] and tokens == row["tokens"],
            "decoded": timings["predicted_n"], "ms": timings["predicted_ms"],
        }) + "\n")
        file.flush()
        print(f"\r{number}/{len(asked)}", end="", file=sys.stderr)
print(file=sys.stderr)
