#!/usr/bin/env bash
# Tests vLLM's server under a real Slurm of this one machine. regenerate.sbatch starts it, waits until it answers, asks,
# and ends it. The answers must be those of our own engine. A second job has a server that ends before it answers.
# Then pipeline.sbatch trains and judges a drafter with vLLM as the target's server, with stored states and with states
# during training. Installs Slurm where it may; needs a build.
#
#   eval "$(scripts/engines.sh vllm)"; scripts/slurm/test-servers.sh
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "slurm test: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=${DEEPSPEC_TEST_BIN:-$PWD/target/release}
export DEEPSPEC_BIN=$bin
: "${DEEPSPEC_VLLM_PYTHON:?eval \"\$(scripts/engines.sh vllm)\" sets it}"
work=$(mktemp -d)
# shellcheck source=scripts/slurm/cluster.sh
. scripts/slurm/cluster.sh
stop() {
    status=$?
    [ $status = 0 ] || tail -n 20 "$work"/answers.* "$work"/broken.* "$work"/run/*.log "$work"/run/logs/* "$work"/run/pipeline.state \
        >&2 2>/dev/null || true
    kill "${slurm_daemons[@]}" 2>/dev/null || true
    wait "${slurm_daemons[@]}" 2>/dev/null || true
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap stop EXIT
start_slurm "$work" 1

# shellcheck source=scripts/vllm_cpu/command.sh
. scripts/vllm_cpu/command.sh
vllm_on_path "$work/path"
export DEEPSPEC_SERVER=vllm DEEPSPEC_SERVER_ARGS="--dtype float32 --max-model-len 512 --enforce-eager" DEEPSPEC_STATE=$work/jobs
target=assets/tiny-target
"$bin/deepspec-data" --quiet split --dataset assets/demo-prompts.jsonl --sample-size 20 --test-size 0.2 --train-output "$work/prompts.jsonl" \
    --eval-output "$work/held-out.jsonl"
asked=(--model "$target" --input "$work/prompts.jsonl" --temperature 0 --max-tokens 64 --disable-thinking)
submit() { sbatch --parsable --wait --gpus-per-node=0 --cpus-per-task=1 --output="$work/$1.log" scripts/slurm/regenerate.sbatch "${asked[@]}" --output "$work/$1.jsonl"; }

echo "== regenerate.sbatch with vLLM's server" >&2
submit answers
"$bin/deepspec-data" --quiet regenerate --local-model "$target" "${asked[@]}" --output "$work/own.jsonl"
python3 - "$work/answers.jsonl" "$work/own.jsonl" <<'PY'
import json, sys
served, own = ({row["id"]: [m["content"] for m in row["conversations"]] for row in map(json.loads, open(file))} for file in sys.argv[1:])
same = sum(served[key] == own[key] for key in own)
print(f"slurm test: vLLM's server: {same} of {len(own)} answers are those of our own engine")
# Where two tokens are nearly as good as each other, engines may part.
assert served.keys() == own.keys() and len(own) == 16 and same >= 15
PY
# The job ends a moment before the last of its programs.
all_ended() {
    local attempt left
    for ((attempt = 0; attempt < 100; attempt++)); do
        left=$(writers "$work")
        [ -n "$left" ] || return 0
        sleep 0.1
    done
    echo "slurm test: parts of the server outlived the job: ${left//$'\n'/ }" >&2
    return 1
}
all_ended

echo "== and with one that does not start" >&2
DEEPSPEC_SERVER_ARGS="--no-such-flag" submit broken && { echo "slurm test: the job did not fail" >&2; exit 1; }
grep -q 'failed: no server on GPU none' "$work/jobs"
grep -q 'no-such-flag' "$work/broken.log"
echo "slurm test: a server that does not start fails its job with its own words" >&2

echo "== pipeline.sbatch with vLLM as the target's server" >&2
export DEEPSPEC_RUN=$work/run DEEPSPEC_TARGET=$target DEEPSPEC_RECIPE=configs/tiny/eagle3.yaml DEEPSPEC_PROMPTS=assets/demo-prompts.jsonl
export DEEPSPEC_TARGET_SERVER=vllm DEEPSPEC_SPLIT_ARGS="--sample-size 60 --test-size 0.1" DEEPSPEC_CACHE_ARGS="--device cpu"
export DEEPSPEC_REGENERATE_ARGS="--temperature 1 --max-tokens 48 --seed 1 --disable-thinking"
export DEEPSPEC_TRAIN_ARGS="--device cpu --set train.max_train_steps=20"
export DEEPSPEC_EVAL_ARGS="--suite smoke-math --limit 4 --max-new-tokens 32 --max-num-seqs 4 --temperature 0"
here="--gpus-per-node=0 --cpus-per-task=1"
export DEEPSPEC_REGENERATE_SBATCH=$here DEEPSPEC_CACHE_SBATCH=$here DEEPSPEC_TRAIN_SBATCH="$here --ntasks-per-node=1"
export DEEPSPEC_EVAL_SBATCH=$here DEEPSPEC_EXPORT_SBATCH=$here
unset DEEPSPEC_SERVER
for states in cache online; do
    # The second run learns from the answers of the first.
    rm -rf "$work"/run/{cache,checkpoints,eval,export,pipeline.state}
    DEEPSPEC_STATES=$states bash scripts/slurm/pipeline.sbatch
    while [ -n "$(squeue --noheader)" ]; do sleep 1; done
    all_ended
    python3 - "$work/run" "$states" <<'PY'
import glob, json, sys
run, states = sys.argv[1:]
lines = [line.rstrip("\n").split("\t") for line in open(f"{run}/pipeline.state")]
assert not [line for line in lines if "failed" in line[4]], lines
done = [line[1] for line in lines if line[4] == "done"]
assert done[-3:] == ["train", "export", "eval"] and ("cache" in done) == (states == "cache"), done
left = [folder for line in lines for folder in glob.glob(f"/dev/shm/deepspec-states-{line[3] or 'none'}")]
assert not left, left
length = json.load(open(f"{run}/eval/results.json"))["suites"][0]["metrics"]["accepted_length"]
assert length >= 1, length
print(f"slurm test: vLLM as the target's server, {states}: {' '.join(done)}; accepted length {length:.2f}")
PY
done
