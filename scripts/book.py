#!/usr/bin/env python3
"""Checks the book against the programs, and writes the pages that programs print.

    scripts/book.py check            checks prose, links, commands, flags, keys, YAML and JSON of all pages, the help
                                     texts of scripts, and the pages and plots that programs write
    scripts/book.py write            writes those pages: docs/commands.md and docs/recipe.md
    scripts/book.py tutorial         runs the tutorial in a folder of its own and compares what it prints
    scripts/book.py tutorial write   … and writes the numbers that it printed into the page

Needs a build: cargo build --release. YAML is read by PyYAML of this Python, or of DEEPSPEC_TEST_PYTHON. Without either
a message says that YAML is not checked, which is a failure with DEEPSPEC_FORBID_SKIPS=1. Links to other sites are
checked for their form only, and are not visited.
"""

import itertools
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import textwrap

import ablations_plots
import prose

try:
    import yaml
except ImportError:
    yaml = None

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BIN = ROOT / "target/release"
PROGRAMS = ["deepspec-data", "deepspec-train", "deepspec-eval"]
# Sections of a recipe, by which its keys are known in running text.
SECTIONS = ("target", "drafter", "data", "train", "logging", "eval")
# What YAML of ours begins with that is no part of a recipe: a mix of prompts.
OTHER_FILES = {"sources"}


def says(program, *arguments):
    return subprocess.run([BIN / program, *arguments], check=True, capture_output=True, text=True).stdout


def generated():
    """The pages that programs write."""
    commands = (
        "# Every command\n\nThis page lists every command and its flags, as `--help` prints them. `man DIR` writes man pages of them, and\n"
        "`completions SHELL` the completions for a shell.\n"
    )
    for program in PROGRAMS:
        text = says(program, "reference")
        # Without the heading of a page of its own.
        text = re.sub(r"\A# .*\n+(This document.*\n+)?", "", text)
        commands += f"\n{text.strip()}\n"
    return {"commands.md": commands, "recipe.md": says("deepspec-train", "recipe-reference")}


def pages():
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]


def slug(heading):
    """The anchor that a heading has on GitHub and in mdBook."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"(?ms)^```.*?^```", "", text))


def links(page, text):
    for match in re.finditer(r"\]\(([^)\s]+)\)", without_code(text)):
        link = match[1]
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        to = (page.parent / file).resolve() if file else page
        if not to.exists():
            yield f"{link}: no such file"
        elif page.parent == DOCS and DOCS not in to.parents:
            yield f"{link}: outside the book, which has no such page"
        elif anchor and to.suffix == ".md":
            headings = [slug(line.lstrip("#")) for line in to.read_text().splitlines() if line.startswith("#")]
            if anchor not in headings:
                yield f"{link}: no such heading in {to.name}"


def elsewhere(text):
    """Links to other places that cannot be right; bare ones may be of a server on the reader's own machine."""
    for inside, pointed, bare in re.findall(r"\]\((\w+:[^)]*)\)|<(\w+://[^>]*)>|\b(https?://(?!127\.0\.0\.1)\S+)", without_code(text)):
        # A sentence may end behind a bare one.
        link = inside or pointed or bare.rstrip(".,;:!?)")
        if not re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(:\d+)?(/|[/?#]\S*[\w/=])?", link):
            yield f"{link}: not of the form https://host.domain/path"


def fences(text, *languages):
    for language, code in re.findall(r"(?ms)^ *```(\w+)[^\n]*\n(.*?)^ *```", text):
        if language in languages:
            yield textwrap.dedent(code)


def flags(command, reference):
    """Flags of a command of ours that it does not have."""
    words = shlex.split(command.replace("…", "x"), comments=True)
    words = list(itertools.dropwhile(lambda word: "=" in word and not word.startswith("-"), words))
    if not words or words[0].rsplit("/", 1)[-1] not in PROGRAMS:
        return
    program = words[0].rsplit("/", 1)[-1]
    words = words[1:]
    # The longest name of a command that these words begin with; options of the program may stand before it.
    named = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)]
    name = program
    for word in named[:3]:
        if f"{name} {word}" in reference:
            name = f"{name} {word}"
    if name not in reference:
        yield f"{name}: no such command"
        return
    for word in words:
        flag = re.match(r"--[a-z0-9-]+", word)
        if flag and flag[0] not in reference[name] and flag[0] not in {"--quiet", "--verbose", "--help", "--version"}:
            yield f"{name} has no {flag[0]}"


def reference_flags(commands):
    found = {}
    for block in re.split(r"(?m)^##+ (?=`)", commands)[1:]:
        name = re.match(r"`([^`]+)`", block)[1]
        found[name] = set(re.findall(r"(?m)`(?:-\w`, `)?(--[a-z0-9-]+)", block))
    return found


def commands_in(text):
    for block in re.findall(r"(?ms)^```sh[^\n]*\n(.*?)^```", text):
        block = re.sub(r"\\\n", " ", block)
        for line in block.splitlines():
            yield from re.split(r"\s(?:\||&&|;|&)\s|\s&$", re.sub(r"\s#\s.*$|^#.*$", "", line).strip())


def resolved(schema, of):
    if "$ref" in of:
        return resolved(schema, schema["$defs"][of["$ref"].rsplit("/", 1)[-1]])
    others = [one for one in of.get("anyOf", []) if one.get("type") != "null"]
    return resolved(schema, others[0]) if len(others) == 1 else of


def knows(schema, path):
    """Whether recipes have this key."""
    at = [resolved(schema, schema)]
    for key in path:
        inner = [one["properties"][key] for one in at if key in one.get("properties", {})]
        at = [resolved(schema, one) for one in inner]
        at = list(itertools.chain.from_iterable([resolved(schema, two) for two in one.get("oneOf", [one])] for one in at))
        if not at:
            return False
    return True


def keys(text, schema):
    """Keys of recipes that there are none of, in running text, in --set and in YAML."""
    running = re.sub(r"(?ms)^```.*?^```", "", text)
    for name in re.findall(r"`((?:%s)\.[a-z0-9_.]+)(?:[:=][^`]*)?`" % "|".join(SECTIONS), running):
        if not name.endswith((".yaml", ".rs", ".py", ".md", ".sh", ".sbatch", ".parquet", ".jsonl", ".json", ".weight", ".bias")):
            if not knows(schema, name.split(".")):
                yield f"`{name}`: no such key of a recipe"
    for command in [*commands_in(text), *re.findall(r"`([^`]*--set [^`]*)`", running)]:
        for name in re.findall(r"--set '?([a-z_0-9.]+)=", command):
            if not knows(schema, name.split(".")):
                yield f"--set {name}: no such key of a recipe"


def strangers(value, schema, path=()):
    """Keys in a part of a recipe that there are none of."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key == "…":
            continue
        if knows(schema, [*path, str(key)]):
            yield from strangers(inner, schema, [*path, str(key)])
        else:
            yield ".".join([*path, str(key)])


def yaml_problems(code, schema):
    """What is wrong with a fence of YAML; `…` stands for what is left out. With `schema` it is part of a recipe, if not of another file of ours."""
    try:
        documents = list(yaml.safe_load_all(re.sub(r"(?m)^\s*…\s*$", "", code)))
    except yaml.YAMLError as error:
        told = str(error).replace('in "<unicode string>", ', "at ")
        yield f"YAML that does not parse: {' '.join(told.split())}"
        return
    for document in documents:
        if schema and isinstance(document, dict) and not OTHER_FILES & document.keys():
            yield from (f"YAML: {key}: no such key of a recipe" for key in strangers(document, schema))


def json_problems(code):
    """What is wrong with a fence of JSON, one value or several; `…` stands for what is left out."""
    kept = lambda match: match[1] or (": null" if match[0].startswith(":") else "")
    rest = re.sub(r'("(?:\\.|[^"\\])*")|:\s*…|,\s*…|…\s*,?', kept, code).strip()
    try:
        while rest:
            _, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].strip()
    except json.JSONDecodeError as error:
        yield f"JSON that does not parse: {error.msg}: {rest[error.pos :][:40]!r}"


def plots():
    """Plots of the ablations that do not show what the page's tables say."""
    try:
        drawn = ablations_plots.drawings((DOCS / "ablations.md").read_text())
    except ablations_plots.NoTable as error:
        yield f"docs/ablations.md: {error}"
        return
    for name, svg in drawn.items():
        file = DOCS / "images" / name
        if not file.exists() or file.read_text() != svg:
            yield f"docs/images/{name} is not what the tables of docs/ablations.md say: run scripts/ablations.py plots"


def check():
    problems = [*plots()]
    if yaml is None:
        told = "the YAML of the pages is not checked: PyYAML is missing (DEEPSPEC_TEST_PYTHON names a Python that has it)"
        if os.environ.get("DEEPSPEC_FORBID_SKIPS") == "1":
            problems.append(told)
        else:
            print(f"book: {told}", file=sys.stderr)
    written = generated()
    for name, text in written.items():
        if not (DOCS / name).exists() or (DOCS / name).read_text() != text:
            problems.append(f"docs/{name} is not what the programs say: run scripts/book.py write")
    listed = set(re.findall(r"\]\(([^)]+)\)", (DOCS / "SUMMARY.md").read_text()))
    unlisted = {page.name for page in DOCS.glob("*.md")} - listed - {"SUMMARY.md"}
    problems += [f"docs/SUMMARY.md does not have {name}" for name in sorted(unlisted)]
    reference, schema = reference_flags(written["commands.md"]), json.loads(says("deepspec-train", "schema"))
    counted = 0
    for page in pages():
        text = page.read_text()
        found = [*links(page, text), *elsewhere(text)]
        found += [f"line {line}: {problem}" for line, problem in prose.problems(page, text)]
        for code in fences(text, "json", "jsonl"):
            found += json_problems(code)
        # Other tools' settings stand in migrating.md; their sections are called like ours.
        for code in fences(text, "yaml", "yml") if yaml else ():
            found += yaml_problems(code, schema if page.name != "migrating.md" else None)
        if page.name not in written:
            # Tables there name other tools' keys first and ours last.
            ours = re.sub(r"(?m)^\|.*\|([^|\n]*)\|$", r"\1", text) if page.name == "migrating.md" else text
            found += keys(ours, schema)
            for command in commands_in(text):
                counted += "deepspec-" in command
                found += flags(command, reference)
        problems += [f"{page.relative_to(ROOT)}: {problem}" for problem in found]
    for script in prose.scripts():
        found = prose.problems(script, prose.read(script))
        problems += [f"{script.relative_to(ROOT)}: line {line}: {problem}" for line, problem in found]
    if problems:
        sys.exit("\n".join(problems))
    print(f"book: {len(pages())} pages, {counted} commands")


def blocks(text):
    """The commands of the tutorial with what they are to print; those for setting up are not run."""
    found = re.findall(r"(?ms)^```(sh[^\n]*|text)\n(.*?)^```", text)
    for (kind, code), (after, output) in zip(found, [*found[1:], ("", "")]):
        if kind == "sh":
            yield code, output if after == "text" else None


NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"


def parts(expected):
    """What a line is made of, and the pattern of those that are like it: words are equal, numbers are any, `…` stands for whatever is left out."""
    found = [part for part in re.split(rf"({NUMBER}|…|\s+)", expected.strip()) if part]
    pattern = ""
    for part in found:
        if part == "…":
            pattern += ".*?"
        elif re.fullmatch(NUMBER, part):
            pattern += f"({NUMBER})"
        elif part.isspace():
            pattern += r"\s+"
        else:
            pattern += re.escape(part)
    return found, pattern


def same(said, expected):
    """Whether a line is what was expected: words are equal, numbers within a sixth (another processor rounds, and trains, otherwise)."""
    found, pattern = parts(expected)
    match = re.fullmatch(pattern, said.strip())
    value = lambda text: float(text.replace(",", ""))
    slack = lambda b: 0.1 if "." in b else 3 if abs(value(b)) >= 20 else 0
    near = lambda a, b: abs(value(a) - value(b)) <= max(abs(value(b)) / 6, slack(b))
    wanted = [part for part in found if re.fullmatch(NUMBER, part)]
    return match and all(near(a, b) for a, b in zip(match.groups(), wanted))


def renewed(expected, output):
    """What was expected with the numbers that were printed now; what a page leaves out stays left out. Lines that say something else now are to be written by hand."""
    lines, at, kept = output.splitlines(), 0, []
    for line in expected.splitlines():
        if line.strip() == "…":
            kept.append(line)
            continue
        found, pattern = parts(line)
        matches = ((i, re.fullmatch(pattern, lines[i].strip())) for i in range(at, len(lines)))
        ahead, match = next(((i, match) for i, match in matches if match), (None, None))
        if match is None:
            sys.exit(f"tutorial: no line like this any more; write it by hand: {line}")
        numbers, at, text = iter(match.groups()), ahead + 1, line[: len(line) - len(line.lstrip())]
        for part in found:
            if not re.fullmatch(NUMBER, part):
                text += part
                continue
            number = next(numbers)
            # Columns stay below each other.
            room = len(text) - len(text.rstrip()) - 2
            if room >= 0:
                grown = len(number) - len(part)
                text = text[: len(text) - min(max(grown, 0), room)] + " " * max(-grown, 0)
            text += number
        kept.append(text)
    return "\n".join(kept) + "\n"


# The server's in the tutorial; the test takes one that is free.
PORT = "30000"


# Answers are written in the order in which they end. What is learned from has to be the same in every run of the test.
ORDER = "sort -o runs/tutorial/answers.jsonl runs/tutorial/answers.jsonl"
# Every processor with AVX2 sums as one that has nothing newer, and libraries choose as they did when the page was written, so that all of them train alike.
SUMS = {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "MKL_CBWR": "AVX2", "DEEPSPEC_MKL_BY_MAKER": "1"}


def tutorial(write):
    page = DOCS / "tutorial.md"
    text = page.read_text()
    with tempfile.TemporaryDirectory() as work:
        for name in ["assets", "configs", "eval_datasets", "docs"]:
            os.symlink(ROOT / name, f"{work}/{name}")
        # One shell for all blocks, as a reader has; a mark tells where one ends.
        script = ["exec 2>&1", "set -e"]
        shown = list(blocks(text))
        for code, _ in shown:
            script += [ORDER if "cache build" in code else "", code.rstrip(), 'if [ -n "$!" ]; then until grep -q "^listening on " served.log; do kill -0 $!; sleep 0.2; done; cat served.log; fi' if code.rstrip().endswith("&") else "", "echo '=== end of block'"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        source = "\n".join(script).replace(PORT, port).replace(f"--port {port} &", f"--port {port} >served.log 2>&1 &") + "\nkill $! 2>/dev/null || true\n"
        environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "120", **SUMS}
        run = subprocess.run(["bash", "-c", source], cwd=work, env=environment, capture_output=True, text=True)
        said = run.stdout.replace(port, PORT).split("=== end of block\n")
    if run.returncode != 0 or len(said) != len(shown) + 1:
        sys.exit(f"tutorial: code {run.returncode} in block {len(said)}\n{said[-1][-3000:]}{run.stderr[-2000:]}")
    problems = []
    for (code, expected), output in zip(shown, said):
        if expected is None:
            continue
        if write:
            output = renewed(expected, output.replace(work, "…"))
            text = text.replace(f"```sh\n{code}```\n\n```text\n{expected}```", f"```sh\n{code}```\n\n```text\n{output}```", 1)
            continue
        lines, wanted = output.splitlines(), expected.splitlines()
        at = 0
        for line in wanted:
            # A line of `…` alone stands for any number of lines.
            if line.strip() == "…":
                continue
            ahead = next((i for i in range(at, len(lines)) if same(lines[i], line)), None)
            if ahead is None:
                problems.append(f"after\n{code}\nexpected: {line}\nit said:\n{output[-1500:]}")
                break
            at = ahead + 1
    if write:
        page.write_text(text)
    if problems:
        sys.exit("\n\n".join(problems))
    print(f"tutorial: {len(shown)} blocks ran and printed what the book shows")


def main():
    match sys.argv[1:]:
        case ["check"]:
            # Taken out, so that a Python without PyYAML does not go round in circles.
            if yaml is None and (python := os.environ.pop("DEEPSPEC_TEST_PYTHON", "")):
                os.execv(python, [python, *sys.argv])
            check()
        case ["write"]:
            for name, text in generated().items():
                (DOCS / name).write_text(text)
        case ["tutorial", *rest] if rest in ([], ["write"]):
            tutorial(bool(rest))
        case ["-h" | "--help"]:
            print(__doc__)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
