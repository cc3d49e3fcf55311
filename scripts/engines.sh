#!/usr/bin/env bash
# Builds the engines that scripts/test.sh --engines tests against, into .engines, and prints where they are as shell assignments.
#
#   eval "$(scripts/engines.sh)"
#
# llama.cpp comes with its sources in the source package of llama-cpp-python on PyPI; building it takes about twelve minutes of one
# core's time, once.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

package=llama-cpp-python version=0.3.36
engines=$PWD/.engines
server=$engines/$version/bin/llama-server
if [ ! -x "$server" ]; then
    echo "engines: building llama.cpp of $package $version in .engines" >&2
    mkdir -p "$engines"
    work=$(mktemp -d "$engines/build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check cmake==4.4.4 ninja==1.13.2 scikit-build-core==1.1.2 >&2
    "$work/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation \
        --dest "$work" "$package==$version" >&2
    tar -xf "$work"/*.tar.gz -C "$work"
    PATH=$work/venv/bin:$PATH
    # Whole in one file each, so that nothing of the build folder is needed later.
    cmake -G Ninja -S "$work"/llama_cpp_python-*/vendor/llama.cpp -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        >"$work/cmake.log" 2>&1 || { tail -20 "$work/cmake.log" >&2; exit 1; }
    ninja -C "$work/build" llama-server >"$work/ninja.log" 2>&1 || { tail -20 "$work/ninja.log" >&2; exit 1; }
    mkdir -p "$work/done/bin"
    cp "$work/build/bin/llama-server" "$work/done/bin/"
    rm -rf "${engines:?}/$version"
    mv "$work/done" "$engines/$version"
fi
printf "export DEEPSPEC_LLAMA_SERVER=%q\n" "$server"
