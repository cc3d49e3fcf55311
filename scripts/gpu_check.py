"""The Python parts of scripts/gpu-check.sh: rows to train on, a random target, a loop on transformers, the report."""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROLES = {"human": "user", "gpt": "assistant"}
# Bytes a second that makers state of a GPU's memory, by part of its name.
BANDWIDTHS = [("NVIDIA H200", 4.8e12), ("H100 80GB HBM3", 3.35e12), ("H100 PCIe", 2.0e12), ("A100-SXM4-80GB", 2.04e12), ("NVIDIA B200", 8.0e12)]
TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


def rows(args):
    for line in args.prompts.read_text().splitlines()[: args.count]:
        row = json.loads(line)
        said = [{"role": ROLES.get(m["from"], m["from"]), "content": m["value"]} for m in row["conversations"]]
        print(json.dumps({"id": row["id"], "conversations": said}))


def target(args):
    """A random model in bfloat16 with the tokenizer of another: its speed is that of a trained one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = json.loads(args.shape.read_text())
    config = AutoConfig.for_model(**shape)
    config.eos_token_id = config.vocab_size - 1
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(args.output)
    for name in TOKENIZER:
        shutil.copy(args.tokenizer / name, args.output)


def loop(args):
    """One prompt at a time, greedy; the first is decoded once untimed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).to(args.device).eval()
    turns = [json.loads(line)["turns"][0] for line in args.suite.read_text().splitlines()[:2]]
    finish = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    made = seconds = 0
    for timed, prompt in [(False, turns[0]), *((True, turn) for turn in turns)]:
        message = [{"role": "user", "content": prompt}]
        told = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, enable_thinking=False, return_tensors="pt", return_dict=True
        ).to(args.device)
        finish()
        started = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(**told, max_new_tokens=args.tokens, do_sample=False)
        finish()
        if timed:
            made += answer.shape[1] - told["input_ids"].shape[1]
            seconds += time.perf_counter() - started
    print(json.dumps({"tokens": made, "seconds": seconds, "tokens_per_s": made / seconds}))


def golden(text):
    counts = [tuple(map(int, found)) for found in re.findall(r"(\d+) passed; (\d+) failed", text)]
    return {"passed": sum(passed for passed, _ in counts), "failed": sum(failed for _, failed in counts)}


def decoded(folder):
    results = json.loads((folder / "results.json").read_text())
    [timing] = [suite["timing"] for suite in results["suites"]]
    tokens = sum(len(json.loads(line)["token_ids"]) for line in (folder / "outputs.jsonl").read_text().splitlines())
    return {"tokens": tokens, "seconds": timing["wall_s"], "tokens_per_s": tokens / timing["wall_s"], "steps": timing["steps"]}


def decoding(run):
    share = run["of_memory_bandwidth"]
    told = "" if share is None else f", {100 * share:.1f} % of the memory's bandwidth"
    return f"{run['tokens_per_s']:.0f} tokens/s{told}"


def device(is_standin):
    if is_standin:
        return "none: the stand-in of tests/standin, at toy size"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def of_bandwidth(run, weights, device):
    """How much of its memory's bandwidth a device needs to read all weights, the embedding's tied to the head's, once in each step."""
    known = [bandwidth for name, bandwidth in BANDWIDTHS if name in device]
    return weights * run["steps"] / run["seconds"] / known[0] if known else None


def report(args):
    out = args.output
    tests = golden((out / "golden.log").read_text())
    groups = []
    for text in args.groups:
        processes, code = map(int, text.split(":"))
        groups.append({"processes": processes, "backend": args.backend, "passed": code == 0})
    found = {
        "device": device(args.standin == 1),
        "seconds": args.seconds,
        "golden": {**tests, "exit_code": args.golden},
        "groups": groups,
        "bench": json.loads((out / "bench.json").read_text()),
        "decode": {str(slots): decoded(out / f"decode-{slots}") for slots in args.max_num_seqs},
        "transformers_loop": json.loads((out / "loop.json").read_text()),
    }
    for run in found["decode"].values():
        run["of_memory_bandwidth"] = of_bandwidth(run, args.weights, found["device"])
    (out / "gpu-check.json").write_text(json.dumps(found, indent=2) + "\n")
    bench = found["bench"]
    mfu = "not known" if bench["mfu"] is None else f"{100 * bench['mfu']:.1f} %"
    lines = [
        ("golden tests", f"{tests['passed']} passed, {tests['failed']} failed"),
        *[(f"group of {g['processes']} over {g['backend']}", "passed" if g["passed"] else "FAILED") for g in groups],
        (f"training {bench['name']}", f"{bench['samples_per_s']:.2f} samples/s, MFU {mfu}"),
        ("GPU memory of it at most", f"{bench['device_memory_peak_bytes'] / 1e9:.2f} GB"),
        *[(f"decoding, slots: {slots}", decoding(run)) for slots, run in found["decode"].items()],
        ("transformers, one by one", f"{found['transformers_loop']['tokens_per_s']:.0f} tokens/s"),
    ]
    table = [f"| {found['device']} | |", "|---|---|", *[f"| {what} | {value} |" for what, value in lines]]
    (out / "gpu-check.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    if args.golden or tests["failed"] or not tests["passed"] or not all(g["passed"] for g in groups):
        sys.exit(f"gpu-check: something failed; see the logs in {out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("rows")
    command.add_argument("prompts", type=Path)
    command.add_argument("count", type=int)
    command.set_defaults(run=rows)
    command = commands.add_parser("target")
    command.add_argument("shape", type=Path)
    command.add_argument("tokenizer", type=Path)
    command.add_argument("output", type=Path)
    command.set_defaults(run=target)
    command = commands.add_parser("loop")
    command.add_argument("target", type=Path)
    command.add_argument("suite", type=Path)
    command.add_argument("tokens", type=int)
    command.add_argument("device")
    command.set_defaults(run=loop)
    command = commands.add_parser("report")
    command.add_argument("output", type=Path)
    command.add_argument("--seconds", type=int)
    command.add_argument("--standin", type=int)
    command.add_argument("--backend")
    command.add_argument("--golden", type=int)
    command.add_argument("--groups", nargs="+")
    command.add_argument("--max-num-seqs", nargs="+", type=int)
    command.add_argument("--weights", type=int)
    command.set_defaults(run=report)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
