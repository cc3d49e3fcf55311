#!/usr/bin/env python3
"""Compares drafters, heads, depths, block sizes and objectives on the toy target. Prints the tables of docs/ablations.md.

    scripts/ablations.py [--demo runs/demo] [--jobs N]      by default as many runs at once as there are cores
    scripts/ablations.py --rates recipe                     with the learning rates of configs/tiny, without a search
    scripts/ablations.py --equal-time                       compares kinds in equal training time, too
    scripts/ablations.py SECTION...                         only some tables: kinds, blocks, passes, latency, depths, options,
                                                            objectives, variants, lengths
    scripts/ablations.py plots                              draws the page's tables into docs/images; runs nothing
    scripts/ablations.py kinds --target M --suite F --mask-token-id N [--rates 1e-3] [--set KEY=VALUE]...
                                                            compares the kinds on another target
    scripts/ablations.py assistants --target M              the assistant of a Gemma 4 beside other kinds

Uses the cache in the folder that --demo names, as scripts/demo.sh leaves one, whichever layers it taps. An existing run
is not repeated, so a killed script goes on where it stopped. Every run trains on one thread and is evaluated on the 144
held-out smoke prompts, or on the prompts of --suite, at temperature 1.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ablations_plots
from ablations_results import RULES, SEEDS, Accepted, by_rule, interval, mean
from ablations_rows import (
    ASSISTANTS,
    ASSISTANT_CACHE,
    BLOCK,
    DEEPENED,
    DEPTHS,
    DRAFT_LENGTHS,
    DRAFT_VOCAB,
    DRAFT_VOCAB_SIZE,
    EQUAL_SIZES,
    EXPERTS,
    KINDS,
    LONG_BLOCKS,
    LONG_XPRESS,
    MOST_LAYERS,
    OBJECTIVES,
    OPTIONS,
    PASSES,
    VARIANTS,
)

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RATES = ("2.5e-3", "5e-3", "1e-2")
RECIPE = "recipe"
TOY = "assets/tiny-target"
SMOKE = ("smoke-math", "smoke-code", "smoke-chat")
LENGTHS = (250, 500, 1000, 2000)
# Steps of the runs that compare kinds, of those that vary one thing, and of the two whose difference times a step.
SHORT = 500
VARIED = 250
TIMED = (20, 70)
# On targets that have suites of their own. Their steps may take seconds.
TIMED_ELSEWHERE = (2, 12)


class Bench:
    """Trains and evaluates, each run once."""

    def __init__(self, demo, jobs, target=TOY, suites=SMOKE, mask_token_id=None, sets=()):
        self.demo, self.out = demo, demo / "ablations"
        self.target, self.suites, self.mask_token_id, self.sets = target, suites, mask_token_id, sets
        self.out.mkdir(parents=True, exist_ok=True)
        settings = json.dumps({"target": target, "suites": suites, "mask_token_id": mask_token_id, "sets": sets})
        kept = self.out / "settings.json"
        if kept.is_file() and kept.read_text() != settings:
            sys.exit(f"{self.out} holds runs with {kept.read_text()}, not with {settings}; name another --demo")
        kept.write_text(settings)
        self.taps = json.loads((demo / "cache" / "manifest.json").read_text())["identity"]["taps"]
        self.pool = ThreadPoolExecutor(jobs)
        self.lock, self.locks = threading.Lock(), {}
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

    def submit(self, drafter, seed, steps, rate, sets=(), label="recipe", verify="token"):
        name = self.name(drafter, seed, steps, rate, label)
        return self.pool.submit(self.run, name, drafter, seed, steps, rate, sets, verify)

    @staticmethod
    def name(drafter, seed, steps, rate, label):
        """Folder of a run."""
        return file_name(drafter, label, f"steps{steps}-lr{rate}-seed{seed}")

    def run(self, name, drafter, seed, steps, rate, sets, verify):
        suffix = "" if verify == "token" else f"-{verify}"
        results = self.out / f"{name}.eval{suffix}" / "results.json"
        with self.lock:
            lock = self.locks.setdefault(name, threading.Lock())
        with lock:  # two tables may want one run
            return self.run_alone(name, drafter, seed, steps, rate, sets, verify, results)

    def run_alone(self, name, drafter, seed, steps, rate, sets, verify, results):
        if not results.is_file():
            own_rate = [] if rate == RECIPE else [f"train.lr={rate}"]
            self.call("deepspec-train", *self.training(drafter, name, seed, steps, *own_rate, *sets))
            self.evaluate(self.out / name / "step_latest", results.parent, "--verify", verify)
            print(f"{name} done", file=sys.stderr, flush=True)
        return Accepted(results)

    def evaluate(self, draft, out, *flags):
        suites = [f"--suite={suite}" for suite in self.suites]
        self.call(
            "deepspec-eval", "run", "--quiet", "--no-baseline", "--target", self.target, *suites,
            "--draft", draft, "--max-new-tokens", "256", *flags, "--output-dir", out,
        )

    def with_passes(self, name, count):
        """Accepted lengths of a trained xPress with another number of passes."""
        results = self.out / f"{name}.eval-passes{count}" / "results.json"
        if not results.is_file():
            with tempfile.TemporaryDirectory(dir=self.out) as folder:
                draft = Path(folder) / "draft"
                shutil.copytree(self.out / name / "step_latest", draft)
                config = json.loads((draft / "config.json").read_text())
                (draft / "config.json").write_text(json.dumps({**config, "xpress_num_passes": count}))
                self.evaluate(draft, results.parent)
        return Accepted(results)

    def cycle_times(self, drafter, sets, label, number):
        """Seconds of drafting, of verification and of the whole in a cycle of one prompt, with a new drafter."""
        name = file_name("latency", drafter, label)
        if not (self.out / name).is_dir():
            self.call("deepspec-train", *self.training(drafter, name, 1, SHORT, *sets), "--init-only")
        results = self.out / f"{name}.eval{number}" / "results.json"
        if not results.is_file():
            self.evaluate(self.out / name / "step_0", results.parent, "--max-num-seqs", "1", "--limit", "2")
        suites = json.loads(results.read_text())["suites"]
        total = {key: sum(suite["timing"][key] for suite in suites) for key in ("draft_s", "verify_s", "host_s")}
        cycles = sum(suite["counts"]["cycles"] for suite in suites)
        return total["draft_s"] / cycles, total["verify_s"] / cycles, sum(total.values()) / cycles

    def step_seconds(self, drafter, sets, label):
        """Processor time of a training step, from two lengths of training: start and end cancel out."""
        kept = self.out / f"{file_name(drafter, label if sets else RECIPE)}.step-seconds"
        if not kept.is_file():
            lengths = TIMED if self.suites is SMOKE else TIMED_ELSEWHERE
            few, more = (self.call("deepspec-train", *self.training(drafter, "timing", 1, steps, *sets)) for steps in lengths)
            kept.write_text(str((more - few) / (lengths[1] - lengths[0])))
        return float(kept.read_text())

    def weights(self, drafter, sets):
        """Number of trained weights, by the plan."""
        training = self.training(drafter, "weights", 1, SHORT, *sets)
        command = [ROOT / "target" / "release" / "deepspec-train", *training, "--plan", "--json"]
        plan = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, check=True)
        return json.loads(plan.stdout)["trainable_weights"]

    def count_draft_vocab(self):
        """Writes the reduced vocabulary, from the answers that the drafters learn."""
        if not (ROOT / self.demo / DRAFT_VOCAB).is_file():
            recipe = ["--config", "configs/tiny/eagle3.yaml", "--set", f"target.model={self.target}"]
            rows = ["--input", self.demo / "answers.jsonl", "--size", DRAFT_VOCAB_SIZE]
            self.call("deepspec-data", "draft-vocab", *recipe, *rows, "--output", self.demo / DRAFT_VOCAB)

    def training(self, drafter, name, seed, steps, *sets):
        overrides = [
            f"data.states.cache={self.demo}/cache",
            *([] if drafter == "mtp" else [f"target.layer_ids={self.taps}"]),
            f"logging.output_dir={self.out}",
            f"name={name}",
            f"seed={seed}",
            f"train.max_train_steps={steps}",
            *(self.in_demo(each) for each in sets),
            *self.of_target(drafter),
        ]
        flags = itertools.chain.from_iterable(("--set", each) for each in overrides)
        fresh = ["--overwrite"] if name == "timing" else []
        return ["--quiet", "--config", f"configs/tiny/{drafter}.yaml", *flags, *fresh]

    def in_demo(self, setting):
        """A setting that names a file of the demo's folder by its path."""
        return re.sub(f"{DRAFT_VOCAB}|{ASSISTANT_CACHE}", lambda name: f"{self.demo}/{name[0]}", setting)

    def of_target(self, drafter):
        """Settings that the target asks for, over the toy's recipe."""
        if self.target == TOY:
            return list(self.sets)
        recipe = (ROOT / f"configs/tiny/{drafter}.yaml").read_text()
        section = re.search(r"^drafter:\n  (\w+):", recipe, re.MULTILINE)[1]
        has_other = self.mask_token_id is not None and "mask_token_id:" in recipe
        mask = [f"drafter.{section}.mask_token_id={self.mask_token_id}"] if has_other else []
        return [f"target.model={self.target}", *mask, *self.sets]

    def call(self, binary, *args):
        """Runs a program to its end and gives its processor time."""
        command = [str(each) for each in (ROOT / "target" / "release" / binary, *args)]
        with open(os.devnull, "w") as null, tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=null, stderr=errors)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode != 0:
                errors.seek(0)
                raise SystemExit(f"{' '.join(command)}\n{errors.read()}")
        return usage.ru_utime + usage.ru_stime


def file_name(*parts):
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "-".join(parts).replace("γ", "gamma"))


def collect(futures):
    return {key: [future.result() for future in runs] for key, runs in futures.items()}


def lengths(futures):
    """Accepted lengths by the draft rule of each kind."""
    return {key: [run.length for run in runs] for key, runs in collect(futures).items()}


def best_rates(bench):
    """The best of the learning rates for each kind, at SHORT steps with the first seed."""
    futures = {(drafter, rate): [bench.submit(drafter, SEEDS[0], SHORT, rate)] for drafter in KINDS for rate in RATES}
    taus = {key: of[0] for key, of in lengths(futures).items()}
    best = {drafter: max(RATES, key=lambda rate: taus[drafter, rate]) for drafter in KINDS}
    lines = [
        f"## Learning rates\n\nAccepted length after {SHORT} steps with seed {SEEDS[0]}; the best of each row is used below.\n",
        "| drafter | " + " | ".join(RATES) + " |",
        "|---|" + "---|" * len(RATES),
    ]
    for drafter, title in KINDS.items():
        cells = (f"{taus[drafter, rate]:.2f}" for rate in RATES)
        cells = (f"**{cell}**" if rate == best[drafter] else cell for cell, rate in zip(cells, RATES))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return best, lines


def all_kinds(bench, best, with_time, of_steps=SHORT, seeds=SEEDS):
    """All kinds after these steps, and if asked in the time that DSpark takes for as many steps."""
    rows = EQUAL_SIZES if bench.target == TOY else equal_sizes(bench)
    return ["## All kinds\n", *side_by_side(bench, best, rows, with_time, of_steps, seeds)]


def equal_sizes(bench):
    """All kinds, with the depth or the experts that bring their trained weights closest to DSpark's on this target."""
    goal = bench.weights("dspark", ())
    rows = {title: (drafter, sets) for title, (drafter, sets) in EQUAL_SIZES.items() if drafter not in (*DEEPENED, "dspark_v4")}
    for drafter in DEEPENED:
        section = "dflash" if drafter == "jetspec" else drafter
        depths = [(f"drafter.{section}.num_draft_layers={layers}",) for layers in range(1, MOST_LAYERS + 1)]
        nearest = min(depths, key=lambda sets: abs(bench.weights(drafter, sets) - goal))
        count = depths.index(nearest) + 1
        if count == MOST_LAYERS:
            sys.exit(f"{drafter} needs more than {MOST_LAYERS} layers to be as large as dspark on this target")
        rows[f"{KINDS[drafter]}, {count} layer{'s' if count > 1 else ''}"] = (drafter, nearest)
    narrow, wide = (bench.weights("dspark_v4", (f"{EXPERTS}={width}",)) for width in (8, 16))
    width = max(8, 8 + 8 * round((goal - narrow) / (wide - narrow)))
    rows[f"{KINDS['dspark_v4']}, experts of width {width}"] = ("dspark_v4", (f"{EXPERTS}={width}",))
    return {**rows, "Eagle3, 1 layer": EQUAL_SIZES["Eagle3, 1 layer"]}


def side_by_side(bench, best, rows, with_time, of_steps=SHORT, seeds=SEEDS):
    """Rows of a drafter and its settings after these steps, and if asked in the time that the first takes for them."""
    seconds = {label: bench.step_seconds(drafter, sets, label) for label, (drafter, sets) in rows.items()}
    steps = {label: round(of_steps * next(iter(seconds.values())) / of) for label, of in seconds.items()}
    columns = {"steps": dict.fromkeys(rows, of_steps), **({"time": steps} if with_time else {})}
    futures = {
        (label, column): [
            bench.submit(drafter, seed, counts[label], best[drafter], sets, label if sets else "recipe") for seed in seeds
        ]
        for column, counts in columns.items()
        for label, (drafter, sets) in rows.items()
    }
    runs = collect(futures)
    titles = ["drafter", "drafts", "weights", "s per step", *(f"{rule} τ at {of_steps} steps" for rule in RULES)]
    if with_time:
        titles += ["steps in equal time", *(f"{rule} τ in equal time" for rule in RULES)]
    spread = "± is the half width of the 95 % interval (Student's t)" if len(seeds) > 1 else "intervals are those of the bootstrap"
    lines = [
        f"After {of_steps} steps. Number of seeds: {len(seeds)}; {spread}.\n",
        "| " + " | ".join(titles) + " |",
        "|" + "---|" * len(titles),
    ]
    for label, (drafter, sets) in rows.items():
        weights = f"{bench.weights(drafter, sets) / 1e6:.2f} M"
        cells = [label, str(runs[label, "steps"][0].drafts), weights, f"{seconds[label]:.3f}", *by_rule(runs[label, "steps"])]
        if with_time:
            cells += [str(steps[label]), *by_rule(runs[label, "time"])]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def passes(bench, best):
    """Accepted length by the passes of xPress's refiner over blocks of 15 drafts."""
    drafter, sets = LONG_XPRESS
    label = next(label for label, row in LONG_BLOCKS.items() if row is LONG_XPRESS)
    lines = [
        f"## Passes of xPress\n\nThe drafters above, {len(SEEDS)} seeds.\n",
        "| passes | " + " | ".join(f"{rule} τ" for rule in RULES) + " |",
        "|---|---|---|",
    ]
    for trained in [bench.submit(drafter, seed, SHORT, best[drafter], sets, label) for seed in SEEDS]:
        trained.result()
    names = [bench.name(drafter, seed, SHORT, best[drafter], label) for seed in SEEDS]
    for count in PASSES:
        lines.append(" | ".join([f"| {count}", *by_rule([bench.with_passes(name, count) for name in names])]) + " |")
    return lines


def latency(bench):
    """Time of a cycle by drafts and passes. It does not depend on training, so that the drafters are new."""
    rows = {f"DSpark, γ {length}": ("dspark", (f"{BLOCK}.block_size={length}",)) for length in DRAFT_LENGTHS}
    refiner = "drafter.xpress.refiner.num_passes"
    rows |= {f"xPress, γ 15, passes: {count}": (LONG_XPRESS[0], (*LONG_XPRESS[1], f"{refiner}={count}")) for count in PASSES}
    lines = [
        "## Time of a cycle\n\nOne prompt at a time on one thread; the fastest of three rounds.\n",
        "| drafter | ms of drafting | ms of verification | ms of a cycle |",
        "|---|---|---|---|",
    ]
    for label, (drafter, sets) in rows.items():
        rounds = [bench.cycle_times(drafter, sets, label, number) for number in range(3)]
        drafting, verification, whole = (1000 * seconds for seconds in min(rounds, key=lambda times: times[-1]))
        lines.append(f"| {label} | {drafting:.2f} | {verification:.2f} | {whole:.2f} |")
    return lines


def options(bench, best, with_time):
    """Attention sinks and reduced vocabularies."""
    bench.count_draft_vocab()
    return ["## Sinks and reduced vocabularies\n", *side_by_side(bench, best, OPTIONS, with_time)]


def assistants(bench, best, with_time):
    """The assistant of a Gemma 4 beside other kinds."""
    return ["## Assistants of Gemma 4\n", *side_by_side(bench, best, ASSISTANTS, with_time)]


def by_length(bench, best):
    """DSpark against DFlash as training lengthens, paired by seed."""
    futures = {
        (drafter, steps): [bench.submit(drafter, seed, steps, best[drafter]) for seed in SEEDS]
        for steps in LENGTHS
        for drafter in ("dspark", "dflash")
    }
    runs = lengths(futures)
    lines = [
        "## DSpark and DFlash as training lengthens\n",
        f"Mean over {len(SEEDS)} seeds; differences are paired by seed, ± is the half width of the 95 % interval (Student's t).\n",
        "| steps | DSpark τ | DFlash τ | difference | in proportion |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {steps} | {versus(runs['dspark', steps], runs['dflash', steps])} |" for steps in LENGTHS]
    return lines


def versus(ours, theirs):
    """Cells: both means, their paired difference, and it in proportion."""
    pairs = [a - b for a, b in zip(ours, theirs)]
    difference = f"{mean(pairs):+.2f} ± {interval(pairs):.2f}"
    return f"{mean(ours):.2f} | {mean(theirs):.2f} | {difference} | {mean(ours) / mean(theirs) - 1:+.0%}"


def variants(bench, best):
    """One change of the DSpark recipe at a time."""
    rate = best["dspark"]
    rate_text = "the recipe's learning rate" if rate == RECIPE else f"learning rate {rate}"
    futures = {
        label: [bench.submit("dspark", seed, VARIED, rate, sets, label if sets else "recipe") for seed in SEEDS]
        for label, sets in VARIANTS.items()
    }
    runs = lengths(futures)
    base = next(iter(runs.values()))
    lines = [
        f"## One change at a time\n\nDSpark, {VARIED} steps, {rate_text}, {len(SEEDS)} seeds; differences from the first row are paired by seed.\n",
        "| variant | τ | difference |",
        "|---|---|---|",
    ]
    for label, of in runs.items():
        pairs = [tau - b for tau, b in zip(of, base)]
        change = f"{mean(pairs):+.2f} ± {interval(pairs):.2f}" if VARIANTS[label] else ""
        lines.append(f"| {label} | {mean(of):.2f} | {change} |")
    return lines


def objectives(bench, best):
    """Objectives of one drafter each, verified token by token and block by block."""
    rules = ("token", "block")
    futures = {
        (drafter, label, verify): [
            bench.submit(drafter, seed, SHORT, best[drafter], sets, label if sets else "recipe", verify) for seed in SEEDS
        ]
        for verify in rules
        for drafter, labels in OBJECTIVES.items()
        for label, sets in labels.items()
    }
    runs = lengths(futures)
    lines = [
        f"## Objectives\n\nAfter {SHORT} steps, {len(SEEDS)} seeds. Differences from the recipe's objective are paired by seed.\n",
        "| drafter | objective | τ | difference | τ by block verification | difference |",
        "|---|---|---|---|---|---|",
    ]
    for drafter, labels in OBJECTIVES.items():
        recipe = next(iter(labels))
        for label in labels:
            cells = [KINDS[drafter], label]
            for verify in rules:
                of, base = runs[drafter, label, verify], runs[drafter, recipe, verify]
                pairs = [tau - b for tau, b in zip(of, base)]
                cells += [f"{mean(of):.2f}", f"{mean(pairs):+.2f} ± {interval(pairs):.2f}" if labels[label] else ""]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="tables to make, or `plots`; by default all")
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"))
    parser.add_argument("--rates", default="search", help="search, recipe, or one learning rate for all")
    parser.add_argument("--target", default=TOY)
    parser.add_argument("--suite", action="append", help="by default the smoke suites")
    parser.add_argument("--mask-token-id", type=int, help="a token that no text of the target has")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all recipes")
    parser.add_argument("--steps", type=int, default=SHORT, help=f"of the comparison of kinds; by default {SHORT}")
    parser.add_argument("--seeds", type=int, choices=[1, len(SEEDS)], default=len(SEEDS), help="of that comparison")
    parser.add_argument("--equal-time", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.sections == ["plots"]:
        for name, svg in ablations_plots.drawings((DOCS / "ablations.md").read_text()).items():
            (DOCS / "images" / name).write_text(svg)
        return
    if not (ROOT / args.demo / "cache" / "manifest.json").is_file():
        sys.exit(f"{args.demo}/cache is no cache; docs/ablations.md has the commands that build it")
    if args.sections != ["kinds"] and (args.steps, args.seeds) != (SHORT, len(SEEDS)):
        parser.error("--steps and --seeds go with `kinds`")
    if args.target != TOY and args.sections not in (["kinds"], ["assistants"]):
        parser.error("--target goes with `kinds` and with `assistants`")
    if args.target != TOY and args.sections == ["kinds"] and args.mask_token_id is None:
        parser.error("--target needs --mask-token-id")
    if args.target == TOY and "assistants" in args.sections:
        parser.error("`assistants` needs the --target that scripts/toy_gemma4.py trains")
    tables = {
        "kinds": lambda: all_kinds(bench, best, args.equal_time, args.steps, SEEDS[: args.seeds]),
        "blocks": lambda: ["## Blocks of 15 drafts\n", *side_by_side(bench, best, LONG_BLOCKS, args.equal_time)],
        "passes": lambda: passes(bench, best),
        "latency": lambda: latency(bench),
        "assistants": lambda: assistants(bench, best, args.equal_time),
        "depths": lambda: ["## DSpark with 2 layers and DFlash with 5\n", *side_by_side(bench, best, DEPTHS, args.equal_time)],
        "options": lambda: options(bench, best, args.equal_time),
        "objectives": lambda: objectives(bench, best),
        "variants": lambda: variants(bench, best),
        "lengths": lambda: by_length(bench, best),
    }
    if unknown := set(args.sections) - set(tables):
        parser.error(f"no section {', '.join(sorted(unknown))}; expected some of {', '.join(tables)}, or plots alone")
    bench = Bench(args.demo, args.jobs, args.target, args.suite or SMOKE, args.mask_token_id, args.set)
    best, rates = best_rates(bench) if args.rates == "search" else (dict.fromkeys(KINDS, args.rates), None)
    of_toy = [name for name in tables if name != "assistants"]
    sections = [*filter(None, [rates]), *(tables[name]() for name in args.sections or of_toy)]
    print("\n\n".join("\n".join(section) for section in sections))


if __name__ == "__main__":
    main()
