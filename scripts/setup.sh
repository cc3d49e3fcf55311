#!/usr/bin/env bash
# Finds or installs libtorch and leaves the link .libtorch, which .cargo/config.toml builds and runs everything against.
#
#   scripts/setup.sh                         takes LIBTORCH, else the torch of python3, else installs a wheel in .venv
#   LIBTORCH=DIR scripts/setup.sh            takes this libtorch (the directory that holds include/ and lib/)
#   DEEPSPEC_FULL_TORCH=1 scripts/setup.sh   takes the CUDA libraries even where no GPU is seen (login node, container)
#
# Run it as often as you like: it does only what is left to do.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "setup: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

torch_series=2.11 # what the tch crate in Cargo.toml is generated for
torch_pin=2.11.0

say() { echo "setup: $*" >&2; }

gpu_wanted() {
    [ "${DEEPSPEC_FULL_TORCH:-0}" = 1 ] || command -v nvidia-smi >/dev/null
}

# Version of the libtorch in $1: the zip archives have a file for it, the wheels only the header.
version_of() {
    if [ -f "$1/build-version" ]; then
        cat "$1/build-version"
    else
        awk '$1 == "#define" && $2 ~ /^TORCH_VERSION_(MAJOR|MINOR|PATCH)$/ { v = v sep $3; sep = "." } END { print v }' \
            "$1/include/torch/headeronly/version.h" 2>/dev/null
    fi
}

# What $1 needs and the loader does not find. The driver's own library comes with the driver.
unresolved() {
    local needed
    if ! needed=$(ldd "$1" 2>&1); then
        echo "a $(basename "$1") for this machine"
        return
    fi
    awk '/not found/ && $1 != "libcuda.so.1" { print $1 }' <<<"$needed" | sort -u | xargs
}

# Says in $why what keeps the directory $1 from being used.
usable() {
    local version missing
    why=""
    if [ ! -f "$1/lib/libtorch_cpu.so" ] || [ ! -d "$1/include" ]; then
        why="no lib/libtorch_cpu.so and include/ in it"
        return 1
    fi
    version=$(version_of "$1") || true
    case "$version" in
        "$torch_series".*) ;;
        *)
            why="version ${version:-unknown}, not $torch_series"
            return 1
            ;;
    esac
    missing=$(unresolved "$1/lib/libtorch_cpu.so")
    if [ -n "$missing" ]; then
        why="it lacks $missing"
        return 1
    fi
}

drives_gpu() {
    local missing
    if [ ! -f "$1/lib/libtorch_cuda.so" ]; then
        why="built without CUDA"
        return 1
    fi
    missing=$(unresolved "$1/lib/libtorch_cuda.so")
    if [ -n "$missing" ]; then
        why="for CUDA it lacks $missing"
        return 1
    fi
}

serves_here() {
    usable "$1" && { ! gpu_wanted || drives_gpu "$1"; }
}

# The directory of the torch package that interpreter $1 would import; nothing if there is none. Does not import it: that takes seconds.
torch_of() {
    "$1" - 2>/dev/null <<'PY' || true
import importlib.util, os
spec = importlib.util.find_spec("torch")
print(os.path.dirname(spec.origin) if spec and spec.origin else "")
PY
}

# Version of the CUDA toolkit that the torch package $1 was built with; nothing for a build without CUDA.
toolkit_of() {
    sed -n 's/^Requires-Dist: cuda-toolkit\[.*\]==\([0-9.]*\).*/\1/p' "$1"-*.dist-info/METADATA 2>/dev/null || true
}

# The headers that crates/deepspec-ops/build.rs needs for NCCL beside the libtorch $1 and does not find in its places.
nccl_headers_missing() {
    local wheels toolkit=${CUDA_HOME:-/usr/local/cuda} header place
    wheels=$(dirname "$1")/nvidia
    for header in nccl.h cuda_runtime.h crt/host_config.h nv/target; do
        for place in "$wheels"/{nccl,cu13}/include "$wheels/cu13/include/cccl" "$toolkit"/include{,/cccl} /usr/include; do
            [ ! -e "$place/$header" ] || continue 2
        done
        echo "$header"
    done
}

# Says whether programs that are built now can train on several GPUs.
report_nccl() {
    local torch missing toolkit remedy="set CUDA_HOME to a CUDA toolkit that has NCCL's headers"
    torch=$(readlink -f .libtorch)
    drives_gpu "$torch" || return 0
    missing=$(nccl_headers_missing "$torch" | xargs)
    if [ -z "$missing" ]; then
        say "NCCL's headers are there, so the build can train on several GPUs"
        return
    fi
    toolkit=$(toolkit_of "$torch")
    [ -z "$toolkit" ] || remedy="pip install nvidia-nccl-cu13 'cuda-toolkit[cudart,crt,cccl]==$toolkit' in the environment of this torch, or $remedy"
    say "warning: the build will have no NCCL, which training on several GPUs needs; missing headers: $missing"
    say "for NCCL: $remedy; then cargo clean --release -p deepspec-ops && cargo build --release"
}

install_wheel() {
    local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check) torch toolkit
    .venv/bin/python -c 'import pip' 2>/dev/null || python3 -m venv --clear .venv
    if ! gpu_wanted; then
        # Without a GPU most of the wheel's 4 GB of CUDA libraries are never opened; libtorch_cpu.so itself needs two.
        say "installing torch $torch_pin, CPU parts only, in .venv (0.6 GB to download)"
        "${pip[@]}" --no-deps "torch==$torch_pin"
        torch=$(torch_of .venv/bin/python)
        toolkit=$(toolkit_of "$torch")
        [ -z "$toolkit" ] || "${pip[@]}" --no-warn-conflicts "cuda-toolkit[cudart,cupti]==$toolkit"
        if serves_here "$torch"; then return; fi
        say "the CPU parts alone do not load here ($why)"
    fi
    say "installing torch $torch_pin with its CUDA libraries in .venv (3 GB to download)"
    "${pip[@]}" "torch==$torch_pin"
    # Headers that come with a CUDA toolkit only, for the part of deepspec-ops that speaks to NCCL.
    toolkit=$(toolkit_of "$(torch_of .venv/bin/python)")
    [ -z "$toolkit" ] || "${pip[@]}" --no-warn-conflicts "cuda-toolkit[crt,cccl]==$toolkit"
}

# Points .libtorch at $1: relatively where that is inside this directory, so that the tree can be moved.
link() {
    local to old
    to=$(readlink -f "$1")
    old=$(readlink -f .libtorch || true)
    if [ "$to" != "$old" ] || [ ! -L .libtorch ]; then
        if [ -e .libtorch ] && [ ! -L .libtorch ]; then
            say "$root/.libtorch is not a link; move it away"
            exit 1
        fi
        ln -s "${to#"$root"/}" ".libtorch.$$"
        mv -T ".libtorch.$$" .libtorch
        # Objects compiled against the headers of another libtorch would be reused: their paths have not changed.
        if [ -L target ]; then
            say "target is a link, so it stays as it is; if another libtorch was in use: cargo clean --release -p torch-sys -p deepspec-ops"
        elif [ -d target ]; then
            say "removing torch-sys and deepspec-ops from target (cargo clean), which are compiled against the headers of libtorch"
            for package in torch-sys deepspec-ops; do
                cargo clean --quiet --offline --profile dev -p "$package" || true
                cargo clean --quiet --offline --profile release -p "$package" || true
            done
        fi
    fi
    say "libtorch $(version_of "$to") for $(drives_gpu "$to" && echo 'CPU and GPU' || echo CPU): .libtorch -> $(readlink .libtorch)"
}

find_libtorch() {
    local found
    if [ -n "${LIBTORCH:-}" ]; then
        # Whoever names one has decided, also for a build without CUDA.
        if usable "$LIBTORCH"; then
            link "$LIBTORCH"
            return
        fi
        say "LIBTORCH=$LIBTORCH ignored: $why"
    fi
    if serves_here .libtorch; then
        link .libtorch
        return
    fi
    if command -v python3 >/dev/null; then
        found=$(torch_of python3)
        if [ -n "$found" ]; then
            if serves_here "$found"; then
                link "$found"
                return
            fi
            say "torch of python3 in $found ignored: $why"
        fi
    fi
    return 1
}

missing=()
command -v cargo >/dev/null || missing+=("Rust (https://rustup.rs)")
command -v "${CXX:-c++}" >/dev/null || missing+=("a C++ compiler (Debian, Ubuntu: apt-get install g++)")
if [ ${#missing[@]} -gt 0 ] || ! find_libtorch; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || missing+=("Python 3.10 or newer (apt-get install python3)")
    python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=("Python's venv module (apt-get install python3-venv)")
    if [ ${#missing[@]} -gt 0 ]; then
        for each in "${missing[@]}"; do say "please install $each"; done
        exit 1
    fi
    install_wheel
    found=$(torch_of .venv/bin/python)
    if ! serves_here "$found"; then
        say "torch $torch_pin was installed in $root/.venv but cannot be used: $why; delete .venv and run this again"
        exit 1
    fi
    link "$found"
fi

report_nccl
for name in LIBTORCH_USE_PYTORCH LIBTORCH_INCLUDE LIBTORCH_LIB LIBTORCH_STATIC; do
    [ -z "${!name+set}" ] || say "warning: $name is set and overrides .libtorch in the build; unset it"
done
[ -z "${RUSTFLAGS+set}" ] || say "warning: RUSTFLAGS replaces the flags of .cargo/config.toml, so binaries will not find libtorch; unset it"
