#!/usr/bin/env python3
"""Opens the pages that programs write in headless Chromium, and compares what they show with numbers computed here.

    scripts/test_pages.py      needs a build and chromium (CHROMIUM names another one)
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(os.environ.get("DEEPSPEC_TEST_BIN", ROOT / "target/release"))
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def program(name, *arguments):
    subprocess.run([BIN / name, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def shown(page, settings=""):
    """The page's HTML after its scripts ran, and what the console said."""
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--enable-logging=stderr",
                   "--virtual-time-budget=5000", "--dump-dom", f"file://{page}{settings}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not errors, errors
    # Nothing is loaded from elsewhere.
    assert not re.search(r'(?:src|href)="https?:', page.read_text()), "the page loads from elsewhere"
    return re.sub(r"(?s)<script.*?</script>", "", done.stdout)


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.S)[1])


def charts(dom):
    return [html.unescape(label) for label in re.findall(r'<svg [^>]*aria-label="([^"]*)"', dom)]


def throughput(data, requests, length, power, cost):
    """Tokens per second, by the formula that the page states."""
    def seconds(table):
        known = data["requests"]
        after = next((place for place, each in enumerate(known) if each >= requests), len(known) - 1)
        before = max(after - 1, 0)
        share = 0 if known[after] == known[before] else (requests - known[before]) / (known[after] - known[before])
        return table[before][length] + share * (table[after][length] - table[before][length])

    alive, tokens = 1.0, 1.0
    for place in range(length):
        alive *= data["acceptance"][min(place, len(data["acceptance"]) - 1)] ** power
        tokens += alive
    drafting = cost * seconds(data["draft_seconds"]) if length else 0.0
    return requests * tokens / (seconds(data["step_seconds"]) + drafting)


def check_explorer(page):
    data = data_of(page)
    first, last = data["requests"][0], data["requests"][-1]
    for load, length, acceptance, cost in [(0, 1, 50, 20), (1000, 2, 50, 20), (500, 3, 70, 40), (700, 0, 20, 0)]:
        length = min(length, len(data["draft_lengths"]) - 1)
        dom = shown(page, f"#load={load}&length={length}&acceptance={acceptance}&cost={cost}")
        assert charts(dom) == ["Speed-up under load", "Speed-up by block length", "Throughput", "Speed of each request"], charts(dom)
        answer = re.search(r'<p id="answer">(.*?)</p>', dom)[1]
        found = re.match(r"At (\d+) requests, (\d+) drafted tokens give ([\d.]+) × .* fastest length there is (\d+): ([\d.]+) ×", answer)
        assert found, answer
        requests = max(1, int(first * (last / first) ** (load / 1000) + 0.5))
        power, cost = 2 ** ((50 - acceptance) / 20), cost / 20
        plain = throughput(data, requests, 0, power, cost)
        rates = [throughput(data, requests, each, power, cost) / plain for each in data["draft_lengths"]]
        best = max(range(len(rates)), key=lambda each: rates[each])
        assert (int(found[1]), int(found[2]), int(found[4])) == (requests, length, best), (answer, requests, best)
        assert abs(float(found[3]) - rates[length]) < 0.0051 and abs(float(found[5]) - rates[best]) < 0.0051, (answer, rates)
    print(f"pages test: {page.parent.name}: sliders give the throughputs of the formula")


def main():
    if CHROMIUM is None:
        sys.exit("pages test: chromium is missing (apt-get install chromium)")
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        program("deepspec-eval", "--quiet", "economics", "configs/shapes/qwen3_4b.json", "--draft-weights", "6e8", "--output-dir", work / "economics")
        check_explorer(work / "economics/explorer.html")

        draft = ["--target", "assets/tiny-target", "--draft", "assets/tiny-dspark", "--device", "cpu"]
        program("deepspec-eval", "--quiet", "run", *draft, "--suite", "smoke-math", "--limit", 4, "--max-new-tokens", 48, "--no-baseline",
                "--output-dir", work / "run")
        program("deepspec-eval", "--quiet", "profile", *draft, "--max-num-seqs", "1,2,4", "--context-lens", "64", "--output", work / "cost.json")
        program("deepspec-eval", "--quiet", "simulate", work / "run", "--cost", work / "cost.json", "--concurrency", "1,2,4", "--cycles", 500,
                "--output-dir", work / "simulate")
        check_explorer(work / "simulate/explorer.html")

        run = work / "training"
        run.mkdir()
        rows = [{"step": step, "loss": 5.0 / step, "ce_loss": 4.0 / step, "tau_probabilistic": 1 + step / 10, "accept_rate": [0.9, 0.5],
                 "lr": 1e-3, "grad_norm": 1.0, "samples_per_s": 30.0} for step in range(1, 9)]
        rows.append({"step": 8, "eval": {"tau": 1.75}})
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        program("deepspec-train", "report", run)
        dom = shown(run / "report.html")
        assert charts(dom) == ["Loss", "Accepted length τ", "Acceptance by position, teacher-forced", "Terms of the loss, unweighted", "Learning rate",
                               "Gradient norm", "Speed"], charts(dom)
        tau = dom.split('aria-label="Accepted length τ"')[1].split("</svg>")[0]
        assert tau.count("<circle") == 1 and len(re.search(r'points="([^"]*)"', tau)[1].split()) == 8, tau
        print("pages test: training: every chart is drawn, with 8 steps and 1 evaluation")


if __name__ == "__main__":
    main()
