# shellcheck shell=bash
# Puts a command `vllm` for the tests on PATH: the build for CPUs of $DEEPSPEC_VLLM_PYTHON. There `vllm serve` fails,
# because it looks for a package called vllm. Source this file.
#
#   vllm_on_path DIR    writes the command to DIR
#   writers DIR         numbers of the processes whose output goes to a file in DIR
vllm_on_path() {
    mkdir -p "$1"
    cat >"$1/vllm" <<CMD
#!/usr/bin/env bash
model=\$2
shift 2
unset LD_LIBRARY_PATH
export PYTHONPATH=$PWD/scripts/vllm_cpu
exec "$DEEPSPEC_VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "\$model" "\$@"
CMD
    chmod +x "$1/vllm"
    export PATH=$1:$PATH VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
}

writers() {
    local at
    for at in /proc/[0-9]*; do
        [[ "$(readlink "$at/fd/1")" != "$1"/* ]] || echo "${at#/proc/}"
    done 2>/dev/null
}
