# shellcheck shell=bash
# Functions and variables that the batch scripts of the stages share. They source it from the folder of `sbatch`.
#
# Environment:
#   DEEPSPEC_BIN     folder of the programs (target/release; in a release bin)
#   DEEPSPEC_STATE   file with a line per start, stop and end: time, stage, task, job, event
#   DEEPSPEC_TASKS   number of tasks that share an array's work, if not all of them are submitted at once

# shellcheck disable=SC2034  # the scripts use it
bin=target/release
[ -d "$bin" ] || [ ! -x bin/deepspec-train ] || bin=bin
bin=${DEEPSPEC_BIN:-$bin}
stage=${SLURM_JOB_NAME:-deepspec-pipeline}
stage=${stage#deepspec-}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

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
