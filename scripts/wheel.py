#!/usr/bin/env python3
"""Packs the built programs into a wheel. See scripts/wheel.sh.

    scripts/wheel.py BIN_DIR OUTPUT_DIR
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import base64
import hashlib
import pathlib
import re
import shutil
import subprocess
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ["deepspec-data", "deepspec-train", "deepspec-eval"]

LAUNCHER = '''"""Starts a program of DeepSpec on the libtorch of this environment's torch."""

import importlib.metadata
import importlib.util
import os
import sys

TORCH_SERIES = "{series}"


def start(program):
    found = importlib.util.find_spec("torch")
    if found is None:
        sys.exit(f"{{program}}: torch is not installed in this environment ({{sys.prefix}}); run: pip install 'torch=={{TORCH_SERIES}}.*'")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    if not version.startswith(TORCH_SERIES + "."):
        sys.exit(f"{{program}}: torch {{version}} is installed, and the programs need {{TORCH_SERIES}}; run: pip install 'torch=={{TORCH_SERIES}}.*'")
    libraries = os.path.join((found.submodule_search_locations or [""])[0], "lib")
    if not os.path.exists(os.path.join(libraries, "libtorch_cpu.so")):
        sys.exit(f"{{program}}: torch in this environment ({{sys.prefix}}) is incomplete; install it again")
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = libraries + (":" + before if before else "")
    binary = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", program)
    os.execv(binary, [program, *sys.argv[1:]])


def data():
    start("deepspec-data")


def train():
    start("deepspec-train")


def evaluate():
    start("deepspec-eval")
'''


def glibc(binaries):
    """The newest glibc whose symbols the programs use, as the platform tag of a wheel names it."""
    newest = (2, 17)
    for binary in binaries:
        symbols = subprocess.run(["readelf", "--dyn-syms", "-W", binary], check=True, capture_output=True, text=True).stdout
        for major, minor in re.findall(r"@GLIBC_(\d+)\.(\d+)", symbols):
            newest = max(newest, (int(major), int(minor)))
    return newest


def main(bin_dir, out):
    with open(ROOT / "Cargo.toml") as file:
        version = re.search(r'(?m)^version = "([^"]+)"', file.read())[1]
    libtorch = subprocess.run([bin_dir / "deepspec-eval", "--version"], check=True, capture_output=True, text=True).stdout
    series = re.search(r"libtorch (\d+\.\d+)", libtorch)
    if series is None:
        sys.exit(f"wheel: deepspec-eval --version names no libtorch: {libtorch.strip()}")
    series = series[1]
    files = {
        "deepspec/__init__.py": f'"""Trains and judges drafters for speculative decoding."""\n\n__version__ = "{version}"\n'.encode(),
        "deepspec/launch.py": LAUNCHER.format(series=series).encode(),
    }
    with tempfile.TemporaryDirectory() as work:
        for program in PROGRAMS:
            stripped = pathlib.Path(work) / program
            shutil.copy(bin_dir / program, stripped)
            subprocess.run(["strip", stripped], check=True)
            files[f"deepspec/bin/{program}"] = stripped.read_bytes()
    for recipe in sorted((ROOT / "configs").rglob("*.yaml")):
        files[f"deepspec/{recipe.relative_to(ROOT)}"] = recipe.read_bytes()
    major, minor = glibc([bin_dir / program for program in PROGRAMS])
    machine = subprocess.run(["uname", "-m"], check=True, capture_output=True, text=True).stdout.strip()
    tag = f"py3-none-manylinux_{major}_{minor}_{machine}"
    info = f"deepspec-{version}.dist-info"
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: deepspec\nVersion: {version}\nSummary: Trains and judges drafters for speculative decoding\n"
        f"License: MIT\nRequires-Python: >=3.10\nRequires-Dist: torch=={series}.*\n"
    ).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: deepspec\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = (
        "[console_scripts]\ndeepspec-data = deepspec.launch:data\ndeepspec-train = deepspec.launch:train\n"
        "deepspec-eval = deepspec.launch:evaluate\n"
    ).encode()
    files[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()

    wheel = out / f"deepspec-{version}-{tag}.whl"
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if "/bin/" in name else 0o100644) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    partial.rename(wheel)
    print(wheel)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
