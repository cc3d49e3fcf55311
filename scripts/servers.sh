# shellcheck shell=bash
# Model servers of this machine, one on each GPU; sourced by scripts/pipeline.sh and scripts/slurm/regenerate.sbatch.
#
# The caller sets: bin (folder of the programs), model, kind (deepspec, vllm or sglang), stage (name in messages).
# Environment:
#   DEEPSPEC_SERVER_ARGS   more arguments of a server, separated by blanks
#   DEEPSPEC_SERVER_WAIT   seconds that a server may take to load the model (1800)

servers=() urls=() server_gpus=() server_logs=()

# The command of a server on port $1, in $command.
server_command() {
    local more
    read -ra more <<<"${DEEPSPEC_SERVER_ARGS:-}"
    case $kind in
        deepspec) command=("$bin/deepspec-data" --quiet serve --model "$model" --port "$1" "${more[@]}") ;;
        vllm) command=(vllm serve "$model" --port "$1" "${more[@]}") ;;
        sglang) command=(python3 -m sglang.launch_server --model-path "$model" --port "$1" "${more[@]}") ;;
        *)
            echo "$stage: the server is \`$kind\`; expected deepspec, vllm or sglang" >&2
            exit 2
            ;;
    esac
}

# start_servers LOG GPU...: starts a server for each GPU (`none`: on the CPU) and fills servers and urls. Logs go to LOG.server-GPU.log.
start_servers() {
    local log=$1 gpu port command
    shift
    server_gpus=("$@")
    for gpu in "$@"; do
        port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
        server_command "$port"
        (
            [ "$gpu" = none ] || export CUDA_VISIBLE_DEVICES=$gpu
            # A server ends with the script, even if that is killed.
            ! command -v setpriv >/dev/null || command=(setpriv --pdeathsig TERM -- "${command[@]}")
            exec "${command[@]}" >"$log.server-$gpu.log" 2>&1
        ) &
        servers+=($!)
        server_logs+=("$log.server-$gpu.log")
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
    done
}

# Ends all servers; one that ignores the signal is killed after 30 seconds.
end_servers() {
    [ ${#servers[@]} -eq 0 ] || kill "${servers[@]}" 2>/dev/null || true
    local second
    for ((second = 0; second < 30 && $(jobs -rp | wc -l) > 0; second++)); do sleep 1; done
    [ ${#servers[@]} -eq 0 ] || kill -KILL "${servers[@]}" 2>/dev/null || true
    wait || true
    servers=() urls=()
}
