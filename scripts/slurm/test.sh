#!/usr/bin/env bash
# Tests training under a real Slurm of this one machine. Two tasks take their ranks from Slurm's own variables, except
# the address, which no node of this machine has. They train what one process trains, and stop with code 75 at a signal.
# The job of train.sbatch then goes back to the queue and resumes. regenerate.sbatch asks a server on each of two
# stand-ins for GPUs. Installs Slurm where it may; needs a build (cargo build --release).
#
#   scripts/slurm/test.sh [CACHE_DIR]      a cache of configs/tiny/dspark.yaml; by default built from the demo's prompts
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "slurm test: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=$PWD/target/release
work=$(mktemp -d)

. scripts/slurm/cluster.sh
stop() {
    kill "${slurm_daemons[@]}" 2>/dev/null || true
    wait "${slurm_daemons[@]}" 2>/dev/null || true
    rm -rf "$work"
}
trap stop EXIT
start_slurm "$work" 2
# Both nodes are this machine, whatever they are called.
export MASTER_ADDR=127.0.0.1
sinfo

cache=${1:-$work/cache}
common=(--config configs/tiny/dspark.yaml --set "data.states.cache=$cache" --set "logging.output_dir=$work/out"
    --set logging.logging_steps=1 --set logging.checkpointing_steps=10 --set train.max_train_steps=40
    --set train.local_batch_size=2 --device cpu)
export OMP_NUM_THREADS=1
if [ ! -f "$cache/manifest.json" ]; then
    python3 - assets/demo-prompts.jsonl "$work/rows.jsonl" <<'PY'
import json, sys
with open(sys.argv[1]) as prompts, open(sys.argv[2], "w") as rows:
    for line, _ in zip(prompts, range(64)):
        row = json.loads(line)
        roles = {"human": "user", "gpt": "assistant"}
        said = [{"role": roles[m["from"]], "content": m["value"]} for m in row["conversations"] if m["from"] in roles]
        rows.write(json.dumps({"id": row["id"], "conversations": said}) + "\n")
PY
    "$bin/deepspec-data" --quiet cache build --config configs/tiny/dspark.yaml --input "$work/rows.jsonl" --output-dir "$cache"
fi

echo "== one process" >&2
"$bin/deepspec-train" --quiet "${common[@]}" --set name=one
echo "== two tasks of srun" >&2
srun --ntasks=2 --oversubscribe "$bin/deepspec-train" --quiet "${common[@]}" --set name=two
echo "== two tasks, stopped by a signal to the job and started again" >&2
srun --ntasks=2 --oversubscribe --job-name=stopped "$bin/deepspec-train" "${common[@]}" --set name=stopped \
    2> >(tee "$work/stopped.log" >&2) &
step=$!
until grep -q 'step 5/' "$work/stopped.log" 2>/dev/null; do
    kill -0 $step || { echo "slurm test: it ended before step 5" >&2; exit 1; }
    sleep 0.2
done
scancel --signal=USR1 --name=stopped
status=0
wait $step || status=$?
[ $status = 75 ] || { echo "slurm test: exit code $status, expected 75" >&2; exit 1; }
srun --ntasks=2 --oversubscribe "$bin/deepspec-train" --quiet "${common[@]}" --set name=stopped

echo "== train.sbatch, stopped by a signal, requeued and gone on" >&2
state() { squeue --noheader --jobs="$job" --states=all --format=%T 2>/dev/null; }
fail() {
    cat "$work/batch.log" >&2
    echo "slurm test: $1" >&2
    exit 1
}
# Submits training under this name, and returns when it has begun.
submit() {
    rm -f "$work/batch.log"
    job=$(sbatch --parsable --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-node=0 --oversubscribe --output="$work/batch.log" \
        scripts/slurm/train.sbatch "${common[@]}" --set name="$1")
    for ((attempt = 0; attempt < 600; attempt++)); do
        grep -q 'step 5/' "$work/batch.log" 2>/dev/null && return
        [ "$(state)" != FAILED ] || fail "the batch job failed before step 5"
        sleep 0.2
    done
    fail "the batch job did not get to step 5"
}
submit batch
scancel --signal=USR1 "$job"
for ((attempt = 0; attempt < 1200; attempt++)); do
    case $(state) in
        PENDING) hurry ;;
        COMPLETED) break ;;
        FAILED | CANCELLED | NODE_FAIL) fail "the batch job is $(state)" ;;
    esac
    sleep 0.2
done
[ "$(state)" = COMPLETED ] || fail "the batch job is $(state) after four minutes"
grep -q 'stopped by a signal' "$work/batch.log" || fail "the batch job never stopped"
grep -q 'resuming from' "$work/batch.log" || fail "the batch job did not go on"

echo "== train.sbatch, cancelled: it stays so" >&2
submit cancelled
scancel "$job"
for ((attempt = 0; attempt < 600; attempt++)); do
    case $(state) in CANCELLED | PENDING | COMPLETED) break ;; esac
    sleep 0.2
done
[ "$(state)" = CANCELLED ] || fail "the cancelled job is $(state)"
scontrol show job "$job" | grep -q 'Restarts=0' || fail "the cancelled job was put back into the queue"

echo "== an array whose last task is stopped: the others do not run again" >&2
cat >"$work/array.sbatch" <<'SBATCH'
#!/bin/bash
. scripts/slurm/common.sh
begun
# Task 0 is done at once; task 1 stops the first time.
status=0
[ "$task:${SLURM_RESTART_COUNT:-0}" != 1:0 ] || status=75
conclude
SBATCH
export DEEPSPEC_STATE=$work/array.tsv
job=$(sbatch --parsable --array=0-1%1 --gpus-per-node=0 --requeue --output="$work/batch.log" "$work/array.sbatch")
for ((attempt = 0; attempt < 1200; attempt++)); do
    hurry
    [ -n "$(squeue --noheader --array --jobs="$job" --states=PENDING,CONFIGURING,RUNNING,COMPLETING,SUSPENDED 2>/dev/null)" ] || break
    sleep 0.2
done
unset DEEPSPEC_STATE
starts=$(cut -f 3,5 "$work/array.tsv" | grep started | sort)
expected=$'0/2\tstarted, restart 0\n1/2\tstarted, restart 0\n1/2\tstarted, restart 1'
[ "$starts" = "$expected" ] || fail "the array's tasks started so: $starts"

echo "== regenerate.sbatch with a server on each of two GPUs, which are none" >&2
target=assets/tiny-target
"$bin/deepspec-data" --quiet split --dataset assets/demo-prompts.jsonl --sample-size 40 --test-size 0.2 --train-output "$work/prompts.jsonl" \
    --eval-output "$work/held-out.jsonl"
asked=(--model "$target" --input "$work/prompts.jsonl" --temperature 1.0 --max-tokens 64 --seed 1 --disable-thinking)
CUDA_VISIBLE_DEVICES=0,1 DEEPSPEC_SERVER_ARGS="--device cpu" sbatch --wait --gpus-per-node=0 --cpus-per-task=1 --output="$work/batch.log" \
    scripts/slurm/regenerate.sbatch "${asked[@]}" --output "$work/answers.jsonl" || fail "regenerate.sbatch failed"
"$bin/deepspec-data" --quiet regenerate --local-model "$target" --device cpu "${asked[@]}" --output "$work/alone.jsonl" >/dev/null
python3 - "$work" <<'PY'
import glob, json, sys
work = sys.argv[1]
def said(name):
    rows = [json.loads(line) for line in open(f"{work}/{name}.jsonl")]
    return {row["id"]: [message["content"] for message in row["conversations"]] for row in rows}
asked, alone = said("answers"), said("alone")
assert asked == alone and len(alone) == 32, (len(asked), len(alone))
logs = sorted(path.rsplit("-", 1)[1] for path in glob.glob(f"{work}/answers.jsonl.server-*.log"))
assert logs == ["0.log", "1.log"], logs
answered = [server["answered"] for server in json.load(open(f"{work}/answers.jsonl.report.json"))["this_run"]["servers"]]
print(f"slurm test: {len(alone)} rows, whose {answered} turns the servers of two GPUs answered, are those of one process")
assert len(answered) == 2 and all(answered), answered
PY

python3 - "$work/out" <<'PY'
import json, sys
def losses(name):
    with open(f"{sys.argv[1]}/{name}/metrics.jsonl") as lines:
        return [json.loads(line)["loss"] for line in lines]
one = losses("one")
for name in ["two", "stopped", "batch"]:
    other = losses(name)
    assert len(other) == len(one) == 40, (name, len(other))
    worst = max(abs(a - b) / abs(b) for a, b in zip(other, one))
    print(f"slurm test: {name}: 40 steps, losses within {worst:.1e} of one process")
    assert worst < 1e-4, worst
PY
