#!/usr/bin/env python3
"""Has llama-server answer prompts, and counts cycles and seconds.

usage: ask.py URL PROMPTS.jsonl MAX_TOKENS OUT.jsonl

A line of PROMPTS has `suite`, `id` and `prompt`, the user's only turn. Answers are greedy, one at a time. Each gets a
line in OUT. Prompts whose lines are there already are not asked again.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import json
import os
import urllib.request

url, prompts, most, out = sys.argv[1:]


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


done = set()
if os.path.exists(out):
    with open(out) as file:
        whole = [line for line in file if line.endswith("\n")]
    # What a kill cut off is asked again.
    with open(out + ".partial", "w") as file:
        file.writelines(whole)
    os.replace(out + ".partial", out)
    done = {(row["suite"], row["id"]) for row in map(json.loads, whole)}
with open(prompts) as file:
    asked = [row for row in map(json.loads, file) if (row["suite"], row["id"]) not in done]
with open(out, "a") as file:
    for number, row in enumerate(asked, 1):
        before = drafts()
        messages = {"messages": [{"role": "user", "content": row["prompt"]}]}
        answer = post("/completion", {
            "prompt": post("/apply-template", messages)["prompt"], "n_predict": int(most), "temperature": 0,
            "return_tokens": True, "cache_prompt": False,
        })
        file.write(json.dumps({
            "suite": row["suite"], "id": row["id"], "token_ids": answer["tokens"], "cycles": drafts() - before,
            "ended": answer["stop_type"] == "eos", "decoded": answer["timings"]["predicted_n"],
            "seconds": answer["timings"]["predicted_ms"] / 1000,
        }) + "\n")
        file.flush()
        print(f"\r{number}/{len(asked)}", end="", file=sys.stderr)
print(file=sys.stderr)
