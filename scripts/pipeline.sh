#!/usr/bin/env bash
# Trains a drafter for a target on this machine by one command: suites, prompts, answers, states, training, evaluation,
# and the files that an engine serves.
#
#   scripts/pipeline.sh --target MODEL --prompts FILE|DATASET [OPTION]...
#
#   --target MODEL      folder, hub id or GGUF file of the target
#   --prompts P         prompts: a file, a folder, or a dataset's id on the hub
#   --recipe R          recipe of the drafter; by default the one in configs/dspark that names the target. Other
#                       drafters: configs/dflash, configs/eagle3
#   --set KEY=VALUE     override a key of the recipe; may be repeated
#   --rows N            draw N rows of the prompts, of which 5 % are held out; by default all
#   --gpus N            GPUs to use; by default all that are visible, 0 for the CPU
#   --states S          online (the target runs beside the trainer) or cache (its states are on disk); by default the
#                       free disk decides
#   --server URL        OpenAI-compatible server of the target for the answers; may be repeated. By default the pipeline
#                       starts one per GPU, and answers within the program on a CPU
#   --target-server S   program that runs the target: deepspec (default), or vllm for targets that only vLLM runs
#                       (docs/large-targets.md)
#   --tensor-parallel N GPUs that hold one copy of the target in vLLM (1)
#   --server-gpus G     GPUs of vLLM while the drafter trains on the others, with --states online; by default half
#   --states-server URL vLLM server of hidden states, or agent, that runs already; may be repeated. By default the
#                       pipeline starts them
#   --states-folder DIR folder that these servers write to (/dev/shm/deepspec-states)
#   --suites DIR        folder of the suites to judge on; by default the public ones are fetched into eval_datasets
#   --engine E          engine to write files for: vllm, sglang, llama.cpp or none; by default llama.cpp for a GGUF
#                       target, else vllm. None is for drafters that the pipeline does not export: MTP-1,
#                       xPress, DSpark of DeepSeek-V4; and for assistants of Gemma 4, which need no export
#   --hardware H        accelerator of the estimate and of the memory: h100 (default with GPUs), h200, … (see
#                       deepspec-train --help)
#   --price P           price of a GPU for an hour, for the estimate
#   --out DIR           folder of the run (runs/pipeline)
#   --plan              print what would run, how long it takes and what it needs, and exit
#   --redo STAGE        run STAGE and all later stages again, and replace their results
#
# The command goes on where it stopped: after a failure, a signal or kill -9, give it again. DIR/pipeline.state has one
# line per stage. Relative paths are those of the calling folder. Environment:
#
#   DEEPSPEC_{SPLIT,REGENERATE,INSPECT,CACHE,TRAIN,EVAL}_ARGS   more arguments of a stage's program, separated by blanks
#   DEEPSPEC_SERVER               server to start: deepspec (default), vllm or sglang
#   DEEPSPEC_SERVER_ARGS          more arguments of that server, separated by blanks
#   DEEPSPEC_ACCEPT_FAILED_ROWS   1: go on without rows that could not be answered or read
set -euo pipefail
caller=$PWD self=$(realpath "${BASH_SOURCE[0]}")
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
stage=pipeline
# shellcheck source=scripts/stages.sh
. scripts/stages.sh

usage() {
    echo "pipeline: $*; scripts/pipeline.sh --help lists the options" >&2
    exit 2
}
target='' prompts='' recipe='' rows='' gpus='' states='' suites='' engine='' hardware='' price='' run=runs/pipeline plan='' redo=''
target_server=deepspec tensor_parallel='' server_gpu_count='' states_folder=''
given_urls=() overrides=() states_urls=()
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h)
            sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "$self"
            exit 0
            ;;
        --plan)
            plan=1
            shift
            continue
            ;;
        --target | --prompts | --recipe | --set | --redo | --rows | --gpus | --states | --server | --suites | --engine | --hardware | --price | --out) ;;
        --target-server | --tensor-parallel | --server-gpus | --states-server | --states-folder) ;;
        *) usage "unknown argument \`$1\`" ;;
    esac
    [ $# -ge 2 ] || usage "$1 needs a value"
    case $1 in
        --target) target=$2 ;;
        --prompts) prompts=$2 ;;
        --recipe) recipe=$2 ;;
        --set) overrides+=(--set "$2") ;;
        --redo) redo=$2 ;;
        --rows) rows=$2 ;;
        --gpus) gpus=$2 ;;
        --states) states=$2 ;;
        --server) given_urls+=("$2") ;;
        --target-server) target_server=$2 ;;
        --tensor-parallel) tensor_parallel=$2 ;;
        --server-gpus) server_gpu_count=$2 ;;
        --states-server) states_urls+=("$2") ;;
        --states-folder) states_folder=$2 ;;
        --suites) suites=$2 ;;
        --engine) engine=$2 ;;
        --hardware) hardware=$2 ;;
        --price) price=$2 ;;
        --out) run=$2 ;;
    esac
    shift 2
done
# Files of the calling folder, where they are there.
for name in target prompts recipe suites; do
    [ -z "${!name}" ] || [ ! -e "$caller/${!name}" ] || [ "$caller" = "$PWD" ] || printf -v "$name" '%s' "$caller/${!name}"
done
case $run in /*) ;; *) [ "$caller" = "$PWD" ] || run=$caller/$run ;; esac
[ -n "$target" ] || usage "--target is missing"
[ -n "$prompts" ] || usage "--prompts is missing"
[[ ${rows:-0} =~ ^[0-9]+$ ]] || usage "--rows is \`$rows\`; expected a number"
case $states in '' | online | cache) ;; *) usage "--states is \`$states\`; expected online or cache" ;; esac
[ "$engine" = none ] || choose_engine || usage "--engine is \`$engine\`; expected vllm, sglang, llama.cpp or none"
[ -z "$suites" ] || [ -d "$suites" ] || usage "--suites: $suites is no folder"
case ${DEEPSPEC_SERVER:-deepspec} in deepspec | vllm | sglang) ;; *) usage "DEEPSPEC_SERVER is \`$DEEPSPEC_SERVER\`; expected deepspec, vllm or sglang" ;; esac
for url in "${given_urls[@]}" "${states_urls[@]}"; do
    case $url in http://* | https://*) ;; *) usage "a server is \`$url\`; expected http://… or https://…" ;; esac
done
case $target_server in
    deepspec) [ -z "$tensor_parallel$server_gpu_count$states_folder${states_urls[*]}" ] ||
        usage "--tensor-parallel, --server-gpus, --states-server and --states-folder need --target-server vllm" ;;
    vllm)
        [ "$engine" = vllm ] || usage "--target-server vllm judges the drafter in vLLM; --engine $engine does not fit"
        [ "${DEEPSPEC_SERVER:-vllm}" = vllm ] || usage "DEEPSPEC_SERVER is $DEEPSPEC_SERVER, and --target-server vllm answers with vLLM"
        ;;
    *) usage "--target-server is \`$target_server\`; expected deepspec or vllm" ;;
esac
tensor_parallel=${tensor_parallel:-1}
[[ $tensor_parallel =~ ^[1-9][0-9]*$ ]] || usage "--tensor-parallel is \`$tensor_parallel\`; expected a number from 1"
# Servers that run already have a folder of their own. Those of this run share one in memory.
given_states=${#states_urls[@]}
if [ "$given_states" -gt 0 ]; then
    [ -z "$server_gpu_count" ] || usage "--server-gpus has no effect with --states-server"
    states_folder=${states_folder:-/dev/shm/deepspec-states}
else
    [ -z "$states_folder" ] || usage "--states-folder needs --states-server"
    states_folder=/dev/shm/deepspec-states-$(realpath -m "$run" | sha256sum | cut -c1-16)
fi

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
    if [ -z "$recipe" ]; then
        near=$(grep -liE "^target: *\{model: *[^,]*$(basename "$target" | sed 's/[.[\*^$]/\\&/g')," configs/dspark/*.yaml | head -n 1 || true)
        [ -z "$near" ] || usage "no recipe in configs/dspark is for $target; for a copy of that model give --recipe $near"
        usage "no recipe in configs/dspark is for $target; give one with --recipe. docs/real-model.md says which settings depend on the target"
    fi
fi
[ -f "$recipe" ] || usage "--recipe: $recipe does not exist"

# GPUs: the visible ones, by number.
devices=()
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
    case ${devices[0]:-} in '' | -* | NoDevFiles) devices=() ;; esac
elif listed=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null); then
    mapfile -t devices < <(grep -E '^[0-9]+$' <<<"$listed" || true)
    export CUDA_DEVICE_ORDER=PCI_BUS_ID
fi
if [ -n "$gpus" ]; then
    [[ $gpus =~ ^[0-9]+$ ]] || usage "--gpus is \`$gpus\`; expected a number"
    [ -n "$plan" ] || [ "$gpus" -le ${#devices[@]} ] || usage "--gpus is $gpus, and ${#devices[@]} are visible"
    devices=("${devices[@]:0:gpus}")
fi
count=${gpus:-${#devices[@]}}
if [ "$tensor_parallel" -gt "$((count > 0 ? count : 1))" ]; then
    usage "--tensor-parallel is $tensor_parallel, and there are $count GPUs"
fi
# Training beside vLLM's servers needs a GPU that they leave.
online_fits=1
if [ "$target_server" = vllm ] && [ "$given_states" = 0 ] && [ "$count" -gt 0 ] && [ "$count" -le "$tensor_parallel" ]; then online_fits=; fi

shares=1
# shellcheck source=scripts/servers.sh
. scripts/servers.sh
model=$target kind=${DEEPSPEC_SERVER:-$target_server}
# All stages use the chosen devices.
if [ "$count" = 0 ]; then
    export CUDA_VISIBLE_DEVICES=
elif [ ${#devices[@]} -gt 0 ]; then
    CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${devices[*]}")
    export CUDA_VISIBLE_DEVICES
fi

# Sizes: rows of the prompts, and bytes of their states.
known_rows=$rows
if [ -z "$known_rows" ] && [ -f "$prompts" ]; then
    case $prompts in *.jsonl) known_rows=$(wc -l <"$prompts") ;; esac
fi
plan_args=(--plan)
named_hardware=$hardware
[ -n "$hardware" ] || [ "$count" = 0 ] || hardware=h100
if [ -n "$hardware" ]; then
    plan_args+=(--hardware "$hardware" --devices "$((count > 0 ? count : 1))")
    [ -z "$known_rows" ] || plan_args+=(--rows "$known_rows")
    [ -z "$price" ] || plan_args+=(--price "$price")
fi
# A mistake in target or recipe is better found now than after the answers.
code=0
problem=$(mktemp)
estimate_args=(--config "$recipe" --set "target.model=$target" "${overrides[@]}")
if [ "$target_server" = vllm ]; then
    states_setting '"cache": "/nonexistent"'
    estimate_args+=(--set "$setting" --set "data.input=[]")
fi
estimate=$("$bin/deepspec-train" "${estimate_args[@]}" "${plan_args[@]}" --json 2>"$problem") || code=$?
if [ $code != 0 ]; then
    cat "$problem" >&2
    rm -f "$problem"
    exit $code
fi
rm -f "$problem"
sizes=$(python3 - "$estimate" "${known_rows:-0}" <<'PY' || true
import json, sys
try:
    plan = json.loads(sys.argv[1])
    # Rows of 200 and 1,000 tokens, as in the plan; longer ones are cut.
    print(int(plan["cache_bytes_per_token"] * int(sys.argv[2]) * min(1200, plan["max_length"])), plan["global_batch_size"])
except (ValueError, KeyError, TypeError):
    print(0, 0)
PY
)
read -r cache_bytes batch <<<"${sizes:-0 0}"
# One step takes a whole batch; the split holds rows out of training.
held_out=0.05
[[ ! " ${DEEPSPEC_SPLIT_ARGS:-}" =~ \ --test-size[\ =]([0-9.]+) ]] || held_out=${BASH_REMATCH[1]}
trained=$(awk -v rows="${known_rows:-0}" -v held="$held_out" 'BEGIN { print int(rows * (1 - held)) }')
if [ -n "$known_rows" ] && [ "$trained" -lt "${batch:-0}" ]; then
    usage "of $known_rows rows $trained are trained on, fewer than one step of train.global_batch_size $batch; take more rows, or --set train.global_batch_size=N"
fi
existing=$run
while [ ! -d "$existing" ]; do existing=$(dirname "$existing"); done
free_bytes=$(($(df --output=avail -k "$existing" | tail -n 1) * 1024))
terabytes() { awk -v bytes="$1" 'BEGIN { printf bytes < 1e12 ? "%.1f GB" : "%.1f TB", bytes / (bytes < 1e12 ? 1e9 : 1e12) }'; }
if [ -n "$states" ]; then
    reason="as asked by --states"
elif [ -n "$(sed -n 's/^states=\(.*\)/\1/p' "$run/settings" 2>/dev/null)" ]; then
    states=$(sed -n 's/^states=\(.*\)/\1/p' "$run/settings")
    reason="as this run began"
elif [ -z "$online_fits" ]; then
    states=cache
    reason="vLLM takes all GPUs, so the drafter trains when the states are stored"
elif [ "${cache_bytes:-0}" = 0 ]; then
    states=online
    reason="the size of a cache is unknown before the rows are counted; --rows or --states decide"
elif [ "$cache_bytes" -lt $((free_bytes / 2)) ]; then
    states=cache
    reason="a cache takes up to $(terabytes "$cache_bytes") of the $(terabytes "$free_bytes") that are free, and every epoch reads it"
else
    states=online
    reason="a cache would take up to $(terabytes "$cache_bytes") of the $(terabytes "$free_bytes") that are free; the target runs in every epoch instead"
fi
if [ "$states" = online ] && [ -z "$online_fits" ]; then
    usage "--states online trains beside vLLM, and $tensor_parallel of $count GPUs leave none; take --states cache"
fi
# GPUs of the servers while the drafter trains.
if [ "$target_server" = vllm ] && [ "$states" = online ] && [ "$given_states" = 0 ] && [ "$count" -gt 0 ]; then
    half=$((count / 2 / tensor_parallel * tensor_parallel))
    server_gpu_count=${server_gpu_count:-$((half > 0 ? half : tensor_parallel))}
    [[ $server_gpu_count =~ ^[1-9][0-9]*$ ]] || usage "--server-gpus is \`$server_gpu_count\`; expected a number from 1"
    [ $((server_gpu_count % tensor_parallel)) = 0 ] || usage "--server-gpus is $server_gpu_count, no multiple of --tensor-parallel $tensor_parallel"
    [ "$server_gpu_count" -lt "$count" ] || usage "--server-gpus is $server_gpu_count; of $count GPUs that leaves none for training"
elif [ -n "$server_gpu_count" ]; then
    usage "--server-gpus has no effect here: no servers run on GPUs while the drafter trains, with states $states"
fi

# Warns where training needs more memory than the smallest chosen GPU has, or than the assumed one if nvidia-smi shows none.
warn_memory() {
    local smallest='' memory
    if [ ${#devices[@]} -gt 0 ]; then
        smallest=$(nvidia-smi --id="$(IFS=,; echo "${devices[*]}")" --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null |
            grep -E '^[1-9][0-9]*$' | sort -n | head -n 1 || true)
    fi
    if [ -n "$plan" ]; then
        # The plan itself compares with the assumed hardware.
        [ -n "$smallest" ] && [ -z "$named_hardware" ] || return 0
    fi
    # In a folder that does not exist the plan follows from sizes alone, and reads no answers.
    local run=/nonexistent
    recipe_arguments
    memory=$("$bin/deepspec-train" "${recipe_args[@]}" "${plan_args[@]}" --json 2>/dev/null) || return 0
    python3 - "$memory" "$smallest" "$hardware" <<'PY' >&2 || true
import json, sys
plan, smallest, hardware = json.loads(sys.argv[1]), *sys.argv[2:]
need, limit = plan["memory_total"], float(smallest) * 2**20 if smallest else plan["memory_limit"]
if limit and need > limit:
    gpu = "the smallest GPU here" if smallest else f"an {hardware}"
    print(f"pipeline: warning: training takes about {need / 1e9:.1f} GB on a GPU, more than the {limit / 1e9:.0f} GB of {gpu};"
          " these take less: --states cache, --set train.recompute=true,"
          " and --set train.sharding_strategy=shard_optimizer on several GPUs")
PY
}
[ "$count" = 0 ] || warn_memory

if [ -n "$suites" ]; then
    suites_dir=$suites
elif [[ " ${DEEPSPEC_EVAL_ARGS:-}" == *" --suite "* || " ${DEEPSPEC_EVAL_ARGS:-}" == *" --suite="* ]]; then
    suites_dir=eval_datasets
else
    suites_dir=eval_datasets fetch_suites=1
fi
stages=(suites split answers inspect)
[ "$states" = online ] || stages+=(states)
stages+=(training)
# A served drafter is judged from the exported files.
if [ "$target_server" = vllm ]; then stages+=(export evaluation); else stages+=(evaluation export); fi
if [ "$engine" = none ]; then
    unset 'stages[-1]'
elif grep -Eq '(^|[{ ])(mtp|xpress|dspark_v4):' "$recipe"; then
    usage "the MTP-1, xPress or DSpark of DeepSeek-V4 of $recipe is not written for engines here; take --engine none"
elif grep -Eq '(^|[{ ])gemma4_assistant:' "$recipe"; then
    usage "the checkpoint of the assistant of $recipe has the layout that engines load; take --engine none"
elif [ "$engine" != vllm ] && grep -Eq '(^|[{ ])peagle:' "$recipe"; then
    usage "of the engines only vLLM loads the P-EAGLE of $recipe; take --engine vllm or none"
elif [ "$engine" != vllm ] && grep -Eq '(^|[{ ])(causal|attention_sinks): *true' "$recipe"; then
    usage "of the engines only vLLM loads the causal blocks and attention sinks of $recipe; take --engine vllm or none"
elif [ "$engine" != sglang ] && grep -Eq '(^|[{ ])domino:' "$recipe"; then
    usage "of the engines only SGLang loads the Domino of $recipe; take --engine sglang or none"
fi
describe() {
    case $1 in
        suites) if [ -n "${fetch_suites:-}" ]; then echo "fetch the public suites, so that their prompts stay out of training"; else echo "use the suites in $suites_dir"; fi ;;
        split) echo "split the prompts into training and held-out rows" ;;
        answers) echo "let the target answer the training prompts" ;;
        inspect) echo "check the tokens that will be trained on" ;;
        states) echo "cache the target's hidden states" ;;
        training) echo "train the drafter" ;;
        evaluation) echo "measure accepted lengths on the suites$([ "$target_server" = deepspec ] || echo ", in vLLM")" ;;
        export) echo "write the files that $engine loads" ;;
    esac
}
# vLLM's servers of each stage.
describe_servers() {
    local copies=$((count > 0 ? count / tensor_parallel : 1)) parts=() judges=1
    [ "$copies" = 1 ] || [[ " ${DEEPSPEC_EVAL_ARGS:-} " == *" --no-baseline "* ]] || judges=2
    [ ${#given_urls[@]} -gt 0 ] || parts+=("$copies for answers")
    [ "$given_states" -gt 0 ] || parts+=("$((server_gpu_count ? server_gpu_count / tensor_parallel : copies)) for states")
    parts+=("$judges for evaluation")
    printf -v parts '%s, ' "${parts[@]}"
    case $count/$tensor_parallel in 0/*) echo "vLLM on the CPU: ${parts%, }" ;; */1) echo "vLLM on a GPU each: ${parts%, }" ;;
        *) echo "vLLM on $tensor_parallel GPUs each: ${parts%, }" ;;
    esac
}
if [ -n "$plan" ]; then
    echo "target      $target"
    echo "prompts     $prompts${known_rows:+, $known_rows rows}"
    echo "recipe      $recipe"
    echo "states      $states: $reason"
    trains=
    [ -z "$server_gpu_count" ] || trains=", of which $((count - server_gpu_count)) train while the others serve states"
    if [ "$count" = 0 ]; then echo "devices     the CPU"; else echo "devices     $count GPU$([ "$count" = 1 ] || echo s)$trains"; fi
    [ "$target_server" = deepspec ] || echo "servers     $(describe_servers)"
    echo "folder      $run, $(terabytes "$free_bytes") free"
    for name in "${stages[@]}"; do
        is=$(awk -F '\t' -v name="$name" '$1 == name { print $2 }' "$run/pipeline.state" 2>/dev/null || true)
        printf '  %-11s %s%s\n' "$name" "$(describe "$name")" "${is:+ ($is)}"
    done
    echo
    recipe_arguments
    "$bin/deepspec-train" "${recipe_args[@]}" "${plan_args[@]}"
    exit 0
fi

if [ "$target_server" = vllm ] && ! command -v vllm >/dev/null; then
    echo "pipeline: there is no command \`vllm\`; pip install vllm" >&2
    exit 1
fi
mkdir -p "$run"
# One run at a time: programs of an earlier call hold the lock, too.
exec 9>"$run/.lock"
if ! flock --nonblock 9; then
    echo "pipeline: another call still runs in $run, or programs of it do: $(fuser "$run/.lock" 2>/dev/null | sed "s/ $$\b//" || true)" >&2
    exit 1
fi
# These settings decide the data of a run; the others may change from call to call.
settings=$(printf '%s\n' "target=$target" "prompts=$prompts" "rows=$rows" "states=$states")
[ "$target_server" = deepspec ] || settings+=$'\n'"target_server=$target_server"
[ "$tensor_parallel" = 1 ] || settings+=$'\n'"tensor_parallel=$tensor_parallel"
if [ -f "$run/settings" ] && [ "$(cat "$run/settings")" != "$settings" ]; then
    echo "pipeline: $run was begun with other settings; give the same ones, or another --out:" >&2
    diff "$run/settings" - <<<"$settings" >&2 || true
    exit 2
fi
printf '%s\n' "$settings" >"$run/settings.partial"
mv "$run/settings.partial" "$run/settings"
mkdir -p "$run/stages"
if [ -n "$redo" ] && [[ " ${stages[*]} " != *" $redo "* ]]; then
    usage "--redo is \`$redo\`; expected one of ${stages[*]}"
fi

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
write_state() {
    local name
    for name in "${stages[@]}"; do
        printf '%s\t%s\t%s\t%s\n' "$name" "${state[$name]}" "${since[$name]}" "${seconds[$name]}"
    done >"$run/pipeline.state.partial"
    mv "$run/pipeline.state.partial" "$run/pipeline.state"
}
mark() { # STAGE STATE [SECONDS]
    state[$1]=$2 since[$1]=$(date -u +%Y-%m-%dT%H:%M:%SZ) seconds[$1]=${3:--}
    write_state
}
# A stage that runs again starts anew: its results and those of later stages go now, so that a call without --redo goes on.
if [ -n "$redo" ]; then
    again=
    for name in "${stages[@]}"; do
        [ "$name" != "$redo" ] || again=1
        [ -n "$again" ] || continue
        state[$name]=waiting since[$name]=- seconds[$name]=-
        rm -f "$run/stages/$name"
        case $name in
            answers) rm -rf "$run"/answers-0.jsonl* "$run"/answers-0_* ;;
            states) rm -rf "$run/cache" "$run"/cache.* ;;
            training) rm -rf "$run/checkpoints/drafter" ;;
            evaluation) rm -rf "$run/eval" ;;
            export) rm -rf "$run/export" ;;
        esac
    done
    write_state
fi
# What decides the result of a stage, beside the settings of the run.
inputs_of() {
    case $1 in
        split) echo "suites $suites_dir, arguments ${DEEPSPEC_SPLIT_ARGS:-none}" ;;
        answers) echo "arguments ${DEEPSPEC_REGENERATE_ARGS:-none}" | sed 's/ *--retry-failed//' ;;
        states) echo "recipe $(sha256sum <"$recipe" | cut -c1-16) of $recipe, ${overrides[*]:-no overrides}, arguments ${DEEPSPEC_CACHE_ARGS:-none}" ;;
        training) echo "recipe $(sha256sum <"$recipe" | cut -c1-16) of $recipe, ${overrides[*]:-no overrides}, arguments ${DEEPSPEC_TRAIN_ARGS:-none}" ;;
        evaluation) echo "suites $suites_dir, arguments ${DEEPSPEC_EVAL_ARGS:-none}" ;;
        export) echo "engine $engine" ;;
        *) echo any ;;
    esac
}
running=
end_all() {
    end_servers
    if [ "$given_states" = 0 ]; then
        rm -rf "$states_folder"
        states_urls=()
    fi
}
finish() {
    local code=$?
    trap - EXIT
    end_all 2>/dev/null || true
    [ -z "$running" ] || mark "$running" "$([ $code = 75 ] && echo stopped || echo "failed, exit code $code")" || true
    exit $code
}
trap finish EXIT
trap 'exit 75' TERM INT HUP

# Runs the program of the running stage, and notes its arguments.
run_stage() {
    printf '%s\n' "$*" >"$run/stages/$running.command"
    run_program "$@"
}
# Whether the arguments of the stage have this flag already.
has() { [[ " ${arguments[*]} " == *" $1 "* || " ${arguments[*]} " == *" $1="* ]]; }

# accept_rows FILE COMMAND...: runs a command that ends with code 1 if single rows could not be used, though FILE is there. Without
# DEEPSPEC_ACCEPT_FAILED_ROWS=1 that ends the run, and says how to go on.
accept_rows() {
    local file=$1 status=0
    shift
    "$@" || status=$?
    [ $status = 1 ] && [ -s "$file" ] || return $status
    # Rows that wait for an answer are no failed rows.
    if [ "$running" = answers ] && ! "$@" --dry-run 2>&1 | grep -F -- '+ 0 to take over + 0 to ask ' >/dev/null; then
        return 1
    fi
    if [ "${DEEPSPEC_ACCEPT_FAILED_ROWS:-}" = 1 ]; then
        echo "pipeline: $running goes on without the rows above" >&2
        return 0
    fi
    echo "pipeline: rows above could not be used; DEEPSPEC_ACCEPT_FAILED_ROWS=1 and the same command go on without them" >&2
    [ "$running" != answers ] || echo "pipeline: DEEPSPEC_REGENERATE_ARGS=--retry-failed and the same command ask for them again" >&2
    return 1
}

# Runs a program in the background, so that a signal reaches it and this script.
run_program() {
    local pid status=0 ends=()
    # It ends with this script, even if that is killed.
    ! command -v setpriv >/dev/null || ends=(setpriv --pdeathsig TERM --)
    "${ends[@]}" "$@" &
    pid=$!
    trap 'kill -TERM $pid 2>/dev/null; wait $pid; exit 75' TERM INT HUP
    wait "$pid" || status=$?
    trap 'exit 75' TERM INT HUP
    return $status
}

stage_suites() {
    [ -n "${fetch_suites:-}" ] || return 0
    run_stage "$bin/deepspec-data" suites --output-dir "$suites_dir" || {
        local code=$?
        echo "pipeline: the public suites come from the hub; give a folder of suites with --suites, such as --suites eval_datasets" >&2
        return $code
    }
}
stage_split() {
    stage_arguments split
    local files=("$suites_dir"/*.jsonl)
    arguments+=(--dedup --decontaminate "${files[@]}")
    [ -z "$rows" ] || has --sample-size || arguments+=(--sample-size "$rows")
    run_stage "$bin/deepspec-data" "${arguments[@]}"
}
stage_answers() {
    stage_arguments regenerate
    local asked=("${arguments[@]//\{task\}/0}")
    if [ ${#given_urls[@]} -gt 0 ]; then
        asked+=(--server "${given_urls[@]}")
    elif [ "$count" = 0 ] && [ "$kind" = deepspec ] && [ -z "${DEEPSPEC_TEST_SERVER:-}" ]; then
        asked+=(--local-model "$target" --device cpu)
    else
        group_gpus "${devices[@]}"
        if [ "$kind" = deepspec ] && [ "$count" -gt 0 ]; then
            [[ " ${DEEPSPEC_SERVER_ARGS:-}" =~ \ --max-num-seqs([\ =]|$) ]] ||
                export DEEPSPEC_SERVER_ARGS="--max-num-seqs 64 ${DEEPSPEC_SERVER_ARGS:-}"
            has --concurrency || asked+=(--concurrency 64)
        fi
        # A server that starts again loads the model first.
        has --server-wait || asked+=(--server-wait "${DEEPSPEC_SERVER_WAIT:-1800}")
        start_servers "$run/answers" "${groups[@]}"
        wait_for_servers
        asked+=(--server "${urls[@]}")
    fi
    accept_rows "$run/answers-0.jsonl" run_stage "$bin/deepspec-data" regenerate "${asked[@]}"
    end_servers
}
stage_inspect() {
    stage_arguments inspect
    has --limit || arguments+=(--limit 1)
    accept_rows "$run/answers-0.jsonl" run_stage "$bin/deepspec-data" "${arguments[@]}"
}
# serve_states GPU...: servers of hidden states for this stage, unless they run already.
serve_states() {
    [ "$target_server" = vllm ] && [ "$given_states" = 0 ] || return 0
    group_gpus "$@"
    recipe_arguments
    start_states "$run/states" "${groups[@]}"
    states_urls=("${urls[@]}")
}
stage_states() {
    serve_states "${devices[@]}"
    stage_arguments cache
    accept_rows "$run/cache/manifest.json" run_stage "$bin/deepspec-data" cache build "${arguments[@]}"
    end_all
}
stage_training() {
    if [ "$states" = online ] && [ -n "$server_gpu_count" ]; then
        local trains=$((count - server_gpu_count))
        serve_states "${devices[@]:trains}"
        local -x CUDA_VISIBLE_DEVICES
        CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${devices[*]:0:trains}")
    elif [ "$states" = online ]; then
        serve_states
    fi
    stage_arguments train
    run_stage "$bin/deepspec-train" "${arguments[@]}"
    end_all
}
stage_evaluation() {
    stage_arguments eval
    has --suites-dir || arguments+=(--suites-dir "$suites_dir")
    # As many as the estimate assumes.
    [ "$count" = 0 ] || has --max-num-seqs || arguments+=(--max-num-seqs 64)
    if [ "$target_server" = vllm ]; then
        group_gpus "${devices[@]}"
        ! has --no-baseline || groups=("${groups[0]}")
        start_judged "$run/evaluation" "$run/stages/export.log" "${groups[@]:0:2}"
        arguments+=("${judged[@]}")
    elif [ "$count" -gt 1 ]; then
        local worker pids=() failed=0
        for ((worker = 0; worker < count; worker++)); do
            CUDA_VISIBLE_DEVICES=${devices[worker]} "$bin/deepspec-eval" --quiet run "${arguments[@]}" --worker "$worker/$count" &
            pids+=($!)
        done
        trap 'kill -TERM "${pids[@]}" 2>/dev/null; wait; exit 75' TERM INT HUP
        for worker in "${pids[@]}"; do wait "$worker" || failed=$?; done
        trap 'exit 75' TERM INT HUP
        [ $failed = 0 ] || return $failed
    fi
    run_stage "$bin/deepspec-eval" run "${arguments[@]}"
    end_servers
}
stage_export() {
    local status=0
    stage_arguments export
    run_stage "$bin/deepspec-eval" "${arguments[@]}" 2>"$run/stages/export.log" || status=$?
    cat "$run/stages/export.log" >&2
    return $status
}

echo "pipeline: a drafter for $target by $recipe; states $states: $reason" >&2
for name in "${stages[@]}"; do
    if [ "${state[$name]}" = 'done' ]; then
        before=$(cat "$run/stages/$name" 2>/dev/null || inputs_of "$name")
        if [ "$before" != "$(inputs_of "$name")" ]; then
            echo "pipeline: $name was done with $before, and this call asks for $(inputs_of "$name"); --redo $name runs it and the later stages again" >&2
            exit 2
        fi
        echo "== pipeline: $name: done before" >&2
        continue
    fi
    echo "== pipeline: $name: $(describe "$name")" >&2
    running=$name
    mark "$name" running
    began=$SECONDS
    "stage_$name"
    inputs_of "$name" >"$run/stages/$name"
    mark "$name" 'done' $((SECONDS - began))
    running=
done
drafter=$run/export
[ "$engine" != none ] || drafter=$run/checkpoints/drafter/step_latest
echo "== pipeline: done; the report is $run/eval/report.html, the drafter $drafter" >&2
serve=$(sed -n 's/.*serve it with: //p' "$run/stages/export.log" 2>/dev/null || true)
[ -z "$serve" ] || echo "== pipeline: serve it with: $serve" >&2
