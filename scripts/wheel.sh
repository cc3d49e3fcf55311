#!/usr/bin/env bash
# Builds a Python wheel with the three programs, which use the libtorch of the torch in the same environment.
#
#   scripts/wheel.sh [OUTPUT_DIR]      default target/dist
#
# The wheel is for Linux, any Python from 3.10, and the torch series that the programs were built with. Programs that
# were built for GPUs (DEEPSPEC_FULL_TORCH=1 scripts/setup.sh) need torch with CUDA, which pip installs by default.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "wheel: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
out=$(realpath -m "${1:-.}")
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || out=target/dist
scripts/setup.sh
cargo build --release --workspace --bins
mkdir -p "$out"
python3 scripts/wheel.py target/release "$out"
