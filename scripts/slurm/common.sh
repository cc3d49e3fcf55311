# shellcheck shell=bash
# Functions and variables that the batch scripts of the stages share. They source it from the folder of `sbatch`.
#
# Environment:
#   DEEPSPEC_BIN     folder of the programs (target/release; in a release bin)
#   DEEPSPEC_STATE   file with a line per start, stop and end: time, stage, task, job, event
#   DEEPSPEC_TASKS   number of tasks that share an array's work, if not all of them are submitted at once
#   DEEPSPEC_TARGET_SERVER     vllm: vLLM runs the target. By default it is deepspec
#   DEEPSPEC_TENSOR_PARALLEL   GPUs that hold one copy of the target in vLLM (1)
#   DEEPSPEC_STATES            online: train.sbatch computes states while it trains. By default it is cache

# shellcheck disable=SC2034  # the scripts use it
bin=target/release
[ -d "$bin" ] || [ ! -x bin/deepspec-train ] || bin=bin
bin=${DEEPSPEC_BIN:-$bin}
stage=${SLURM_JOB_NAME:-deepspec-pipeline}
stage=${stage#deepspec-}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

case ${DEEPSPEC_TARGET_SERVER:-deepspec}/${DEEPSPEC_TENSOR_PARALLEL:-1}/${DEEPSPEC_STATES:-cache} in
    deepspec/[1-9]*/cache | deepspec/[1-9]*/online | vllm/[1-9]*/cache | vllm/[1-9]*/online) ;;
    *)
        echo "$stage: expected DEEPSPEC_TARGET_SERVER deepspec or vllm, DEEPSPEC_TENSOR_PARALLEL from 1, DEEPSPEC_STATES cache or online" >&2
        exit 2
        ;;
esac

# Which share of the work this is: task I of N, or 0 of 1 outside an array.
task=0 tasks=1
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    task=$SLURM_ARRAY_TASK_ID
    tasks=${DEEPSPEC_TASKS:-$SLURM_ARRAY_TASK_COUNT}
    if [ -z "${DEEPSPEC_TASKS:-}" ] && [ "$((SLURM_ARRAY_TASK_MAX + 1))" != "$tasks" ] || [ "$task" -ge "$tasks" ]; then
        echo "$stage: this array is not 0-N; set DEEPSPEC_TASKS to the number of all shares, of which task $task is one" >&2
        exit 2
    fi
fi

# Adds a line to the state file, if there is one.
note() {
    [ -n "${DEEPSPEC_STATE:-}" ] || return 0
    local line
    line=$(printf '%s\t%s\t%s/%s\t%s\t%s' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$stage" "$task" "$tasks" "${SLURM_JOB_ID:-}" "$*")
    (flock 9 && printf '%s\n' "$line" >&9) 9>>"$DEEPSPEC_STATE"
}

# Says that the job has begun; the first thing that each does, the pipeline once it knows that it is the only one.
begun() { note "started, restart ${SLURM_RESTART_COUNT:-0}"; }

# Groups of the job's GPUs, but for the first $1, in $groups (servers.sh).
job_gpus() {
    local gpus first=${1:-0}
    IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-}"
    if [ ${#gpus[@]} -gt 0 ] && [ "$first" -ge ${#gpus[@]} ]; then
        echo "$stage: $first tasks leave none of ${#gpus[@]} GPUs to servers; give fewer tasks with --ntasks-per-node" >&2
    elif group_gpus "${gpus[@]:first}"; then
        return
    fi
    note "failed with code 2"
    exit 2
}

# Runs a function of servers.sh; the job fails where a server does not answer.
need_servers() {
    failed_gpu=
    "$@" && return
    note "failed: no server on GPU $failed_gpu"
    exit 1
}

# argument_of FLAG ARGUMENT...: prints the value of a flag.
argument_of() {
    local flag=$1 value='' previous=''
    shift
    for argument in "$@"; do
        [ "$previous" != "$flag" ] || value=$argument
        previous=$argument
    done
    printf '%s' "$value"
}

# serve_states STORAGE FIRST ARGUMENT...: starts vLLM servers of hidden states on the job's GPUs but for the first FIRST. ARGUMENTs name the
# recipe. $setting is its `data.states` with the servers, and $servers_log the beginning of the logs' names.
serve_states() {
    local storage=$1 first=$2
    states_folder=/dev/shm/deepspec-states-$SLURM_JOB_ID states_urls=() recipe_args=()
    use_vllm
    trap 'end_servers; rm -rf "$states_folder"' EXIT
    shift 2
    while [ $# -gt 1 ]; do
        case $1 in --config | --set) recipe_args+=("$1" "$2") ;; esac
        shift
    done
    states_setting "$storage"
    recipe_args+=(--set "$setting")
    job_gpus "$first"
    need_servers start_states "$servers_log" "${groups[@]}"
    states_urls=("${urls[@]}")
    states_setting "$storage"
}

# Prepares for servers of vLLM in this job. Their logs lie beside DEEPSPEC_STATE.
use_vllm() {
    # shellcheck disable=SC2034  # servers.sh uses it
    tensor_parallel=${DEEPSPEC_TENSOR_PARALLEL:-1}
    servers_log=$(dirname "${DEEPSPEC_STATE:-.}")/$stage-$SLURM_JOB_ID
    # shellcheck source=scripts/servers.sh
    . scripts/servers.sh
    # shellcheck source=scripts/stages.sh
    . scripts/stages.sh
    trap end_servers EXIT
}

# Runs a program as a step of the job, with a `{task}` in its arguments replaced by the task's number. Its code is in $status:
# 75 if it was told to stop, because the time is over or somebody else needs the machine, and goes on when it is run again.
step() {
    # A task that fails or dies ends the others at once. One that was stopped must not: that is kept in a file that all
    # machines see, and the step is a success.
    local stopped=$PWD/.deepspec-stopped-$SLURM_JOB_ID
    rm -f "$stopped"
    # shellcheck disable=SC2016  # the tasks expand it
    # Since Slurm 22.05 a step has one core for each task unless it says so itself.
    srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c '
        told= # by a signal; it waits for the program, which decides what that means
        trap "told=1" USR1 TERM
        mark=$1
        shift
        "$@"
        status=$?
        # 143 and 138: the program knows no better than to die of the signal, and goes on all the same.
        case $told$status in 75 | 175 | 1143 | 1138) touch "$mark" && status=0 ;; esac
        exit $status
    ' task "$stopped" "${@//\{task\}/$task}"
    status=$?
    [ ! -e "$stopped" ] || [ $status -ne 0 ] || status=75
    rm -f "$stopped"
}

# Ends the job with $status; where that is 75 it goes back to the queue first.
conclude() {
    case $status in
        0) note 'done' ;;
        75)
            note stopped
            # The last task of an array has the array's number for its own, by which Slurm would requeue all tasks. Where Slurm pre-empts, it
            # has requeued the job itself, and refuses.
            local job=$SLURM_JOB_ID
            [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
            scontrol requeue "$job"
            ;;
        *) note "failed with code $status" ;;
    esac
    exit "$status"
}
