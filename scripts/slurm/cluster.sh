# shellcheck shell=bash
# A real Slurm on this machine alone, for tests: munged, slurmctld and slurmds that need neither systemd nor settings of
# their own. Source this file; it installs Slurm where it may.
#
#   start_slurm DIR NODES    starts NODES nodes of this machine's cores in two partitions, `all` and `urgent`, whose
#                            jobs pre-empt those of `all`; sets SLURM_CONF and slurm_daemons, the processes to end

install_slurm() {
    if command -v slurmctld >/dev/null && command -v munged >/dev/null; then return; fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "slurm: please install Slurm and munge (apt-get install slurm-wlm munge)" >&2
        return 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
}

slurm_daemons=()

# processes PATTERN: the numbers of this machine's processes whose command lines match it
processes() {
    local at words
    for at in /proc/[0-9]*; do
        mapfile -d '' -t words <"$at/cmdline" && [[ "${words[*]}" =~ $1 ]] && echo "${at#/proc/}"
    done 2>/dev/null || true
}

# hurry: requeued jobs, which Slurm lets wait two minutes, start at once; not before their former end is over, though: where it is
# reported late, Slurm takes it for the end of the new start. Nor within the second in which that was seen: Slurm counts whole ones, and a
# start in the second of the former end is taken for the one that was killed.
declare -A ended_at=()
hurry() {
    local id job reason now=$(date +%s)
    while read -r id job reason; do
        if [ "$reason" != BeginTime ] || [ -n "$(processes "slurmstepd: \\[$id\\.")" ]; then
            unset "ended_at[$id]"
        elif [ "$now" -gt "${ended_at[$id]:=$now}" ]; then
            scontrol update "JobId=$job" StartTime=now 2>/dev/null || true
            unset "ended_at[$id]"
        fi
    done < <(squeue --noheader --array --states=PENDING --format='%A %i %r')
}

start_slurm() {
    local work=$1 nodes=$2 host node attempt
    install_slurm
    host=$(hostname -s)
    mkdir -p "$work"/{state,spool,munge}
    dd if=/dev/urandom of="$work/munge/key" bs=128 count=8 status=none
    chmod 600 "$work/munge/key"
    chmod 711 "$work" "$work/munge"
    munged --foreground --force --key-file="$work/munge/key" --socket="$work/munge/socket" --pid-file="$work/munge/pid" \
        --log-file="$work/munge/log" --seed-file="$work/munge/seed" 2>"$work/munged.log" &
    slurm_daemons+=($!)
    cat >"$work/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
SlurmUser=root
SlurmctldPort=26817
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
MpiDefault=none
ReturnToService=2
CONF
    for ((node = 0; node < nodes; node++)); do
        echo "NodeName=node$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((26818 + node)) CPUs=$(env -u OMP_NUM_THREADS nproc) State=UNKNOWN" >>"$work/slurm.conf"
    done
    cat >>"$work/slurm.conf" <<CONF
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
CONF
    export SLURM_CONF=$work/slurm.conf
    slurmctld -D 2>/dev/null &
    slurm_daemons+=($!)
    for ((node = 0; node < nodes; node++)); do
        mkdir -p "$work/spool-node$node"
        slurmd -D -N "node$node" 2>/dev/null &
        slurm_daemons+=($!)
    done
    # `sinfo` waits for the controller by itself; the nodes follow.
    for ((attempt = 0; attempt < 240; attempt++)); do
        [ "$(sinfo --noheader --partition=all --states=idle --format=%D 2>/dev/null)" = "$nodes" ] && return
        sleep 0.25
    done
    sinfo --long >&2
    tail -n 5 "$work"/slurm*.log >&2
    return 1
}
