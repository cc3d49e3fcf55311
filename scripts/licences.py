#!/usr/bin/env python3
"""Writes the packages that the programs are made of, with their licences and the texts of these.

    scripts/licences.py FILE.md
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import collections
import json
import pathlib
import subprocess

PROGRAMS = {"deepspec-data", "deepspec-train", "deepspec-eval"}
# What is in the programs and in no package, by its licence's file.
OTHERS = {"DejaVu Sans, some of its glyphs": pathlib.Path("deepspec-eval/assets/LICENSE-DejaVu.txt")}
NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE")
# Suffixes of what is code, though it may be called so.
CODE = {".rs", ".c", ".h", ".py", ".json", ".toml"}


def packages():
    """The packages of the programs as they are built on this platform, by name and version; not those of tests and build scripts."""
    host = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout.split("host: ")[1].split()[0]
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", host]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    nodes = {node["id"]: node for node in told["resolve"]["nodes"]}
    by_id = {package["id"]: package for package in told["packages"]}
    waiting = [id for id, package in by_id.items() if package["name"] in PROGRAMS]
    found = set(waiting)
    while waiting:
        for dependency in nodes[waiting.pop()]["deps"]:
            linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if linked and dependency["pkg"] not in found:
                found.add(dependency["pkg"])
                waiting.append(dependency["pkg"])
    return sorted((by_id[id] for id in found if by_id[id]["source"]), key=lambda package: (package["name"], package["version"]))


def texts(package):
    """The licence files of a package, and of libraries that come with it, with their names in it."""
    folder = pathlib.Path(package["manifest_path"]).parent
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix.lower() not in CODE)
    return {str(file.relative_to(folder)): file for file in files if file.name.upper().startswith(NAMES)}


def main():
    found = packages()
    without = [package["name"] for package in found if not package["license"] and not package["license_file"]]
    if without:
        sys.exit(f"licences: {', '.join(without)} name no licence")
    silent = [f"{package['name']} {package['version']}" for package in found if not texts(package)]
    lines = [
        f"# What the programs are made of\n\n{len(found)} packages beside libtorch, which is not part of them (BSD-3-Clause; where it is shipped, its licences lie in"
        f" libtorch/licences).\nNo text of their licence comes with {', '.join(silent) or 'none of them'}.\n",
        "| package | licence | from |",
        "|---|---|---|",
    ]
    shared = collections.defaultdict(list)
    for package in found:
        name = f"{package['name']} {package['version']}"
        lines.append(f"| {name} | {package['license'] or 'its own, below'} | {package['repository'] or package['homepage'] or ''} |")
        for file, path in texts(package).items():
            shared[path.read_text(errors="replace").strip()].append(f"{name} ({file})")
    for name, file in OTHERS.items():
        lines.append(f"| {name} | its own, below | |")
        shared[(pathlib.Path(__file__).parent.parent / file).read_text().strip()].append(name)
    for text, of in shared.items():
        lines.append(f"\n## {', '.join(of)}\n\n```text\n{text}\n```")
    pathlib.Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
