#!/usr/bin/env bash
# Trains a drafter for a target on this machine by one command: suites, prompts, answers, states, training, evaluation, and the
# files that an engine serves.
#
#   scripts/pipeline.sh --target MODEL --prompts FILE|DATASET [OPTION]...
#
#   --target MODEL      folder, hub id or GGUF file of the target
#   --prompts P         prompts: a file, a folder, or a dataset's id on the hub
#   --recipe R          recipe of the drafter; by default the one in configs/dspark that names the target
#   --rows N            draw N rows of the prompts; by default all
#   --gpus N            GPUs to use; by default all that are visible, 0 for the CPU
#   --states S          online (the target runs beside the trainer) or cache (its states are on disk); by default recommended
#   --server URL        OpenAI-compatible server of the target for the answers; may be repeated. By default the pipeline starts one
#                       per GPU, and answers within the program on a CPU
#   --suites DIR        folder of the suites to judge on; by default the public ones are fetched into eval_datasets
#   --engine E          engine to write files for: vllm, sglang or gguf; by default gguf for a GGUF target, else vllm
#   --hardware H        accelerator of the estimate: h100, h200, … (see deepspec-train --help)
#   --price P           price of a GPU for an hour, for the estimate
#   --out DIR           folder of the run (runs/pipeline)
#   --plan              print what would run, how long it takes and what it needs, and exit
#
# The command goes on where it stopped: after a failure, a signal or kill -9, give it again. DIR/pipeline.state has one line per
# stage. DEEPSPEC_{SPLIT,REGENERATE,INSPECT,CACHE,TRAIN,EVAL}_ARGS hold more arguments of a stage's program, separated by blanks.
# DEEPSPEC_SERVER is the kind of server to start: deepspec (default), vllm or sglang.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
stage=pipeline

usage() {
    echo "pipeline: $*; scripts/pipeline.sh --help lists the options" >&2
    exit 2
}
target='' prompts='' recipe='' rows='' gpus='' states='' suites='' engine='' hardware=h100 price='' run=runs/pipeline plan=
given_urls=()
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h)
            sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --plan)
            plan=1
            shift
            continue
            ;;
        --target | --prompts | --recipe | --rows | --gpus | --states | --server | --suites | --engine | --hardware | --price | --out) ;;
        *) usage "unknown argument \`$1\`" ;;
    esac
    [ $# -ge 2 ] || usage "$1 needs a value"
    case $1 in
        --target) target=$2 ;;
        --prompts) prompts=$2 ;;
        --recipe) recipe=$2 ;;
        --rows) rows=$2 ;;
        --gpus) gpus=$2 ;;
        --states) states=$2 ;;
        --server) given_urls+=("$2") ;;
        --suites) suites=$2 ;;
        --engine) engine=$2 ;;
        --hardware) hardware=$2 ;;
        --price) price=$2 ;;
        --out) run=$2 ;;
    esac
    shift 2
done
[ -n "$target" ] || usage "--target is missing"
[ -n "$prompts" ] || usage "--prompts is missing"
[[ ${rows:-0} =~ ^[0-9]+$ ]] || usage "--rows is \`$rows\`; expected a number"
case $states in '' | online | cache) ;; *) usage "--states is \`$states\`; expected online or cache" ;; esac
case ${target,,} in *.gguf) engine=${engine:-gguf} ;; *) engine=${engine:-vllm} ;; esac
case $engine in vllm | sglang | gguf) ;; *) usage "--engine is \`$engine\`; expected vllm, sglang or gguf" ;; esac

bin=target/release
[ -d "$bin" ] || [ ! -x bin/deepspec-train ] || bin=bin
bin=${DEEPSPEC_BIN:-$bin}
for program in data train eval; do
    if [ ! -x "$bin/deepspec-$program" ]; then
        echo "pipeline: $bin/deepspec-$program is missing; run scripts/setup.sh && cargo build --release" >&2
        exit 1
    fi
done

# The recipe that names the target.
if [ -z "$recipe" ]; then
    recipe=$(grep -lE "^target: *\{model: *$(printf '%s' "$target" | sed 's/[.[\*^$]/\\&/g')," configs/dspark/*.yaml | head -n 1 || true)
    [ -n "$recipe" ] || usage "no recipe in configs/dspark is for $target; give one with --recipe. docs/drafters.md says which settings of a recipe depend on the target"
fi
[ -f "$recipe" ] || usage "--recipe: $recipe is no file"

# GPUs: the visible ones, by number.
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
elif command -v nvidia-smi >/dev/null; then
    mapfile -t devices < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null || true)
else
    devices=()
fi
if [ -n "$gpus" ]; then
    [[ $gpus =~ ^[0-9]+$ ]] || usage "--gpus is \`$gpus\`; expected a number"
    [ -n "$plan" ] || [ "$gpus" -le ${#devices[@]} ] || usage "--gpus is $gpus, and ${#devices[@]} are visible"
    devices=("${devices[@]:0:gpus}")
fi
count=${gpus:-${#devices[@]}}

shares=1
# shellcheck source=scripts/stages.sh
. scripts/stages.sh
# shellcheck source=scripts/servers.sh
. scripts/servers.sh
model=$target kind=${DEEPSPEC_SERVER:-deepspec}
[ "$count" -gt 0 ] || export CUDA_VISIBLE_DEVICES=

# Sizes: rows of the prompts, and bytes of the states of one row of 1,200 tokens.
known_rows=$rows
if [ -z "$known_rows" ] && [ -f "$prompts" ]; then
    case $prompts in *.jsonl) known_rows=$(wc -l <"$prompts") ;; esac
fi
plan_args=(--config "$recipe" --set "target.model=$target" --plan --hardware "$hardware" --devices "$((count > 0 ? count : 1))")
[ -z "$known_rows" ] || plan_args+=(--rows "$known_rows")
[ -z "$price" ] || plan_args+=(--price "$price")
estimate=$("$bin/deepspec-train" "${plan_args[@]}" --json 2>/dev/null || true)
cache_bytes=$(python3 - "$estimate" <<'PY' || true
import json, sys
try:
    plan = json.loads(sys.argv[1])
    pipeline = plan.get("pipeline") or {}
    tokens = pipeline.get("rows", 0) * (pipeline.get("prompt_tokens", 0) + pipeline.get("answer_tokens", 0))
    print(int(plan["cache_bytes_per_token"] * tokens))
except (ValueError, KeyError, TypeError):
    print(0)
PY
)
existing=$run
while [ ! -d "$existing" ]; do existing=$(dirname "$existing"); done
free_bytes=$(($(df --output=avail -k "$existing" | tail -n 1) * 1024))
terabytes() { awk -v bytes="$1" 'BEGIN { printf bytes < 1e12 ? "%.1f GB" : "%.1f TB", bytes / (bytes < 1e12 ? 1e9 : 1e12) }'; }
if [ -n "$states" ]; then
    reason="as asked by --states"
elif [ -n "$(sed -n 's/^states=\(.*\)/\1/p' "$run/settings" 2>/dev/null)" ]; then
    states=$(sed -n 's/^states=\(.*\)/\1/p' "$run/settings")
    reason="as this run began"
elif [ "${cache_bytes:-0}" -gt 0 ] && [ "$cache_bytes" -lt $((free_bytes / 2)) ]; then
    states=cache
    reason="a cache takes up to $(terabytes "$cache_bytes") of the $(terabytes "$free_bytes") that are free, and every epoch reads it"
else
    states=online
    reason="a cache would take up to $(terabytes "${cache_bytes:-0}") of the $(terabytes "$free_bytes") that are free; the target runs in every epoch instead"
fi

stages=(suites split answers inspect)
[ "$states" = online ] || stages+=(states)
stages+=(training evaluation export)
describe() {
    case $1 in
        suites) echo "fetch the public suites, which training must not see" ;;
        split) echo "split the prompts into training and held-out rows" ;;
        answers) echo "let the target answer the training prompts" ;;
        inspect) echo "check the tokens that will be trained on" ;;
        states) echo "cache the target's hidden states" ;;
        training) echo "train the drafter" ;;
        evaluation) echo "measure accepted lengths on the suites" ;;
        export) echo "write the files that $engine loads" ;;
    esac
}
if [ -n "$plan" ]; then
    echo "target      $target"
    echo "prompts     $prompts${known_rows:+, $known_rows rows}"
    echo "recipe      $recipe"
    echo "states      $states: $reason"
    if [ "$count" = 0 ]; then echo "devices     the CPU"; else echo "devices     $count GPU$([ "$count" = 1 ] || echo s)"; fi
    echo "folder      $run, $(terabytes "$free_bytes") free"
    for name in "${stages[@]}"; do printf '  %-11s %s\n' "$name" "$(describe "$name")"; done
    echo
    "$bin/deepspec-train" "${plan_args[@]}"
    exit 0
fi

mkdir -p "$run"
# One run at a time: programs of an earlier call hold the lock, too.
exec 9>"$run/.lock"
if ! flock --nonblock 9; then
    echo "pipeline: another call still runs in $run, or programs of it do: $(fuser "$run/.lock" 2>/dev/null || true)" >&2
    exit 1
fi
settings=$(printf '%s\n' "target=$target" "prompts=$prompts" "recipe=$recipe" "rows=$rows" "states=$states" "engine=$engine" \
    "suites=$suites" "arguments=${DEEPSPEC_SPLIT_ARGS:-} | ${DEEPSPEC_REGENERATE_ARGS:-} | ${DEEPSPEC_CACHE_ARGS:-} | ${DEEPSPEC_EVAL_ARGS:-}")
if [ -f "$run/settings" ] && [ "$(cat "$run/settings")" != "$settings" ]; then
    echo "pipeline: $run was begun with other settings; give the same ones, or another --out:" >&2
    diff "$run/settings" - <<<"$settings" >&2 || true
    exit 2
fi
printf '%s\n' "$settings" >"$run/settings.partial"
mv "$run/settings.partial" "$run/settings"

# The state file: one line per stage, of name, state, time and seconds.
declare -A state seconds since
for name in "${stages[@]}"; do
    state[$name]=waiting seconds[$name]=- since[$name]=-
done
if [ -f "$run/pipeline.state" ]; then
    while IFS=$'\t' read -r name is at took; do
        [ -n "${state[$name]:-}" ] && [ "$is" = 'done' ] || continue
        state[$name]='done' since[$name]=$at seconds[$name]=$took
    done <"$run/pipeline.state"
fi
mark() { # STAGE STATE [SECONDS]
    local name
    state[$1]=$2 since[$1]=$(date -u +%Y-%m-%dT%H:%M:%SZ) seconds[$1]=${3:--}
    for name in "${stages[@]}"; do
        printf '%s\t%s\t%s\t%s\n' "$name" "${state[$name]}" "${since[$name]}" "${seconds[$name]}"
    done >"$run/pipeline.state.partial"
    mv "$run/pipeline.state.partial" "$run/pipeline.state"
}
running=
finish() {
    local code=$?
    trap - EXIT
    [ -z "$running" ] || mark "$running" "$([ $code = 75 ] && echo stopped || echo "failed, exit code $code")"
    end_servers 2>/dev/null || true
    exit $code
}
trap finish EXIT
trap 'exit 75' TERM INT

# Runs a program in the background, so that a signal reaches it and this script.
run_program() {
    local pid status=0
    "$@" &
    pid=$!
    trap 'kill -TERM $pid 2>/dev/null; wait $pid; exit 75' TERM INT
    wait "$pid" || status=$?
    trap 'exit 75' TERM INT
    return $status
}

if [ -n "$suites" ]; then
    suites_dir=$suites
elif [ -n "${DEEPSPEC_EVAL_ARGS:-}" ] && [[ $DEEPSPEC_EVAL_ARGS == *--suite* ]]; then
    suites_dir=eval_datasets
else
    suites_dir=eval_datasets fetch_suites=1
fi
stage_suites() {
    [ -n "${fetch_suites:-}" ] || return 0
    run_program "$bin/deepspec-data" suites --output-dir "$suites_dir"
}
stage_split() {
    stage_arguments split
    local files=("$suites_dir"/*.jsonl)
    arguments+=(--dedup --decontaminate "${files[@]}")
    [ -z "$rows" ] || arguments+=(--sample-size "$rows")
    run_program "$bin/deepspec-data" "${arguments[@]}"
}
stage_answers() {
    stage_arguments regenerate
    local asked=("${arguments[@]//\{task\}/0}")
    if [ ${#given_urls[@]} -gt 0 ]; then
        asked+=(--server "${given_urls[@]}")
    elif [ "$count" = 0 ] && [ "$kind" = deepspec ]; then
        asked+=(--local-model "$target" --device cpu)
    else
        local on=("${devices[@]}")
        [ ${#on[@]} -gt 0 ] || on=(none)
        start_servers "$run/answers" "${on[@]}"
        wait_for_servers
        asked+=(--server "${urls[@]}")
    fi
    run_program "$bin/deepspec-data" regenerate "${asked[@]}"
    end_servers
}
stage_inspect() {
    stage_arguments inspect
    run_program "$bin/deepspec-data" "${arguments[@]}" --limit 1
}
stage_states() {
    stage_arguments cache
    run_program "$bin/deepspec-data" cache build "${arguments[@]}"
}
stage_training() {
    stage_arguments train
    run_program "$bin/deepspec-train" "${arguments[@]}"
}
stage_evaluation() {
    stage_arguments eval
    arguments+=(--suites-dir "$suites_dir")
    if [ "$count" -gt 1 ]; then
        local worker pids=() failed=0
        for ((worker = 0; worker < count; worker++)); do
            CUDA_VISIBLE_DEVICES=${devices[worker]} "$bin/deepspec-eval" --quiet run "${arguments[@]}" --worker "$worker/$count" &
            pids+=($!)
        done
        trap 'kill -TERM "${pids[@]}" 2>/dev/null; wait; exit 75' TERM INT
        for worker in "${pids[@]}"; do wait "$worker" || failed=$?; done
        trap 'exit 75' TERM INT
        [ $failed = 0 ] || return $failed
    fi
    run_program "$bin/deepspec-eval" run "${arguments[@]}"
}
stage_export() {
    run_program "$bin/deepspec-eval" checkpoint convert --to "$engine" --from "$run/checkpoints/drafter/step_latest" \
        --target "$target" --output-dir "$run/export" --overwrite
}

echo "pipeline: a drafter for $target by $recipe; states $states: $reason" >&2
for name in "${stages[@]}"; do
    if [ "${state[$name]}" = 'done' ]; then
        echo "== pipeline: $name: done before" >&2
        continue
    fi
    echo "== pipeline: $name: $(describe "$name")" >&2
    running=$name
    mark "$name" running
    began=$SECONDS
    "stage_$name"
    mark "$name" 'done' $((SECONDS - began))
    running=
done
echo "== pipeline: done; the report is $run/eval/report.html, the drafter $run/export" >&2
