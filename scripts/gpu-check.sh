#!/usr/bin/env bash
# Runs everything that needs a GPU: the golden suite on the device, our own kernels, and groups of one and of all GPUs.
# Then it times training steps at full size, and decoding at full size beside transformers. From built binaries it is
# made to take less than ten minutes. Weights are random; nothing is downloaded.
#
#   scripts/gpu-check.sh [OUTPUT_DIR]              default runs/gpu-check: gpu-check.json, gpu-check.md, logs
#   scripts/gpu-check.sh --standin [OUTPUT_DIR]    run it at toy size on the stand-in for a GPU (tests/standin)
#   scripts/gpu-check.sh --pack DIR                put the programs that it runs into DIR, for a machine without Rust:
#                                                  there DEEPSPEC_GPU_PROGRAMS=DIR names them, beside this tree at
#                                                  an equal path
#
# DEEPSPEC_TEST_PYTHON names a Python with torch and transformers; the default is python3.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --standin | --pack) ;;
    -*)
        echo "gpu-check: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
# What is compared on the device. Attention of blocks and our own kernels are others there than on the CPU.
tests=(--workspace --test 'golden*' --test block_attention)
if [ "${1:-}" = --pack ]; then
    into=${2:?usage: scripts/gpu-check.sh --pack DIR}
    rm -rf "$into/tests"
    mkdir -p "$into/tests"
    tests+=(--test on_gpu)
    cargo build --release --locked --bin deepspec-train --bin deepspec-eval
    built=$(cargo test --release --locked "${tests[@]}" --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*deps[^"]*\)".*/\1/p')
    for program in $built; do strip -o "$into/tests/$(basename "$program")" "$program"; done
    for program in deepspec-train deepspec-eval; do strip -o "$into/$program" "${CARGO_TARGET_DIR:-target}/release/$program"; done
    exit
fi
standin=0
if [ "${1:-}" = --standin ]; then
    standin=1
    shift
fi
out=${1:-runs/gpu-check}
mkdir -p "$out"
out=$(cd "$out" && pwd -P)
python=${DEEPSPEC_TEST_PYTHON:-python3}
# The GPU that is none has libtorch's operators only.
if [ $standin = 0 ]; then tests+=(--test on_gpu); fi
programs=${DEEPSPEC_GPU_PROGRAMS:-}
bin=${programs:-${CARGO_TARGET_DIR:-target}/release}
train=$bin/deepspec-train
eval=$bin/deepspec-eval
# What is tokenised here is of no use to other runs.
export DEEPSPEC_CACHE=$out/cache
say() { echo "gpu-check ($((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))): $*" >&2; }

if [ $standin = 0 ] && ! nvidia-smi -L >"$out/gpus.txt" 2>/dev/null; then
    echo "gpu-check: nvidia-smi shows no GPU here; --standin runs the same at toy size without one" >&2
    exit 1
fi
if [ -z "$programs" ]; then
    cargo build --quiet --release --workspace --bins
    cargo test --quiet --release "${tests[@]}" --no-run
fi
if [ $standin = 1 ] && grep -qa ProcessGroupNCCL "$train"; then
    echo "gpu-check: the programs are built with NCCL, for true GPUs; left out here" >&2
    exit 0
fi
"$python" -c 'import torch, transformers' || {
    echo "gpu-check: DEEPSPEC_TEST_PYTHON must name a Python with torch and transformers" >&2
    exit 1
}
SECONDS=0

if [ $standin = 1 ]; then
    LD_LIBRARY_PATH=$(scripts/standin.sh)
    export LD_LIBRARY_PATH DEEPSPEC_STANDIN_DEVICES=2
    gpus=2 backend=gloo
    bench=(--config configs/tiny/dspark.yaml --set data.max_length=64 --set train.global_batch_size=4 --processes 1 --bench 1)
    shape=() slots=4 tokens=12
else
    gpus=$(grep -c '^GPU ' "$out/gpus.txt") backend=nccl
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .); fi
    # As many samples to a step as one of eight GPUs has of the recipe's 512.
    bench=(--config configs/dspark/qwen3_4b.yaml --set train.global_batch_size=64 --processes 1 --bench 1)
    shape=(configs/shapes/qwen3_4b.json) slots=32 tokens=128
fi

say "golden suite on the device"
golden=0 running=()
# With one thread, for which bits are promised.
compare=(env OMP_NUM_THREADS=1 DEEPSPEC_TEST_DEVICE=cuda)
if [ -n "$programs" ]; then
    # Each takes longer to begin with the GPU than to compare, and they do so side by side.
    rm -f "$out"/golden-*.log
    trap 'kill "${running[@]}" 2>/dev/null || true' EXIT
    for program in "$programs"/tests/*; do
        if [ $standin = 1 ] && [[ $program = */on_gpu-* ]]; then continue; fi
        "${compare[@]}" "$program" >"$out/golden-${program##*/}.log" 2>&1 &
        running+=($!)
    done
    for one in "${running[@]}"; do wait "$one" || golden=$?; done
    trap - EXIT
    cat "$out"/golden-*.log >"$out/golden.log"
    rm "$out"/golden-*.log
else
    "${compare[@]}" cargo test --quiet --release --no-fail-fast "${tests[@]}" >"$out/golden.log" 2>&1 || golden=$?
fi

say "groups of 1 and $gpus over $backend"
"$python" scripts/gpu_check.py rows assets/demo-prompts.jsonl 32 >"$out/rows.jsonl"
recipe=(--quiet --device cuda --overwrite --config configs/tiny/dspark.yaml --set data.states=online --set "data.input=['$out/rows.jsonl']"
    --set data.max_length=128 --set train.backend=$backend --set train.local_batch_size=1 --set train.global_batch_size="$gpus"
    --set train.max_train_steps=4 --set logging.logging_steps=1 --set "logging.output_dir=$out/checkpoints")
groups=()
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
code=0
RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port $train "${recipe[@]}" >"$out/group-1.log" 2>&1 || code=$?
groups+=("1:$code")
if [ "$gpus" -gt 1 ]; then
    code=0
    $train "${recipe[@]}" --processes "$gpus" >"$out/group-$gpus.log" 2>&1 || code=$?
    groups+=("$gpus:$code")
fi

say "training steps"
$train --quiet --device cuda --json "${bench[@]}" >"$out/bench.json"

say "decoding"
target=assets/tiny-target
if [ ${#shape[@]} -gt 0 ]; then
    target=$out/target
    "$python" scripts/gpu_check.py target "${shape[@]}" assets/tiny-target "$target"
fi
# Of one slot longer, so that the first step, in which libraries choose their kernels, weighs little.
for count in 1 "$slots"; do
    $eval run --quiet --device cuda --dtype bfloat16 --target "$target" --draft none --no-baseline --suite smoke-chat --limit "$count" \
        --max-num-seqs "$count" --temperature 0 --max-new-tokens $((count == 1 ? 4 * tokens : tokens)) --overwrite --output-dir "$out/decode-$count" >/dev/null
done
weights=$(stat -c %s "$target"/*.safetensors | awk '{ bytes += $1 } END { printf "%d", bytes }')
device=$([ $standin = 1 ] && echo cpu || echo cuda)
LD_LIBRARY_PATH='' "$python" scripts/gpu_check.py loop "$target" eval_datasets/smoke-chat.jsonl "$tokens" "$device" >"$out/loop.json"
if [ $standin = 0 ]; then rm -r "$target"; fi

"$python" scripts/gpu_check.py report "$out" --seconds "$SECONDS" --standin $standin --backend $backend --golden $golden \
    --groups "${groups[@]}" --max-num-seqs 1 "$slots" --weights "$weights"
