# shellcheck shell=bash
# Model servers of this machine, one on each GPU or group of GPUs. Callers are scripts/pipeline.sh and the batch scripts
# in scripts/slurm.
#
# The caller sets:
#
#   bin               folder of the programs
#   model             the target; not read for `states`
#   kind              deepspec, vllm, sglang, or states (vLLM with the hidden states of $recipe_args)
#   stage             name in messages
#   tensor_parallel   GPUs of a vLLM server (1)
#
# Environment:
#
#   DEEPSPEC_SERVER_ARGS   more arguments of a server, separated by blanks
#   DEEPSPEC_SERVER_WAIT   seconds that a server may take to load the model (1800)

servers=() urls=() server_gpus=() server_logs=()

# group_gpus GPU...: groups of $tensor_parallel GPUs in $groups, such as 0,1 and 2,3. Without GPUs it is `none`: the CPU.
group_gpus() {
    local first size=${tensor_parallel:-1}
    groups=()
    for ((first = 1; first + size - 1 <= $#; first += size)); do groups+=("$(IFS=,; echo "${*:first:size}")"); done
    [ $# -gt 0 ] || groups=(none)
    if [ ${#groups[@]} = 0 ]; then
        echo "$stage: a server needs $size GPUs, and there are $#" >&2
        return 2
    fi
}

# The words of a command that a program printed, in $words.
shell_words() {
    mapfile -d '' -t words < <(python3 -c 'import shlex, sys; print(*shlex.split(sys.argv[1]), sep="\0", end="\0")' "$1")
}

# server_command PORT [ARGUMENT]...: the command of a server, in $command.
server_command() {
    local port=$1 more line words size=() served=()
    shift
    read -ra more <<<"${DEEPSPEC_SERVER_ARGS:-}"
    [ "${tensor_parallel:-1}" = 1 ] || size=(--tensor-parallel-size "$tensor_parallel")
    case $kind in
        deepspec) command=("$bin/deepspec-data" --quiet serve --model "$model" --port "$port" "${more[@]}") ;;
        vllm)
            served=("$model")
            # vLLM does not know owner/name@revision.
            if [[ $model == *?/*?@?* && $model != [/.~]* ]] && [ ! -e "$model" ]; then
                served=("${model%%@*}" --revision "${model#*@}" --served-model-name "$model")
            fi
            command=(vllm serve "${served[@]}" --port "$port" "${size[@]}" "${more[@]}" "$@")
            ;;
        sglang) command=(python3 -m sglang.launch_server --model-path "$model" --port "$port" "${more[@]}") ;;
        states)
            line=$("$bin/deepspec-data" --quiet states vllm-command "${recipe_args[@]}" --port "$port" --tensor-parallel "${tensor_parallel:-1}") || exit
            shell_words "$line"
            # vLLM takes the last of equal flags. The states decide theirs.
            command=("${words[@]:0:3}" "${more[@]}" "${words[@]:3}")
            ;;
        *)
            echo "$stage: the server is \`$kind\`; expected deepspec, vllm or sglang" >&2
            exit 2
            ;;
    esac
}

# supervise LOG SERVER COMMAND...: runs a server. After USR1, which says that it has answered, it is started again when it ends, up to
# three times. TERM ends it.
supervise() {
    local log=$1 server=$2 left=0
    shift 2
    # Each server leads a process group. A part of it that outlives it would keep its GPUs.
    set -m
    trap 'left=3' USR1
    trap 'trap "" TERM
        kill $!
        for second in {1..20}; do kill -0 $! || break; sleep 1; done
        kill -KILL -- -$!
        exit' TERM
    while true; do
        "$@" >>"$log" 2>&1 3>&- &
        while kill -0 $!; do wait $!; done
        kill -KILL -- -$!
        [ $((left--)) -gt 0 ] || exit 1
        echo "$server has ended and starts again; $left more starts are allowed" | tee -a "$log" >&3
    done 3>&2 2>/dev/null
}

# start_servers LOG GPUS ... [-- ARGUMENT...]: starts a server for each group of GPUs (`none`: on the CPU) and fills servers and urls.
# Logs go to LOG.server-GPUS.log.
start_servers() {
    local log=$1 gpus port command on=() alone=() ends=()
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        on+=("$1")
        shift
    done
    # A server ends with the script, even if that is killed with its process group.
    ! command -v setpriv >/dev/null || alone=(setsid setpriv --pdeathsig TERM --) ends=(setpriv --pdeathsig TERM --)
    for gpus in "${on[@]}"; do
        port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
        server_command "$port" "${@:2}"
        server_logs+=("$log.server-${gpus//,/-}.log")
        : >"${server_logs[-1]}"
        (
            [ "$gpus" = none ] || export CUDA_VISIBLE_DEVICES=$gpus
            exec "${alone[@]}" bash -c "$(declare -f supervise); supervise \"\$@\"" supervise "${server_logs[-1]}" \
                "$stage: the server on GPU $gpus" "${ends[@]}" "${command[@]}"
        ) &
        servers+=($!)
        server_gpus+=("$gpus")
        urls+=("http://127.0.0.1:$port")
    done
}

# Waits until every server answers. Prints the log of one that does not, and returns 1.
wait_for_servers() {
    local deadline=$((SECONDS + ${DEEPSPEC_SERVER_WAIT:-1800})) i
    for ((i = 0; i < ${#urls[@]}; i++)); do
        until python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/health", timeout=5)' "${urls[i]}" 2>/dev/null; do
            if ! kill -0 "${servers[i]}" 2>/dev/null || [ $SECONDS -ge $deadline ]; then
                echo "$stage: the server on GPU ${server_gpus[i]} has ended or does not answer; the end of its log (${server_logs[i]}):" >&2
                tail -n 20 "${server_logs[i]}" >&2
                failed_gpu=${server_gpus[i]}
                return 1
            fi
            sleep 1
        done
        kill -USR1 "${servers[i]}" 2>/dev/null || true
    done
}

# start_states LOG GPUS...: starts servers of hidden states and waits for them. The caller's $recipe_args name $states_folder, through which
# the states come.
start_states() {
    mkdir -p "$states_folder"
    kind=states start_servers "$@"
    wait_for_servers
}

# start_judged LOG EXPORT GPUS [GPUS]: starts a server with the drafter, and one without it if there are GPUs for both. EXPORT is the log of
# `checkpoint convert`. The addresses go to $judged as arguments of `deepspec-eval run`.
start_judged() {
    local log=$1 words=()
    shell_words "$(sed -n 's/.*serve it with: .* \(--speculative-config .*\)/\1/p' "$2" | tail -n 1)"
    if [ ${#words[@]} -lt 2 ]; then
        echo "$stage: $2 does not say how vLLM serves the drafter" >&2
        return 1
    fi
    kind=vllm start_servers "$log.drafter" "$3" -- "${words[@]}" --per-request-spec-decode-metrics detailed
    [ $# -lt 4 ] || kind=vllm start_servers "$log.baseline" "$4"
    wait_for_servers || return
    judged=(--server "${urls[0]}")
    [ $# -lt 4 ] || judged+=(--baseline-server "${urls[1]}")
}

# Ends all servers; one that ignores the signal is killed after 30 seconds.
end_servers() {
    [ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2>/dev/null || true
    local second
    for ((second = 0; second < 30 && $(jobs -rp | wc -l) > 0; second++)); do sleep 1; done
    [ ${#servers[@]} -eq 0 ] || kill -KILL "${servers[@]}" 2>/dev/null || true
    wait || true
    servers=() urls=() server_gpus=() server_logs=()
}
