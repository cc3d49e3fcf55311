#!/usr/bin/env bash
# Runs scripts/pipeline.sh on the toy target, kills it with kill -9 in every stage, and compares its end with an
# uninterrupted run. Needs a build.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "test-pipeline: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${DEEPSPEC_TEST_BIN:-$PWD/target/release}
work=$(mktemp -d)
stop() {
    status=$?
    [ $status = 0 ] || tail -n 30 "$work"/log "$work"/killed-*/pipeline.state >&2 2>/dev/null || true
    [ -z "${group:-}" ] || kill -KILL -- "-$group" 2>/dev/null || true
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap stop EXIT

export OMP_NUM_THREADS=1
export DEEPSPEC_SPLIT_ARGS="--sample-size 240 --test-size 0.1"
export DEEPSPEC_REGENERATE_ARGS="--temperature 1.0 --max-tokens 64 --seed 1 --disable-thinking"
export DEEPSPEC_CACHE_ARGS="--shard-size 1 --device cpu"
export DEEPSPEC_TRAIN_ARGS="--device cpu --set train.max_train_steps=40 --set train.local_batch_size=2 --set logging.logging_steps=1 --set logging.checkpointing_steps=10"
export DEEPSPEC_EVAL_ARGS="--domain math --limit 12 --max-new-tokens 64 --max-num-seqs 4 --seed 1 --device cpu --no-baseline"

# Programs that stop in each stage once, before they begin or in the middle of it. The public suites need the hub: the smoke suites
# take their place.
export DEEPSPEC_BIN=$work/bin
mkdir "$work/bin"
for program in data train eval; do
    cat >"$work/bin/deepspec-$program" <<SH
#!/usr/bin/env bash
case "\$1 \$2" in
    suites*) waits=suites ;;
    split*) waits=split ;;
    inspect*) waits=inspect ;;
    "checkpoint convert") waits=export ;;
esac
if [ -n "\${waits:-}" ] && [ -d "$work/armed" ] && mkdir "$work/armed/\$waits" 2>/dev/null; then
    sleep 600
fi
[ "\${waits:-}" != suites ] || exit 0
exec "$bin/deepspec-$program" "\$@"
SH
    chmod +x "$work/bin/deepspec-$program"
done

pipeline() { # DIR
    scripts/pipeline.sh --target assets/tiny-target --prompts assets/demo-prompts.jsonl --recipe configs/tiny/dspark.yaml --gpus 0 \
        --states "$states" --out "$1"
}
until_true() {
    local what=$1 attempt
    shift
    for ((attempt = 0; attempt < 6000; attempt++)); do
        ! "$@" || return 0
        if ! kill -0 "$group" 2>/dev/null; then
            echo "pipeline test: the pipeline ended before $what" >&2
            return 1
        fi
        sleep 0.01
    done
    echo "pipeline test: no $what" >&2
    return 1
}
waits() { [ -d "$work/armed/$1" ]; }
answered() { [ -s "$run/answers-0.jsonl" ]; }
cached() { [ -n "$(find "$run/cache" "$run/cache.partial" -name '*.safetensors' 2>/dev/null)" ]; }
trained() { [ -d "$run/checkpoints/drafter/step_10" ]; }
evaluated() { [ -n "$(find "$run/eval" -name 'journal*.jsonl' -size +0 2>/dev/null)" ]; }

for states in cache online; do
    run=$work/killed-$states
    rm -rf "$work/armed"
    mkdir "$work/armed"
    stages="suites:waits split:waits answers:answered inspect:waits states:cached training:trained evaluation:evaluated export:waits"
    [ "$states" = cache ] || stages=${stages/states:cached /}
    for each in $stages; do
        stage=${each%%:*} reached=${each##*:}
        export states run
        setsid bash -c "$(declare -f pipeline); pipeline $run" >"$work/log" 2>&1 &
        group=$!
        until_true "progress in $stage" "$reached" "$stage"
        kill -KILL -- "-$group"
        wait "$group" 2>/dev/null || true
        group=
        awk -F '\t' -v stage="$stage" '$1 == stage { found = $2 == "running" || $2 == "done" } END { exit !found }' "$run/pipeline.state" || {
            echo "pipeline test: the state file does not name $stage" >&2
            exit 1
        }
        echo "pipeline test: $states: killed in $stage ($(awk -F '\t' '$2 == "done"' "$run/pipeline.state" | wc -l) stages done)" >&2
    done
    pipeline "$run" >"$work/log" 2>&1
    rm -rf "$work/armed"

    # The same without interruption: answers of one process, and training and evaluation on the data of the killed run, because
    # rows lie in the order in which they were answered.
    "$bin/deepspec-data" --quiet regenerate --local-model assets/tiny-target --model assets/tiny-target --device cpu \
        --input "$run/train.jsonl" --output "$work/answers-$states.jsonl" $DEEPSPEC_REGENERATE_ARGS
    alone=$work/alone-$states
    (
        target=assets/tiny-target recipe=configs/tiny/dspark.yaml prompts=assets/demo-prompts.jsonl shares=1 overrides=()
        . scripts/stages.sh
        stage_arguments train
        "$bin/deepspec-train" --quiet "${arguments[@]}" --set name=alone --set "logging.output_dir=$alone"
        stage_arguments eval
        arguments=("${arguments[@]/#$run\/checkpoints\/drafter/$alone/alone}")
        "$bin/deepspec-eval" --quiet run "${arguments[@]/#$run\/eval/$alone/eval}" >/dev/null
    )
done

python3 - "$work" <<'PY'
import json, sys
work = sys.argv[1]
def answers(file):
    return {row["id"]: [m["content"] for m in row["conversations"]] for row in map(json.loads, open(file))}
def losses(folder):
    return [(row["step"], row["loss"]) for row in map(json.loads, open(f"{folder}/metrics.jsonl"))]
def lengths(folder):
    return {suite["name"]: suite["metrics"]["accepted_length"] for suite in json.load(open(f"{folder}/results.json"))["suites"]}
for states in ("cache", "online"):
    killed, alone = f"{work}/killed-{states}", f"{work}/alone-{states}"
    asked, whole = answers(f"{killed}/answers-0.jsonl"), answers(f"{work}/answers-{states}.jsonl")
    assert asked == whole and len(whole) > 200, f"{len(asked)} answers, {sum(asked.get(key) == whole[key] for key in whole)} equal"
    found, expected = losses(f"{killed}/checkpoints/drafter"), losses(f"{alone}/alone")
    assert found == expected and len(expected) == 40, "losses differ"
    assert lengths(f"{killed}/eval") == lengths(f"{alone}/eval"), "accepted lengths differ"
    state = [line.split("\t")[:2] for line in open(f"{killed}/pipeline.state")]
    assert all(found == "done" for _, found in state), state
    json.load(open(f"{killed}/export/config.json"))
    print(f"pipeline test: {states}: {len(whole)} answers, 40 losses and {lengths(f'{alone}/eval')} as without kills; "
          f"stages {' '.join(name for name, _ in state)}")
PY
# Mistakes are refused before anything runs.
for wrong in "--target x" "--target x --prompts y --states disk" "--target x --prompts y --gpus many" "--target x --prompts y" "--unknown"; do
    code=0
    scripts/pipeline.sh $wrong --out "$work/wrong" >/dev/null 2>&1 || code=$?
    [ $code = 2 ] || { echo "pipeline test: \`$wrong\` ended with $code" >&2; exit 1; }
done
[ ! -e "$work/wrong" ]

# A row that cannot be answered ends the run with code 1, which says how to go on; DEEPSPEC_ACCEPT_FAILED_ROWS=1 goes on without it.
head -n 40 assets/demo-prompts.jsonl >"$work/some.jsonl"
python3 -c 'import json; print(json.dumps({"conversations": [{"role": "user", "content": "too long " * 3000}]}))' >>"$work/some.jsonl"
export DEEPSPEC_SPLIT_ARGS="--test-size 0.1" DEEPSPEC_EVAL_ARGS="${DEEPSPEC_EVAL_ARGS/--limit 12/--limit 2}"
export DEEPSPEC_TRAIN_ARGS="${DEEPSPEC_TRAIN_ARGS/max_train_steps=40/max_train_steps=4}"
small() {
    scripts/pipeline.sh --target assets/tiny-target --prompts "$work/some.jsonl" --recipe configs/tiny/dspark.yaml --gpus 0 --states cache \
        --out "$work/small" "$@"
}
code=0
small >"$work/log" 2>&1 || code=$?
[ $code = 1 ]
grep -q 'DEEPSPEC_ACCEPT_FAILED_ROWS=1 and the same command go on' "$work/log"
export DEEPSPEC_ACCEPT_FAILED_ROWS=1
small >"$work/log" 2>&1
[ "$(awk -F '\t' '$2 == "done"' "$work/small/pipeline.state" | wc -l)" = 8 ]
# Other settings of a stage that is done are refused, and --redo runs it and the later stages again.
export DEEPSPEC_TRAIN_ARGS="${DEEPSPEC_TRAIN_ARGS/max_train_steps=4/max_train_steps=6}"
code=0
small >"$work/log" 2>&1 || code=$?
[ $code = 2 ]
grep -q -- '--redo training runs it and the later stages again' "$work/log"
small --redo training >"$work/log" 2>&1
[ -d "$work/small/checkpoints/drafter/step_6" ]
[ "$(awk -F '\t' '$2 == "done"' "$work/small/pipeline.state" | wc -l)" = 8 ]
# A server of the pipeline answers, and ends.
DEEPSPEC_SERVER_ARGS="--device cpu --max-num-seqs 4" DEEPSPEC_TEST_SERVER=1 small --redo answers >"$work/log" 2>&1
grep -q '/health\|listening' "$work/small/answers.server-none.log"
[ "$(awk -F '\t' '$2 == "done"' "$work/small/pipeline.state" | wc -l)" = 8 ]
# GPUs are those of nvidia-smi; the plan names them, and warns where training does not fit them: here the smallest has 1 MiB.
printf '#!/usr/bin/env bash\nprintf "0\\n1\\n2\\n"\n' >"$work/bin/nvidia-smi"
chmod +x "$work/bin/nvidia-smi"
plan=$(env -u CUDA_VISIBLE_DEVICES PATH="$work/bin:$PATH" scripts/pipeline.sh --target assets/tiny-target --prompts "$work/some.jsonl" \
    --recipe configs/tiny/dspark.yaml --plan --out "$work/gpus" 2>"$work/log")
grep -q '^devices     3 GPUs$' <<<"$plan"
grep -q 'pipeline: warning: training takes .* more than the 0 GB of the smallest GPU here' "$work/log"
# A target that vLLM runs: the plan says which GPUs serve and which train, without vLLM.
printf '#!/usr/bin/env bash\nseq 0 7\n' >"$work/bin/nvidia-smi"
served() {
    env -u CUDA_VISIBLE_DEVICES -u DEEPSPEC_EVAL_ARGS PATH="$work/bin:$PATH" scripts/pipeline.sh --target assets/tiny-target \
        --prompts "$work/some.jsonl" --recipe configs/tiny/eagle3.yaml --out "$work/served" --plan --target-server vllm "$@" 2>"$work/log"
}
plan=$(served --tensor-parallel 2 --states cache)
grep -q '^servers     vLLM on 2 GPUs each: 4 for answers, 4 for states, 2 for evaluation$' <<<"$plan"
[ "$(awk '/^  [a-z]/ { printf "%s ", $1 }' <<<"$plan")" = "suites split answers inspect states training export evaluation " ]
plan=$(served --tensor-parallel 2 --states online)
grep -q '^devices     8 GPUs, of which 4 train while the others serve states$' <<<"$plan"
grep -q '^servers     vLLM on 2 GPUs each: 4 for answers, 2 for states, 2 for evaluation$' <<<"$plan"
plan=$(served --tensor-parallel 2 --states online --server-gpus 6 --server http://127.0.0.1:1)
grep -q '^devices     8 GPUs, of which 2 train while the others serve states$' <<<"$plan"
grep -q '^servers     vLLM on 2 GPUs each: 3 for states, 2 for evaluation$' <<<"$plan"
# On all GPUs vLLM leaves none to train beside it.
plan=$(served --tensor-parallel 8)
grep -q '^states      cache: vLLM takes all GPUs' <<<"$plan"
for wrong in "--tensor-parallel 16" "--tensor-parallel 0" "--tensor-parallel 8 --states online" "--engine sglang" "--states-folder /tmp" \
    "--tensor-parallel 2 --states online --server-gpus 3" "--states online --server-gpus 8" "--states cache --server-gpus 4" \
    "--target-server other" "--target-server deepspec --tensor-parallel 2" "--states-server http://127.0.0.1:1 --server-gpus 2"; do
    code=0
    served $wrong >/dev/null || code=$?
    [ $code = 2 ] || { echo "pipeline test: \`--target-server vllm $wrong\` ended with $code" >&2; exit 1; }
done
code=0
DEEPSPEC_SERVER=sglang served >/dev/null || code=$?
[ $code = 2 ]
echo "pipeline test: failed rows, other settings, --redo, servers and refusals behave as documented" >&2
