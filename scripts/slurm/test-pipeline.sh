#!/usr/bin/env bash
# Tests the whole pipeline under a real Slurm of this one machine, with each stage pre-empted by a more urgent job. The
# pipeline resumes by itself. Its end must equal that of uninterrupted runs without Slurm. Installs Slurm where it may;
# needs a build.
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
bin=$PWD/target/release
work=$(mktemp -d)
# shellcheck source=scripts/slurm/cluster.sh
. scripts/slurm/cluster.sh
stop() {
    status=$?
    if [ $status != 0 ]; then
        squeue --states=all >&2 || true
        tail -n 40 "$work"/slurm*.log >&2 || true
        tail -n 20 "$work"/run/pipeline.state "$work"/run/logs/* "$work"/pipeline.log >&2 2>/dev/null || true
    fi
    kill "${slurm_daemons[@]}" 2>/dev/null || true
    wait "${slurm_daemons[@]}" 2>/dev/null || true
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap stop EXIT
start_slurm "$work" 2

export OMP_NUM_THREADS=1
export DEEPSPEC_RUN=$work/run DEEPSPEC_TARGET=assets/tiny-target DEEPSPEC_RECIPE=configs/tiny/dspark.yaml
export DEEPSPEC_PROMPTS=assets/demo-prompts.jsonl DEEPSPEC_TASKS=2
export DEEPSPEC_SPLIT_ARGS="--sample-size 240 --test-size 0.1"
export DEEPSPEC_REGENERATE_ARGS="--temperature 1.0 --max-tokens 128 --seed 1 --disable-thinking"
export DEEPSPEC_CACHE_ARGS="--shard-size 1 --device cpu"
export DEEPSPEC_TRAIN_ARGS="--device cpu --set train.max_train_steps=40 --set train.local_batch_size=2 --set logging.logging_steps=1 --set logging.checkpointing_steps=10"
export DEEPSPEC_EVAL_ARGS="--suite smoke-math --suite smoke-code --limit 24 --max-new-tokens 128 --max-num-seqs 4 --seed 1 --device cpu --no-baseline"
here="--gpus-per-node=0 --cpus-per-task=1"
export DEEPSPEC_REGENERATE_SBATCH=$here DEEPSPEC_CACHE_SBATCH=$here DEEPSPEC_EVAL_SBATCH=$here
export DEEPSPEC_TRAIN_SBATCH="$here --nodes=2 --ntasks-per-node=1" DEEPSPEC_EXPORT_SBATCH=$here
# Both nodes are this machine, whatever they are called.
export MASTER_ADDR=127.0.0.1
run=$DEEPSPEC_RUN
mkdir "$run"

# The split, merge, report and export are over sooner than anybody could come in between: the first time each waits until it is told to stop.
export DEEPSPEC_BIN=$work/bin
mkdir "$work/bin"
for program in data train eval; do
    cat >"$work/bin/deepspec-$program" <<SH
#!/usr/bin/env bash
case "\$1 \$2 \$SLURM_JOB_NAME" in
    split*) waits=pipeline ;;
    "cache merge "*) waits=merge ;;
    *deepspec-report) waits=report ;;
    *deepspec-export) waits=export ;;
esac
if [ -n "\${waits:-}" ] && mkdir "$work/waits-\$waits" 2>/dev/null; then
    sleep 600 &
    wait
fi
exec "$bin/deepspec-$program" "\$@"
SH
    chmod +x "$work/bin/deepspec-$program"
done

# Waits until a command succeeds; a pipeline that has failed meanwhile ends the test.
until_true() {
    local what=$1 attempt
    shift
    for ((attempt = 0; attempt < 4000; attempt++)); do
        ! "$@" || return 0
        if grep -q 'failed' "$run/pipeline.state" 2>/dev/null; then
            echo "slurm test: the pipeline failed while waiting for $what" >&2
            return 1
        fi
        sleep 0.05
    done
    echo "slurm test: no $what in four minutes" >&2
    return 1
}
# Whether the state file has this event of a stage.
has() { grep -qP "^[^\t]*\t$1\t[^\t]*\t[^\t]*\t$2" "$run/pipeline.state" 2>/dev/null; }
requeued() {
    hurry
    # Every task of the array.
    [ "$(grep -cP "^[^\t]*\t$1\t[^\t]*\t[^\t]*\tdone" "$run/pipeline.state")" = "$2" ]
}
answered() { [ -n "$(find "$run" -maxdepth 1 -name 'answers-*.jsonl' -size +0 2>/dev/null)" ]; }
cached() { [ -n "$(find "$run/cache" "$run/cache.partial" -name '*.safetensors' 2>/dev/null)" ]; }
trained() { grep -q 'step 5/' "$run/logs/train.log" 2>/dev/null; }
evaluated() { [ -n "$(find "$run/eval" -name 'journal-*.jsonl' -size +0 2>/dev/null)" ]; }

# Once a stage has got somewhere its program is halted, so that it cannot be done before the urgent job comes; Slurm wakes it and tells it to stop.
preempt() {
    local stage=$1 program=$2 urgent
    until_true "progress in $stage" "$3"
    [ -z "$program" ] || kill -STOP $(processes "^$bin/$program.*$work")
    urgent=$(sbatch --parsable --partition=urgent --nodes=2 --exclusive --output=/dev/null --wrap true)
    until_true "pre-emption of $stage" has "$stage" stopped
    until_true "end of $stage" requeued "$stage" "$4"
    echo "slurm test: $stage was pre-empted by job $urgent and went on" >&2
}
waits() { [ -d "$work/waits-$stage" ]; }

sbatch --parsable --gpus-per-node=0 --output="$work/pipeline.log" scripts/slurm/pipeline.sbatch
preempt pipeline '' waits 1
preempt regenerate 'deepspec-data regenerate' answered 2
preempt cache 'deepspec-data cache build' cached 2
preempt merge '' waits 1
preempt train deepspec-train trained 1
preempt eval 'deepspec-eval run' evaluated 2
preempt report '' waits 1
preempt export '' waits 1
bash scripts/slurm/pipeline.sbatch status
cat "$run/eval/report.md"

echo "== the same without Slurm" >&2
"$bin/deepspec-data" --quiet regenerate --local-model "$DEEPSPEC_TARGET" --model "$DEEPSPEC_TARGET" --input "$run/train.jsonl" \
    --output "$work/answers.jsonl" $DEEPSPEC_REGENERATE_ARGS
"$bin/deepspec-train" --quiet --config "$DEEPSPEC_RECIPE" --set "data.states.cache=$run/cache" --set name=alone \
    --set "logging.output_dir=$work/out" $DEEPSPEC_TRAIN_ARGS
"$bin/deepspec-eval" --quiet run --target "$DEEPSPEC_TARGET" --draft "$run/checkpoints/drafter/step_latest" --output-dir "$work/eval" \
    $DEEPSPEC_EVAL_ARGS >/dev/null
python3 - "$run" "$work" <<'PY'
import glob, json, sys
run, work = sys.argv[1:]
assert "dspark" in json.dumps(json.load(open(f"{run}/export/config.json"))).lower()
assert glob.glob(f"{run}/export/*.safetensors")
def rows(files):
    return {row["id"]: row["conversations"] for file in files for row in map(json.loads, open(file))}
shared, alone = rows(sorted(glob.glob(f"{run}/answers-[0-9].jsonl"))), rows([f"{work}/answers.jsonl"])
assert shared.keys() == alone.keys() and len(alone) == 216, (len(shared), len(alone))
said = lambda messages: [m["content"] for m in messages]
same = sum(said(shared[key]) == said(alone[key]) for key in alone)
def losses(folder):
    return [json.loads(line)["loss"] for line in open(f"{folder}/metrics.jsonl")]
two, one = losses(f"{run}/checkpoints/drafter"), losses(f"{work}/out/alone")
assert len(two) == len(one) == 40, (len(two), len(one))
worst = max(abs(a - b) / abs(b) for a, b in zip(two, one))
def lengths(folder):
    return {suite["name"]: suite["metrics"]["accepted_length"] for suite in json.load(open(f"{folder}/results.json"))["suites"]}
print(f"slurm test: pipeline: {same} of {len(alone)} answers are those of one process, 40 losses within {worst:.1e}, "
      f"accepted lengths {lengths(f'{run}/eval')}")
assert same == len(alone) and worst < 1e-4 and lengths(f"{run}/eval") == lengths(f"{work}/eval")
PY
