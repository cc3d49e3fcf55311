#!/usr/bin/env bash
# Compiles the GPU that is none (tests/standin) where its sources or libtorch have changed, and prints the folder of its
# libtorch_cuda.so. With LD_LIBRARY_PATH on that folder, programs and tests run on `--device cuda` without a GPU:
#
#   LD_LIBRARY_PATH=$(scripts/standin.sh) DEEPSPEC_STANDIN_REPORT=report.json target/release/deepspec-train --device cuda ...
#
# DEEPSPEC_STANDIN_DEVICES   how many GPUs there are, 1 if it is left out
# DEEPSPEC_STANDIN_MEMORY    bytes of memory that each of them has, 80 GiB if it is left out
# DEEPSPEC_STANDIN_FREE      bytes that each of them says are free, whatever is; the truth if it is left out
# DEEPSPEC_STANDIN_REPORT    where to write, as the process ends, what was uploaded, downloaded and waited for, by operator, and how much
#                            memory was used; %p in it stands for the process's number
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
