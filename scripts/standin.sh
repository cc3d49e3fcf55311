#!/usr/bin/env bash
# Compiles the stand-in for a GPU (tests/standin) if its sources or libtorch have changed, and prints the folder of its
# libtorch_cuda.so. With LD_LIBRARY_PATH on that folder, programs and tests run on `--device cuda` without a GPU:
#
#   LD_LIBRARY_PATH=$(scripts/standin.sh) target/release/deepspec-train --device cuda ...
#
# Environment:
#
#   DEEPSPEC_STANDIN_DEVICES   number of GPUs, by default 1
#   DEEPSPEC_STANDIN_MEMORY    bytes of memory of each GPU, by default 80 GiB
#   DEEPSPEC_STANDIN_FREE      free bytes that each GPU reports, by default the true number
#   DEEPSPEC_STANDIN_REPORT    file for a report at the end of the process: uploads, downloads and waits by operator,
#                              and the memory used; %p in the name stands for the process's number
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "standin: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
cxx=${CXX:-c++}
out=${CARGO_TARGET_DIR:-target}/standin
mkdir -p "$out"
out=$(cd "$out" && pwd -P)

# Tests that start together compile it once.
exec 9>"$out/lock"
flock 9
stamp=$({
    cat scripts/standin.sh tests/standin/* .libtorch/include/torch/headeronly/version.h
    readlink -f .libtorch
    "$cxx" --version
} | sha256sum)
if [ ! -f "$out/libtorch_cuda.so" ] || [ "$(cat "$out/stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "standin: compiling tests/standin" >&2
    rm -f "$out"/*.o # of a compilation that failed
    flags="-std=c++17 -O1 -fPIC -fvisibility=hidden -Wall -Wextra -isystem .libtorch/include"
    flags+=" -isystem .libtorch/include/torch/csrc/api/include"
    # shellcheck disable=SC2016
    printf '%s\n' tests/standin/*.cpp | CXX=$cxx FLAGS=$flags OUT=$out xargs -P "$(nproc)" -I{} \
        bash -c '$CXX $FLAGS -c "$1" -o "$OUT/$(basename "$1" .cpp).o"' - {}
    "$cxx" -shared -o "$out/libtorch_cuda.so.partial" "$out"/*.o -L.libtorch/lib -ltorch_cpu -lc10
    mv "$out/libtorch_cuda.so.partial" "$out/libtorch_cuda.so"
    rm "$out"/*.o
    echo "$stamp" >"$out/stamp"
fi
echo "$out"
